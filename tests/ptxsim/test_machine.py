"""Warps, barriers, copies and faults, on kernels written as PTX text."""

import ctypes

import numpy as np
import pytest
import torture_kernel
from ptx_kernels import kernel_text, run

from ptxsim import Deadlock, Options
from ptxsim.checks.monitor import Monitor
from ptxsim.machine.barriers import BarrierMisuse
from ptxsim.machine.cluster import MachineFault
from ptxsim.machine.tensor_map import TensorMap
from ptxsim.ptx.program import Unsupported

pytestmark = [pytest.mark.ptxsim]
ORDERS = [None, *((delay, seed) for delay in (50, 800, 20_000) for seed in range(3))]
POINTER = "ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;"


def checked(order: tuple[int, int] | None = (800, 1), **options) -> Options:
    delay, seed = order or (None, 0)
    return Options(delay=delay, seed=seed, poison=True, check_registers=True, monitor=Monitor, **options)


def test_special_registers_of_a_grid_of_clusters():
    out = np.zeros((8, 64, 4), np.uint32)
    run(
        """ld.param.u64 %rd1, [p0]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank;
        mov.u32 %r4, %laneid; mad.lo.s32 %r5, %r1, 64, %r2; mul.wide.u32 %rd2, %r5, 16; add.s64 %rd1, %rd1, %rd2;
        mov.u32 %r6, %clusterid.x; st.global.v4.b32 [%rd1], {%r1, %r3, %r4, %r6}; ret;""",
        out, grid=(8, 1, 1), block=(64, 1, 1), cluster=(2, 1, 1), options=checked(),
    )  # fmt: skip
    for block in range(8):
        expected = [[block, block % 2, thread % 32, block // 2] for thread in range(64)]
        assert out[block].tolist() == expected


def test_divergent_branches_and_loops():
    """Each lane counts to its own number; the lanes meet again behind the loop."""
    out = np.zeros(32, np.uint32)
    run(
        f"""{POINTER} mov.u32 %r2, 0; mov.u32 %r3, 0;
        LOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra DONE; add.u32 %r2, %r2, 1; add.u32 %r3, %r3, %r2; bra LOOP;
        DONE: shfl.sync.idx.b32 %r4, %r3, 31, 31, 0xffffffff; sub.u32 %r5, %r4, %r3; st.global.u32 [%rd1], %r5; ret;""",
        out, options=checked(),
    )  # fmt: skip
    sums = np.arange(32) * (np.arange(32) + 1) // 2
    assert out.tolist() == (sums[31] - sums).tolist()


@pytest.mark.parametrize(
    "kind, expected",
    [("up", lambda v: [v[max(i - 3, 0)] if i >= 3 else v[i] for i in range(32)]),
     ("down", lambda v: [v[i + 3] if i < 29 else v[i] for i in range(32)]),
     ("bfly", lambda v: [v[i ^ 3] for i in range(32)]), ("idx", lambda v: [v[3]] * 32)],
)  # fmt: skip
def test_shuffles(kind, expected):
    out = np.zeros(32, np.uint32)
    clamp = 0 if kind == "up" else 31
    body = f"mul.lo.u32 %r2, %r1, 7; shfl.sync.{kind}.b32 %r3, %r2, 3, {clamp}, -1; st.global.u32 [%rd1], %r3; ret;"
    run(f"{POINTER} {body}", out)
    assert out.tolist() == expected([7 * lane for lane in range(32)])


def test_votes_elections_and_reductions():
    out = np.zeros(32 * 6, np.uint32)
    run(
        """ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 24; add.s64 %rd1, %rd1, %rd2;
        setp.lt.u32 %p1, %r1, 5; vote.sync.ballot.b32 %r2, %p1, -1; vote.sync.all.pred %p2, %p1, -1;
        vote.sync.any.pred %p3, %p1, -1; selp.u32 %r3, 1, 0, %p2; selp.u32 %r4, 1, 0, %p3;
        elect.sync %r5|%p4, -1; selp.u32 %r6, 1, 0, %p4;
        redux.sync.add.u32 %r7, %r1, -1; redux.sync.max.u32 %r8, %r1, -1;
        st.global.v2.b32 [%rd1], {%r2, %r3}; st.global.v2.b32 [%rd1+8], {%r4, %r6};
        st.global.v2.b32 [%rd1+16], {%r7, %r8}; ret;""",
        out, options=checked(),
    )  # fmt: skip
    rows = out.reshape(32, 6)
    assert (rows[:, [0, 1, 2, 4, 5]] == [31, 0, 1, 496, 31]).all() and rows[:, 3].tolist() == [1] + [0] * 31


def test_reductions_of_vectors():
    sums, halves = np.zeros(4, np.float32), np.zeros(8, np.float16)
    run(
        """ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1;
        mov.f32 %f2, 0f3F800000; mov.f32 %f3, 0f40000000; mov.f32 %f4, 0fBF800000; mov.b32 %r2, 0x3C004000;
        red.global.add.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};
        red.global.add.noftz.v4.f16x2 [%rd2], {%r2, %r2, %r2, %r2}; ret;""",
        sums, halves, options=checked(),
    )  # fmt: skip
    assert sums.tolist() == [496, 32, 64, -32]
    assert halves.tolist() == [64, 32] * 4
    body = "ld.param.u64 %rd1, [p0]; add.s64 %rd1, %rd1, 4; red.global.add.v4.f32 [%rd1], {%f1, %f1, %f1, %f1}; ret;"
    with pytest.raises(MachineFault, match="red of 16 bytes"):
        run(body, sums)


COPY = """
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mov.u32 %r1, dynamic; mov.u32 %r2, %tid.x;
    setp.ne.u32 %p1, %r2, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r1], 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd1], 1024, [%r1];
    READY: bar.sync 0;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT;
    shl.b32 %r3, %r2, 2; add.s32 %r4, %r1, %r3; ld.shared.b32 %r5, [%r4+1024]; add.u32 %r5, %r5, 1;
    st.shared.b32 [%r4+1024], %r5; fence.proxy.async.shared::cta; bar.sync 0; @%p1 bra DONE;
    add.s32 %r6, %r1, 1024; cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r6], 1024;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE: ret;
"""


def copy(body: str, options: Options) -> tuple:
    source, target = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    grid = run(body, source, target, block=(256, 1, 1), shared_bytes=4096, options=options)
    return (target == source + 1).all(), [finding.kind for finding in grid.findings]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_copy_there_and_back_is_right_and_silent(order):
    assert copy(COPY, checked(order)) == (True, [])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_copy_into_both_ctas_of_a_cluster(order):
    """Each sends one half to both, and each barrier hears of both halves."""
    source, out = np.arange(64, dtype=np.uint32), np.zeros((2, 64), np.uint32)
    grid = run(
        """ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mov.u32 %r1, dynamic; mov.u32 %r2, %tid.x;
        mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p1, %r2, 0; @%p1 bra READY; mbarrier.init.shared.b64 [%r1], 1;
        fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r1], 256;
        READY: barrier.cluster.arrive; barrier.cluster.wait; @%p1 bra WAIT;
        shl.b32 %r4, %r3, 7; add.s32 %r5, %r1, %r4; cvt.u64.u32 %rd3, %r4; add.s64 %rd1, %rd1, %rd3; mov.b16 %rs1, 3;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r5+256], [%rd1], 128, [%r1], %rs1;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT;
        shl.b32 %r6, %r2, 3; add.s32 %r7, %r1, %r6; ld.shared.v2.b32 {%r8, %r9}, [%r7+256];
        mad.lo.u32 %r10, %r3, 256, %r6; cvt.u64.u32 %rd4, %r10; add.s64 %rd2, %rd2, %rd4;
        st.global.v2.b32 [%rd2], {%r8, %r9}; barrier.cluster.arrive; barrier.cluster.wait; ret;""",
        source, out, grid=(2, 1, 1), cluster=(2, 1, 1), shared_bytes=1024, options=checked(order),
    )  # fmt: skip
    assert not list(grid.findings) and (out == source).all()


@pytest.mark.parametrize(
    "removed, kind",
    [("WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT;", "race"),
     ("fence.proxy.async.shared::cta;", "missing proxy fence"),
     ("fence.proxy.async.shared::cta; bar.sync 0;", "race"),
     ("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", "in flight at exit")],
    ids=["wait", "fence", "barrier", "wait_group"],
)  # fmt: skip
def test_what_is_missing_in_a_copy_is_found(removed, kind):
    assert removed in COPY
    found = [copy(COPY.replace(removed, ""), checked((20_000, seed)))[1] for seed in range(4)]
    assert any(kind in kinds for kinds in found)


def test_findings_at_exit_name_the_instruction():
    body = "mov.u32 %r1, dynamic;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;\nret;"
    line = kernel_text(body, []).partition("tcgen05.alloc")[0].count("\n") + 1
    said = [str(finding) for finding in run(body, shared_bytes=1024, options=checked()).findings]
    message = "leak: CTA (0, 0, 0) exits with 32 columns of tensor memory allocated from 0"
    assert said == [f"{message}: tcgen05.alloc at PTX line {line}"]
    body = COPY.replace("cp.async.bulk.wait_group 0;", "")
    grid = run(body, *np.zeros((2, 256), np.uint32), block=(256, 1, 1), shared_bytes=4096, options=checked((20_000, 0)))
    line = kernel_text(body, [0, 0]).partition("cp.async.bulk.global")[0].count("\n") + 1
    message = "in flight at exit: CTA (0, 0, 0) exits while 1 operations are under way, the first"
    assert [str(finding) for finding in grid.findings] == [f"{message}: bulk store at PTX line {line}"]


@pytest.mark.parametrize("expected, message", [(2048, "1024 bytes missing"), (512, "-512 bytes missing")])
def test_wrong_byte_counts_are_deadlocks_that_name_the_barrier(expected, message):
    with pytest.raises(Deadlock, match=message):
        copy(COPY.replace("[%r1], 1024;\n", f"[%r1], {expected};\n", 1), checked())


POLL = COPY.replace("try_wait", "test_wait")


@pytest.mark.parametrize("order", ORDERS[:4], ids=str)
def test_polling_for_a_copy(order):
    assert copy(POLL, checked(order)) == (True, [])


@pytest.mark.parametrize("delay", [None, 800])
def test_polling_for_what_never_comes_is_a_deadlock(delay, monkeypatch):
    """One byte too many is expected; every thread polls the barrier without sleeping."""
    monkeypatch.setattr("ptxsim.machine.grid.IDLE_ROUNDS", 2000)
    body = POLL.replace("[%r1], 1024;\n", "[%r1], 1025;\n", 1)
    with pytest.raises(Deadlock, match=r"waits for parity 0 of mbarrier at shared 0x400 \(.* 1 bytes missing\)"):
        copy(body, checked((delay, 0)))


@pytest.mark.parametrize(
    "body, error, message",
    [("bar.sync 0, 64; ret;", Deadlock, r"barrier 0 \(32 of 64 threads arrived\)"),
     ("mbarrier.arrive.shared.b64 %rd1, [%r1]; ret;", MachineFault, "no mbarrier was initialised"),
     ("mov.u32 %r1, dynamic; mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.shared.b64 %rd1, [%r1], 2; ret;",
      BarrierMisuse, "more arrivals"),
     ("mov.u32 %r1, dynamic; ld.shared.b32 %r2, [%r1+1000000]; ret;", MachineFault, "outside the CTA's window"),
     ("mov.u32 %r1, dynamic; ld.shared.b32 %r2, [%r1+2]; ret;", MachineFault, "misaligned"),
     ("mov.u64 %rd1, 0; ld.global.b32 %r2, [%rd1]; ret;", MachineFault, "null address"),
     ("mov.u64 %rd1, 0x123456789000; st.global.b32 [%rd1], 1; ret;", MachineFault, "outside every known tensor"),
     ("add.u32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra L; L: ret;", MachineFault, r"never written \(%p1\)"),
     ("trap;", RuntimeError, "trap"), ("frobnicate.b32 %r1, %r2; ret;", Unsupported, "frobnicate"),
     ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;", Unsupported,
      "mma.ws.*: no weight-stationary products"),
     ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3], %r2, %p1;", Unsupported,
      "mma.sp.*: no sparse products"),
     ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;",
      Unsupported, "block16.*: no scale factors of 16 elements"),
     ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;",
      NotImplementedError, "tcgen05.mma of kind 'mxf4'; supported: "),
     ("tcgen05.shift.cta_group::1.down [%r1];", Unsupported, "tcgen05.shift")],
    ids=lambda value: value.split()[0] if isinstance(value, str) else None,
)  # fmt: skip
def test_faults_name_the_place(body, error, message):
    with pytest.raises(error, match=message) as caught:
        run(body, shared_bytes=1024, options=Options(check_registers="never" in message))
    notes = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "PTX line" in notes


def test_an_unwritten_register_that_nothing_depends_on_is_no_fault():
    out = np.zeros(32, np.uint32)
    run(
        f"""{POINTER} add.u32 %r2, %r9, 1; setp.lt.u32 %p1, %r1, 99; selp.u32 %r3, 5, %r2, %p1;
        st.global.u32 [%rd1], %r3; ret;""",
        out, options=checked(),
    )  # fmt: skip
    assert (out == 5).all()


@pytest.mark.parametrize("order", ORDERS[:4], ids=str)
def test_distributed_shared_memory_and_the_cluster_barrier(order):
    """Each CTA stores into its neighbour's window, both meet, each reads its own."""
    out = np.zeros((2, 32), np.uint32)
    grid = run(
        """ld.param.u64 %rd1, [p0]; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %tid.x; mov.u32 %r3, dynamic;
        shl.b32 %r4, %r2, 2; add.u32 %r5, %r3, %r4; xor.b32 %r6, %r1, 1; mapa.shared::cluster.u32 %r7, %r5, %r6;
        mad.lo.u32 %r8, %r1, 100, %r2; st.shared::cluster.u32 [%r7], %r8;
        barrier.cluster.arrive; barrier.cluster.wait;
        ld.shared.u32 %r9, [%r5]; mad.lo.u32 %r10, %r1, 32, %r2; mul.wide.u32 %rd2, %r10, 4; add.s64 %rd1, %rd1, %rd2;
        st.global.u32 [%rd1], %r9; ret;""",
        out, grid=(2, 1, 1), cluster=(2, 1, 1), shared_bytes=1024, options=checked(order),
    )  # fmt: skip
    assert out.tolist() == [[100 + lane for lane in range(32)], list(range(32))] and not list(grid.findings)


def test_atomics_on_global_and_shared_memory():
    out, total = np.zeros(1, np.float32), np.zeros(2, np.uint32)
    run(
        """ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1;
        red.global.add.f32 [%rd1], %f1; atom.global.add.u32 %r2, [%rd2], 1; atom.global.max.u32 %r3, [%rd2+4], %r1;
        ret;""",
        out, total, block=(64, 1, 1), options=checked(),
    )  # fmt: skip
    assert out[0] == 2016 and total.tolist() == [64, 63]


def test_clusters_that_wait_for_each_other_need_to_run_together():
    """A lock that the second block opens: one after the other it deadlocks, together it runs."""
    body = """ld.param.u64 %rd1, [p0]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1; @%p1 bra OPEN;
        SPIN: atom.global.add.u32 %r2, [%rd1], 0; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN; ret;
        OPEN: red.global.add.u32 [%rd1], 1; ret;"""
    run(body, np.zeros(1, np.uint32), grid=(2, 1, 1), options=Options(delay=100, concurrent=True))


def test_a_wait_that_allows_a_group_waits_for_none_when_one_is_open():
    """wait_group 1 with a single group under way: the store may still read the buffer that is then overwritten."""
    body = """ld.param.u64 %rd1, [p0]; mov.u32 %r1, dynamic; mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 2;
        add.u32 %r4, %r1, %r3; st.shared.b32 [%r4], %r2; fence.proxy.async.shared::cta; bar.sync 0;
        setp.ne.u32 %p1, %r2, 0; @%p1 bra JOIN;
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 128; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group ALLOWED;
        JOIN: bar.sync 0; st.shared.b32 [%r4], 7; @%p1 bra DONE; cp.async.bulk.wait_group 0; DONE: ret;"""
    kinds = {}
    for allowed in "01":
        out = np.zeros(32, np.uint32)
        grids = [
            run(body.replace("ALLOWED", allowed), out, shared_bytes=1024, options=checked((20_000, s)))
            for s in range(3)
        ]
        kinds[allowed] = {finding.kind for grid in grids for finding in grid.findings}
    assert kinds == {"0": set(), "1": {"race"}}


@pytest.mark.parametrize("space", ["global", "shared"])
def test_a_tensor_map_that_the_kernel_changes(space):
    """The kernel points a map at another tensor, of other size, before it copies."""
    sources = [np.arange(64, dtype=np.uint32).reshape(8, 8) + 100 * i for i in (1, 2)]
    tensor_map = TensorMap(sources[0].ctypes.data, "u32", (8, 8), (4, 32), (8, 8), (1, 1), 0)
    memory = np.frombuffer(tensor_map.encode() + bytes(128), np.uint8).copy()
    memory = memory[-memory.ctypes.data % 64 :][:128]
    memory[...] = np.frombuffer(tensor_map.encode(), np.uint8)
    out = np.zeros(64, np.uint32)
    update = """tensormap.replace.tile.global_address.SPACE.b1024.b64 [AT], %rd2;
        tensormap.replace.tile.global_dim.SPACE.b1024.b32 [AT], 1, 3;"""
    if space == "global":
        update = update.replace("SPACE", "global").replace("AT", "%rd1")
    else:
        copy_in = "".join(
            f"ld.global.b64 %rd20, [%rd1+{8 * i}]; st.shared.b64 [%r1+{512 + 8 * i}], %rd20;\n" for i in range(16)
        )
        publish = (
            "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r9], 128;"
        )
        update = (
            copy_in + "add.u32 %r9, %r1, 512; " + update.replace("SPACE", "shared::cta").replace("AT", "%r9") + publish
        )
    run(
        f"""ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2]; mov.u32 %r1, dynamic;
        mov.u32 %r2, %tid.x; {update} fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;
        setp.ne.u32 %p1, %r2, 0; @%p1 bra READY; mbarrier.init.shared.b64 [%r1+256], 1;
        mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r1+256], 256;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r1], [%rd1, {{0, 0}}], [%r1+256];
        READY: bar.sync 0; WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+256], 0; @!%p2 bra WAIT;
        shl.b32 %r3, %r2, 3; add.u32 %r4, %r1, %r3; ld.shared.v2.b32 {{%r5, %r6}}, [%r4]; cvt.u64.u32 %rd5, %r3;
        add.s64 %rd6, %rd3, %rd5; st.global.v2.b32 [%rd6], {{%r5, %r6}}; ret;""",
        memory, sources[1], out, shared_bytes=1024, options=checked(),
    )  # fmt: skip
    expected = sources[1].copy()
    expected[3:] = 0
    assert out.tolist() == expected.ravel().tolist()


@pytest.mark.parametrize("seed", range(4))
def test_torture_kernel(seed):
    """A kernel that also runs on hardware (test_against_hardware.py): exact, and nothing is found."""
    grids = []

    def runner(*arguments, **launch):
        grids.append(run(*arguments, **launch))

    to_address = lambda array: (array, array.ctypes.data, lambda into: None)  # noqa: E731
    actual = torture_kernel.run(runner, to_address, options=checked((500, seed)))
    expected = torture_kernel.expected()
    for name in ("out", "sums", "words"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), name)
    assert not list(grids[0].findings)


def test_host_memory_may_lie_low():
    """As low as shared addresses, as the heap of a program that is not position-independent does."""
    memory = mmap_at(0x0A3A0000)
    values = np.frombuffer(memory, np.uint32)[:32]
    run(
        f"""{POINTER} st.global.u32 [%rd1], %r1; ld.u32 %r2, [%rd1]; atom.add.u32 %r3, [%rd1], %r2; ret;""",
        values, options=checked(),
    )  # fmt: skip
    assert values.tolist() == [2 * lane for lane in range(32)]


def mmap_at(address: int, size: int = 1 << 16) -> ctypes.Array:
    """Fresh memory at a fixed address."""
    mmap = ctypes.CDLL(None).mmap
    mmap.restype, mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    readable_and_writable, private_anonymous_no_replace = 3, 0x100022
    found = mmap(address, size, readable_and_writable, private_anonymous_no_replace, -1, 0)
    if found != address:
        pytest.skip(f"something else lies at {address:#x}")
    return (ctypes.c_uint8 * size).from_address(found)
