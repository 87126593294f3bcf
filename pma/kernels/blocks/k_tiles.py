"""K tiles of a jagged contraction: up to 128 tokens of one segment, the first one a multiple of 128 behind its start.

A warp walks through a range of rows, tile after tile. It holds the offsets of 32 segments, one segment in each lane,
and reads memory once for so many segments, with rows or without. Slots of tiles: `pma.jagged.row_blocks`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from pma.kernels.blocks.segments import WARP, find_segment, first_slot
from pma.layouts.scale_tiles import TILE_ROWS


class RowRange(NamedTuple):
    """Rows begin … end − 1, whole K tiles; `segment` is the one of the first row, or one before it."""

    segment: Int32
    begin: Int32
    end: Int32


class Window(NamedTuple):
    """Neighbouring segments, one in each lane; behind the last segment come some without rows."""

    first: Int32  # lane 0's segment
    begin: Int32  # rows of the lane's own
    end: Int32


class KTile(NamedTuple):
    num_rows: Int32  # 1 … 128
    slot: Int32  # of its scale tile
    segment_end: Int32  # row behind the segment's last
    segment_begin: Int32
    segment: Int32


@cute.jit
def window_at(offsets: cute.Tensor, first: Int32) -> Window:
    segment, last = first + cute.arch.lane_idx(), cute.size(offsets, mode=[0]) - 1
    begin, end = Int32(offsets[cutlass.min(segment, last)]), Int32(offsets[cutlass.min(segment + 1, last)])
    return Window(first, begin, end)


@cute.jit
def k_tile_at(offsets: cute.Tensor, window: Window, row: Int32):
    """The K tile that starts at `row`, which a segment of the window or of a later one holds, and its window."""
    first, begin, end = window
    lane = cute.arch.popc(cute.arch.vote_ballot_sync(end <= row))
    while lane == WARP:
        first, begin, end = window_at(offsets, first + WARP)
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(end <= row))
    segment_begin, segment_end = (cute.arch.shuffle_sync(bound, lane) for bound in (begin, end))
    slot = segment_begin // TILE_ROWS + first + lane + (row - segment_begin) // TILE_ROWS
    tile = KTile(cutlass.min(segment_end - row, TILE_ROWS), slot, segment_end, segment_begin, first + lane)
    return tile, Window(first, begin, end)


@cute.jit
def rows_of_slots(offsets: cute.Tensor, num_segments: Int32, first: Int32, last: Int32) -> RowRange:
    """The rows of the tile slots first … last − 1."""
    segment, begin = _start_of_slot(offsets, num_segments, first)
    _, end = _start_of_slot(offsets, num_segments, last)
    return RowRange(segment, begin, end)


@cute.jit
def _start_of_slot(offsets: cute.Tensor, num_segments: Int32, slot: Int32):
    """(segment, row) where a slot starts; a slot that no segment uses starts where the segment before it ends."""
    segment = cutlass.max(find_segment(offsets, num_segments, slot, TILE_ROWS), 0)
    begin, row = Int32(offsets[segment]), Int32(offsets[segment + 1])
    ahead = cutlass.max(slot - first_slot(offsets, segment, TILE_ROWS), 0)
    if ahead <= (row - begin) // TILE_ROWS:
        row = begin + ahead * TILE_ROWS
    return segment, row


@cute.jit
def count_with_rows(offsets: cute.Tensor, first: Int32, last: Int32) -> Int32:
    """How many of the segments first … last − 1 have rows."""
    count = Int32(0)
    while first < last:
        window = window_at(offsets, first)
        has_rows = window.end > window.begin
        if cute.arch.lane_idx() >= last - first:
            has_rows = False
        count += cute.arch.popc(cute.arch.vote_ballot_sync(has_rows))
        first += WARP
    return count
