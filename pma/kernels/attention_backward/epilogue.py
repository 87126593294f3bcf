"""dV and dK of a tile of events: from tensor memory to MXFP8, payload and scales in every form that is consumed.

Two groups of four warps: the first quantises dV, the second dK. Warp w of a group holds events 32w … 32w + 31 of the
tile, one in each lane; rows past the segment's end are selected away.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from pma.kernels.attention_backward.operands import AttentionBackwardOperands, Quantized, Shared
from pma.kernels.attention_backward.spec import COMPUTE_WARPS, DK, DV, TILE, AttentionBackwardSpec
from pma.kernels.blocks.block_quantize import (
    ABSENT_SCALES,
    block_amax,
    cast_row,
    clear_unused_scales,
    store_column_tile,
    store_compact_scales,
    store_half_tiles,
    store_row,
    store_row_tile,
    with_bytes,
)
from pma.kernels.blocks.block_scales import scale_byte
from pma.kernels.blocks.memory import clear_rows
from pma.kernels.blocks.row_tiles import RowTile
from pma.kernels.blocks.tensor_memory import load_row
from pma.layouts import BLOCK

GROUP_WARPS = COMPUTE_WARPS // 2
GROUP_BARRIER, GROUP_THREADS = 2, 32 * GROUP_WARPS  # named barriers, by group


class GradientEpilogue:
    """What the computing warps do when all steps of a tile are done."""

    def __init__(self, spec: AttentionBackwardSpec):
        self.spec, self.head_dim = spec, spec.head_dim
        self.softmax_scale = spec.head_dim**-0.5
        self.heads_per_tile = TILE // spec.head_dim

    @cute.jit
    def head(self) -> Int32:
        block, _, _ = cute.arch.block_idx()
        return block % self.spec.num_heads

    @cute.jit
    def store_sums(self, o: AttentionBackwardOperands, shared: Shared, tensor_memory: cute.Pointer, facts: RowTile):
        """Quantise dV (the first four warps) or dK (the others) of a tile, and store payload and scales."""
        if cute.arch.warp_idx() < GROUP_WARPS:
            word = self.store_gradient(o.dv, tensor_memory + DV, facts, 1.0)
            self.store_scales(o.dv, shared.scale_words[None, 0], facts, (word, GROUP_BARRIER))
        else:
            word = self.store_gradient(o.dk, tensor_memory + DK, facts, self.softmax_scale)
            self.store_scales(o.dk, shared.scale_words[None, 1], facts, (word, GROUP_BARRIER + 1))

    @cute.jit
    def store_gradient(
        self, out: Quantized, region: cute.Pointer, facts: RowTile, factor: cutlass.Constexpr[float]
    ) -> Uint32:
        """Store this warp's row block; → its scale bytes, that of the first 32 columns lowest, 1.0 for no columns."""
        row = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 * BLOCK + cute.arch.lane_idx()
        is_row, word = row < facts.num_rows, Uint32(ABSENT_SCALES)
        for block in cutlass.range_constexpr(self.head_dim // BLOCK):
            values = load_row(region + block * BLOCK, BLOCK)
            if const_expr(factor != 1.0):
                for index in cutlass.range_constexpr(BLOCK):
                    values[index] *= factor
            byte = scale_byte(block_amax(values, is_row).bitcast(Uint32))
            payload = cast_row(values, byte)
            if is_row:
                column = self.head() * self.head_dim + block * BLOCK
                store_row(out.data, Int64(facts.first_row + row) * self.spec.columns + column, payload)
            word = with_bytes(word, byte, block, 1)
        return word

    @cute.jit
    def store_scales(self, out: Quantized, words: cute.Tensor, facts: RowTile, turn):
        """Store a tile's scale bytes, compact and as tiles. turn: (this warp's four, named barrier of its group)."""
        word, barrier = turn
        quarter, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4, cute.arch.lane_idx()
        blocks = self.head_dim // BLOCK
        store_compact_scales(out.scales, facts, word, (quarter, self.head() * blocks, blocks))
        if quarter * BLOCK >= facts.num_rows:
            word = Uint32(ABSENT_SCALES)
        if lane == 0:
            words[quarter] = word
        cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP_THREADS)
        self.store_tiles(out, words, facts.tile, quarter)

    @cute.jit
    def store_tiles(self, out: Quantized, words: cute.Tensor, tile: Int32, worker: Int32):
        """Write this head's part of both scale tiles; in two warps, workers 0 and 1."""
        head, heads = self.head(), self.spec.num_heads
        if const_expr(self.heads_per_tile == 2):
            if heads % 2 == 0 or head + 1 < heads:
                if worker == 0:
                    store_half_tiles(out.row_tiles, out.column_tiles, words, (tile, head))
            else:  # beside the last head nobody writes
                if worker == 0:
                    store_row_tile(out.row_tiles, words, tile, head // 2)
                if worker == 1:
                    store_column_tile(out.column_tiles, words, tile, head // 2)
        else:
            if worker == 0:
                store_row_tile(out.row_tiles, words, tile, head)
            if worker == 1:
                store_column_tile(out.column_tiles, words, tile, head)

    @cute.jit
    def store_absent_scales(self, o: AttentionBackwardOperands, facts: RowTile):
        """Fill the tiles of a slot without events, and the spare compact slot of an empty segment."""
        quarter = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        words, blocks = cute.make_rmem_tensor(4, Uint32), self.head_dim // BLOCK
        words.fill(ABSENT_SCALES)
        place = (quarter, self.head() * blocks, blocks)
        if cute.arch.warp_idx() < GROUP_WARPS:
            self.store_tiles(o.dv, words, facts.tile, quarter)
            store_compact_scales(o.dv.scales, facts, words[0], place)
        else:
            self.store_tiles(o.dk, words, facts.tile, quarter)
            store_compact_scales(o.dk.scales, facts, words[0], place)

    @cute.jit
    def clear_outside(self, o: AttentionBackwardOperands):
        """Zero the payload and the scale slots in front of the first segment and behind the last."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        workers, worker = blocks * (32 * COMPUTE_WARPS), block * (32 * COMPUTE_WARPS) + thread
        head, tail = Int32(o.offsets[0]), Int32(o.offsets[cute.size(o.offsets, mode=[0]) - 1])
        for out in (o.dk, o.dv):
            for begin, end in ((Int32(0), head), (tail, cute.size(out.data, mode=[0]))):
                clear_rows(out.data, begin, end, (self.spec.columns, worker, workers))
            clear_unused_scales(out.scales, o.offsets, (worker, workers))
