"""Where the row blocks of a jagged tensor lie: arithmetic on offsets, on the device, without a host sync.

Blocks of R rows are counted from each segment's first row, so that a segment's blocks do not depend on its
neighbours. Block r of segment b has the slot  offsets[b] // R + b + r,  which needs no prefix sum over segments
and leaves room for every block in  T // R + B  slots; slots between segments stay unused.

    R = 4, offsets = [0, 3, 3, 9]      rows   0 1 2 | | 3 4 5 6 7 8
                                       slot   0 0 0     2 2 2 2 3 3       (slot 1 belongs to the empty segment)
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RowBlocks(NamedTuple):
    """One entry for each slot: the block's rows are `first_row + 0 … num_rows - 1`; unused slots have num_rows 0."""

    segment: Tensor  # [N] int64
    first_row: Tensor  # [N] int64
    num_rows: Tensor  # [N] int64, 0 … R


def equal_offsets(num_segments: int, rows_per_segment: int, device: torch.device) -> Tensor:
    """Offsets of segments of one length: 0, n, 2n, … → [B+1] int64."""
    return torch.arange(num_segments + 1, device=device) * rows_per_segment


def num_row_blocks(total_rows: int, num_segments: int, rows_per_block: int) -> int:
    """Slots that hold every block of `num_segments` segments in a buffer of `total_rows` rows, whatever the lengths."""
    return total_rows // rows_per_block + num_segments


def row_block_starts(offsets: Tensor, rows_per_block: int) -> Tensor:
    """Slot of each segment's first block. offsets [B+1] → [B] int64."""
    firsts = offsets[:-1].long()
    return firsts // rows_per_block + torch.arange(firsts.shape[0], device=offsets.device)


def row_blocks(offsets: Tensor, total_rows: int, rows_per_block: int) -> RowBlocks:
    """Describe every slot. offsets [B+1] integer, total_rows = T of the buffer → tensors [T // R + B] int64."""
    num_segments = offsets.shape[0] - 1
    slots = torch.arange(num_row_blocks(total_rows, num_segments, rows_per_block), device=offsets.device)
    if num_segments == 0:
        zeros = torch.zeros_like(slots)
        return RowBlocks(zeros, zeros, zeros)
    starts = row_block_starts(offsets, rows_per_block)
    segment = (torch.searchsorted(starts, slots, right=True) - 1).clamp(min=0)
    local = slots - starts[segment]
    first_row = offsets.long()[segment] + local * rows_per_block
    remaining = offsets.long()[segment + 1] - first_row
    num_rows = torch.where(local >= 0, remaining.clamp(0, rows_per_block), 0)
    return RowBlocks(segment, first_row, num_rows)


def segment_of_rows(offsets: Tensor, total_rows: int) -> Tensor:
    """Segment of each row of the buffer, −1 for rows outside the offsets. offsets [B+1] → [T] int64."""
    rows = torch.arange(total_rows, device=offsets.device)
    bounds = offsets.long()
    segment = torch.searchsorted(bounds, rows, right=True) - 1
    return torch.where((rows >= bounds[0]) & (rows < bounds[-1]), segment, -1)


def rows_to_blocks(offsets: Tensor, total_rows: int, rows_per_block: int) -> Tensor:
    """Slot of each row's block; rows outside the offsets get the slot count N (one past the end). → [T] int64."""
    num_segments = offsets.shape[0] - 1
    outside = num_row_blocks(total_rows, num_segments, rows_per_block)
    rows = torch.arange(total_rows, device=offsets.device)
    if num_segments == 0:
        return torch.full_like(rows, outside)
    segment = segment_of_rows(offsets, total_rows)
    inside = segment.clamp(min=0)
    slot = row_block_starts(offsets, rows_per_block)[inside] + (rows - offsets.long()[inside]) // rows_per_block
    return torch.where(segment >= 0, slot, outside)
