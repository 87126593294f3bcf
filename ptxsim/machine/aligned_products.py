"""Sums as Hopper's tensor cores form them in one wgmma, bit for bit as measured on an H200.

All 32 bytes of the contraction and the accumulator are one sum. Each term is aligned to the largest exponent among
them and cut, toward zero, to F bits behind it: 13 for 8-bit elements, 25 for the others. The exponent of a product is
the sum of its factors' (that of a subnormal factor is the least normal one; zeros don't count), so a product of two
significands may have one bit more in front. The sum is cut, toward zero, to the 13 bits behind its leading one for
8-bit elements, to float32's 23 for the others, or rounded to nearest for float16. So FP8 sums have 14 bits whatever the
accumulator's type, and sums of one sign drift toward zero.

Measured: e4m3, e5m2, bf16, f16, tf32 with every accumulator, on random, wide, sparse, cancelling and special operands
(`tests/ptxsim/hopper_products.npz`); nobody documents it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import ptxsim.core
from ptxsim.host.build import build_shared_object
from ptxsim.machine import formats

FLAGS = ("-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
FRACTION_BITS = {1: 13, 2: 25, 4: 25}  # by bytes of an element
KEPT_BITS = {1: 13, 2: 23, 4: 23}  # of a float32 result
LEAST_EXPONENT = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126, "tf32": -126, "f32": -126}


def aligned_product(
    a: NDArray[np.float64], b: NDArray[np.float64], d: NDArray[np.generic], names: tuple[str, str, str]
) -> NDArray[np.generic]:
    """A Bᵀ + D of one instruction. a [M, K], b [N, K], d [M, N] float32 or float16; names: formats of a, b and d."""
    size = formats.ELEMENT_BYTES[names[0]]
    kept = KEPT_BITS[size] if d.dtype == np.float32 else -1
    a, b, result = (np.ascontiguousarray(each, np.float64) for each in (a, b, d))
    with np.errstate(over="ignore", invalid="ignore"):
        exact = a @ b.T + result  # infinities and NaNs, which the sum below doesn't know
        _library().aligned_products(
            *(each.ctypes.data for each in (a, b, result)), len(a), len(b), a.shape[1], FRACTION_BITS[size], kept,
            *(LEAST_EXPONENT[name] for name in names),
        )  # fmt: skip
        return np.where(np.isfinite(exact), result, exact).astype(d.dtype)


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(ptxsim.core.__path__[0], "aligned_products.c").read_text()
    loaded = ctypes.CDLL(str(build_shared_object(source, "aligned_products", FLAGS)))
    loaded.aligned_products.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 8
    loaded.aligned_products.restype = None
    return loaded
