"""Attention backward on Hopper: all five products in FP8, dV and dK in registers, jagged keys.

    Sᵀ = K Qᵀ    Pᵀ = exp2(Sᵀ·c·sQ·sK + shift)    dPᵀ = V dOᵀ    dSᵀ = Pᵀ∘(dPᵀ − δ)
    dV = Pᵀ dO   dK = dSᵀ Q·c'   dQ = dS K·c'      with c' = 1/sqrt(D), c = c'·log2(e)

Hopper's products have no block scales: `pma/reference/folded.py` says under which scales P and dS are cast, and
`seed_statistics.py` prepares what is known of the seeds. Q and K are folded as they are transposed, in the kernel: both
products that contract over rows want them that way, so nobody has to write a transposed K; dO arrives in both forms.

Each CTA keeps one head and goes through tiles of 128 events, the seeds 64 at a time. Scores are transposed, events down
the rows, so that Pᵀ and dSᵀ stay in registers as left operands of dV and dK. dS goes to shared memory for dQ: pairs of
events g and g + 8 make the 16-bit units of `stmatrix.trans`, and K is transposed in that order.

Warps: 0 loads · 1 searches tiles, their scales beside them · 2, 3 find the scale of dS from the norms of V · 4–7 and
8–11 compute, 64 events each · 12–15 transpose Q and K, multiply dQ and add it to a slab in L2.

    who       before          waits for        because
    loads     K, V            `k.empty`, …     S and the transposition, or dP, have read the tile before
    loads     a step          `step.empty`     its products are done; Q of that buffer has been transposed
    compute   the first dS    `scale_full`     its scale is known, and `reduce` before the first dQ
    compute   dK              `q_transposed`   Qᵀ is there
    compute   storing dS      `ds.empty`       dQ of two steps before has read it
    reduce    dQ              `ds.full`        dS of both warpgroups is there

S is issued in fp16 (headroom of the scales). Order of a step's products: S, dP | exponentials | dV | dS | dK.

Bound at D = 128, for 128 seeds and 128 events: 2,560 clocks of the tensor core; 64 KiB of dQ to L2, 3.5 TB/s.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from quack.reduce import warp_reduce
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
from pma.kernels.attention_backward.hopper_spec import (
    COMPUTE_WARPS,
    DS_LOG2,
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
from pma.kernels.attention_backward.seed_statistics import FIRST_SCALE
from pma.kernels.attention_backward.spec import TILE
from pma.kernels.blocks import half_pairs as half
from pma.kernels.blocks.block_scales import block_scale, floor_log2, log2_of_scale, power_of_two
from pma.kernels.blocks.byte_transpose import (
    GROUPS,
    PAIRS,
    load_transposed,
    permuted,
    scaled_bytes,
    store_transposed,
)
from pma.kernels.blocks.memory import add_vector, element_pointer, load_byte, row_tensor
from pma.kernels.blocks.ring import Ring, arrive, bulk_load, init_ring, next_stage
from pma.kernels.blocks.row_tiles import RowTile, find_row_tile
from pma.kernels.blocks.warpgroup_product import (
    COLUMN_GROUP,
    LANE_ROWS,
    WARP_ROWS,
    accumulators,
    fp8_product,
    multiply,
    operand_registers,
)
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.layouts import BLOCK
from pma.layouts.mxfp8 import SCALE_ONE
from pma.layouts.transposed import GROUP
from pma.numerics import DELTA_ROOM, E4M3_MAX

LOAD_WARP, SEARCH_WARP, FIRST_NORM_WARP = 0, 1, 2
FIRST_COMPUTE_WARP, FIRST_REDUCE_WARP = 4, 4 + COMPUTE_WARPS
REGISTERS = {"others": 24, "compute": 208, "reduce": 72}
REDUCE_BARRIER, NORM_BARRIER = 1, 4  # named; 2 and 3 are the epilogue's
DS_BUFFERS = 2
PIECES = STEP // COLUMN_GROUP  # of a step's seeds in a thread's accumulators
WORD = 4


class HopperBackward(HopperGradients):
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: HopperBackwardSpec, config: HopperBackwardConfig):
        self.spec, self.config, self.head_dim = spec, config, spec.head_dim
        self.softmax_scale = 1.0 / math.sqrt(spec.head_dim)
        self.halves = spec.head_dim // STEP  # of K's columns, for dQ
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
            grid=[num_ctas, 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    def row_layout(self, *shape: int, columns: int | None = None):
        """Shared-memory layout of rows of a head, or of so many bytes, swizzled; shape: rows, buffers."""
        width, kinds = columns or self.head_dim, warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if width == 128 else kinds.K_SW64, Float8E4M3FN)
        whole = (shape[0], width, *shape[1:])
        return cute.tile_to_shape(atom, whole, order=tuple(range(len(whole))))

    def group_layout(self, buffers: int):
        """Of transposed tiles of a step: a group of 16 seeds behind the other, in it 16 bytes of each column."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_INTER, Float8E4M3FN)
        return cute.tile_to_shape(atom, (self.head_dim, STEP, buffers), order=(0, 1, 2))

    @cute.kernel
    def kernel(self, o: HopperBackwardOperands, loads: Loads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            self.init_barriers(shared)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
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
        tiles.append(array(Uint8, (STEP * TILE, DS_BUFFERS), 1024))
        return Shared(
            tiles=ring(TILES),
            q_full=smem.allocate_array(Int64, 1),
            q_transposed=smem.allocate_array(Int64, q_buffers),
            k=ring(1),
            v=ring(1),
            scale_full=smem.allocate_array(Int64, TILES),
            step=ring(config.stages),
            ds=ring(DS_BUFFERS),
            facts=array(Uint32, (FACT_WORDS, TILES), 16),
            maxima=array(Float32, (2, COMPUTE_WARPS, 2), 16),
            norms=array(Float32, (NORM_WARPS, TILES), 16),
            records=array(Uint32, (RECORD_WORDS, config.stages), 16),
            **dict(zip(Shared._fields[-8:], tiles, strict=True)),
        )

    @cute.jit
    def init_barriers(self, shared: Shared):
        both, stays = COMPUTE_WARPS + REDUCE_WARPS, self.config.q_is_resident
        init_ring(shared.tiles.full, shared.tiles.empty, TILES, both + NORM_WARPS + 1)
        cute.arch.mbarrier_init(shared.q_full, 1)
        for buffer in cutlass.range_constexpr(self.config.q_buffers(self.spec)):
            cute.arch.mbarrier_init(shared.q_transposed + buffer, REDUCE_WARPS)
        init_ring(shared.k.full, shared.k.empty, 1, both)
        init_ring(shared.v.full, shared.v.empty, 1, COMPUTE_WARPS)
        for slot in cutlass.range_constexpr(TILES):
            cute.arch.mbarrier_init(shared.scale_full + slot, 1)
        init_ring(shared.step.full, shared.step.empty, self.config.stages, COMPUTE_WARPS if stays else both)
        init_ring(shared.ds.full, shared.ds.empty, DS_BUFFERS, REDUCE_WARPS, COMPUTE_WARPS)

    @cute.jit
    def head(self) -> Int32:
        block, _, _ = cute.arch.block_idx()
        return block % self.spec.num_heads

    @cute.jit
    def segment_of_seeds(self, segment: Int32) -> Int32:
        return Int32(0) if const_expr(self.spec.is_shared) else segment

    # ------------------------------------------------------------------------------------------------- searching

    @cute.jit
    def search(self, o: HopperBackwardOperands, shared: Shared):
        """Find this CTA's tiles, 32 at a time, a lane for each, and announce them one after the other, then −1."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        workers, lane = blocks // self.spec.num_heads, cute.arch.lane_idx()
        num_tiles = num_row_blocks(cute.size(o.k, mode=[0]), cute.size(o.offsets, mode=[0]) - 1, TILE)
        tile, slot, parity = block // self.spec.num_heads, Int32(0), Int32(1)
        is_busy = True
        while is_busy:
            words = self.find_tile(o, num_tiles, tile + lane * workers)
            for index in cutlass.range(32, unroll=1):
                if is_busy:
                    cute.arch.mbarrier_wait(shared.tiles.empty + slot, parity)
                    if lane == index:
                        for word in cutlass.range_constexpr(DS_LOG2):
                            shared.facts[word, slot] = words[word]
                    arrive(shared.tiles.full + slot)
                    slot, parity = next_stage(slot, parity, TILES)
                    is_busy = tile + index * workers < num_tiles
            tile += 32 * workers

    @cute.jit
    def find_tile(self, o: HopperBackwardOperands, num_tiles: Int32, tile: Int32) -> cute.Tensor:
        """`TileFacts` of a lane's tile, as words."""
        rows = find_row_tile(o.offsets, num_tiles, tile)
        words = cute.make_rmem_tensor(DS_LOG2, Uint32)
        words.fill(0)
        for index in cutlass.range_constexpr(len(RowTile._fields)):
            words[index] = Uint32(rows[index])
        if rows.num_rows > 0:
            first = rows.begin // BLOCK + rows.segment + (rows.first_row - rows.begin) // BLOCK
            for block in cutlass.range_constexpr(TILE // BLOCK):
                slot = Int64(first + cutlass.min(block, (rows.num_rows - 1) // BLOCK))
                for index, scales in ((6, o.k_scales), (7, o.v_scales)):
                    words[index] |= Uint32(self.scale_byte(scales, slot) << 8 * block)
            place = (Int64(rows.segment) * self.spec.num_heads + self.head()) * SUMMARY_WORDS
            summary = cute.make_tensor(element_pointer(o.summaries, place, 16), cute.make_layout(SUMMARY_WORDS))
            four = cute.make_rmem_tensor(SUMMARY_WORDS, Int32)
            cute.autovec_copy(summary, four)
            for index in cutlass.range_constexpr(SUMMARY_WORDS):
                words[8 + index] = Uint32(four[index])
        return words

    @cute.jit
    def scale_byte(self, scales: cute.Tensor, slot: Int64) -> Int32:
        place = slot * (self.spec.columns // BLOCK) + self.head() * (self.head_dim // BLOCK)
        return load_byte(scales, place)

    @cute.jit
    def tile_facts(self, shared: Shared, turn: Int32) -> TileFacts:
        """This CTA's tile number `turn`; every other warp asks for 0, 1, 2 … until its slot is −1."""
        slot = turn % TILES
        cute.arch.mbarrier_wait(shared.tiles.full + slot, turn // TILES % 2)
        words = shared.facts[None, slot]
        rows = RowTile(*(Int32(words[index]) for index in range(6)))
        return TileFacts(rows, words[6], words[7], Int32(words[8]), Int32(words[9]), words[10], words[11])

    @cute.jit
    def release_facts(self, shared: Shared, turn: Int32):
        arrive(shared.tiles.empty + turn % TILES)

    # --------------------------------------------------------------------------------------------------- loading

    @cute.jit
    def load(self, o: HopperBackwardOperands, loads: Loads, shared: Shared):
        tile_parity, stage, parity = Int32(1), Int32(0), Int32(1)
        turn, is_busy, to_load = Int32(0), True, Int32(self.spec.steps if self.config.q_is_resident else 0)
        while is_busy:
            facts = self.tile_facts(shared, turn).rows
            is_busy = facts.tile >= 0
            if facts.num_rows > 0:
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

    # ---------------------------------------------------------------------------------------------- scale of dS

    @cute.jit
    def measure(self, o: HopperBackwardOperands, shared: Shared):
        """Publish dS's scale for each tile, while others work on the one before: V is read from memory."""
        turn, is_busy = Int32(0), True
        while is_busy:
            facts = self.tile_facts(shared, turn)
            is_busy = facts.rows.tile >= 0
            if facts.rows.num_rows > 0:
                self.publish_scale(o, shared, facts, turn)
            if cute.arch.warp_idx() == FIRST_NORM_WARP:
                arrive(shared.scale_full + turn % TILES)
            self.release_facts(shared, turn)
            turn += 1

    @cute.jit
    def wait_for_scale(self, shared: Shared, turn: Int32):
        cute.arch.mbarrier_wait(shared.scale_full + turn % TILES, turn // TILES % 2)

    @cute.jit
    def publish_scale(self, o: HopperBackwardOperands, shared: Shared, facts: TileFacts, turn: Int32):
        """log2 of dS's scale for a tile, from the norms of its V."""
        warp, lane, largest = cute.arch.warp_idx() - FIRST_NORM_WARP, cute.arch.lane_idx(), Float32(0.0)
        words = cute.make_rmem_tensor(WORD, Uint32)
        for block in cutlass.range(warp, TILE // BLOCK, NORM_WARPS, unroll=1):
            row, total = block * BLOCK + lane, Float32(0.0)
            if row < facts.rows.num_rows:
                start = Int64(facts.rows.first_row + row) * self.spec.columns + self.head() * self.head_dim
                values = row_tensor(o.v, start, cute.make_layout((16, self.head_dim // 16)))
                values = cute.recast_tensor(values, Uint32)
                for chunk in cutlass.range(self.head_dim // 16, unroll=2):  # more would not fit the registers
                    cute.autovec_copy(values[None, chunk], words)
                    for word in cutlass.range_constexpr(WORD):
                        total = half.square_sum_of_e4m3(words[word], total)
            norm = cute.math.sqrt(total if total == total else Float32(0.0))
            largest = cute.arch.fmax(largest, norm * power_of_two(log2_of_scale(byte_of(facts.v_scales, block))))
        largest = warp_reduce(largest, cute.arch.fmax)
        if lane == 0:
            shared.norms[warp, turn % TILES] = largest
        cute.arch.barrier(barrier_id=NORM_BARRIER, number_of_threads=32 * NORM_WARPS)
        if warp == 0:
            largest = cute.arch.fmax(largest, shared.norms[1, turn % TILES])
            bound = largest * facts.dout_norm.bitcast(Float32) + facts.delta.bitcast(Float32)
            ds_log2 = floor_log2(Float32(E4M3_MAX) / bound)
            ds_log2 = cutlass.min(ds_log2, facts.x - largest_of_bytes(facts.v_scales))
            ds_log2 = cutlass.min(ds_log2, DELTA_ROOM - 1 + facts.x - facts.delta_log2)
            if lane == 0:
                shared.facts[DS_LOG2, turn % TILES] = Uint32(ds_log2)

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
            part.make_fragment_B(part.partition_B(with_layout(data, self.group_layout(buffers))))
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
            if rows.num_rows > 0:
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
                    arrive(shared.ds.full + ds_stage)
                    ds_stage, ds_parity = next_stage(ds_stage, ds_parity, DS_BUFFERS)
                    warpgroup.wait_group(1 if const_expr(config.q_is_resident) else 0)
                    arrive(shared.step.empty + stage)
                    stage, parity = next_stage(stage, parity, config.stages)
                waits_for_q = False
                warpgroup.wait_group(0)
                if const_expr(not self.spec.is_shared):
                    q_log2 = self.largest_q(o, rows.segment)
                self.store_gradients(o, shared, (own.dv, own.dk), (facts, turn, q_log2))
                tile_parity ^= 1
            elif rows.tile >= 0:
                self.store_absent_scales(o, rows)
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
        """dS of the warp's 16 events: 16 bytes of a row of each seed, events g and g + 8 side by side."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - FIRST_COMPUTE_WARP
        row = lane * TILE + (warp ^ lane % 8) * GROUP
        target = shared.ds_bytes[None, buffer].iterator + row
        for block in cutlass.range_constexpr(STEP // BLOCK):
            stored = []
            for h in cutlass.range_constexpr(2):
                low, high = words[4 * block + 2 * h], words[4 * block + 2 * h + 1]
                stored += [permuted(low, high, 0x5140), permuted(low, high, 0x7362)]
            store_transposed(target + block * BLOCK * TILE, stored)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def largest_q(self, o: HopperBackwardOperands, segment: Int32) -> Int32:
        """log2 of the largest scale of Q in the segment and head, the same in every lane."""
        own, blocks = Int64(self.segment_of_seeds(segment)), (self.spec.num_seeds + BLOCK - 1) // BLOCK
        slot, largest = own * self.spec.num_seeds // BLOCK + own, Int32(-SCALE_ONE)
        for block in cutlass.range(cute.arch.lane_idx(), blocks, 32, unroll=1):
            largest = cutlass.max(largest, log2_of_scale(self.scale_byte(o.q_scales, slot + block)))
        return warp_reduce(largest, cutlass.max)

    # ---------------------------------------------------------------------------------------------------- reduce

    @cute.jit
    def reduce(self, o: HopperBackwardOperands, shared: Shared):
        """Transposed Q and K, and dQ."""
        product, config = fp8_product(STEP, Float32, warpgroup.OperandSource.SMEM), self.config
        part = product.get_slice(0)
        ds = with_layout(shared.ds_bytes, self.row_layout(STEP, DS_BUFFERS, columns=TILE))
        k = with_layout(shared.k_transposed_bytes, self.row_layout(STEP, self.halves, columns=TILE))
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
            if rows.num_rows > 0:
                if to_transpose > 0:
                    cute.arch.mbarrier_wait(shared.q_full, 0)
                for step in cutlass.range(to_transpose, unroll=1):
                    self.transpose_q(o, shared, (Int32(0), step, step), q_log2)
                to_transpose = Int32(0)
                cute.arch.mbarrier_wait(shared.k.full, tile_parity)
                self.barrier()  # all have done with the tile before
                k_log2 = largest_of_bytes(facts.k_scales)
                self.transpose_k(shared, facts, k_log2)
                arrive(shared.k.empty)
                self.barrier()
                if const_expr(not self.spec.is_shared):
                    q_log2 = self.largest_q(o, rows.segment)
                self.wait_for_scale(shared, turn)
                factor = power_of_two(k_log2 - self.ds_log2(shared, turn))
                for step in cutlass.range(self.spec.steps, unroll=1):
                    if const_expr(not config.q_is_resident):
                        cute.arch.mbarrier_wait(shared.step.full + stage, parity)
                        self.transpose_q(o, shared, (rows.segment, step, stage), q_log2)
                        arrive(shared.step.empty + stage)
                        stage, parity = next_stage(stage, parity, config.stages)
                    cute.arch.mbarrier_wait(shared.ds.full + ds_stage, ds_parity)
                    for index in cutlass.range_constexpr(self.halves):
                        own = k[None, None, None, index]
                        multiply(product, sums, ds[None, None, None, ds_stage], own, False)
                        warpgroup.wait_group(0)
                        if const_expr(index == self.halves - 1):
                            arrive(shared.ds.empty + ds_stage)
                        self.add_to_slab(o.dq, (rows.segment, step, index), sums, factor)
                    ds_stage, ds_parity = next_stage(ds_stage, ds_parity, DS_BUFFERS)
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
        """K of a tile to rows of 128 events, under one scale, zeros where there is none; 32 events by each warp."""
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_REDUCE_WARP, cute.arch.lane_idx()
        factor = half.pair_of(power_of_two(log2_of_scale(byte_of(facts.k_scales, warp)) - k_log2))
        target = cute.recast_ptr(shared.k_transposed_bytes.iterator, dtype=Uint32)
        for part in cutlass.range(BLOCK // GROUP, unroll=1):
            group = warp * (BLOCK // GROUP) + part
            mask = mask_of_pairs(facts.rows.num_rows - group * GROUP - 2 * (lane % 4))
            for pair in cutlass.range(self.head_dim // BLOCK, unroll=1):
                words = self.transposed_words(shared.k_bytes.iterator, group * GROUP, pair, PAIRS)
                for index in cutlass.range_constexpr(WORD):
                    column = BLOCK * pair + 16 * (index // 2) + 2 * (lane // 4) + index % 2
                    place = column * (TILE // WORD) + (group ^ column % 8) * WORD + lane % 4
                    target[place] = scaled_bytes(words[index], factor) & mask
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
                target[(group * self.head_dim + column) * WORD + lane % 4] = scaled_bytes(words[index], factor)
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
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        heads, shared_by = self.spec.num_heads, self.config.slabs
        if const_expr(not self.spec.is_shared):
            return segment * heads + self.head()
        if const_expr(shared_by == 0):
            return self.head() * (blocks // heads) + block // heads
        return self.head() * shared_by + block // heads % shared_by


@cute.jit
def with_layout(data: cute.Tensor, layout) -> cute.Tensor:
    """Bytes of shared memory as E4M3."""
    return cute.make_tensor(cute.recast_ptr(data.iterator, layout.inner, dtype=Float8E4M3FN), layout.outer)


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


@cute.jit
def byte_of(word: Uint32, index: Int32) -> Int32:
    return Int32(word >> Uint32(8 * index)) & 0xFF


@cute.jit
def largest_of_bytes(word: Uint32) -> Int32:
    """log2 of the largest scale of a tile; a block that isn't there repeats another's."""
    largest = Int32(-SCALE_ONE)
    for block in cutlass.range_constexpr(TILE // BLOCK):
        largest = cutlass.max(largest, log2_of_scale(byte_of(word, Int32(block))))
    return largest


@cute.jit
def mask_of_pairs(count: Int32) -> Uint32:
    """Bytes of rows 0, 8, 1, 9 of which `count` exist."""
    mask = Uint32(0)
    for index in cutlass.range_constexpr(WORD):
        row = (0, 8, 1, 9)[index]
        mask |= Uint32(0xFF << 8 * index) if count > row else Uint32(0)
    return mask


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
    num_tiles = num_row_blocks(num_rows, num_segments, TILE)
    workers = max(1, min(num_tiles, num_multiprocessors(device) // spec.num_heads))
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
            compiled(facts.arch, spec, config)(operands, workers * spec.num_heads)
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
