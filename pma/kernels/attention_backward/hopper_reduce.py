"""The warpgroup that adds dQ on Hopper: it transposes Q and K, multiplies dS with K and adds the result to a slab.

In a cluster of two each CTA adds half of dQ's columns, over the events of both: half as many additions in L2, which is
what they bind. So each sends the other the half of its Kᵀ that the other multiplies, and every dS that it makes.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup
from quack.utils import elem_pointer, store_shared_remote

from pma.kernels.attention_backward.hopper_operands import HopperBackwardOperands, Shared, TileFacts
from pma.kernels.attention_backward.hopper_spec import REDUCE_WARPS, STEP, slab_shape
from pma.kernels.attention_backward.hopper_tiles import WORD, HopperTiles, byte_of
from pma.kernels.attention_backward.spec import TILE
from pma.kernels.blocks import half_pairs as half
from pma.kernels.blocks.block_scales import log2_of_scale, power_of_two
from pma.kernels.blocks.byte_transpose import GROUPS, PAIRS, load_transposed, permuted, scaled_bytes
from pma.kernels.blocks.memory import add_vector, element_pointer
from pma.kernels.blocks.ring import arrive, next_stage
from pma.kernels.blocks.warpgroup_product import accumulators, fp8_product, group_layout, multiply, with_layout
from pma.layouts import BLOCK
from pma.layouts.transposed import GROUP, permuted_column

FIRST_REDUCE_WARP = 12
REDUCE_BARRIER = 1  # named; 2 and 3 are the epilogue's


class HopperReduction(HopperTiles):
    """What the reducing warpgroup does."""

    softmax_scale: float

    @cute.jit
    def reduce(self, o: HopperBackwardOperands, shared: Shared):
        product, config, ctas = fp8_product(STEP, Float32, warpgroup.OperandSource.SMEM), self.config, self.config.ctas
        part, parts = product.get_slice(0), self.head_dim // STEP // ctas  # of dQ's columns, one after the other
        ds = with_layout(shared.ds_bytes, group_layout(STEP, ctas * TILE, config.ds_buffers))
        k = with_layout(shared.k_transposed_bytes, group_layout(STEP, ctas * TILE, parts))
        ds, k = part.make_fragment_A(part.partition_A(ds)), part.make_fragment_B(part.partition_B(k))
        sums = accumulators(product, STEP, Float32)
        stage, parity, ds_stage, ds_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        turn, tile_parity, is_busy, to_transpose = Int32(0), Int32(0), True, self.spec.steps
        q_log2 = self.largest_q(o, Int32(0)) if const_expr(self.spec.is_shared) else Int32(0)
        to_transpose = Int32(to_transpose if config.q_is_resident else 0)
        while is_busy:
            facts = self.tile_facts(shared, turn)
            rows = facts.rows
            is_busy = rows.tile >= 0
            if is_busy:
                if to_transpose > 0:
                    cute.arch.mbarrier_wait(shared.q_full, 0)
                for step in cutlass.range(to_transpose, unroll=1):
                    self.transpose_q(o, shared, (Int32(0), step, step), q_log2)
                to_transpose = Int32(0)
                cute.arch.mbarrier_wait(shared.k.full, tile_parity)
                self.wait_for_scale(shared, turn)
                unit = self.dq_unit(shared, facts, turn)
                if const_expr(ctas > 1):
                    cute.arch.mbarrier_wait(shared.ds.empty, ds_parity ^ 1)  # both have done with the tile before
                else:
                    self.barrier()  # all have done with the tile before
                self.transpose_k(shared, facts, unit + self.ds_log2(shared, turn))
                arrive(shared.k.empty)
                self.barrier()
                if const_expr(ctas > 1):
                    cute.arch.mbarrier_wait(shared.k_transposed, tile_parity)
                    cute.arch.fence_proxy("async.shared", space="cta")
                if const_expr(not self.spec.is_shared):
                    q_log2 = self.largest_q(o, rows.segment)
                factor = power_of_two(unit)
                for step in cutlass.range(self.spec.steps, unroll=1):
                    if const_expr(not config.q_is_resident):
                        cute.arch.mbarrier_wait(shared.step.full + stage, parity)
                        self.transpose_q(o, shared, (rows.segment, step, stage), q_log2)
                        arrive(shared.step.empty + stage)
                        stage, parity = next_stage(stage, parity, config.stages)
                    cute.arch.mbarrier_wait(shared.ds.full + ds_stage, ds_parity)
                    for index in cutlass.range_constexpr(parts):
                        own = k[None, None, None, index]
                        multiply(product, sums, ds[None, None, None, ds_stage], own, False)
                        warpgroup.wait_group(0)
                        if const_expr(index == parts - 1):
                            arrive(shared.ds.empty + ds_stage, ctas)
                        half_of_columns = self.rank() if const_expr(ctas > 1) else Int32(index)
                        self.add_to_slab(o.dq, (rows.segment, step, half_of_columns), sums, factor)
                    ds_stage, ds_parity = next_stage(ds_stage, ds_parity, config.ds_buffers)
                tile_parity ^= 1
            self.release_facts(shared, turn)
            turn += 1

    @cute.jit
    def barrier(self):
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=32 * REDUCE_WARPS)

    @cute.jit
    def swizzled(self, row: Int32, chunk: Int32) -> Int32:
        """Where 16 bytes of a row lie in a tile of rows of a head."""
        turned = chunk ^ (row % 8 if const_expr(self.head_dim == 128) else row // 2 % 4)
        return row * self.head_dim + turned * 16

    @cute.jit
    def transposed_words(self, tile: cute.Pointer, first_row: Int32, pair: Int32, orders):
        """Of 16 rows and columns 32·pair + 16i + 2g + e, g = lane / 4, the lane's word at index 2i + e."""
        lane = cute.arch.lane_idx()
        row, chunk = first_row + lane % 16, 2 * pair + lane // 16
        four = load_transposed(tile + cute.assume(self.swizzled(row, chunk), 16))
        words = cute.make_rmem_tensor(WORD, Uint32)
        for index in cutlass.range_constexpr(WORD):
            low, high = Uint32(four[index // 2 * 2]), Uint32(four[index // 2 * 2 + 1])
            words[index] = permuted(low, high, orders[index % 2])
        return words

    @cute.jit
    def transpose_k(self, shared: Shared, facts: TileFacts, k_log2: Int32):
        """K of a tile to rows of events, under one scale, zeros where there is none; 32 events by each warp.

        In a cluster: each half of the columns to the CTA that multiplies it.
        """
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_REDUCE_WARP, cute.arch.lane_idx()
        ctas = self.config.ctas
        factor = half.pair_of(power_of_two(log2_of_scale(byte_of(facts.k_scales, warp)) - k_log2))
        target = cute.make_tensor(
            cute.recast_ptr(shared.k_transposed_bytes.iterator, dtype=Uint32),
            cute.make_layout(TILE * self.head_dim // WORD),
        )
        if const_expr(ctas > 1):
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.k_transposed, STEP * TILE)
        for part in cutlass.range(BLOCK // GROUP, unroll=1):
            group = warp * (BLOCK // GROUP) + part
            mask = mask_of_pairs(facts.rows.num_rows - group * GROUP - 2 * (lane % 4))
            for pair in cutlass.range(self.head_dim // BLOCK, unroll=1):
                words = self.transposed_words(shared.k_bytes.iterator, group * GROUP, pair, PAIRS)
                half_of_columns = pair // (STEP // BLOCK)
                first_group = (half_of_columns if const_expr(ctas == 1) else self.rank()) * (TILE // GROUP)
                for index in cutlass.range_constexpr(WORD):
                    column = BLOCK * pair % STEP + 16 * (index // 2) + 2 * (lane // 4) + index % 2
                    place = ((first_group + group) * STEP + column) * WORD + lane % 4
                    word = scaled_bytes(words[index], factor) & mask
                    if const_expr(ctas == 1) or half_of_columns == self.rank():
                        target[place] = word
                    else:
                        pointer = elem_pointer(target, place)
                        store_shared_remote(Int32(word), pointer, shared.k_transposed, half_of_columns)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def transpose_q(self, o: HopperBackwardOperands, shared: Shared, place, q_log2: Int32):
        """Q of a step to the transposed payload, under one scale; 16 seeds by each warp.

        place: (segment, step, buffer).
        """
        (segment, step, buffer), lane = place, cute.arch.lane_idx()
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_REDUCE_WARP
        own, block = Int64(self.segment_of_seeds(segment)), step * (STEP // BLOCK) + group // 2
        exponent = Int32(0)
        if block * BLOCK < self.spec.num_seeds:
            byte = self.scale_byte(o.q_scales, own * self.spec.num_seeds // BLOCK + own + block)
            exponent = log2_of_scale(byte) - q_log2
        factor = half.pair_of(power_of_two(exponent))
        source = shared.q_bytes[None, buffer].iterator
        target = cute.recast_ptr(shared.q_transposed_bytes[None, buffer].iterator, dtype=Uint32)
        for pair in cutlass.range(self.head_dim // BLOCK, unroll=1):
            words = self.transposed_words(source, group * GROUP, pair, GROUPS)
            for index in cutlass.range_constexpr(WORD):
                column = BLOCK * pair + 16 * (index // 2) + 2 * (lane // 4) + index % 2
                row = group * self.head_dim + permuted_column(column)
                target[row * WORD + lane % 4] = scaled_bytes(words[index], factor)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(shared.q_transposed + buffer)

    @cute.jit
    def add_to_slab(self, slabs: cute.Tensor, place, sums: cute.Tensor, factor: Float32):
        """Add a thread's part of dQ, 16 bytes at a time, so that a warp adds to 512 contiguous ones.

        place: (segment, step, half of the columns).
        """
        (segment, step, index), spec = place, self.spec
        thread, _, _ = cute.arch.thread_idx()
        _, steps, halves, pieces, threads, width = slab_shape(spec, 0)
        start = Int64((self.slab(segment) * steps + step) * halves + index) * (pieces * threads * width)
        scale = factor
        if const_expr(spec.dq_dtype == torch.float16):
            scale = factor * (self.softmax_scale * 2.0**spec.numerics.dq_scale_log2)
        words = cute.make_rmem_tensor(WORD, Uint32)
        values = cute.make_tensor(sums.iterator, cute.make_layout((width, pieces)))
        for piece in cutlass.range_constexpr(pieces):
            for word in cutlass.range_constexpr(WORD):
                if const_expr(width == WORD):
                    words[word] = (values[word, piece] * scale).bitcast(Uint32)
                else:
                    low, high = values[2 * word, piece] * scale, values[2 * word + 1, piece] * scale
                    words[word] = half.pair_of_two(low, high)
            target = element_pointer(slabs, start + (piece * threads + thread % threads) * width, 16)
            if const_expr(width == WORD):
                add_vector(target, "f32", cute.recast_tensor(words, Float32))
            else:
                add_vector(target, "f16x2", words)

    @cute.jit
    def slab(self, segment: Int32) -> Int32:
        shared_by = self.config.slabs
        if const_expr(not self.spec.is_shared):
            return segment * self.spec.num_heads + self.head()
        if const_expr(shared_by == 0):
            return self.head() * self.workers() + self.worker()
        return self.head() * shared_by + self.worker() % shared_by


@cute.jit
def mask_of_pairs(count: Int32) -> Uint32:
    """Bytes of rows 0, 8, 1, 9 of which `count` exist."""
    mask = Uint32(0)
    for index in cutlass.range_constexpr(WORD):
        row = (0, 8, 1, 9)[index]
        mask |= Uint32(0xFF << 8 * index) if count > row else Uint32(0)
    return mask
