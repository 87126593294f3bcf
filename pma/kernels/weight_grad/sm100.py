"""`weight_grad` on Blackwell: dW = doutᵀ x over the tokens of all segments, both in MXFP8.

    dW[n, c] = Σ_t dout[t, n] · x[t, c]       dout [T, N], x [T, C], dW [N, C] float32 or bfloat16

Tokens are the contraction, so both operands are read MN-major, as they lie. They come in K tiles of up to 128 tokens,
counted from each segment's first row: payload from the jagged row, scales from the slot of their column tile.

The end of a segment: the tensor maps reach a K tile through an extent that ends where the tile does (quack's ragged
tensors), so TMA fills rows behind it with zeros and never reads the neighbour's; products over 32-token blocks behind
it are not issued, so no pad of a scale tile is used.

Work items are (part of the tokens, tile of dW), the tiles of a part in neighbouring CTAs, which read the same rows from
L2. A part is a run of tile slots, or of segments when they are kept apart (`spec.py`). Its sum goes to a workspace,
and a second kernel adds the parts in order.

Warps: 0–3 epilogue, 4 product (tcgen05.mma kind mxf8f6f4, block scales), 5 loads. Each walks through the rows on its
own. CTAs of a cluster have tiles below each other: each slab of x is read by one of them and sent to all.

Shared memory: `stages` of one slab of dout and tile_columns / 128 slabs of x, [128 tokens, 128 columns] of payload
each, and their scale tiles of 512 bytes.
Tensor memory: `accumulators` × tile_columns, then the scales of each stage, 4 columns a slab, dout's first.

Bound: for N = C = 384, one column of tiles and clusters of its 3 tiles, device memory: N + C bytes a token, which L2 is
asked for once. For N = C = 512, clusters of 4 tiles of 128 × 256, L2 is asked for 1,536 bytes a token, and a CTA fills
384 bytes of shared memory in the 4 cycles that a token's products take.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import torch
from cutlass import Boolean, Float8E4M3FN, Float8E8M0FNU, Float32, Int16, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from quack.copy_utils import create_ragged_tensor_for_tma, offset_ragged_tensor, tma_get_copy_fn
from quack.cute_dsl_utils import get_max_active_clusters
from torch import Tensor

from pma.kernels.blocks.block_product import Operand, multiply_tiles
from pma.kernels.blocks.k_tiles import RowRange, count_with_rows, k_tile_at, rows_of_slots, window_at
from pma.kernels.blocks.memory import element_pointer
from pma.kernels.blocks.ring import drain, init_ring, next_stage
from pma.kernels.blocks.scale_tiles import load_scale_tile
from pma.kernels.blocks.segments import first_slot
from pma.kernels.blocks.tensor_memory import copy_scale_tile, load_row, pass_on, take_over
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts
from pma.kernels.weight_grad.spec import (
    MAX_SEGMENT_PARTS,
    MIN_SEGMENTS_PER_PART,
    SCALE_COLUMNS,
    SLAB,
    SLAB_BYTES,
    TENSOR_COLUMNS,
    WeightGradConfig,
    WeightGradSpec,
    choose_config,
)
from pma.layouts import BLOCK, MXFP8Tensor
from pma.layouts.scale_tiles import TILE_BYTES

EPILOGUE_WARPS = 4
PRODUCT_WARP, LOAD_WARP = 4, 5
THREADS = 192
WIDTH = 32  # accumulator columns that the epilogue reads at once
CHUNK = 4  # columns of a partial sum that lie together: 16 bytes
SUM_THREADS = 128


class WeightGradOperands(NamedTuple):
    """Tensors in global memory: T tokens, B segments, R = T // 128 + B."""

    dout: cute.Tensor  # [T, out_columns] bytes
    dout_tiles: cute.Tensor  # [out_columns / 128, R, 512] bytes: column tiles
    x: cute.Tensor  # [T, in_columns] bytes
    x_tiles: cute.Tensor  # [in_columns / 128, R, 512] bytes: column tiles
    offsets: cute.Tensor  # [B + 1]
    partials: cute.Tensor  # [parts, tiles, tile_columns / 4, 128, 4] float32
    out: cute.Tensor  # [out_columns, in_columns]


class Loads(NamedTuple):
    """The payloads as ragged tensors [columns, tokens] of E4M3, through tensor maps."""

    dout_atom: cute.CopyAtom
    dout: cute.Tensor
    x_atom: cute.CopyAtom
    x: cute.Tensor


class Shared(NamedTuple):
    """Shared memory."""

    full: cute.Pointer  # stages: loads → product
    empty: cute.Pointer
    sum_full: cute.Pointer  # accumulators: product → epilogue
    sum_empty: cute.Pointer
    tensor_memory: cute.Pointer  # where its address is told
    payload: cute.Tensor  # (MMA, 1, blocks, slabs · stages), dout's slab of a stage first
    scales: cute.Tensor  # [512, slabs, stages] bytes


class WeightGrad:
    """The kernels of one spec and one configuration."""

    def __init__(self, spec: WeightGradSpec, config: WeightGradConfig):
        self.spec, self.config = spec, config
        self.tiles = config.tiles(spec)
        self.tiles_down = spec.out_columns // SLAB
        self.cluster_mask = (1 << config.cluster) - 1 if config.cluster > 1 else None

    @cute.jit
    def __call__(self, o: WeightGradOperands, num_ctas: Int32, stream):
        alone, for_all = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        loads = Loads(
            *self.tensor_map(o.dout, alone), *self.tensor_map(o.x, for_all if self.config.cluster > 1 else alone)
        )
        cluster = [self.config.cluster, 1, 1]
        self.kernel(o, loads).launch(
            grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], cluster=cluster, min_blocks_per_mp=1, stream=stream
        )
        chunks = self.spec.out_columns * self.spec.in_columns // CHUNK
        self.add_parts(o.partials, o.out).launch(
            grid=[chunks // SUM_THREADS, 1, 1], block=[SUM_THREADS, 1, 1], stream=stream
        )

    @cute.jit
    def product(self) -> cute.TiledMma:
        """128 rows of dout times a slab of x over 32 tokens: what the layouts of slabs are made for."""
        return blackwell.make_blockscaled_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, OperandMajorMode.MN, OperandMajorMode.MN, Float8E8M0FNU, BLOCK,
            tcgen05.CtaGroup.ONE, (SLAB, SLAB),
        )  # fmt: skip

    @cute.jit
    def tensor_map(self, data: cute.Tensor, operation: cutlass.Constexpr):
        """Copy atom and coordinates of slabs of a payload [T, columns]."""
        pointer = cute.recast_ptr(data.iterator, dtype=Float8E4M3FN)
        tokens_last = cute.make_tensor(pointer, cute.select(data.layout, [1, 0]))
        ragged = create_ragged_tensor_for_tma(tokens_last, ragged_dim=1)
        layout = cute.slice_(self.payload_layout(1), (None, None, None, 0))
        return cute.nvgpu.make_tiled_tma_atom_A(
            operation, ragged, layout, (SLAB, SLAB, SLAB), self.product(), (1, 1, 1, 1)
        )

    @cute.jit
    def payload_layout(self, slabs: cutlass.Constexpr[int]):
        return blackwell.make_smem_layout_a(self.product(), (SLAB, SLAB, SLAB), Float8E4M3FN, slabs)

    @cute.kernel
    def kernel(self, o: WeightGradOperands, loads: Loads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate()
        if thread == 0:
            init_ring(shared.full, shared.empty, self.config.stages, self.config.cluster)
            init_ring(shared.sum_full, shared.sum_empty, self.config.accumulators, EPILOGUE_WARPS)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, shared.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        tensor_memory = cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tensor_memory)
        if warp == LOAD_WARP:
            self.load(o, loads, shared)
        elif warp == PRODUCT_WARP:
            self.multiply(o, shared, tensor_memory)
        else:
            self.finish(o, shared, tensor_memory)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.dealloc_tmem(tensor_memory, TENSOR_COLUMNS)

    @cute.jit
    def allocate(self) -> Shared:
        config, smem = self.config, SmemAllocator()
        layout = self.payload_layout(config.slabs * config.stages)
        barriers = smem.allocate_array(Int64, 2 * (config.stages + config.accumulators))
        sums = barriers + 2 * config.stages
        return Shared(
            full=barriers,
            empty=barriers + config.stages,
            sum_full=sums,
            sum_empty=sums + config.accumulators,
            tensor_memory=smem.allocate_array(Int32, 1),
            payload=smem.allocate_tensor(Float8E4M3FN, layout.outer, 1024, layout.inner),
            scales=smem.allocate_tensor(Uint8, cute.make_layout((TILE_BYTES, config.slabs, config.stages)), 128),
        )

    @cute.jit
    def segments_of(self, o: WeightGradOperands, part: Int32):
        """(first, last + 1) of a part, when segments are kept apart; see `spec.segments_per_part`."""
        num_segments = cute.size(o.offsets, mode=[0]) - 1
        size = cutlass.max((num_segments + MAX_SEGMENT_PARTS - 1) // MAX_SEGMENT_PARTS, MIN_SEGMENTS_PER_PART)
        return part * size, cutlass.min((part + 1) * size, num_segments)

    @cute.jit
    def rows_of(self, o: WeightGradOperands, part: Int32) -> RowRange:
        """The rows of a part; the whole warp asks."""
        if const_expr(self.spec.keeps_segments_apart):
            first, last = self.segments_of(o, part)
            rows = RowRange(first, Int32(o.offsets[first]), Int32(o.offsets[last]))
        else:
            num_segments, parts = cute.size(o.offsets, mode=[0]) - 1, cute.size(o.partials, mode=[0])
            first = first_slot(o.offsets, Int32(0), SLAB)
            slots = Int64(first_slot(o.offsets, num_segments, SLAB) - first)
            begin, end = Int32(slots * part // parts), Int32(slots * (part + 1) // parts)
            rows = rows_of_slots(o.offsets, num_segments, first + begin, first + end)
        return rows

    # ---------------------------------------------------------------------------------------------- loads

    @cute.jit
    def load(self, o: WeightGradOperands, loads: Loads, shared: Shared):
        item, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        items = cute.size(o.partials, mode=[0]) * self.tiles
        stage, parity = Int32(0), Int32(1)
        while item < items:
            rows = self.rows_of(o, item // self.tiles)
            window, row = window_at(o.offsets, rows.segment), rows.begin
            while row < rows.end:
                tile, window = k_tile_at(o.offsets, window, row)
                cute.arch.mbarrier_wait(shared.empty + stage, parity)
                self.load_stage(o, loads, shared, (item % self.tiles, row, tile.num_rows, tile.slot), stage)
                stage, parity = next_stage(stage, parity, self.config.stages)
                row += tile.num_rows
            item += stride
        drain(shared.empty, stage, parity, self.config.stages)  # the others' products arrive at this CTA's barriers

    @cute.jit
    def load_stage(self, o: WeightGradOperands, loads: Loads, shared: Shared, place, stage: Int32):
        """Start the copies of a K tile. place: (tile of dW, first row, rows, slot of the scale tiles)."""
        tile, row, num_rows, slot = place
        full, slabs, rank = shared.full + stage, self.config.slabs, cute.arch.block_idx_in_cluster()
        down, across = tile % self.tiles_down, tile // self.tiles_down * (slabs - 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.config.stage_bytes)
            load_scale_tile(o.dout_tiles, down, slot, (shared.scales[None, 0, stage].iterator, full))
            for slab in cutlass.range_constexpr(1, slabs):
                load_scale_tile(o.x_tiles, across + slab - 1, slot, (shared.scales[None, slab, stage].iterator, full))
        target = shared.payload[None, None, None, stage * slabs]
        self.load_slab(loads.dout_atom, loads.dout, (down, row, num_rows), target, full)
        for slab in cutlass.range_constexpr(1, slabs):
            if rank == slab % self.config.cluster:
                target = shared.payload[None, None, None, stage * slabs + slab]
                self.load_slab(loads.x_atom, loads.x, (across + slab - 1, row, num_rows), target, full)

    @cute.jit
    def load_slab(self, atom: cute.CopyAtom, tensor: cute.Tensor, place, target: cute.Tensor, full: cute.Pointer):
        """Place: (slab of columns, first row, rows); what lies behind them is filled with zeros."""
        column, row, num_rows = place
        ragged = offset_ragged_tensor(tensor, row, num_rows, ragged_dim=1)
        source = self.product().get_slice(0).partition_A(cute.local_tile(ragged, (SLAB, SLAB), (column, 0)))
        copy, _, _ = tma_get_copy_fn(atom, 0, cute.make_layout(1), source, target, single_stage=True)
        is_shared = const_expr(isinstance(atom.op, cpasync.CopyBulkTensorTileG2SMulticastOp))
        copy(tma_bar_ptr=full, **({"mcast_mask": Int16(self.cluster_mask)} if is_shared else {}))

    # -------------------------------------------------------------------------------------------- product

    @cute.jit
    def multiply(self, o: WeightGradOperands, shared: Shared, tensor_memory: cute.Pointer):
        item, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        items = cute.size(o.partials, mode=[0]) * self.tiles
        stage, parity, which, which_parity = Int32(0), Int32(0), Int32(0), Int32(1)
        while item < items:
            rows = self.rows_of(o, item // self.tiles)
            window, row, is_first = window_at(o.offsets, rows.segment), rows.begin, Boolean(True)
            while row < rows.end:
                tile, window = k_tile_at(o.offsets, window, row)
                if is_first:
                    take_over(shared.sum_empty + which, which_parity)
                cute.arch.mbarrier_wait(shared.full + stage, parity)
                self.multiply_stage(shared, tensor_memory, (stage, which), tile.num_rows, is_first)
                with cute.arch.elect_one():
                    tcgen05.commit(shared.empty + stage, self.cluster_mask)
                stage, parity = next_stage(stage, parity, self.config.stages)
                row += tile.num_rows
                is_first = row == (tile.segment_end if const_expr(self.spec.keeps_segments_apart) else rows.end)
                if is_first:
                    with cute.arch.elect_one():
                        tcgen05.commit(shared.sum_full + which)
                    which, which_parity = next_stage(which, which_parity, self.config.accumulators)
            item += stride

    @cute.jit
    def multiply_stage(self, shared: Shared, tensor_memory: cute.Pointer, turn, num_rows: Int32, is_first: Boolean):
        """Issue a K tile's products, for each piece one for each block of 32 tokens. turn: (stage, accumulator)."""
        config, (stage, which) = self.config, turn
        stage, which = cute.arch.make_warp_uniform(stage), cute.arch.make_warp_uniform(which)  # so are all addresses
        first_scales = tensor_memory + config.scales_column + stage * (config.slabs * SCALE_COLUMNS)
        for slab in cutlass.range_constexpr(config.slabs):
            copy_scale_tile(shared.scales[None, slab, stage].iterator, first_scales + slab * SCALE_COLUMNS)
        payload, scales = shared.payload.iterator.toint() + stage * (config.slabs * SLAB_BYTES), first_scales.toint()
        depth = ((num_rows + BLOCK - 1) // BLOCK, not is_first)
        with cute.arch.elect_one():
            for first, columns in config.pieces:
                slab = 1 + first // SLAB
                total = tensor_memory.toint() + which * config.tile_columns + first
                dout = Operand(payload, scales, is_k_major=False)
                x = Operand(payload + slab * SLAB_BYTES, scales + slab * SCALE_COLUMNS, is_k_major=False)
                multiply_tiles(total, dout, x, columns, depth)

    # ------------------------------------------------------------------------------------------- epilogue

    @cute.jit
    def finish(self, o: WeightGradOperands, shared: Shared, tensor_memory: cute.Pointer):
        item, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        items = cute.size(o.partials, mode=[0]) * self.tiles
        which, parity = Int32(0), Int32(0)
        while item < items:
            if const_expr(self.spec.keeps_segments_apart):
                which, parity = self.add_segments(o, shared, tensor_memory, (item, which, parity))
            else:
                which, parity = self.store_sum(o, shared, tensor_memory, (item, which, parity))
            item += stride

    @cute.jit
    def store_sum(self, o: WeightGradOperands, shared: Shared, tensor_memory: cute.Pointer, turn):
        """The sum of a part, zeros if it has no rows. turn: (item, accumulator, parity)."""
        item, which, parity = turn
        rows = self.rows_of(o, item // self.tiles)
        has_rows = rows.begin < rows.end
        if has_rows:
            take_over(shared.sum_full + which, parity)
        for chunk in cutlass.range(self.config.tile_columns // WIDTH):
            values = cute.make_rmem_tensor(WIDTH, Float32)
            values.fill(0.0)
            if has_rows:
                values.store(load_row(self.sum_address(tensor_memory, which) + chunk * WIDTH, WIDTH).load())
            self.store_partial(o, item, chunk, values)
        if has_rows:
            pass_on(shared.sum_empty + which)
            which, parity = next_stage(which, parity, self.config.accumulators)
        return which, parity

    @cute.jit
    def add_segments(self, o: WeightGradOperands, shared: Shared, tensor_memory: cute.Pointer, turn):
        """The sums of a part's segments, added one after the other. turn: (item, accumulator, parity)."""
        item, which, parity = turn
        chunks = self.config.tile_columns // WIDTH
        totals = cute.make_rmem_tensor((WIDTH, chunks), Float32)
        totals.fill(0.0)
        first, last = self.segments_of(o, item // self.tiles)
        for _ in cutlass.range(count_with_rows(o.offsets, first, last)):
            take_over(shared.sum_full + which, parity)
            for chunk in cutlass.range_constexpr(chunks):
                values = load_row(self.sum_address(tensor_memory, which) + chunk * WIDTH, WIDTH)
                for index in cutlass.range_constexpr(WIDTH):
                    totals[index, chunk] += values[index]
            pass_on(shared.sum_empty + which)
            which, parity = next_stage(which, parity, self.config.accumulators)
        for chunk in cutlass.range_constexpr(chunks):
            self.store_partial(o, item, Int32(chunk), totals[None, chunk])
        return which, parity

    @cute.jit
    def sum_address(self, tensor_memory: cute.Pointer, which: Int32) -> cute.Pointer:
        return tensor_memory + which * self.config.tile_columns

    @cute.jit
    def store_partial(self, o: WeightGradOperands, item: Int32, chunk: Int32, values: cute.Tensor):
        """Store WIDTH columns of the thread's row, 16 bytes at a time, so that a warp writes 512 contiguous bytes."""
        thread, _, _ = cute.arch.thread_idx()
        first = Int64(item) * (self.config.tile_columns // CHUNK) + chunk * (WIDTH // CHUNK)
        pieces = cute.logical_divide(values, cute.make_layout(CHUNK))
        for piece in cutlass.range_constexpr(WIDTH // CHUNK):
            target = element_pointer(o.partials, ((first + piece) * SLAB + thread) * CHUNK, 16)
            cute.autovec_copy(pieces[None, piece], cute.make_tensor(target, cute.make_layout(CHUNK)))

    # ------------------------------------------------------------------------------------- sum over parts

    @cute.kernel
    def add_parts(self, partials: cute.Tensor, out: cute.Tensor):
        """((0 + part 0) + part 1) + … for CHUNK neighbouring columns of a row in each thread."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        chunks = const_expr(self.config.tile_columns // CHUNK)
        index = block * SUM_THREADS + thread
        row, chunk, tile = index % SLAB, index // SLAB % chunks, index // (SLAB * chunks)
        totals = [Float32(0.0) for _ in range(CHUNK)]
        values = cute.make_rmem_tensor(CHUNK, Float32)
        part_size = self.tiles * self.config.tile_columns * SLAB
        for part in cutlass.range(cute.size(partials, mode=[0]), unroll=4):
            source = element_pointer(partials, Int64(part) * part_size + index * CHUNK, 16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(CHUNK)), values)
            totals = [totals[k] + values[k] for k in range(CHUNK)]
        rounded = cute.make_rmem_tensor(CHUNK, out.element_type)
        for k in cutlass.range_constexpr(CHUNK):
            rounded[k] = totals[k].to(out.element_type)
        column = tile // self.tiles_down * self.config.tile_columns + chunk * CHUNK
        offset = Int64(tile % self.tiles_down * SLAB + row) * self.spec.in_columns + column
        target = element_pointer(out, offset, CHUNK * out.element_type.width // 8)
        cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(CHUNK)))


def build(arch: str, spec: WeightGradSpec, config: WeightGradConfig, options: str = ""):
    """Compile the kernels; see `pma.kernels.compile.compile_for`."""
    u8, n, c = torch.uint8, spec.out_columns, spec.in_columns
    operands = WeightGradOperands(
        dout=fake_tensor(u8, None, None),  # a stride known to the compiler would overflow in a ragged tensor's
        dout_tiles=fake_tensor(u8, n // SLAB, None, TILE_BYTES),
        x=fake_tensor(u8, None, None),
        x_tiles=fake_tensor(u8, c // SLAB, None, TILE_BYTES),
        offsets=fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize),
        partials=fake_tensor(torch.float32, None, config.tiles(spec), config.tile_columns // CHUNK, SLAB, CHUNK),
        out=fake_tensor(spec.out_dtype, n, c),
    )
    return compile_for(arch, WeightGrad(spec, config), operands, Int32(0), options=options)


compiled = cached(build)


def launch(spec: WeightGradSpec, dout: MXFP8Tensor, x: MXFP8Tensor, offsets: Tensor) -> Tensor:
    """Allocate and start the kernels on the current stream.

    Args:
        dout, x: payload [T, columns] and column tiles [columns / 128, T // 128 + B, 512], both uint8. Payloads that
            aren't contiguous and 16-byte aligned are copied first.
        offsets: [B + 1].
    Returns:
        dW [out_columns, in_columns] in out_dtype; zeros without tokens.
    """
    num_rows, num_segments, device = dout.data.shape[0], offsets.shape[0] - 1, dout.data.device
    shape = (spec.out_columns, spec.in_columns)
    if num_rows == 0 or num_segments == 0:
        return torch.zeros(shape, dtype=spec.out_dtype, device=device)
    facts = device_facts(device)
    config = choose_config(spec, facts)
    num_ctas = config.cluster * get_max_active_clusters(config.cluster, (10, 0), device.index or 0)
    tiles, parts = config.tiles(spec), config.parts(spec, num_rows, num_segments, num_ctas)
    sizes = (parts, tiles, config.tile_columns // CHUNK, SLAB, CHUNK)
    partials = torch.empty(sizes, dtype=torch.float32, device=device)
    out = torch.empty(shape, dtype=spec.out_dtype, device=device)
    payloads_and_tiles = (aligned(each) for each in (dout.data, dout.scales, x.data, x.scales))
    operands = WeightGradOperands(*payloads_and_tiles, offsets.contiguous(), partials, out)
    with torch.cuda.device(device):
        compiled(facts.arch, spec, config)(operands, min(parts * tiles, num_ctas))
    return out
