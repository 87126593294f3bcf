"""Attention backward on Hopper: all five products in FP8, dV and dK in registers, jagged keys.

    Sᵀ = K Qᵀ    Pᵀ = exp2(Sᵀ·c·sQ·sK + shift)    dPᵀ = V dOᵀ    dSᵀ = Pᵀ∘(dPᵀ − δ)
    dV = Pᵀ dO   dK = dSᵀ Q·c'   dQ = dS K·c'      with c' = 1/sqrt(D), c = c'·log2(e)

Hopper's products have no block scales: `pma/reference/folded.py` says under which scales P and dS are cast, and
`seed_statistics.py` prepares what is known of the seeds. Q and K are folded as they are transposed, in the kernel: both
products that contract over rows want them that way, so nobody has to write a transposed K; dO arrives in both forms.

Each CTA keeps one head and goes through tiles of 128 events, the seeds 64 at a time. Scores are transposed, events down
the rows, so that Pᵀ and dSᵀ stay in registers as left operands of dV and dK. dS goes to shared memory for dQ: pairs of
events g and g + 8 make the 16-bit units of `stmatrix.trans`, and K is transposed in that order.

Two CTAs may form a cluster: each has tiles of its own, and adds half of dQ's columns over the events of both. Each warp
that makes dS sends it to the other CTA as well, and the reducing warps exchange halves of Kᵀ, once a tile, under one
scale for both. Their steps then run together, and the two buffers of dS become one of twice the size.

Warps: 0 loads · 1 searches tiles, their scales beside them · 2, 3 find the scale of dS from the norms of V · 4–7 and
8–11 compute, 64 events each · 12–15 transpose Q and K, multiply dQ and add it to a slab in L2.

    who       before          waits for        because
    loads     K, V            `k.empty`, …     S and the transposition, or dP, have read the tile before
    loads     a step          `step.empty`     its products are done; Q of that buffer has been transposed
    compute   the first dS    `scale_full`     its scale is known
    compute   dK              `q_transposed`   Qᵀ is there
    compute   storing dS      `ds.empty`       dQ of two steps before has read it; in a cluster both, of the last
    reduce    Kᵀ              `scale_full`     its scale, and in a cluster the other's, are known
    reduce    dQ              `ds.full`        dS of both warpgroups is there, in a cluster of all four

and in a cluster, reduce: before Kᵀ of a tile `ds.empty` of the last step, the other has done with it; before the first
dQ `k_transposed`, the other's half is there.

S is issued in fp16 (headroom of the scales). Order of a step's products: S, dP | exponentials | dV | dS | dK.

Bound at D = 128, for 128 seeds and 128 events: 2,560 clocks of the tensor core; 64 KiB of dQ to L2, 32 in a cluster, at
3.5 TB/s.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from torch import Tensor

from pma.jagged import num_row_blocks
from pma.kernels.attention_backward import seed_statistics
from pma.kernels.attention_backward.hopper_epilogue import HopperGradients
from pma.kernels.attention_backward.hopper_operands import (
    Gradient,
    HopperBackwardOperands,
    Loads,
    Shared,
    Sums,
    TileFacts,
)
from pma.kernels.attention_backward.hopper_reduce import FIRST_REDUCE_WARP, HopperReduction
from pma.kernels.attention_backward.hopper_spec import (
    COMPUTE_WARPS,
    FACT_WORDS,
    GROUP_ROWS,
    NORM_WARPS,
    RECORD_WORDS,
    REDUCE_WARPS,
    STEP,
    SUMMARY_WORDS,
    TILES,
    WARPGROUPS,
    HopperBackwardConfig,
    HopperBackwardSpec,
    choose_config,
    slab_shape,
)
from pma.kernels.attention_backward.hopper_tiles import WORD, byte_of
from pma.kernels.attention_backward.seed_statistics import FIRST_SCALE
from pma.kernels.attention_backward.spec import TILE
from pma.kernels.blocks import half_pairs as half
from pma.kernels.blocks.block_scales import block_scale, power_of_two
from pma.kernels.blocks.byte_transpose import permuted, store_transposed
from pma.kernels.blocks.memory import element_pointer
from pma.kernels.blocks.ring import Ring, arrive, bulk_load, bulk_send, init_ring, meet, next_stage
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
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.layouts import BLOCK
from pma.layouts.transposed import GROUP

LOAD_WARP, SEARCH_WARP = 0, 1
FIRST_COMPUTE_WARP = 4
REGISTERS = {"others": 24, "compute": 208, "reduce": 72}
PIECES = STEP // COLUMN_GROUP  # of a step's seeds in a thread's accumulators


class HopperBackward(HopperReduction, HopperGradients):
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: HopperBackwardSpec, config: HopperBackwardConfig):
        self.spec, self.config, self.head_dim = spec, config, spec.head_dim
        self.softmax_scale = 1.0 / math.sqrt(spec.head_dim)
        self.step_bytes = STEP * spec.head_dim

    @cute.jit
    def __call__(self, o: HopperBackwardOperands, num_ctas: Int32, stream):
        def load(data: cute.Tensor, rows: cutlass.Constexpr[int], by_segment: cutlass.Constexpr[bool]):
            pointer, columns = cute.recast_ptr(data.iterator, dtype=Float8E4M3FN), self.spec.columns
            num_rows, segments = cute.size(data, mode=[0]), Int32(1)
            if const_expr(by_segment):
                num_rows, segments = self.spec.num_seeds, num_rows // self.spec.num_seeds
            shape, stride = (num_rows, columns, segments), (columns, 1, self.spec.num_seeds * columns)
            source = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            operation, tile = cpasync.CopyBulkTensorTileG2SOp(), (rows, self.head_dim)
            return cpasync.make_tiled_tma_atom(operation, source, self.row_layout(rows), tile)

        q, k, v, dout = load(o.q, STEP, True), load(o.k, TILE, False), load(o.v, TILE, False), load(o.dout, STEP, True)
        loads = Loads(*q, *k, *v, *dout)
        self.kernel(o, loads).launch(
            grid=[num_ctas, 1, 1], block=[self.config.threads, 1, 1], cluster=[self.config.ctas, 1, 1],
            min_blocks_per_mp=1, stream=stream,
        )  # fmt: skip

    def row_layout(self, *shape: int):
        """Shared-memory layout of rows of a head, swizzled; shape: rows, buffers."""
        kinds = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if self.head_dim == 128 else kinds.K_SW64, Float8E4M3FN)
        whole = (shape[0], self.head_dim, *shape[1:])
        return cute.tile_to_shape(atom, whole, order=tuple(range(len(whole))))

    @cute.kernel
    def kernel(self, o: HopperBackwardOperands, loads: Loads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            self.init_barriers(shared)
        cute.arch.mbarrier_init_fence()
        meet(self.config.ctas)
        if warp < FIRST_COMPUTE_WARP:
            cute.arch.setmaxregister_decrease(REGISTERS["others"])
            if warp == LOAD_WARP:
                self.load(o, loads, shared)
            elif warp == SEARCH_WARP:
                self.search(o, shared)
            else:
                self.measure(o, shared)
        elif warp < FIRST_REDUCE_WARP:
            cute.arch.setmaxregister_increase(REGISTERS["compute"])
            self.compute(o, shared)
        else:
            cute.arch.setmaxregister_decrease(REGISTERS["reduce"])
            self.reduce(o, shared)
        if const_expr(self.config.ctas > 1):
            meet(self.config.ctas)  # nobody writes to a CTA that is gone

    @cute.jit
    def allocate(self) -> Shared:
        config, smem, q_buffers = self.config, SmemAllocator(), self.config.q_buffers(self.spec)

        def array(dtype, shape, alignment: int) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(shape), alignment)

        def ring(size: int) -> Ring:
            pointer = smem.allocate_array(Int64, 2 * size)
            return Ring(pointer, pointer + size)

        tiles = [array(Uint8, (self.step_bytes, q_buffers), 1024) for _ in range(2)]
        tiles += [array(Uint8, TILE * self.head_dim, 1024) for _ in range(3)]
        tiles += [array(Uint8, (self.step_bytes, config.stages), 1024) for _ in range(2)]
        tiles.append(array(Uint8, (config.ctas * STEP * TILE, config.ds_buffers), 1024))
        return Shared(
            tiles=ring(TILES),
            q_full=smem.allocate_array(Int64, 1),
            q_transposed=smem.allocate_array(Int64, q_buffers),
            k=ring(1),
            v=ring(1),
            k_transposed=smem.allocate_array(Int64, 1),
            scale_full=smem.allocate_array(Int64, TILES),
            step=ring(config.stages),
            ds=ring(config.ds_buffers),
            facts=array(Uint32, (FACT_WORDS, TILES), 16),
            maxima=array(Float32, (2, COMPUTE_WARPS, 2), 16),
            norms=array(Float32, (NORM_WARPS, TILES), 16),
            records=array(Uint32, (RECORD_WORDS, config.stages), 16),
            **dict(zip(Shared._fields[-8:], tiles, strict=True)),
        )

    @cute.jit
    def init_barriers(self, shared: Shared):
        both, config, stays = COMPUTE_WARPS + REDUCE_WARPS, self.config, self.config.q_is_resident
        init_ring(shared.tiles.full, shared.tiles.empty, TILES, both + NORM_WARPS + 1)
        cute.arch.mbarrier_init(shared.q_full, 1)
        for buffer in cutlass.range_constexpr(config.q_buffers(self.spec)):
            cute.arch.mbarrier_init(shared.q_transposed + buffer, REDUCE_WARPS)
        init_ring(shared.k.full, shared.k.empty, 1, both)
        init_ring(shared.v.full, shared.v.empty, 1, COMPUTE_WARPS)
        cute.arch.mbarrier_init(shared.k_transposed, 1)
        for slot in cutlass.range_constexpr(TILES):
            cute.arch.mbarrier_init(shared.scale_full + slot, 1)
        init_ring(shared.step.full, shared.step.empty, config.stages, COMPUTE_WARPS if stays else both)
        init_ring(shared.ds.full, shared.ds.empty, config.ds_buffers, config.ctas * REDUCE_WARPS, COMPUTE_WARPS)

    # --------------------------------------------------------------------------------------------------- loading

    @cute.jit
    def load(self, o: HopperBackwardOperands, loads: Loads, shared: Shared):
        tile_parity, stage, parity = Int32(1), Int32(0), Int32(1)
        turn, is_busy, to_load = Int32(0), True, Int32(self.spec.steps if self.config.q_is_resident else 0)
        while is_busy:
            facts = self.tile_facts(shared, turn).rows
            is_busy = facts.tile >= 0
            if is_busy:
                if to_load > 0:  # a CTA without tiles loads nothing: nobody would wait
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(shared.q_full, self.spec.steps * self.step_bytes)
                for step in cutlass.range(to_load, unroll=1):
                    self.load_rows((loads.q_atom, loads.q), (step, Int32(0)), shared.q_bytes[None, step], shared.q_full)
                to_load = Int32(0)
                for which in cutlass.range_constexpr(2):
                    ring, target = ((shared.v, shared.v_bytes), (shared.k, shared.k_bytes))[which]
                    source = ((loads.v_atom, loads.v), (loads.k_atom, loads.k))[which]
                    cute.arch.mbarrier_wait(ring.empty, tile_parity)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(ring.full, TILE * self.head_dim)
                    self.load_tile(source, facts.first_row, target, ring.full)
                tile_parity ^= 1
                for step in cutlass.range(self.spec.steps, unroll=1):
                    cute.arch.mbarrier_wait(shared.step.empty + stage, parity)
                    self.load_step(o, loads, shared, (facts.segment, step, stage))
                    stage, parity = next_stage(stage, parity, self.config.stages)
            self.release_facts(shared, turn)
            turn += 1

    @cute.jit
    def load_step(self, o: HopperBackwardOperands, loads: Loads, shared: Shared, place):
        """place: (segment, step, stage)."""
        (segment, step, stage), spec = place, self.spec
        full, lane, groups = shared.step.full + stage, cute.arch.lane_idx(), STEP // GROUP
        travels = const_expr(not self.config.q_is_resident)
        num_bytes = const_expr(self.step_bytes * (3 if travels else 2) + 4 * RECORD_WORDS)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
        if const_expr(travels):
            own = (step, self.segment_of_seeds(segment))
            self.load_rows((loads.q_atom, loads.q), own, shared.q_bytes[None, stage], full)
        self.load_rows((loads.dout_atom, loads.dout), (step, segment), shared.dout_bytes[None, stage], full)
        if lane < groups:  # the last group again where there is none
            local = cutlass.min(step * groups + lane, (spec.num_seeds - 1) // GROUP)
            group = Int64(segment) * spec.num_seeds // GROUP + segment + local
            source = (group * spec.columns + self.head() * self.head_dim) * GROUP
            target = shared.dout_transposed_bytes[None, stage].iterator + lane * (GROUP * self.head_dim)
            size = const_expr(GROUP * self.head_dim)
            bulk_load(target, element_pointer(o.dout_transposed, source, GROUP), size, full)
        if lane == groups:
            record = ((Int64(segment) * spec.num_heads + self.head()) * spec.steps + step) * RECORD_WORDS
            source = element_pointer(o.records, record, 16)
            bulk_load(shared.records[None, stage].iterator, source, 4 * RECORD_WORDS, full)

    @cute.jit
    def load_rows(self, source, place, target: cute.Tensor, full: cute.Pointer):
        """Rows of a step. source: (atom, tensor); place: (step, segment)."""
        (atom, rows), (step, segment) = source, place
        tile = cute.local_tile(rows[None, None, segment], (STEP, self.head_dim), (step, self.head()))
        self.copy(atom, tile, target, (self.row_layout(STEP), full))

    @cute.jit
    def load_tile(self, source, first_row: Int32, target: cute.Tensor, full: cute.Pointer):
        atom, rows = source
        whole = cute.domain_offset((first_row, 0), rows[None, None, 0])
        tile = cute.local_tile(whole, (TILE, self.head_dim), (0, self.head()))
        self.copy(atom, tile, target, (self.row_layout(TILE), full))

    @cute.jit
    def copy(self, atom: cute.CopyAtom, tile: cute.Tensor, target: cute.Tensor, place):
        layout, full = place
        shared = with_layout(target, layout)
        to, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(atom, source, to, tma_bar_ptr=full)

    # --------------------------------------------------------------------------------------------------- compute

    @cute.jit
    def compute(self, o: HopperBackwardOperands, shared: Shared):
        self.clear_outside(o)
        group = (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_COMPUTE_WARP) // 4
        score_product = fp8_product(STEP, Float16, warpgroup.OperandSource.SMEM)
        gradient_product = fp8_product(self.head_dim, Float32)
        part, config = score_product.get_slice(0), self.config
        k, v = (
            part.make_fragment_A(part.partition_A(with_layout(data, self.row_layout(GROUP_ROWS, WARPGROUPS))))
            for data in (shared.k_bytes, shared.v_bytes)
        )
        q, dout = (
            part.make_fragment_B(part.partition_B(with_layout(data, self.row_layout(STEP, buffers))))
            for data, buffers in (
                (shared.q_bytes, config.q_buffers(self.spec)), (shared.dout_bytes, config.stages)
            )
        )  # fmt: skip
        part = gradient_product.get_slice(0)
        q_transposed, dout_transposed = (
            part.make_fragment_B(part.partition_B(with_layout(data, group_layout(self.head_dim, STEP, buffers))))
            for data, buffers in (
                (shared.q_transposed_bytes, config.q_buffers(self.spec)), (shared.dout_transposed_bytes, config.stages)
            )
        )  # fmt: skip
        sums = [accumulators(gradient_product, self.head_dim, Float32) for _ in range(2)]
        own = Sums(*operand_registers(gradient_product, STEP), *operand_registers(gradient_product, STEP), *sums)
        stage, parity, ds_stage, ds_parity = Int32(0), Int32(0), Int32(0), Int32(1)
        turn, tile_parity, is_busy, waits_for_q = Int32(0), Int32(0), True, True
        dp_factor, deltdp_factor, q_log2 = Uint32(0), Uint32(0), Int32(0)
        if const_expr(self.spec.is_shared):
            q_log2 = self.largest_q(o, Int32(0))
        while is_busy:
            facts = self.tile_facts(shared, turn)
            rows = facts.rows
            is_busy = rows.tile >= 0
            if is_busy:
                block = GROUP_ROWS // BLOCK * group + cute.arch.warp_idx() % 4 // 2
                k_factor = block_scale(byte_of(facts.k_scales, block))
                if const_expr(config.q_is_resident):
                    if waits_for_q:
                        cute.arch.mbarrier_wait(shared.q_full, 0)
                cute.arch.mbarrier_wait(shared.k.full, tile_parity)
                cute.arch.mbarrier_wait(shared.v.full, tile_parity)
                for step in cutlass.range(self.spec.steps, unroll=1):
                    buffer = step if const_expr(config.q_is_resident) else stage
                    scores = accumulators(score_product, STEP, Float16)
                    dp = accumulators(score_product, STEP, Float16)
                    cute.arch.mbarrier_wait(shared.step.full + stage, parity)
                    multiply(score_product, scores, k[None, None, None, group], q[None, None, None, buffer], False)
                    multiply(score_product, dp, v[None, None, None, group], dout[None, None, None, stage], False)
                    record = shared.records[None, stage]
                    factors = self.score_factors(record, k_factor)
                    shifts = pairs_of_seeds(record, 0)
                    warpgroup.wait_group(1)
                    if step == self.spec.steps - 1:
                        arrive(shared.k.empty)
                    p = half_view(scores)
                    self.exponentials(p, factors, shifts)
                    cast(p, own.p_words)
                    of_step = dout_transposed[None, None, None, stage]
                    multiply(gradient_product, own.dv, own.p, of_step, step != 0)
                    if step == 0:
                        self.wait_for_scale(shared, turn)
                        dp_factor, deltdp_factor = self.ds_factors(shared, facts, turn, block)
                    deltas = pairs_of_seeds(record, 32)
                    for j in cutlass.range_constexpr(PIECES):
                        deltas[j] = half.mul_pairs(deltas[j], deltdp_factor)
                    warpgroup.wait_group(1)
                    if step == self.spec.steps - 1:
                        arrive(shared.v.empty)
                    ds = half_view(dp)
                    for j in cutlass.range_constexpr(PIECES):
                        for r in cutlass.range_constexpr(LANE_ROWS):
                            ds[r, j] = half.mul_pairs(p[r, j], half.fma_pairs(ds[r, j], dp_factor, deltas[j]))
                    cast(ds, own.ds_words)
                    if rows.num_rows < TILE:
                        self.mask(own.ds_words, rows.num_rows - self.first_row())
                    if const_expr(config.q_is_resident):
                        if waits_for_q:
                            cute.arch.mbarrier_wait(shared.q_transposed + buffer, 0)
                    else:
                        cute.arch.mbarrier_wait(shared.q_transposed + buffer, parity)
                    of_step = q_transposed[None, None, None, buffer]
                    multiply(gradient_product, own.dk, own.ds, of_step, step != 0)
                    cute.arch.mbarrier_wait(shared.ds.empty + ds_stage, ds_parity)
                    self.store_ds(shared, own.ds_words, ds_stage)
                    ds_stage, ds_parity = next_stage(ds_stage, ds_parity, config.ds_buffers)
                    warpgroup.wait_group(1 if const_expr(config.q_is_resident) else 0)
                    arrive(shared.step.empty + stage)
                    stage, parity = next_stage(stage, parity, config.stages)
                waits_for_q = False
                if const_expr(not self.spec.is_shared):
                    q_log2 = self.largest_q(o, rows.segment)
                self.store_gradients(o, shared, (own.dv, own.dk), (facts, turn, q_log2))
                tile_parity ^= 1
            self.release_facts(shared, turn)
            turn += 1

    @cute.jit
    def score_factors(self, record: cute.Tensor, k_factor: Float32) -> cute.Tensor:
        """Octaves of a unit of score, for the two blocks of a step's seeds."""
        factors = cute.make_rmem_tensor(2, Uint32)
        for block in cutlass.range_constexpr(2):
            factors[block] = half.pair_of_factor(record[FIRST_SCALE + block].bitcast(Float32) * k_factor)
        return factors

    @cute.jit
    def exponentials(self, p: cute.Tensor, factors: cute.Tensor, shifts: cute.Tensor):
        """P of scores, in place."""
        for j in cutlass.range_constexpr(PIECES):
            for r in cutlass.range_constexpr(LANE_ROWS):
                octaves = half.fma_pairs(p[r, j], factors[j // (PIECES // 2)], shifts[j])
                p[r, j] = half.exp2_of_pair(octaves)

    @cute.jit
    def ds_factors(self, shared: Shared, facts: TileFacts, turn: Int32, block: Int32):
        """What a sum of payloads of dP and a unit of δ are in dS, over P."""
        exponent = self.ds_log2(shared, turn) - facts.x
        of_dp = power_of_two(exponent) * block_scale(byte_of(facts.v_scales, block))
        return half.pair_of(of_dp), half.pair_of(power_of_two(exponent + facts.delta_log2))

    @cute.jit
    def first_row(self) -> Int32:
        """The lane's first event of a tile; its second is 8 behind."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_COMPUTE_WARP
        return warp * WARP_ROWS + cute.arch.lane_idx() // 4

    @cute.jit
    def mask(self, words: cute.Tensor, count: Int32):
        """Zero rows of dS that don't exist; of those from the lane's first on `count` do."""
        for index in cutlass.range_constexpr(cute.size(words)):
            words[index] = Uint32(words[index]) if count > 8 * (index % 2) else Uint32(0)

    @cute.jit
    def store_ds(self, shared: Shared, words: cute.Tensor, buffer: Int32):
        """Hand over dS of the warp's 16 events, events g and g + 8 side by side: 16 bytes for each seed in a row."""
        lane, warp, ctas = cute.arch.lane_idx(), cute.arch.warp_idx() - FIRST_COMPUTE_WARP, self.config.ctas
        group = self.rank() * COMPUTE_WARPS + warp
        own = shared.ds_bytes[None, buffer].iterator + cute.assume(group * (STEP * GROUP), STEP * GROUP)
        for block in cutlass.range_constexpr(STEP // BLOCK):
            stored = []
            for h in cutlass.range_constexpr(2):
                low, high = words[4 * block + 2 * h], words[4 * block + 2 * h + 1]
                stored += [permuted(low, high, 0x5140), permuted(low, high, 0x7362)]
            store_transposed(own + (block * BLOCK + lane) * GROUP, stored)
        cute.arch.fence_proxy("async.shared", space="cta")
        full = shared.ds.full + buffer
        if const_expr(ctas == 1):
            arrive(full)
        else:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, STEP * GROUP)  # of the other's warp
                bulk_send(own, STEP * GROUP, full, self.rank() ^ 1)


@cute.jit
def half_view(sums: cute.Tensor) -> cute.Tensor:
    """Accumulators in fp16 as pairs (r, j)."""
    pointer = cute.recast_ptr(sums.iterator, dtype=Uint32)
    return cute.make_tensor(pointer, cute.make_layout((LANE_ROWS, PIECES)))


@cute.jit
def pairs_of_seeds(record: cute.Tensor, first: cutlass.Constexpr[int]) -> cute.Tensor:
    """A lane's eight words of a step's record: one for each piece of eight seeds."""
    words = cute.make_rmem_tensor((WORD, 2), Uint32)
    for part in cutlass.range_constexpr(2):
        place = cute.assume(first + 16 * part + WORD * (cute.arch.lane_idx() % 4), WORD)
        cute.autovec_copy(cute.make_tensor(record.iterator + place, cute.make_layout(WORD)), words[None, part])
    return cute.make_tensor(words.iterator, cute.make_layout(PIECES))


@cute.jit
def cast(pairs: cute.Tensor, words: cute.Tensor):
    """Pairs (r, j) as E4M3, in the words of an operand A."""
    for word in cutlass.range_constexpr(PIECES):
        r, j = word % 2, 2 * (word // 2)
        words[word] = half.e4m3_of_pairs(pairs[r, j], pairs[r, j + 1])


def build(arch: str, spec: HopperBackwardSpec, config: HopperBackwardConfig, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    u8, i32, columns, blocks = torch.uint8, torch.int32, spec.columns, spec.columns // BLOCK

    def payload() -> cute.Tensor:
        return fake_tensor(u8, None, columns)

    def scales() -> cute.Tensor:
        return fake_tensor(u8, None, blocks, alignment=1)

    operands = HopperBackwardOperands(
        payload(), scales(), payload(), scales(), payload(), scales(), payload(),
        dout_transposed=fake_tensor(u8, None, columns, GROUP),
        offsets=fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize),
        records=fake_tensor(i32, None, spec.num_heads, spec.steps, RECORD_WORDS),
        summaries=fake_tensor(i32, None, spec.num_heads, SUMMARY_WORDS),
        dk=Gradient(payload(), scales()), dv=Gradient(payload(), scales()),
        dq=fake_tensor(spec.dq_dtype, None, *slab_shape(spec, 0)[1:]),
    )  # fmt: skip
    return compile_for(arch, HopperBackward(spec, config), operands, Int32(0), options=options)


compiled = cached(build)


class HopperOperand(NamedTuple):
    """A matrix in MXFP8 with one scale for a head and 32 rows."""

    data: Tensor  # [rows, E] uint8
    scales: Tensor  # compact: [rows // 32 + segments, E / 32] uint8


class HopperGradientsOut(NamedTuple):
    """dq [S, E] or [B·S, E] float32; dk, dv: payload [T, E] and compact scales."""

    dq: Tensor
    dk: HopperOperand
    dv: HopperOperand


def launch(
    spec: HopperBackwardSpec, q: HopperOperand, k: HopperOperand, v: HopperOperand, offsets: Tensor,
    dout: tuple[Tensor, Tensor, Tensor], saved: tuple[Tensor, Tensor, Tensor],
    config: HopperBackwardConfig | None = None,
) -> HopperGradientsOut:  # fmt: skip
    """Allocate the results and start the kernels on the current stream.

    Args:
        q: [S, E] or [B·S, E].    k, v: [T, E].    offsets: [B + 1] of spec.offsets_dtype.
        dout: payload [B·S, E], its transposed payload [B·S // 16 + B, E, 16], compact scales.
        saved: δ [B·S, H] float32, lse [B, H, S] float32, ⌊log2 l⌋ [B, H, S] int32.
        config: instead of the one that `choose_config` takes.
    """
    num_rows, num_segments, device = k.data.shape[0], offsets.shape[0] - 1, k.data.device
    facts, offsets = device_facts(device), offsets.contiguous()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    config = config or choose_config(spec, facts, is_deterministic)
    shares = -(-num_row_blocks(num_rows, num_segments, TILE) // config.ctas)
    workers = max(1, min(shares, num_multiprocessors(device) // (spec.num_heads * config.ctas)))
    if not spec.is_shared and is_deterministic:
        workers = 1  # a segment's slab would have several CTAs
    count = (config.slabs or workers) if spec.is_shared else num_segments
    slabs = torch.zeros(slab_shape(spec, count * spec.num_heads), dtype=spec.dq_dtype, device=device)
    dk, dv = (_empty(num_rows, num_segments, spec.columns, device) for _ in range(2))
    if num_segments and num_rows:
        data, transposed, scales = dout
        records, summaries = seed_statistics.launch(spec, (data, scales), q.scales, saved)
        matrices = (each for matrix in (q, k, v) for each in (aligned(matrix.data), matrix.scales.contiguous()))
        operands = HopperBackwardOperands(
            *matrices, aligned(data), aligned(transposed), offsets, records, summaries, Gradient(*dk), Gradient(*dv),
            slabs,
        )  # fmt: skip
        with torch.cuda.device(device):
            compiled(facts.arch, spec, config)(operands, workers * spec.num_heads * config.ctas)
    else:
        for each in (*dk, *dv):
            each.zero_()
    return HopperGradientsOut(sum_slabs(spec, slabs), dk, dv)


def _empty(num_rows: int, num_segments: int, columns: int, device: torch.device) -> HopperOperand:
    slots = num_row_blocks(num_rows, num_segments, BLOCK)
    shapes = ((num_rows, columns), (slots, columns // BLOCK))
    return HopperOperand(*(torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes))


def sum_slabs(spec: HopperBackwardSpec, slabs: Tensor) -> Tensor:
    """Add what the CTAs left and put it in order: `slab_shape` → [S, E] or [B·S, E] float32."""
    slabs_of_head, heads, halves = slabs.shape[0] // spec.num_heads, spec.num_heads, slabs.shape[2]
    parts = slabs.float().view(slabs_of_head, heads, *slabs.shape[1:]) if not spec.is_shared else slabs.float()
    if spec.is_shared:
        parts = parts.view(heads, slabs_of_head, *slabs.shape[1:]).sum(1)[None]
    # thread = (warp 4, g 8, q 4), element = (j, r, e): row 16·warp + 8r + g, column 64·half + 8j + 2q + e
    parts = parts.reshape(-1, heads, spec.steps, halves, slabs.shape[3], 4, 8, 4, slabs.shape[5] // 4, 2, 2)
    rows = parts.permute(0, 2, 5, 9, 6, 1, 3, 4, 8, 7, 10).reshape(-1, spec.steps * STEP, spec.columns)
    is_half = spec.dq_dtype == torch.float16
    factor = 2.0**-spec.numerics.dq_scale_log2 if is_half else 1.0 / math.sqrt(spec.head_dim)
    return rows[:, : spec.num_seeds].reshape(-1, spec.columns) * factor
