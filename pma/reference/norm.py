"""RMSNorm and its gradient, float32 rounding points of the kernels."""

import torch
from torch import Tensor

from pma.jagged import segment_of_rows
from pma.layouts.quantize import ROWS_AT_ONCE


def rmsnorm(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x·rstd·w with rstd = 1/sqrt(mean(x²) + eps).

    values [T, E] float, weight [E] → y [T, E] float32 (one rounding for each product), rstd [T] float32.
    """
    normalised = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    rstd = torch.empty(values.shape[0], dtype=torch.float32, device=values.device)
    for start in range(0, values.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        x = values[rows].float()
        rstd[rows] = (x.double().square().mean(-1) + eps).rsqrt().float()
        normalised[rows] = x * rstd[rows, None] * weight.float()
    return normalised, rstd


def rmsnorm_backward(
    dy: Tensor, values: Tensor, weight: Tensor, rstd: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `rmsnorm`; rows outside the offsets get 0 and do not reach dweight.

    With x̂ = x·rstd and g = dy·w:  dx = rstd·(g − x̂·mean(g·x̂)),  dw = Σ_rows dy·x̂.

    dy [T, E] float32, values [T, E], weight [E], rstd [T] float32, offsets [B+1] → dx [T, E] in the dtype of values,
    dweight [E] float32.
    """
    inside = segment_of_rows(offsets, values.shape[0]) >= 0
    dvalues = torch.empty_like(values, memory_format=torch.contiguous_format)
    dweight = torch.zeros(weight.shape, dtype=torch.float64, device=values.device)
    for start in range(0, values.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        keep = inside[rows, None]
        x_hat = (values[rows].float() * rstd[rows, None]).double()
        gradient = dy[rows].double()
        g = gradient * weight.double()
        dx = rstd[rows, None].double() * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
        dvalues[rows] = torch.where(keep, dx, 0.0).to(values.dtype)
        dweight += torch.where(keep, gradient * x_hat, 0.0).sum(0)
    return dvalues, dweight.float()
