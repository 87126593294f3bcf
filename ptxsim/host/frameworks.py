"""torch, quack and FlashAttention: what they ask about the device, and the kernels that they keep.

Nothing here imports quack or flash_attn; their modules are looked up among the loaded ones, so that a session costs
nothing for a framework that isn't used.
"""

import ctypes
import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from ptxsim.host.build import cache_folder
from ptxsim.host.device import Device
from ptxsim.host.undo import Undo

FRAMEWORKS = frozenset({"quack", "flash_attn", "cudnn"})  # packages to which CPU tensors say `is_cuda`

# Functions (functools.lru_cache) whose results depend on the device or the environment.
DEVICE_FACTS = {
    "cutlass.base_dsl.env_manager": (
        "get_str_env_var",
        "get_bool_env_var",
        "get_int_env_var",
        "get_int_or_none_env_var",
        "has_env_var",
    ),
    "quack.cute_dsl_utils": (
        "get_device_multiprocessor_count",
        "get_max_active_clusters",
        "_get_device_capacity_cached",
        "get_compile_target_capacity",
    ),
    "flash_attn.cute.interface": ("_get_device_arch",),
    "flash_attn.cute.cute_dsl_utils": (
        "get_max_active_clusters",
        "get_device_capacity",
        "_get_device_arch_and_num_sms",
    ),
}


@contextmanager
def forgotten_facts() -> Iterator[None]:
    """What was remembered about the device outside is forgotten inside, and the reverse."""
    _forget_facts()
    try:
        yield
    finally:
        _forget_facts()


def _forget_facts() -> None:
    for module_name, functions in DEVICE_FACTS.items():
        module = sys.modules.get(module_name)
        for name in functions if module else ():
            function = getattr(module, name, None)
            if function is not None:
                function.cache_clear()


# ------------------------------------------------------------------------------------------------ compiled kernels

# Contents of the caches by device and id of the cache; the cache is kept beside it, so that its id stays its own.
_simulated_kernels: dict[tuple[Device, int], tuple[dict[Any, Any], dict[Any, Any]]] = {}


@contextmanager
def separate_kernel_caches(device: Device, quack_cache_dir: str | None) -> Iterator[None]:
    """Frameworks keep compiled kernels by keys that don't hold the device: inside they find those compiled inside.

    In memory the contents of the dictionaries are exchanged, and kept for the next session with an equal device (its
    size counts: FlashAttention compiles it into the grids of its persistent kernels). On disk quack gets a folder of
    ours, in which every object file has been compiled inside, so that its PTX has a sidecar. FlashAttention's disk
    cache is off unless its user turns it on; its folder is chosen when it is imported. Compiled functions that a
    program keeps by itself are its own affair.

    quack_cache_dir: the environment variable QUACK_CACHE_DIR as it is outside.
    """
    outside = [(cache, dict(cache)) for cache in _kernel_caches()]
    for cache, _ in outside:
        _replace(cache, _simulated_kernels.get((device, id(cache)), (cache, {}))[1])
    try:
        with _quack_cache_in(quack_folder(device), quack_cache_dir):
            yield
    finally:
        for cache in _kernel_caches():
            _simulated_kernels[device, id(cache)] = cache, dict(cache)
            _replace(cache, {})
        for cache, content in outside:
            _replace(cache, content)


def _replace(cache: dict[Any, Any], content: dict[Any, Any]) -> None:
    cache.clear()
    cache.update(content)


def _kernel_caches() -> list[dict[Any, Any]]:
    """The dictionaries of compiled kernels of every function that was decorated with quack's `jit_cache`, in whichever
    package, and of FlashAttention's entry points."""
    caches = []
    if quack_jit := sys.modules.get("quack.cache.jit"):
        # every decorated function is made from one code object, so it is among what refers to that
        codes = [code for code in quack_jit.jit_cache.__code__.co_consts if getattr(code, "co_name", "") == "wrapper"]
        referrers = gc.get_referrers(*codes) if codes else []
        caches += [found.cache for found in referrers if isinstance(found, FunctionType) and hasattr(found, "cache")]
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("flash_attn.cute") and isinstance(module, ModuleType):
            functions = [value for value in vars(module).values() if callable(value) and hasattr(value, "__dict__")]
            found = [vars(function).get("compile_cache") for function in functions]
            caches += [getattr(cache, "cache", cache) for cache in found if cache is not None]
    return list({id(cache): cache for cache in caches}.values())


def quack_folder(device: Device) -> Path:
    """Where quack keeps its object files inside a session."""
    return cache_folder() / f"quack-{device.arch}-{device.num_sms}"


@contextmanager
def _quack_cache_in(folder: Path, outside: str | None) -> Iterator[None]:
    """quack reads QUACK_CACHE_DIR when it is imported, which may be before, inside (`patches` sets the variable, too)
    or never."""
    loaded = sys.modules.get("quack.cache")
    before = loaded.CACHE_DIR if loaded else outside
    if loaded:
        loaded.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        if quack_cache := sys.modules.get("quack.cache"):
            quack_cache.CACHE_DIR = before


# --------------------------------------------------------------------------------------------------- device queries


def patch_device_queries(undo: Undo, device: Device) -> None:
    """The questions that the frameworks put to cutlass and torch. `torch.cuda.is_available()` stays False: with True,
    torch itself would go on to use a driver."""
    from cutlass.utils import HardwareInfo

    def init(info: Any, device_id: int = 0) -> None:
        info.device_id = device_id

    undo.set(HardwareInfo, "__init__", init)
    undo.set(
        HardwareInfo,
        "get_max_active_clusters",
        lambda info, cluster_size, stream=None: device.max_clusters(cluster_size),
    )
    undo.set(HardwareInfo, "get_device_multiprocessor_count", lambda info: device.num_sms)
    undo.set(HardwareInfo, "get_l2_cache_size_in_bytes", lambda info: device.l2_bytes)

    properties = SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        multi_processor_count=device.num_sms,
        L2_cache_size=device.l2_bytes,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
    undo.set(torch.cuda, "get_device_capability", lambda device_id=None: device.capability)
    undo.set(torch.cuda, "get_device_properties", lambda device_id=None: properties)
    undo.set(torch.cuda, "current_device", lambda: 0)
    undo.set(torch.cuda, "current_stream", lambda device_id=None: SimpleNamespace(cuda_stream=0, device_index=0))
    undo.set(torch.cuda, "synchronize", lambda device_id=None: None)
    _patch_is_cuda(undo)


def _patch_is_cuda(undo: Undo) -> None:
    """FlashAttention asserts `tensor.is_cuda`. Only code of FRAMEWORKS is told so; everyone else gets the truth."""
    truth = torch.Tensor.is_cuda

    def is_cuda(tensor: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.partition(".")[0] in FRAMEWORKS or truth.__get__(tensor)

    undo.set(torch.Tensor, "is_cuda", property(is_cuda))


@functools.cache
def exchange_table() -> int:
    """Address of torch's `DLPackExchangeAPI`."""
    python = ctypes.PyDLL(None)
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        raise ImportError(
            f"ptxsim needs a torch with __dlpack_c_exchange_api__ (2.10 or later), got {torch.__version__}"
        )
    return python.PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
