"""The parts of the host side by themselves, and the private interface of cutlass-dsl that they rely on.

The last section is the canary: when another version of cutlass-dsl is installed, it says what has changed.
"""

import ctypes
import inspect
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402

from ptxsim.host import binding, build, frameworks  # noqa: E402
from ptxsim.host.device import Device  # noqa: E402
from ptxsim.host.launches import LaunchConfig, LaunchError, LaunchShape  # noqa: E402
from ptxsim.host.objects import elf_files, rename_undefined  # noqa: E402
from ptxsim.ptx.parse import Parameter, PTXSyntaxError, entry_names, parse_parameters  # noqa: E402

pytestmark = pytest.mark.ptxsim


def test_unknown_devices() -> None:
    with pytest.raises(ValueError, match="sm_90a, sm_100a, sm_103a, got 'sm_80'"):
        Device("sm_80", 1)
    with pytest.raises(ValueError, match="num_sms must be positive, got 0"):
        Device("sm_90a", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0, 1, 1)}, "grid must be positive"),
        ({"block": (1025, 1, 1)}, "1 to 1024 threads"),
        ({"cluster": (3, 1, 1)}, "must divide the grid"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "1 to 16 blocks"),
        ({"shared_bytes": 232449}, "up to 232448 bytes, got 232449"),
    ],
)
def test_launches_that_a_gpu_refuses(change: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {
        "grid": (8, 1, 1), "block": (128, 1, 1), "cluster": (2, 1, 1), "shared_bytes": 232448,
        "cooperative": False, "programmatic": False,
    }  # fmt: skip
    LaunchShape(**usual).check("k")
    with pytest.raises(LaunchError, match=message):
        LaunchShape(**{**usual, **change}).check("k")


def test_attributes_of_a_launch() -> None:
    """As the CUDA runtime gets them: 56 bytes of configuration and 72 for each attribute."""
    attribute = struct.Struct("<i4x16I")
    values = {4: (2, 1, 1), 6: (1,), 2: (1,)}
    raw = b"".join(attribute.pack(kind, *value, *[0xDEAD] * (16 - len(value))) for kind, value in values.items())
    attributes = ctypes.create_string_buffer(raw, len(raw))
    numbers = (8, 1, 3, 128, 2, 1, 1024, 0, ctypes.addressof(attributes), 3)
    config = LaunchConfig.from_buffer_copy(struct.pack("<6IQQQI4x", *numbers))
    assert config.shape() == LaunchShape((8, 1, 3), (128, 2, 1), (2, 1, 1), 1024, cooperative=True, programmatic=True)
    config.num_attributes = 0
    assert config.shape() == LaunchShape((8, 1, 3), (128, 2, 1), (1, 1, 1), 1024, cooperative=False, programmatic=False)


PTX = """
.version 9.0
.target sm_90a
.visible .entry first(
    .param .align 64 .b8 first_param_0[128],   // a tensor map
    .param .u64 .ptr .global .align 16 first_param_1,
    .param .f32 first_param_2,
    .param .align 8 .b8 first_param_3[12],
    .param .u8 first_param_4
)
.reqntid 128, 1, 1
{
    ret;
}
.entry first_and_more() { ret; }
"""


def test_parameters_of_a_kernel() -> None:
    assert entry_names(PTX) == ["first", "first_and_more"]
    assert parse_parameters(PTX, "first_and_more") == ()
    assert parse_parameters(PTX, "first") == (
        Parameter("first_param_0", 0, 128),
        Parameter("first_param_1", 128, 8),
        Parameter("first_param_2", 136, 4),
        Parameter("first_param_3", 144, 12),
        Parameter("first_param_4", 156, 1),
    )
    with pytest.raises(KeyError, match="no .entry second in the PTX; it has first, first_and_more"):
        parse_parameters(PTX, "second")
    with pytest.raises(PTXSyntaxError, match="can't read the parameter declaration '.param .texref t'"):
        parse_parameters(".entry k( .param .texref t ) { ret; }", "k")


def compiled_object(source: str, folder: Path) -> bytes:
    path = folder / "source.c"
    path.write_text(source)
    command = [build.find_compiler(), "-c", "-fPIC", "-o", str(path.with_suffix(".o")), str(path)]
    subprocess.run(command, check=True)
    return path.with_suffix(".o").read_bytes()


def test_only_undefined_names_change(tmp_path: Path) -> None:
    source = "int ends_launch(void); int launch(void); int own(void) { return launch() + ends_launch(); }"
    content = compiled_object(source, tmp_path)
    renamed = rename_undefined(content, {"launch": "a_much_longer_launch", "own": "never"}.get)
    (tmp_path / "renamed.o").write_bytes(renamed)
    rest = "int ends_launch(void) { return 1; } int a_much_longer_launch(void) { return 2; }"
    (tmp_path / "rest.c").write_text(rest)
    library = tmp_path / "library.so"
    command = [build.find_compiler(), "-shared", "-fPIC", "-o", library, tmp_path / "renamed.o", tmp_path / "rest.c"]
    subprocess.run(list(map(str, command)), check=True)
    assert ctypes.CDLL(str(library)).own() == 3
    assert elf_files(b"header" + content + b"between" + renamed + b"end") == [content, renamed]


def test_unknown_functions_of_the_runtime_are_refused(tmp_path: Path) -> None:
    content = compiled_object("int _cudaNovelty(void); int own(void) { return _cudaNovelty(); }", tmp_path)
    with pytest.raises(binding.RuntimeMismatch, match="_cudaNovelty, which ptxsim/host/runtime.c doesn't provide"):
        binding.load_runtime().relink(content)


def test_shared_objects_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTXSIM_CACHE", str(tmp_path))
    source = "int answer(void) { return ANSWER; }"
    path = build.build_shared_object(source, "answer", ("-DANSWER=42",))
    assert path.is_relative_to(tmp_path) and ctypes.CDLL(str(path)).answer() == 42
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled twice"))
    assert build.build_shared_object(source, "answer", ("-DANSWER=42",)) == path
    monkeypatch.undo()
    monkeypatch.setenv("PTXSIM_CACHE", str(tmp_path))
    with pytest.raises(build.CompilationFailed, match="ANSWER"):
        build.build_shared_object(source, "answer")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.CompilerMissing, match="CC=no-such-compiler.*install gcc or clang"):
        build.build_shared_object(source, "answer")


# ------------------------------------------------------------------------------------ the private interface relied on


def signatures() -> dict[str, str]:
    """Names and parameters of everything in cutlass-dsl that `ptxsim/host` replaces, calls or reads."""
    from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine
    from cutlass._mlir.execution_engine import ExecutionEngine
    from cutlass.base_dsl import compiler, dsl, env_manager, jit_executor
    from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    def parameters(function: Callable[..., Any]) -> str:
        return ", ".join(inspect.signature(function).parameters)

    hardware = cutlass.utils.HardwareInfo
    settings = dsl.DSLSingletonMeta._instances[cutlass.cutlass_dsl.CuTeDSL].envar
    return {
        "version": cutlass.__version__,
        "Compiler.jit": parameters(compiler.Compiler.jit),
        "CompileCallable._compile": parameters(compiler.CompileCallable._compile),
        "type(cute.compile)": type(cute.compile).__name__,
        "JitFunctionArtifacts": ", ".join(jit_executor.JitFunctionArtifacts.__dataclass_fields__),
        "JitExecutor.run_compiled_program": parameters(jit_executor.JitExecutor.run_compiled_program),
        "num_devices": type(vars(CudaDialectJitCompiledFunction)["num_devices"]).__name__,
        "_load_cuda_library": parameters(CudaDialectJitCompiledFunction._load_cuda_library),
        "BinaryExecutionEngine": str(_execution_engine.BinaryExecutionEngine.__init__.__doc__).split("->")[0].strip(),
        "raw_register_runtime": str(ExecutionEngine.raw_register_runtime.__doc__).split("->")[0].strip(),
        "load_provider": ", ".join(vars(ExternalBinaryModule.load_provider)),
        "HardwareInfo.__init__": parameters(hardware.__init__),
        "HardwareInfo.get_max_active_clusters": parameters(hardware.get_max_active_clusters),
        "HardwareInfo.get_l2_cache_size_in_bytes": parameters(hardware.get_l2_cache_size_in_bytes),
        "HardwareInfo.get_device_multiprocessor_count": parameters(hardware.get_device_multiprocessor_count),
        "settings": ", ".join(
            name
            for name in ("arch", "dump_dir", "keep_ptx", "keep_cubin", "no_cache", "compiler_backend")
            if hasattr(settings, name)
        ),
        "_env_class": dsl.BaseDSL._env_class.__name__,
        "get_str_env_var": parameters(env_manager.get_str_env_var),
    }


PINNED = {
    "version": "4.8.1",
    "Compiler.jit": "self, module, opt_level, shared_libs",
    "CompileCallable._compile": "self, func, args, kwargs",
    "type(cute.compile)": "CompileCallable",
    "JitFunctionArtifacts": "PTX, CUBIN, SASS, MLIR, device_header, device_object_path",
    "JitExecutor.run_compiled_program": "self, exe_args",
    "num_devices": "cached_property",
    "_load_cuda_library": "self",
    "BinaryExecutionEngine": (
        "__init__(self, module: bytes, sharedLibPaths: collections.abc.Sequence[str], UseJitLink: bool = True)"
    ),
    "raw_register_runtime": "raw_register_runtime(self, name: str, callback: object)",
    "load_provider": (
        "dsl, signature_processor, version_checker, execution_engine_constructor, jit_function_constructor"
    ),
    "HardwareInfo.__init__": "self, device_id",
    "HardwareInfo.get_max_active_clusters": "self, cluster_size, stream",
    "HardwareInfo.get_l2_cache_size_in_bytes": "self",
    "HardwareInfo.get_device_multiprocessor_count": "self",
    "settings": "arch, dump_dir, keep_ptx, keep_cubin, no_cache, compiler_backend",
    "_env_class": "EnvironmentVarManager",
    "get_str_env_var": "var_name, default_value",
}


def test_interface_of_the_dsl() -> None:
    found = signatures()
    changed = [
        f"{name}: expected {PINNED[name]!r}, found {found[name]!r}" for name in PINNED if PINNED[name] != found[name]
    ]
    assert not changed, "the private interface of nvidia-cutlass-dsl has changed:\n" + "\n".join(changed)


def test_facts_about_the_device_that_frameworks_remember() -> None:
    for module_name, functions in frameworks.DEVICE_FACTS.items():
        module = pytest.importorskip(module_name)
        missing = [name for name in functions if not hasattr(getattr(module, name, None), "cache_clear")]
        assert not missing, f"{module_name} no longer has the cached functions {missing}"


def test_symbols_of_the_runtime() -> None:
    """runtime.c stands in for every function that the real runtime offers to compiled kernels.

    What is left out is the interface for other callers: object files from C, and JAX.
    """
    (path,) = cute.runtime.find_runtime_libraries(enable_tvm_ffi=False)
    names = re.findall(rb"(?<=\0)(_cu(?:da)?[A-Z]\w+|cuda_dialect_\w+|CuteDSLRT_\w+)(?=\0)", Path(path).read_bytes())
    real = ctypes.CDLL(path)
    exported = {name for name in (name.decode() for name in names) if hasattr(real, name)}
    others = {name for name in exported if re.match(r"CuteDSLRT_(Module|Function|GetError|NvJax)", name)}
    assert len(others) == 18, f"other functions of the real runtime than in 4.8.1: {sorted(others)}"
    missing, surplus = exported - others - binding.symbols(), binding.symbols() - exported
    assert not missing, f"the real runtime has functions that runtime.c lacks: {sorted(missing)}"
    assert not surplus, f"runtime.c has functions that the real runtime lacks: {sorted(surplus)}"
