"""Attention forward on Blackwell: all products block-scaled MXFP8, softmax in fp32, jagged keys.

    S = Q Kᵀ    p = exp2((s − m)·c)    O = Σ P V    out = O / l    with c = log2(e)/sqrt(D), l = Σ p

Each CTA keeps one head and 128 seeds and goes through its segments, the longest first, one KV tile j of 128 events
after the other, in the order that `AttentionNumerics` says. Seeds that all segments share stay in shared memory.
Payload comes by TMA from the jagged rows, scale tiles from their slots (split addressing). The tensor map of V ends
where the segment does, so zeros come behind it (0 times a neighbour's NaN would be NaN), and products over blocks of
32 events that don't exist are not issued: no pad byte is used.

The two CTAs of a cluster (`ctas`) have neighbouring seed tiles of a head and the same segments. Each loads half of
every tile of K and V and of its scales into both.

Warps: 0 products S · 1 products P V · 2 loads · 3 makes registers free · 4–7 correction: rescale O when a maximum
moves, divide and store · 8–11 and 12–15 softmax, a row in each thread. Softmax's warpgroups take KV tiles in turn,
j and j + 1 at the same time, so that exponentials of one run while the other loads, casts and sums. A row's maximum
passes from one to the other through shared memory; each keeps the sum over its own tiles, and correction adds the two.

Tensor memory (`spec.py`) has two buffers of S, of P and of all scales but V's, which have four: nothing overlaps.

    who          before        waits for          because
    loads        K, V          `empty`            the products of both CTAs of the cluster have read what was there
    loads        the CTA ends  `empty` of all     the other CTA arrives here no more
    S product    S(j)          `drained`          S(j−2) is in registers, hence its product and scales are done too
    P V product  scales of V   nothing            `weights` of j−1 came behind P V of j−4, whose scales these replace
    P V product  O += P V      `weights`, piece 0 P(j) is stored, and the piece of O has been rescaled
                               `weights`, piece 1 the piece of O has been rescaled
    softmax      its maximum   `moved` of j−1     that of the tile before is there, from the warp of the same rows
    softmax      storing P(j)  `sums` of j−2      the product has read P(j−2) and its scales
    softmax      exponentials  `turns` of j−1     (sm_103a) the warp of the same rows has issued most of its own
    correction   the factor    `moved` of j
    correction   a piece of O  `sums` of j−1      P V of j−1 is in it
                               `sums` of j−2      without a move: nobody arrives twice in one phase of `weights`
    softmax      a segment's   `ends.empty`       correction has read the sums of the segment before
                 sums

`moved` has four slots. Slot j is written again for j + 4, by a warp that has waited for P V of j, which correction
allowed after reading the slot, and for `moved` of j + 3, behind that of j + 1, whose warp had read it. O has two pieces
of 64 columns with barriers of their own: while one is rescaled the tensor core adds to the other. Correction allows the
first step of a segment to overwrite O when it has read the rows of the segment before.

Bound, for two KV tiles at D = 128: 1,024 clocks of the tensor core and, on B200, 2,048 of exponentials, 1,300 with 6 of
16 emulated, on GB300 1,024. What takes longest is issue: DESIGN.md, attention forward.
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
from pma.kernels.attention_forward.shares import Attended, Share, SharesOfCtas, Work, empty_results, work_by_length
from pma.kernels.attention_forward.spec import (
    BUFFERS,
    CORRECTION_WARPS,
    P_COLUMN,
    P_COLUMNS,
    P_SCALE_COLUMN,
    PIECE,
    QK_SCALE_COLUMN,
    SCALE_COLUMNS,
    SCORE_COLUMN,
    SLOTS,
    SOFTMAX_WARPS,
    TENSOR_COLUMNS,
    TILE,
    V_SCALE_COLUMN,
    AttentionForwardConfig,
    AttentionForwardSpec,
    choose_config,
)
from pma.kernels.blocks.block_product import BLOCKS, Operand, TensorOperand, multiply_tiles
from pma.kernels.blocks.block_scales import block_scale, inverse_scale, scale_byte
from pma.kernels.blocks.exponential import exp2_of_row
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

# The warps with few instructions and long chains come first: where a scheduler prefers the oldest, it is they.
SCORE_WARP, SUM_WARP, LOAD_WARP = 0, 1, 2
FIRST_CORRECTION_WARP, FIRST_SOFTMAX_WARP = 4, 4 + CORRECTION_WARPS
# Of a softmax and a correction warp: polynomials take more, and correction then has 32 columns at a time.
REGISTERS, REGISTERS_WITH_POLYNOMIALS, REGISTERS_OF_OTHERS = (184, 96), (192, 80), 48
CHUNK = 32  # columns of tensor memory that an instruction moves
EARLY = 96  # exponentials of a row after which the other warpgroup may begin its own
QUARTERS = 4  # of the rows, one for each warp of a warpgroup


class AttentionForward(SharesOfCtas):
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: AttentionForwardSpec, config: AttentionForwardConfig):
        self.spec, self.config, self.numerics = spec, config, spec.numerics
        self.scale_log2 = math.log2(math.e) / math.sqrt(spec.head_dim)
        self.out_dtype = CUTE_DTYPES[spec.out_dtype]
        self.is_static = spec.numerics.p_cast == "static"
        # What is stored is P, and registers suffice to sum it afterwards.
        self.sums_late = self.is_static and config.takes_turns and spec.numerics.denominator == "fp32"
        self.p_scale_log2 = spec.numerics.p_scale_log2 if self.is_static else 0
        self.score_tiler, self.out_tiler = (TILE, TILE, spec.head_dim), (TILE, PIECE, TILE)
        self.pieces = spec.head_dim // PIECE  # of O and V
        self.registers = REGISTERS_WITH_POLYNOMIALS if config.emulated else REGISTERS

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
            tcgen05.CtaGroup.ONE, (TILE, PIECE), tcgen05.OperandSource.TMEM,
        )  # fmt: skip

    def operand_layouts(self):
        """Shared-memory layouts of Q, K and V."""
        config = self.config
        return (
            blackwell.make_smem_layout_a(self.score_product(), self.score_tiler, Float8E4M3FN, config.q_buffers),
            blackwell.make_smem_layout_b(self.score_product(), self.score_tiler, Float8E4M3FN, config.k_buffers),
            blackwell.make_smem_layout_b(
                self.out_product(), self.out_tiler, Float8E4M3FN, self.pieces * config.v_buffers
            ),
        )

    @cute.kernel
    def kernel(self, o: AttentionForwardOperands, loads: Loads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            self.init_barriers(shared)
        if const_expr(self.is_static):
            for buffer in cutlass.range_constexpr(BUFFERS):
                if thread < TILE_BYTES:
                    shared.p_scales[thread, buffer] = Uint8(SCALE_ONE - self.p_scale_log2)
            cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, shared.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
        meet(self.config.ctas)
        tensor_memory = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tensor_memory)
        if warp >= FIRST_SOFTMAX_WARP:
            cute.arch.setmaxregister_increase(self.registers[0])
            self.softmax(o, shared, tensor_memory)
        elif warp >= FIRST_CORRECTION_WARP:
            cute.arch.setmaxregister_decrease(self.registers[1])
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

        def rows() -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout((TILE, BUFFERS)), 16)

        def tiles(count: int, size: int, alignment: int) -> cute.Tensor:
            return smem.allocate_tensor(Uint8, cute.make_layout((size, count)), alignment)

        return Shared(
            k=ring(config.k_buffers),
            v=ring(config.v_buffers),
            seeds=ring(config.q_buffers),
            scores=barriers(BUFFERS),
            drained=barriers(BUFFERS),
            weights=barriers(self.pieces * BUFFERS),
            sums=barriers(self.pieces * BUFFERS),
            moved=barriers(QUARTERS * SLOTS),
            turns=barriers(QUARTERS * BUFFERS),
            ends=ring(1),
            tensor_memory=smem.allocate_array(Int32, 1),
            moves=smem.allocate_tensor(Float32, cute.make_layout((2, TILE, SLOTS)), 16),
            totals=rows(),
            divisors=rows(),
            p_scales=tiles(BUFFERS, TILE_BYTES, 128),
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
            for piece in cutlass.range_constexpr(self.pieces):
                arrivals = CORRECTION_WARPS + (4 if piece == 0 else 0)
                cute.arch.mbarrier_init(shared.weights + piece * BUFFERS + buffer, arrivals)
                cute.arch.mbarrier_init(shared.sums + piece * BUFFERS + buffer, 1)
        for slot in cutlass.range_constexpr(QUARTERS * BUFFERS):
            cute.arch.mbarrier_init(shared.turns + slot, 1)
        for slot in cutlass.range_constexpr(QUARTERS * SLOTS):
            cute.arch.mbarrier_init(shared.moved + slot, 1)
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
                for piece in cutlass.range_constexpr(self.pieces):
                    source = cute.local_tile(rows, (PIECE, TILE), (share.head * self.pieces + piece, 0))
                    source = out_product.get_slice(0).partition_B(source)
                    self.load_tile(loads.v_atom, source, v_tiles, v * self.pieces + piece, full)
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
            following = self.work(o, turn)
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
            work = following

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
        """O += P(j) V(j), or O = P(j) V(j) in a segment's first step."""
        share, columns = self.share(), tensor_memory.toint()
        buffer, parity, tile, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        work = self.work(o, turn)
        if const_expr(self.is_static):
            if work.steps > 0:
                for at in cutlass.range_constexpr(BUFFERS):
                    scales = column_pointer(columns + P_SCALE_COLUMN + at * SCALE_COLUMNS)
                    copy_scale_tile(shared.p_scales[None, at].iterator, scales)
        while work.steps > 0:
            turn += 1
            following = self.work(o, turn)
            for step in cutlass.range(work.steps):
                _, num_rows = self.kv_tile(work, step)
                cute.arch.mbarrier_wait(shared.v.full + buffer, parity)
                self.add_tile(shared, share, columns, (tile, buffer, num_rows, step > 0))
                buffer, parity = next_stage(buffer, parity, self.config.v_buffers)
                tile += 1
            work = following

    @cute.jit
    def add_tile(self, shared: Shared, share: Share, columns: Int32, turn):
        """turn: (j, V buffer, events, whether to add)."""
        tile, buffer, num_rows, accumulates = turn
        at, parity, head_dim = tile & 1, tile >> 1 & 1, self.spec.head_dim
        p_scales = columns + P_SCALE_COLUMN + at * SCALE_COLUMNS
        v_scales = columns + V_SCALE_COLUMN + (tile & (SLOTS - 1)) * SCALE_COLUMNS
        region = columns + P_COLUMN + at * P_COLUMNS
        p = TensorOperand(tuple(region + block * BLOCK // 4 for block in range(BLOCKS)), p_scales)
        # Columns of a scale tile, for heads narrower than it.
        own = share.head % (TILE // head_dim) * (head_dim // BLOCK)
        copy_scale_tile(shared.v_scales[None, buffer].iterator, column_pointer(v_scales))
        address = shared.v_bytes[None, buffer].iterator.toint()
        depth = ((num_rows + BLOCK - 1) // BLOCK, accumulates)
        take_over(shared.weights + at, parity)
        if const_expr(not self.is_static):
            copy_scale_tile(shared.p_scales[None, at].iterator, column_pointer(p_scales))
        for piece in cutlass.range_constexpr(self.pieces):
            v = Operand(address + piece * TILE * PIECE, v_scales + own + piece * (PIECE // BLOCK), False, PIECE)
            if const_expr(piece > 0):
                take_over(shared.weights + piece * BUFFERS + at, parity)
            if num_rows > TILE - BLOCK:
                with cute.arch.elect_one():
                    multiply_tiles(columns + piece * PIECE, p, v, PIECE, (BLOCKS, accumulates))
            else:
                with cute.arch.elect_one():
                    multiply_tiles(columns + piece * PIECE, p, v, PIECE, depth)
            if const_expr(piece == self.pieces - 1):
                release(shared.v.empty + buffer, self.config.ctas)
            release(shared.sums + piece * BUFFERS + at)

    # --------------------------------------------------------------------------------------------------- softmax

    @cute.jit
    def softmax(self, o: AttentionForwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_SOFTMAX_WARP
        group = warp // QUARTERS
        scores, weights = SCORE_COLUMN + group * TILE, P_COLUMN + group * P_COLUMNS
        place = Place(group, warp % QUARTERS, tensor_memory + scores, tensor_memory + weights)
        tile, end_parity, turn = Int32(0), Int32(1), Int32(0)
        work = self.work(o, turn)
        while work.steps > 0:
            turn += 1
            following = self.work(o, turn)
            row = Row(Float32(0.0), Float32(0.0))
            for step in cutlass.range((group ^ tile) & 1, work.steps, 2):
                _, num_rows = self.kv_tile(work, step)
                take_over(shared.scores + group, tile + step >> 1 & 1)
                if num_rows < TILE:
                    mask_scores(place.scores, num_rows)
                row = self.softmax_step(shared, place, (step, tile + step), row)
            tile += work.steps
            self.end_segment(shared, group, end_parity, row)
            end_parity ^= 1
            work = following

    @cute.jit
    def softmax_step(self, shared: Shared, place: Place, turn, row: Row) -> Row:
        """One KV tile. turn: (step of the segment, tile of the CTA)."""
        (_, tile), group = turn, place.group
        if const_expr(self.config.finds_maxima_in_loads):
            scores, maxima = load_row_and_maxima(place.scores, TILE)
            pass_on(shared.drained + group)
        else:
            scores = load_row(place.scores, TILE, CHUNK)
            pass_on(shared.drained + group)
            maxima = block_maxima(scores)
        maximum, factor = self.move_maximum(shared, place, turn, maxima)
        shift = self.p_scale_log2 - finite(maximum) * self.scale_log2
        turns, waits_late = (
            shared.turns + place.quarter * BUFFERS,
            const_expr(self.is_static and self.config.takes_turns),
        )
        if const_expr(not waits_late):
            self.take_over_weights(shared, group, tile)
        scale_bytes = self.scales_of_weights(shared, place, maxima, shift)
        total, divisor = row.total * factor, row.divisor * factor
        if const_expr(self.config.takes_turns):
            cute.arch.mbarrier_wait(turns + 1 - group, (tile - 1) >> 1 & 1)
        for first, last in ((0, EARLY), (EARLY, TILE)):
            p = cute.make_tensor(scores.iterator + first, cute.make_layout(last - first))
            exp2_of_row(p, Float32(self.scale_log2), shift, self.config.emulated)
            if const_expr(not self.sums_late):
                total = sum_of(p, total)
            if const_expr(self.config.takes_turns and last == EARLY):
                if const_expr(waits_late):
                    self.take_over_weights(shared, group, tile)
                arrive(turns + group)
        divisor = self.store_weights(place.weights, scores, scale_bytes, divisor)
        pass_on(shared.weights + group)
        if const_expr(self.sums_late):  # the tensor core is at work by now
            total = sum_of(scores, total)
        return Row(total, divisor)

    @cute.jit
    def move_maximum(self, shared: Shared, place: Place, turn, maxima: cute.Tensor):
        """(what P is relative to from a tile on, the factor of this warpgroup's sums). turn: (step, tile)."""
        step, tile = turn
        thread, _, _ = cute.arch.thread_idx()
        row, moved = thread % TILE, shared.moved + place.quarter * SLOTS
        slot, last = tile & (SLOTS - 1), (tile - 1) & (SLOTS - 1)
        cute.arch.mbarrier_wait(moved + last, (tile - 1) >> 2 & 1)  # SLOTS tiles to a phase
        before, factor = -Float32.inf, Float32(0.0)
        if step > 0:
            before, factor = shared.moves[0, row, last], shared.moves[1, row, last]
        maximum = self.new_maximum(before, maxima)
        own = cute.arch.exp2((before - finite(maximum)) * self.scale_log2)
        shared.moves[0, row, slot], shared.moves[1, row, slot] = maximum, own
        arrive(moved + slot)
        return maximum, factor * own

    @cute.jit
    def take_over_weights(self, shared: Shared, group: Int32, tile: Int32):
        """Wait until the product of the tile before the last has read P and its scales."""
        take_over(shared.sums + (self.pieces - 1) * BUFFERS + group, tile >> 1 & 1 ^ 1)

    @cute.jit
    def end_segment(self, shared: Shared, group: Int32, parity: Int32, row: Row):
        """Tell the correction warps what this warpgroup summed in a segment."""
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.mbarrier_wait(shared.ends.empty, parity)
        shared.totals[thread % TILE, group] = row.total
        if const_expr(self.numerics.denominator == "quantized"):
            shared.divisors[thread % TILE, group] = row.divisor
        arrive(shared.ends.full)

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
        words = cute.recast_tensor(shared.p_scales[None, place.group], Uint32)
        words[thread % 32 * 4 + thread // 32 % 4] = word
        cute.arch.fence_view_async_shared()
        return scale_bytes

    @cute.jit
    def store_weights(self, place: cute.Pointer, p: cute.Tensor, scale_bytes, divisor: Float32) -> Float32:
        """Cast a row of P and store it; returns the divisor with the sum of what was stored."""
        if const_expr(not self.is_static):
            for block in cutlass.range_constexpr(BLOCKS):
                inverse = inverse_scale(scale_bytes[block])
                for pair in cutlass.range_constexpr(block * BLOCK, (block + 1) * BLOCK, 2):
                    p[pair], p[pair + 1] = cute.arch.mul_packed_f32x2((p[pair], p[pair + 1]), (inverse, inverse))
        payload = cute.make_rmem_tensor(TILE, Float8E4M3FN)
        payload.store(p.load().to(Float8E4M3FN))  # saturates
        store_row(place, cute.recast_tensor(payload, Uint32))
        cute.arch.fence_view_async_tmem_store()
        if const_expr(self.numerics.denominator == "quantized"):
            values = cute.make_rmem_tensor(TILE, Float32)
            values.store(payload.load().to(Float32))
            if const_expr(not self.is_static):
                for block in cutlass.range_constexpr(BLOCKS):
                    scale = block_scale(scale_bytes[block])
                    for column in cutlass.range_constexpr(block * BLOCK, (block + 1) * BLOCK):
                        values[column] *= scale
            divisor = sum_of(values, divisor)
        return divisor

    # ------------------------------------------------------------------------------------------------ correction

    @cute.jit
    def correct(self, o: AttentionForwardOperands, shared: Shared, tensor_memory: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        share, row, slots = self.share(), thread % TILE, SLOTS - 1
        moved = shared.moved + cute.arch.make_warp_uniform(cute.arch.warp_idx()) % QUARTERS * SLOTS
        last_sums = shared.sums + (self.pieces - 1) * BUFFERS
        tile, end_parity, turn = Int32(0), Int32(0), Int32(0)
        work = self.work(o, turn)
        while work.segment >= 0:
            turn += 1
            following = self.work(o, turn)
            maximum, factor = -Float32.inf, Float32(0.0)
            for step in cutlass.range(work.steps):
                at = tile & 1
                cute.arch.mbarrier_wait(moved + (tile & slots), tile >> 2 & 1)
                maximum, factor = shared.moves[0, row, tile & slots], shared.moves[1, row, tile & slots]
                moves = step > 0 and cute.arch.vote_any_sync(factor != 1.0)  # the first overwrites O
                awaited = tile - (1 if moves else 2)
                for piece in cutlass.range_constexpr(self.pieces):
                    take_over(shared.sums + piece * BUFFERS + (awaited & 1), awaited >> 1 & 1)
                    if moves:
                        self.rescale(tensor_memory + piece * PIECE, factor)
                    pass_on(shared.weights + piece * BUFFERS + at)
                tile += 1
            total, divisor = Float32(0.0), Float32(0.0)
            if work.steps > 0:
                last = (tile - 1) & 1
                cute.arch.mbarrier_wait(shared.ends.full, end_parity)
                end_parity ^= 1
                total = shared.totals[row, last] + shared.totals[row, 1 - last] * factor
                divisor = total
                if const_expr(self.numerics.denominator == "quantized"):
                    divisor = shared.divisors[row, last] + shared.divisors[row, 1 - last] * factor
                arrive(shared.ends.empty)
                take_over(last_sums + last, (tile - 1) >> 1 & 1)
            self.store_out(o, work, share, (tensor_memory, divisor))
            self.store_state(o, work, share, (total, maximum))
            work = following

    @cute.jit
    def rescale(self, place: cute.Pointer, factor: Float32):
        """Multiply rows of a piece of O."""
        columns = const_expr(CHUNK if self.config.emulated else PIECE)
        for first in cutlass.range_constexpr(0, PIECE, columns):
            values = load_row(place + first, columns, CHUNK)
            for pair in cutlass.range_constexpr(columns // 2):
                both = (values[2 * pair], values[2 * pair + 1])
                values[2 * pair], values[2 * pair + 1] = cute.arch.mul_packed_f32x2(both, (factor, factor))
            for part in cutlass.range_constexpr(0, columns, CHUNK):
                chunk = cute.make_tensor(values.iterator + part, cute.make_layout(CHUNK))
                store_row(place + first + part, chunk)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def store_out(self, o: AttentionForwardOperands, work: Work, share: Share, sums):
        """out = O / l, zero without events. sums: (tensor memory, l in units of P's static scale)."""
        tensor_memory, divisor = sums
        thread, _, _ = cute.arch.thread_idx()
        seed = share.seed_tile * TILE + thread % TILE
        inverse = Float32(2.0**self.p_scale_log2) / divisor if divisor != 0.0 else Float32(0.0)
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
        """lse and ⌊log2 l⌋. state: (l in units of P's static scale, maximum)."""
        total, maximum = state
        thread, _, _ = cute.arch.thread_idx()
        seed = share.seed_tile * TILE + thread % TILE
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
