"""What Hopper and the simulator make of the same PTX: bit for bit where the arithmetic is defined.

Differences that are allowed are listed here. Run with `scripts/test -m sm90` on a Hopper GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import cuda_driver
import numpy as np
import product_cases
import ptx_kernels
import pytest
import torch
import torture_kernel

from ptxsim.core.binding import load_core
from ptxsim.forms import SPELLINGS, spelled
from ptxsim.machine.tensor_map import TensorMap
from ptxsim.ptx.arithmetic import expression
from ptxsim.ptx.program import common_expressions

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]
COUNT = 512
REGISTER = {16: "%rs", 32: "%r", 64: "%rd"}
# Forms of later architectures, by what their opcodes hold.
LATER = ("f32x2", "ue8m0x2", ".f32.bf16", ".f32.f16", "bfind")
# Approximate functions: by how many units in the last place an H200 and libm differ (measured), or an absolute error.
ULPS = {"ex2": 1, "lg2": 6, "rcp.approx": 1, "rsqrt": 2, "sqrt.approx": 1, "div.full": 2, "div.approx": 2}
ABSOLUTE = ("sin", "cos", "tanh")
ABSOLUTE_ERROR = 1e-5  # of arguments up to 32 in magnitude


def widths(opcode: str, num_sources: int) -> tuple[list[str], str]:
    """PTX types of the sources, and of the result ("pred" for setp)."""
    words = opcode.split(".")
    base, kind = words[0], words[-1]
    if base == "cvt":
        return [kind] * num_sources, words[-2]
    if base == "setp":
        return [kind, kind, "pred"][:num_sources], "pred"
    if base == "selp":
        return [kind, kind, "pred"], kind
    if base in ("shl", "shr"):
        return [kind, "u32"], kind
    if base in ("popc", "clz", "bfind"):
        return [kind], "u32"
    if "wide" in words:
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        return [kind, kind, wide][:num_sources], wide
    if base == "bfe":
        return [kind, "u32", "u32"], kind
    return [kind] * num_sources, kind


def bits_of(kind: str) -> int:
    pairs = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "bf16x2": 32, "f16x2": 32, "e4m3x2": 16, "e5m2x2": 16}
    return pairs.get(kind) or max(16, int(kind[1:]))


def values(kind: str, seed: int) -> np.ndarray:
    """Bit patterns of a type: every kind of special value, the rest random. → uint64 [COUNT]"""
    generator = np.random.default_rng(seed)
    raw = np.frombuffer(generator.bytes(8 * COUNT), np.uint64).copy()
    if kind in ("f32", "f64"):
        numbers = generator.standard_normal(COUNT) * 2.0 ** generator.integers(-30, 31, COUNT)
        numbers[:12] = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, 0.5, 2147483648.0]
        raw = numbers.astype(f"f{bits_of(kind) // 8}").view(f"u{bits_of(kind) // 8}").astype(np.uint64)
        return np.roll(raw, 5 * seed)
    if kind == "pred":
        return raw & np.uint64(1)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        numbers = torch.from_numpy(generator.standard_normal(2 * COUNT)).to(
            torch.float16 if "bf" not in kind else torch.bfloat16
        )
        halves = numbers.view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
        return halves[:COUNT] | (halves[COUNT:] << np.uint64(16) if kind.endswith("x2") else np.uint64(0))
    width = 16 if kind.endswith("x2") else int(kind[1:])
    raw[:8] = [0, 1, 31, 32, 33, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
    return np.roll(raw, seed) & np.uint64((1 << width) - 1)


def body_of(opcode: str, kinds: list[str], result: str) -> str:
    lines = ["mov.u32 %r1, %tid.x; mul.wide.u32 %rd9, %r1, 8;"]
    names = []
    for index, kind in enumerate(kinds):
        lines.append(f"ld.param.u64 %rd1, [p{index}]; add.s64 %rd1, %rd1, %rd9;")
        if kind == "pred":
            lines.append(f"ld.global.b32 %r2, [%rd1]; setp.ne.u32 %p{index}, %r2, 0;")
            names.append(f"%p{index}")
        else:
            names.append(f"{REGISTER[bits_of(kind)]}{40 + index}")
            lines.append(f"ld.global.b{bits_of(kind)} {names[-1]}, [%rd1];")
    target = "%p9" if result == "pred" else f"{REGISTER[bits_of(result)]}50"
    lines.append(f"{opcode} {target}, {', '.join(names)};")
    if result == "pred":
        lines.append("selp.b32 %r50, 1, 0, %p9;")
    size = 32 if result == "pred" else bits_of(result)
    lines.append(f"ld.param.u64 %rd1, [p{len(kinds)}]; add.s64 %rd1, %rd1, %rd9;")
    lines.append(f"st.global.b{size} [%rd1], {REGISTER[size]}50; ret;")
    return "\n".join(lines)


def opcodes() -> list[tuple[str, int]]:
    found = []
    for count, patterns in SPELLINGS.items():
        for opcode in dict.fromkeys(opcode for pattern in patterns for opcode in spelled(pattern)):
            is_later = any(mark in opcode for mark in LATER) or (count == 3 and opcode.startswith(("min", "max")))
            if expression(opcode.split("."), count) is not None and not is_later and not opcode.endswith(".pred"):
                found.append((opcode, count))
    return found


@pytest.fixture(scope="module")
def core_with_all_forms():
    """Else each form would extend the core by itself, and compile it again."""
    load_core([*common_expressions(), *(expression(opcode.split("."), count) for opcode, count in opcodes())])


@pytest.mark.usefixtures("core_with_all_forms")
@pytest.mark.parametrize("opcode, num_sources", opcodes() if IS_HOPPER else [("add.f32", 2)])
def test_arithmetic(opcode, num_sources):
    kinds, result = widths(opcode, num_sources)
    sources = [values(kind, seed) for seed, kind in enumerate(kinds)]
    if opcode.split(".")[0] in ("div", "rem") and kinds[1][0] in "su":
        sources[1] |= np.uint64(1)  # division by zero is unspecified
    body, outputs = body_of(opcode, kinds, result), [np.zeros(COUNT, np.uint64) for _ in range(2)]
    try:
        cuda_driver.run(body, *sources, outputs[0], block=(COUNT, 1, 1))
    except cuda_driver.DriverError as error:
        pytest.skip(f"not a form of this architecture: {str(error).strip().splitlines()[-1][:120]}")
    ptx_kernels.run(body, *sources, outputs[1], block=(COUNT, 1, 1))
    hardware, simulated = outputs
    if opcode.startswith((*ULPS, *ABSOLUTE)):
        return _assert_near(opcode, sources[0], hardware, simulated)
    different = hardware != simulated
    if result in ("f32", "f16", "bf16", "f16x2", "bf16x2", "f64"):
        different &= ~_both_nan(hardware, simulated, result)
    assert not different.any(), _table(sources, hardware, simulated, different)


def _assert_near(opcode: str, source: np.ndarray, hardware: np.ndarray, simulated: np.ndarray) -> None:
    x, argument = (each.astype(np.uint32).view(np.float32) for each in (hardware, source))
    y = simulated.astype(np.uint32).view(np.float32)
    usual = np.isfinite(x) & np.isfinite(y) & (np.abs(x) > 1e-37)
    if opcode.startswith(ABSOLUTE):
        usual &= np.abs(argument) < 32
        assert np.abs(x - y)[usual].max() <= ABSOLUTE_ERROR
    else:
        distance = np.abs(hardware.astype(np.int64) - simulated.astype(np.int64))[usual]
        assert distance.max(initial=0) <= next(ulps for name, ulps in ULPS.items() if opcode.startswith(name))


def _both_nan(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    """NaN payloads are not compared."""
    if kind in ("f32", "f64"):
        size = bits_of(kind) // 8
        return np.isnan(a.astype(f"u{size}").view(f"f{size}")) & np.isnan(b.astype(f"u{size}").view(f"f{size}"))
    exponent = 0x7F80 if "bf" in kind else 0x7C00
    parts = [(each >> np.uint64(shift)) & np.uint64(0x7FFF) for shift in (0, 16) for each in (a, b)]
    nan = [part > exponent for part in parts]
    low = nan[0] & nan[1] | (a & np.uint64(0xFFFF) == b & np.uint64(0xFFFF))
    high = nan[2] & nan[3] | (a >> np.uint64(16) == b >> np.uint64(16))
    return low & high


def _table(sources: list[np.ndarray], hardware: np.ndarray, simulated: np.ndarray, different: np.ndarray) -> str:
    rows = [f"{int(different.sum())} of {len(different)} differ"]
    for index in np.nonzero(different)[0][:4]:
        operands = " ".join(f"{int(source[index]):#x}" for source in sources)
        rows.append(f"{operands}: hardware {int(hardware[index]):#x}, simulator {int(simulated[index]):#x}")
    return "\n".join(rows)


TENSOR_COPY = """
    ld.param.u64 %rd1, [p1]; mov.u32 %r1, dynamic; mov.u32 %r2, %tid.x; mov.b64 %rd3, p0; cvta.param.u64 %rd3, %rd3;
    setp.ne.u32 %p1, %r2, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1+{size}], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r1+{size}], {size};
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%rd3, {{{coordinates}}}], [%r1+{size}];
    READY: bar.sync 0;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+{size}], 0; @!%p2 bra WAIT;
    LOOP: setp.ge.u32 %p3, %r2, {words}; @%p3 bra DONE; shl.b32 %r3, %r2, 2; add.u32 %r4, %r1, %r3;
    ld.shared.b32 %r5, [%r4]; cvt.u64.u32 %rd5, %r3; add.s64 %rd6, %rd1, %rd5; st.global.b32 [%rd6], %r5;
    add.u32 %r2, %r2, 128; bra LOOP;
    DONE: ret;
"""


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("dims, box, start", [
    ((64, 40), (16, 8), (0, 0)), ((64, 40), (16, 8), (-4, 36)), ((64, 40), (16, 8), (56, -5)),
    ((32, 12, 5), (8, 4, 2), (28, -1, 4)), ((16, 6, 5, 3), (8, 4, 2, 2), (-4, 3, 4, 2)),
    ((16, 6, 5, 3, 4), (8, 2, 3, 2, 2), (12, 5, -1, 2, 3)),
], ids=str)  # fmt: skip
def test_tensor_loads_with_our_own_tensor_maps(dims, box, start, swizzle):
    """The map is encoded by the simulator and decoded by the hardware: swizzles, bounds, fill, ranks 2 to 5."""
    inner = max(swizzle, 32) // 4 if swizzle else box[0]
    box = (inner, *box[1:])
    source = np.random.default_rng(1).integers(1, 1 << 32, tuple(reversed(dims)), dtype=np.uint32)
    strides = [4]
    for extent in dims[:-1]:
        strides.append(strides[-1] * extent)
    keep, address = cuda_driver.address_on_gpu(source)
    results = []
    for place, run in ((address, cuda_driver.run), (source.ctypes.data, ptx_kernels.run)):
        tensor_map = TensorMap(place, "u32", dims, tuple(strides), box, (1,) * len(dims), swizzle)
        size, out = tensor_map.box_bytes, np.zeros(tensor_map.box_bytes // 4, np.uint32)
        body = TENSOR_COPY.format(
            size=size, words=size // 4, rank=len(dims), coordinates=", ".join(str(each) for each in start)
        )
        run(body, tensor_map.encode(), out, block=(128, 1, 1), shared_bytes=-(-size // 128) * 128 + 128)
        results.append(out)
    assert results[0].tolist() == results[1].tolist()


def test_torture_kernel():
    """TMA, mbarriers, swizzles, multicast, reductions and a cluster's exchanges: every word."""

    def to_gpu(array: np.ndarray) -> tuple:
        tensor, address = cuda_driver.address_on_gpu(array)
        return tensor, address, lambda into: into.view(np.uint8).reshape(-1).__setitem__(..., tensor.cpu().numpy())

    real, expected = torture_kernel.run(cuda_driver.run, to_gpu), torture_kernel.expected()
    for name in ("out", "sums", "words"):
        np.testing.assert_array_equal(getattr(real, name), getattr(expected, name), name)


@pytest.mark.parametrize("name", product_cases.OPERANDS)
@pytest.mark.parametrize("form", product_cases.FORMS, ids=str)
def test_wgmma(form, name):
    """Sums of tensor cores, bit for bit."""
    real, simulated = (product_cases.results(form, name, run) for run in (cuda_driver.run, ptx_kernels.run))
    np.testing.assert_array_equal(real, simulated)


# Share of the outputs that may differ, and by how much (relative, Frobenius). What differs comes from the approximate
# functions (ex2, lg2, rsqrt), whose last bits the simulator does not have; without them every bit is the same.
DIFFERENCES = {
    "rmsnorm.out": (0, 0), "rmsnorm.dx": (0, 0), "rmsnorm.rstd": (0.6, 1e-7), "rmsnorm.dw": (0.8, 2e-7),
    "gemm.out": (0, 0), "attention.out": (2e-3, 2e-4), "attention.lse": (0.5, 1e-7),
    "attention_causal.out": (2e-3, 2e-4), "attention_causal.lse": (0.5, 1e-7),
    "attention_with_gradients.out": (2e-3, 2e-4), "attention_with_gradients.lse": (0.5, 1e-7),
    **{f"attention_with_gradients.{name}": (2e-3, 2e-4) for name in ("dq", "dk", "dv")},
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels_of_others(tmp_path_factory):
    """Outputs of quack and FlashAttention-4 on the GPU and in the simulator, each in a process of its own."""
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    script, root = Path(__file__).with_name("hardware_cases.py"), Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = []
    for name, options, hidden in (("real", [], {}), ("simulated", ["--simulated"], {"CUDA_VISIBLE_DEVICES": ""})):
        file = tmp_path_factory.mktemp("outputs") / f"{name}.npz"
        environment = os.environ | {"PYTHONPATH": path} | hidden
        subprocess.run([sys.executable, str(script), str(file), *options], check=True, env=environment, cwd=root)
        found.append(np.load(file))
    return found


@pytest.mark.parametrize("name", DIFFERENCES)
def test_kernels_of_others(kernels_of_others, name):
    real, simulated = (_numbers(outputs[name]) for outputs in kernels_of_others)
    share, error = DIFFERENCES[name]
    assert (real != simulated).mean() <= share
    assert np.linalg.norm(real - simulated) <= error * np.linalg.norm(real)


def _numbers(words: np.ndarray) -> np.ndarray:
    """bf16 and float32 from their bits."""
    wide = words.view(np.uint16).astype(np.uint32) << 16 if words.dtype.itemsize == 2 else words
    return wide.view(np.float32).astype(np.float64)
