"""The host side: kernels of the CuTe DSL and of what is built on it arrive at a callback, and nothing stays changed.

No kernel is executed here. `recorded` stands in for the simulator and keeps the launches.
"""

import ctypes
import os
import re
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass.base_dsl.common import DSLCudaRuntimeError  # noqa: E402
from cutlass.cute.nvgpu import cpasync  # noqa: E402
from cutlass.cute.runtime import make_ptr  # noqa: E402
from cutlass.memory import SmemAllocator  # noqa: E402

from ptxsim.host import artifacts, binding, frameworks  # noqa: E402
from ptxsim.host.artifacts import PtxNotFound  # noqa: E402
from ptxsim.host.device import Device  # noqa: E402
from ptxsim.host.launches import Launch  # noqa: E402
from ptxsim.host.session import HostSession, LaunchOutsideSession  # noqa: E402
from ptxsim.ptx.parse import entry_names, parse_parameters  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
TVM_FFI = "--enable-tvm-ffi"

pytestmark = pytest.mark.ptxsim
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would run a kernel on host memory")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty cache folder, so that everything is compiled here and now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PTXSIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def recorded(launches: list[Launch], arch: str = "sm_100a", num_sms: int = 4) -> HostSession:
    return HostSession(arch, num_sms, launches.append)


def check(launch: Launch) -> None:
    """The PTX holds the kernel, and every parameter has the declared size."""
    assert launch.kernel in entry_names(launch.ptx)
    sizes = {each.name: each.size for each in parse_parameters(launch.ptx, launch.kernel)}
    assert {name: len(content) for name, content in launch.params.items()} == sizes


def u64(content: bytes) -> int:
    return int.from_bytes(content, "little")


# ------------------------------------------------------------------------------------------------- kernels of our own


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * 128 + thread
    if index < n:
        y[index] = x[index] * factor


@cute.jit
def scale(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32, factor: cutlass.Float32):
    tensors = cute.make_tensor(x, cute.make_layout(n)), cute.make_tensor(y, cute.make_layout(n))
    scale_kernel(*tensors, n, factor).launch(grid=[cute.ceil_div(n, 128), 1, 1], block=[128, 1, 1])


class Power:
    """A constant of the compiler that is no part of the kernel's name."""

    def __init__(self, exponent: int):
        self.exponent = exponent

    @cute.jit
    def __call__(self, y: cute.Pointer):
        self.kernel(cute.make_tensor(y, cute.make_layout(1))).launch(grid=[1, 1, 1], block=[32, 1, 1])

    @cute.kernel
    def kernel(self, y: cute.Tensor):
        y[0] = cutlass.Float32(2.0**self.exponent)


class TmaLoad:
    """Loads one tile of 64×64 bf16 with a 128-byte swizzle; the DSL writes the tensor map by itself."""

    @cute.jit
    def __call__(self, x: cute.Pointer, rows: cutlass.Int32, columns: cutlass.Int32):
        tensor = cute.make_tensor(x, cute.make_layout((rows, columns), stride=(columns, 1)))
        swizzled = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout((8, 64), stride=(64, 1)))
        tile = cute.tile_to_shape(swizzled, (64, 64), order=(0, 1))
        atom, view = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, tile, (64, 64))
        self.kernel(atom, view, tile).launch(grid=[4, 2, 1], block=[128, 1, 1], cluster=[2, 1, 1], smem=64 * 64 * 2)

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, view: cute.Tensor, tile: cute.ComposedLayout):
        allocator = SmemAllocator()
        barrier = allocator.allocate_array(cutlass.Int64, 1)
        shared = allocator.allocate_tensor(cutlass.BFloat16, tile.outer, byte_alignment=1024, swizzle=tile.inner)
        source = cute.local_tile(view, (64, 64), (0, 0))
        to, come_from = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(source, 0, 2)
        )
        cute.copy(atom, come_from, to, tma_bar_ptr=barrier)


def pointer(tensor: torch.Tensor, dtype: Any = None) -> cute.Pointer:
    return make_ptr(dtype or cutlass.Float32, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)


def call_scale(way: str, n: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """Compile and launch `scale` in one of the ways the DSL has: "plain", "tvm-ffi", "implicit"."""
    x, y = torch.ones(n), torch.zeros(n)
    arguments = pointer(x), pointer(y), n, 2.5
    if way == "implicit":
        scale(*arguments)
    else:
        cute.compile(scale, *arguments, options=TVM_FFI if way == "tvm-ffi" else "")(*arguments)
    return x, y


WAYS = pytest.mark.parametrize("way", ["plain", "tvm-ffi", "implicit"])


# --------------------------------------------------------------------------------------------------------- launching


@WAYS
def test_launch_of_an_own_kernel(way: str) -> None:
    launches: list[Launch] = []
    with recorded(launches):
        x, y = call_scale(way)
    (launch,) = launches
    check(launch)
    assert "scale_kernel" in launch.kernel
    assert (launch.grid, launch.block, launch.cluster, launch.shared_bytes) == ((8, 1, 1), (128, 1, 1), (1, 1, 1), 0)
    assert not launch.cooperative and not launch.programmatic
    assert launch.source is not None and "scale" in launch.source
    assert ".target sm_100a" in launch.ptx
    n, factor = struct.pack("<i", 1000), struct.pack("<f", 2.5)
    first, second, *_ = launch.params.values()  # tensors of dynamic size: pointer, then the size
    assert [u64(first[:8]), u64(second[:8])] == [x.data_ptr(), y.data_ptr()]
    assert n in launch.params.values() and factor in launch.params.values()


def test_launch_reads_cluster_and_shared_memory() -> None:
    launches: list[Launch] = []
    x = torch.zeros(256, 192, dtype=torch.bfloat16)
    with recorded(launches):
        TmaLoad()(pointer(x, cutlass.BFloat16), 256, 192)
    (launch,) = launches
    check(launch)
    assert (launch.grid, launch.cluster, launch.shared_bytes) == ((4, 2, 1), (2, 1, 1), 64 * 64 * 2)
    (ours,) = [content for content in launch.params.values() if len(content) == 128]
    assert ours[:64] == encoded_map(x, box=(64, 64), swizzle=3)[:64]


def encoded_map(x: torch.Tensor, box: tuple[int, int], swizzle: int) -> bytes:
    """The tensor map of a contiguous bf16 matrix [rows, columns] from `_cuTensorMapEncodeTiled` in runtime.c."""
    rows, columns = x.shape
    result, words, halves = ctypes.create_string_buffer(128), ctypes.c_uint64 * 2, ctypes.c_uint32 * 2
    error = binding.load_runtime().function("_cuTensorMapEncodeTiled")(
        result, 9, 2, ctypes.c_void_p(x.data_ptr()), words(columns, rows), words(2 * columns), halves(*box[::-1]),
        halves(1, 1), 0, swizzle, 2, 0,
    )  # fmt: skip
    if error:
        raise ValueError(f"CUDA error {error}")
    return result.raw


def test_tensor_maps_that_cuda_refuses() -> None:
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert len(encoded_map(x, (64, 64), swizzle=3)) == 128
    for odd in (x[:, 4:], torch.zeros(64, 60, dtype=torch.bfloat16)):  # address, stride: not multiples of 16 bytes
        with pytest.raises(ValueError, match="CUDA error 1"):
            encoded_map(odd, (64, 32), swizzle=3)
    with pytest.raises(ValueError, match="CUDA error 801"):
        encoded_map(x, (64, 64), swizzle=4)


def test_two_kernels_of_the_same_name() -> None:
    launches: list[Launch] = []
    y = torch.zeros(4)
    with recorded(launches):
        compiled = [cute.compile(Power(exponent), pointer(y)) for exponent in (3, 5)]
        for index in (1, 0, 1):
            compiled[index](pointer(y))
    assert len({launch.kernel for launch in launches}) == 1
    for launch, exponent in zip(launches, (5, 3, 5), strict=True):
        (bits,) = struct.unpack("<I", struct.pack("<f", 2.0**exponent))
        assert str(bits) in launch.ptx or f"0f{bits:08X}" in launch.ptx, f"not the PTX of exponent {exponent}"


def test_quack_rmsnorm() -> None:
    rmsnorm = pytest.importorskip("quack.rmsnorm")
    rmsnorm = sys.modules["quack.rmsnorm"]  # the package has a function of the same name
    launches: list[Launch] = []
    x, weight = torch.randn(8, 1024, dtype=torch.bfloat16), torch.randn(1024, dtype=torch.bfloat16)
    out, rstd = torch.empty_like(x), torch.empty(8)
    with recorded(launches) as session:
        rmsnorm._rmsnorm_fwd(x, weight, out, rstd=rstd)
        ranges = session.tensor_ranges()
    (launch,) = launches
    check(launch)
    assert (launch.block, launch.cluster) == ((128, 1, 1), (1, 1, 1)) and launch.grid[1:] == (1, 1)
    for tensor in (x, weight, out, rstd):
        begin = tensor.data_ptr()
        assert (begin, begin + tensor.nbytes) in ranges
        assert any(begin.to_bytes(8, "little") in content for content in launch.params.values())


def test_operators_for_cuda_alone_run_inside() -> None:
    """The backward of quack's RMSNorm is an operator of torch without an implementation for the CPU."""
    quack = pytest.importorskip("quack")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    x, weight = torch.randn(8, 1024, requires_grad=True), torch.randn(1024, requires_grad=True)
    launches: list[Launch] = []
    with recorded(launches):
        assert has_kernel("quack::rmsnorm_bwd_f", "CPU")
        quack.rmsnorm(x, weight).sum().backward()
    assert ["RMSNormBackward" in launch.kernel for launch in launches] == [False, True]
    assert x.grad is not None and x.grad.shape == x.shape
    assert not has_kernel("quack::rmsnorm_bwd_f", "CPU")


def test_quack_mxfp8_gemm_in_pairs_of_blocks() -> None:
    pytest.importorskip("quack.gemm")
    quantize = pytest.importorskip("quack.blockscaled.quantize")
    m, n, k = 512, 256, 256
    (a, a_scales), (b, b_scales) = (quantize.to_mx(torch.randn(rows, k), 32) for rows in (m, n))
    out = torch.empty(1, m, n, dtype=torch.bfloat16)
    launches: list[Launch] = []
    with recorded(launches):
        sys.modules["quack.gemm"].gemm(
            a[None], b[None], out, None, None, 256, 256, 2, 1,
            SFA=quantize.pack_scale_2d_to_blocked_contig(a_scales[None]),
            SFB=quantize.pack_scale_2d_to_blocked_contig(b_scales[None]),
            bs_format_a="mxfp8_e4m3", bs_format_b="mxfp8_e4m3",
        )  # fmt: skip
    (launch,) = launches
    check(launch)
    assert launch.cluster == (2, 1, 1) and launch.block == (256, 1, 1)
    assert launch.grid[0] == 2 and launch.shared_bytes > 128 * 1024
    maps = [content for content in launch.params.values() if len(content) == 128]
    assert {u64(content[:8]) for content in maps} >= {a.data_ptr(), b.data_ptr(), out.data_ptr()}
    assert "tcgen05.mma.cta_group::2" in launch.ptx


def test_flash_attention() -> None:
    interface = pytest.importorskip("flash_attn.cute.interface")
    q, k, v = (torch.randn(1, 128, 1, 128).bfloat16() for _ in range(3))
    launches: list[Launch] = []
    with recorded(launches):
        out, lse = interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True)[:2]
        interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    first, second = launches
    assert first.ptx == second.ptx
    check(first)
    assert (first.block, first.cluster) == ((512, 1, 1), (1, 1, 1))
    assert (out.shape, lse.shape) == (q.shape, (1, 1, 128))
    maps = [content for content in first.params.values() if len(content) == 128]
    assert {u64(content[:8]) for content in maps} >= {tensor.data_ptr() for tensor in (q, k, v)}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_of_this_repository(arch: str) -> None:
    pytest.importorskip("quack")
    from pma.kernels.device_facts import SM90, SM100
    from pma.kernels.quantize import any_arch
    from pma.kernels.quantize.spec import QuantizeSpec, choose_config

    spec = QuantizeSpec(384, torch.bfloat16, torch.int32)
    config = choose_config(spec, {"sm_90a": SM90, "sm_100a": SM100}[arch])
    values, offsets = torch.randn(130, 384, dtype=torch.bfloat16), torch.tensor([0, 100, 130], dtype=torch.int32)
    data, scales = torch.empty(130, 384, dtype=torch.uint8), torch.empty(6, 12, dtype=torch.uint8)
    operands = any_arch.QuantizeOperands(values, offsets, data, scales, *[None] * 7)
    launches: list[Launch] = []
    with recorded(launches, arch):
        any_arch.build(arch, spec, config)(operands, 0.0, 3)
    (launch,) = launches
    check(launch)
    assert (launch.grid, launch.block) == ((3, 1, 1), (config.threads, 1, 1))
    assert f".target {arch}" in launch.ptx


# --------------------------------------------------------------------------------------------------- errors and limits


class Unmistakable(Exception):
    pass


@WAYS
def test_exceptions_arrive_unchanged(way: str) -> None:
    error = Unmistakable("from the callback")

    def fail_here(launch: Launch) -> None:
        raise error

    with HostSession("sm_100a", 4, fail_here), pytest.raises(Unmistakable) as caught:
        call_scale(way)
    assert caught.value is error
    assert error.__cause__ is None and error.__context__ is None
    assert traceback.extract_tb(error.__traceback__)[-1].name == "fail_here"


def test_interrupts_arrive_too() -> None:
    def interrupt(launch: Launch) -> None:
        raise KeyboardInterrupt

    with HostSession("sm_100a", 4, interrupt):
        for way in ("plain", "tvm-ffi"):
            with pytest.raises(KeyboardInterrupt):
                call_scale(way)


@without_gpu
def test_launch_outside_a_session() -> None:
    x, y = torch.ones(8), torch.zeros(8)
    arguments = pointer(x), pointer(y), 8, 1.0
    with recorded([]):
        plain, through_tvm = (cute.compile(scale, *arguments, options=options) for options in ("", TVM_FFI))
        plain(*arguments)
    with pytest.warns(RuntimeWarning, match="has ended"), pytest.raises(LaunchOutsideSession, match="scale_kernel"):
        through_tvm(*arguments)
    with pytest.warns(RuntimeWarning, match="scale_kernel.*has ended"), pytest.raises(DSLCudaRuntimeError):
        plain(*arguments)


def test_sessions_do_not_nest() -> None:
    with recorded([]):
        with pytest.raises(RuntimeError, match="already open"), recorded([]):
            pass
        call_scale("plain")


# ------------------------------------------------------------------------------------------- nothing stays changed


def touched() -> dict[str, Any]:
    """Everything that a session changes, as it is now."""
    from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine
    from cutlass.base_dsl import compiler, jit_executor
    from cutlass.base_dsl.dsl import DSLSingletonMeta
    from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    owners = (
        compiler.Compiler, compiler.CompileCallable, jit_executor.JitFunctionArtifacts, jit_executor.JitExecutor,
        _execution_engine, ExternalBinaryModule.load_provider, CudaDialectJitCompiledFunction,
        cutlass.utils.HardwareInfo, torch.cuda, torch.Tensor, torch._library.custom_ops.CustomOpDef, torch.nn.Parameter,
    )  # fmt: skip
    found = {f"{owner}.{name}": value for owner in owners for name, value in list(vars(owner).items())}
    found |= {f"environment {name}": value for name, value in os.environ.items()}
    for dsl in DSLSingletonMeta._instances.values():
        found |= {f"{dsl.name} {name}": value for name, value in vars(dsl.envar).items()}
        found[f"{dsl.name} settings"] = id(dsl.envar)
    options = cute.compile._compile_options
    found |= {f"option {kind.__name__}": option.value for kind, option in options.options.items()}
    found["exchange table"] = ctypes.string_at(frameworks.exchange_table(), 56)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changing = {"environment PYTEST_CURRENT_TEST"}
    names = (before.keys() | after.keys()) - changing
    return sorted(
        name for name in names if before.get(name) is not after.get(name) and before.get(name) != after.get(name)
    )


@pytest.mark.parametrize("ends_by_error", [False, True])
def test_nothing_stays_changed(ends_by_error: bool) -> None:
    call_with_cpu_device = torch.ones(1).is_cuda
    before = touched()
    try:
        with recorded([]):
            inside = touched()
            call_scale("tvm-ffi")
            if ends_by_error:
                raise Unmistakable
    except Unmistakable:
        pass
    assert differences(before, touched()) == []
    changed = " ".join(differences(before, inside))
    for part in ("CUTE_DSL_ARCH", "QUACK_ARCH", "FLASH_ATTENTION_ARCH", "exchange table", "is_cuda", "num_devices"):
        assert part in changed
    assert torch.ones(1).is_cuda is call_with_cpu_device


def test_only_frameworks_are_told_that_tensors_are_on_a_gpu() -> None:
    asked_by = "def ask(tensor): return tensor.is_cuda"
    framework: dict[str, Any] = {"__name__": "flash_attn.cute.interface"}
    exec(asked_by, framework)
    tensor = torch.ones(1)
    with recorded([], num_sms=7):
        assert framework["ask"](tensor) and not tensor.is_cuda
        assert torch.cuda.get_device_capability() == (10, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 7
        assert cutlass.utils.HardwareInfo().get_max_active_clusters(2) == 3
    assert not framework["ask"](tensor)


@without_gpu
@pytest.mark.parametrize("way", ["plain", "tvm-ffi"])
def test_the_real_runtime_is_used_outside(way: str) -> None:
    """Before and after a session, a compiled function asks the real runtime for a device, and there is none."""
    x, y = torch.ones(8), torch.zeros(8)
    arguments = pointer(x), pointer(y), 8, 1.0
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        dsl = cutlass.cutlass_dsl.CuTeDSL._get_dsl()
        patch.setattr(dsl.envar, "arch", "sm_100a")  # without a device it can't be detected

        def call_outside() -> None:
            compiled = cute.compile(scale, *arguments, options=TVM_FFI if way == "tvm-ffi" else "")
            assert compiled.artifacts.PTX is None
            with pytest.raises((RuntimeError, DSLCudaRuntimeError), match="cudaErrorInsufficientDriver|no.*device"):
                compiled(*arguments)

        call_outside()
        with recorded(launches):
            call_scale(way)
        call_outside()
    assert len(launches) == 1


def test_kernel_caches_are_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """What quack's `jit_cache` keeps from outside isn't found inside, and the reverse; devices are separate too."""
    quack_cache = pytest.importorskip("quack.cache")
    monkeypatch.setattr(quack_cache, "CACHE_ENABLED", False)

    @quack_cache.jit_cache
    def compiled(key: int) -> object:
        return object()

    folder = quack_cache.CACHE_DIR
    outside = compiled(1)
    with recorded([]):
        inside = compiled(1)
        assert Path(quack_cache.CACHE_DIR) == frameworks.quack_folder(Device("sm_100a", 4))
    with recorded([]):
        again = compiled(1)
    with recorded([], num_sms=5):
        other_device = compiled(1)
    assert inside is again
    assert len({id(found) for found in (outside, inside, other_device)}) == 3
    assert compiled(1) is outside
    assert folder == quack_cache.CACHE_DIR


# --------------------------------------------------------------------------------------------- PTX of other processes

IN_ANOTHER_PROCESS = """
import sys, torch, cutlass
from ptxsim.host import artifacts, build
from ptxsim.host.session import HostSession

def report(launch):
    print("launched", launch.kernel in launch.ptx, launch.source, sorted(map(len, launch.params.values())))

with HostSession("sm_100a", 4, report):
    import quack.rmsnorm
    rmsnorm = sys.modules["quack.rmsnorm"]
    x, weight = torch.ones(8, 1024, dtype=torch.bfloat16), torch.ones(1024, dtype=torch.bfloat16)
    rmsnorm._rmsnorm_fwd(x, weight, torch.empty_like(x))
    print("compiled", rmsnorm._compile_rmsnorm_fwd.cache_info().misses)

    artifacts.STORE.modules.clear()
    for sidecar in (build.cache_folder() / "ptx").iterdir():
        sidecar.rename(sidecar.with_suffix(".hidden"))
    try:
        rmsnorm._rmsnorm_fwd(x, weight, torch.empty_like(x))
    except artifacts.PtxNotFound as error:
        print("not found:", error)
    for sidecar in (build.cache_folder() / "ptx").iterdir():
        sidecar.rename(sidecar.with_suffix(".gz"))
"""


def test_object_files_of_another_process_keep_their_ptx(tmp_path: Path) -> None:
    pytest.importorskip("quack.rmsnorm")

    def run() -> str:
        variables = {**os.environ, "PTXSIM_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first, second = run(), run()
    assert "launched True cutlass___call___quackrmsnorm" in first and "compiled 1" in first
    assert second == first.replace("compiled 1", "compiled 0")
    assert re.search("not found: no PTX for kernel .*RMSNorm.*clear the object-file cache", second)


def test_ptx_that_is_nowhere() -> None:
    store = artifacts.ArtifactStore()
    store.binaries[1] = ["00"]
    with pytest.raises(PtxNotFound, match="no PTX for kernel k.*Compile it inside"):
        store.find(1, "k")
