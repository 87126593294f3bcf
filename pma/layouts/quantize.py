"""The bit-exact MXFP8 quantiser in PyTorch: what every kernel's payload and scale bytes are compared with."""

import torch
from torch import Tensor

from pma.jagged import num_row_blocks, rows_to_blocks
from pma.layouts.mxfp8 import (
    BLOCK,
    MXFP8Tensor,
    amax_bits,
    decode_scales,
    from_payload,
    inverse_scales,
    scale_from_amax_bits,
    to_payload,
)

ROWS_AT_ONCE = 1 << 18  # bounds temporaries, not results


def quantize(
    values: Tensor, offsets: Tensor, *, columns_per_scale: int = BLOCK, headroom_exponent: int = 0
) -> MXFP8Tensor:
    """Quantise a jagged matrix to MXFP8, blocks counted from each segment's first row.

    Scales round up (the least power of two that keeps amax <= 448·2^k), payloads round to nearest even. A NaN or Inf
    makes its block NaN: scale byte 255, payload 0. Rows outside the offsets get payload 0; unused scale slots get 0.

    Args:
        values: [T, C] float, C a multiple of `columns_per_scale`.    offsets: [B+1] int32 or int64.
        columns_per_scale: columns whose blocks share one scale, a multiple of 32.
        headroom_exponent: added to every scale exponent.
    Returns:
        data [T, C] uint8, scales [T // 32 + B, C // 32] uint8.
    """
    total_rows, num_columns = values.shape
    num_slots = num_row_blocks(total_rows, offsets.shape[0] - 1, BLOCK)
    slot = rows_to_blocks(offsets, total_rows, BLOCK)
    groups = num_columns // columns_per_scale
    row_amax = torch.empty(total_rows, groups, dtype=torch.int32, device=values.device)
    for start in range(0, total_rows, ROWS_AT_ONCE):
        rows = values[start : start + ROWS_AT_ONCE].float().contiguous()
        row_amax[start : start + ROWS_AT_ONCE] = amax_bits(rows).view(-1, groups, columns_per_scale).amax(-1)
    amax = torch.zeros(num_slots + 1, groups, dtype=torch.int32, device=values.device)
    amax.scatter_reduce_(0, slot[:, None].expand(-1, groups), row_amax, "amax")
    group_scales = scale_from_amax_bits(amax, headroom_exponent)
    group_scales[num_slots] = 255  # rows outside the offsets: payload 0
    data = torch.empty(total_rows, num_columns, dtype=torch.uint8, device=values.device)
    for start in range(0, total_rows, ROWS_AT_ONCE):
        rows = values[start : start + ROWS_AT_ONCE].float()
        row_scales = group_scales[slot[start : start + ROWS_AT_ONCE]].repeat_interleave(columns_per_scale, -1)
        scaled = torch.where(row_scales == 255, 0.0, rows * inverse_scales(row_scales))
        data[start : start + ROWS_AT_ONCE] = to_payload(scaled)
    scales = group_scales[:num_slots].repeat_interleave(columns_per_scale // BLOCK, -1)
    return MXFP8Tensor(data, scales.contiguous())


def dequantize(data: Tensor, scales: Tensor, offsets: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of an MXFP8 matrix; rows outside the offsets are 0. Exact in float32 and float64. → [T, C] dtype."""
    slot = rows_to_blocks(offsets, data.shape[0], BLOCK)
    decoded = decode_scales(scales, dtype)
    decoded = torch.cat([decoded, decoded.new_zeros(1, decoded.shape[1])])
    values = torch.empty(data.shape, dtype=dtype, device=data.device)
    for start in range(0, data.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        values[rows] = from_payload(data[rows], dtype) * decoded[slot[rows]].repeat_interleave(BLOCK, -1)
    return values


def quantize_blocks(values: Tensor, rows: int = BLOCK, columns: int = BLOCK) -> Tensor:
    """Round each aligned [rows, columns] block of the last two dimensions to MXFP8 and back (for P and dS).

    values [..., M, N] float32, M a multiple of `rows` and N of `columns` → float64 [..., M, N], exact.
    """
    *batch, m, n = values.shape
    blocks = values.contiguous().view(*batch, m // rows, rows, n // columns, columns)
    scales = scale_from_amax_bits(amax_bits(blocks).amax(dim=(-3, -1), keepdim=True))
    scaled = torch.where(scales == 255, 0.0, blocks * inverse_scales(scales))
    rounded = from_payload(to_payload(scaled), torch.float64) * decode_scales(scales, torch.float64)
    return rounded.view(*batch, m, n)
