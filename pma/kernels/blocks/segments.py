"""Where a slot of row blocks lies (`pma/jagged/row_blocks.py`), on the device: a warp asks, every lane is answered."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from pma.layouts.scale_tiles import TILE_ROWS

WARP = 32


class TileRows(NamedTuple):
    """The rows of one tile slot; num_rows 0 for a slot that no segment uses."""

    segment: Int32  # −1 in front of the first segment
    begin: Int32  # the segment's rows in the buffer
    end: Int32
    first_row: Int32  # the tile's
    num_rows: Int32  # 0 … 128
    is_last: Int32  # of its segment, whose only one it may be; an empty segment has one


@cute.jit
def first_slot(offsets: cute.Tensor, segment: Int32, rows_per_block: cutlass.Constexpr[int]) -> Int32:
    """Slot of a segment's first block: offsets[b] // R + b. Also defined for b = B, one past the last slot in use."""
    return Int32(offsets[segment]) // rows_per_block + segment


@cute.jit
def find_segment(
    offsets: cute.Tensor, num_segments: Int32, slot: Int32, rows_per_block: cutlass.Constexpr[int]
) -> Int32:
    """The last segment whose first slot is not past `slot`, −1 if there is none.

    A 32-way search: in each round the lanes probe evenly spaced segments, so that 1,000 segments take two or three
    rounds of one load each.
    """
    lane = cute.arch.lane_idx()
    low, count = Int32(-1), num_segments + 1  # the answer is one of low … low + count − 1
    while count > 1:
        step = (count + WARP - 1) // WARP
        probe = low + lane * step
        is_not_past = lane == 0
        if lane > 0 and lane * step < count:
            is_not_past = first_slot(offsets, probe, rows_per_block) <= slot
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(is_not_past)) - 1
        low += passed * step
        count = cutlass.min(step, count - passed * step)
    return low


@cute.jit
def tile_rows(offsets: cute.Tensor, num_segments: Int32, tile: Int32) -> TileRows:
    """The rows of tile slot `tile`."""
    segment = find_segment(offsets, num_segments, tile, TILE_ROWS)
    begin, end, first_row, is_last = Int32(0), Int32(0), Int32(0), Int32(0)
    if segment >= 0:
        begin, end = Int32(offsets[segment]), Int32(offsets[segment + 1])
        local = tile - first_slot(offsets, segment, TILE_ROWS)
        first_row = begin + local * TILE_ROWS
        is_last = Int32(local == cutlass.max((end - begin + TILE_ROWS - 1) // TILE_ROWS - 1, 0))
    num_rows = cutlass.min(cutlass.max(end - first_row, 0), TILE_ROWS)
    return TileRows(segment, begin, end, first_row, num_rows, is_last)


@cute.jit
def spare_slots(offsets: cute.Tensor, rows: TileRows, rows_per_block: cutlass.Constexpr[int]) -> Int32:
    """Slots (0 or 1) between the segment's last block and the next segment, for the segment's last tile; else 0."""
    used = (rows.end - rows.begin + rows_per_block - 1) // rows_per_block
    following = first_slot(offsets, rows.segment + 1, rows_per_block)
    return rows.is_last * (following - rows.begin // rows_per_block - rows.segment - used)
