"""Scale tiles (`pma/layouts/scale_tiles.py`): the 4 × 4 bytes of 128 rows and 128 columns, 32 times."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr

from pma.kernels.blocks.memory import element_pointer, store_words
from pma.kernels.blocks.ring import bulk_load
from pma.layouts.mxfp8 import SCALE_ONE
from pma.layouts.scale_tiles import TILE_BYTES


@cute.jit
def load_scale_tile(tiles: cute.Tensor, first: Int32, second: Int32, target, ctas: cutlass.Constexpr[int] = 1):
    """Copy the scale tile [first, second] to shared memory; in one thread. target: (address, barrier).

    In a cluster of `ctas` each CTA copies its part to all.
    """
    offset = (Int64(first) * cute.size(tiles, mode=[1]) + second) * TILE_BYTES
    size = const_expr(TILE_BYTES // ctas)
    part = cute.arch.block_idx_in_cluster() * size if const_expr(ctas > 1) else Int32(0)
    bulk_load(target[0] + part, element_pointer(tiles, offset + part, 16), Int32(size), target[1], ctas)


@cute.jit
def store_tile(row_tiles, column_tiles, scales: cute.Tensor, tile: Int32):
    """One warp writes the tiles of 128 rows in the directions that are not None.

    scales: [4, 4·⌈C/128⌉] bytes in shared memory, one for each row block and block column.
    """
    lane = cute.arch.lane_idx()
    num_column_tiles = const_expr(cute.size(scales, mode=[1]) // 4)
    for column_tile in cutlass.range(num_column_tiles):
        by_row, by_column = cute.make_rmem_tensor(4, Uint32), cute.make_rmem_tensor(4, Uint32)
        for index in cutlass.range_constexpr(4):
            by_row[index], by_column[index] = Uint32(0), Uint32(0)
        for row in cutlass.range_constexpr(4):
            for column in cutlass.range_constexpr(4):
                byte = Uint32(scales[row, column_tile * 4 + column])
                by_row[row] |= byte << (8 * column)
                by_column[column] |= byte << (8 * row)
        if const_expr(row_tiles is not None):
            slot = Int64(tile) * num_column_tiles + column_tile
            store_words(row_tiles, slot * TILE_BYTES + lane * 16, by_row)
        if const_expr(column_tiles is not None):
            slot = Int64(column_tile) * cute.size(column_tiles, mode=[1]) + tile
            store_words(column_tiles, slot * TILE_BYTES + lane * 16, by_column)


@cute.jit
def reset_scales(scales: cute.Tensor, worker: Int32, workers: cutlass.Constexpr[int]):
    """Fill the bytes of a tile with the scale 1.0, which those without a block keep."""
    columns = const_expr(cute.size(scales, mode=[1]))
    for index in cutlass.range(worker, 4 * columns, workers):
        scales[index // columns, index % columns] = Uint8(SCALE_ONE)
