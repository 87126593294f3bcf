"""What is changed in the interpreter while a session is open, and how all of it is undone.

Everything goes through `Undo`, so that leaving the context puts back every attribute, variable and cache, whether the
frameworks were imported before the context or inside it. Nothing has to stay patched. What stays behind is inert:

* the library built from `runtime.c` remains loaded, under names that nothing else uses;
* functions compiled inside keep calling it, and a launch outside a session raises (ptxsim/host/session.py);
* a framework imported for the first time inside the context has read the environment variables of the context where it
  reads any at import (quack: the set of configurations that its autotuner tries).

The private interface that is relied on is pinned by `tests/ptxsim/test_host_interface.py`.
"""

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ptxsim.host import frameworks
from ptxsim.host.artifacts import STORE
from ptxsim.host.binding import Runtime, RuntimeMismatch
from ptxsim.host.device import Device
from ptxsim.host.operators import operators_on_cpu
from ptxsim.host.undo import Undo, environment

DSL_PREFIXES = ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL")
_entered: "Patches | None" = None


class Patches:
    """Context manager: cutlass-dsl and what is built on it see `device` and link to `runtime`. Not reentrant."""

    def __init__(self, device: Device, runtime: Runtime):
        self.device, self.runtime = device, runtime
        self._undo: ExitStack | None = None

    def __enter__(self) -> "Patches":
        global _entered
        if _entered is not None:
            raise RuntimeError("a simulation is already open in this process; close it before opening another")
        with ExitStack() as stack:
            dump_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ptxsim-dump-"))
            quack_cache_dir = os.environ.get("QUACK_CACHE_DIR")
            _import_cutlass()  # before the variables are set: its singletons read them once
            stack.enter_context(_settled_singletons())
            stack.enter_context(frameworks.forgotten_facts())
            stack.enter_context(environment(self._variables(dump_folder)))
            stack.enter_context(_dsl_settings(self.device.arch, dump_folder))
            for patch in (self._patch_linking, self._patch_compilation, self._patch_calls):
                patch(Undo(stack))
            stack.enter_context(frameworks.separate_kernel_caches(self.device, quack_cache_dir))
            frameworks.patch_device_queries(Undo(stack), self.device)
            stack.enter_context(operators_on_cpu(Undo(stack)))
            stack.enter_context(_diverted_exchange(self.runtime))
            self._undo = stack.pop_all()
        _entered = self
        return self

    def __exit__(self, *error: object) -> None:
        global _entered
        undo, self._undo, _entered = self._undo, None, None
        if undo is not None:
            undo.close()

    def _variables(self, dump_folder: str) -> dict[str, str]:
        arch = self.device.arch
        variables = {
            "QUACK_ARCH": arch.rstrip("a"),
            "FLASH_ATTENTION_ARCH": arch.rstrip("a"),
            "FLASH_ATTENTION_NUM_SMS": str(self.device.num_sms),
            "QUACK_CACHE_DIR": str(frameworks.quack_folder(self.device)),
            "CUDNN_FRONTEND_DISABLE_COMPILED_CACHE": "1",
        }
        for prefix in DSL_PREFIXES:
            variables |= {f"{prefix}_ARCH": arch, f"{prefix}_KEEP": "ptx,cubin"}
            variables |= {f"{prefix}_DUMP_DIR": dump_folder, f"{prefix}_NO_CACHE": "1"}
        return variables

    def _patch_linking(self, undo: Undo) -> None:
        """Host code that is compiled or loaded is linked to our runtime."""
        from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine
        from cutlass.base_dsl import compiler
        from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule

        runtime = self.runtime

        def jit(wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return runtime.register_in(wrapped(*args, **kwargs))

        def binary_engine(wrapped: Any, content: bytes, shared_libs: list[str], *args: Any) -> Any:
            if not content:
                raise RuntimeMismatch(f"only object files can be loaded, not shared objects: {shared_libs}")
            others = [path for path in shared_libs if not path.endswith("libcute_dsl_runtime.so")]
            return wrapped(runtime.relink(content), [*others, str(runtime.path)], *args)

        undo.wrap(compiler.Compiler, "jit", jit)
        undo.wrap(_execution_engine, "BinaryExecutionEngine", binary_engine)
        undo.wrap(ExternalBinaryModule.load_provider, "execution_engine_constructor", binary_engine)

    def _patch_compilation(self, undo: Undo) -> None:
        """PTX and binary of everything that is compiled go to the store of artifacts."""
        from cutlass.base_dsl import compiler, jit_executor

        def read_artifacts(wrapped: Callable[..., Any], artifacts: Any) -> None:
            path = artifacts.PTX  # replaced by the text; its name is that of the function that was compiled
            wrapped(artifacts)
            if path and path != artifacts.PTX and isinstance(artifacts.CUBIN, bytes):
                STORE.add(artifacts.CUBIN, artifacts.PTX, Path(path).name.removesuffix(".ptx").rpartition(".")[0])

        def compile_function(wrapped: Callable[..., Any], entry: Any, *args: Any, **kwargs: Any) -> Any:
            options = entry._compile_options  # of `cute.compile` itself, say: compiling writes settings into it
            entry._compile_options = copy.deepcopy(options)
            try:
                return wrapped(entry, *args, **kwargs)
            finally:
                entry._compile_options = options

        undo.wrap(jit_executor.JitFunctionArtifacts, "__post_init__", read_artifacts)
        undo.wrap(compiler.CompileCallable, "_compile", compile_function)

    def _patch_calls(self, undo: Undo) -> None:
        """Plain calls find one device, and raise what the callback raised (TVM-FFI does by itself, see runtime.c)."""
        from cutlass.base_dsl import jit_executor
        from cutlass.base_dsl.common import DSLCudaRuntimeError
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

        runtime = self.runtime

        def load_library(wrapped: Callable[..., Any], function: Any) -> list[Any]:
            wrapped(function)
            return []  # our handles must not reach the real cudaLibraryUnload when the function is deleted

        def run(wrapped: Callable[..., Any], *args: Any) -> Any:
            try:
                return wrapped(*args)
            except DSLCudaRuntimeError:
                raised = runtime.take_raised()
                if raised is None:
                    raise
            raise raised

        undo.set(CudaDialectJitCompiledFunction, "num_devices", property(lambda function: 1))
        undo.wrap(CudaDialectJitCompiledFunction, "_load_cuda_library", load_library)
        undo.wrap(jit_executor.JitExecutor, "run_compiled_program", run)


def _import_cutlass() -> None:
    try:
        import cutlass.cute  # noqa: F401
    except ImportError as error:
        raise ImportError("ptxsim runs kernels of the CuTe DSL: pip install nvidia-cutlass-dsl") from error


@contextmanager
def _dsl_settings(arch: str, dump_folder: str) -> Iterator[None]:
    """Settings of the DSL's singletons, which read the environment when they are made.

    PTX and binaries are kept (through files in `dump_folder`), and the DSL's own caches are off: a function from there
    would come without PTX, and linked to the real runtime if it was compiled outside.
    """
    before = {dsl: dsl.envar for dsl in _dsl_singletons()}
    for dsl, settings in before.items():
        dsl.envar = copy.copy(settings)
        dsl.envar.arch, dsl.envar.dump_dir = arch, dump_folder
        dsl.envar.keep_ptx = dsl.envar.keep_cubin = dsl.envar.no_cache = True
        dsl.envar.compiler_backend = "legacy"  # the other one is experimental and links in a way of its own
    try:
        yield
    finally:
        for dsl, settings in before.items():
            dsl.envar = settings


@contextmanager
def _settled_singletons() -> Iterator[None]:
    """A singleton of the DSL that is made inside reads its settings again when the environment is as before."""
    before = set(_dsl_singletons())
    try:
        yield
    finally:
        for dsl in set(_dsl_singletons()) - before:
            dsl.envar = dsl._env_class(dsl.name)


def _dsl_singletons() -> list[Any]:
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    return list(DSLSingletonMeta._instances.values())


@contextmanager
def _diverted_exchange(runtime: Runtime) -> Iterator[None]:
    """CPU tensors are CUDA tensors to TVM-FFI.

    torch's table of DLPack functions is one writable structure, of which TVM-FFI keeps the address, not a copy: so
    changing the structure in place works whenever TVM-FFI first saw a tensor, and changing it back undoes it fully.
    """
    table = frameworks.exchange_table()
    runtime.divert_exchange(table)
    try:
        yield
    finally:
        runtime.restore_exchange(table)
