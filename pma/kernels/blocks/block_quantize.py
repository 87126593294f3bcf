"""Quantising [32, 32] blocks that a warp holds in registers, a row in each lane, on Blackwell.

This is how an accumulator of 128 rows leaves tensor memory: warp w reads lanes 32w … 32w + 31, one row block, and a
`redux.sync` over the warp makes the maxima of its 32 rows the maximum of the block (source 2.2.2). Payload and scale
bytes are those of `pma/layouts/mxfp8.py`; the four bytes of a row block's 128 columns travel as one word, column 0
lowest.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint16, Uint32, const_expr
from quack.reduce import warp_reduce

from pma.kernels.blocks.block_scales import inverse_scale, max_magnitude
from pma.kernels.blocks.memory import clear_bytes, store_byte, store_words
from pma.kernels.blocks.row_tiles import RowTile
from pma.kernels.blocks.segments import first_slot
from pma.layouts import BLOCK
from pma.layouts.mxfp8 import SCALE_NAN, SCALE_ONE
from pma.layouts.scale_tiles import TILE_BYTES

ABSENT_SCALES = SCALE_ONE * 0x01010101  # the word of a row block that isn't there


@cute.jit
def block_amax(values: cute.Tensor, is_row: Boolean) -> Float32:
    """max |x| over the rows of a warp, the same in every lane; lanes that hold no row count for nothing. NaN wins.

    values: a multiple of 32.
    """
    maximum = Float32(0.0)
    for first in cutlass.range_constexpr(0, cute.size(values), BLOCK):
        of_block = Float32(0.0)
        for index in cutlass.range(BLOCK, unroll_full=True):
            of_block = max_magnitude(of_block, values[first + index])
        maximum = max_magnitude(maximum, of_block)  # chains of 32, side by side
    maximum = maximum if is_row else Float32(0.0)
    return warp_reduce(maximum, cute.arch.fmax, abs=True, nan=True)


@cute.jit
def cast_row(values: cute.Tensor, byte: Int32) -> cute.Tensor:
    """E4M3 payload of a lane's values under their scale, four to a word; 0 under the scale NaN."""
    size = const_expr(cute.size(values))
    inverse = inverse_scale(byte)
    scaled = cute.make_rmem_tensor(size, Float32)
    for index in cutlass.range(size // 2, unroll_full=True):
        pair = (values[2 * index], values[2 * index + 1])
        scaled[2 * index], scaled[2 * index + 1] = cute.arch.mul_packed_f32x2(pair, (inverse, inverse))
    payload = cute.make_rmem_tensor(size, Float8E4M3FN)
    payload.store(scaled.load().to(Float8E4M3FN))  # saturates
    words = cute.recast_tensor(payload, Uint32)
    for index in cutlass.range_constexpr(size // 4):
        words[index] = Uint32(0) if byte == SCALE_NAN else words[index]
    return words


@cute.jit
def store_row(target: cute.Tensor, offset: Int64, words: cute.Tensor):
    """Store a lane's words, eight at a time, at byte `offset`, a multiple of 32."""
    for index in cutlass.range_constexpr(0, cute.size(words), 8):
        eight = cute.make_rmem_tensor(8, Uint32)
        for word in cutlass.range_constexpr(8):
            eight[word] = words[index + word]
        store_words(target, offset + 4 * index, eight)


@cute.jit
def with_bytes(word: Uint32, byte: Int32, first: cutlass.Constexpr[int], count: cutlass.Constexpr[int]) -> Uint32:
    """The word with `count` of its bytes, the lowest being number 0, replaced by `byte`."""
    mask = const_expr((1 << 8 * count) - 1 << 8 * first)
    return (word & Uint32(mask ^ 0xFFFFFFFF)) | (Uint32(byte) * Uint32(0x01010101) & Uint32(mask))


@cute.jit
def columns_of(row: cute.Tensor, first: cutlass.Constexpr[int], columns: cutlass.Constexpr[int]) -> cute.Tensor:
    """Some of a lane's values, in registers."""
    return cute.make_tensor(row.iterator + first, cute.make_layout(columns))


@cute.jit
def store_compact_scales(scales: cute.Tensor, facts: RowTile, word: Uint32, place):
    """One warp stores the compact scale bytes of a row block, and its slot in a spare one behind a segment.

    place: (row block of the tile, first block column, how many bytes of the word; those past the width are left out).
    """
    (row_block, first, count), lane = place, cute.arch.lane_idx()
    columns, column = const_expr(cute.size(scales, mode=[1])), first + lane
    slot = facts.begin // BLOCK + facts.segment + (facts.first_row - facts.begin) // BLOCK
    if lane < count and column < columns:
        if row_block * BLOCK < facts.num_rows:
            store_byte(scales, Int64(slot + row_block) * columns + column, Int32(word >> Uint32(8 * lane)) & 0xFF)
        if row_block == 0 and facts.spare_slots > 0:
            slot += (facts.num_rows + BLOCK - 1) // BLOCK
            store_byte(scales, Int64(slot) * columns + column, Int32(0))


@cute.jit
def clear_unused_scales(scales: cute.Tensor, offsets: cute.Tensor, workers):
    """Zero the compact scale slots in front of the first segment and behind the last. workers: (own index, number)."""
    (worker, count), columns = workers, const_expr(cute.size(scales, mode=[1]))
    used = first_slot(offsets, cute.size(offsets, mode=[0]) - 1, BLOCK)
    for begin, end in ((Int32(0), Int32(offsets[0]) // BLOCK), (used, cute.size(scales, mode=[0]))):
        clear_bytes(scales, Int64(begin) * columns, Int64(end) * columns, worker, count)


@cute.jit
def store_row_tile(tiles: cute.Tensor, words: cute.Tensor, tile: Int32, column_tile: Int32):
    """One warp writes a row tile [tile, column_tile] from the words of its four row blocks, in shared memory."""
    by_row = cute.make_rmem_tensor(4, Uint32)
    for row in cutlass.range_constexpr(4):
        by_row[row] = words[row]
    _store_tile(tiles, by_row, Int64(tile) * cute.size(tiles, mode=[1]) + column_tile)


@cute.jit
def store_column_tile(tiles: cute.Tensor, words: cute.Tensor, tile: Int32, column_tile: Int32):
    """One warp writes a column tile [column_tile, tile] from the words of its four row blocks, in shared memory."""
    by_column = cute.make_rmem_tensor(4, Uint32)
    for column in cutlass.range_constexpr(4):
        by_column[column] = Uint32(0)
        for row in cutlass.range_constexpr(4):
            by_column[column] |= ((words[row] >> 8 * column) & Uint32(0xFF)) << 8 * row
    _store_tile(tiles, by_column, Int64(column_tile) * cute.size(tiles, mode=[1]) + tile)


@cute.jit
def store_half_tiles(row_tiles: cute.Tensor, column_tiles: cute.Tensor, words: cute.Tensor, place):
    """One warp writes 64 columns of a row tile and of a column tile; words hold two bytes. place: (tile, half tile)."""
    tile, half_tile = place
    lane, column_tile, half = cute.arch.lane_idx(), half_tile // 2, half_tile % 2
    slot = Int64(tile) * cute.size(row_tiles, mode=[1]) + column_tile
    halves = cute.make_ptr(Uint16, row_tiles.iterator.toint(), cute.AddressSpace.gmem, assumed_align=2)
    by_lane = cute.make_tensor(halves + slot * (TILE_BYTES // 2) + lane * 8 + half, cute.make_layout(4, stride=2))
    by_column = cute.make_rmem_tensor(2, Uint32)
    for column in cutlass.range_constexpr(2):
        by_column[column] = Uint32(0)
    for row in cutlass.range_constexpr(4):
        word = words[row]
        by_lane[row] = Uint16(word & Uint32(0xFFFF))
        for column in cutlass.range_constexpr(2):
            by_column[column] |= ((word >> 8 * column) & Uint32(0xFF)) << 8 * row
    slot = Int64(column_tile) * cute.size(column_tiles, mode=[1]) + tile
    store_words(column_tiles, slot * TILE_BYTES + lane * 16 + half * 8, by_column)


@cute.jit
def _store_tile(tiles: cute.Tensor, words: cute.Tensor, slot: Int64):
    store_words(tiles, slot * TILE_BYTES + cute.arch.lane_idx() * 16, words)
