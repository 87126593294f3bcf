"""Projections and their gradients on dequantised operands: float64 sums, rounded once to float32."""

import torch
from torch import Tensor

from pma.jagged import segment_of_rows
from pma.layouts.quantize import ROWS_AT_ONCE


def linear(values: Tensor, weight: Tensor) -> Tensor:
    """values weightᵀ. values [T, C], weight [N, C] → [T, N] float32."""
    out = torch.empty(values.shape[0], weight.shape[0], dtype=torch.float32, device=values.device)
    transposed = weight.double().t()
    for start in range(0, values.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        out[rows] = (values[rows].double() @ transposed).float()
    return out


def weight_grad(dout: Tensor, values: Tensor) -> Tensor:
    """doutᵀ values, the sum over all rows of all segments. dout [T, N], values [T, C] → [N, C] float32."""
    total = torch.zeros(dout.shape[1], values.shape[1], dtype=torch.float64, device=dout.device)
    for start in range(0, values.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        total += dout[rows].double().t() @ values[rows].double()
    return total.float()


def subtract_segment_means(keys: Tensor, offsets: Tensor) -> Tensor:
    """K smoothing: keys minus their segment's mean row. Softmax does not change. keys [T, E] → [T, E] float32."""
    segment = segment_of_rows(offsets, keys.shape[0])
    num_segments = offsets.shape[0] - 1
    slot = torch.where(segment >= 0, segment, num_segments)
    sums = torch.zeros(num_segments + 1, keys.shape[1], dtype=torch.float64, device=keys.device)
    sums.index_add_(0, slot, torch.where(segment[:, None] >= 0, keys, 0.0).double())
    lengths = torch.cat([offsets.diff(), offsets.new_ones(1)]).clamp(min=1)
    means = (sums / lengths[:, None]).float()
    return keys - means[slot]
