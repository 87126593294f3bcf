"""`weight_grad` on Hopper: dW = doutᵀ x over the tokens of all segments, both in MXFP8, multiplied in fp16.

    dW[n, c] = Σ_t dout[t, n] · x[t, c]       dout [T, N], x [T, C], dW [N, C] float32 or bfloat16

Tokens are the contraction, and scales differ from 32 tokens to the next, so FP8 products can't take them; fp16 can, and
it reads operands with tokens outermost. An E4M3 payload is exact in fp16, and so is its product with 2^(7 − f), where

    f = (largest scale byte of the head) − (scale byte of the block)

up to f = 22; beyond, bits below 2^-24 are rounded, 2^-40 of the largest block's largest value, and blocks with f > 31
vanish: less than fp32 keeps of a sum that holds the largest block. The largest bytes are found beforehand, on the
device. A block whose scale is NaN is NaN. The sum takes the two largest scales, and 2^-14, at the end.

Work items are (part of the tokens, tile of dW). Tokens come in stages of up to 64 of one segment. The tensor maps reach
a stage through an extent that ends where the segment does (quack's ragged tensors), so TMA fills rows behind it with
zeros and never reads the neighbour's.

Warps: 0 loads, and finds the folds 2^(7 − f) · 1–3 turn x into fp16, a block of 32 tokens after the other · 4–7 and
8–11 multiply, 64 rows of dW each. These take dout as operand A from registers, transposed by `ldmatrix` in pairs of
bytes: row g + 8r of a warp's 16 is column 2g + r of dout.

Shared memory: `stages` of FP8 slabs [64 tokens, 128 columns], dout's first; four blocks [32, tile_columns] in fp16.

Bound at N = C = 384, for 32 tokens and a tile of 128 × 384: 768 clocks of the tensor core; shared memory moves 103 KB
beside them, 810 clocks. Sums are cut to fp32 after each product of 16 tokens, as Hopper does: those of one sign drift
by 2^-24 a step, 5e-4 after 130,000 tokens of a part.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.experimental import primitives
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma
from quack.copy_utils import create_ragged_tensor_for_tma, offset_ragged_tensor
from torch import Tensor

from pma.kernels.blocks import half_pairs as half
from pma.kernels.blocks.block_scales import block_scale
from pma.kernels.blocks.k_tiles import RowRange, k_tile_at, rows_of_slots, window_at
from pma.kernels.blocks.memory import element_pointer, load_byte
from pma.kernels.blocks.ring import Ring, arrive, init_ring, next_stage
from pma.kernels.blocks.segments import first_slot
from pma.kernels.blocks.transpose import permute_bytes
from pma.kernels.blocks.warpgroup_product import (
    COLUMN_GROUP,
    LANE_ROWS,
    ROWS,
    accumulators,
    multiply,
    operand_registers,
    with_layout,
)
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.kernels.weight_grad.hopper_spec import (
    BLOCKS,
    CONVERTERS,
    HALF_BLOCKS,
    RECORD_WORDS,
    SCALE_COLUMNS,
    TOKENS,
    WARPGROUPS,
    HopperWeightGradConfig,
    HopperWeightGradSpec,
    choose_config,
)
from pma.kernels.weight_grad.spec import SLAB
from pma.layouts import BLOCK, MXFP8Tensor
from pma.layouts.mxfp8 import SCALE_BIAS, SCALE_NAN

LOAD_WARP = 0
COMPUTE_WARPS = 4 * WARPGROUPS
FOLDS_OF_DOUT = BLOCKS * WARPGROUPS  # first words of a record; those of x follow, then whether the part ends here
IS_LAST = RECORD_WORDS - 1
HEADROOM = 7  # octaves that a payload is raised by: 448·2^7 fits fp16
HALF_NAN = 0x7E00
HALF_BIAS, HALF_BITS = 15, 10
ROW_BYTES, PIECE_BYTES, ATOM_ROWS = 128, 16, 8  # of a swizzled tile: a row, what is permuted in it, rows of a period
ATOM_BYTES = ROW_BYTES * ATOM_ROWS
SLAB_BYTES = TOKENS * ROW_BYTES
CHUNK = 4  # columns of a sum that a thread adds
SUM_THREADS = 128


class HopperWeightGradOperands(NamedTuple):
    """Tensors in global memory: T tokens, B segments; scales are compact."""

    dout: cute.Tensor  # [T, out_columns] bytes
    dout_scales: cute.Tensor  # [T // 32 + B, out_columns / 32] bytes
    dout_largest: cute.Tensor  # [out_columns / 32] bytes: of each column, NaN left out
    x: cute.Tensor  # [T, in_columns] bytes
    x_scales: cute.Tensor  # [T // 32 + B, in_columns / 32] bytes
    x_largest: cute.Tensor  # [in_columns / 32] bytes
    offsets: cute.Tensor  # [B + 1]
    partials: cute.Tensor  # [parts, tiles, 128, tile_columns] float32
    out: cute.Tensor  # [out_columns, in_columns]


class Loads(NamedTuple):
    """The payloads as ragged tensors [columns, tokens] of E4M3, through tensor maps."""

    dout_atom: cute.CopyAtom
    dout: cute.Tensor
    x_atom: cute.CopyAtom
    x: cute.Tensor


class Shared(NamedTuple):
    """Shared memory."""

    stages: Ring  # of FP8 tokens and their folds: loads → converters and compute
    halves: Ring  # of x in fp16: converters → compute
    records: cute.Tensor  # [32, stages] words
    payload: cute.Tensor  # [64·128, slabs, stages] bytes
    half_bytes: cute.Tensor  # [2·32·tile_columns, 4] bytes


class HopperWeightGrad:
    """The kernels of one spec and one configuration."""

    def __init__(self, spec: HopperWeightGradSpec, config: HopperWeightGradConfig):
        self.spec, self.config = spec, config
        self.tiles = config.tiles(spec)
        self.tiles_down = spec.out_columns // SLAB
        self.atoms = config.tile_columns // SCALE_COLUMNS  # of 64 columns of x: a swizzled row of fp16, or a head
        self.piece = next(n for n in (256, 192, 128) if config.tile_columns % n == 0)  # columns of an instruction

    @cute.jit
    def __call__(self, o: HopperWeightGradOperands, num_ctas: Int32, stream):
        loads = Loads(*self.tensor_map(o.dout), *self.tensor_map(o.x))
        self.kernel(o, loads).launch(
            grid=[num_ctas, 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )
        chunks = self.spec.out_columns * self.spec.in_columns // CHUNK
        self.add_parts(o).launch(grid=[chunks // SUM_THREADS, 1, 1], block=[SUM_THREADS, 1, 1], stream=stream)

    @cute.jit
    def slab_layout(self):
        """Of a slab in shared memory: a swizzled row of 128 columns for each token."""
        rows = cute.make_layout((SLAB, TOKENS), stride=(1, ROW_BYTES))
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, rows)

    @cute.jit
    def tensor_map(self, data: cute.Tensor):
        """Copy atom and coordinates of slabs of a payload [T, columns]."""
        pointer = cute.recast_ptr(data.iterator, dtype=Float8E4M3FN)
        tokens_last = cute.make_tensor(pointer, cute.select(data.layout, [1, 0]))
        ragged = create_ragged_tensor_for_tma(tokens_last, ragged_dim=1)
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), ragged, self.slab_layout(), (SLAB, TOKENS)
        )

    @cute.jit
    def half_layout(self):
        """Of the blocks of x in fp16: columns innermost, swizzled; atoms of 64 columns and 8 tokens, columns first."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, Float16)
        return cute.tile_to_shape(atom, (self.config.tile_columns, BLOCK, HALF_BLOCKS), order=(0, 1, 2))

    @cute.kernel
    def kernel(self, o: HopperWeightGradOperands, loads: Loads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            init_ring(shared.stages.full, shared.stages.empty, self.config.stages, COMPUTE_WARPS + CONVERTERS, 2)
            init_ring(shared.halves.full, shared.halves.empty, HALF_BLOCKS, COMPUTE_WARPS, CONVERTERS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.registers["others"])
            if warp == LOAD_WARP:
                self.load(o, loads, shared)
            else:
                self.convert(o, shared)
        else:
            cute.arch.setmaxregister_increase(self.config.registers["compute"])
            self.compute(o, shared)

    @cute.jit
    def allocate(self) -> Shared:
        config, smem = self.config, SmemAllocator()
        slabs = cute.make_layout((SLAB_BYTES, config.slabs, config.stages))
        payload = smem.allocate_tensor(Uint8, slabs, 1024)
        half_bytes = smem.allocate_tensor(Uint8, cute.make_layout((config.half_bytes, HALF_BLOCKS)), 1024)
        barriers = smem.allocate_array(Int64, 2 * (config.stages + HALF_BLOCKS))
        halves = barriers + 2 * config.stages
        return Shared(
            stages=Ring(barriers, barriers + config.stages),
            halves=Ring(halves, halves + HALF_BLOCKS),
            records=smem.allocate_tensor(Uint32, cute.make_layout((RECORD_WORDS, config.stages)), 16),
            payload=payload,
            half_bytes=half_bytes,
        )

    # ------------------------------------------------------------------------------------------------ work

    @cute.jit
    def rows_of(self, o: HopperWeightGradOperands, item: Int32) -> RowRange:
        """The rows of an item's part; the whole warp asks."""
        num_segments, parts = cute.size(o.offsets, mode=[0]) - 1, cute.size(o.partials, mode=[0])
        first, part = first_slot(o.offsets, Int32(0), SLAB), item // self.tiles
        slots = Int64(first_slot(o.offsets, num_segments, SLAB) - first)
        begin, end = Int32(slots * part // parts), Int32(slots * (part + 1) // parts)
        return rows_of_slots(o.offsets, num_segments, first + begin, first + end)

    @cute.jit
    def num_items(self, o: HopperWeightGradOperands) -> Int32:
        return cute.size(o.partials, mode=[0]) * self.tiles

    @cute.jit
    def place_of(self, item: Int32):
        """(slab of dout, first slab of x) of an item's tile."""
        tile = item % self.tiles
        return tile % self.tiles_down, tile // self.tiles_down * (self.config.slabs - 1)

    # ---------------------------------------------------------------------------------------------- loads

    @cute.jit
    def load(self, o: HopperWeightGradOperands, loads: Loads, shared: Shared):
        item, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        stage, parity = Int32(0), Int32(1)
        while item < self.num_items(o):
            rows, (down, across) = self.rows_of(o, item), self.place_of(item)
            largest = self.scale_of_lane(o, (down, across), Int32(-1), Int32(1))
            window, row = window_at(o.offsets, rows.segment), rows.begin
            while row < rows.end:
                tile, window = k_tile_at(o.offsets, window, row)
                num_rows = cutlass.min(tile.segment_end - row, TOKENS)
                slot = tile.segment_begin // BLOCK + tile.segment + (row - tile.segment_begin) // BLOCK
                byte = self.scale_of_lane(o, (down, across), slot, num_rows)
                cute.arch.mbarrier_wait(shared.stages.empty + stage, parity)
                full = shared.stages.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.config.stage_bytes)
                self.load_slab(loads.dout_atom, loads.dout, (down, row, num_rows), shared.payload[None, 0, stage], full)
                for slab in cutlass.range_constexpr(1, self.config.slabs):
                    target = shared.payload[None, slab, stage]
                    self.load_slab(loads.x_atom, loads.x, (across + slab - 1, row, num_rows), target, full)
                row += num_rows
                word = fold(largest, byte)
                if cute.arch.lane_idx() == IS_LAST:
                    word = Uint32(row == rows.end)
                shared.records[cute.arch.lane_idx(), stage] = word
                arrive(full)
                stage, parity = next_stage(stage, parity, self.config.stages)
            item += stride

    @cute.jit
    def load_slab(self, atom: cute.CopyAtom, tensor: cute.Tensor, place, target: cute.Tensor, full: cute.Pointer):
        """Place: (slab of columns, first row, rows); what lies behind them is filled with zeros."""
        column, row, num_rows = place
        ragged = offset_ragged_tensor(tensor, row, num_rows, ragged_dim=1)
        source = cute.local_tile(ragged, (SLAB, TOKENS), (column, 0))
        tile = with_layout(target, self.slab_layout())
        to, of = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(source, 0, 2)
        )
        cute.copy(atom, of, to, tma_bar_ptr=full)

    @cute.jit
    def scale_of_lane(self, o: HopperWeightGradOperands, place, slot: Int32, num_rows: Int32) -> Int32:
        """The scale byte of this lane's place in a record, or the largest of its columns where the slot is −1.

        Lanes go through blocks, and in a block through 64 columns after the other: first dout's, then x's. A block
        that doesn't exist has the last one's.
        """
        (down, across), lane = place, cute.arch.lane_idx()
        steps, blocks_of_slab = SCALE_COLUMNS // BLOCK, SLAB // BLOCK
        block, column = lane // WARPGROUPS, down * blocks_of_slab + lane % WARPGROUPS * steps
        byte = Int32(0)
        if lane >= FOLDS_OF_DOUT:
            lane -= FOLDS_OF_DOUT
            block, column = lane // self.atoms, across * blocks_of_slab + lane % self.atoms * steps
            if block < BLOCKS:
                byte = self.scale(o.x_scales, o.x_largest, (slot, num_rows), (block, column))
        else:
            byte = self.scale(o.dout_scales, o.dout_largest, (slot, num_rows), (block, column))
        return byte

    @cute.jit
    def scale(self, scales: cute.Tensor, largest: cute.Tensor, stage, place) -> Int32:
        (slot, num_rows), (block, column) = stage, place
        byte = Int32(0)
        if slot < 0:
            byte = load_byte(largest, Int64(column))
        else:
            row = slot + cutlass.min(block, (num_rows - 1) // BLOCK)
            byte = load_byte(scales, Int64(row) * cute.size(scales, mode=[1]) + column)
        return byte

    # ------------------------------------------------------------------------------------------- convert

    @cute.jit
    def convert(self, o: HopperWeightGradOperands, shared: Shared):
        item, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        stage, parity, place, place_parity = Int32(0), Int32(0), Int32(0), Int32(1)
        while item < self.num_items(o):
            rows = self.rows_of(o, item)
            is_busy = rows.begin < rows.end
            while is_busy:
                cute.arch.mbarrier_wait(shared.stages.full + stage, parity)
                for block in cutlass.range_constexpr(BLOCKS):
                    cute.arch.mbarrier_wait(shared.halves.empty + place, place_parity)
                    self.convert_block(shared, stage, block, place)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive(shared.halves.full + place)
                    place, place_parity = next_stage(place, place_parity, HALF_BLOCKS)
                is_busy = shared.records[IS_LAST, stage] == 0
                arrive(shared.stages.empty + stage)
                stage, parity = next_stage(stage, parity, self.config.stages)
            item += stride

    @cute.jit
    def convert_block(self, shared: Shared, stage: Int32, block: cutlass.Constexpr[int], place: Int32):
        """One warp's part, eight tokens of a slab after the other: half a warp takes a token, eight columns to a lane.

        Rows of FP8 and of fp16 are swizzled alike: of tokens 2k and 2k + 1 an address differs from that of 0 and 1 in
        the bits of 2k, those that count rows and those that permute pieces.
        """
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 1, cute.arch.lane_idx()
        octets, odd, eight = BLOCK // ATOM_ROWS, lane // 16, lane % 16
        units = const_expr((self.config.slabs - 1) * octets)
        of_warp = const_expr(-(-units // CONVERTERS))
        source = shared.payload.iterator.toint() + odd * ROW_BYTES + (eight // 2 ^ odd) * PIECE_BYTES + eight % 2 * 8
        source += (stage * self.config.slabs + 1) * SLAB_BYTES + block * BLOCK * ROW_BYTES
        target = shared.half_bytes.iterator.toint() + odd * ROW_BYTES + (eight % 8 ^ odd) * PIECE_BYTES
        target += place * self.config.half_bytes + eight // 8 * ATOM_BYTES
        for index in cutlass.range_constexpr(of_warp):
            unit = index * CONVERTERS + warp
            slab, octet = (warp, index) if const_expr(of_warp == octets) else (unit // octets, unit % octets)
            if const_expr((index + 1) * CONVERTERS <= units) or unit < units:
                factor = shared.records[FOLDS_OF_DOUT + block * self.atoms + slab * 2 + eight // 8, stage]
                first = source + slab * SLAB_BYTES + octet * ATOM_BYTES
                to = target + (octet * self.atoms + slab * 2) * ATOM_BYTES
                words = [cute.make_rmem_tensor(2, Uint32) for _ in range(ATOM_ROWS // 2)]
                for k in cutlass.range_constexpr(ATOM_ROWS // 2):
                    cute.autovec_copy(words_at(first ^ 2 * k * (ROW_BYTES + PIECE_BYTES), 2), words[k])
                for k in cutlass.range_constexpr(ATOM_ROWS // 2):
                    pieces = cute.make_rmem_tensor(4, Uint32)
                    for i in cutlass.range_constexpr(4):
                        pieces[i] = half.mul_pairs(half.pair_of_e4m3(words[k][i // 2], i % 2), factor)
                    cute.autovec_copy(pieces, words_at(to ^ 2 * k * (ROW_BYTES + PIECE_BYTES), 4))

    # ------------------------------------------------------------------------------------------- compute

    @cute.jit
    def compute(self, o: HopperWeightGradOperands, shared: Shared):
        item, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        product = make_trivial_tiled_mma(
            Float16, Float16, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (ROWS, self.piece),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        layout = self.half_layout()
        pointer = cute.recast_ptr(shared.half_bytes.iterator, layout.inner, dtype=Float16)
        part = product.get_slice(0)
        x = part.make_fragment_B(part.partition_B(cute.make_tensor(pointer, layout.outer)))
        dout = [operand_registers(product, BLOCK) for _ in range(BLOCKS)]
        stage, parity, place, place_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        while item < self.num_items(o):
            rows = self.rows_of(o, item)
            sums = accumulators(product, self.config.tile_columns, Float32)
            sums.fill(0.0)
            is_first, is_busy, before = Boolean(True), rows.begin < rows.end, Int32(0)
            while is_busy:
                cute.arch.mbarrier_wait(shared.stages.full + stage, parity)
                for block in cutlass.range_constexpr(BLOCKS):
                    operand, words = dout[block]
                    self.load_dout(shared, stage, block, words)
                    if const_expr(block == BLOCKS - 1):
                        is_busy = shared.records[IS_LAST, stage] == 0
                        arrive(shared.stages.empty + stage)
                    cute.arch.mbarrier_wait(shared.halves.full + place, place_parity)
                    multiply(product, sums, operand, x[None, None, None, place], True)
                    warpgroup.wait_group(1)
                    if not is_first:
                        arrive(shared.halves.empty + before)
                    is_first, before = Boolean(False), place
                    place, place_parity = next_stage(place, place_parity, HALF_BLOCKS)
                stage, parity = next_stage(stage, parity, self.config.stages)
            if not is_first:
                warpgroup.wait_group(0)
                arrive(shared.halves.empty + before)
            self.store(o, item, sums)
            item += stride

    @cute.jit
    def load_dout(self, shared: Shared, stage: Int32, block: cutlass.Constexpr[int], words: cute.Tensor):
        """Words (r, h, b) of a warp's 16 rows of doutᵀ and 32 tokens: (r, q pair) of columns 2g + r, folded."""
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4, cute.arch.lane_idx()
        token = block * BLOCK + lane  # a lane gives the address of a row of 16 columns
        address = shared.payload.iterator.toint() + stage * self.config.slabs * SLAB_BYTES + token * ROW_BYTES
        address += (warp ^ lane % ATOM_ROWS) * PIECE_BYTES
        factor = shared.records[block * WARPGROUPS + warp // 4, stage]
        matrices = load_matrices(address)
        for matrix in cutlass.range_constexpr(4):
            pairs = permute_bytes(matrices[matrix], Uint32(0), Int32(0x3120))
            for r in cutlass.range_constexpr(LANE_ROWS):
                words[2 * matrix + r] = half.mul_pairs(half.pair_of_e4m3(pairs, r), factor)

    @cute.jit
    def store(self, o: HopperWeightGradOperands, item: Int32, sums: cute.Tensor):
        """Store the sum of a part, two columns at a time."""
        warp, lane = cute.arch.warp_idx() - 4, cute.arch.lane_idx()
        columns = self.config.tile_columns
        values = cute.make_tensor(sums.iterator, cute.make_layout((2, LANE_ROWS, columns // COLUMN_GROUP)))
        for r in cutlass.range_constexpr(LANE_ROWS):
            row = Int64(item) * SLAB + warp * 16 + 2 * (lane // 4) + r
            for j in cutlass.range_constexpr(columns // COLUMN_GROUP):
                target = element_pointer(o.partials, row * columns + j * COLUMN_GROUP + lane % 4 * 2, 8)
                cute.autovec_copy(values[None, r, j], cute.make_tensor(target, cute.make_layout(2)))

    # ------------------------------------------------------------------------------------- sum over parts

    @cute.kernel
    def add_parts(self, o: HopperWeightGradOperands):
        """(((0 + part 0) + part 1) + …) · scales, for CHUNK neighbouring columns of a row in each thread."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        columns = self.config.tile_columns
        index = block * SUM_THREADS + thread
        column, row, tile = index * CHUNK % columns, index * CHUNK // columns % SLAB, index * CHUNK // (columns * SLAB)
        totals = [Float32(0.0) for _ in range(CHUNK)]
        values = cute.make_rmem_tensor(CHUNK, Float32)
        for part in cutlass.range(cute.size(o.partials, mode=[0]), unroll=4):
            source = element_pointer(o.partials, Int64(part) * (self.tiles * columns * SLAB) + index * CHUNK, 16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(CHUNK)), values)
            totals = [totals[k] + values[k] for k in range(CHUNK)]
        row, column = tile % self.tiles_down * SLAB + row, tile // self.tiles_down * columns + column
        exponent = load_byte(o.dout_largest, Int64(row // BLOCK)) + load_byte(o.x_largest, Int64(column // BLOCK))
        exponent -= 2 * (SCALE_BIAS + HEADROOM)
        first = exponent // 2  # in two steps, neither of which leaves fp32 unless the result does
        second = exponent - first
        rounded = cute.make_rmem_tensor(CHUNK, o.out.element_type)
        for k in cutlass.range_constexpr(CHUNK):
            total = totals[k] * power_of_two(first) * power_of_two(second)
            rounded[k] = total.to(o.out.element_type)
        target = element_pointer(
            o.out, Int64(row) * self.spec.in_columns + column, CHUNK * o.out.element_type.width // 8
        )
        cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(CHUNK)))


@cute.jit
def fold(largest: Int32, byte: Int32) -> Uint32:
    """2^(7 − (largest − byte)) twice in fp16: 0 below 2^-24, NaN for the scale NaN."""
    exponent = HEADROOM - largest + byte
    bits = Uint32(exponent + HALF_BIAS) << HALF_BITS
    if exponent + HALF_BIAS <= 0:
        bits = Uint32(1) << Uint32(cutlass.max(exponent + HALF_BIAS + HALF_BITS - 1, 0))
    if exponent + HALF_BIAS + HALF_BITS - 1 < 0:
        bits = Uint32(0)
    if byte == SCALE_NAN:
        bits = Uint32(HALF_NAN)
    return bits * Uint32(0x10001)


@cute.jit
def power_of_two(exponent: Int32) -> Float32:
    """2^exponent, at least 2^-127."""
    return block_scale(cutlass.max(exponent + SCALE_BIAS, 0))


@cute.jit
def words_at(address: Int32, count: cutlass.Constexpr[int]) -> cute.Tensor:
    """Words of shared memory."""
    pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def load_matrices(address: Int32):
    """Four matrices of 8 × 8 pairs of bytes, transposed; a lane gives the address of a row. → four words"""
    pointer = cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=PIECE_BYTES)
    words = primitives.ldmatrix(pointer.to_llvm_ptr(), 4, primitives.MMALayout.COL)
    return [Uint32(words[index]) for index in range(4)]


def build(arch: str, spec: HopperWeightGradSpec, config: HopperWeightGradConfig, options: str = ""):
    """Compile the kernels; see `pma.kernels.compile.compile_for`."""
    u8, n, c = torch.uint8, spec.out_columns, spec.in_columns
    operands = HopperWeightGradOperands(
        dout=fake_tensor(u8, None, None),  # a stride known to the compiler would overflow in a ragged tensor's
        dout_scales=fake_tensor(u8, None, n // BLOCK, alignment=1),
        dout_largest=fake_tensor(u8, n // BLOCK, alignment=1),
        x=fake_tensor(u8, None, None),
        x_scales=fake_tensor(u8, None, c // BLOCK, alignment=1),
        x_largest=fake_tensor(u8, c // BLOCK, alignment=1),
        offsets=fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize),
        partials=fake_tensor(torch.float32, None, config.tiles(spec), SLAB, config.tile_columns),
        out=fake_tensor(spec.out_dtype, n, c),
    )
    return compile_for(arch, HopperWeightGrad(spec, config), operands, Int32(0), options=options)


compiled = cached(build)


def launch(spec: HopperWeightGradSpec, dout: MXFP8Tensor, x: MXFP8Tensor, offsets: Tensor) -> Tensor:
    """Allocate and start the kernels on the current stream.

    Args:
        dout, x: payload [T, columns] and compact scales [T // 32 + B, columns / 32], both uint8; scale slots that no
            segment uses are 0. Payloads that aren't contiguous and 16-byte aligned are copied first.
        offsets: [B + 1].
    Returns:
        dW [out_columns, in_columns] in out_dtype; zeros without tokens.
    """
    num_rows, num_segments, device = dout.data.shape[0], offsets.shape[0] - 1, dout.data.device
    shape = (spec.out_columns, spec.in_columns)
    if num_rows == 0 or num_segments == 0:
        return torch.zeros(shape, dtype=spec.out_dtype, device=device)
    facts, num_ctas = device_facts(device), num_multiprocessors(device)
    config = choose_config(spec, facts)
    tiles, parts = config.tiles(spec), config.parts(spec, num_rows, num_segments, num_ctas)
    partials = torch.empty((parts, tiles, SLAB, config.tile_columns), dtype=torch.float32, device=device)
    out = torch.empty(shape, dtype=spec.out_dtype, device=device)
    matrices = ((aligned(each.data), each.scales.contiguous(), largest_scales(each.scales)) for each in (dout, x))
    operands = HopperWeightGradOperands(*next(matrices), *next(matrices), offsets.contiguous(), partials, out)
    with torch.cuda.device(device):
        compiled(facts.arch, spec, config)(operands, min(parts * tiles, num_ctas))
    return out


def largest_scales(scales: Tensor) -> Tensor:
    """Largest scale byte of each column, NaN left out. [slots, columns / 32] → [columns / 32] uint8."""
    return torch.where(scales == SCALE_NAN, 0, scales).amax(0)
