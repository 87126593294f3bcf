"""`gemm_quantize` and `gemm` on Hopper: a jagged MXFP8 matrix times a weight, quantised in registers or stored.

    gemm_quantize    data, scales = MXFP8(X Wᵀ)     blocks counted from each segment's first row
    gemm             out = X Wᵀ                     the input gradient: the caller passes the transposed weight

Hopper's products have no block scales, and their FP8 sums keep 13 bits. With one scale along the contraction for 32
rows and a head, products of a head (`chunk` columns) are summed by the tensor core from zero, and then added in fp32
registers, times sX·sW, a power of two for 32 rows and 32 columns:

    sums += (sX·sW) · Σ over a chunk of x·w

One CTA on an SM works through row tiles of 128 rows that start at their segment's first row (slots of
`pma.jagged.row_blocks`), `groups` CTAs side by side on each, every one with its own `weight_tiles` tiles of 128 output
columns. Tiles of X come by TMA from the jagged offset; rows past the segment's end are the neighbour's and are masked
when results are stored. Rows of the weight lie in the order in which a lane's sums are neighbours (`lane_order`).

Warps: 0 loads · 1 scales of X · 2 finds the row tiles from offsets, 32 at a time, and announces them · 3 makes
registers free · 4–7 and 8–11 compute, 64 rows each, and store (`hopper_epilogues.py`). Two accumulators: the next
chunk's products run while one is added. The next column tile's products run beside an epilogue.

Shared memory: `stages` tiles of X and those of the weight, 16 KiB each, the latter resident or, where the contraction
is too long, in the same stages as X; scales of both as fp32.

Bound at C = N = 384: device memory, C + N bytes a row, takes 4,900 clocks for a row tile, the products 4,608; power.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from torch import Tensor

from pma.jagged import num_row_blocks
from pma.kernels.blocks.block_scales import block_scale
from pma.kernels.blocks.memory import load_byte
from pma.kernels.blocks.ring import Ring, arrive, init_ring, next_stage
from pma.kernels.blocks.row_tiles import (
    BATCH,
    BATCHES,
    FIELDS,
    Announcements,
    RowTile,
    announce_row_tiles,
    next_row_tile,
)
from pma.kernels.blocks.warpgroup_product import (
    COLUMN_GROUP,
    LANE_ROWS,
    accumulators,
    fp8_product,
    multiply,
    settle,
    with_layout,
)
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.kernels.projection.hopper_epilogues import QuantizeEpilogue, StoreEpilogue, place_of_thread
from pma.kernels.projection.hopper_operands import HopperProjectionOperands, Loads, Shared
from pma.kernels.projection.hopper_spec import (
    GROUP_ROWS,
    RECORDS,
    ROW_BLOCKS,
    WARPGROUPS,
    HopperGemmQuantizeSpec,
    HopperProjectionConfig,
    HopperProjectionSpec,
    choose_config,
)
from pma.kernels.projection.spec import PAYLOAD_BYTES, TILE
from pma.layouts import BLOCK
from pma.layouts.transposed import GROUP

LOAD_WARP, SCALE_WARP, SEARCH_WARP = 0, 1, 2
COMPUTE_WARPS = 4 * WARPGROUPS
REGISTERS = {"compute": 232, "others": 40}
MOST = 2.0**127  # a factor: so that 0 stays 0


class HopperProjection:
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: HopperProjectionSpec, config: HopperProjectionConfig):
        self.spec, self.config = spec, config
        self.depth = spec.depth_tiles
        self.epilogue = QuantizeEpilogue(spec) if isinstance(spec, HopperGemmQuantizeSpec) else StoreEpilogue(spec)
        self.tiles_at_once = config.weight_tiles if self.epilogue.leaves_registers else 1

    @cute.jit
    def __call__(self, o: HopperProjectionOperands, num_blocks: Int32, stream):
        x = cute.make_tensor(cute.recast_ptr(o.x.iterator, dtype=Float8E4M3FN), o.x.layout)
        weight = cute.make_tensor(cute.recast_ptr(o.weight.iterator, dtype=Float8E4M3FN), self.lane_order())
        operation, layout = cpasync.CopyBulkTensorTileG2SOp(), cute.select(self.tiles(TILE, 1), mode=[0, 1])
        loads = Loads(
            *cpasync.make_tiled_tma_atom(operation, x, layout, (TILE, TILE)),
            *cpasync.make_tiled_tma_atom(operation, weight, layout, (TILE, TILE)),
        )
        self.kernel(o, loads).launch(
            grid=[num_blocks, 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.jit
    def lane_order(self) -> cute.Layout:
        """The weight [N, C], its rows (e, q, j, run of four lanes): the order that `hopper_epilogues.py` explains."""
        run, columns = self.spec.run_columns, self.spec.in_columns
        order = (2, 4, run // 2, self.spec.out_columns // (4 * run))
        strides = (columns, run * columns, 2 * columns, 4 * run * columns)
        return cute.make_layout((order, columns), stride=(strides, 1))

    @cute.jit
    def tiles(self, rows: cutlass.Constexpr[int], count: cutlass.Constexpr[int]):
        """Shared-memory layout of tiles [rows, 128], swizzled."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        return cute.tile_to_shape(atom, (rows, TILE, count), order=(0, 1, 2))

    @cute.jit
    def tiles_of(self, shared_bytes: cute.Tensor, rows: cutlass.Constexpr[int]) -> cute.Tensor:
        layout = self.tiles(rows, cute.size(shared_bytes) // (rows * TILE))
        return with_layout(shared_bytes, layout)

    @cute.kernel
    def kernel(self, o: HopperProjectionOperands, loads: Loads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            init_ring(shared.board.full, shared.board.empty, BATCHES, COMPUTE_WARPS + 2)
            init_ring(shared.stages.full, shared.stages.empty, self.config.stages, COMPUTE_WARPS)
            init_ring(shared.records.full, shared.records.empty, RECORDS, COMPUTE_WARPS)
            cute.arch.mbarrier_init(shared.weight_full, 1)
        self.read_weight_scales(o, shared)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS["others"])
            if warp == LOAD_WARP:
                self.load(loads, shared)
            elif warp == SCALE_WARP:
                self.publish_scales(o, shared)
            elif warp == SEARCH_WARP:
                self.announce(o, shared)
        else:
            cute.arch.setmaxregister_increase(REGISTERS["compute"])
            self.compute(o, shared)

    @cute.jit
    def allocate(self) -> Shared:
        config, spec, smem = self.config, self.spec, SmemAllocator()
        buffers = config.weight_buffers(spec)
        x = smem.allocate_tensor(Uint8, cute.make_layout((PAYLOAD_BYTES, config.stages)), 1024)
        weight = smem.allocate_tensor(Uint8, cute.make_layout((PAYLOAD_BYTES, buffers)), 1024)
        rings = []
        for size in (config.stages, RECORDS, BATCHES):
            barriers = smem.allocate_array(Int64, 2 * size)
            rings.append(Ring(barriers, barriers + size))
        facts = smem.allocate_tensor(Int32, cute.make_layout((FIELDS, BATCH * BATCHES)), 16)
        scales = (spec.chunks, ROW_BLOCKS)
        return Shared(
            *rings[:2],
            weight_full=smem.allocate_array(Int64, 1),
            board=Announcements(*rings[2], facts),
            maxima=smem.allocate_tensor(cutlass.Uint32, cute.make_layout((2, 2, COMPUTE_WARPS)), 16),
            x_scales=smem.allocate_tensor(Float32, cute.make_layout((*scales, RECORDS)), 16),
            weight_scales=smem.allocate_tensor(Float32, cute.make_layout((*scales, config.weight_tiles)), 16),
            x=x,
            weight=weight,
        )

    # ------------------------------------------------------------------------------------------ who does what

    @cute.jit
    def announce(self, o: HopperProjectionOperands, shared: Shared):
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        groups = self.config.groups(self.spec)
        num_tiles = cute.size(o.x, mode=[0]) // TILE + cute.size(o.offsets, mode=[0]) - 1
        announce_row_tiles(shared.board, o.offsets, num_tiles, block // groups, blocks // groups)

    @cute.jit
    def first_column_tile(self) -> Int32:
        """The first of this CTA's `weight_tiles` column tiles; CTAs of one row tile are neighbours."""
        block, _, _ = cute.arch.block_idx()
        return block % self.config.groups(self.spec) * self.config.weight_tiles

    # ---------------------------------------------------------------------------------------------------- loading

    @cute.jit
    def load(self, loads: Loads, shared: Shared):
        column_tile, config = self.first_column_tile(), self.config
        weight_tiles = self.tiles_of(shared.weight, TILE)
        if const_expr(config.is_resident):
            with cute.arch.elect_one():
                num_bytes = config.weight_buffers(self.spec) * PAYLOAD_BYTES
                cute.arch.mbarrier_arrive_and_expect_tx(shared.weight_full, num_bytes)
            for index in cutlass.range_constexpr(config.weight_tiles):
                rows = cute.local_tile(loads.weight, (TILE, TILE), (column_tile + index, None))
                for depth in cutlass.range(self.depth):
                    buffer = index * self.depth + depth
                    self.copy(loads.weight_atom, (rows, depth), (weight_tiles, buffer), shared.weight_full)
        x_tiles, stage, parity, turn, is_busy = self.tiles_of(shared.x, TILE), Int32(0), Int32(1), Int32(0), True
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            turn += 1
            if facts.num_rows > 0:
                of_x = cute.local_tile(cute.domain_offset((facts.first_row, 0), loads.x), (TILE, TILE), (0, None))
                for depth in cutlass.range(self.depth):
                    cute.arch.mbarrier_wait(shared.stages.empty + stage, parity)
                    full = shared.stages.full + stage
                    with cute.arch.elect_one():
                        operands = 1 if config.is_resident else 2
                        cute.arch.mbarrier_arrive_and_expect_tx(full, operands * PAYLOAD_BYTES)
                    self.copy(loads.x_atom, (of_x, depth), (x_tiles, stage), full)
                    if const_expr(not config.is_resident):
                        of_weight = cute.local_tile(loads.weight, (TILE, TILE), (column_tile, None))
                        self.copy(loads.weight_atom, (of_weight, depth), (weight_tiles, stage), full)
                    stage, parity = next_stage(stage, parity, config.stages)
            is_busy = facts.tile >= 0

    @cute.jit
    def copy(self, atom: cute.CopyAtom, source, target, full: cute.Pointer):
        """Start the copy of a tile. source: ([128, 128, depth], which), target: ([128, 128, buffers], which)."""
        (rows, depth), (tiles, buffer) = source, target
        to, of = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2), cute.group_modes(rows, 0, 2)
        )
        cute.copy(atom, of[None, depth], to[None, buffer], tma_bar_ptr=full)

    # ---------------------------------------------------------------------------------------------------- scales

    @cute.jit
    def read_weight_scales(self, o: HopperProjectionOperands, shared: Shared):
        """Put the scales of this CTA's columns into shared memory, a part in each thread."""
        thread, _, _ = cute.arch.thread_idx()
        first, blocks = self.first_column_tile() * ROW_BLOCKS, self.spec.out_columns // BLOCK
        scales = cute.flatten(shared.weight_scales)
        for index in cutlass.range(thread, cute.size(scales), self.config.threads):
            block = cutlass.min(first + index // self.spec.chunks, blocks - 1)
            shared.weight_scales[index] = self.scale(o.weight_scales, block, index % self.spec.chunks)

    @cute.jit
    def publish_scales(self, o: HopperProjectionOperands, shared: Shared):
        """Write the scales of each row tile of X; rows that don't exist have the last block's."""
        lane, chunks = cute.arch.lane_idx(), self.spec.chunks
        record, parity, turn, is_busy = Int32(0), Int32(1), Int32(0), True
        steps = const_expr(-(-ROW_BLOCKS * chunks // 32))
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            turn += 1
            if facts.num_rows > 0:
                slot = facts.begin // BLOCK + facts.segment + (facts.first_row - facts.begin) // BLOCK
                scales = cute.make_rmem_tensor(steps, Float32)
                for step in cutlass.range_constexpr(steps):
                    index = cutlass.min(step * 32 + lane, ROW_BLOCKS * chunks - 1)
                    block = cutlass.min(index // chunks, (facts.num_rows - 1) // BLOCK)
                    scales[step] = self.scale(o.x_scales, slot + block, index % chunks)
                cute.arch.mbarrier_wait(shared.records.empty + record, parity)
                for step in cutlass.range_constexpr(steps):
                    index = step * 32 + lane
                    if index < ROW_BLOCKS * chunks:
                        shared.x_scales[index % chunks, index // chunks, record] = scales[step]
                arrive(shared.records.full + record)
                record, parity = next_stage(record, parity, RECORDS)
            is_busy = facts.tile >= 0

    @cute.jit
    def scale(self, scales: cute.Tensor, slot: Int32, chunk: Int32) -> Float32:
        columns = self.spec.in_columns // BLOCK
        return block_scale(load_byte(scales, Int64(slot) * columns + chunk * (self.spec.chunk // BLOCK)))

    # --------------------------------------------------------------------------------------------------- compute

    @cute.jit
    def compute(self, o: HopperProjectionOperands, shared: Shared):
        config, first_tile = self.config, self.first_column_tile()
        product = fp8_product(TILE, Float32, warpgroup.OperandSource.SMEM)
        part = product.get_slice(0)
        x = part.make_fragment_A(part.partition_A(self.tiles_of(shared.x, GROUP_ROWS)))
        weight = part.make_fragment_B(part.partition_B(self.tiles_of(shared.weight, TILE)))
        sums = cute.make_rmem_tensor((2, LANE_ROWS, TILE // COLUMN_GROUP), Float32)
        if const_expr(config.is_resident):
            cute.arch.mbarrier_wait(shared.weight_full, 0)
        stage, parity, record, record_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        turn, exchanges, is_busy = Int32(0), Int32(0), True
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            is_busy = facts.tile >= 0
            if facts.num_rows > 0:
                cute.arch.mbarrier_wait(shared.records.full + record, record_parity)
                operands, first, first_parity = (product, x, weight, sums, record), stage, parity
                for index in cutlass.range(0, config.weight_tiles, self.tiles_at_once, unroll=1):
                    stage, parity, exchanges = self.work_off(
                        o, shared, facts, operands, (index, first, first_parity, exchanges)
                    )
                arrive(shared.records.empty + record)
                record, record_parity = next_stage(record, record_parity, RECORDS)
            elif is_busy:
                for index in cutlass.range(config.weight_tiles, unroll=1):
                    self.epilogue.store_nothing(o, facts, first_tile + index)
            if is_busy:
                end = cutlass.min((first_tile + config.weight_tiles) * TILE, self.spec.out_columns)
                self.epilogue.end_tile(o, facts, (first_tile * TILE, end))
            turn += 1
        self.epilogue.clear_outside(o)

    def schedule(self) -> list[tuple[str, int, int]]:
        """What a warpgroup does with `tiles_at_once` column tiles: (action, chunk counted through them, its argument).

        "issue", "add" (with the number of chunks that may still be under way), "store". A chunk is under way while one
        is added, and two while a column tile is stored.
        """
        actions, issued, total = [], 0, self.spec.chunks * self.tiles_at_once
        for chunk in range(total):
            ends_tile = (chunk + 1) % self.spec.chunks == 0
            for _ in range(issued, min(chunk + 2, total)):
                actions.append(("issue", issued, 0))
                issued += 1
            actions.append(("add", chunk, issued - chunk - 1))
            if ends_tile and issued < total:
                actions.append(("issue", issued, 0))
                issued += 1
            if ends_tile:
                actions.append(("store", chunk, 0))
        return actions

    @cute.jit
    def work_off(self, o: HopperProjectionOperands, shared: Shared, facts: RowTile, operands, state):
        """Multiply and store `tiles_at_once` column tiles of a row tile. → the next (stage, parity, exchanges)

        operands: (product, x, weight, sums, record of scales), state: (first column tile of them, of this CTA's; first
        stage; its parity; exchanges of maxima).
        """
        (product, x, weight, sums, record), (first, stage, parity, exchanges) = operands, state
        spec, config, group = self.spec, self.config, place_of_thread().warp // 4
        a_tile, blocks = TILE // spec.chunk, spec.chunk // BLOCK  # chunks of a tile of X, blocks of a chunk
        actions, stages, products = self.schedule(), [], []
        for position in cutlass.range_constexpr(len(actions)):
            action, counted, pending = actions[position]
            local, chunk = counted // spec.chunks, counted % spec.chunks
            index = first + local
            depth, inside = chunk // a_tile, chunk % a_tile
            if const_expr(action == "issue"):
                if const_expr(local == 0 and inside == 0):
                    stages.append(stage)
                    cute.arch.mbarrier_wait(shared.stages.full + stage, parity)
                    stage, parity = next_stage(stage, parity, config.stages)
                buffer = index * self.depth + depth if const_expr(config.is_resident) else stages[depth]
                products.append(accumulators(product, TILE, Float32))
                multiply(
                    product, products[counted], x[None, None, None, stages[depth] * WARPGROUPS + group],
                    weight[None, None, None, buffer], False, (inside * blocks, (inside + 1) * blocks),
                )  # fmt: skip
            elif const_expr(action == "add"):
                warpgroup.wait_group(pending)
                self.add_chunk(shared, sums, products[counted], (chunk, index, record))
                settle(sums)
                is_read = inside == a_tile - 1 or chunk == spec.chunks - 1
                if const_expr(local == self.tiles_at_once - 1 and is_read):
                    if index == config.weight_tiles - 1:
                        arrive(shared.stages.empty + stages[depth])
            else:
                column_tile = self.first_column_tile() + index
                exchanges = self.epilogue.store(o, shared, facts, sums, column_tile, exchanges)
        return stage, parity, exchanges

    @cute.jit
    def add_chunk(self, shared: Shared, sums: cute.Tensor, products: cute.Tensor, which):
        """Sums ← products, or sums + products, times the scales. which: (chunk, column tile of the CTA, record)."""
        (chunk, index, record), place = which, place_of_thread()
        values, groups = cute.make_tensor(products.iterator, sums.layout), TILE // COLUMN_GROUP
        # A run of 16 columns lies in one block of 32, those of four lanes in two; shorter runs of four lanes in one.
        count, first = (2, place.lane % 4 // 2) if const_expr(self.spec.run_columns == GROUP) else (4, Int32(0))
        factors = cute.make_rmem_tensor(count, Float32)
        for k in cutlass.range_constexpr(count):
            of_weight = shared.weight_scales[chunk, first + k * (ROW_BLOCKS // count), index]
            factor = shared.x_scales[chunk, place.row_block(), record] * of_weight
            factors[k] = cute.arch.fmin(factor, MOST, nan=True)
        for j in cutlass.range_constexpr(groups):
            factor = factors[j * count // groups]
            for r in cutlass.range_constexpr(LANE_ROWS):
                for e in cutlass.range_constexpr(2):
                    if const_expr(chunk == 0):
                        sums[e, r, j] = values[e, r, j] * factor
                    else:
                        sums[e, r, j] += values[e, r, j] * factor


def build(arch: str, spec: HopperProjectionSpec, config: HopperProjectionConfig, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    quantises, u8 = isinstance(spec, HopperGemmQuantizeSpec), torch.uint8
    columns = spec.out_columns
    transposed = quantises and spec.writes_transposed
    operands = HopperProjectionOperands(
        x=fake_tensor(u8, None, spec.in_columns),
        x_scales=fake_tensor(u8, None, spec.in_columns // BLOCK, alignment=1),
        offsets=fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize),
        weight=fake_tensor(u8, columns, spec.in_columns),
        weight_scales=fake_tensor(u8, None, spec.in_columns // BLOCK, alignment=1),
        out=fake_tensor(u8 if quantises else spec.out_dtype, None, columns),
        scales=fake_tensor(u8, None, columns // BLOCK, alignment=1) if quantises else None,
        transposed=fake_tensor(u8, None, columns, GROUP) if transposed else None,
    )
    return compile_for(arch, HopperProjection(spec, config), operands, Int32(0), options=options)


compiled = cached(build)


class HopperOperand(NamedTuple):
    """A matrix in MXFP8 with one scale for 32 rows and a head."""

    data: Tensor  # [rows, columns] uint8
    scales: Tensor  # compact: [rows // 32 + B, columns / 32] uint8


class Projected(NamedTuple):
    """What the kernel wrote; None for what the spec doesn't ask for. Shapes: `HopperProjectionOperands`."""

    out: Tensor  # payload of gemm_quantize, values of gemm
    scales: Tensor | None
    transposed: Tensor | None


def launch(spec: HopperProjectionSpec, x: HopperOperand, weight: HopperOperand, offsets: Tensor) -> Projected:
    """Allocate the results and start the kernel on the current stream.

    Args:
        x: [T, in_columns] jagged.
        weight: [out_columns, in_columns], one segment.
        offsets: [B + 1] of spec.offsets_dtype.
    """
    data, offsets = aligned(x.data), offsets.contiguous()
    result = _allocate(spec, data, offsets.shape[0] - 1)
    if data.shape[0] == 0:
        for each in result[1:]:
            if each is not None:
                each.zero_()
        return result
    facts = device_facts(data.device)
    config = choose_config(spec, facts)
    groups, num_tiles = config.groups(spec), num_row_blocks(data.shape[0], offsets.shape[0] - 1, TILE)
    workers = max(1, min(num_tiles, num_multiprocessors(data.device) // groups))
    operands = HopperProjectionOperands(
        data, x.scales.contiguous(), offsets, aligned(weight.data), weight.scales.contiguous(), *result
    )
    with torch.cuda.device(data.device):
        compiled(facts.arch, spec, config)(operands, workers * groups)
    return result


def _allocate(spec: HopperProjectionSpec, data: Tensor, num_segments: int) -> Projected:
    rows, columns = data.shape[0], spec.out_columns

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=data.device)

    if not isinstance(spec, HopperGemmQuantizeSpec):
        return Projected(empty(rows, columns, dtype=spec.out_dtype), None, None)
    groups = num_row_blocks(rows, num_segments, GROUP)
    return Projected(
        out=empty(rows, columns),
        scales=empty(num_row_blocks(rows, num_segments, BLOCK), columns // BLOCK),
        transposed=empty(groups, columns, GROUP) if spec.writes_transposed else None,
    )
