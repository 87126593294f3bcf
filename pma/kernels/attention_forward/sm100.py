"""Attention forward on Blackwell: all products block-scaled MXFP8, softmax in fp32, jagged keys.

    S = Q Kᵀ    P = exp2(S·c − e)    l = Σ 2^e P 1    O = Σ 2^e P V    out = O / l    with c = log2(e)/sqrt(D)

Each CTA keeps one head and 128 seeds and goes through its segments, the longest first, one KV tile j of 128 events
after the other, in the order that `AttentionNumerics` says. Seeds that all segments share stay in shared memory.
Payload comes by TMA from the jagged rows, scale tiles from their slots (split addressing). The tensor map of V ends
where the segment does, so zeros come behind it (0 times a neighbour's NaN would be NaN), and products over blocks of
32 events that don't exist are not issued: no pad byte is used.

P's scale factors carry the maximum. Each row of a tile, or each 32 events of it, has an exponent e of its own, the
least of which the weights are at most 1.75·2^e; what is stored is P·2^8, and its scale byte says 2^(e − 8 − r). r is
what the row's O is relative to, e of the segment's first tile, so neither O nor a running maximum moves from tile to
tile. Only where e exceeds r by more than 32 is r raised and O rescaled. l is the product of the same P with ones, in
eight columns beside O.

The two CTAs of a cluster (`ctas`) have neighbouring seed tiles of a head and the same segments. Each loads half of
every tile of K and V and of its scales into both.

Warps: 0 products S · 1 products P V and P 1 · 2 loads · 3 makes registers free · 4–7 divide and store · 8–11 and 12–15
softmax, a row in each thread. Softmax's warpgroups take KV tiles in turn, j and j + 1 at the same time, and their warps
of the same rows take turns at exponentials, so that those of one run while the other loads, casts and stores.

Tensor memory (`spec.py`) has two buffers of S, of P and of all scales: nothing overlaps.

    who          before        waits for          because
    loads        K, V          `empty`            the products of both CTAs of the cluster have read what was there
    loads        the CTA ends  `empty` of all     the other CTA arrives here no more
    S product    S(j)          `drained`          S(j−2) is in registers, hence its product and scales are done too
    P V product  a segment     `ends.empty`       O and l of the segment before have been read
    P V product  O += P V      `weights`          P(j) and its scales are stored, behind P V of j−2, whose scales go
    softmax      its maximum   `scores`           S(j) is there
    softmax      exponentials  its turn           the warp of the same rows has issued those of j−1, and has set r
    softmax      storing P(j)  `sums` of j−2      the product has read P(j−2) and its scales
    softmax      rescaling O   `sums` of j−1      P V of j−1 is in it; that of j waits for this warp's P
                               `sums` of j−2      before, so that the phase awaited is not the one before it
    softmax      a segment's   `ends.empty`       those of the segment before have been read
                 exponents
    correction   O and l       `ends.full`        the segment's r, and its greatest e
                               `sums` of j        the segment's last product is in them

A turn passes by two named barriers for each pair of warps, since it says nothing of the tensor core.

Bound, for two KV tiles at D = 128: 1,056 clocks of the tensor core and, on B200, 2,048 of exponentials, 1,300 with 6 of
16 emulated, on GB300 1,024. DESIGN.md, attention forward.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import torch
from cutlass import Float8E4M3FN, Float8E8M0FNU, Float32, Int16, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from quack.copy_utils import create_ragged_tensor_for_tma, offset_ragged_tensor, tma_get_copy_fn
from torch import Tensor

from pma.kernels.attention_forward.operands import (
    AttentionForwardOperands,
    Loads,
    Place,
    Row,
    Shared,
)
from pma.kernels.attention_forward.shares import (
    Attended,
    Share,
    SharesOfCtas,
    Work,
    empty_results,
    shared_out,
    work_by_length,
)
from pma.kernels.attention_forward.spec import (
    BUFFERS,
    CORRECTION_WARPS,
    ONE_SCALE_COLUMN,
    P_COLUMN,
    P_COLUMNS,
    P_SCALE_COLUMN,
    QK_SCALE_COLUMN,
    SCALE_COLUMNS,
    SCORE_COLUMN,
    SOFTMAX_WARPS,
    SUM_COLUMN,
    SUM_COLUMNS,
    TENSOR_COLUMNS,
    TILE,
    V_SCALE_COLUMN,
    AttentionForwardConfig,
    AttentionForwardSpec,
    choose_config,
)
from pma.kernels.blocks.block_product import BLOCKS, Operand, TensorOperand, multiply_tiles
from pma.kernels.blocks.exponential import ROUND_TO_INTEGER, exp2_of_row
from pma.kernels.blocks.masks import mask_behind
from pma.kernels.blocks.memory import element_pointer, store_words
from pma.kernels.blocks.ring import Ring, arrive, drain, init_ring, meet, next_stage
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
from pma.numerics import E4M3_MAX_EXPONENT, E4M3_MAX_MANTISSA

# The warps with few instructions and long chains come first: where a scheduler prefers the oldest, it is they.
SCORE_WARP, SUM_WARP, LOAD_WARP = 0, 1, 2
FIRST_CORRECTION_WARP, FIRST_SOFTMAX_WARP = 4, 4 + CORRECTION_WARPS
REGISTERS, REGISTERS_OF_OTHERS = (192, 80), 48  # of a softmax and a correction warp
CHUNK = 32  # columns of tensor memory that an instruction moves
FIRST_TURN, THREADS_OF_TURN = 1, 64  # named barriers: two of each of the four pairs of softmax warps
RESCALED = 16  # the same, where registers hold a row of P
MOST_ABOVE = 32.0  # octaves that a row's largest weight may exceed what O is relative to
LEAST_SCORE = -(2.0**20)  # stands for −∞, whose exponent would make P = NaN
ONE = 0x38  # in E4M3
QUARTERS = 4  # of the rows, one for each warp of a warpgroup


class AttentionForward(SharesOfCtas):
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: AttentionForwardSpec, config: AttentionForwardConfig):
        self.spec, self.config, self.numerics = spec, config, spec.numerics
        self.scale_log2 = math.log2(math.e) / math.sqrt(spec.head_dim)
        self.out_dtype = CUTE_DTYPES[spec.out_dtype]
        self.is_by_block = spec.numerics.p_cast == "block"
        self.score_tiler, self.out_tiler = (TILE, TILE, spec.head_dim), (TILE, spec.head_dim, TILE)

    @cute.jit
    def __call__(self, o: AttentionForwardOperands, num_ctas: Int32, stream):
        score_product, out_product = self.score_product(), self.out_product()
        q, k, v = self.as_e4m3(o.q, [0, 1]), self.as_e4m3(o.k, [0, 1]), self.as_e4m3(o.v, [1, 0])
        ctas, first = self.config.ctas, (None, None, None, 0)
        alone, one = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE), (1, 1, 1, 1)
        for_all, cluster = alone, (1, ctas, 1, 1)
        if const_expr(ctas > 1):
            for_all = cpasync.CopyBulkTensorTileG2SMulticastOp(tcgen05.CtaGroup.ONE)
        q_layout, k_layout, v_layout = (cute.slice_(layout, first) for layout in self.operand_layouts())
        v = create_ragged_tensor_for_tma(v, ragged_dim=1)
        maps = (
            cute.nvgpu.make_tiled_tma_atom_A(alone, q, q_layout, self.score_tiler, score_product, one),
            cute.nvgpu.make_tiled_tma_atom_B(for_all, k, k_layout, self.score_tiler, score_product, cluster),
            cute.nvgpu.make_tiled_tma_atom_B(for_all, v, v_layout, self.out_tiler, out_product, cluster),
        )
        loads = Loads(*maps[0], *maps[1], *maps[2])
        self.kernel(o, loads).launch(
            grid=[num_ctas, 1, 1], block=[self.config.threads, 1, 1], cluster=[ctas, 1, 1], min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

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
            blackwell.make_smem_layout_a(self.score_product(), self.score_tiler, Float8E4M3FN, config.q_buffers),
            blackwell.make_smem_layout_b(self.score_product(), self.score_tiler, Float8E4M3FN, config.k_buffers),
            blackwell.make_smem_layout_b(self.out_product(), self.out_tiler, Float8E4M3FN, config.v_buffers),
        )

    @cute.kernel
    def kernel(self, o: AttentionForwardOperands, loads: Loads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            self.init_barriers(shared)
        if thread < TILE_BYTES:
            shared.one_scales[thread] = Uint8(SCALE_ONE)
            for half in cutlass.range_constexpr(SUM_COLUMNS * TILE // TILE_BYTES):
                shared.ones[thread + half * TILE_BYTES] = Uint8(ONE)
        if thread < TILE:
            shared.references[thread] = Float32(0.0)  # is read before a segment's first step sets it
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, shared.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
        meet(self.config.ctas)
        tensor_memory = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tensor_memory)
        if warp >= FIRST_SOFTMAX_WARP:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.softmax(o, shared, tensor_memory)
        elif warp >= FIRST_CORRECTION_WARP:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            self.correct(o, shared, tensor_memory)
        else:
            cute.arch.setmaxregister_decrease(REGISTERS_OF_OTHERS)
            if warp == SCORE_WARP:
                self.multiply_scores(o, shared, tensor_memory)
            elif warp == SUM_WARP:
                self.multiply_weights(o, shared, tensor_memory)
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

        def tiles(count: int, size: int, alignment: int) -> cute.Tensor:
            return smem.allocate_tensor(Uint8, cute.make_layout((size, count)), alignment)

        return Shared(
            k=ring(config.k_buffers),
            v=ring(config.v_buffers),
            seeds=ring(config.q_buffers),
            scores=barriers(BUFFERS),
            drained=barriers(BUFFERS),
            weights=barriers(BUFFERS),
            sums=barriers(BUFFERS),
            ends=ring(1),
            tensor_memory=smem.allocate_array(Int32, 1),
            references=smem.allocate_tensor(Float32, cute.make_layout(TILE), 16),
            exponents=smem.allocate_tensor(Float32, cute.make_layout((2, TILE, BUFFERS)), 16),
            p_scales=tiles(BUFFERS, TILE_BYTES, 128),
            one_scales=smem.allocate_tensor(Uint8, cute.make_layout(TILE_BYTES), 128),
            ones=smem.allocate_tensor(Uint8, cute.make_layout(SUM_COLUMNS * TILE), 1024),
            q_bytes=tiles(config.q_buffers, tile, 1024),
            q_scales=tiles(config.q_buffers, TILE_BYTES, 128),
            k_bytes=tiles(config.k_buffers, tile, 1024),
            k_scales=tiles(config.k_buffers, TILE_BYTES, 128),
            v_bytes=tiles(config.v_buffers, tile, 1024),
            v_scales=tiles(config.v_buffers, TILE_BYTES, 128),
        )

    @cute.jit
    def init_barriers(self, shared: Shared):
        init_ring(shared.k.full, shared.k.empty, self.config.k_buffers, self.config.ctas)
        init_ring(shared.v.full, shared.v.empty, self.config.v_buffers, self.config.ctas)
        init_ring(shared.seeds.full, shared.seeds.empty, self.config.q_buffers, 1)
        for buffer in cutlass.range_constexpr(BUFFERS):
            cute.arch.mbarrier_init(shared.scores + buffer, 1)
            cute.arch.mbarrier_init(shared.drained + buffer, 4)
            cute.arch.mbarrier_init(shared.weights + buffer, 4)
            cute.arch.mbarrier_init(shared.sums + buffer, 1)
        cute.arch.mbarrier_init(shared.ends.full, SOFTMAX_WARPS)
        cute.arch.mbarrier_init(shared.ends.empty, CORRECTION_WARPS)

    # ------------------------------------------------------------------------------------------------------ work

    @cute.jit
    def kv_tile(self, work: Work, step: Int32):
        """(tile of the segment, its number of events) of a step."""
        tile = step
        if const_expr(self.numerics.kv_order == "reverse"):
            tile = work.steps - 1 - step
        return tile, cutlass.min(work.num_rows - tile * TILE, TILE)

    # --------------------------------------------------------------------------------------------------- loading

    @cute.jit
    def load(self, o: AttentionForwardOperands, loads: Loads, shared: Shared):
        share, ctas = self.share(), self.config.ctas
        score_product, out_product = self.score_product(), self.out_product()
        q_layout, k_layout, v_layout = self.operand_layouts()
        k_tiles = self.as_operand(shared.k_bytes, k_layout)
        v_tiles = self.as_operand(shared.v_bytes, v_layout)
        head_tile = share.head * self.spec.head_dim // TILE
        k, k_parity, v, v_parity = Int32(0), Int32(1), Int32(0), Int32(1)
        seeds, seeds_parity, turn = Int32(0), Int32(1), Int32(0)
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
                full = self.fill(shared.k, k, k_parity)
                source = cute.local_tile(
                    cute.domain_offset((row, 0), loads.k), (TILE, self.spec.head_dim), (0, share.head)
                )
                self.load_tile(loads.k_atom, score_product.get_slice(0).partition_B(source), k_tiles, k, full)
                with cute.arch.elect_one():
                    load_scale_tile(o.k_tiles, slot + tile, head_tile, (shared.k_scales[None, k].iterator, full), ctas)
                k, k_parity = next_stage(k, k_parity, self.config.k_buffers)
                full = self.fill(shared.v, v, v_parity)
                rows = offset_ragged_tensor(loads.v, row, num_rows, ragged_dim=1)
                source = cute.local_tile(rows, (self.spec.head_dim, TILE), (share.head, 0))
                self.load_tile(loads.v_atom, out_product.get_slice(0).partition_B(source), v_tiles, v, full)
                with cute.arch.elect_one():
                    load_scale_tile(o.v_tiles, head_tile, slot + tile, (shared.v_scales[None, v].iterator, full), ctas)
                v, v_parity = next_stage(v, v_parity, self.config.v_buffers)
            turn += 1
            work = self.work(o, turn)
        drain(shared.k.empty, k, k_parity, self.config.k_buffers)
        drain(shared.v.empty, v, v_parity, self.config.v_buffers)

    @cute.jit
    def fill(self, ring: Ring, buffer: Int32, parity: Int32) -> cute.Pointer:
        """Wait until a buffer is free and announce a tile with its scales; returns the barrier to signal.

        The other CTA's half may come before this: the phase then still lacks this arrival.
        """
        cute.arch.mbarrier_wait(ring.empty + buffer, parity)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + buffer, TILE * self.spec.head_dim + TILE_BYTES)
        return ring.full + buffer

    @cute.jit
    def load_seeds(self, o: AttentionForwardOperands, loads: Loads, shared: Shared, share: Share, place):
        """Load the CTA's seed tile. place: (buffer, first row of the seeds, slot of their first tile)."""
        buffer, first, slot = place
        q_tiles = self.as_operand(shared.q_bytes, self.operand_layouts()[0])
        full = shared.seeds.full + buffer
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, TILE * self.spec.head_dim + TILE_BYTES)
        rows = cute.domain_offset((first + share.seed_tile * TILE, 0), loads.q)
        source = cute.local_tile(rows, (TILE, self.spec.head_dim), (0, share.head))
        self.load_tile(loads.q_atom, self.score_product().get_slice(0).partition_A(source), q_tiles, buffer, full)
        head_tile = share.head * self.spec.head_dim // TILE
        with cute.arch.elect_one():
            scales = shared.q_scales[None, buffer].iterator
            load_scale_tile(o.q_tiles, slot + share.seed_tile, head_tile, (scales, full))

    @cute.jit
    def load_tile(
        self, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, buffer: Int32, full: cute.Pointer
    ):
        """Load a tile, or this CTA's part of it to all of the cluster."""
        rank, ctas, multicast = Int32(0), 1, {}
        if const_expr(isinstance(atom.op, cpasync.CopyBulkTensorTileG2SMulticastOp)):
            rank, ctas = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()), self.config.ctas
            multicast = {"mcast_mask": Int16((1 << ctas) - 1)}
        copy, _, _ = tma_get_copy_fn(
            atom, rank, cute.make_layout(ctas), source, target[None, None, None, buffer], single_stage=True
        )
        copy(tma_bar_ptr=full, **multicast)

    @cute.jit
    def as_operand(self, data: cute.Tensor, layout: cutlass.Constexpr) -> cute.Tensor:
        """A view of bytes of shared memory as tiles of E4M3."""
        return cute.make_tensor(cute.recast_ptr(data.iterator, layout.inner, dtype=Float8E4M3FN), layout.outer)

    # -------------------------------------------------------------------------------------------------- products

    @cute.jit
    def multiply_scores(self, o: AttentionForwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        """S(j) = Q K(j)ᵀ."""
        share, columns = self.share(), tensor_memory.toint()
        buffer, parity, seeds, seeds_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        tile, turn = Int32(0), Int32(0)
        work = self.work(o, turn)
        if const_expr(self.spec.is_shared):
            if work.steps > 0:
                cute.arch.mbarrier_wait(shared.seeds.full, 0)
        while work.steps > 0:
            turn += 1
            following = self.word_of_work(o, turn)
            if const_expr(not self.spec.is_shared):
                cute.arch.mbarrier_wait(shared.seeds.full + seeds, seeds_parity)
            for _step in cutlass.range(work.steps, unroll=1):
                cute.arch.mbarrier_wait(shared.k.full + buffer, parity)
                take_over(shared.drained + (tile & 1), tile >> 1 & 1 ^ 1)
                self.score_tile(shared, share, columns, (tile & 1, buffer, seeds))
                buffer, parity = next_stage(buffer, parity, self.config.k_buffers)
                tile += 1
            if const_expr(not self.spec.is_shared):
                release(shared.seeds.empty + seeds)
                seeds, seeds_parity = next_stage(seeds, seeds_parity, self.config.q_buffers)
            work = shared_out(following)

    @cute.jit
    def score_tile(self, shared: Shared, share: Share, columns: Int32, turn):
        """turn: (buffer of the scores, of K, of the seeds)."""
        at, buffer, seeds = turn
        head_dim, blocks = self.spec.head_dim, self.spec.head_dim // BLOCK
        q_scales = columns + QK_SCALE_COLUMN + at * 2 * SCALE_COLUMNS
        k_scales = q_scales + SCALE_COLUMNS
        copy_scale_tile(shared.q_scales[None, seeds].iterator, column_pointer(q_scales))
        copy_scale_tile(shared.k_scales[None, buffer].iterator, column_pointer(k_scales))
        q, k = (data.iterator.toint() for data in (shared.q_bytes[None, seeds], shared.k_bytes[None, buffer]))
        for part in cutlass.range_constexpr(TILE // head_dim):  # which heads share a scale tile
            if share.head % (TILE // head_dim) == part:
                q_rows = Operand(q, q_scales, True, head_dim, part * blocks)
                k_rows = Operand(k, k_scales, True, head_dim, part * blocks)
                with cute.arch.elect_one():
                    multiply_tiles(
                        columns + SCORE_COLUMN + at * TILE, q_rows, k_rows, TILE, (blocks, False), tuple(range(blocks))
                    )
        release(shared.scores + at)
        release(shared.k.empty + buffer, self.config.ctas)

    @cute.jit
    def multiply_weights(self, o: AttentionForwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        """O += P(j) V(j) and l += P(j) 1, or without what was there in a segment's first step."""
        share, columns = self.share(), tensor_memory.toint()
        buffer, parity, tile, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        work = self.work(o, turn)
        if work.steps > 0:
            copy_scale_tile(shared.one_scales.iterator, column_pointer(columns + ONE_SCALE_COLUMN))
        while work.steps > 0:
            following = self.word_of_work(o, turn + 1)
            take_over(shared.ends.empty, turn & 1 ^ 1)
            for step in cutlass.range(work.steps):
                _, num_rows = self.kv_tile(work, step)
                cute.arch.mbarrier_wait(shared.v.full + buffer, parity)
                self.add_tile(shared, share, columns, (tile, buffer, num_rows, step > 0))
                buffer, parity = next_stage(buffer, parity, self.config.v_buffers)
                tile += 1
            turn += 1
            work = shared_out(following)

    @cute.jit
    def add_tile(self, shared: Shared, share: Share, columns: Int32, turn):
        """turn: (j, V buffer, events, whether to add)."""
        tile, buffer, num_rows, accumulates = turn
        at, head_dim = tile & 1, self.spec.head_dim
        p_scales, v_scales = (columns + first + at * SCALE_COLUMNS for first in (P_SCALE_COLUMN, V_SCALE_COLUMN))
        region = columns + P_COLUMN + at * P_COLUMNS
        p = TensorOperand(tuple(region + block * BLOCK // 4 for block in range(BLOCKS)), p_scales)
        # Columns of a scale tile, for heads narrower than it.
        own = share.head % (TILE // head_dim) * (head_dim // BLOCK)
        v = Operand(shared.v_bytes[None, buffer].iterator.toint(), v_scales + own, False, head_dim)
        ones = Operand(shared.ones.iterator.toint(), columns + ONE_SCALE_COLUMN, True)
        depth = ((num_rows + BLOCK - 1) // BLOCK, accumulates)
        take_over(shared.weights + at, tile >> 1 & 1)
        copy_scale_tile(shared.p_scales[None, at].iterator, column_pointer(p_scales))
        copy_scale_tile(shared.v_scales[None, buffer].iterator, column_pointer(v_scales))
        if num_rows > TILE - BLOCK:
            with cute.arch.elect_one():
                multiply_tiles(columns, p, v, head_dim, (BLOCKS, accumulates))
                multiply_tiles(columns + SUM_COLUMN, p, ones, SUM_COLUMNS, (BLOCKS, accumulates))
        else:
            with cute.arch.elect_one():
                multiply_tiles(columns, p, v, head_dim, depth)
                multiply_tiles(columns + SUM_COLUMN, p, ones, SUM_COLUMNS, depth)
        release(shared.v.empty + buffer, self.config.ctas)
        release(shared.sums + at)

    # --------------------------------------------------------------------------------------------------- softmax

    @cute.jit
    def softmax(self, o: AttentionForwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_SOFTMAX_WARP
        group, quarter = warp // QUARTERS, warp % QUARTERS
        place = Place(
            group, FIRST_TURN + 2 * quarter + group, FIRST_TURN + 2 * quarter + 1 - group, tensor_memory,
            tensor_memory + SCORE_COLUMN + group * TILE, tensor_memory + P_COLUMN + group * P_COLUMNS,
        )  # fmt: skip
        tile, end_parity, turn = Int32(0), Int32(1), Int32(0)
        work = self.work(o, turn)
        while work.steps > 0:
            turn += 1
            following = self.word_of_work(o, turn)
            row = Row(-Float32.inf, -Float32.inf)
            for step in cutlass.range((group ^ tile) & 1, work.steps, 2):
                _, num_rows = self.kv_tile(work, step)
                take_over(shared.scores + group, tile + step >> 1 & 1)
                if num_rows < TILE:
                    mask_scores(place.scores, num_rows)
                row = self.softmax_step(shared, place, (step, tile + step), row)
            tile += work.steps
            self.end_segment(shared, group, end_parity, row)
            end_parity ^= 1
            work = shared_out(following)

    @cute.jit
    def softmax_step(self, shared: Shared, place: Place, turn, row: Row) -> Row:
        """One KV tile; returns what O is relative to now, and the greatest exponent so far.

        turn: (step of the segment, tile of the CTA).
        """
        (step, tile), group = turn, place.group
        thread, _, _ = cute.arch.thread_idx()
        if const_expr(self.config.finds_maxima_in_loads):
            scores, maxima = load_row_and_maxima(place.scores, TILE)
            pass_on(shared.drained + group)
        else:
            scores = load_row(place.scores, TILE, CHUNK)
            pass_on(shared.drained + group)
            maxima = block_maxima(scores)
        exponents = self.exponents(maxima)
        highest = largest(exponents)
        if tile > 0:  # the first waits for nobody
            cute.arch.barrier(barrier_id=place.own_turn, number_of_threads=THREADS_OF_TURN)
        columns = TILE // cute.size(exponents)
        for index in cutlass.range_constexpr(cute.size(exponents)):
            p = cute.make_tensor(scores.iterator + index * columns, cute.make_layout(columns))
            exp2_of_row(p, Float32(self.scale_log2), E4M3_MAX_EXPONENT - exponents[index], self.config.emulated)
        reference = shared.references[thread % TILE]
        if cute.arch.vote_any_sync(step == 0 or highest > reference + MOST_ABOVE):
            reference = self.move_reference(shared, place, turn, (highest, reference))
        cute.arch.barrier_arrive(barrier_id=place.other_turn, number_of_threads=THREADS_OF_TURN)
        take_over(shared.sums + group, tile >> 1 & 1 ^ 1)
        self.store_scales(shared, group, exponents, reference)
        payload = cute.make_rmem_tensor(TILE, Float8E4M3FN)
        payload.store(scores.load().to(Float8E4M3FN))  # saturates
        store_row(place.weights, cute.recast_tensor(payload, Uint32))
        cute.arch.fence_view_async_tmem_store()
        pass_on(shared.weights + group)
        return Row(reference, cute.arch.fmax(row.highest, highest))

    @cute.jit
    def exponents(self, maxima: cute.Tensor) -> cute.Tensor:
        """The least e of which the weights are at most 1.75·2^e: of the row, or of each block, from its maximum."""
        if const_expr(not self.is_by_block):
            tile = cute.make_rmem_tensor(1, Float32)
            tile[0] = largest(maxima)
            maxima = tile
        factor, magic = Float32(self.scale_log2), Float32(ROUND_TO_INTEGER)
        shift = Float32(0.5 - math.log2(E4M3_MAX_MANTISSA))  # so that rounding to the nearest rounds up
        for index in cutlass.range_constexpr(cute.size(maxima)):
            score = cute.arch.fmax(maxima[index], LEAST_SCORE, nan=True)
            exponent, _ = cute.arch.fma_packed_f32x2((score, score), (factor, factor), (shift, shift))
            maxima[index] = exponent + magic - magic
        return maxima

    @cute.jit
    def move_reference(self, shared: Shared, place: Place, turn, exponents) -> Float32:
        """Set what a segment's O is relative to in its first step, and raise it where P would outgrow it."""
        (step, tile), (highest, reference) = turn, exponents
        thread, _, _ = cute.arch.thread_idx()
        moved = highest if step == 0 or highest > reference + MOST_ABOVE else reference
        if step > 0:
            cute.arch.mbarrier_wait(shared.sums + place.group, tile >> 1 & 1 ^ 1)  # else the next may be a phase ahead
            take_over(shared.sums + 1 - place.group, (tile - 1) >> 1 & 1)
            factor = cute.arch.exp2(reference - moved)
            for first in cutlass.range_constexpr(0, self.spec.head_dim, RESCALED):
                rescale(place.tensor_memory + first, RESCALED, factor)
            rescale(place.tensor_memory + SUM_COLUMN, SUM_COLUMNS, factor)
        shared.references[thread % TILE] = moved
        return moved

    @cute.jit
    def store_scales(self, shared: Shared, group: Int32, exponents: cute.Tensor, reference: Float32):
        """Write the scale bytes of a row of P: 2^(e − 8), relative to what O is."""
        thread, _, _ = cute.arch.thread_idx()
        bytes_ = [Int32(0)] * BLOCKS
        for index in cutlass.range_constexpr(cute.size(exponents)):
            byte = cute.arch.fmax(exponents[index] - reference + (SCALE_ONE - E4M3_MAX_EXPONENT), Float32(0.0))
            bytes_[index] = (byte + ROUND_TO_INTEGER).bitcast(Int32)
        if const_expr(self.is_by_block):
            low, high = (cute.arch.prmt(bytes_[pair], bytes_[pair + 1], 0x40) for pair in (0, 2))
            word = cute.arch.prmt(low, high, 0x5410)
        else:
            word = cute.arch.prmt(bytes_[0], bytes_[0], 0)
        words = cute.recast_tensor(shared.p_scales[None, group], Uint32)
        words[thread % 32 * 4 + thread // 32 % 4] = Uint32(word)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def end_segment(self, shared: Shared, group: Int32, parity: Int32, row: Row):
        """Tell the correction warps what this warpgroup knows of a segment."""
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.mbarrier_wait(shared.ends.empty, parity)
        shared.exponents[0, thread % TILE, group] = row.reference
        shared.exponents[1, thread % TILE, group] = row.highest
        arrive(shared.ends.full)

    # ------------------------------------------------------------------------------------------------ correction

    @cute.jit
    def correct(self, o: AttentionForwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        share, row = self.share(), thread % TILE
        tile, turn = Int32(0), Int32(0)
        work = self.work(o, turn)
        while work.segment >= 0:
            following = self.word_of_work(o, turn + 1)
            total, reference, highest = Float32(0.0), -Float32.inf, -Float32.inf
            if work.steps > 0:
                tile += work.steps
                last = (tile - 1) & 1
                cute.arch.mbarrier_wait(shared.ends.full, turn & 1)
                reference = shared.exponents[0, row, last]
                highest = cute.arch.fmax(shared.exponents[1, row, 0], shared.exponents[1, row, 1])
                take_over(shared.sums + last, (tile - 1) >> 1 & 1)
                total = load_row(tensor_memory + SUM_COLUMN, 1)[0]
            self.store_out(o, work, share, (tensor_memory, total))
            if work.steps > 0:
                pass_on(shared.ends.empty)
            self.store_state(o, work, share, (total, reference, highest))
            work = shared_out(following)
            turn += 1

    @cute.jit
    def store_out(self, o: AttentionForwardOperands, work: Work, share: Share, sums):
        """out = O / l, zero without events. sums: (tensor memory, l in units of P's static scale)."""
        tensor_memory, divisor = sums
        thread, _, _ = cute.arch.thread_idx()
        seed = share.seed_tile * TILE + thread % TILE
        inverse = Float32(1.0) / divisor if divisor != 0.0 else Float32(0.0)
        start = (Int64(work.segment) * self.spec.num_seeds + seed) * self.spec.columns
        start += share.head * self.spec.head_dim
        dtype, words = self.out_dtype, CHUNK * self.out_dtype.width // 32
        for first in cutlass.range_constexpr(0, self.spec.head_dim, CHUNK):
            values = cute.make_rmem_tensor(CHUNK, Float32)
            values.fill(0.0)
            if work.steps > 0:
                loaded = load_row(tensor_memory + first, CHUNK)
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
    def store_state(self, o: AttentionForwardOperands, work: Work, share: Share, state):
        """lse and ⌊log2 l⌋, l relative to the highest. state: (l relative to the reference, log2 of both)."""
        total, reference, highest = state
        thread, _, _ = cute.arch.thread_idx()
        seed = share.seed_tile * TILE + thread % TILE
        if seed < self.spec.num_seeds:
            index = (Int64(work.segment) * self.spec.num_heads + share.head) * self.spec.num_seeds + seed
            exponent = Int32(total.bitcast(Uint32) >> 23) - 127 + Int32(reference - highest)
            log2 = reference + cute.math.log2(total)
            lse = cute.make_tensor(element_pointer(o.lse, index, 4), cute.make_layout(1))
            lse[0] = log2 * math.log(2.0)
            row_sum = cute.make_tensor(element_pointer(o.row_sum_log2, index, 4), cute.make_layout(1))
            row_sum[0] = exponent if total != 0.0 else Int32(-127)


@cute.jit
def rescale(place: cute.Pointer, columns: cutlass.Constexpr[int], factor: Float32):
    """Multiply this thread's row of tensor memory; the stores end with those that wait behind."""
    values = load_row(place, columns)
    for column in cutlass.range_constexpr(columns):
        values[column] *= factor
    store_row(place, values)


@cute.jit
def largest(values: cute.Tensor) -> Float32:
    """NaN if there is one."""
    result = values[0]
    for index in cutlass.range_constexpr(1, cute.size(values)):
        result = cute.arch.fmax(result, values[index], nan=True)
    return result


@cute.jit
def mask_scores(place: cute.Pointer, count: Int32):
    """−∞ in tensor memory behind the first `count` scores of a row."""
    for first in cutlass.range_constexpr(0, TILE, CHUNK):
        if count < first + CHUNK:
            values = load_row(place + first, CHUNK)
            mask_behind(values, count - first, -math.inf)
            store_row(place + first, values)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def block_maxima(row: cute.Tensor) -> cute.Tensor:
    """Maximum of each 32 values, NaN if there is one among them."""
    maxima = cute.make_rmem_tensor(cute.size(row) // BLOCK, Float32)
    for block in cutlass.range_constexpr(cute.size(maxima)):
        maxima[block] = row[block * BLOCK]
        for column in cutlass.range_constexpr(1, BLOCK):
            maxima[block] = cute.arch.fmax(maxima[block], row[block * BLOCK + column], nan=True)
    return maxima


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


def launch(
    spec: AttentionForwardSpec, q: AttentionOperand, k: AttentionOperand, v: AttentionOperand, offsets: Tensor,
    config: AttentionForwardConfig | None = None,
) -> Attended:  # fmt: skip
    """Allocate the results and start the kernel on the current stream.

    Args:
        q: [S, E] or [B·S, E], with row tiles.    k: [T, E], with row tiles.    v: [T, E], with column tiles.
        offsets: [B + 1] of spec.offsets_dtype.
        config: instead of the one that `choose_config` takes.
    """
    num_segments, device = offsets.shape[0] - 1, k.data.device
    result = empty_results(spec, num_segments, device)
    if num_segments == 0:
        return result
    facts = device_facts(device)
    workers = max(1, min(num_segments, num_multiprocessors(device) // spec.groups))
    operands = AttentionForwardOperands(
        aligned(q.data), aligned(q.tiles), aligned(k.data), aligned(k.tiles), aligned(v.data), aligned(v.tiles),
        work_by_length(offsets), result.out.flatten(0, 1), result.lse, result.row_sum_log2,
    )  # fmt: skip
    with torch.cuda.device(device):
        compiled(facts.arch, spec, config or choose_config(spec, facts))(operands, workers * spec.groups)
    return result
