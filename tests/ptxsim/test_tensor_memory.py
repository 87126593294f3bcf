"""tcgen05.ld and .st in every shape: layouts against CuTe's, ways there and back through compiled kernels, reductions.

CuTe's layouts are an account of the hardware's that is independent of the table in `ptxsim/machine/fragments.py`. In
the kernels, the compiler of cutlass-dsl chooses addresses, repetitions and immHalfSplitoff.
"""

import ast
import itertools

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.cute.nvgpu import tcgen05
from ptx_kernels import run
from tensor_memory_kernels import COLUMNS, ROWS, through_tensor_memory

import ptxsim
from ptxsim import Options
from ptxsim.checks.monitor import Monitor
from ptxsim.machine.cluster import TMEM_COLUMNS, MachineFault
from ptxsim.machine.fragments import fragment
from ptxsim.ptx.program import Unsupported

pytestmark = pytest.mark.ptxsim
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # of .x1
CHECKED = Options(delay=800, seed=1, poison=True, check_registers=True, monitor=Monitor)


# ------------------------------------------------------------------------------------------- against CuTe


def offsets(layout: str) -> np.ndarray:
    """Where each value of each thread is, by a layout "(threads, values):(strides)". → [threads, values]"""

    def positions(shape, stride) -> list[int]:
        if isinstance(shape, int):
            return [stride * index for index in range(shape)]
        modes = [positions(*mode) for mode in zip(shape, stride, strict=True)]
        return [sum(chosen) for chosen in itertools.product(*reversed(modes))]  # the first mode moves fastest

    threads, values = (positions(*mode) for mode in zip(*map(ast.literal_eval, layout.split(":")), strict=True))
    return np.array(threads)[:, None] + np.array(values)


@pytest.fixture(scope="module")
def layouts() -> dict[tuple[str, str, int, bool], str]:
    """(ld or st, shape, repetitions, packed) → CuTe's layout of an instruction's registers."""
    found = {}

    def add(shape: str, repeat: tcgen05.Repetition, is_packed: bool) -> None:
        kind = cutlass.Float16 if is_packed else cutlass.Float32
        pack = tcgen05.Pack.PACK_16b_IN_32b if is_packed else tcgen05.Pack.NONE
        unpack = tcgen05.Unpack.UNPACK_32b_IN_16b if is_packed else tcgen05.Unpack.NONE
        load = cute.make_copy_atom(getattr(tcgen05, f"Ld{shape}Op")(repeat, pack), kind)
        store = cute.make_copy_atom(getattr(tcgen05, f"St{shape}Op")(repeat, unpack), kind)
        found["ld", shape, repeat.value, is_packed] = str(load.layout_dst_tv)
        found["st", shape, repeat.value, is_packed] = str(store.layout_src_tv)

    def add_all() -> None:
        for shape, repeat, is_packed in itertools.product(REGISTERS, tcgen05.Repetition, (False, True)):
            if repeat.value * REGISTERS[shape] <= 128:
                add(shape, repeat, is_packed)

    @cute.jit
    def trace():
        add_all()

    with ptxsim.simulate("sm_100a"):
        cute.compile(trace)
    return found


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("shape", REGISTERS)
@pytest.mark.parametrize("operation", ["ld", "st"])
def test_layouts_are_those_of_cute(layouts, operation, shape, is_packed):
    """CuTe numbers elements along the rows; the two halves of 16x32bx2 are neighbours there."""
    seen = [repeat for kind, name, repeat, packed in layouts if (kind, name, packed) == (operation, shape, is_packed)]
    assert seen == [repeat for repeat in (1, 2, 4, 8, 16, 32, 64, 128) if repeat * REGISTERS[shape] <= 128]
    for repeat in seen:
        num_registers = repeat * REGISTERS[shape]
        pack = ["pack::16b" if operation == "ld" else "unpack::16b"] if is_packed else []
        per_register = 2 if is_packed else 1
        split = repeat * per_register if shape == "16x32bx2" else 0
        cells = fragment(["tcgen05", operation, shape, f"x{repeat}", *pack, "b32"], num_registers, split).cells
        expected = offsets(layouts[operation, shape, repeat, is_packed])  # [lanes, values]
        width = 32 * num_registers * per_register // (32 if shape == "32x32b" else 16)
        actual = cells.reshape(num_registers, 32, per_register).transpose(1, 0, 2).reshape(32, -1)
        assert (actual // TMEM_COLUMNS * width + actual % TMEM_COLUMNS == expected).all(), repeat


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("store, load", itertools.pairwise([*REGISTERS, "32x32b"]))
def test_there_in_one_shape_and_back_in_another(store, load, is_packed):
    out, opcodes = through_tensor_memory(store, load, is_packed=is_packed)
    assert torch.equal(out, torch.arange(ROWS * COLUMNS, dtype=out.dtype).view(ROWS, COLUMNS))
    packs = (".pack::16b", ".unpack::16b") if is_packed else ("", "")
    assert opcodes == {
        f"tcgen05.ld.sync.aligned.{load}.x2{packs[0]}.b32", f"tcgen05.st.sync.aligned.{store}.x2{packs[1]}.b32",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------- hand-written

HEAD = """mov.u32 %r1, dynamic; mov.u32 %r2, %tid.x; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; ld.shared.b32 %r3, [%r1];
    mul.wide.u32 %rd3, %r2, 16; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd1];"""
TAIL = """st.global.v4.b32 [%rd2], {%r8, %r9, %r10, %r11};
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32; ret;"""
STORE = "tcgen05.st.sync.aligned.32x32b.x4.b32 [%r3], {%r4, %r5, %r6, %r7}; tcgen05.wait::st.sync.aligned;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r8, %r9, %r10, %r11}, [%r3]; tcgen05.wait::ld.sync.aligned;"


def moved(code: str, values: np.ndarray) -> np.ndarray:
    """uint32 [32, 4] → [32, 4]: each lane's values in %r4 … %r7, results in %r8 … %r11; one warp, 32 columns at %r3."""
    out = np.zeros((32, 4), np.uint32)
    grid = run(HEAD + code + TAIL, values, out, shared_bytes=1024, options=CHECKED)
    assert not list(grid.findings)
    return out


def test_packing_takes_the_low_halves_of_two_columns():
    values = np.random.default_rng(0).integers(0, 1 << 32, (32, 4), np.uint32)
    code = """tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%r8, %r9}, [%r3]; tcgen05.wait::ld.sync.aligned;
        tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r3], {%r4, %r5}; tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r10, %r11}, [%r3]; tcgen05.wait::ld.sync.aligned;"""
    out, low = moved(STORE + code, values), values & 0xFFFF
    assert (out[:, :2] == np.stack([low[:, 0] | low[:, 1] << 16, low[:, 2] | low[:, 3] << 16], 1)).all()
    assert (out[:, 2:] == np.stack([low[:, 0], values[:, 0] >> 16], 1)).all()


def test_sixteen_rows_from_lane_sixteen_and_a_wide_split():
    """Lanes 16 … 31 of tensor memory, columns 0 and 1 for the lower half of the warp, 2 and 3 for the upper."""
    values = np.arange(128, dtype=np.uint32).reshape(32, 4)
    code = """add.u32 %r12, %r3, 0x100000;
        tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%r8, %r9}, [%r12], 2; tcgen05.wait::ld.sync.aligned;
        mov.b32 %r10, 0; mov.b32 %r11, 0;"""
    assert (moved(STORE + code, values)[:, :2] == np.concatenate([values[16:, :2], values[16:, 2:]])).all()


FLOATS = np.array(
    [
        [1, -3, 2, 0],
        [-0.0, 0.0, -0.0, -0.0],
        [np.nan, 5, -7, 1],
        [np.nan] * 4,
        [-np.inf, np.inf, 3, -4],
        [-1, -2, -9, -5],
    ],
    np.float32,
)
REDUCED = {  # by hand: of every row of FLOATS
    "max.f32": [2, 0.0, 5, None, np.inf, -1],
    "min.f32": [-3, -0.0, -7, None, -np.inf, -9],
    "max.abs.f32": [3, 0.0, 7, None, np.inf, 9],
    "min.abs.f32": [0, 0.0, 1, None, 3, 1],
    "max.NaN.f32": [2, 0.0, None, None, np.inf, -1],
    "min.abs.NaN.f32": [0, 0.0, None, None, 3, 1],
}


@pytest.mark.parametrize("operation", REDUCED)
def test_loads_that_reduce_floats(operation):
    values = np.resize(FLOATS, (32, 4)).view(np.uint32)
    code = f"""tcgen05.ld.red.sync.aligned.32x32b.x4.{operation} {{%r9, %r10, %r11, %r12}}, %r8, [%r3];
        tcgen05.wait::ld.sync.aligned; xor.b32 %r9, %r9, %r4;"""
    out = moved(STORE + code, values)
    expected = [0x7FFFFFFF if each is None else int(np.float32(each).view(np.uint32)) for each in REDUCED[operation]]
    assert out[:, 0].tolist() == np.resize(expected, 32).tolist()
    assert (out[:, 1] == 0).all() and (out[:, 2:] == values[:, 1:3]).all()


@pytest.mark.parametrize("operation", ["min.u32", "min.s32", "s32.min"])  # the ISA's example has the type first
def test_loads_that_reduce_integers_in_halves(operation):
    values = np.random.default_rng(1).integers(0, 1 << 32, (32, 4), np.uint32)
    code = f"""tcgen05.ld.red.sync.aligned.16x32bx2.x2.{operation} {{%r9, %r10}}, %r8, [%r3], 2;
        tcgen05.wait::ld.sync.aligned; mov.b32 %r11, 0;"""
    halves = np.concatenate([values[:16, :2], values[:16, 2:]])
    out = moved(STORE + code, values)
    assert (out[:, 1:3] == halves).all()
    assert (out[:, 0] == halves.view(np.int32 if "s32" in operation else np.uint32).min(1).view(np.uint32)).all()


def test_a_wait_for_a_wide_split_is_missing():
    """The upper half's columns are watched as those of the lower half are."""
    code = """tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%r8, %r9}, [%r3], 2; add.u32 %r12, %r3, 2;
        tcgen05.st.sync.aligned.32x32b.x2.b32 [%r12], {%r6, %r7}; tcgen05.wait::st.sync.aligned;
        mov.b32 %r10, 0; mov.b32 %r11, 0;"""
    grid = run(HEAD + STORE + code + TAIL, np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32),
               shared_bytes=1024, options=CHECKED)  # fmt: skip
    assert {finding.kind for finding in grid.findings} == {"race"}


@pytest.mark.parametrize(
    "code, error, message",
    [("add.u32 %r12, %r3, 0x80000; tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r8}, [%r12];", MachineFault,
      "reaches lanes 0 … 31 of tensor memory, 16 at a time; the address names lane 8"),
     ("add.u32 %r12, %r3, 0x100000; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r8}, [%r12];", MachineFault,
      "32 at a time; the address names lane 16"),
     ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r8}, [%r3], 32;", MachineFault, "columns 32 … 32 are outside"),
     ("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%r8, %r9}, [%r3];", Unsupported, "2 registers; 16x256b.x2 has 8"),
     ("tcgen05.ld.red.sync.aligned.32x32b.x1.max.u32 {%r8}, %r9, [%r3];", Unsupported, ".x2 is the least"),
     ("tcgen05.st.sync.aligned.8x8b.x1.b32 [%r3], {%r8};", Unsupported, "its shape is none of 32x32b, ")],
    ids=["lane 8", "lane 16", "split", "registers", "reduction", "shape"],
)  # fmt: skip
def test_wrong_moves_are_faults(code, error, message):
    with pytest.raises(error, match=message):
        moved(code, np.zeros((32, 4), np.uint32))
