"""Attention backward on Blackwell: five block-scaled MXFP8 products, dK and dV kept in tensor memory, jagged keys.

    S = K Qᵀ    P = exp2(S·c − lse·log2 e)    dP = V dOᵀ    dS = P ∘ (dP − δ)
    dV = Pᵀ dO    dK = dSᵀ Q / sqrt(D)    dQ = dS K / sqrt(D)    with c = log2(e)/sqrt(D), P and dS an event to a row

Each CTA keeps one head and takes tiles of 128 events as they lie in their slots; for each it goes through the seeds,
128 in a step. Q, K and dO have one payload, quantised in square blocks, and scale tiles in both directions; so has dS,
quantised once: its payload goes to tensor memory for dK and to shared memory for dQ, its scales to tiles in both
directions (source 2.2.2). P takes the scale 2^(8 + t), constant for 32 seeds, which costs nothing: it is part of the
exponent. dS carries it on and gives it back with its own scale.

Rows behind a segment's end and seeds behind the last come as zeros through tensor maps that end there, are masked in P
and dS, and products over blocks of 32 that don't exist are not issued: no pad byte is used.

Warps: 0–7 compute, 0–3 with the first 64 seeds of a step, 4–7 with the others, an event's row in each thread · 8–11
reduce dQ · 12 product · 13 loads · 14 searches tiles · 15 statistics of seeds.

Tensor memory is full (`spec.py`). Order of products in step n, and what scale factors lie on:

    product     issued behind                             its scales lie in   free because
    S(n+1)      dP(n) read                                dP                  `dp_read`; dS(n) is elsewhere
    dK(n)       dS(n) written                             dP                  dS(n) is there, so dP(n) has been read
    dQ(n)       S(n+1) read                               S                   `scores_read`; P(n+1) is elsewhere
    dP(n+1)     dQ(n) read, which it overwrites           S                   as for dQ(n)
    dV(n+1)     P(n+1) written                            S                   P(n+1) is there, so S(n+1) has been read
    the first S and dP                                    dK                  nothing has been added to dK yet
Everything else is kept apart by the order of issue. Two things need no barrier of their own: dV and dK of a tile have
been read when P of the next one is there, from the same warps; dS of step n has been read from shared memory when
dP(n+1) is there, which came behind dQ(n).

dQ leaves for a slab of its CTA (of its segment, if the seeds are each segment's own) by reductions in memory, always by
the same thread for an element: shared seeds get the same bits in every run, a segment's own under
`torch.use_deterministic_algorithms`, where a head has one CTA. `sum_slabs` adds the slabs.

Bound, reckoned for D = 128 and B200: a step takes 1,280 clocks of the tensor core and 1,024 of exponentials.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import torch
from cutlass import (
    Boolean,
    Float8E4M3FN,
    Float8E8M0FNU,
    Float16,
    Float32,
    Int32,
    Int64,
    Uint8,
    Uint16,
    Uint32,
    const_expr,
)
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from quack.copy_utils import create_ragged_tensor_for_tma, offset_ragged_tensor, tma_get_copy_fn
from torch import Tensor

from pma.jagged import num_row_blocks
from pma.kernels.attention_backward.epilogue import GradientEpilogue
from pma.kernels.attention_backward.operands import AttentionBackwardOperands, InTiles, Loads, Quantized, Shared, Step
from pma.kernels.attention_backward.spec import (
    COMPUTE_WARPS,
    DK,
    DP,
    DV,
    HALF,
    REDUCE_WARPS,
    SCALES,
    SCORES,
    TENSOR_COLUMNS,
    TILE,
    AttentionBackwardConfig,
    AttentionBackwardSpec,
    choose_config,
)
from pma.kernels.blocks.block_product import Operand, TensorOperand, multiply_tiles
from pma.kernels.blocks.block_quantize import (
    block_amax,
    cast_row,
    columns_of,
)
from pma.kernels.blocks.block_scales import scale_byte
from pma.kernels.blocks.masks import mask_behind
from pma.kernels.blocks.memory import add_vector, element_pointer, value_at
from pma.kernels.blocks.ring import Ring, init_ring, next_stage
from pma.kernels.blocks.row_tiles import (
    BATCH,
    BATCHES,
    FIELDS,
    Announcements,
    announce_row_tiles,
    next_row_tile,
)
from pma.kernels.blocks.scale_tiles import load_scale_tile
from pma.kernels.blocks.tensor_memory import (
    column_pointer,
    copy_scale_tile,
    load_row,
    pass_on,
    release,
    store_row,
    take_over,
)
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.layouts import BLOCK, tile_shape
from pma.layouts.mxfp8 import SCALE_NAN, SCALE_ONE
from pma.layouts.scale_tiles import TILE_BYTES

PRODUCT_WARP = COMPUTE_WARPS + REDUCE_WARPS
LOAD_WARP, SEARCH_WARP, STATISTICS_WARP = PRODUCT_WARP + 1, PRODUCT_WARP + 2, PRODUCT_WARP + 3
# Of a thread, by head width: the warps that reduce hold a whole row of dQ, so that dP may follow it at once.
REGISTERS = {
    64: {"compute": 160, "reduce": 96, "others": 96},
    128: {"compute": 160, "reduce": 144, "others": 48},
}
CHUNK = 32  # columns of tensor memory that an instruction moves
STATISTICS = 2  # stages of a step's statistics
HALF_BLOCKS = HALF // BLOCK
LOG2_E = math.log2(math.e)


class AttentionBackward:
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: AttentionBackwardSpec, config: AttentionBackwardConfig):
        self.spec, self.config, self.numerics = spec, config, spec.numerics
        self.head_dim, self.steps = spec.head_dim, spec.steps
        self.softmax_scale = 1.0 / math.sqrt(spec.head_dim)
        self.heads_per_tile = TILE // spec.head_dim
        self.payload_bytes = TILE * spec.head_dim
        self.q_stays = config.q_is_resident(spec)
        self.has_whole_steps = spec.num_seeds % TILE == 0
        self.is_static = spec.numerics.p_cast_backward == "row_sum"
        self.tiler = (TILE, TILE, spec.head_dim)
        self.epilogue = GradientEpilogue(spec)

    @cute.jit
    def __call__(self, o: AttentionBackwardOperands, num_ctas: Int32, stream):
        a, b = self.tensor_map_a, self.tensor_map_b
        loads = Loads(*b(o.q.data), *a(o.k.data), *a(o.v), *b(o.dout.data))
        self.kernel(o, loads).launch(
            grid=[num_ctas, 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.jit
    def product(self) -> cute.TiledMma:
        """Of S and of dP: what the layouts in shared memory are made for; the other products read the same bytes."""
        k_major = OperandMajorMode.K
        return blackwell.make_blockscaled_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float8E8M0FNU, BLOCK, tcgen05.CtaGroup.ONE, (TILE, TILE)
        )

    def layout_a(self, buffers: int):
        return blackwell.make_smem_layout_a(self.product(), self.tiler, Float8E4M3FN, buffers)

    def layout_b(self, buffers: int):
        return blackwell.make_smem_layout_b(self.product(), self.tiler, Float8E4M3FN, buffers)

    @cute.jit
    def tensor_map_a(self, data: cute.Tensor):
        return cute.nvgpu.make_tiled_tma_atom_A(
            cpasync.CopyBulkTensorTileG2SOp(), ragged(data), one_buffer(self.layout_a(1)), self.tiler, self.product(),
            (1, 1, 1, 1),
        )  # fmt: skip

    @cute.jit
    def tensor_map_b(self, data: cute.Tensor):
        return cute.nvgpu.make_tiled_tma_atom_B(
            cpasync.CopyBulkTensorTileG2SOp(), ragged(data), one_buffer(self.layout_b(1)), self.tiler, self.product(),
            (1, 1, 1, 1),
        )  # fmt: skip

    @cute.kernel
    def kernel(self, o: AttentionBackwardOperands, loads: Loads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            self.init_barriers(shared)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, shared.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tensor_memory = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tensor_memory)
        registers = const_expr(REGISTERS[self.head_dim])
        if warp < COMPUTE_WARPS:
            cute.arch.setmaxregister_increase(registers["compute"])
            self.compute(o, shared, tensor_memory)
        elif warp < PRODUCT_WARP:
            if const_expr(self.head_dim == TILE):
                cute.arch.setmaxregister_increase(registers["reduce"])
            else:
                cute.arch.setmaxregister_decrease(registers["reduce"])
            self.reduce(o, shared, tensor_memory)
        else:
            cute.arch.setmaxregister_decrease(registers["others"])
            if warp == PRODUCT_WARP:
                self.multiply(shared, tensor_memory)
            elif warp == LOAD_WARP:
                self.load(o, loads, shared)
            elif warp == SEARCH_WARP:
                self.search(o, shared)
            else:
                self.prepare_statistics(o, shared)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.dealloc_tmem(tensor_memory, TENSOR_COLUMNS)

    @cute.jit
    def allocate(self) -> Shared:
        config, smem = self.config, SmemAllocator()

        def barriers(count: int) -> cute.Pointer:
            return smem.allocate_array(Int64, count)

        def ring(size: int) -> Ring:
            pointer = barriers(2 * size)
            return Ring(pointer, pointer + size)

        def array(dtype, shape, alignment: int) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(shape), alignment)

        board = ring(BATCHES)
        return Shared(
            board=Announcements(*board, array(Int32, (FIELDS, BATCH * BATCHES), 16)),
            q=ring(config.q_buffers),
            dout=ring(config.dout_buffers),
            kv=ring(config.kv_buffers),
            statistics=ring(STATISTICS),
            **{name: barriers(1) for name in SINGLE_BARRIERS},
            tensor_memory=smem.allocate_array(Int32, 1),
            scale_words=array(Uint32, (4, 2), 16),
            seeds=array(Float32, (TILE, 2, STATISTICS), 16),
            exponents=array(Int32, (4, STATISTICS), 16),
            p_scales=array(Uint8, TILE_BYTES, 128),
            ds_scales=array(Uint8, (TILE_BYTES, 2), 128),
            ds_bytes=array(Uint8, TILE * TILE, 1024),
            q_bytes=array(Uint8, (self.payload_bytes, config.q_buffers), 1024),
            q_scales=array(Uint8, (TILE_BYTES, 2, config.q_buffers), 128),
            dout_bytes=array(Uint8, (self.payload_bytes, config.dout_buffers), 1024),
            dout_scales=array(Uint8, (TILE_BYTES, 2, config.dout_buffers), 128),
            kv_bytes=array(Uint8, (self.payload_bytes, 2 * config.kv_buffers), 1024),
            kv_scales=array(Uint8, (TILE_BYTES, 3, config.kv_buffers), 128),
        )

    @cute.jit
    def init_barriers(self, shared: Shared):
        config = self.config
        init_ring(shared.board.full, shared.board.empty, BATCHES, COMPUTE_WARPS + REDUCE_WARPS + 3)
        init_ring(shared.q.full, shared.q.empty, config.q_buffers, 1)
        init_ring(shared.dout.full, shared.dout.empty, config.dout_buffers, 1)
        init_ring(shared.kv.full, shared.kv.empty, config.kv_buffers, 1)
        init_ring(shared.statistics.full, shared.statistics.empty, STATISTICS, COMPUTE_WARPS)
        for name, arrivals in SINGLE_BARRIERS.items():
            cute.arch.mbarrier_init(getattr(shared, name), arrivals)

    @cute.jit
    def head(self) -> Int32:
        block, _, _ = cute.arch.block_idx()
        return block % self.spec.num_heads

    @cute.jit
    def search(self, o: AttentionBackwardOperands, shared: Shared):
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        num_tiles = cute.size(o.k.row_tiles, mode=[0])
        heads = self.spec.num_heads
        announce_row_tiles(shared.board, o.offsets, num_tiles, block // heads, blocks // heads)

    @cute.jit
    def seeds_of(self, step: Int32):
        """How many seeds a step's tile has."""
        if const_expr(self.has_whole_steps):
            return Int32(TILE)
        return cutlass.min(self.spec.num_seeds - step * TILE, TILE)

    # --------------------------------------------------------------------------------------------------- loading

    @cute.jit
    def load(self, o: AttentionBackwardOperands, loads: Loads, shared: Shared):
        kv, kv_parity, q, q_parity, dout, dout_parity = Int32(0), Int32(1), Int32(0), Int32(1), Int32(0), Int32(1)
        head_tile = self.head() // self.heads_per_tile
        turn, is_busy, resident_steps = Int32(0), True, Int32(self.steps if self.q_stays else 0)
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            turn += 1
            is_busy = facts.tile >= 0
            if facts.num_rows > 0:
                for step in cutlass.range(resident_steps):  # a CTA without tiles loads nothing: nobody would wait
                    self.load_seeds(
                        (loads.q_atom, loads.q, o.q),
                        (shared.q, shared.q_bytes, shared.q_scales),
                        (Int32(0), step, step),
                    )
                resident_steps = Int32(0)
                cute.arch.mbarrier_wait(shared.kv.empty + kv, kv_parity)
                full = shared.kv.full + kv
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * self.payload_bytes + 3 * TILE_BYTES)
                    scales = shared.kv_scales
                    load_scale_tile(o.k.row_tiles, facts.tile, head_tile, (scales[None, 0, kv].iterator, full))
                    load_scale_tile(o.k.column_tiles, head_tile, facts.tile, (scales[None, 1, kv].iterator, full))
                    load_scale_tile(o.v_tiles, facts.tile, head_tile, (scales[None, 2, kv].iterator, full))
                targets = self.as_operand(shared.kv_bytes, self.layout_a(2 * self.config.kv_buffers))
                rows = (facts.first_row, facts.num_rows)
                self.load_rows((loads.k_atom, loads.k, True), rows, targets[None, None, None, 2 * kv], full)
                self.load_rows((loads.v_atom, loads.v, True), rows, targets[None, None, None, 2 * kv + 1], full)
                kv, kv_parity = next_stage(kv, kv_parity, self.config.kv_buffers)
                for step in cutlass.range(self.steps):
                    if const_expr(not self.q_stays):
                        cute.arch.mbarrier_wait(shared.q.empty + q, q_parity)
                        segment = Int32(0) if const_expr(self.spec.is_shared) else facts.segment
                        self.load_seeds(
                            (loads.q_atom, loads.q, o.q),
                            (shared.q, shared.q_bytes, shared.q_scales),
                            (segment, step, q),
                        )
                        q, q_parity = next_stage(q, q_parity, self.config.q_buffers)
                    cute.arch.mbarrier_wait(shared.dout.empty + dout, dout_parity)
                    self.load_seeds(
                        (loads.dout_atom, loads.dout, o.dout), (shared.dout, shared.dout_bytes, shared.dout_scales),
                        (facts.segment, step, dout),
                    )  # fmt: skip
                    dout, dout_parity = next_stage(dout, dout_parity, self.config.dout_buffers)

    @cute.jit
    def load_seeds(self, source, target, turn):
        """Load a step's tile of Q or dO with its scales. turn: (segment of the seeds, step, buffer)."""
        (atom, tensor, operand), (ring, data, scales), (segment, step, buffer) = source, target, turn
        full, head_tile = ring.full + buffer, self.head() // self.heads_per_tile
        slot = segment * self.spec.num_seeds // TILE + segment + step
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.payload_bytes + 2 * TILE_BYTES)
            load_scale_tile(operand.row_tiles, slot, head_tile, (scales[None, 0, buffer].iterator, full))
            load_scale_tile(operand.column_tiles, head_tile, slot, (scales[None, 1, buffer].iterator, full))
        targets = self.as_operand(data, self.layout_b(cute.size(data, mode=[1])))
        rows = (segment * self.spec.num_seeds + step * TILE, self.seeds_of(step))
        self.load_rows((atom, tensor, False), rows, targets[None, None, None, buffer], full)

    @cute.jit
    def load_rows(self, source, rows, target: cute.Tensor, full: cute.Pointer):
        """Copy a tile of this head's rows, then zeros. source: (atom, tensor, is A); rows: (first, count)."""
        (atom, tensor, is_a), (first, count) = source, rows
        tile = offset_ragged_tensor(tensor, first, count, ragged_dim=0)
        tile = cute.local_tile(tile, (TILE, self.head_dim), (0, self.head()))
        part = self.product().get_slice(0)
        partition = part.partition_A(tile) if const_expr(is_a) else part.partition_B(tile)
        copy, _, _ = tma_get_copy_fn(atom, 0, cute.make_layout(1), partition, target, single_stage=True)
        copy(tma_bar_ptr=full)

    @cute.jit
    def as_operand(self, data: cute.Tensor, layout: cutlass.Constexpr) -> cute.Tensor:
        """A view of bytes of shared memory as tiles of E4M3."""
        return cute.make_tensor(cute.recast_ptr(data.iterator, layout.inner, dtype=Float8E4M3FN), layout.outer)

    # ------------------------------------------------------------------------------------------------ statistics

    @cute.jit
    def prepare_statistics(self, o: AttentionBackwardOperands, shared: Shared):
        stage, parity, turn, is_busy = Int32(0), Int32(1), Int32(0), True
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            turn += 1
            is_busy = facts.tile >= 0
            if facts.num_rows > 0:
                for step in cutlass.range(self.steps):
                    cute.arch.mbarrier_wait(shared.statistics.empty + stage, parity)
                    self.prepare_step(o, shared, facts.segment, (step, stage))
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(shared.statistics.full + stage)
                    stage, parity = next_stage(stage, parity, STATISTICS)

    @cute.jit
    def prepare_step(self, o: AttentionBackwardOperands, shared: Shared, segment: Int32, turn):
        """What a step's 128 seeds add to the exponent of P, δ, and P's scales; four seeds in each lane."""
        (step, stage), per_lane, lane, head = turn, TILE // 32, cute.arch.lane_idx(), self.head()
        heads, num_seeds = self.spec.num_heads, self.spec.num_seeds
        lse, delta = cute.make_rmem_tensor(per_lane, Float32), cute.make_rmem_tensor(per_lane, Float32)
        least = Int32(127)
        for index in cutlass.range_constexpr(per_lane):
            seed = step * TILE + lane * per_lane + index
            lse[index], delta[index] = Float32.inf, Float32(0.0)
            if seed < num_seeds:
                place = (Int64(segment) * heads + head) * num_seeds + seed
                lse[index] = value_at(o.lse, place)
                delta[index] = value_at(o.delta, (Int64(segment) * num_seeds + seed) * heads + head)
                if const_expr(self.is_static):
                    least = cutlass.min(least, value_at(o.row_sum_log2, place))
        for distance in (1, 2, 4):  # lanes of a block of 32 seeds
            least = cutlass.min(least, cute.arch.shuffle_sync_bfly(least, offset=distance))
        exponent = least + self.numerics.p_scale_log2 if const_expr(self.is_static) else Int32(0)
        for index in cutlass.range_constexpr(per_lane):
            shared.seeds[lane * per_lane + index, 0, stage] = Float32(exponent) - lse[index] * LOG2_E
            shared.seeds[lane * per_lane + index, 1, stage] = delta[index]
        if lane % 8 == 0:
            shared.exponents[lane // 8, stage] = exponent

    # -------------------------------------------------------------------------------------------------- products

    @cute.jit
    def multiply(self, shared: Shared, tensor_memory: cute.Pointer):
        columns = tensor_memory.toint()
        kv, kv_parity, q, q_parity, dout, dout_parity = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        parity = Int32(0)
        facts, turn = self.next_tile(shared, Int32(0))
        if facts.tile >= 0:
            cute.arch.mbarrier_wait(shared.kv.full, 0)
            cute.arch.mbarrier_wait(shared.q.full, 0)
            now = Step(kv, q, dout, facts.num_rows, self.seeds_of(Int32(0)))
            self.multiply_scores(shared, columns, now, "first scores")
            cute.arch.mbarrier_wait(shared.dout.full, 0)
            self.multiply_dp(shared, columns, now, "first dP")
            take_over(shared.weights, Int32(0))
            self.multiply_dv(shared, columns, now, Boolean(False))
            release(shared.dout.empty)
        while facts.tile >= 0:
            following, turn = self.next_tile(shared, turn)
            for step in cutlass.range(self.steps):
                is_last = step + 1 == self.steps
                has_next = not is_last or following.tile >= 0
                now = Step(kv, q, dout, facts.num_rows, self.seeds_of(step))
                next_step = Int32(0) if is_last else step + 1
                next_kv, next_kv_parity = kv, kv_parity
                if is_last:
                    next_kv, next_kv_parity = next_stage(kv, kv_parity, self.config.kv_buffers)
                q, q_parity = self.next_seeds(next_step, q, q_parity)
                dout, dout_parity = next_stage(dout, dout_parity, self.config.dout_buffers)
                following_rows = following.num_rows if is_last else facts.num_rows
                then = Step(next_kv, q, dout, following_rows, self.seeds_of(next_step))
                if has_next:
                    if is_last:
                        cute.arch.mbarrier_wait(shared.kv.full + next_kv, next_kv_parity)
                    cute.arch.mbarrier_wait(shared.q.full + q, q_parity)
                    take_over(shared.dp_read, parity)
                    self.multiply_scores(shared, columns, then, "scores")
                take_over(shared.ds, parity)
                self.multiply_dk(shared, columns, now, step > 0)
                if const_expr(not self.q_stays):
                    release(shared.q.empty + now.q)
                if is_last:
                    release(shared.sums_full)
                if has_next:
                    take_over(shared.scores_read, parity ^ 1)
                self.multiply_dq(shared, columns, now)
                if is_last:
                    release(shared.kv.empty + kv)
                release(shared.dq_full)
                if has_next:
                    cute.arch.mbarrier_wait(shared.dout.full + dout, dout_parity)
                    take_over(shared.dq_read, parity)
                    self.multiply_dp(shared, columns, then, "dP")
                    take_over(shared.weights, parity ^ 1)
                    self.multiply_dv(shared, columns, then, next_step > 0)
                    release(shared.dout.empty + dout)
                kv, kv_parity = next_kv, next_kv_parity
                parity ^= 1
            facts = following

    @cute.jit
    def next_tile(self, shared: Shared, turn: Int32):
        """(the next tile that has events, or that which says that there is none; the turn after it)."""
        facts = next_row_tile(shared.board, turn)
        turn += 1
        while facts.tile >= 0 and facts.num_rows == 0:
            facts = next_row_tile(shared.board, turn)
            turn += 1
        return facts, turn

    @cute.jit
    def next_seeds(self, step: Int32, buffer: Int32, parity: Int32):
        """(buffer, parity) of a step's seeds."""
        if const_expr(self.q_stays):
            return step, Int32(0)
        return next_stage(buffer, parity, self.config.q_buffers)

    @cute.jit
    def multiply_scores(self, shared: Shared, columns: Int32, step: Step, where: cutlass.Constexpr[str]):
        k = (shared.kv_bytes[None, 2 * step.kv], shared.kv_scales[None, 0, step.kv])
        q = (shared.q_bytes[None, step.q], shared.q_scales[None, 0, step.q])
        self.multiply_over_features(columns, SCORES, (k, q), where)
        release(shared.scores_full)

    @cute.jit
    def multiply_dp(self, shared: Shared, columns: Int32, step: Step, where: cutlass.Constexpr[str]):
        v = (shared.kv_bytes[None, 2 * step.kv + 1], shared.kv_scales[None, 2, step.kv])
        dout = (shared.dout_bytes[None, step.dout], shared.dout_scales[None, 0, step.dout])
        self.multiply_over_features(columns, DP, (v, dout), where)
        release(shared.dp_full)

    @cute.jit
    def multiply_over_features(
        self, columns: Int32, total: cutlass.Constexpr[int], pair, where: cutlass.Constexpr[str]
    ):
        """A product of two pairs (payload, scale tile), each row by row, over a head's columns."""
        ((a, a_scales), (b, b_scales)), (a_place, b_place) = pair, SCALES[where]
        copy_scale_tile(a_scales.iterator, column_pointer(columns + a_place))
        copy_scale_tile(b_scales.iterator, column_pointer(columns + b_place))
        blocks = self.head_dim // BLOCK
        for part in cutlass.range_constexpr(self.heads_per_tile):  # which heads share a scale tile
            if self.head() % self.heads_per_tile == part:
                a_rows = Operand(a.iterator.toint(), columns + a_place, True, self.head_dim, part * blocks)
                b_rows = Operand(b.iterator.toint(), columns + b_place, True, self.head_dim, part * blocks)
                with cute.arch.elect_one():
                    multiply_tiles(columns + total, a_rows, b_rows, TILE, (blocks, False), tuple(range(blocks)))

    @cute.jit
    def multiply_dv(self, shared: Shared, columns: Int32, step: Step, accumulates: Boolean):
        dout = (shared.dout_bytes[None, step.dout], shared.dout_scales[None, 1, step.dout])
        self.multiply_over_seeds(columns, (SCORES, DV), (shared.p_scales, dout), "dV", (step.seeds, accumulates))

    @cute.jit
    def multiply_dk(self, shared: Shared, columns: Int32, step: Step, accumulates: Boolean):
        q = (shared.q_bytes[None, step.q], shared.q_scales[None, 1, step.q])
        self.multiply_over_seeds(columns, (DP, DK), (shared.ds_scales[None, 0], q), "dK", (step.seeds, accumulates))

    @cute.jit
    def multiply_over_seeds(self, columns: Int32, regions, pair, where: cutlass.Constexpr[str], depth):
        """P (or dS) in tensor memory times a tile of seeds. depth: (seeds, whether to add)."""
        (source, total), (a_scales, (b, b_scales)), (a_place, b_place) = regions, pair, SCALES[where]
        copy_scale_tile(a_scales.iterator, column_pointer(columns + a_place))
        copy_scale_tile(b_scales.iterator, column_pointer(columns + b_place))
        seeds, accumulates = depth
        rows = TensorOperand(tuple(columns + source + first for first in (0, 8, HALF, HALF + 8)), columns + a_place)
        tile = Operand(b.iterator.toint(), self.own_scales(columns + b_place), False, self.head_dim)
        num_blocks = TILE // BLOCK if const_expr(self.has_whole_steps) else (seeds + BLOCK - 1) // BLOCK
        with cute.arch.elect_one():
            multiply_tiles(columns + total, rows, tile, self.head_dim, (num_blocks, accumulates))

    @cute.jit
    def multiply_dq(self, shared: Shared, columns: Int32, step: Step):
        a_place, b_place = SCALES["dQ"]
        copy_scale_tile(shared.ds_scales[None, 1].iterator, column_pointer(columns + a_place))
        copy_scale_tile(shared.kv_scales[None, 1, step.kv].iterator, column_pointer(columns + b_place))
        ds = Operand(shared.ds_bytes.iterator.toint(), columns + a_place, False)
        k = shared.kv_bytes[None, 2 * step.kv].iterator.toint()
        k = Operand(k, self.own_scales(columns + b_place), False, self.head_dim)
        with cute.arch.elect_one():
            multiply_tiles(columns + DP, ds, k, self.head_dim, ((step.num_rows + BLOCK - 1) // BLOCK, False))

    @cute.jit
    def own_scales(self, place: Int32) -> Int32:
        """Where the scales of this head's columns begin in a column tile: 32 of them to a column of tensor memory."""
        return place + self.head() % self.heads_per_tile * (self.head_dim // BLOCK)

    # --------------------------------------------------------------------------------------------------- compute

    @cute.jit
    def compute(self, o: AttentionBackwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        parity, tile_parity, stage, stage_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        self.epilogue.clear_outside(o)
        turn, is_busy = Int32(0), True
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            turn += 1
            is_busy = facts.tile >= 0
            if facts.num_rows > 0:
                is_row = warp % 4 * BLOCK + lane < facts.num_rows
                for step in cutlass.range(self.steps):
                    cute.arch.mbarrier_wait(shared.statistics.full + stage, stage_parity)
                    p = self.compute_weights(shared, tensor_memory, (step, stage, parity), is_row)
                    self.compute_ds(shared, tensor_memory, p, (step, stage, parity), is_row)
                    parity ^= 1
                    stage, stage_parity = next_stage(stage, stage_parity, STATISTICS)
                take_over(shared.sums_full, tile_parity)
                tile_parity ^= 1
                self.epilogue.store_sums(o, shared, tensor_memory, facts)
            elif is_busy:
                self.epilogue.store_absent_scales(o, facts)

    @cute.jit
    def compute_weights(self, shared: Shared, tensor_memory: cute.Pointer, turn, is_row: Boolean) -> cute.Tensor:
        """P of this thread's event for its 64 seeds, times its scale if that is static; cast and stored for dV."""
        (step, stage, parity), first = turn, self.first_seed()
        take_over(shared.scores_full, parity)
        p = load_row(tensor_memory + SCORES + first, HALF, CHUNK)
        pass_on(shared.scores_read)
        self.mask_seeds(p, (step, first), -math.inf)
        factor = Float32(self.softmax_scale * LOG2_E)
        for index in cutlass.range_constexpr(0, HALF, 4):
            shifts = four_of(shared.seeds[None, 0, stage], first + index)
            for pair in cutlass.range_constexpr(2):
                at = index + 2 * pair
                x, y = cute.arch.fma_packed_f32x2(
                    (p[at], p[at + 1]), (factor, factor), (shifts[2 * pair], shifts[2 * pair + 1])
                )
                p[at], p[at + 1] = cute.arch.exp2(x), cute.arch.exp2(y)
        words = cute.make_rmem_tensor(HALF // 4, Uint32)
        scale_bytes = [None] * HALF_BLOCKS
        for block in cutlass.range_constexpr(HALF_BLOCKS):
            values = columns_of(p, block * BLOCK, BLOCK)
            if const_expr(self.is_static):
                scale_bytes[block] = SCALE_ONE - shared.exponents[first // BLOCK + block, stage]
                payload = cute.make_rmem_tensor(BLOCK, Float8E4M3FN)
                payload.store(values.load().to(Float8E4M3FN))  # saturates
                cast = cute.recast_tensor(payload, Uint32)
            else:
                scale_bytes[block] = scale_byte(block_amax(values, is_row).bitcast(Uint32))
                cast = cast_row(values, scale_bytes[block])
            for word in cutlass.range_constexpr(BLOCK // 4):
                words[block * (BLOCK // 4) + word] = cast[word]
        store_row(tensor_memory + SCORES + first, words)
        self.store_row_scales(shared.p_scales, scale_bytes)
        cute.arch.fence_view_async_tmem_store()
        cute.arch.fence_view_async_shared()
        pass_on(shared.weights)
        return p

    @cute.jit
    def compute_ds(self, shared: Shared, tensor_memory: cute.Pointer, p: cute.Tensor, turn, is_row: Boolean):
        """dS of this thread's event for its 64 seeds, quantised; to tensor memory for dK, to shared memory for dQ."""
        (step, stage, parity), first = turn, self.first_seed()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        take_over(shared.dp_full, parity)
        words = cute.make_rmem_tensor(HALF // 4, Uint32)
        scale_bytes = [None] * HALF_BLOCKS
        for block in cutlass.range_constexpr(HALF_BLOCKS):
            start = block * BLOCK
            values = load_row(tensor_memory + DP + first + start, BLOCK)
            if const_expr(block == HALF_BLOCKS - 1):
                pass_on(shared.dp_read)
            self.mask_seeds(values, (step, first + start), 0.0)
            for index in cutlass.range_constexpr(0, BLOCK, 4):
                deltas = four_of(shared.seeds[None, 1, stage], first + start + index)
                for pair in cutlass.range_constexpr(0, 4, 2):
                    at = index + pair
                    two = cute.arch.sub_packed_f32x2((values[at], values[at + 1]), (deltas[pair], deltas[pair + 1]))
                    weights = (p[start + at], p[start + at + 1])
                    values[at], values[at + 1] = cute.arch.mul_packed_f32x2(weights, two)
            byte = scale_byte(block_amax(values, is_row).bitcast(Uint32))
            cast = cast_row(values, byte)
            for word in cutlass.range_constexpr(BLOCK // 4):
                words[start // 4 + word] = cast[word] if is_row else Uint32(0)
            without_p_scale = cutlass.max(byte - shared.exponents[first // BLOCK + block, stage], 0)
            scale_bytes[block] = byte if byte == SCALE_NAN else without_p_scale
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.statistics.empty + stage)
        store_row(tensor_memory + DP + first, words)
        self.store_row_scales(shared.ds_scales[None, 0], scale_bytes)
        for block in cutlass.range_constexpr(HALF_BLOCKS):
            column = first // BLOCK + block
            shared.ds_scales[lane * 16 + column * 4 + warp % 4, 1] = Uint8(scale_bytes[block])
        row = warp % 4 * BLOCK + lane
        for piece in cutlass.range_constexpr(HALF // 16):
            chunk = (first // 16 + piece) ^ (row % 8)  # swizzle over 128 bytes
            target = cute.recast_ptr(shared.ds_bytes.iterator + cute.assume(row * TILE + chunk * 16, 16), dtype=Uint32)
            source = cute.make_tensor(words.iterator + 4 * piece, cute.make_layout(4))
            cute.autovec_copy(source, cute.make_tensor(target, cute.make_layout(4)))
        cute.arch.fence_view_async_tmem_store()
        cute.arch.fence_view_async_shared()
        pass_on(shared.ds)

    @cute.jit
    def first_seed(self) -> Int32:
        """Which of a step's seeds this warp begins with."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 * HALF

    @cute.jit
    def mask_seeds(self, row: cute.Tensor, place, value: cutlass.Constexpr[float]):
        """Set what belongs to no seed to `value`. place: (step, the row's first seed in it)."""
        if const_expr(not self.has_whole_steps):
            (step, first), num_seeds = place, self.spec.num_seeds
            if num_seeds - step * TILE < TILE:
                mask_behind(row, num_seeds - step * TILE - first, value)

    @cute.jit
    def store_row_scales(self, tile: cute.Tensor, scale_bytes):
        """Write this warp's part of a row tile in shared memory: two block columns of one row block."""
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        pairs = cute.recast_tensor(tile, Uint16)
        pairs[lane * 8 + warp % 4 * 2 + warp // 4] = Uint16(scale_bytes[0] | scale_bytes[1] << 8)

    # --------------------------------------------------------------------------------------------------- reduce

    @cute.jit
    def reduce(self, o: AttentionBackwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        block, _, _ = cute.arch.block_idx()
        parity, turn, is_busy = Int32(0), Int32(0), True
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            turn += 1
            is_busy = facts.tile >= 0
            if facts.num_rows > 0:
                slab = block if const_expr(self.spec.is_shared) else facts.segment * self.spec.num_heads + self.head()
                for step in cutlass.range(self.steps):
                    take_over(shared.dq_full, parity)
                    start = (Int64(slab) * self.steps + step) * (TILE * self.head_dim)
                    values = load_row(tensor_memory + DP, self.head_dim, CHUNK)
                    pass_on(shared.dq_read)
                    self.add_to_slab(o.dq, start, values)
                    parity ^= 1

    @cute.jit
    def add_to_slab(self, slabs: cute.Tensor, start: Int64, values: cute.Tensor):
        """Add the columns of this thread's seed, 16 bytes at a time, so that a warp adds to 512 contiguous bytes."""
        thread, _, _ = cute.arch.thread_idx()
        is_half = const_expr(self.spec.dq_dtype == torch.float16)
        width = const_expr(8 if is_half else 4)
        own = start + thread % TILE * width
        for first in cutlass.range_constexpr(0, self.head_dim, width):
            target = element_pointer(slabs, own + first * TILE, 16)
            if const_expr(is_half):
                halves = cute.make_rmem_tensor(width, Float16)
                for column in cutlass.range_constexpr(width):
                    scaled = values[first + column] * (self.softmax_scale * 2.0**self.numerics.dq_scale_log2)
                    halves[column] = scaled.to(Float16)
                words = cute.recast_tensor(halves, Uint32)
                add_vector(target, "f16x2", words)
            else:
                add_vector(target, "f32", cute.make_tensor(values.iterator + first, cute.make_layout(width)))


SINGLE_BARRIERS = {
    "scores_full": 1,
    "scores_read": COMPUTE_WARPS,
    "weights": COMPUTE_WARPS,
    "dp_full": 1,
    "dp_read": COMPUTE_WARPS,
    "ds": COMPUTE_WARPS,
    "dq_full": 1,
    "dq_read": REDUCE_WARPS,
    "sums_full": 1,
}  # names in `Shared` → arrivals


def ragged(data: cute.Tensor) -> cute.Tensor:
    """[rows, E] as a tensor whose rows may end anywhere; see `offset_ragged_tensor`."""
    pointer = cute.recast_ptr(data.iterator, dtype=Float8E4M3FN)
    return create_ragged_tensor_for_tma(cute.make_tensor(pointer, data.layout), ragged_dim=0)


def one_buffer(layout):
    return cute.slice_(layout, (None, None, None, 0))


@cute.jit
def four_of(values: cute.Tensor, first: Int32) -> cute.Tensor:
    """Four neighbouring fp32 values of shared memory, the first one's index a multiple of four."""
    four = cute.make_rmem_tensor(4, Float32)
    source = values.iterator + cute.assume(first, 4)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), four)
    return four


def build(arch: str, spec: AttentionBackwardSpec, config: AttentionBackwardConfig, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    u8, tiles, fp32 = torch.uint8, -(-spec.columns // TILE), torch.float32
    state = (None, spec.num_heads, spec.num_seeds)
    rows = (u8, None, None)  # a stride known to the compiler would overflow in a ragged tensor's

    def in_tiles() -> InTiles:
        return InTiles(
            fake_tensor(*rows), fake_tensor(u8, None, tiles, TILE_BYTES), fake_tensor(u8, tiles, None, TILE_BYTES)
        )

    def quantized() -> Quantized:
        scales = fake_tensor(u8, None, spec.columns // BLOCK, alignment=1)
        return Quantized(fake_tensor(u8, None, spec.columns), scales, *in_tiles()[1:])

    operands = AttentionBackwardOperands(
        q=in_tiles(), k=in_tiles(), v=fake_tensor(*rows), v_tiles=fake_tensor(u8, None, tiles, TILE_BYTES),
        dout=in_tiles(), offsets=fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize),
        delta=fake_tensor(fp32, None, spec.num_heads, alignment=4), lse=fake_tensor(fp32, *state, alignment=4),
        row_sum_log2=fake_tensor(torch.int32, *state, alignment=4), dk=quantized(), dv=quantized(),
        dq=fake_tensor(spec.dq_dtype, None, spec.steps, TILE * spec.head_dim),
    )  # fmt: skip
    return compile_for(arch, AttentionBackward(spec, config), operands, Int32(0), options=options)


compiled = cached(build)


class BackwardOperand(NamedTuple):
    """An operand as the tensor cores take it: payload and the scale tiles that are needed of it, uint8."""

    data: Tensor  # [rows, E]
    row_tiles: Tensor
    column_tiles: Tensor


class SavedState(NamedTuple):
    """What the forward leaves, and δ."""

    delta: Tensor  # [B·S, H] float32
    lse: Tensor  # [B, H, S] float32, natural log
    row_sum_log2: Tensor  # [B, H, S] int32


class AttentionGradients(NamedTuple):
    """dq [S, E] or [B·S, E] float32; dk, dv: payload [T, E], compact scales, row tiles, column tiles."""

    dq: Tensor
    dk: Quantized
    dv: Quantized


def launch(
    spec: AttentionBackwardSpec, q: BackwardOperand, k: BackwardOperand, v: BackwardOperand, offsets: Tensor,
    dout: BackwardOperand, saved: SavedState,
) -> AttentionGradients:  # fmt: skip
    """Allocate the results and start the kernel on the current stream.

    Args:
        q: [S, E] or [B·S, E].    k, v: [T, E]; column tiles of v are not read.    dout: [B·S, E].
        offsets: [B + 1] of spec.offsets_dtype.
    """
    offsets = offsets.contiguous()
    num_rows, num_segments, device = k.data.shape[0], offsets.shape[0] - 1, k.data.device
    dk, dv = (_empty(num_rows, num_segments, spec.columns, device) for _ in range(2))
    facts = device_facts(device)
    workers = max(1, min(dk.row_tiles.shape[0], num_multiprocessors(device) // spec.num_heads))
    if not spec.is_shared and torch.are_deterministic_algorithms_enabled():
        workers = 1  # a segment's slab would have several CTAs
    num_slabs = (workers if spec.is_shared else num_segments) * spec.num_heads
    slabs = torch.zeros(num_slabs, spec.steps, TILE * spec.head_dim, dtype=spec.dq_dtype, device=device)
    if num_segments and num_rows:
        operands = AttentionBackwardOperands(
            InTiles(*map(aligned, q)), InTiles(*map(aligned, k)), aligned(v.data), aligned(v.row_tiles),
            InTiles(*map(aligned, dout)), offsets, *(each.contiguous() for each in saved), dk, dv, slabs,
        )  # fmt: skip
        with torch.cuda.device(device):
            compiled(facts.arch, spec, choose_config(spec, facts))(operands, workers * spec.num_heads)
    else:
        for gradient in (dk, dv):
            gradient.data.zero_()
            gradient.scales.zero_()
            gradient.row_tiles.fill_(SCALE_ONE)
            gradient.column_tiles.fill_(SCALE_ONE)
    return AttentionGradients(sum_slabs(spec, slabs), dk, dv)


def _empty(num_rows: int, num_segments: int, columns: int, device: torch.device) -> Quantized:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.uint8, device=device)

    tiles = [tile_shape(num_rows, num_segments, columns, direction) for direction in ("row", "column")]
    slots = num_row_blocks(num_rows, num_segments, BLOCK)
    return Quantized(empty(num_rows, columns), empty(slots, columns // BLOCK), *(empty(*shape) for shape in tiles))


def sum_slabs(spec: AttentionBackwardSpec, slabs: Tensor) -> Tensor:
    """Add what the CTAs left and put it in order: [slabs, I, D/w, 128, w] → [S, E] or [B·S, E] float32."""
    is_half = spec.dq_dtype == torch.float16
    width = 8 if is_half else 4
    count = slabs.shape[0] // spec.num_heads
    parts = slabs.float().view(count, spec.num_heads, spec.steps, spec.head_dim // width, TILE, width)
    if spec.is_shared:
        parts = parts.sum(0, keepdim=True)
    rows = parts.permute(0, 2, 4, 1, 3, 5).reshape(parts.shape[0], spec.steps * TILE, spec.columns)
    factor = 2.0**-spec.numerics.dq_scale_log2 if is_half else 1.0 / math.sqrt(spec.head_dim)
    return rows[:, : spec.num_seeds].reshape(-1, spec.columns) * factor
