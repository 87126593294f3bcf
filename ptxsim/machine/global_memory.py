"""Global memory is the memory of this process."""

import ctypes

import numpy as np


def global_bytes(address: int, count: int) -> np.ndarray:
    """`count` bytes at an address, writable. → uint8 [count]."""
    if address < 1 << 16:
        raise ValueError(f"global address {address:#x} is null or nearly so")
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)
