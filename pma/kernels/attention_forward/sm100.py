"""Attention forward on Blackwell: all products block-scaled MXFP8, softmax in fp32, jagged keys.

    S = Q Kᵀ    p = exp2((s − m)·c)    O = Σ P V    out = O / l    with c = log2(e)/sqrt(D), l = Σ p

Each CTA keeps one head and up to 256 seeds ("stages" i = 0, 1 of 128 rows) and goes through its segments, the longest
first, one KV tile of 128 events after the other, in the order that `AttentionNumerics` says. Seeds that all segments
share stay in shared memory. Payload comes by TMA from the jagged rows, scale tiles from their slots (split
addressing). The tensor map of V ends where the segment does, so zeros come behind it (0 times a neighbour's NaN would
be NaN), and products over blocks of 32 events that don't exist are not issued: no pad byte is used.

Warps: 0–3 and 4–7 softmax of S0 and S1, a row in each thread · 8–11 correction: rescale O when a maximum moves, divide
and store · 12 product · 13 loads.

Tensor memory (`spec.py`) is full, so scales lie where a barrier proves that nobody reads:

    product          its scales           lie in          free because
    S(i), first      Q(i), K              O(i)            O(i) has not begun
    S(i)             Q(i), K              S(1−i) [40,48)  `drained[1−i]`: softmax has read S(1−i); P(1−i) is elsewhere
    O(i)             P(i), V              S(i) [32,40)    `weights[0][i]`: P(i) is being written, so S(i) is read
    S(i) overwrites P(i) and all these scales: issued behind their readers, and tensor-core work runs in order.

Order of products: O0 S0' O1 S1' with S' of the next KV tile, also where that belongs to the next segment ("unroll
KV"): softmax never waits for a segment's end. Correction of the next segment's first tile is nothing but the permission
to overwrite O, given when the rows have been read for storing. P goes to the tensor core in two parts, so that it
starts on the first while the second is computed; the row sum comes behind both.

What softmax tells correction needs no answer within a segment: `scores[i]` says that all earlier products are done, so
O(i) may be rescaled, and that O(i) was issued, so the last factor has been read. Only what a segment ended with waits
for the end before it to be read, behind the row sum.

Bound, for two seed tiles and one KV tile at D = 128: 1,024 clocks of the tensor core and, on B200, 2,048 of
exponentials, 1,300 with 6 of 16 emulated, on GB300 1,024. What takes longest is the way of one stage through S,
softmax, O and S' (DESIGN.md, attention forward).
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import torch
from cutlass import Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from quack.copy_utils import create_ragged_tensor_for_tma, offset_ragged_tensor, tma_get_copy_fn
from torch import Tensor

from pma.kernels.attention_forward.operands import (
    AttentionForwardOperands,
    Loads,
    Place,
    Row,
    Share,
    Shared,
    Work,
)
from pma.kernels.attention_forward.spec import (
    CORRECTION_WARPS,
    OUT_COLUMN,
    P_COLUMNS,
    SCALE_COLUMNS,
    SCORE_COLUMNS,
    SOFTMAX_WARPS,
    STAGES,
    TENSOR_COLUMNS,
    TILE,
    AttentionForwardConfig,
    AttentionForwardSpec,
    choose_config,
)
from pma.kernels.blocks.block_product import BLOCKS, Operand, TensorOperand, multiply_tiles
from pma.kernels.blocks.block_scales import block_scale, inverse_scale, scale_byte
from pma.kernels.blocks.exponential import exp2_of_row
from pma.kernels.blocks.masks import mask_behind
from pma.kernels.blocks.memory import element_pointer, row_tensor, store_words
from pma.kernels.blocks.ring import Ring, arrive, init_ring, next_stage
from pma.kernels.blocks.scale_tiles import load_scale_tile
from pma.kernels.blocks.tensor_memory import (
    column_pointer,
    copy_scale_tile,
    load_row,
    load_row_and_maxima,
    pass_on,
    release,
    store_row,
    take_over,
)
from pma.kernels.compile import CUTE_DTYPES, aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.layouts import BLOCK
from pma.layouts.mxfp8 import SCALE_ONE
from pma.layouts.scale_tiles import TILE_BYTES

PRODUCT_WARP, LOAD_WARP = SOFTMAX_WARPS + CORRECTION_WARPS, SOFTMAX_WARPS + CORRECTION_WARPS + 1
P_SCALES, V_SCALES, OTHERS_SCALES = P_COLUMNS, P_COLUMNS + SCALE_COLUMNS, P_COLUMNS + 2 * SCALE_COLUMNS
REGISTERS = {"softmax": 184, "correction": 96, "others": 48}
CHUNK = 32  # columns of tensor memory that an instruction moves
RESCALED = 64  # columns of O that are rescaled at once
PARTS = 2  # of P that the tensor core gets one after the other
PART, PART_BLOCKS = TILE // PARTS, TILE // PARTS // BLOCK


class AttentionForward:
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: AttentionForwardSpec, config: AttentionForwardConfig):
        self.spec, self.config, self.numerics = spec, config, spec.numerics
        self.scale_log2 = math.log2(math.e) / math.sqrt(spec.head_dim)
        self.out_dtype = CUTE_DTYPES[spec.out_dtype]
        self.is_static = spec.numerics.p_cast == "static"
        self.sums_late = self.is_static and spec.numerics.denominator == "fp32"  # what is stored is P, in few registers
        self.p_scale_log2 = spec.numerics.p_scale_log2 if self.is_static else 0
        self.score_tiler, self.out_tiler = (TILE, TILE, spec.head_dim), (TILE, spec.head_dim, TILE)

    @cute.jit
    def __call__(self, o: AttentionForwardOperands, num_ctas: Int32, stream):
        score_product, out_product = self.score_product(), self.out_product()
        q, k, v = self.as_e4m3(o.q, [0, 1]), self.as_e4m3(o.k, [0, 1]), self.as_e4m3(o.v, [1, 0])
        operation = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        one, first = (1, 1, 1, 1), (None, None, None, 0)
        q_layout, k_layout, v_layout = (cute.slice_(layout, first) for layout in self.operand_layouts())
        v = create_ragged_tensor_for_tma(v, ragged_dim=1)
        maps = (
            cute.nvgpu.make_tiled_tma_atom_A(operation, q, q_layout, self.score_tiler, score_product, one),
            cute.nvgpu.make_tiled_tma_atom_B(operation, k, k_layout, self.score_tiler, score_product, one),
            cute.nvgpu.make_tiled_tma_atom_B(operation, v, v_layout, self.out_tiler, out_product, one),
        )
        loads = Loads(*maps[0], *maps[1], *maps[2])
        self.kernel(o, loads).launch(
            grid=[num_ctas, 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.jit
    def as_e4m3(self, data: cute.Tensor, order: cutlass.Constexpr) -> cute.Tensor:
        pointer = cute.recast_ptr(data.iterator, dtype=Float8E4M3FN)
        return cute.make_tensor(pointer, cute.select(data.layout, order))

    @cute.jit
    def score_product(self) -> cute.TiledMma:
        k_major = OperandMajorMode.K
        return blackwell.make_blockscaled_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float8E8M0FNU, BLOCK, tcgen05.CtaGroup.ONE, (TILE, TILE)
        )

    @cute.jit
    def out_product(self) -> cute.TiledMma:
        return blackwell.make_blockscaled_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, OperandMajorMode.K, OperandMajorMode.MN, Float8E8M0FNU, BLOCK,
            tcgen05.CtaGroup.ONE, (TILE, self.spec.head_dim), tcgen05.OperandSource.TMEM,
        )  # fmt: skip

    def operand_layouts(self):
        """Shared-memory layouts of Q, K and V."""
        config = self.config
        return (
            blackwell.make_smem_layout_a(
                self.score_product(), self.score_tiler, Float8E4M3FN, STAGES * config.q_buffers
            ),
            blackwell.make_smem_layout_b(self.score_product(), self.score_tiler, Float8E4M3FN, config.kv_buffers),
            blackwell.make_smem_layout_b(self.out_product(), self.out_tiler, Float8E4M3FN, config.kv_buffers),
        )

    @cute.kernel
    def kernel(self, o: AttentionForwardOperands, loads: Loads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            self.init_barriers(shared)
        if const_expr(self.is_static):
            for stage in cutlass.range_constexpr(STAGES):
                if thread < TILE_BYTES:
                    shared.p_scales[thread, stage] = Uint8(SCALE_ONE - self.p_scale_log2)
            cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, shared.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tensor_memory = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tensor_memory)
        if warp < SOFTMAX_WARPS:
            cute.arch.setmaxregister_increase(REGISTERS["softmax"])
            self.softmax(o, shared, tensor_memory)
        elif warp < PRODUCT_WARP:
            cute.arch.setmaxregister_decrease(REGISTERS["correction"])
            self.correct(o, shared, tensor_memory)
        else:
            cute.arch.setmaxregister_decrease(REGISTERS["others"])
            if warp == PRODUCT_WARP:
                self.multiply(o, shared, tensor_memory)
            elif warp == LOAD_WARP:
                self.load(o, loads, shared)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.dealloc_tmem(tensor_memory, TENSOR_COLUMNS)

    @cute.jit
    def allocate(self) -> Shared:
        config, smem, tile = self.config, SmemAllocator(), TILE * self.spec.head_dim

        def barriers(count: int) -> cute.Pointer:
            return smem.allocate_array(Int64, count)

        def ring(size: int) -> Ring:
            pointer = barriers(2 * size)
            return Ring(pointer, pointer + size)

        def rows() -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout((TILE, STAGES)), 16)

        def tiles(count: int, size: int, alignment: int) -> cute.Tensor:
            return smem.allocate_tensor(Uint8, cute.make_layout((size, count)), alignment)

        return Shared(
            kv=ring(config.kv_buffers),
            seeds=ring(config.q_buffers),
            scores=barriers(STAGES),
            drained=barriers(STAGES),
            weights=tuple(barriers(STAGES) for _ in range(PARTS)),
            sums=barriers(STAGES),
            corrections=barriers(STAGES),
            ends=ring(STAGES),
            tensor_memory=smem.allocate_array(Int32, 1),
            factors=rows(),
            totals=rows(),
            divisors=rows(),
            maxima=rows(),
            p_scales=tiles(STAGES, TILE_BYTES, 128),
            q_bytes=tiles(STAGES * config.q_buffers, tile, 1024),
            q_scales=tiles(STAGES * config.q_buffers, TILE_BYTES, 128),
            kv_bytes=tiles(config.kv_buffers, tile, 1024),
            kv_scales=tiles(config.kv_buffers, TILE_BYTES, 128),
        )

    @cute.jit
    def init_barriers(self, shared: Shared):
        init_ring(shared.kv.full, shared.kv.empty, self.config.kv_buffers, 1)
        init_ring(shared.seeds.full, shared.seeds.empty, self.config.q_buffers, 1)
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(shared.scores + stage, 1)
            cute.arch.mbarrier_init(shared.drained + stage, 4)
            for part in cutlass.range_constexpr(PARTS):
                arrivals = 4 + CORRECTION_WARPS if part == 0 else 4
                cute.arch.mbarrier_init(shared.weights[part] + stage, arrivals)
            cute.arch.mbarrier_init(shared.sums + stage, 1)
            cute.arch.mbarrier_init(shared.corrections + stage, 4)
            cute.arch.mbarrier_init(shared.ends.full + stage, 4)
            cute.arch.mbarrier_init(shared.ends.empty + stage, CORRECTION_WARPS)

    # ------------------------------------------------------------------------------------------------------ work

    @cute.jit
    def share(self) -> Share:
        block, _, _ = cute.arch.block_idx()
        group = block % self.spec.groups
        seed_tile = group // self.spec.num_heads * STAGES
        return Share(group % self.spec.num_heads, seed_tile, cutlass.min(self.spec.seed_tiles - seed_tile, STAGES))

    @cute.jit
    def work(self, o: AttentionForwardOperands, turn: Int32) -> Work:
        """This CTA's segment in a turn: one load, so that who reads a segment ahead does not wait for it.

        The order of workers alternates, so that each gets long segments and short ones.
        """
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        worker, workers = block // self.spec.groups, blocks // self.spec.groups
        place = turn * workers + (workers - 1 - worker if turn % 2 == 1 else worker)
        segment, first_row, num_rows, steps = Int32(-1), Int32(0), Int32(0), Int32(0)
        if place < o.work.shape[0]:
            words = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(row_tensor(o.work, Int64(place) * 4, cute.make_layout(4)), words)
            segment, first_row, num_rows, steps = words[0], words[1], words[2], words[3]
        return Work(segment, first_row, num_rows, steps)

    @cute.jit
    def kv_tile(self, work: Work, step: Int32):
        """(tile of the segment, its number of events) of a step."""
        tile = step
        if const_expr(self.numerics.kv_order == "reverse"):
            tile = work.steps - 1 - step
        return tile, cutlass.min(work.num_rows - tile * TILE, TILE)

    @cute.jit
    def rows_of_tail(self, work: Work) -> Int32:
        """Events of a segment's last tile."""
        return work.num_rows - (work.steps - 1) * TILE

    # --------------------------------------------------------------------------------------------------- loading

    @cute.jit
    def load(self, o: AttentionForwardOperands, loads: Loads, shared: Shared):
        share = self.share()
        score_product, out_product = self.score_product(), self.out_product()
        q_layout, k_layout, v_layout = self.operand_layouts()
        k_tiles = self.as_operand(shared.kv_bytes, k_layout)
        v_tiles = self.as_operand(shared.kv_bytes, v_layout)
        head_tile = share.head * self.spec.head_dim // TILE
        buffer, parity, seeds, seeds_parity = Int32(0), Int32(1), Int32(0), Int32(1)
        turn = Int32(0)
        work = self.work(o, turn)
        if const_expr(self.spec.is_shared):
            if work.steps > 0:
                self.load_seeds(o, loads, shared, share, (Int32(0), Int32(0), Int32(0)))
        while work.steps > 0:
            if const_expr(not self.spec.is_shared):
                cute.arch.mbarrier_wait(shared.seeds.empty + seeds, seeds_parity)
                first = work.segment * self.spec.num_seeds
                self.load_seeds(o, loads, shared, share, (seeds, first, first // TILE + work.segment))
                seeds, seeds_parity = next_stage(seeds, seeds_parity, self.config.q_buffers)
            slot = work.first_row // TILE + work.segment
            for step in cutlass.range(work.steps):
                tile, num_rows = self.kv_tile(work, step)
                row = work.first_row + tile * TILE
                full = self.fill(shared, buffer, parity)
                source = cute.local_tile(
                    cute.domain_offset((row, 0), loads.k), (TILE, self.spec.head_dim), (0, share.head)
                )
                self.load_tile(loads.k_atom, score_product.get_slice(0).partition_B(source), k_tiles, buffer, full)
                with cute.arch.elect_one():
                    load_scale_tile(o.k_tiles, slot + tile, head_tile, (shared.kv_scales[None, buffer].iterator, full))
                buffer, parity = next_stage(buffer, parity, self.config.kv_buffers)
                full = self.fill(shared, buffer, parity)
                rows = offset_ragged_tensor(loads.v, row, num_rows, ragged_dim=1)
                source = cute.local_tile(rows, (self.spec.head_dim, TILE), (share.head, 0))
                self.load_tile(loads.v_atom, out_product.get_slice(0).partition_B(source), v_tiles, buffer, full)
                with cute.arch.elect_one():
                    load_scale_tile(o.v_tiles, head_tile, slot + tile, (shared.kv_scales[None, buffer].iterator, full))
                buffer, parity = next_stage(buffer, parity, self.config.kv_buffers)
            turn += 1
            work = self.work(o, turn)

    @cute.jit
    def fill(self, shared: Shared, buffer: Int32, parity: Int32) -> cute.Pointer:
        """Wait until a KV buffer is free and announce a tile with its scales; returns the barrier to signal."""
        cute.arch.mbarrier_wait(shared.kv.empty + buffer, parity)
        with cute.arch.elect_one():
            num_bytes = TILE * self.spec.head_dim + TILE_BYTES
            cute.arch.mbarrier_arrive_and_expect_tx(shared.kv.full + buffer, num_bytes)
        return shared.kv.full + buffer

    @cute.jit
    def load_seeds(self, o: AttentionForwardOperands, loads: Loads, shared: Shared, share: Share, place):
        """Load the CTA's seed tiles. place: (buffer, first row of the seeds, slot of their first tile)."""
        buffer, first, slot = place
        q_tiles = self.as_operand(shared.q_bytes, self.operand_layouts()[0])
        full = shared.seeds.full + buffer
        with cute.arch.elect_one():
            num_bytes = share.stages * (TILE * self.spec.head_dim + TILE_BYTES)
            cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
        for stage in cutlass.range(share.stages):
            tile, target = share.seed_tile + stage, buffer * STAGES + stage
            rows = cute.domain_offset((first + tile * TILE, 0), loads.q)
            source = cute.local_tile(rows, (TILE, self.spec.head_dim), (0, share.head))
            self.load_tile(loads.q_atom, self.score_product().get_slice(0).partition_A(source), q_tiles, target, full)
            head_tile = share.head * self.spec.head_dim // TILE
            with cute.arch.elect_one():
                load_scale_tile(o.q_tiles, slot + tile, head_tile, (shared.q_scales[None, target].iterator, full))

    @cute.jit
    def load_tile(
        self, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, buffer: Int32, full: cute.Pointer
    ):
        copy, _, _ = tma_get_copy_fn(
            atom, 0, cute.make_layout(1), source, target[None, None, None, buffer], single_stage=True
        )
        copy(tma_bar_ptr=full)

    @cute.jit
    def as_operand(self, data: cute.Tensor, layout: cutlass.Constexpr) -> cute.Tensor:
        """A view of bytes of shared memory as tiles of E4M3."""
        return cute.make_tensor(cute.recast_ptr(data.iterator, layout.inner, dtype=Float8E4M3FN), layout.outer)

    # -------------------------------------------------------------------------------------------------- products

    @cute.jit
    def multiply(self, o: AttentionForwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        share, columns = self.share(), tensor_memory.toint()
        if const_expr(self.spec.seed_tiles > 1):
            if share.stages == STAGES:
                self.multiply_segments(o, shared, share, columns, STAGES)
        if const_expr(self.spec.seed_tiles % STAGES == 1):
            if share.stages == 1:
                self.multiply_segments(o, shared, share, columns, 1)

    @cute.jit
    def multiply_segments(
        self, o: AttentionForwardOperands, shared: Shared, share: Share, columns: Int32, stages: cutlass.Constexpr[int]
    ):
        buffer, parity, seeds, seeds_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        step_parity, turn = Int32(0), Int32(0)
        work = self.work(o, turn)
        if work.steps > 0:
            cute.arch.mbarrier_wait(shared.seeds.full, 0)
            cute.arch.mbarrier_wait(shared.kv.full, 0)
            for stage in cutlass.range_constexpr(stages):
                scales = OUT_COLUMN + stage * SCORE_COLUMNS
                self.multiply_scores(shared, share, columns, (stage, Int32(0), Int32(0)), scales)
            release(shared.kv.empty)
            buffer, parity = next_stage(buffer, parity, self.config.kv_buffers)
        while work.steps > 0:  # empty segments are the last
            turn += 1
            following = self.work(o, turn)
            for step in cutlass.range(work.steps):
                _, num_rows = self.kv_tile(work, step)
                is_last = step + 1 == work.steps
                has_next = not is_last or following.steps > 0
                if const_expr(not self.spec.is_shared):
                    if is_last:  # the scores of this segment have been issued
                        release(shared.seeds.empty + seeds)
                        seeds, seeds_parity = next_stage(seeds, seeds_parity, self.config.q_buffers)
                v_buffer = buffer
                cute.arch.mbarrier_wait(shared.kv.full + v_buffer, parity)
                buffer, parity = next_stage(buffer, parity, self.config.kv_buffers)
                if has_next:
                    cute.arch.mbarrier_wait(shared.kv.full + buffer, parity)
                    if const_expr(not self.spec.is_shared):
                        if is_last:
                            cute.arch.mbarrier_wait(shared.seeds.full + seeds, seeds_parity)
                for stage in cutlass.range_constexpr(stages):
                    self.multiply_weights(shared, share, columns, (stage, v_buffer, step, num_rows, step_parity))
                    if const_expr(stage == stages - 1):
                        release(shared.kv.empty + v_buffer)
                    if is_last:
                        release(shared.sums + stage)
                    if has_next:
                        if const_expr(stages == STAGES):
                            take_over(shared.drained + 1 - stage, step_parity ^ stage)
                        scales = (1 - stage) * SCORE_COLUMNS + OTHERS_SCALES
                        self.multiply_scores(shared, share, columns, (stage, buffer, seeds), scales)
                        if const_expr(stage == stages - 1):
                            release(shared.kv.empty + buffer)
                if has_next:
                    buffer, parity = next_stage(buffer, parity, self.config.kv_buffers)
                step_parity ^= 1
            work = following

    @cute.jit
    def multiply_scores(self, shared: Shared, share: Share, columns: Int32, turn, scales: cutlass.Constexpr[int]):
        """S(i) = Q(i) Kᵀ. turn: (i, KV buffer, buffer of the seeds); scales: where those of Q and K go."""
        stage, buffer, seeds = turn
        q_buffer, head_dim, blocks = seeds * STAGES + stage, self.spec.head_dim, self.spec.head_dim // BLOCK
        q_scales, k_scales = columns + scales, columns + scales + SCALE_COLUMNS
        copy_scale_tile(shared.q_scales[None, q_buffer].iterator, column_pointer(q_scales))
        copy_scale_tile(shared.kv_scales[None, buffer].iterator, column_pointer(k_scales))
        q, k = (data.iterator.toint() for data in (shared.q_bytes[None, q_buffer], shared.kv_bytes[None, buffer]))
        for part in cutlass.range_constexpr(TILE // head_dim):  # which heads share a scale tile
            if share.head % (TILE // head_dim) == part:
                q_rows = Operand(q, q_scales, True, head_dim, part * blocks)
                k_rows = Operand(k, k_scales, True, head_dim, part * blocks)
                with cute.arch.elect_one():
                    multiply_tiles(
                        columns + stage * SCORE_COLUMNS, q_rows, k_rows, TILE, (blocks, False), tuple(range(blocks))
                    )
        release(shared.scores + stage)

    @cute.jit
    def multiply_weights(self, shared: Shared, share: Share, columns: Int32, turn):
        """O(i) += P(i) V, or O(i) = P(i) V in a segment's first step. turn: (i, KV buffer, step, events, parity)."""
        stage, buffer, step, num_rows, parity = turn
        head_dim, region = self.spec.head_dim, columns + stage * SCORE_COLUMNS
        p_scales, v_scales = region + P_SCALES, region + V_SCALES
        p = TensorOperand(tuple(region + block * BLOCK // 4 for block in range(BLOCKS)), p_scales)
        own = (
            share.head % (TILE // head_dim) * (head_dim // BLOCK)
        )  # columns of a scale tile, for heads narrower than it
        v = Operand(shared.kv_bytes[None, buffer].iterator.toint(), v_scales + own, False, head_dim)
        depth = ((num_rows + BLOCK - 1) // BLOCK, step > 0)
        for part in cutlass.range_constexpr(PARTS):
            take_over(shared.weights[part] + stage, parity)
            if const_expr(part == 0):
                copy_scale_tile(shared.p_scales[None, stage].iterator, column_pointer(p_scales))
                copy_scale_tile(shared.kv_scales[None, buffer].iterator, column_pointer(v_scales))
            blocks = tuple(range(part * PART_BLOCKS, (part + 1) * PART_BLOCKS))
            if num_rows > TILE - BLOCK:
                with cute.arch.elect_one():
                    multiply_tiles(region + OUT_COLUMN, p, v, head_dim, (BLOCKS, step > 0), blocks)
            else:
                with cute.arch.elect_one():
                    multiply_tiles(region + OUT_COLUMN, p, v, head_dim, depth, blocks)

    # --------------------------------------------------------------------------------------------------- softmax

    @cute.jit
    def softmax(self, o: AttentionForwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        stage = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        place = Place(stage, tensor_memory + stage * SCORE_COLUMNS)
        parity, end_parity, turn = Int32(0), Int32(1), Int32(0)
        work = self.work(o, turn)
        if stage >= self.share().stages:
            work = work._replace(steps=Int32(0))
        is_reversed = const_expr(self.numerics.kv_order == "reverse")
        while work.steps > 0:
            turn += 1
            following = self.work(o, turn)
            row = Row(-Float32.inf, Float32(0.0), Float32(0.0))
            # only the segment's last tile is masked
            if const_expr(is_reversed):
                row = self.softmax_step(shared, place, (Int32(0), parity), self.rows_of_tail(work), row)
            for step in cutlass.range(1 if is_reversed else 0, work.steps if is_reversed else work.steps - 1):
                row = self.softmax_step(shared, place, (step, parity ^ step & 1), None, row)
            if const_expr(not is_reversed):
                last = work.steps - 1
                row = self.softmax_step(shared, place, (last, parity ^ last & 1), self.rows_of_tail(work), row)
            parity ^= work.steps & 1
            self.end_segment(shared, stage, end_parity, row)
            end_parity ^= 1
            work = following

    @cute.jit
    def softmax_step(self, shared: Shared, place: Place, turn, num_rows, row: Row) -> Row:
        """One KV tile. turn: (step of the segment, parity); num_rows: events of the tile, None if it is full."""
        (step, parity), (stage, region) = turn, place
        thread, _, _ = cute.arch.thread_idx()
        take_over(shared.scores + stage, parity)
        if const_expr(num_rows is None and self.config.finds_maxima_in_loads):
            scores, maxima = load_row_and_maxima(region, TILE)
            pass_on(shared.drained + stage)
        else:
            scores = load_row(region, TILE, CHUNK)
            pass_on(shared.drained + stage)
            if const_expr(num_rows is not None):
                mask_behind(scores, num_rows, -math.inf)
            maxima = block_maxima(scores)
        maximum = self.new_maximum(row.maximum, maxima)
        factor = cute.arch.exp2((row.maximum - finite(maximum)) * self.scale_log2)
        if step > 0:
            shared.factors[thread % TILE, stage] = factor
            arrive(shared.corrections + stage)
        shift = self.p_scale_log2 - finite(maximum) * self.scale_log2
        scale_bytes = self.scales_of_weights(shared, place, maxima, shift)
        total, divisor = row.total * factor, row.divisor * factor
        for part in cutlass.range_constexpr(PARTS):
            p = cute.make_tensor(scores.iterator + part * PART, cute.make_layout(PART))
            exp2_of_row(p, Float32(self.scale_log2), shift, self.config.emulated)
            if const_expr(not self.sums_late):
                total = sum_of(p, total)
            divisor = self.store_weights(region, (p, part), scale_bytes, divisor)
            pass_on(shared.weights[part] + stage)
        if const_expr(self.sums_late):  # the tensor core is at work by now
            total = sum_of(scores, total)
        return Row(maximum, total, divisor)

    @cute.jit
    def end_segment(self, shared: Shared, stage: Int32, parity: Int32, row: Row):
        """Tell the correction warps what a segment ended with."""
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.mbarrier_wait(shared.ends.empty + stage, parity)
        shared.totals[thread % TILE, stage] = row.total
        shared.maxima[thread % TILE, stage] = row.maximum
        if const_expr(self.numerics.denominator == "quantized"):
            shared.divisors[thread % TILE, stage] = row.divisor
        arrive(shared.ends.full + stage)

    @cute.jit
    def new_maximum(self, maximum: Float32, maxima: cute.Tensor) -> Float32:
        """What P is relative to from now on: it moves only when exceeded by more than the threshold.

        A NaN among the scores makes it NaN, and so the whole row: where P is a polynomial, NaN does not survive.
        """
        tile = maxima[0]
        for block in cutlass.range_constexpr(1, BLOCKS):
            tile = cute.arch.fmax(tile, maxima[block], nan=True)
        if const_expr(self.numerics.rescale_threshold_log2 == 0):
            return cute.arch.fmax(maximum, tile, nan=True)
        threshold = self.numerics.rescale_threshold_log2 / self.scale_log2
        return maximum if tile <= maximum + threshold else tile

    @cute.jit
    def scales_of_weights(self, shared: Shared, place: Place, maxima: cute.Tensor, shift: Float32):
        """Scale bytes of P's blocks, written to the stage's scale tile; nothing if they are constant."""
        if const_expr(self.is_static):
            return None
        scale_bytes, word = [None] * BLOCKS, Uint32(0)
        for block in cutlass.range_constexpr(BLOCKS):
            largest = cute.arch.exp2(maxima[block] * self.scale_log2 + shift)
            scale_bytes[block] = scale_byte(largest.bitcast(Uint32))
            word |= Uint32(scale_bytes[block]) << 8 * block
        thread, _, _ = cute.arch.thread_idx()
        words = cute.recast_tensor(shared.p_scales[None, place.stage], Uint32)
        words[thread % 32 * 4 + thread // 32 % 4] = word
        cute.arch.fence_view_async_shared()
        return scale_bytes

    @cute.jit
    def store_weights(self, region: cute.Pointer, piece, scale_bytes, divisor: Float32) -> Float32:
        """Cast a part of a row of P and store it over the scores; returns the divisor with the sum of what was stored.

        piece: (the part, which one).
        """
        p, part = piece
        if const_expr(not self.is_static):
            for block in cutlass.range_constexpr(PART_BLOCKS):
                inverse = inverse_scale(scale_bytes[part * PART_BLOCKS + block])
                for pair in cutlass.range_constexpr(block * BLOCK, (block + 1) * BLOCK, 2):
                    p[pair], p[pair + 1] = cute.arch.mul_packed_f32x2((p[pair], p[pair + 1]), (inverse, inverse))
        payload = cute.make_rmem_tensor(PART, Float8E4M3FN)
        payload.store(p.load().to(Float8E4M3FN))  # saturates
        store_row(region + part * PART // 4, cute.recast_tensor(payload, Uint32))
        cute.arch.fence_view_async_tmem_store()
        if const_expr(self.numerics.denominator == "quantized"):
            values = cute.make_rmem_tensor(PART, Float32)
            values.store(payload.load().to(Float32))
            if const_expr(not self.is_static):
                for block in cutlass.range_constexpr(PART_BLOCKS):
                    scale = block_scale(scale_bytes[part * PART_BLOCKS + block])
                    for column in cutlass.range_constexpr(block * BLOCK, (block + 1) * BLOCK):
                        values[column] *= scale
            divisor = sum_of(values, divisor)
        return divisor

    # ------------------------------------------------------------------------------------------------ correction

    @cute.jit
    def correct(self, o: AttentionForwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        share, row = self.share(), thread % TILE
        parity, end_parity, turn = Int32(0), Int32(0), Int32(0)
        work = self.work(o, turn)
        while work.segment >= 0:
            turn += 1
            following = self.work(o, turn)
            if work.steps > 0:
                for stage in cutlass.range(share.stages):
                    pass_on(shared.weights[0] + stage)  # the first step overwrites O
            for _step in cutlass.range(work.steps - 1):
                for stage in cutlass.range(share.stages):
                    cute.arch.mbarrier_wait(shared.corrections + stage, parity)
                    factor = shared.factors[row, stage]
                    if cute.arch.vote_any_sync(factor != 1.0):
                        self.rescale(tensor_memory + OUT_COLUMN + stage * SCORE_COLUMNS, factor)
                    pass_on(shared.weights[0] + stage)
                parity ^= 1
            for stage in cutlass.range(share.stages):
                total, maximum, divisor = Float32(0.0), -Float32.inf, Float32(0.0)
                if work.steps > 0:
                    cute.arch.mbarrier_wait(shared.ends.full + stage, end_parity)
                    maximum = shared.maxima[row, stage]
                    total = shared.totals[row, stage]
                    divisor = total
                    if const_expr(self.numerics.denominator == "quantized"):
                        divisor = shared.divisors[row, stage]
                    arrive(shared.ends.empty + stage)
                    take_over(shared.sums + stage, end_parity)
                self.store_out(o, work, share, stage, (tensor_memory, divisor))
                self.store_state(o, work, share, stage, (total, maximum))
            if work.steps > 0:
                end_parity ^= 1
            work = following

    @cute.jit
    def rescale(self, place: cute.Pointer, factor: Float32):
        """Multiply rows of O."""
        for first in cutlass.range_constexpr(0, self.spec.head_dim, RESCALED):
            values = load_row(place + first, RESCALED, CHUNK)
            for pair in cutlass.range_constexpr(RESCALED // 2):
                both = (values[2 * pair], values[2 * pair + 1])
                values[2 * pair], values[2 * pair + 1] = cute.arch.mul_packed_f32x2(both, (factor, factor))
            store_row(place + first, values)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def store_out(self, o: AttentionForwardOperands, work: Work, share: Share, stage: Int32, sums):
        """out = O / l, zero without events. sums: (tensor memory, l in units of P's static scale)."""
        tensor_memory, divisor = sums
        thread, _, _ = cute.arch.thread_idx()
        seed = (share.seed_tile + stage) * TILE + thread % TILE
        inverse = Float32(2.0**self.p_scale_log2) / divisor if divisor != 0.0 else Float32(0.0)
        start = (Int64(work.segment) * self.spec.num_seeds + seed) * self.spec.columns + share.head * self.spec.head_dim
        dtype, words = self.out_dtype, CHUNK * self.out_dtype.width // 32
        for first in cutlass.range_constexpr(0, self.spec.head_dim, CHUNK):
            values = cute.make_rmem_tensor(CHUNK, Float32)
            values.fill(0.0)
            if work.steps > 0:
                loaded = load_row(tensor_memory + OUT_COLUMN + stage * SCORE_COLUMNS + first, CHUNK)
                for column in cutlass.range_constexpr(CHUNK):
                    values[column] = loaded[column] * inverse
            rounded = cute.make_rmem_tensor(CHUNK, dtype)
            rounded.store(values.load().to(dtype))
            if seed < self.spec.num_seeds:
                as_words = cute.recast_tensor(rounded, Uint32)
                for word in cutlass.range_constexpr(0, words, 4):
                    four = cute.make_rmem_tensor(4, Uint32)
                    for index in cutlass.range_constexpr(4):
                        four[index] = as_words[word + index]
                    store_words(o.out, (start + first) * (dtype.width // 8) + 4 * word, four)

    @cute.jit
    def store_state(self, o: AttentionForwardOperands, work: Work, share: Share, stage: Int32, state):
        """lse and ⌊log2 l⌋. state: (l in units of P's static scale, maximum)."""
        total, maximum = state
        thread, _, _ = cute.arch.thread_idx()
        seed = (share.seed_tile + stage) * TILE + thread % TILE
        if seed < self.spec.num_seeds:
            index = (Int64(work.segment) * self.spec.num_heads + share.head) * self.spec.num_seeds + seed
            exponent = Int32(total.bitcast(Uint32) >> 23) - 127 - self.p_scale_log2
            log2 = maximum * self.scale_log2 + (cute.math.log2(total) - self.p_scale_log2)
            lse = cute.make_tensor(element_pointer(o.lse, index, 4), cute.make_layout(1))
            lse[0] = log2 * math.log(2.0)
            row_sum = cute.make_tensor(element_pointer(o.row_sum_log2, index, 4), cute.make_layout(1))
            row_sum[0] = exponent if total != 0.0 else Int32(-127)


@cute.jit
def finite(maximum: Float32) -> Float32:
    """The maximum, 0 where there is none."""
    return Float32(0.0) if maximum == -Float32.inf else maximum


@cute.jit
def block_maxima(row: cute.Tensor) -> cute.Tensor:
    """Maximum of each 32 values, NaN if there is one among them."""
    maxima = cute.make_rmem_tensor(cute.size(row) // BLOCK, Float32)
    for block in cutlass.range_constexpr(cute.size(maxima)):
        maxima[block] = row[block * BLOCK]
        for column in cutlass.range_constexpr(1, BLOCK):
            maxima[block] = cute.arch.fmax(maxima[block], row[block * BLOCK + column], nan=True)
    return maxima


@cute.jit
def sum_of(row: cute.Tensor, start: Float32) -> Float32:
    """start + the sum of a row, in four chains of pairs."""
    chains = 4
    sums = [(row[2 * chain], row[2 * chain + 1]) for chain in range(chains)]
    sums[0] = cute.arch.add_packed_f32x2((start, Float32(0.0)), sums[0])
    for first in cutlass.range_constexpr(2 * chains, cute.size(row), 2 * chains):
        for chain in cutlass.range_constexpr(chains):
            pair = (row[first + 2 * chain], row[first + 2 * chain + 1])
            sums[chain] = cute.arch.add_packed_f32x2(sums[chain], pair)
    left = cute.arch.add_packed_f32x2(sums[0], sums[1])
    right = cute.arch.add_packed_f32x2(sums[2], sums[3])
    x, y = cute.arch.add_packed_f32x2(left, right)
    return x + y


def build(arch: str, spec: AttentionForwardSpec, config: AttentionForwardConfig, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    u8, columns, tiles = torch.uint8, spec.columns, -(-spec.columns // TILE)
    state = (None, spec.num_heads, spec.num_seeds)
    operands = AttentionForwardOperands(
        q=fake_tensor(u8, None, columns),
        q_tiles=fake_tensor(u8, None, tiles, TILE_BYTES),
        k=fake_tensor(u8, None, columns),
        k_tiles=fake_tensor(u8, None, tiles, TILE_BYTES),
        v=fake_tensor(u8, None, None),  # a stride known to the compiler would overflow in a ragged tensor's
        v_tiles=fake_tensor(u8, tiles, None, TILE_BYTES),
        work=fake_tensor(torch.int32, None, 4),
        out=fake_tensor(spec.out_dtype, None, columns),
        lse=fake_tensor(torch.float32, *state, alignment=4),
        row_sum_log2=fake_tensor(torch.int32, *state, alignment=4),
    )
    return compile_for(arch, AttentionForward(spec, config), operands, Int32(0), options=options)


compiled = cached(build)


class AttentionOperand(NamedTuple):
    """An operand as the tensor cores take it: payload, and scale tiles in the direction that the product contracts."""

    data: Tensor  # [rows, E] uint8
    tiles: Tensor  # uint8, see pma/layouts/scale_tiles.py


class Attended(NamedTuple):
    """What the kernel wrote."""

    out: Tensor  # [B, S, E] out_dtype
    lse: Tensor  # [B, H, S] float32, natural log
    row_sum_log2: Tensor  # [B, H, S] int32


def launch(
    spec: AttentionForwardSpec, q: AttentionOperand, k: AttentionOperand, v: AttentionOperand, offsets: Tensor
) -> Attended:
    """Allocate the results and start the kernel on the current stream.

    Args:
        q: [S, E] or [B·S, E], with row tiles.    k: [T, E], with row tiles.    v: [T, E], with column tiles.
        offsets: [B + 1] of spec.offsets_dtype.
    """
    num_segments, device = offsets.shape[0] - 1, k.data.device
    state = (num_segments, spec.num_heads, spec.num_seeds)
    result = Attended(
        torch.empty(num_segments, spec.num_seeds, spec.columns, dtype=spec.out_dtype, device=device),
        torch.empty(state, dtype=torch.float32, device=device),
        torch.empty(state, dtype=torch.int32, device=device),
    )
    if num_segments == 0:
        return result
    facts = device_facts(device)
    workers = max(1, min(num_segments, num_multiprocessors(device) // spec.groups))
    lengths, order = torch.sort(offsets.diff(), descending=True, stable=True)
    work = torch.stack([order, offsets[order], lengths, (lengths + TILE - 1) // TILE], dim=1).int()
    operands = AttentionForwardOperands(
        aligned(q.data), aligned(q.tiles), aligned(k.data), aligned(k.tiles), aligned(v.data), aligned(v.tiles),
        work, result.out.flatten(0, 1), result.lse, result.row_sum_log2,
    )  # fmt: skip
    with torch.cuda.device(device):
        compiled(facts.arch, spec, choose_config(spec, facts))(operands, workers * spec.groups)
    return result
