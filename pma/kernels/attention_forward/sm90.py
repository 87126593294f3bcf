"""Attention forward on Hopper: both products in FP8, softmax in registers, jagged keys.

    S = Q Kᵀ    P = exp2(S·c·sQ·sK + shift)·sV/sV*    O = Σ P V    out = O·sV* / l    with c = log2(e)/sqrt(D)

Hopper's products have no block scales. With one scale for a head and 32 rows those of Q and K are one factor of 32
scores (sQ·sK, powers of two) and go into the exponent; V's go into P before its cast, relative to sV*, the largest of
segment and head, at least 2^-12 of it: values of V below take part as if they had that scale (2^-11 of the largest).
shift = 6 − m, with the maximum m moving only when P would leave E4M3 (`AttentionNumerics`).

Each CTA keeps one head and 128 seeds, whose Q stays in registers, and goes through its segments, the longest first, one
KV tile of 128 events after the other. K comes by TMA from the jagged rows. V is the transposed payload, its groups of
16 tokens by a bulk copy each; a group behind the segment's last is that one again, so neither pads nor neighbours are
read, and their P is 0. Its token order makes the accumulators of S the operand P without a shuffle. Two rows behind
Vᵀ's hold what undoes the fold, 2^(0 … 12) as two factors of E4M3, so that the l that O is divided by comes out of the
product; that of lse is summed in registers (`exact_lse`). With `denominator="fp32"` the latter serves both.

FP8 sums keep about 13 bits on Hopper: every few tiles O moves into fp32 sums in shared memory (`promotion`).

Warps: 0 loads · 1 scales of each tile, and the largest of a segment · 2, 3 make registers free · 4–7 and 8–11 compute,
64 seeds each. Order of products: S of a tile, O of the one before, so that softmax runs beside the tensor core. CTAs
of a cluster have the same segments and send each other half of K and V.

Bound at D = 128, for 128 seeds and a KV tile: 1,024 clocks of the tensor core, 1,024 of exponentials; power.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float8E4M3FN, Float32, Int16, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from torch import Tensor

from pma.kernels.attention_forward.hopper_operands import (
    HopperForwardOperands,
    Registers,
    Shared,
)
from pma.kernels.attention_forward.hopper_spec import (
    GROUP_SEEDS,
    RECORD_WORDS,
    TILE,
    WARPGROUPS,
    WEIGHT_ROWS,
    HopperForwardConfig,
    HopperForwardSpec,
    choose_config,
)
from pma.kernels.attention_forward.scores import BLOCKS, FloatScores, HalfScores
from pma.kernels.attention_forward.shares import Attended, Share, SharesOfCtas, Work, empty_results, work_by_length
from pma.kernels.blocks.block_scales import block_scale
from pma.kernels.blocks.memory import element_pointer, load_byte, store_words
from pma.kernels.blocks.ring import Ring, arrive, bulk_load, init_ring, meet, next_stage
from pma.kernels.blocks.warpgroup_product import (
    COLUMN_GROUP,
    LANE_ROWS,
    WARP_ROWS,
    accumulators,
    fp8_product,
    group_layout,
    multiply,
    operand_registers,
    with_layout,
)
from pma.kernels.compile import CUTE_DTYPES, aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.layouts import BLOCK
from pma.layouts.mxfp8 import SCALE_ONE
from pma.layouts.transposed import GROUP
from pma.numerics import MAX_FOLD_LOG2

LOAD_WARP, SCALE_WARP = 0, 1
COMPUTE_WARPS = 4 * WARPGROUPS
REGISTERS = {"compute": 240, "others": 24}
GROUPS = TILE // GROUP  # of tokens in a tile
FOLDS, LARGEST, UNFOLDS = BLOCKS, 2 * BLOCKS, 3 * BLOCKS  # places in a record
FIRST_WEIGHT = 8  # octaves that the first row of weights undoes; E4M3 holds 2^8
WORD = 4
FAR = 15.0  # octaves of P that fp16 holds, and one less


class HopperForward(SharesOfCtas):
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: HopperForwardSpec, config: HopperForwardConfig):
        self.spec, self.config, self.numerics = spec, config, spec.numerics
        self.scale_log2 = math.log2(math.e) / math.sqrt(spec.head_dim)
        self.top = spec.numerics.p_scale_log2 + spec.numerics.rescale_threshold_log2  # octaves that P may reach
        self.out_dtype = CUTE_DTYPES[spec.out_dtype]
        self.scores = HalfScores() if config.scores == "fp16" else FloatScores()
        self.sums_in_product = spec.numerics.denominator == "quantized"
        self.sums_in_registers = not self.sums_in_product or config.exact_lse
        self.out_groups = spec.v_rows // COLUMN_GROUP

    @cute.jit
    def __call__(self, o: HopperForwardOperands, num_ctas: Int32, stream):
        ctas, tile = self.config.ctas, (TILE, self.spec.head_dim)
        operation = cpasync.CopyBulkTensorTileG2SOp()
        if const_expr(ctas > 1):
            operation = cpasync.CopyBulkTensorTileG2SMulticastOp()
        k = cute.make_tensor(cute.recast_ptr(o.k.iterator, dtype=Float8E4M3FN), o.k.layout)
        layout = cute.select(self.k_layout(), mode=[0, 1])
        k_atom, k_rows = cpasync.make_tiled_tma_atom(operation, k, layout, tile, ctas)
        self.kernel(o, k_atom, k_rows).launch(
            grid=[num_ctas, 1, 1], block=[self.config.threads, 1, 1], cluster=[ctas, 1, 1], min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    def k_layout(self):
        """Shared-memory layout of the tiles of K: rows of a head, swizzled."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW128 if self.spec.head_dim == 128 else kinds.K_SW64
        atom = warpgroup.make_smem_layout_atom(kind, Float8E4M3FN)
        return cute.tile_to_shape(atom, (TILE, self.spec.head_dim, self.config.stages), order=(0, 1, 2))

    def v_layout(self):
        """Of the tiles of Vᵀ."""
        return group_layout(self.spec.v_rows, TILE, self.config.stages)

    @cute.kernel
    def kernel(self, o: HopperForwardOperands, k_atom: cute.CopyAtom, k_rows: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            consumers, v_producers = COMPUTE_WARPS * self.config.ctas, 2 if self.sums_in_product else 1
            init_ring(shared.k.full, shared.k.empty, self.config.stages, consumers, 2)
            init_ring(shared.v.full, shared.v.empty, self.config.stages, consumers, v_producers)
        if const_expr(self.sums_in_product):
            self.clear_weights(shared)
        cute.arch.mbarrier_init_fence()
        meet(self.config.ctas)
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS["others"])
            if warp == LOAD_WARP:
                self.load(o, k_atom, k_rows, shared)
            elif warp == SCALE_WARP:
                self.publish_scales(o, shared)
        else:
            cute.arch.setmaxregister_increase(REGISTERS["compute"])
            self.compute(o, shared)
        if const_expr(self.config.ctas > 1):
            meet(self.config.ctas)  # nobody leaves while others send to it

    @cute.jit
    def allocate(self) -> Shared:
        config, spec, smem = self.config, self.spec, SmemAllocator()
        k_barriers = smem.allocate_array(Int64, 2 * config.stages)
        v_barriers = smem.allocate_array(Int64, 2 * config.stages)
        sums = None
        if const_expr(config.promotion > 0):
            layout = cute.make_layout((4, 128, self.out_groups, WARPGROUPS))
            sums = smem.allocate_tensor(Float32, layout, 128)
        return Shared(
            k=Ring(k_barriers, k_barriers + config.stages),
            v=Ring(v_barriers, v_barriers + config.stages),
            records=smem.allocate_tensor(Uint32, cute.make_layout((RECORD_WORDS, config.stages)), 128),
            k_bytes=smem.allocate_tensor(Uint8, cute.make_layout((TILE * spec.head_dim, config.stages)), 1024),
            v_bytes=smem.allocate_tensor(Uint8, cute.make_layout((TILE * spec.v_rows, config.stages)), 128),
            sums=sums,
        )

    @cute.jit
    def clear_weights(self, shared: Shared):
        """Zero the rows behind Vᵀ's; the tensor core reads eight, of which two are written for each tile."""
        thread, _, _ = cute.arch.thread_idx()
        words_of_group = WEIGHT_ROWS * GROUP // WORD
        for stage in cutlass.range_constexpr(self.config.stages):
            words = cute.recast_tensor(shared.v_bytes[None, stage], Uint32)
            if thread < GROUPS * words_of_group:
                group, word = thread // words_of_group, thread % words_of_group
                words[(group * self.spec.v_rows + self.spec.head_dim) * GROUP // WORD + word] = Uint32(0)
        cute.arch.fence_proxy("async.shared", space="cta")

    # ------------------------------------------------------------------------------------------------------ work

    @cute.jit
    def tile(self, work: Work, step: Int32) -> Int32:
        """KV tile of a step."""
        return work.steps - 1 - step if const_expr(self.numerics.kv_order == "reverse") else step

    # --------------------------------------------------------------------------------------------------- loading

    @cute.jit
    def load(self, o: HopperForwardOperands, k_atom: cute.CopyAtom, k_rows: cute.Tensor, shared: Shared):
        share, head_dim, ctas = self.share(), self.spec.head_dim, self.config.ctas
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(ctas > 1) else Int32(0)
        tiles = with_layout(shared.k_bytes, self.k_layout())
        stage, parity, turn = Int32(0), Int32(1), Int32(0)
        work = self.work(o, turn)
        while work.steps > 0:  # empty segments are the last
            rows = cute.domain_offset((work.first_row, 0), k_rows)
            source = cute.local_tile(rows, (TILE, head_dim), (None, share.head))
            target, source = cpasync.tma_partition(
                k_atom, rank, cute.make_layout(ctas), cute.group_modes(tiles, 0, 2), cute.group_modes(source, 0, 2)
            )
            for step in cutlass.range(work.steps, unroll=1):
                tile = self.tile(work, step)
                full = self.fill(shared.k, stage, parity, TILE * head_dim)
                if const_expr(ctas > 1):
                    mask = Int16((1 << ctas) - 1)
                    cute.copy(k_atom, source[None, tile], target[None, stage], tma_bar_ptr=full, mcast_mask=mask)
                else:
                    cute.copy(k_atom, source[None, tile], target[None, stage], tma_bar_ptr=full)
                full = self.fill(shared.v, stage, parity, TILE * head_dim)
                self.load_v(o, work, tile, (shared.v_bytes[None, stage].iterator, full, share.head, rank))
                stage, parity = next_stage(stage, parity, self.config.stages)
            turn += 1
            work = self.work(o, turn)

    @cute.jit
    def fill(self, ring: Ring, stage: Int32, parity: Int32, num_bytes: cutlass.Constexpr[int]) -> cute.Pointer:
        """Wait until a stage is free and announce bytes; returns the barrier to signal."""
        cute.arch.mbarrier_wait(ring.empty + stage, parity)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, num_bytes)
        return ring.full + stage

    @cute.jit
    def load_v(self, o: HopperForwardOperands, work: Work, tile: Int32, place):
        """Copy the groups of a tile, this CTA's part of them; the last one again where there is none.

        place: (shared memory, barrier, head, rank in the cluster).
        """
        target, full, head, rank = place
        groups, group_bytes = GROUPS // self.config.ctas, self.spec.head_dim * GROUP
        lane = cute.arch.lane_idx()
        if lane < groups:
            local = rank * groups + lane
            group = cutlass.min(tile * GROUPS + local, (work.num_rows - 1) // GROUP)
            row = Int64(work.first_row // GROUP + work.segment + group) * self.spec.columns + head * self.spec.head_dim
            source = element_pointer(o.v, row * GROUP, GROUP)
            bulk_load(target + local * self.spec.v_rows * GROUP, source, group_bytes, full, self.config.ctas)

    # ---------------------------------------------------------------------------------------------------- scales

    @cute.jit
    def publish_scales(self, o: HopperForwardOperands, shared: Shared):
        """Write the scales of each tile beside it, and the rows that sum P."""
        share, lane = self.share(), cute.arch.lane_idx()
        stage, parity, turn = Int32(0), Int32(1), Int32(0)
        work = self.work(o, turn)
        while work.steps > 0:
            largest = self.largest_scale(o, work, share)
            byte = self.scale_of_lane(o, work, share, self.tile(work, Int32(0)))
            for step in cutlass.range(work.steps, unroll=1):
                following = byte
                if step + 1 < work.steps:
                    following = self.scale_of_lane(o, work, share, self.tile(work, step + 1))
                octaves = cutlass.min(largest - byte, MAX_FOLD_LOG2)
                cute.arch.mbarrier_wait(shared.k.empty + stage, parity)
                word = block_scale(byte).bitcast(Uint32)
                if lane >= FOLDS:
                    word = self.scores.encode(-Float32(octaves))
                if lane == LARGEST:
                    word = Uint32(largest)
                if lane >= UNFOLDS:
                    word = self.scores.encode(block_scale(SCALE_ONE + octaves))
                if lane < RECORD_WORDS:
                    shared.records[lane, stage] = word
                arrive(shared.k.full + stage)
                if const_expr(self.sums_in_product):
                    octaves = cute.arch.shuffle_sync(octaves, FOLDS + lane // 8)
                    cute.arch.mbarrier_wait(shared.v.empty + stage, parity)
                    self.store_weights(shared, stage, octaves)
                    arrive(shared.v.full + stage)
                stage, parity = next_stage(stage, parity, self.config.stages)
                byte = following
            turn += 1
            work = self.work(o, turn)

    @cute.jit
    def scale_of_lane(self, o: HopperForwardOperands, work: Work, share: Share, tile: Int32) -> Int32:
        """Lanes 0–3 of each eight: K's scale byte of a block of the tile, 4–7: V's; the last block's where none is."""
        lane = cute.arch.lane_idx()
        block = cutlass.min(tile * BLOCKS + lane % BLOCKS, (work.num_rows - 1) // BLOCK)
        byte = Int32(0)
        if lane % (2 * BLOCKS) < BLOCKS:
            byte = self.scale(o.k_scales, work, share, block)
        else:
            byte = self.scale(o.v_scales, work, share, block)
        return byte

    @cute.jit
    def scale(self, scales: cute.Tensor, work: Work, share: Share, block: Int32) -> Int32:
        slot = work.first_row // BLOCK + work.segment + block
        return load_byte(
            scales, Int64(slot) * (self.spec.columns // BLOCK) + share.head * (self.spec.head_dim // BLOCK)
        )

    @cute.jit
    def largest_scale(self, o: HopperForwardOperands, work: Work, share: Share) -> Int32:
        """Largest scale byte of V in the segment and head."""
        largest = Int32(0)
        block, blocks = cute.arch.lane_idx(), (work.num_rows + BLOCK - 1) // BLOCK
        while block < blocks:
            largest = cutlass.max(largest, self.scale(o.v_scales, work, share, block))
            block += 32
        for step in cutlass.range_constexpr(5):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
        return largest

    @cute.jit
    def store_weights(self, shared: Shared, stage: Int32, octaves: Int32):
        """Rows D and D + 1 of Vᵀ: 2^octaves of the lane's block in the first, or 2^(octaves − 8) in the second."""
        lane = cute.arch.lane_idx()
        words = cute.recast_tensor(shared.v_bytes[None, stage], Uint32)
        place = ((lane // WORD) * self.spec.v_rows + self.spec.head_dim) * GROUP // WORD + lane % WORD
        for row in cutlass.range_constexpr(2):
            exponent = octaves - FIRST_WEIGHT * row
            is_here = exponent > 0 if const_expr(row == 1) else exponent <= FIRST_WEIGHT
            byte = Uint32((exponent + 7) << 3) if is_here else Uint32(0)  # E4M3 has a bias of 7 and 3 bits behind
            words[place + row * GROUP // WORD] = byte * Uint32(0x01010101)
        cute.arch.fence_proxy("async.shared", space="cta")

    # --------------------------------------------------------------------------------------------------- compute

    @cute.jit
    def compute(self, o: HopperForwardOperands, shared: Shared):
        share, config = self.share(), self.config
        score_product = fp8_product(TILE, self.scores.dtype)
        out_product = fp8_product(self.spec.v_rows, Float32)
        k_tiles = with_layout(shared.k_bytes, self.k_layout())
        v_tiles = with_layout(shared.v_bytes, self.v_layout())
        k = score_product.get_slice(0).make_fragment_B(score_product.get_slice(0).partition_B(k_tiles))
        v = out_product.get_slice(0).make_fragment_B(out_product.get_slice(0).partition_B(v_tiles))
        own = self.registers(score_product, out_product)
        k_stage, k_parity, v_stage, v_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        turn, step, pending, promotions, largest = Int32(1), Int32(0), Int32(0), Int32(0), Uint32(0)
        work, following = self.work(o, turn - 1), self.work(o, turn)
        q_factor = self.load_q(o, share, Int32(0) if const_expr(self.spec.is_shared) else work.segment, own)
        if work.steps > 0:
            scores = accumulators(score_product, TILE, self.scores.dtype)
            cute.arch.mbarrier_wait(shared.k.full + k_stage, k_parity)
            largest = shared.records[LARGEST, k_stage]
            scales = self.read_scales(shared, k_stage, q_factor)
            multiply(score_product, scores, own.q, k[None, None, None, k_stage], False)
            warpgroup.wait_group(0)
            arrive(shared.k.empty + k_stage, config.ctas)
            k_stage, k_parity = next_stage(k_stage, k_parity, config.stages)
            weights, _ = self.softmax(own, self.scores.view(scores), scales, (work, step))
            self.scores.cast(weights, own.p_words)
            step += 1
        while (step < work.steps) | (following.steps > 0):
            ended, ended_largest = work.segment, largest
            if step == work.steps:  # the next tile is another segment's: its scores, beside the last sums of this one
                self.note_end(own)
                turn += 1
                work, step = following, Int32(0)
                following = self.work(o, turn)
                if const_expr(not self.spec.is_shared):
                    q_factor = self.load_q(o, share, work.segment, own)
            scores = accumulators(score_product, TILE, self.scores.dtype)
            cute.arch.mbarrier_wait(shared.k.full + k_stage, k_parity)
            multiply(score_product, scores, own.q, k[None, None, None, k_stage], False)
            cute.arch.mbarrier_wait(shared.v.full + v_stage, v_parity)
            multiply(out_product, own.out, own.p, v[None, None, None, v_stage], pending != 0)
            if step == 0:
                largest = shared.records[LARGEST, k_stage]
            scales = self.read_scales(shared, k_stage, q_factor)
            warpgroup.wait_group(1)
            arrive(shared.k.empty + k_stage, config.ctas)
            k_stage, k_parity = next_stage(k_stage, k_parity, config.stages)
            weights, has_moved = self.softmax(own, self.scores.view(scores), scales, (work, step))
            v_stage, v_parity = self.release_v(shared, v_stage, v_parity)
            pending += 1
            if step == 0:
                self.store(o, shared, (ended, share), own, (ended_largest, promotions))
                pending, promotions = Int32(0), Int32(0)
            else:
                if has_moved:
                    self.rescale(own)
                if const_expr(config.promotion > 0):
                    if pending == config.promotion:
                        self.promote(shared, own, promotions)
                        pending, promotions = Int32(0), promotions + 1
            self.scores.cast(weights, own.p_words)
            step += 1
        if work.steps > 0:
            cute.arch.mbarrier_wait(shared.v.full + v_stage, v_parity)
            multiply(out_product, own.out, own.p, v[None, None, None, v_stage], pending != 0)
            self.release_v(shared, v_stage, v_parity)
            self.note_end(own)
            self.store(o, shared, (work.segment, share), own, (largest, promotions))
            work = following
        else:
            turn -= 1
        while work.segment >= 0:
            self.store_nothing(o, (work.segment, share))
            turn += 1
            work = self.work(o, turn)

    @cute.jit
    def registers(self, score_product: cute.TiledMma, out_product: cute.TiledMma) -> Registers:
        q, q_words = operand_registers(score_product, self.spec.head_dim)
        p, p_words = operand_registers(out_product, TILE)
        rows = [cute.make_rmem_tensor(LANE_ROWS, Float32) for _ in range(8)]
        own = Registers(q, q_words, p, p_words, accumulators(out_product, self.spec.v_rows, Float32), *rows)
        for row in (own.shifts, own.totals):
            row.fill(0.0)
        own.tops.fill(-Float32.inf)
        own.missed.fill(1.0)
        return own

    @cute.jit
    def first_seed(self, share: Share) -> Int32:
        """The first of the warp's 16 seeds."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        return share.seed_tile * TILE + warp // 4 * GROUP_SEEDS + warp % 4 * WARP_ROWS

    @cute.jit
    def load_q(self, o: HopperForwardOperands, share: Share, segment: Int32, own: Registers) -> Float32:
        """Load the thread's part of Q, zeros for seeds that don't exist; returns the octaves of a unit of its scale."""
        lane, spec, first = cute.arch.lane_idx(), self.spec, self.first_seed(share)
        words = cute.recast_tensor(o.q, Uint32)
        for r in cutlass.range_constexpr(LANE_ROWS):
            seed = first + lane // 4 + 8 * r
            for column in cutlass.range_constexpr(spec.head_dim // GROUP):  # h + 2b of the word (r, h, b)
                own.q_words[r + 2 * column] = Uint32(0)
            if seed < spec.num_seeds:
                row = Int64(segment) * spec.num_seeds + seed
                start = (row * spec.columns + share.head * spec.head_dim) // WORD + lane % 4
                for column in cutlass.range_constexpr(spec.head_dim // GROUP):
                    word = cute.make_tensor(element_pointer(words, start + 4 * column, WORD), cute.make_layout(1))
                    own.q_words[r + 2 * column] = word[0]
        byte = Int32(SCALE_ONE)
        if first < spec.num_seeds:
            slot = segment * spec.num_seeds // BLOCK + segment + first // BLOCK
            place = Int64(slot) * (spec.columns // BLOCK) + share.head * (spec.head_dim // BLOCK)
            byte = load_byte(o.q_scales, place)
        return block_scale(byte) * self.scale_log2

    @cute.jit
    def read_scales(self, shared: Shared, stage: Int32, q_factor: Float32):
        """(octaves of a unit of score, fold, what undoes it) of each block of a tile."""
        scales, folds, unfolds = (cute.make_rmem_tensor(BLOCKS, Uint32) for _ in range(3))
        record = shared.records[None, stage]
        for block in cutlass.range_constexpr(BLOCKS):
            scales[block], folds[block], unfolds[block] = record[block], record[FOLDS + block], record[UNFOLDS + block]
        return self.scores.factors(scales, q_factor), folds, unfolds

    @cute.jit
    def softmax(self, own: Registers, scores: cute.Tensor, scales, place):
        """(P before its cast, whether a maximum has moved, which `own.factors` tells).

        scales: (factors, folds, unfolds), place: (work, step).
        """
        (factors, folds, unfolds), (work, step) = scales, place
        count = work.num_rows - self.tile(work, step) * TILE
        if count < TILE:
            self.scores.mask(scores, count - 2 * (cute.arch.lane_idx() % 4))
        weights = self.scores.new_weights()
        take = self.take_guessing if const_expr(self.config.optimistic) else self.take
        has_moved = take(own, weights, scores, (factors, folds), step == 0)
        if const_expr(self.sums_in_registers):
            for r in cutlass.range_constexpr(LANE_ROWS):
                own.totals[r] += self.scores.total(weights, unfolds, r)
        return weights, has_moved

    @cute.jit
    def take(self, own: Registers, weights: cute.Tensor, scores: cute.Tensor, scales, is_first):
        """P, relative to maxima that are looked at first; returns whether one has moved. scales: (factors, folds)."""
        factors, folds = scales
        maxima, is_past = self.look(own, scores, factors)
        has_moved = cute.arch.vote_any_sync(is_past | is_first)
        if has_moved:
            self.move(own, maxima, is_first)
        self.scores.exponentials(weights, scores, factors, own.shifts, folds)
        return has_moved

    @cute.jit
    def take_guessing(self, own: Registers, weights: cute.Tensor, scores: cute.Tensor, scales, is_first):
        """The same without waiting for maxima: P is lowered where one moves, taken again where fp16 could not hold it.

        The last wait of a step then stands behind the exponentials: the compiler moves it up to a branch, no further.
        """
        factors, folds = scales
        if is_first:
            self.move(own, self.scores.maxima(scores, factors), True)
        self.scores.exponentials(weights, scores, factors, own.shifts, folds)
        maxima, is_past = self.look(own, scores, factors)
        has_moved = cute.arch.vote_any_sync(is_past)
        if has_moved:
            is_far = (maxima[0] + own.shifts[0] > FAR) | (maxima[1] + own.shifts[1] > FAR)
            self.move(own, maxima, False)
            if cute.arch.vote_any_sync(is_far):
                self.scores.exponentials(weights, scores, factors, own.shifts, folds)
            else:
                self.scores.lower(weights, own.factors)
        return has_moved

    @cute.jit
    def look(self, own: Registers, scores: cute.Tensor, factors: cute.Tensor):
        """(the tile's maxima, whether P of one would pass the top)."""
        maxima = self.scores.maxima(scores, factors)
        for r in cutlass.range_constexpr(LANE_ROWS):
            own.tops[r] = cute.arch.fmax(own.tops[r], maxima[r])
        return maxima, (maxima[0] + own.shifts[0] > self.top) | (maxima[1] + own.shifts[1] > self.top)

    @cute.jit
    def move(self, own: Registers, maxima: cute.Tensor, is_first):
        """Make P relative to the tile's maximum, in a segment's first tile and in rows that passed the top."""
        for r in cutlass.range_constexpr(LANE_ROWS):
            maximum, before = quad_max(maxima[r]), own.shifts[r]
            moved = self.scores.round_shift(self.numerics.p_scale_log2 - maximum)
            own.shifts[r] = moved if is_first | (maximum + before > self.top) else before
            factor = cute.math.exp2(own.shifts[r] - before, fastmath=True)
            own.factors[r] = Float32(1.0) if is_first else factor
            own.totals[r] *= own.factors[r]

    @cute.jit
    def note_end(self, own: Registers):
        """Keep what a segment ended with until its last product is done."""
        for r in cutlass.range_constexpr(LANE_ROWS):
            own.ended_shifts[r], own.ended_totals[r], own.ended_tops[r] = own.shifts[r], own.totals[r], own.tops[r]
            own.totals[r], own.tops[r] = Float32(0.0), -Float32.inf

    @cute.jit
    def release_v(self, shared: Shared, stage: Int32, parity: Int32):
        """Wait for the products under way and free the tile of V; returns the next (stage, parity)."""
        warpgroup.wait_group(0)
        arrive(shared.v.empty + stage, self.config.ctas)
        return next_stage(stage, parity, self.config.stages)

    @cute.jit
    def out_of(self, own: Registers) -> cute.Tensor:
        """O as values (e, r, j)."""
        return cute.make_tensor(own.out.iterator, cute.make_layout((2, LANE_ROWS, self.out_groups)))

    @cute.jit
    def rescale(self, own: Registers):
        """Lower what was summed before a maximum moved."""
        out = self.out_of(own)
        for r in cutlass.range_constexpr(LANE_ROWS):
            for j in cutlass.range_constexpr(self.out_groups):
                for e in cutlass.range_constexpr(2):
                    out[e, r, j] *= own.factors[r]
            own.missed[r] *= own.factors[r]

    @cute.jit
    def sums_of_group(self, shared: Shared, j: cutlass.Constexpr[int]) -> cute.Tensor:
        """The thread's four sums (e, r) of eight columns, in shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        return shared.sums[None, thread % 128, j, thread // 128 - 1]

    @cute.jit
    def promote(self, shared: Shared, own: Registers, promotions: Int32):
        """Add O to the fp32 sums, which the first time are not read."""
        if promotions > 0:
            self.collect(shared, own)
        out = self.out_of(own)
        for j in cutlass.range_constexpr(self.out_groups):
            four = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(4):
                four[i] = out[i % 2, i // 2, j]
            cute.autovec_copy(four, self.sums_of_group(shared, j))
        own.missed.fill(1.0)

    @cute.jit
    def collect(self, shared: Shared, own: Registers):
        """O ← O + the fp32 sums."""
        out = self.out_of(own)
        for j in cutlass.range_constexpr(self.out_groups):
            four = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(self.sums_of_group(shared, j), four)
            for i in cutlass.range_constexpr(4):
                out[i % 2, i // 2, j] += four[i] * own.missed[i // 2]

    # --------------------------------------------------------------------------------------------------- storing

    @cute.jit
    def store(self, o: HopperForwardOperands, shared: Shared, place, own: Registers, state):
        """out = O·sV* / l, and the state. place: (segment, share), state: (largest scale of V, promotions)."""
        (segment, share), (largest, promotions) = place, state
        if const_expr(self.config.promotion > 0):
            if promotions > 0:
                self.collect(shared, own)
            own.missed.fill(1.0)
        out = self.out_of(own)
        for r in cutlass.range_constexpr(LANE_ROWS):
            divisor = self.row_sum(own, r, self.sums_in_product)
            total = self.row_sum(own, r, not self.sums_in_registers)
            factor = block_scale(Int32(largest)) / divisor
            values = cute.make_rmem_tensor((2, self.spec.head_dim // COLUMN_GROUP), Float32)
            for j in cutlass.range_constexpr(self.spec.head_dim // COLUMN_GROUP):
                values[0, j], values[1, j] = out[0, r, j] * factor, out[1, r, j] * factor
            past = quad_max(own.ended_tops[r]) + own.ended_shifts[r]  # octaves of the largest P
            below_largest = total * cute.math.exp2(-past, fastmath=True)
            exponent = Int32(below_largest.bitcast(Uint32) >> 23) - SCALE_ONE
            lse = (cute.math.log2(total) - own.ended_shifts[r]) * math.log(2.0)
            self.store_row(o, (segment, share, r), values, (lse, exponent))

    @cute.jit
    def store_nothing(self, o: HopperForwardOperands, place):
        """What a segment without events gets. place: (segment, share)."""
        zeros = cute.make_rmem_tensor((2, self.spec.head_dim // COLUMN_GROUP), Float32)
        zeros.fill(0.0)
        for r in cutlass.range_constexpr(LANE_ROWS):
            self.store_row(o, (*place, r), zeros, (-Float32.inf, Int32(-127)))

    @cute.jit
    def row_sum(self, own: Registers, r: cutlass.Constexpr[int], of_product: cutlass.Constexpr[bool]) -> Float32:
        """l of a row in units of P's static scale, of the cast P or of P before."""
        if const_expr(of_product):
            out, last = self.out_of(own), self.out_groups - 1
            total = out[0, r, last] + out[1, r, last] * 2.0**FIRST_WEIGHT  # in the first lane of four
            return cute.arch.shuffle_sync(total, cute.arch.lane_idx() // 4 * 4)
        total = own.ended_totals[r]
        total += cute.arch.shuffle_sync_bfly(total, offset=1)
        return total + cute.arch.shuffle_sync_bfly(total, offset=2)

    @cute.jit
    def store_row(self, o: HopperForwardOperands, place, values: cute.Tensor, state):
        """The lane's values (e, j) of a row, and the row's (lse, ⌊log2 l⌋). place: (segment, share, which row)."""
        (segment, share, r), (lse, row_sum_log2), dtype = place, state, self.out_dtype
        lane, spec = cute.arch.lane_idx(), self.spec
        seed, rounded = self.first_seed(share) + lane // 4 + 8 * r, cute.make_rmem_tensor(values.layout, dtype)
        rounded.store(values.load().to(dtype))
        per_store = 16 // (dtype.width // 8)
        pieces = spec.head_dim // 4 // per_store  # a lane's; its values are eight neighbouring columns of each 32
        words = cute.make_tensor(cute.recast_ptr(rounded.iterator, dtype=Uint32), cute.make_layout((WORD, pieces)))
        if seed < spec.num_seeds:
            start = (
                (Int64(segment) * spec.num_seeds + seed) * spec.columns + share.head * spec.head_dim + 8 * (lane % 4)
            )
            for piece in cutlass.range_constexpr(pieces):
                column = per_store * piece // 8 * 32 + per_store * piece % 8
                store_words(o.out, (start + column) * (dtype.width // 8), words[None, piece])
            if lane % 4 == 0:
                index = (Int64(segment) * spec.num_heads + share.head) * spec.num_seeds + seed
                cute.make_tensor(element_pointer(o.lse, index, 4), cute.make_layout(1))[0] = lse
                cute.make_tensor(element_pointer(o.row_sum_log2, index, 4), cute.make_layout(1))[0] = row_sum_log2


@cute.jit
def quad_max(value: Float32) -> Float32:
    """Maximum over the four lanes that share a row."""
    for offset in cutlass.range_constexpr(1, 3):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def build(arch: str, spec: HopperForwardSpec, config: HopperForwardConfig, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    u8, columns, blocks = torch.uint8, spec.columns, spec.columns // BLOCK
    state = (None, spec.num_heads, spec.num_seeds)
    operands = HopperForwardOperands(
        q=fake_tensor(u8, None, columns),
        q_scales=fake_tensor(u8, None, blocks, alignment=1),
        k=fake_tensor(u8, None, columns),
        k_scales=fake_tensor(u8, None, blocks, alignment=1),
        v=fake_tensor(u8, None, columns, GROUP),
        v_scales=fake_tensor(u8, None, blocks, alignment=1),
        work=fake_tensor(torch.int32, None, 4),
        out=fake_tensor(spec.out_dtype, None, columns),
        lse=fake_tensor(torch.float32, *state, alignment=4),
        row_sum_log2=fake_tensor(torch.int32, *state, alignment=4),
    )
    return compile_for(arch, HopperForward(spec, config), operands, Int32(0), options=options)


compiled = cached(build)


class HopperOperand(NamedTuple):
    """A matrix in MXFP8 with one scale for a head and 32 rows."""

    data: Tensor  # [rows, E] uint8, or the transposed payload [rows // 16 + B, E, 16]
    scales: Tensor  # compact: [rows // 32 + B, E / 32] uint8


def launch(
    spec: HopperForwardSpec, q: HopperOperand, k: HopperOperand, v: HopperOperand, offsets: Tensor,
    config: HopperForwardConfig | None = None, work: Tensor | None = None,
) -> Attended:  # fmt: skip
    """Allocate the results and start the kernel on the current stream.

    Args:
        q: [S, E] or [B·S, E].    k: [T, E].    v: the transposed payload [T // 16 + B, E, 16].
        offsets: [B + 1] of spec.offsets_dtype.
        config: instead of the one that `choose_config` takes.
        work: what `work_by_length(offsets)` gave, for calls that share it.
    """
    num_segments, device = offsets.shape[0] - 1, k.data.device
    result = empty_results(spec, num_segments, device)
    if num_segments == 0 or k.data.shape[0] == 0:  # a tensor map has no room for no rows
        return Attended(result.out.zero_(), result.lse.fill_(-math.inf), result.row_sum_log2.fill_(-127))
    if work is None:
        work = work_by_length(offsets)
    facts = device_facts(device)
    workers = max(1, min(num_segments, num_multiprocessors(device) // spec.groups))
    operands = HopperForwardOperands(
        aligned(q.data), q.scales.contiguous(), aligned(k.data), k.scales.contiguous(), aligned(v.data),
        v.scales.contiguous(), work, result.out.flatten(0, 1), result.lse, result.row_sum_log2,
    )  # fmt: skip
    with torch.cuda.device(device):
        compiled(facts.arch, spec, config or choose_config(spec, facts))(operands, workers * spec.groups)
    return result
