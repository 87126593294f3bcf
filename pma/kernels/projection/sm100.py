"""`gemm_quantize` and `gemm` on Blackwell: a jagged MXFP8 matrix times a weight, quantised in registers or stored.

    gemm_quantize    data, scales = MXFP8(X Wᵀ)     X [T, C], W [N, C]; blocks counted from each segment's first row
    gemm             out = X W                      X [T, N], W [N, C]; the payload of W is read as it lies

One CTA on an SM works through row tiles of 128 rows that start at their segment's first row (slots of
`pma.jagged.row_blocks`), `groups` CTAs side by side on each, every one with its own `weight_tiles` tiles of 128 output
columns. Tiles of X come by TMA from the jagged offset (rows past the segment's end are the neighbour's and are masked
when results are stored), scale tiles from their slot, 512 contiguous bytes by one bulk copy. TMA fills the contraction
up with zeros, and products over 32-column blocks that don't exist are not issued: no pad byte of a scale tile is used.

Warps: 0–3 epilogue (`epilogues.py`), 4 product (tcgen05.mma kind mxf8f6f4, block scales), 5 loads, 6 finds the row
tiles from offsets, 32 at a time, and announces them (`blocks/row_tiles.py`).

Shared memory: `stages` tiles of X, 16 KiB and 512 bytes of scales each; the weight's tiles, resident or, where the
contraction is too long, in the same stages as X.
Tensor memory: [0, 384) three accumulators; then four columns of scales for each stage of X; then four for each tile of
the weight, copied once if it is resident. At most 384 + 4·13 of 512.

Bound, reckoned: device memory up to a width of about 512, C + N bytes a row (gemm in bf16: N + 2C); the weight crosses
L2 once for each CTA, X once for each group. Wider: the tensor core's reads of shared memory, 128 bytes a clock for a
128 × 128 tile by one CTA.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import torch
from cutlass import Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from quack.copy_utils import tma_get_copy_fn
from torch import Tensor

from pma.jagged import num_row_blocks
from pma.kernels.blocks.block_product import BLOCKS, Operand, multiply_tiles
from pma.kernels.blocks.block_quantize import ABSENT_SCALES
from pma.kernels.blocks.ring import Ring, init_ring, next_stage
from pma.kernels.blocks.row_tiles import (
    BATCH,
    BATCHES,
    FIELDS,
    Announcements,
    RowTile,
    announce_row_tiles,
    next_row_tile,
)
from pma.kernels.blocks.scale_tiles import load_scale_tile
from pma.kernels.blocks.tensor_memory import copy_scale_tile, load_row, pass_on, release, take_over
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.kernels.projection.epilogues import EPILOGUE_WARPS, QuantizeEpilogue, StoreEpilogue
from pma.kernels.projection.operands import Loads, ProjectionOperands, Shared
from pma.kernels.projection.spec import (
    OPERAND_BYTES,
    PAYLOAD_BYTES,
    SCALE_COLUMNS,
    TENSOR_COLUMNS,
    TILE,
    GemmQuantizeSpec,
    GemmSpec,
    ProjectionConfig,
    ProjectionSpec,
    choose_config,
)
from pma.layouts import BLOCK, tile_shape
from pma.layouts.mxfp8 import SCALE_ONE
from pma.layouts.scale_tiles import TILE_BYTES

PRODUCT_WARP, LOAD_WARP, SEARCH_WARP = 4, 5, 6
TILES = (TILE, TILE, TILE)


class Projection:
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: ProjectionSpec, config: ProjectionConfig):
        self.spec, self.config = spec, config
        self.depth = spec.depth_tiles
        self.epilogue = QuantizeEpilogue(spec) if isinstance(spec, GemmQuantizeSpec) else StoreEpilogue(spec)

    @cute.jit
    def __call__(self, o: ProjectionOperands, num_blocks: Int32, stream):
        x, weight = self.as_e4m3(o.x, [0, 1]), self.as_e4m3(o.weight, self.weight_order())
        product = self.product()
        x_layout, weight_layout = self.operand_layouts(product)
        operation = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        first = (None, None, None, 0)
        x_atom, x_map = cute.nvgpu.make_tiled_tma_atom_A(
            operation, x, cute.slice_(x_layout, first), TILES, product, (1, 1, 1, 1)
        )
        weight_atom, weight_map = cute.nvgpu.make_tiled_tma_atom_B(
            operation, weight, cute.slice_(weight_layout, first), TILES, product, (1, 1, 1, 1)
        )
        loads = Loads(x_atom, x_map, weight_atom, weight_map)
        self.kernel(o, loads, product).launch(
            grid=[num_blocks, 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    def weight_order(self) -> list[int]:
        """Modes of the weight that are its output columns and its contraction."""
        return [1, 0] if self.spec.weight_is_transposed else [0, 1]

    @cute.jit
    def as_e4m3(self, data: cute.Tensor, order: cutlass.Constexpr) -> cute.Tensor:
        pointer = cute.recast_ptr(data.iterator, dtype=Float8E4M3FN)
        return cute.make_tensor(pointer, cute.select(data.layout, order))

    @cute.jit
    def product(self) -> cute.TiledMma:
        weight_mode = OperandMajorMode.MN if self.spec.weight_is_transposed else OperandMajorMode.K
        return blackwell.make_blockscaled_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, OperandMajorMode.K, weight_mode, Float8E8M0FNU, BLOCK,
            tcgen05.CtaGroup.ONE, (TILE, TILE),
        )  # fmt: skip

    def operand_layouts(self, product: cute.TiledMma):
        """Shared-memory layouts of X and of the weight."""
        return (
            blackwell.make_smem_layout_a(product, TILES, Float8E4M3FN, self.config.stages),
            blackwell.make_smem_layout_b(product, TILES, Float8E4M3FN, self.config.weight_buffers(self.spec)),
        )

    @cute.kernel
    def kernel(self, o: ProjectionOperands, loads: Loads, product: cute.TiledMma):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(product)
        if thread == 0:
            init_ring(shared.board.full, shared.board.empty, BATCHES, EPILOGUE_WARPS + 2)
            init_ring(shared.stages.full, shared.stages.empty, self.config.stages, 1)
            init_ring(shared.accumulators.full, shared.accumulators.empty, self.config.accumulators, EPILOGUE_WARPS)
            cute.arch.mbarrier_init(shared.weight_full, 1)
            cute.arch.mbarrier_init(shared.products_done, 1)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, shared.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tensor_memory = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tensor_memory)
        if warp == SEARCH_WARP:
            self.announce(o, shared)
        elif warp == LOAD_WARP:
            self.load(o, loads, shared, product)
        elif warp == PRODUCT_WARP:
            self.multiply(shared, tensor_memory)
        else:
            self.finish(o, shared, tensor_memory)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.dealloc_tmem(tensor_memory, TENSOR_COLUMNS)

    @cute.jit
    def allocate(self, product: cute.TiledMma) -> Shared:
        config, smem = self.config, SmemAllocator()
        x_layout, weight_layout = self.operand_layouts(product)
        buffers = config.weight_buffers(self.spec)
        rings = []
        for size in (config.stages, config.accumulators, BATCHES):
            barriers = smem.allocate_array(Int64, 2 * size)
            rings.append(Ring(barriers, barriers + size))
        facts = smem.allocate_tensor(Int32, cute.make_layout((FIELDS, BATCH * BATCHES)), 16)
        return Shared(
            *rings[:2],
            board=Announcements(*rings[2], facts),
            weight_full=smem.allocate_array(Int64, 1),
            products_done=smem.allocate_array(Int64, 1),
            tensor_memory=smem.allocate_array(Int32, 1),
            scale_words=smem.allocate_tensor(Uint32, cute.make_layout((4, 2)), 16),
            x=smem.allocate_tensor(Float8E4M3FN, x_layout.outer, 1024, x_layout.inner),
            weight=smem.allocate_tensor(Float8E4M3FN, weight_layout.outer, 1024, weight_layout.inner),
            x_scales=smem.allocate_tensor(Uint8, cute.make_layout((TILE_BYTES, config.stages)), 128),
            weight_scales=smem.allocate_tensor(Uint8, cute.make_layout((TILE_BYTES, buffers)), 128),
        )

    # ------------------------------------------------------------------------------------------ who does what

    def groups(self) -> int:
        return self.config.groups(self.spec)

    @cute.jit
    def announce(self, o: ProjectionOperands, shared: Shared):
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        num_tiles = cute.size(o.x, mode=[0]) // TILE + cute.size(o.offsets, mode=[0]) - 1
        announce_row_tiles(shared.board, o.offsets, num_tiles, block // self.groups(), blocks // self.groups())

    @cute.jit
    def first_column_tile(self) -> Int32:
        """The first of this CTA's `weight_tiles` column tiles; CTAs of one row tile are neighbours."""
        block, _, _ = cute.arch.block_idx()
        return block % self.groups() * self.config.weight_tiles

    # ---------------------------------------------------------------------------------------------------- loading

    @cute.jit
    def load(self, o: ProjectionOperands, loads: Loads, shared: Shared, product: cute.TiledMma):
        column_tile = self.first_column_tile()
        if const_expr(self.config.is_resident):
            with cute.arch.elect_one():
                num_bytes = self.config.weight_buffers(self.spec) * OPERAND_BYTES
                cute.arch.mbarrier_arrive_and_expect_tx(shared.weight_full, num_bytes)
            for index in cutlass.range_constexpr(self.config.weight_tiles):
                place = (column_tile + index, shared.weight_full)
                for depth in cutlass.range(self.depth):
                    self.load_weight(o, loads, shared, product, place, (depth, index * self.depth + depth))
        stage, parity, turn, is_busy = Int32(0), Int32(1), Int32(0), True
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            turn += 1
            if facts.num_rows > 0:
                for depth in cutlass.range(self.depth):
                    cute.arch.mbarrier_wait(shared.stages.empty + stage, parity)
                    full = shared.stages.full + stage
                    with cute.arch.elect_one():
                        operands = 1 if self.config.is_resident else 2
                        cute.arch.mbarrier_arrive_and_expect_tx(full, operands * OPERAND_BYTES)
                    self.load_x(o, loads, shared, product, facts, (depth, stage))
                    if const_expr(not self.config.is_resident):
                        self.load_weight(o, loads, shared, product, (column_tile, full), (depth, stage))
                    stage, parity = next_stage(stage, parity, self.config.stages)
            is_busy = facts.tile >= 0

    @cute.jit
    def load_x(self, o: ProjectionOperands, loads: Loads, shared: Shared, product: cute.TiledMma, facts: RowTile, turn):
        """Copy one tile of X and its scales. turn: (tile along the contraction, stage)."""
        depth, stage = turn
        full = shared.stages.full + stage
        rows = cute.local_tile(cute.domain_offset((facts.first_row, 0), loads.x), (TILE, TILE), (0, None))
        source = product.get_slice(0).partition_A(rows)
        copy, _, _ = tma_get_copy_fn(loads.x_atom, 0, cute.make_layout(1), source, shared.x)
        copy(depth, stage, tma_bar_ptr=full)
        with cute.arch.elect_one():
            load_scale_tile(o.x_tiles, facts.tile, depth, (shared.x_scales[None, stage].iterator, full))

    @cute.jit
    def load_weight(self, o: ProjectionOperands, loads: Loads, shared: Shared, product: cute.TiledMma, place, turn):
        """Copy one tile of the weight and its scales. place: (column tile, barrier); turn: (depth, buffer)."""
        (column_tile, full), (depth, buffer) = place, turn
        columns = cute.local_tile(loads.weight, (TILE, TILE), (column_tile, None))
        source = product.get_slice(0).partition_B(columns)
        copy, _, _ = tma_get_copy_fn(loads.weight_atom, 0, cute.make_layout(1), source, shared.weight)
        copy(depth, buffer, tma_bar_ptr=full)
        with cute.arch.elect_one():
            load_scale_tile(o.weight_tiles, column_tile, depth, (shared.weight_scales[None, buffer].iterator, full))

    # ---------------------------------------------------------------------------------------------------- product

    @cute.jit
    def multiply(self, shared: Shared, tensor_memory: cute.Pointer):
        config, columns = self.config, tensor_memory.toint()
        if const_expr(config.is_resident):
            cute.arch.mbarrier_wait(shared.weight_full, 0)
            for buffer in cutlass.range(config.weight_buffers(self.spec)):
                copy_scales(shared.weight_scales, buffer, tensor_memory + config.weight_scales_column)
        stage, parity, slot, slot_parity = Int32(0), Int32(0), Int32(0), Int32(1)
        turn, is_busy = Int32(0), True
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            turn += 1
            if facts.num_rows > 0:
                first, first_parity = stage, parity
                for index in cutlass.range_constexpr(config.weight_tiles):
                    stage, parity = first, first_parity
                    take_over(shared.accumulators.empty + slot, slot_parity)
                    for depth in cutlass.range(self.depth):
                        if const_expr(index == 0):
                            cute.arch.mbarrier_wait(shared.stages.full + stage, parity)
                            copy_scales(shared.x_scales, stage, tensor_memory + config.x_scales_column)
                        buffer = stage
                        if const_expr(config.is_resident):
                            buffer = index * self.depth + depth
                        else:
                            copy_scales(shared.weight_scales, buffer, tensor_memory + config.weight_scales_column)
                        self.multiply_tile(shared, columns, (depth, stage, buffer, slot))
                        if const_expr(index == config.weight_tiles - 1):
                            release(shared.stages.empty + stage)
                        stage, parity = next_stage(stage, parity, config.stages)
                    release(shared.accumulators.full + slot)
                    slot, slot_parity = next_stage(slot, slot_parity, config.accumulators)
            is_busy = facts.tile >= 0
        release(shared.products_done)  # products arrive at barriers, and copies of scales run even without any product
        cute.arch.mbarrier_wait(shared.products_done, 0)

    @cute.jit
    def multiply_tile(self, shared: Shared, columns: Int32, turn):
        """Add a product of two tiles to an accumulator. turn: (depth, stage, buffer of the weight, accumulator)."""
        config, blocks = self.config, self.spec.in_columns // BLOCK
        depth, stage, buffer, slot = turn
        stage, slot = cute.arch.make_warp_uniform(stage), cute.arch.make_warp_uniform(slot)  # so are all addresses
        x = Operand(
            address=shared.x.iterator.toint() + stage * PAYLOAD_BYTES,
            scales=columns + config.x_scales_column + stage * SCALE_COLUMNS,
            is_k_major=True,
        )
        weight = Operand(
            address=shared.weight.iterator.toint() + buffer * PAYLOAD_BYTES,
            scales=columns + config.weight_scales_column + buffer * SCALE_COLUMNS,
            is_k_major=not self.spec.weight_is_transposed,
        )
        num_blocks = BLOCKS if const_expr(blocks % BLOCKS == 0) else cutlass.min(blocks - depth * BLOCKS, BLOCKS)
        with cute.arch.elect_one():
            multiply_tiles(columns + slot * TILE, x, weight, TILE, (num_blocks, depth > 0))

    # --------------------------------------------------------------------------------------------------- epilogue

    @cute.jit
    def finish(self, o: ProjectionOperands, shared: Shared, tensor_memory: cute.Pointer):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        slot, parity, half, turn, is_busy = Int32(0), Int32(0), Int32(0), Int32(0), True
        while is_busy:
            facts = next_row_tile(shared.board, turn)
            turn += 1
            is_busy = facts.tile >= 0
            if is_busy:
                for index in cutlass.range(self.config.weight_tiles):
                    column_tile = self.first_column_tile() + index
                    scale_word = Uint32(ABSENT_SCALES)
                    if facts.num_rows > 0:
                        take_over(shared.accumulators.full + slot, parity)
                        row = load_row(tensor_memory + slot * TILE, TILE)
                        pass_on(shared.accumulators.empty + slot)
                        if warp * BLOCK < facts.num_rows:
                            scale_word = self.epilogue.store(o, facts, row, column_tile)
                        slot, parity = next_stage(slot, parity, self.config.accumulators)
                    self.epilogue.store_scales(o, shared, facts, column_tile, (scale_word, half))
                    half ^= 1
        self.epilogue.clear_outside(o)


@cute.jit
def copy_scales(source: cute.Tensor, index: Int32, first: cute.Pointer):
    """Copy scale tile number `index` of shared memory to its columns of tensor memory, counted from `first`."""
    copy_scale_tile(source[None, index].iterator, first + index * SCALE_COLUMNS)


def build(arch: str, spec: ProjectionSpec, config: ProjectionConfig, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    quantises, u8 = isinstance(spec, GemmQuantizeSpec), torch.uint8
    columns, tiles = spec.out_columns, spec.column_tiles
    weight_shape = (spec.in_columns, columns) if spec.weight_is_transposed else (columns, spec.in_columns)
    weight_tiles = (tiles, None) if spec.weight_is_transposed else (None, spec.depth_tiles)
    writes_scales, writes_tiles = quantises and spec.writes_scales, quantises and spec.writes_tiles
    operands = ProjectionOperands(
        x=fake_tensor(u8, None, spec.in_columns),
        x_tiles=fake_tensor(u8, None, spec.depth_tiles, TILE_BYTES),
        offsets=fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize),
        weight=fake_tensor(u8, *weight_shape),
        weight_tiles=fake_tensor(u8, *weight_tiles, TILE_BYTES),
        out=fake_tensor(u8 if quantises else spec.out_dtype, None, columns, alignment=32),
        scales=fake_tensor(u8, None, columns // BLOCK) if writes_scales else None,
        row_tiles=fake_tensor(u8, None, tiles, TILE_BYTES) if writes_tiles else None,
        column_tiles=fake_tensor(u8, tiles, None, TILE_BYTES) if writes_tiles else None,
    )
    return compile_for(arch, Projection(spec, config), operands, Int32(0), options=options)


compiled = cached(build)


class ProjectionOperand(NamedTuple):
    """An operand as the tensor cores take it: payload, and scale tiles in the direction that the product contracts."""

    data: Tensor  # [rows, columns] uint8
    tiles: Tensor  # uint8, see pma/layouts/scale_tiles.py


class Projected(NamedTuple):
    """What the kernel wrote; None for what the spec doesn't ask for. Shapes: `ProjectionOperands`."""

    out: Tensor  # payload of gemm_quantize, values of gemm
    scales: Tensor | None
    row_tiles: Tensor | None
    column_tiles: Tensor | None


def launch(spec: ProjectionSpec, x: ProjectionOperand, weight: ProjectionOperand, offsets: Tensor) -> Projected:
    """Allocate the results and start the kernel on the current stream.

    Args:
        x: [T, in_columns] jagged, with row tiles [T // 128 + B, ⌈in_columns/128⌉, 512].
        weight: [N, C], one segment; gemm_quantize: with row tiles, gemm: with column tiles.
        offsets: [B + 1] of spec.offsets_dtype.
    """
    data, offsets = aligned(x.data), offsets.contiguous()
    result = _allocate(spec, data, offsets.shape[0] - 1)
    if data.shape[0] == 0:
        return _without_rows(result)
    facts = device_facts(data.device)
    config = choose_config(spec, facts)
    groups, num_tiles = config.groups(spec), num_row_blocks(data.shape[0], offsets.shape[0] - 1, TILE)
    workers = max(1, min(num_tiles, num_multiprocessors(data.device) // groups))
    operands = ProjectionOperands(
        data, aligned(x.tiles), offsets, aligned(weight.data), aligned(weight.tiles), *result
    )  # fmt: skip
    with torch.cuda.device(data.device):
        compiled(facts.arch, spec, config)(operands, workers * groups)
    return result


def _allocate(spec: ProjectionSpec, data: Tensor, num_segments: int) -> Projected:
    rows, columns = data.shape[0], spec.out_columns

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=data.device)

    if isinstance(spec, GemmSpec):
        return Projected(empty(rows, columns, dtype=spec.out_dtype), None, None, None)
    slots = num_row_blocks(rows, num_segments, BLOCK)
    return Projected(
        out=empty(rows, columns),
        scales=empty(slots, columns // BLOCK) if spec.writes_scales else None,
        row_tiles=empty(*tile_shape(rows, num_segments, columns, "row")) if spec.writes_tiles else None,
        column_tiles=empty(*tile_shape(rows, num_segments, columns, "column")) if spec.writes_tiles else None,
    )


def _without_rows(result: Projected) -> Projected:
    if result.scales is not None:
        result.scales.zero_()
    for tiles in (result.row_tiles, result.column_tiles):
        if tiles is not None:
            tiles.fill_(SCALE_ONE)
    return result
