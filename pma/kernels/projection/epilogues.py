"""What becomes of an accumulator [128, 128] of a projection: it is quantised, or stored in a float dtype.

An epilogue runs in four warps; warp w holds rows 32w … 32w + 31 of the row tile, one row in each lane, which is what
tensor memory gives a warp. Rows past the segment's end hold products of other rows: they are selected away.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from pma.kernels.blocks.block_quantize import (
    ABSENT_SCALES,
    block_amax,
    cast_row,
    clear_unused_scales,
    columns_of,
    store_column_tile,
    store_compact_scales,
    store_row,
    store_row_tile,
    with_bytes,
)
from pma.kernels.blocks.block_scales import scale_byte
from pma.kernels.blocks.memory import clear_rows
from pma.kernels.blocks.row_tiles import RowTile
from pma.kernels.compile import CUTE_DTYPES
from pma.kernels.projection.operands import ProjectionOperands, Shared
from pma.kernels.projection.spec import TILE, GemmQuantizeSpec, GemmSpec
from pma.layouts import BLOCK

EPILOGUE_WARPS = 4
THREADS = 32 * EPILOGUE_WARPS
BARRIER = 1  # named barrier of these warps


class QuantizeEpilogue:
    """Accumulators → MXFP8: payload, compact scales, scale tiles in both directions, from one reduction."""

    def __init__(self, spec: GemmQuantizeSpec):
        self.spec = spec

    @cute.jit
    def store(self, o: ProjectionOperands, facts: RowTile, row: cute.Tensor, column_tile: Int32) -> Uint32:
        """Quantise and store this warp's row block, row [128] in each lane. → four scale bytes, 1.0 for no columns."""
        width = const_expr(self.spec.columns_per_scale)
        index_of_row = cute.arch.warp_idx() * BLOCK + cute.arch.lane_idx()
        is_row = index_of_row < facts.num_rows
        word = Uint32(ABSENT_SCALES)
        for index in cutlass.range_constexpr(TILE // width):
            column = column_tile * TILE + index * width
            if const_expr(self.spec.has_whole_tiles) or column < self.spec.out_columns:
                values = columns_of(row, index * width, width)
                byte = scale_byte(block_amax(values, is_row).bitcast(Uint32), self.spec.headroom_exponent)
                payload = cast_row(values, byte)
                if is_row:
                    store_row(o.out, Int64(facts.first_row + index_of_row) * self.spec.out_columns + column, payload)
                word = with_bytes(word, byte, index * width // BLOCK, width // BLOCK)
        return word

    @cute.jit
    def store_scales(self, o: ProjectionOperands, shared: Shared, facts: RowTile, column_tile: Int32, turn):
        """Store the scale bytes of a tile. turn: (this warp's four scale bytes, set of scale words)."""
        word, half = turn
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        if const_expr(o.scales is not None):
            store_compact_scales(o.scales, facts, word, (warp, column_tile * (TILE // BLOCK), TILE // BLOCK))
        if const_expr(o.row_tiles is not None):
            words = shared.scale_words[None, half]
            if lane == 0:
                words[warp] = word
            cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)
            if warp == 0:
                store_row_tile(o.row_tiles, words, facts.tile, column_tile)
            if warp == 1:
                store_column_tile(o.column_tiles, words, facts.tile, column_tile)

    @cute.jit
    def clear_outside(self, o: ProjectionOperands):
        """Zero the payload and the scale slots in front of the first segment and behind the last."""
        clear_outside_rows(o, self.spec.out_columns)
        if const_expr(o.scales is not None):
            clear_unused_scales(o.scales, o.offsets, workers_of_grid())


class StoreEpilogue:
    """Accumulators → bf16 or fp32 rows."""

    def __init__(self, spec: GemmSpec):
        self.spec = spec

    @cute.jit
    def store(self, o: ProjectionOperands, facts: RowTile, row: cute.Tensor, column_tile: Int32) -> Uint32:
        """Store this warp's rows, row [128] in each lane. → nothing of use: there are no scales."""
        dtype = CUTE_DTYPES[self.spec.out_dtype]
        index_of_row = cute.arch.warp_idx() * BLOCK + cute.arch.lane_idx()
        for index in cutlass.range_constexpr(TILE // BLOCK):
            column = column_tile * TILE + index * BLOCK
            if const_expr(self.spec.has_whole_tiles) or column < self.spec.out_columns:
                values = cute.make_rmem_tensor(BLOCK, dtype)
                values.store(columns_of(row, index * BLOCK, BLOCK).load().to(dtype))
                if index_of_row < facts.num_rows:
                    element = Int64(facts.first_row + index_of_row) * self.spec.out_columns + column
                    store_row(o.out, element * (dtype.width // 8), cute.recast_tensor(values, Uint32))
        return Uint32(0)

    @cute.jit
    def store_scales(self, o: ProjectionOperands, shared: Shared, facts: RowTile, column_tile: Int32, turn):
        pass

    @cute.jit
    def clear_outside(self, o: ProjectionOperands):
        """Zero the rows in front of the first segment and behind the last."""
        clear_outside_rows(o, self.spec.out_columns * self.spec.out_dtype.itemsize)


@cute.jit
def clear_outside_rows(o: ProjectionOperands, row_bytes: cutlass.Constexpr[int]):
    worker, workers = workers_of_grid()
    head, tail = Int32(o.offsets[0]), Int32(o.offsets[cute.size(o.offsets, mode=[0]) - 1])
    for begin, end in ((Int32(0), head), (tail, cute.size(o.x, mode=[0]))):
        clear_rows(o.out, begin, end, (row_bytes, worker, workers))


@cute.jit
def workers_of_grid():
    """(index of this thread, number of threads) among the epilogues of all CTAs."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    return block * THREADS + thread, blocks * THREADS
