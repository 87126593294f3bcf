"""One PTX kernel that uses TMA, mbarriers, swizzles and a cluster of two in as many ways as fit, on integers.

Each CTA loads half of every tile and multicasts it to both, through a ring of stages whose barriers count both CTAs'
warps; then stores and reduces boxes that lie partly outside their tensors, and exchanges words with its peer by
st.async and by a bulk copy. Every number is an exact integer, so hardware and simulator must agree bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim.machine.tensor_map import TensorMap

THREADS, CONSUMERS = 160, 128
STAGES, TILES = 3, 10
COLUMNS, HALF_ROWS = 32, 8  # words of a row (128 bytes), rows that one CTA loads of a tile
TILE_ROWS = 2 * HALF_ROWS
FIRST_ROW = -5  # of the first tile: above the tensor, as the last is below
IN_ROWS, OUT_SHAPE, SUMS_SHAPE = 140, (24, 56), (20, 32)
HALF_BYTES, TILE_BYTES = HALF_ROWS * COLUMNS * 4, TILE_ROWS * COLUMNS * 4
STAGING, EXCHANGE, BARRIERS = STAGES * TILE_BYTES, (STAGES + 2) * TILE_BYTES, (STAGES + 3) * TILE_BYTES
FULL, EMPTY, SENT, COPIED = (BARRIERS + 8 * i for i in (0, STAGES, 2 * STAGES, 2 * STAGES + 1))
SHARED_BYTES = BARRIERS + 128
LAUNCH = {"grid": (2, 1, 1), "block": (THREADS, 1, 1), "cluster": (2, 1, 1), "shared_bytes": SHARED_BYTES}
WAIT = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"


def wait(label: str, address: str, parity: str) -> str:
    return f"{label}: {WAIT} %p1, [{address}], {parity}; @!%p1 bra {label};"


def ring_address(register: str, first: int) -> str:
    """The barrier of stage %r10."""
    return f"shl.b32 {register}, %r10, 3; add.u32 {register}, {register}, %r1; add.u32 {register}, {register}, {first};"


NEXT_STAGE = f"""
    add.u32 %r10, %r10, 1; add.u32 %r12, %r12, 1; setp.eq.u32 %p2, %r10, {STAGES};
    @%p2 mov.u32 %r10, 0; @%p2 xor.b32 %r11, %r11, 1;
"""

SETUP = f"""
    ld.param.u64 %rd20, [p3]; mov.u32 %r1, dynamic; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank;
    mov.b64 %rd21, p0; cvta.param.u64 %rd21, %rd21; mov.b64 %rd22, p1; cvta.param.u64 %rd22, %rd22;
    mov.b64 %rd23, p2; cvta.param.u64 %rd23, %rd23;
    xor.b32 %r4, %r3, 1; shr.u32 %r5, %r2, 5; and.b32 %r6, %r2, 31; setp.eq.u32 %p60, %r6, 0;
    setp.ne.u32 %p10, %r2, 0; @%p10 bra INITIALISED;
    {" ".join(f"mbarrier.init.shared::cta.b64 [%r1+{FULL + 8 * i}], 1;" for i in range(STAGES))}
    {" ".join(f"mbarrier.init.shared::cta.b64 [%r1+{EMPTY + 8 * i}], 8;" for i in range(STAGES))}
    mbarrier.init.shared::cta.b64 [%r1+{SENT}], 1; mbarrier.init.shared::cta.b64 [%r1+{COPIED}], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 %rd1, [%r1+{SENT}], {4 * CONSUMERS};
    mbarrier.arrive.expect_tx.shared::cta.b64 %rd1, [%r1+{COPIED}], {4 * CONSUMERS};
    INITIALISED: bar.warp.sync -1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r12, 0;
    setp.lt.u32 %p11, %r2, {CONSUMERS}; @%p11 bra CONSUME;
"""

PRODUCE = f"""
    setp.ne.u32 %p12, %r2, {CONSUMERS}; @%p12 bra PRODUCED;
    PRODUCER:
    {ring_address("%r20", FULL)} {ring_address("%r21", EMPTY)}
    xor.b32 %r13, %r11, 1;
    {wait("PRODUCER_WAIT", "%r21", "%r13")}
    mbarrier.arrive.expect_tx.shared::cta.b64 %rd1, [%r20], {TILE_BYTES};
    mad.lo.u32 %r22, %r10, {TILE_BYTES}, %r1; mad.lo.u32 %r22, %r3, {HALF_BYTES}, %r22;
    mul.lo.u32 %r23, %r12, {TILE_ROWS}; mad.lo.u32 %r23, %r3, {HALF_ROWS}, %r23; add.s32 %r23, %r23, {FIRST_ROW};
    mov.u32 %r24, 0; mov.u16 %rs1, 3;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [%r22], [%rd21, {{%r24, %r23}}], [%r20], %rs1;
    {NEXT_STAGE}
    setp.lt.u32 %p3, %r12, {TILES}; @%p3 bra PRODUCER;
    PRODUCED: bra JOIN;
"""

_WORDS = TILE_BYTES // 4 // CONSUMERS  # of a tile that a thread reads: word 128 i + t, row 4 i + t / 32, column t % 32
_READ = "\n".join(
    f"""
    add.u32 %r30, %r5, {4 * i}; and.b32 %r31, %r30, 7; shr.u32 %r32, %r6, 2; xor.b32 %r32, %r32, %r31;
    shl.b32 %r32, %r32, 4; mad.lo.u32 %r32, %r30, 128, %r32; and.b32 %r33, %r6, 3; shl.b32 %r33, %r33, 2;
    add.u32 %r32, %r32, %r33; add.u32 %r32, %r32, %r22; ld.shared.u32 %r34, [%r32];
    mad.lo.u32 %r{100 + i}, %r{100 + i}, 3, %r34;"""
    for i in range(_WORDS)
)
CONSUME = f"""
    CONSUME: {" ".join(f"mov.u32 %r{100 + i}, 0;" for i in range(_WORDS))}
    CONSUMER:
    {ring_address("%r20", FULL)} {ring_address("%r21", EMPTY)}
    {wait("CONSUMER_WAIT", "%r20", "%r11")}
    mad.lo.u32 %r22, %r10, {TILE_BYTES}, %r1;
    {_READ}
    bar.warp.sync -1;
    mapa.shared::cluster.u32 %r24, %r21, %r4; mapa.shared::cluster.u32 %r25, %r21, %r3;
    @%p60 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r24];
    @%p60 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r25];
    {NEXT_STAGE}
    setp.lt.u32 %p3, %r12, {TILES}; @%p3 bra CONSUMER;
"""

# Two boxes of 16 columns, swizzle 64: chunk c of row r lies at chunk c XOR r / 2 % 4.
_STAGE = "\n".join(
    f"""
    add.u32 %r30, %r5, {4 * i}; shr.u32 %r31, %r30, 1; and.b32 %r31, %r31, 3; shr.u32 %r32, %r6, 2;
    and.b32 %r32, %r32, 3;
    xor.b32 %r32, %r32, %r31; shl.b32 %r32, %r32, 4; mad.lo.u32 %r32, %r30, 64, %r32;
    shr.u32 %r33, %r6, 4; mad.lo.u32 %r32, %r33, {TILE_BYTES // 2}, %r32; and.b32 %r33, %r6, 3;
    mad.lo.u32 %r32, %r33, 4, %r32; add.u32 %r32, %r32, %r1; st.shared.u32 [%r32+{STAGING}], %r{100 + i};"""
    for i in range(_WORDS)
)  # fmt: skip
_BOX = "cp{kind}.async.bulk.tensor.2d.global.shared::cta{sum}.bulk_group [{map}, {{%r40, %r41}}], [%r42];"
STORE = f"""
    {_STAGE}
    fence.proxy.async.shared::cta; bar.sync 1, {CONSUMERS};
    @%p10 bra STORED;
    mul.lo.u32 %r40, %r3, 32; add.u32 %r40, %r40, 4; mul.lo.u32 %r41, %r3, 12;
    add.u32 %r42, %r1, {STAGING};
    {_BOX.format(kind="", sum=".tile", map="%rd22")}
    add.u32 %r40, %r40, 16; add.u32 %r42, %r42, {TILE_BYTES // 2};
    {_BOX.format(kind="", sum=".tile", map="%rd22")}
    cp.async.bulk.commit_group; mov.u32 %r40, 4; mov.u32 %r41, 7;
    {_BOX.format(kind=".reduce", sum=".add.tile", map="%rd23")}
    sub.u32 %r42, %r42, {TILE_BYTES // 2}; mov.u32 %r40, 24; mov.u32 %r41, 0;
    {_BOX.format(kind=".reduce", sum=".add.tile", map="%rd23")}
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 1; cp.async.bulk.wait_group 0;
    STORED: bar.warp.sync -1;
"""

EXCHANGE_WORDS = f"""
    mad.lo.u32 %r50, %r2, 4, %r1; mapa.shared::cluster.u32 %r51, %r50, %r4;
    add.u32 %r52, %r1, {SENT}; mapa.shared::cluster.u32 %r52, %r52, %r4;
    add.u32 %r53, %r100, %r3;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r51+{EXCHANGE}], %r53, [%r52];
    add.u32 %r54, %r1, {SENT};
    {wait("SENT_WAIT", "%r54", "0")}
    ld.shared.u32 %r55, [%r50+{EXCHANGE}];
    add.u32 %r55, %r55, %r101; st.shared.u32 [%r50+{EXCHANGE + 512}], %r55;
    fence.proxy.async.shared::cta; bar.sync 1, {CONSUMERS};
    @%p10 bra SENT_ALL;
    add.u32 %r56, %r1, {EXCHANGE + 512}; add.u32 %r57, %r1, {EXCHANGE + 1024};
    mapa.shared::cluster.u32 %r57, %r57, %r4; add.u32 %r58, %r1, {COPIED}; mapa.shared::cluster.u32 %r58, %r58, %r4;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r57], [%r56], 512, [%r58];
    add.s64 %rd24, %rd20, 1024;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd24], [%r56], 512;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    SENT_ALL: bar.warp.sync -1;
    add.u32 %r54, %r1, {COPIED};
    {wait("COPIED_WAIT", "%r54", "0")}
    ld.shared.u32 %r55, [%r50+{EXCHANGE + 1024}];
    mad.lo.u32 %r59, %r3, {CONSUMERS}, %r2; mul.wide.u32 %rd25, %r59, 4; add.s64 %rd25, %rd20, %rd25;
    st.global.u32 [%rd25], %r55;
    JOIN: bar.warp.sync -1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret;
"""
BODY = SETUP + PRODUCE + CONSUME + STORE + EXCHANGE_WORDS


@dataclass
class Result:
    out: np.ndarray  # uint32 [24, 56]
    sums: np.ndarray  # uint32 [20, 32]
    words: np.ndarray  # uint32 [384]: what each CTA received, and the sum of what both sent


def run(runner: Any, to_address: Any, **options: Any) -> Result:
    """runner: `ptx_kernels.run` or `cuda_driver.run`. to_address: array → (what keeps it alive, address, back)."""
    rng = np.random.default_rng(7)
    source = rng.integers(0, 1 << 32, (IN_ROWS, COLUMNS), dtype=np.uint32)
    result = Result(*(rng.integers(0, 1 << 32, shape, dtype=np.uint32) for shape in (OUT_SHAPE, SUMS_SHAPE)),
                    np.zeros(3 * CONSUMERS, np.uint32))  # fmt: skip
    places = [to_address(each) for each in (source, result.out, result.sums)]
    maps = [
        TensorMap(address, "u32", (each.shape[1], each.shape[0]), (4, 4 * each.shape[1]), box, (1, 1), swizzle).encode()
        for (_, address, _), each, box, swizzle in zip(
            places, (source, result.out, result.sums),
            ((COLUMNS, HALF_ROWS), (16, TILE_ROWS), (16, TILE_ROWS)), (128, 64, 64), strict=True,
        )
    ]  # fmt: skip
    runner(BODY, *maps, result.words, **LAUNCH, **options)
    for (_, _, back), array in zip(places[1:], (result.out, result.sums), strict=True):
        back(array)
    return result


def expected() -> Result:
    """The same with numpy."""
    rng = np.random.default_rng(7)
    source = rng.integers(0, 1 << 32, (IN_ROWS, COLUMNS), dtype=np.uint32)
    out, sums = (rng.integers(0, 1 << 32, shape, dtype=np.uint32) for shape in (OUT_SHAPE, SUMS_SHAPE))
    padded = np.zeros((TILES * TILE_ROWS, COLUMNS), np.uint32)
    padded[-FIRST_ROW : -FIRST_ROW + IN_ROWS] = source[: TILES * TILE_ROWS + FIRST_ROW]
    tile = np.zeros((TILE_ROWS, COLUMNS), np.uint32)
    for rows in padded.reshape(TILES, TILE_ROWS, COLUMNS):
        tile = tile * np.uint32(3) + rows

    def box(target: np.ndarray, values: np.ndarray, x: int, y: int, *, adds: bool) -> None:
        rows, columns = np.arange(y, y + values.shape[0]), np.arange(x, x + values.shape[1])
        inside = np.ix_((rows >= 0) & (rows < target.shape[0]), (columns >= 0) & (columns < target.shape[1]))
        place = np.ix_(rows[inside[0].ravel()], columns[inside[1].ravel()])
        target[place] = values[inside] + (target[place] if adds else 0)

    words = np.zeros(3 * CONSUMERS, np.uint32)
    first, second = tile.reshape(-1)[:CONSUMERS], tile.reshape(-1)[CONSUMERS : 2 * CONSUMERS]
    for rank in range(2):
        for half in range(2):
            values = tile[:, 16 * half : 16 * half + 16]
            box(out, values, 32 * rank + 4 + 16 * half, 12 * rank, adds=False)
            box(sums, values, *((24, 0), (4, 7))[half], adds=True)
        sent = first + np.uint32(rank) + second  # by CTA 1 - rank, from what this one sent it
        words[CONSUMERS * rank : CONSUMERS * (rank + 1)] = sent
        words[2 * CONSUMERS :] += sent
    return Result(out, sums, words)
