"""What the kernels know about the GPUs they are compiled for, without asking a driver."""

import functools
from dataclasses import dataclass

import torch

KIB = 1024


@dataclass(frozen=True)
class DeviceFacts:
    """Limits of one architecture (CUDA C++ programming guide, table of compute capabilities)."""

    arch: str  # what the compiler is told
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    shared_bytes_reserved: int = KIB  # the system's share of each block


SM90 = DeviceFacts("sm_90a", 227 * KIB, 228 * KIB)
SM100 = DeviceFacts("sm_100a", 227 * KIB, 228 * KIB)
SM103 = DeviceFacts("sm_103a", 227 * KIB, 228 * KIB)

_BY_CAPABILITY = {(9, 0): SM90, (10, 0): SM100, (10, 3): SM103}


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts | None:
    """Facts of a CUDA device, None where the library has no kernels for it."""
    if device.type != "cuda":
        return None
    return _BY_CAPABILITY.get(torch.cuda.get_device_capability(device))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
