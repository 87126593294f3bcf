"""Runs a kernel written as PTX text on a real GPU, through the CUDA driver: the other side of comparisons."""

import ctypes
import functools

import numpy as np
import torch
from ptx_kernels import kernel_text


class DriverError(RuntimeError):
    """The driver refused; the message holds the compiler's log where there is one."""


@functools.cache
def _driver() -> ctypes.CDLL:
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes the device's primary context current
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str, log: bytes = b"") -> None:
    if code:
        raise DriverError(f"{what} returned {code}: {log.decode(errors='replace')}")


@functools.lru_cache(maxsize=8)
def _function(text: str) -> ctypes.c_void_p:
    module, function, log = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(8192)
    options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
    code = _driver().cuModuleLoadDataEx(ctypes.byref(module), text.encode(), 2, options, values)
    _check(code, "cuModuleLoadDataEx", log.value)
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, b"kernel"), "cuModuleGetFunction")
    return function


def run(body: str, *arguments: np.ndarray | int | bytes, **launch) -> None:
    """Like `ptx_kernels.run`, on the GPU: arrays go there and come back. bytes: a parameter of 128 aligned bytes."""
    text = kernel_text(body, arguments, target="sm_90a", cluster=launch.get("cluster", (1,))[0])
    function, tensors, values = _function(text), [], []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            tensors.append((argument, torch.from_numpy(argument.view(np.uint8).reshape(-1).copy()).cuda()))
            values.append(ctypes.c_uint64(tensors[-1][1].data_ptr()))
        elif isinstance(argument, bytes):
            values.append((ctypes.c_uint8 * len(argument)).from_buffer_copy(argument))
        else:
            values.append(ctypes.c_uint64(argument & (1 << 64) - 1))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    grid, block, shared = launch.get("grid", (1, 1, 1)), launch.get("block", (32, 1, 1)), launch.get("shared_bytes", 0)
    if shared > 48 << 10:
        _check(_driver().cuFuncSetAttribute(function, 8, shared), "cuFuncSetAttribute")
    _check(_driver().cuLaunchKernel(function, *grid, *block, shared, None, pointers, None), "cuLaunchKernel")
    torch.cuda.synchronize()
    for array, tensor in tensors:
        array.view(np.uint8).reshape(-1)[...] = tensor.cpu().numpy()


def address_on_gpu(array: np.ndarray) -> tuple[torch.Tensor, int]:
    """A copy on the GPU that outlives the call, and its address."""
    tensor = torch.from_numpy(array.view(np.uint8).reshape(-1).copy()).cuda()
    return tensor, tensor.data_ptr()
