"""What happens to P and dS before they enter a matrix product: one strategy for each precision.

All take and return tensors [C, H, S, N] for C tiles of N events; results are float64 holding the rounded values.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pma.layouts.mxfp8 import BLOCK, round_e4m3
from pma.layouts.quantize import quantize_blocks
from pma.numerics import E4M3_MAX_EXPONENT, AttentionNumerics


class Rounding(Protocol):
    """Rounding points of one precision."""

    numerics: AttentionNumerics

    def p_forward(self, p: Tensor) -> Tensor:
        """P for P V, relative to the running maximum (p_cast="static") or to a power of two of the tile's own."""
        ...

    def p_backward(self, p: Tensor, row_sum_log2: Tensor) -> Tensor:
        """P = exp(S − lse), for Pᵀ dO; row_sum_log2 [C, H, S] is ⌊log2 l⌋ of the forward."""
        ...

    def ds(self, ds: Tensor) -> Tensor:
        """dS, for dSᵀ Q and dS K."""
        ...


class PlainRounding:
    """No block scales: P and dS are rounded to `dtype` (float64: not at all)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.numerics = AttentionNumerics(p_cast="static", denominator="fp32", lse_sum="fp32")

    def p_forward(self, p: Tensor) -> Tensor:
        return p.to(self.dtype).double()

    def p_backward(self, p: Tensor, row_sum_log2: Tensor) -> Tensor:
        return p.to(self.dtype).double()

    def ds(self, ds: Tensor) -> Tensor:
        return ds.to(self.dtype).double()


class MXFP8Rounding:
    """P and dS in MXFP8, as the record says."""

    def __init__(self, numerics: AttentionNumerics) -> None:
        self.numerics = numerics

    def p_forward(self, p: Tensor) -> Tensor:
        if self.numerics.p_cast == "block":
            return quantize_blocks(p, rows=1)
        scale = 2.0 ** (self.numerics.p_scale_log2 if self.numerics.p_cast == "static" else E4M3_MAX_EXPONENT)
        return round_e4m3(p * scale).double() / scale

    def p_backward(self, p: Tensor, row_sum_log2: Tensor) -> Tensor:
        if self.numerics.p_cast_backward == "block":
            return _on_padded_rows(p)
        exponent = _least_of_32_seeds(row_sum_log2) + self.numerics.p_scale_log2
        scale = torch.ldexp(torch.ones_like(p[..., 0]), exponent)[..., None]
        return round_e4m3(p * scale).double() / scale.double()

    def ds(self, ds: Tensor) -> Tensor:
        return _on_padded_rows(ds)


def _on_padded_rows(values: Tensor) -> Tensor:
    """[32, 32] quantisation of [..., S, N], S of any size."""
    num_rows = values.shape[-2]
    return quantize_blocks(F.pad(values, (0, 0, 0, -num_rows % BLOCK)))[..., :num_rows, :]


def _least_of_32_seeds(exponents: Tensor) -> Tensor:
    """Minimum over each block of 32 seeds, for every seed. [..., S] int32 → [..., S]."""
    num_seeds = exponents.shape[-1]
    padded = F.pad(exponents, (0, -num_seeds % BLOCK), value=127)
    least = padded.unflatten(-1, (-1, BLOCK)).amin(-1)
    return least.repeat_interleave(BLOCK, -1)[..., :num_seeds]
