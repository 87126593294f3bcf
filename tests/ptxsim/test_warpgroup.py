"""wgmma, ldmatrix, stmatrix, mma.sync and local memory in kernels written as PTX, and planted faults."""

from pathlib import Path

import numpy as np
import product_cases
import ptx_kernels
import pytest
import wgmma_kernels
from wgmma_kernels import Form

from ptxsim.checks.monitor import Monitor
from ptxsim.machine.cluster import MachineFault
from ptxsim.machine.grid import Deadlock, Grid, Options
from ptxsim.ptx.program import Unsupported

pytestmark = pytest.mark.ptxsim

BLOCK = (128, 1, 1)
FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;",
)  # fmt: skip
PROXY_FENCE, BARRIER = "fence.proxy.async.shared::cta;", "bar.sync 0;"


def checked(seed: int = 0) -> Options:
    return Options(delay=500, seed=seed, poison=True, check_registers=True, monitor=Monitor)


def run(body: str, form: Form, seed: int = 0, options: Options | None = None) -> tuple[Grid, np.ndarray, np.ndarray]:
    """(grid, D, the product it should be) of a kernel body on matrices of small integers."""
    rng = np.random.default_rng(seed)
    k = form.k_steps * wgmma_kernels.STEP // wgmma_kernels.ELEMENT_BYTES[form.kind]
    a, b = wgmma_kernels.integers(rng, wgmma_kernels.M, k), wgmma_kernels.integers(rng, wgmma_kernels.N, k)
    memory = wgmma_kernels.stage(a, b, form.kind, is_b_transposed=form.is_b_transposed)
    fragments = wgmma_kernels.operand_fragments(a, form.kind)
    d = np.zeros((128, form.d_registers), np.uint32)
    grid = ptx_kernels.run(
        body, memory, fragments, d, options=options or checked(seed), block=BLOCK,
        shared_bytes=wgmma_kernels.STAGE_BYTES,
    )  # fmt: skip
    number = np.float32 if form.number == "f32" else np.float16
    return grid, wgmma_kernels.result_matrix(d, number), (a @ b.T * form.scale_a * form.scale_b).astype(number)


def kinds(grid: Grid) -> set[str]:
    return {finding.kind for finding in grid.findings}


# -------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("name", product_cases.OPERANDS)
@pytest.mark.parametrize("index", range(len(product_cases.FORMS)), ids=[str(form) for form in product_cases.FORMS])
def test_bits_are_those_of_an_h200(index: int, name: str) -> None:
    recorded = np.load(Path(__file__).with_name("hopper_products.npz"))[f"{index} {name}"]
    np.testing.assert_array_equal(product_cases.results(product_cases.FORMS[index], name, ptx_kernels.run), recorded)


@pytest.mark.parametrize(
    "form",
    [
        Form(),
        Form(a_in_registers=True),
        Form(is_b_transposed=True),
        Form(a_in_registers=True, is_b_transposed=True, scale_a=-1),
        Form(kind="f16", number="f16", scale_b=-1),
        Form(kind="f16", scale_a=-1, scale_b=-1),
        Form(kind="tf32"),
        Form(kind="tf32", a_in_registers=True),
        Form(kind="e4m3", a_in_registers=True),
        Form(kind="e5m2", number="f16"),
    ],
    ids=str,
)
def test_product(form: Form) -> None:
    """Four chained wgmmas give the exact product, with and without checks and delays."""
    body = wgmma_kernels.kernel(form)
    for options in (Options(), checked(1), checked(2)):
        grid, result, expected = run(body, form, options=options)
        np.testing.assert_array_equal(result, expected)
        assert not list(grid.findings)
        assert grid.num_mma == form.k_steps


def test_accumulation() -> None:
    form = Form()
    grid, result, expected = run(wgmma_kernels.kernel(form, accumulate=True), form)
    np.testing.assert_array_equal(result, expected + 1)
    assert not list(grid.findings)


def test_two_groups() -> None:
    """wait_group 1 leaves the newer group under way: the older one's registers may be used, the newer one's not."""
    form = Form(k_steps=1)
    second = wgmma_kernels.multiply(form, 0, True)
    for register in range(form.d_registers + 100, 99, -1):
        second = second.replace(f"%r{register}", f"%r{register + 100}")
    start = "\n".join(f"mov.b32 %r{200 + i}, 0f3F800000;" for i in range(form.d_registers))
    use = "\n".join(f"add.rn.f32 %r{100 + i}, %r{100 + i}, 0f40000000;" for i in range(form.d_registers))
    merge = "\n".join(f"add.rn.f32 %r{100 + i}, %r{100 + i}, %r{200 + i};" for i in range(form.d_registers))
    parts = [wgmma_kernels.setup(form), start, PROXY_FENCE, BARRIER, FENCE, wgmma_kernels.multiply(form, 0, False)]
    parts += [COMMIT, second, COMMIT, WAIT.replace("0;", "1;"), use]
    end = [merge, wgmma_kernels.finish(form)]
    for seed in range(3):
        grid, result, expected = run("\n".join([*parts, WAIT, *end]), form, seed)
        np.testing.assert_array_equal(result, 2 * expected + 3)
        assert not list(grid.findings)
    grid, _, _ = run("\n".join([*parts, *end]), form)
    assert "wgmma registers used before wait" in kinds(grid)


# ---------------------------------------------------------------------------------------------------------- faults


def without(text: str, form: Form, *, replacement: str = "") -> str:
    """The correct kernel with every occurrence of a line taken out."""
    body = wgmma_kernels.kernel(form)
    assert text in body
    return body.replace(text, replacement)


@pytest.mark.parametrize(
    ("form", "text", "replacement", "kind"),
    [
        (Form(), WAIT, "", "wgmma registers used before wait"),
        (Form(), COMMIT, "", "wgmma registers used before wait"),
        (Form(), WAIT, WAIT.replace("0;", "1;"), "wgmma registers used before wait"),
        (Form(), WAIT, "mov.b32 %r9, %r100;" + WAIT, "wgmma registers used before wait"),
        (Form(a_in_registers=True), WAIT, "mov.b32 %r16, 0;" + WAIT, "wgmma registers used before wait"),
        (Form(), PROXY_FENCE, "", "missing proxy fence"),
        (Form(), BARRIER, "", "race"),
        (Form(), WAIT, "st.shared.b32 [%r3+8192], %r1;" + WAIT, "race"),
        (Form(a_in_registers=True), FENCE, "", "wgmma registers changed without fence"),
        (Form(a_in_registers=True), FENCE, FENCE + "mov.b32 %r16, %r1;", "wgmma registers changed without fence"),
    ],
)
def test_fault(form: Form, text: str, replacement: str, kind: str) -> None:
    found = [kinds(run(without(text, form, replacement=replacement), form, seed)[0]) for seed in range(3)]
    assert all(kind in each for each in found), found


def test_reading_operand_registers_is_allowed() -> None:
    form = Form(a_in_registers=True)
    grid, _, _ = run(without(WAIT, form, replacement="mov.b32 %r9, %r16;" + WAIT), form)
    assert not list(grid.findings)


@pytest.mark.parametrize("others_wait", [True, False])
def test_wait_of_one_warp_says_nothing_of_others(others_wait: bool) -> None:
    """Warp 0 overwrites B behind a barrier: right only if all warps have waited before the barrier."""
    form = Form()
    wait = f"setp.lt.u32 %p1, %r1, {128 if others_wait else 32};\n@!%p1 bra SKIP;\n{WAIT}\nSKIP:\n{BARRIER}\n"
    store = "setp.lt.u32 %p2, %r1, 32;\n@%p2 st.shared.b32 [%r3+8192], %r1;\n"
    grid, result, expected = run(without(WAIT, form, replacement=wait + store + WAIT), form)
    np.testing.assert_array_equal(result, expected)
    assert kinds(grid) == (set() if others_wait else {"race"})


def test_own_rows_of_a_need_no_barrier() -> None:
    """Each warp writes its own rows of A: an order among the warps is needed for B only."""
    form = Form()
    write = (
        "mov.b32 %r8, 0; and.b32 %r9, %r1, 31; shr.u32 %r10, %r1, 5; shl.b32 %r10, %r10, 11;\n"
        "shl.b32 %r9, %r9, 6; add.s32 %r9, %r9, %r10; add.s32 %r9, %r9, %r2;\n"
        + "\n".join(f"st.shared.b32 [%r9+{4 * i}], %r8;" for i in range(16))
    )
    body = without(FENCE, form, replacement=f"{write}\n{PROXY_FENCE}\n{FENCE}")
    grid, result, _ = run(body, form)
    assert not list(grid.findings)
    assert not result.any()


def test_different_products() -> None:
    form = Form()
    body = without(FENCE, form, replacement=f"shr.u32 %r8, %r1, 5; cvt.u64.u32 %rd8, %r8; {FENCE}")
    with pytest.raises(MachineFault, match="different products"):
        run(body.replace("add.s64 %rd13, %rd11, 0;", "add.s64 %rd13, %rd11, %rd8;"), form)


def test_missing_warp() -> None:
    """A wait of three warps for a product that the fourth never issues."""
    form, skip = Form(), "setp.ge.u32 %p1, %r1, 96;\n@%p1 bra END;\n"
    with pytest.raises(Deadlock, match="wgmma.wait_group"):
        run(f"{without(FENCE, form, replacement=skip + FENCE)}\nEND: bar.sync 1; ret;", form)


def test_incomplete_warpgroup() -> None:
    with pytest.raises(MachineFault, match="four whole warps"):
        ptx_kernels.run(FENCE + COMMIT + WAIT + "ret;", block=(96, 1, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("wgmma.mma_async.sync", "wgmma.mma_async.sp.sync"),
        ("f32.bf16.bf16", "s32.s8.s8"),
        ("m64n64k16", "m64n72k16"),
    ],
)
def test_unsupported(old: str, new: str) -> None:
    form = Form()
    with pytest.raises(Unsupported):
        run(wgmma_kernels.kernel(form).replace(old, new), form)


# ---------------------------------------------------------------------------------------------------- matrix moves


MOVES = """
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; shl.b32 %r3, %r1, 4; add.s32 %r3, %r3, %r2;
    mul.wide.u32 %rd3, %r1, 16; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
"""
ALL_REGISTERS = "{%r20, %r21, %r22, %r23}"


def registers_of(count: int) -> str:
    return f"{{{', '.join(f'%r{20 + i}' for i in range(count))}}}"


def fragments_of(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """PTX ISA 9.7.14.5.15: lane l holds elements (l / 4, 2 (l % 4)) and the next, or those of the transpose.

    matrices: uint16 [matrices, 8, 8] → uint32 [32 lanes, matrices]"""
    words = np.zeros((32, len(matrices)), np.uint32)
    for lane in range(32):
        for number, matrix in enumerate(matrices.transpose(0, 2, 1) if transposed else matrices):
            low, high = (int(matrix[lane // 4, 2 * (lane % 4) + half]) for half in range(2))
            words[lane, number] = low | high << 16
    return words


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_moves(count: int, transposed: bool) -> None:
    """ldmatrix of rows in reversed order gives the documented fragments; stmatrix puts them back."""
    rows = np.random.default_rng(count).integers(0, 1 << 16, (32, 8), np.uint16)
    loaded, stored = np.zeros((32, 4), np.uint32), np.zeros((32, 8), np.uint16)
    trans, group = ".trans" if transposed else "", registers_of(count)
    body = f"""{MOVES}
        ld.param.u64 %rd6, [p2]; add.s64 %rd6, %rd6, %rd3;
        ld.global.v4.b32 {ALL_REGISTERS}, [%rd4]; st.shared.v4.b32 [%r3], {ALL_REGISTERS}; bar.sync 0;
        xor.b32 %r4, %r1, {8 * count - 1}; and.b32 %r4, %r4, {8 * count - 1}; shl.b32 %r4, %r4, 4;
        add.s32 %r4, %r4, %r2; mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {group}, [%r4]; bar.sync 0;
        st.global.v4.b32 [%rd5], {ALL_REGISTERS};
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 [%r4+512], {group}; bar.sync 0;
        setp.lt.u32 %p1, %r1, {8 * count}; @!%p1 bra END;
        ld.shared.v4.b32 {ALL_REGISTERS}, [%r3+512]; st.global.v4.b32 [%rd6], {ALL_REGISTERS};
        END: ret;"""
    grid = ptx_kernels.run(body, rows, loaded, stored, options=checked(), shared_bytes=1024)
    matrices = rows[: 8 * count][::-1].reshape(count, 8, 8)
    np.testing.assert_array_equal(loaded[:, :count], fragments_of(matrices, transposed))
    np.testing.assert_array_equal(stored[: 8 * count], rows[: 8 * count])
    assert not list(grid.findings)


def test_matrix_move_race() -> None:
    """Rows that another warp writes, without a barrier."""
    body = f"""{MOVES} xor.b32 %r4, %r3, 512; st.shared.v4.b32 [%r4], {{%r1, %r1, %r1, %r1}};
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {ALL_REGISTERS}, [%r3]; ret;"""
    grid = ptx_kernels.run(body, 0, 0, options=checked(), block=(64, 1, 1), shared_bytes=1024)
    assert kinds(grid) & {"race", "uninitialised read"}


def test_matrix_move_misaligned() -> None:
    body = f"{MOVES} ldmatrix.sync.aligned.m8n8.x4.shared.b16 {ALL_REGISTERS}, [%r3+8]; ret;"
    with pytest.raises(MachineFault, match="multiples of 16"):
        ptx_kernels.run(body, 0, 0, shared_bytes=1024)


def test_transpose_in_registers() -> None:
    words, result = np.arange(64, dtype=np.uint16), np.zeros(32, np.uint32)
    body = """ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
        add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3; ld.global.b32 %r2, [%rd1];
        movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2; st.global.b32 [%rd2], %r3; ret;"""
    ptx_kernels.run(body, words, result)
    np.testing.assert_array_equal(result.view(np.uint16), words.reshape(8, 8).T.ravel())


# ---------------------------------------------------------------------------------------------------- warp products


@pytest.mark.parametrize(
    ("kind", "shape", "number"),
    [
        ("bf16", "m16n8k16", "f32"),
        ("f16", "m16n8k16", "f16"),
        ("f16", "m16n8k8", "f32"),
        ("tf32", "m16n8k8", "f32"),
        ("tf32", "m16n8k4", "f32"),
        ("e4m3", "m16n8k32", "f32"),
    ],
)
def test_warp_product(kind: str, shape: str, number: str) -> None:
    """mma.sync with the fragments of the PTX ISA (9.7.14.5.7–11), g = l / 4, t = l % 4, e elements in a register."""
    rng, k, e = np.random.default_rng(3), int(shape[6:]), 4 // wgmma_kernels.ELEMENT_BYTES[kind]
    a, b, c = (wgmma_kernels.integers(rng, *size) for size in ((16, k), (8, k), (16, 8)))
    halves = k // (4 * e)
    lane, j = np.ogrid[:32, : 2 * halves]
    a_words = np.ascontiguousarray(wgmma_kernels.encoded(a, kind)).view(np.uint32)
    b_words = np.ascontiguousarray(wgmma_kernels.encoded(b, kind)).view(np.uint32)
    a_part = np.ascontiguousarray(a_words[lane // 4 + 8 * (j % 2), lane % 4 + 4 * (j // 2)])
    b_part = np.ascontiguousarray(b_words[lane // 4, lane % 4 + 4 * np.arange(halves)])
    i = np.arange(4)
    place = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
    real = np.float32 if number == "f32" else np.float16
    c_part = np.ascontiguousarray(c.astype(real)[place]).view(np.uint32)
    d_part = np.zeros_like(c_part)
    num_d = c_part.shape[1]
    lines = ["mov.u32 %r1, %tid.x;"]
    for index, (first, count) in enumerate(((20, 2 * halves), (30, halves), (40, num_d), (50, num_d))):
        lines.append(f"ld.param.u64 %rd1, [p{index}]; mul.wide.u32 %rd2, %r1, {4 * count}; add.s64 %rd3, %rd1, %rd2;")
        lines += [f"ld.global.b32 %r{first + n}, [%rd3+{4 * n}];" for n in range(count) if index < 3]
    a_text, b_text, c_text, d_text = (
        f"{{{', '.join(f'%r{first + n}' for n in range(count))}}}"
        for first, count in ((20, 2 * halves), (30, halves), (40, num_d), (50, num_d))
    )
    lines.append(
        f"mma.sync.aligned.{shape}.row.col.{number}.{kind}.{kind}.{number} {d_text}, {a_text}, {b_text}, {c_text};"
    )
    lines += [*(f"st.global.b32 [%rd3+{4 * n}], %r{50 + n};" for n in range(num_d)), "ret;"]
    ptx_kernels.run("\n".join(lines), a_part, b_part, c_part, d_part, options=checked())
    result = np.zeros((16, 8), real)
    result[place] = d_part.view(real)
    np.testing.assert_array_equal(result, a @ b.T + c)


# ---------------------------------------------------------------------------------------------------- local memory


LOCAL = """
    .local .align 16 .b8 __local_depot0[48];
    .reg .b64 %SP; .reg .b64 %SPL;
    mov.b64 %SPL, __local_depot0; cvta.local.u64 %SP, %SPL;
    ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
"""


def test_local_memory() -> None:
    """Every lane has its own array, reached through local and generic addresses, with an index in a register."""
    result = np.zeros(64, np.uint32)
    body = f"""{LOCAL}
        add.s32 %r2, %r1, 1000; add.s32 %r3, %r1, 2000;
        st.local.v2.b32 [%SPL+16], {{%r2, %r3}}; st.b32 [%SP+24], %r1;
        rem.u32 %r4, %r1, 3; mul.wide.u32 %rd3, %r4, 4; add.s64 %rd4, %SPL, %rd3; add.s64 %rd5, %SP, %rd3;
        ld.local.b32 %r5, [%rd4+16]; ld.b32 %r6, [%rd5+16]; xor.b32 %r6, %r6, %r5; or.b32 %r5, %r5, %r6;
        st.global.b32 [%rd1], %r5; ret;"""
    grid = ptx_kernels.run(body, result, options=checked(), block=(64, 1, 1))
    lanes = np.arange(64)
    np.testing.assert_array_equal(result, np.choose(lanes % 3, [lanes + 1000, lanes + 2000, lanes]))
    assert not list(grid.findings)


@pytest.mark.parametrize("text", ["ld.local.b32 %r5, [%SPL+48];", "ld.b32 %r5, [%SP+48];", "ld.local.b32 %r5, [%rd2];"])
def test_outside_local_memory(text: str) -> None:
    with pytest.raises(MachineFault, match="local address outside"):
        ptx_kernels.run(LOCAL + text + "ret;", np.zeros(32, np.uint32))
