"""The one door to compiled kernels: compile once, keep in memory and on disk.

The cache is quack's `jit_cache`: object files under QUACK_CACHE_DIR (default: a folder of the user in the system's
temporary directory), one lock for each key, so that processes that start together compile a kernel once and the
others load it. The key holds everything that decides the machine code: the Python sources of `pma.kernels` and
`pma.layouts`, the versions of the kernel language and of quack, the architecture, and the kernel's static spec and
configuration.

Compiled functions take torch tensors, launch on the current stream of the tensors' device and return nothing.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from quack.cache import jit_cache

from pma.checks import UnsupportedError

CUTE_DTYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
    torch.uint8: cutlass.Uint8,
}


@functools.cache
def source_fingerprint() -> str:
    """Hash of the sources of the kernels and of the layouts whose constants they take."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted([*root.glob("kernels/**/*.py"), *root.glob("layouts/*.py")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cached(build: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function (arch, spec, config) → compiled kernel; the arguments are hashable, static facts."""

    @jit_cache
    @functools.wraps(build)
    def keyed(module: str, fingerprint: str, *static: Any) -> Any:
        return build(*static)

    @functools.wraps(build)
    def compiled(*static: Any) -> Any:
        return keyed(build.__module__, source_fingerprint(), *static)

    compiled.cache_info = keyed.cache_info
    return compiled


def compile_for(arch: str, kernel: Callable[..., Any], *arguments: Any, options: str = "") -> Any:
    """Compile a kernel's host function for one architecture; needs no GPU. The stream is added as the last argument."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip()
    return cute.compile(kernel, *arguments, stream, options=options)


def fake_tensor(dtype: torch.dtype, *shape: Any, alignment: int = 16) -> cute.Tensor:
    """A contiguous tensor known by shape alone; None in the shape is a size that is not known before the launch."""
    sizes = tuple(cute.sym_int32() if size is None else size for size in shape)
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, cute.sym_int64() if size is None or not isinstance(strides[0], int) else strides[0] * size)
    return cute.runtime.make_fake_tensor(CUTE_DTYPES[dtype], sizes, stride=tuple(strides), assumed_align=alignment)


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous and starts at a multiple of 16 bytes, as bulk copies need, else a copy.

    Raises:
        UnsupportedError: more than 2^31 − 1 rows, which the kernels count in 32 bits.
    """
    if rows.shape[0] >= 1 << 31:
        raise UnsupportedError(f"the kernels take up to 2^31 - 1 rows, got {rows.shape[0]}; use backend='reference'")
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()
