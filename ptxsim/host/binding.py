"""Connects machine code that the CuTe DSL compiles to `runtime.c` instead of NVIDIA's runtime library.

The DSL links in two ways. An MLIR execution engine (plain calls) takes addresses for names before it looks anywhere
else. An object file (calls through TVM-FFI, and whatever is loaded from a cache) goes to a linker that looks names up
in the whole process, so here the names themselves are changed. Either way the decision is made when a function is
compiled or loaded, and it holds for the life of that function: what was compiled outside a session keeps the real
runtime, what was compiled inside keeps this one. Neither library is visible under the other's names.
"""

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptxsim.host.build import build_shared_object
from ptxsim.host.launches import LaunchConfig
from ptxsim.host.objects import rename_undefined

RAISED_IN_PYTHON = 999  # the status of a callback that raised; as in runtime.c
PREFIX = "ptxsim_"
SOURCE = Path(__file__).with_name("runtime.c")
RUNTIME_NAME = re.compile(r"_cu(da)?[A-Z]\w*|cuda_dialect_\w+|CuteDSLRT_\w+")  # names that only a runtime defines

LoadCallback = Callable[[int, int, int], None]  # library, address of the image, bytes
LaunchCallback = Callable[[int, str, LaunchConfig, Any], None]  # library, kernel, configuration, arguments

_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.POINTER(LaunchConfig), ctypes.POINTER(ctypes.c_void_p)
)


class RuntimeMismatch(RuntimeError):
    """Compiled code needs something of the CUDA runtime that the stand-in doesn't have."""


@functools.cache
def symbols() -> frozenset[str]:
    """The names that `runtime.c` stands in for, without the prefix."""
    return frozenset(re.findall(r"^(?!#define)(?:[\w *]*\bDSL|UNSUPPORTED)\((\w+)\)", SOURCE.read_text(), re.M))


class Runtime:
    """The loaded library. One for the process: compiled functions keep addresses of it."""

    def __init__(self) -> None:
        self.path = build_shared_object(SOURCE.read_text(), "ptxsim_host", ("-Wall",))
        self._library = library = ctypes.CDLL(str(self.path))
        library.ptxsim_set_callbacks.argtypes = [_LOAD, _LAUNCH]
        library.ptxsim_set_python.argtypes = [ctypes.c_void_p] * 3
        library.ptxsim_set_raised.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.ptxsim_divert_exchange.argtypes = library.ptxsim_restore_exchange.argtypes = [ctypes.c_void_p]
        library.ptxsim_ranges.restype = ctypes.c_uint64
        library.ptxsim_ranges.argtypes = [ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64))]
        python = ctypes.pythonapi
        functions = (python.PyGILState_Ensure, python.PyGILState_Release, python.PyErr_SetObject)
        library.ptxsim_set_python(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
        self._callbacks: tuple[Any, ...] = ()
        self._raised: BaseException | None = None

    # ------------------------------------------------------------------------------------------------- linking

    def register_in(self, engine: Any) -> Any:
        """Give an MLIR execution engine the addresses of all functions; before anything is looked up in it."""
        for name in symbols():
            engine.raw_register_runtime(name, ctypes.cast(self.function(name), ctypes.c_void_p))
        return engine

    def function(self, name: str) -> Any:
        """The stand-in for a function of the real runtime."""
        return getattr(self._library, PREFIX + name)

    def relink(self, content: bytes) -> bytes:
        """An object file that refers to this library.

        Raises:
            RuntimeMismatch: it refers to a function of the real runtime that has no stand-in.
        """
        return rename_undefined(content, self._linked_name)

    def _linked_name(self, name: str) -> str | None:
        if name in symbols():
            return PREFIX + name
        if RUNTIME_NAME.fullmatch(name):
            raise RuntimeMismatch(f"a compiled function calls {name}, which ptxsim/host/runtime.c doesn't provide")
        return None

    # ------------------------------------------------------------------------------------------------ callbacks

    def set_callbacks(self, on_load: LoadCallback, on_launch: LaunchCallback) -> None:
        """What loading a library and launching a kernel call. Exceptions are kept for `take_raised`, or raised by
        TVM-FFI as they are."""

        def load(library: int, image: int, num_bytes: int) -> int:
            return self._guard(lambda: on_load(library, image, num_bytes))

        def launch(library: int, kernel: bytes, config: Any, arguments: Any) -> int:
            return self._guard(lambda: on_launch(library, kernel.decode(), config.contents, arguments))

        self._callbacks = _LOAD(load), _LAUNCH(launch)  # kept: C holds no reference
        self._library.ptxsim_set_callbacks(*self._callbacks)

    def _guard(self, callback: Callable[[], None]) -> int:
        self._raised = None
        try:
            callback()
        except BaseException as error:  # KeyboardInterrupt too: there is no other way out through C
            self._raised = error
            self._library.ptxsim_set_raised(id(type(error)), id(error))
            return RAISED_IN_PYTHON
        return 0

    def take_raised(self) -> BaseException | None:
        """The exception of the last callback, once."""
        raised, self._raised = self._raised, None
        self._library.ptxsim_set_raised(None, None)
        return raised

    # --------------------------------------------------------------------------------------- device and tensors

    def set_device(self, capability: tuple[int, int], num_sms: int) -> None:
        """What `cudaDeviceGetAttribute` says."""
        self._library.ptxsim_set_device(*capability, num_sms)

    def divert_exchange(self, table: int) -> None:
        """Change torch's DLPack table, at this address, to announce host memory as CUDA memory."""
        self._library.ptxsim_divert_exchange(table)

    def restore_exchange(self, table: int) -> None:
        """Undo `divert_exchange`."""
        self._library.ptxsim_restore_exchange(table)

    def clear_ranges(self) -> None:
        self._library.ptxsim_clear_ranges()

    def ranges(self) -> list[tuple[int, int]]:
        """[begin, end) addresses of the tensors announced through the diverted table since `clear_ranges`."""
        start = ctypes.POINTER(ctypes.c_uint64)()
        count = self._library.ptxsim_ranges(ctypes.byref(start))
        return [(start[2 * index], start[2 * index + 1]) for index in range(count)]


@functools.cache
def load_runtime() -> Runtime:
    """The process's runtime, built and loaded at the first call."""
    return Runtime()
