"""One warp finds row tiles, slots of 128 rows, on the device from offsets, and announces them to the others of its CTA.

Every lane searches for a tile of its own, so that the latency of a search is shared by 32 tiles. A batch of 32 lies in
shared memory while the next is searched for; the barriers of `ring.py` pass batches, not tiles.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from pma.kernels.blocks.ring import arrive
from pma.kernels.blocks.segments import first_slot
from pma.layouts import BLOCK
from pma.layouts.scale_tiles import TILE_ROWS

BATCH = 32
BATCHES = 2
FIELDS = 8  # words of a tile in shared memory


class RowTile(NamedTuple):
    """One row tile, or a slot that no segment uses."""

    tile: Int32  # slot; −1: no more work
    segment: Int32  # −1 in front of the first segment
    begin: Int32  # the segment's first row in the buffer
    first_row: Int32  # the tile's
    num_rows: Int32  # 0 … 128; 0: nothing but scales to fill in
    spare_slots: Int32  # compact scale slots (0 or 1) behind the segment's last block that no segment uses


class Announcements(NamedTuple):
    """Shared memory between the searching warp and the others."""

    full: cute.Pointer
    empty: cute.Pointer
    facts: cute.Tensor  # [FIELDS, BATCH · BATCHES] int32, see RowTile


@cute.jit
def announce_row_tiles(board: Announcements, offsets: cute.Tensor, num_tiles: Int32, worker: Int32, workers: Int32):
    """The searching warp: announce every `workers`-th slot from `worker` on, slots without rows included, then −1."""
    lane = cute.arch.lane_idx()
    first, batch, parity, is_busy = worker, Int32(0), Int32(1), True
    while is_busy:
        facts = find_row_tile(offsets, num_tiles, first + lane * workers)
        cute.arch.mbarrier_wait(board.empty + batch, parity)
        for index in cutlass.range_constexpr(len(RowTile._fields)):
            board.facts[index, batch * BATCH + lane] = facts[index]
        arrive(board.full + batch)
        is_busy = first + (BATCH - 1) * workers < num_tiles
        first += BATCH * workers
        batch ^= 1
        parity ^= 1 - batch


@cute.jit
def next_row_tile(board: Announcements, turn: Int32) -> RowTile:
    """Row tile number `turn` of this CTA; called by every other warp with 0, 1, 2 … until the answer's tile is −1."""
    batch, place = turn // BATCH % BATCHES, turn % (BATCH * BATCHES)
    if turn % BATCH == 0:
        cute.arch.mbarrier_wait(board.full + batch, turn // (BATCH * BATCHES) % 2)
    facts = RowTile(*(board.facts[index, place] for index in range(len(RowTile._fields))))
    if turn % BATCH == BATCH - 1:
        arrive(board.empty + batch)
    return facts


@cute.jit
def find_row_tile(offsets: cute.Tensor, num_tiles: Int32, tile: Int32) -> RowTile:
    """The row tile in slot `tile`, for each lane its own."""
    low, high = Int32(-1), cute.size(offsets, mode=[0]) - 2
    while low < high:  # the last segment whose first slot is not past the tile
        middle = (low + high + 1) // 2
        is_not_past = first_slot(offsets, middle, TILE_ROWS) <= tile
        low, high = middle if is_not_past else low, high if is_not_past else middle - 1
    begin, first_row, num_rows, spare_slots = Int32(0), Int32(0), Int32(0), Int32(0)
    if low >= 0 and tile < num_tiles:
        begin, end = Int32(offsets[low]), Int32(offsets[low + 1])
        local = tile - begin // TILE_ROWS - low
        first_row = begin + local * TILE_ROWS
        num_rows = cutlass.min(cutlass.max(end - begin - local * TILE_ROWS, 0), TILE_ROWS)
        if local == cutlass.max((end - begin + TILE_ROWS - 1) // TILE_ROWS - 1, 0):
            blocks = (end - begin + BLOCK - 1) // BLOCK
            spare_slots = end // BLOCK + 1 - begin // BLOCK - blocks
    return RowTile(tile if tile < num_tiles else Int32(-1), low, begin, first_row, num_rows, spare_slots)
