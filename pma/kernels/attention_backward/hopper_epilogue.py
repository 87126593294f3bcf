"""dV and dK of a tile of events on Hopper: from accumulators to MXFP8 with one scale for a head and 32 rows.

A warp holds 16 events, so two neighbouring warps share a block and exchange its maxima through shared memory. Of each
32 columns a lane has eight neighbouring ones: those of dOᵀ and Qᵀ are permuted (`pma/layouts/transposed.py`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup
from quack.reduce import warp_reduce

from pma.kernels.attention_backward.hopper_operands import Gradient, HopperBackwardOperands, Shared
from pma.kernels.attention_backward.hopper_spec import COMPUTE_WARPS
from pma.kernels.attention_backward.hopper_tiles import HopperTiles
from pma.kernels.blocks.block_quantize import clear_unused_scales, store_compact_scales
from pma.kernels.blocks.block_scales import max_magnitude, power_of_two, scale_byte
from pma.kernels.blocks.memory import clear_bytes, clear_rows, store_words
from pma.kernels.blocks.row_tiles import RowTile
from pma.kernels.blocks.segments import first_slot
from pma.kernels.blocks.warpgroup_product import COLUMN_GROUP, LANE_ROWS, WARP_ROWS
from pma.layouts import BLOCK
from pma.layouts.mxfp8 import SCALE_NAN, SCALE_ONE

FIRST_BARRIER = 2  # named, of the computing warpgroups
FIRST_WARP = 4  # that computes


class HopperGradients(HopperTiles):
    """What the computing warps do when all steps of a tile are done."""

    softmax_scale: float

    @cute.jit
    def store_gradients(self, o: HopperBackwardOperands, shared: Shared, sums, known):
        """sums: (dV, dK); known: (facts of the tile, turn, log2 of Q's largest scale)."""
        facts, turn, q_log2 = known
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_WARP
        count = facts.rows.num_rows - warp * WARP_ROWS - cute.arch.lane_idx() // 4  # rows from the lane's first on
        units = ((-facts.x, 1.0), (q_log2 - self.ds_log2(shared, turn), self.softmax_scale))
        maxima = shared.maxima[None, None, turn % 2]
        for which in cutlass.range_constexpr(2):
            if const_expr(which == 1):
                warpgroup.wait_group(0)  # the last product of dK; dV's is done
            bits = Int32(self.amax(sums[which], count).bitcast(Uint32))  # of magnitudes, NaN the greatest
            largest, (log2, factor) = Uint32(warp_reduce(bits, cutlass.max)).bitcast(Float32), units[which]
            maxima[which, warp] = largest * (power_of_two(log2) * factor)
        cute.arch.barrier(barrier_id=FIRST_BARRIER + warp // 4, number_of_threads=128)
        for which in cutlass.range_constexpr(2):
            amax = max_magnitude(maxima[which, warp], maxima[which, warp ^ 1])
            byte = scale_byte(amax.bitcast(Uint32))
            out = (o.dv, o.dk)[which]
            self.store_rows(out, sums[which], (facts.rows, count, warp), (*units[which], byte))
            if warp % 2 == 0:
                self.store_scales(out, facts.rows, Uint32(byte) * Uint32(0x01010101), warp // 2)

    @cute.jit
    def amax(self, sums: cute.Tensor, count: Int32) -> Float32:
        """Largest magnitude of the lane's rows that exist; NaN wins."""
        values = cute.make_tensor(sums.iterator, cute.make_layout((2, LANE_ROWS, self.head_dim // COLUMN_GROUP)))
        largest = Float32(0.0)
        for r in cutlass.range_constexpr(LANE_ROWS):
            of_row = Float32(0.0)
            for j in cutlass.range_constexpr(self.head_dim // COLUMN_GROUP):
                for e in cutlass.range_constexpr(2):
                    of_row = max_magnitude(of_row, values[e, r, j])
            largest = max_magnitude(largest, of_row if count > 8 * r else Float32(0.0))
        return largest

    @cute.jit
    def store_rows(self, out: Gradient, sums: cute.Tensor, place, scale):
        """Cast and store. place: (tile, rows from the lane's first on, warp).

        scale: (log2 and factor of the unit of the sums, scale byte). The quotient is within fp32, or all values are 0.
        """
        (rows, count, warp), (log2, factor, byte), lane = place, scale, cute.arch.lane_idx()
        in_scale = power_of_two(log2 + SCALE_ONE - byte) * factor
        mask = Uint32(0) if byte == SCALE_NAN else Uint32(0xFFFFFFFF)
        values = cute.make_tensor(sums.iterator, cute.make_layout((2, LANE_ROWS, self.head_dim // COLUMN_GROUP)))
        eight, payload = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(8, Float8E4M3FN)
        words = cute.recast_tensor(payload, Uint32)
        for r in cutlass.range_constexpr(LANE_ROWS):
            row = Int64(rows.first_row + warp * WARP_ROWS + lane // 4 + 8 * r)
            start = row * self.spec.columns + self.head() * self.head_dim + 8 * (lane % 4)
            if count > 8 * r:
                for piece in cutlass.range_constexpr(self.head_dim // 32):
                    for i in cutlass.range_constexpr(8):
                        eight[i] = values[i % 2, r, 4 * piece + i // 2] * in_scale
                    payload.store(eight.load().to(Float8E4M3FN))  # saturates
                    for word in cutlass.range_constexpr(2):
                        words[word] &= mask
                    store_words(out.data, start + 32 * piece, words)

    @cute.jit
    def store_scales(self, out: Gradient, rows: RowTile, word: Uint32, row_block: Int32):
        blocks = self.head_dim // BLOCK
        store_compact_scales(out.scales, rows, word, (row_block, self.head() * blocks, blocks))

    @cute.jit
    def clear_outside(self, o: HopperBackwardOperands):
        """Zero the payload and the scale slots in front of the first segment and behind the last, and empty ones'."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        threads = 32 * COMPUTE_WARPS
        workers, worker = blocks * threads, block * threads + thread - 32 * FIRST_WARP
        head, tail = Int32(o.offsets[0]), Int32(o.offsets[cute.size(o.offsets, mode=[0]) - 1])
        for out in (o.dk, o.dv):
            for begin, end in ((Int32(0), head), (tail, cute.size(out.data, mode=[0]))):
                clear_rows(out.data, begin, end, (self.spec.columns, worker, workers))
            clear_unused_scales(out.scales, o.offsets, (worker, workers))
        blocks = self.spec.columns // BLOCK
        for segment in cutlass.range(worker, cute.size(o.offsets, mode=[0]) - 1, workers, unroll=1):
            if o.offsets[segment] == o.offsets[segment + 1]:
                place = Int64(first_slot(o.offsets, segment, BLOCK)) * blocks
                for out in (o.dk, o.dv):
                    clear_bytes(out.scales, place, place + blocks, Int32(0), Int32(1))
