"""Masks of what a thread holds in registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32


@cute.jit
def mask_behind(row: cute.Tensor, count: Int32, value: cutlass.Constexpr[float]):
    """Set to `value` what stands behind the first `count` fp32 values, bit by bit of a mask for each 32."""
    for first in cutlass.range_constexpr(0, cute.size(row), 32):
        left = cutlass.max(count - first, 0)
        bits = Uint32(0xFFFFFFFF) if left >= 32 else (Uint32(1) << Uint32(left)) - 1
        for column in cutlass.range_constexpr(32):
            row[first + column] = row[first + column] if (bits >> column) & 1 != 0 else Float32(value)
