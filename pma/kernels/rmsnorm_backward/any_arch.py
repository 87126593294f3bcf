"""Gradients of RMSNorm over jagged rows, with dV in MXFP8 added to the incoming gradient, for Hopper and Blackwell.

    t = dy + dequantised dV,  x̂ = x·rstd,  g = t·w
    dx = rstd·(g − x̂·mean(g·x̂)),    dw = Σ_rows t·x̂,    optionally x·rstd·w in bf16

One pass over memory: rows of dy, x and dV arrive by bulk copies in a ring; a group of lanes shares a row, reads it from
shared memory for the sum over its columns, and again for the result. Each thread adds up its columns of dw over all
rows it sees; at the end the groups of a block add theirs in a fixed order, each block writes one row of partial sums,
and the caller adds those in order: the result depends on the number of blocks, never on timing. The loading warp
fetches what is small (rstd, the scales of dV) with ordinary loads and passes it on in shared memory.

Warps: `warps` that compute and one that loads. Shared memory: `stages` times `rows_per_stage` rows of dy, x and dV;
weight and dw in fp32. Bound: device memory, 7 bytes for each bf16 element with dV.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator
from torch import Tensor

from pma.jagged import num_row_blocks
from pma.kernels.blocks.block_scales import block_scale
from pma.kernels.blocks.memory import clear_rows, element_pointer, row_tensor
from pma.kernels.blocks.ring import CONSUMER_BARRIER, bulk_load, init_ring, next_stage
from pma.kernels.blocks.segments import tile_rows
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.kernels.quantize.spec import CHUNK
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardConfig, RMSNormBackwardSpec, choose_config
from pma.layouts import BLOCK
from pma.layouts.scale_tiles import TILE_ROWS


class BackwardOperands(NamedTuple):
    """Tensors in global memory: T rows, B segments, C columns. What a spec doesn't ask for is None."""

    dy: cute.Tensor  # [T, C]
    values: cute.Tensor  # [T, C]
    weight: cute.Tensor  # [C]
    rstd: cute.Tensor  # [T] float32
    offsets: cute.Tensor  # [B + 1]
    dv_data: cute.Tensor | None  # [T, C] E4M3
    dv_scales: cute.Tensor | None  # [T // 32 + B, C / 32] bytes
    dvalues: cute.Tensor  # [T, C]
    dweight: cute.Tensor  # [blocks, C] float32
    normalised: cute.Tensor | None  # [T, C] bfloat16


class Shared(NamedTuple):
    """Tensors in shared memory; rows are [rows_per_stage, CHUNK, chunks, stages]."""

    full: cute.Pointer
    empty: cute.Pointer
    stage_facts: cute.Tensor  # [stages, 2] int32: first row, number of rows (−1: no more work)
    dy: cute.Tensor
    values: cute.Tensor
    dv: cute.Tensor | None
    dv_scales: cute.Tensor  # [C / 32, stages] float32
    rstd: cute.Tensor  # [rows_per_stage, stages]
    weight: cute.Tensor  # [CHUNK, chunks] float32
    dweight: cute.Tensor  # [CHUNK, chunks] float32
    sums: cute.Tensor  # [2, rows_at_once, warps_per_row], of rows that several warps share


class RMSNormBackward:
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: RMSNormBackwardSpec, config: RMSNormBackwardConfig):
        self.spec, self.config = spec, config
        self.chunks = spec.chunks
        self.chunks_per_lane = -(-spec.chunks // config.lanes_per_row)
        self.is_ragged = spec.chunks % config.lanes_per_row != 0  # some lanes have no last chunk
        self.consumers = 32 * config.warps

    @cute.jit
    def __call__(self, operands: BackwardOperands, stream):
        self.kernel(operands).launch(
            grid=[cute.size(operands.dweight, mode=[0]), 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=self.config.blocks_per_sm,
            preferred_smem_carveout=100,  # stated, else the driver is asked
            stream=stream,
        )

    @cute.kernel
    def kernel(self, o: BackwardOperands):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(o)
        if thread == 0:
            init_ring(shared.full, shared.empty, self.config.stages, self.config.warps)
        cute.arch.mbarrier_init_fence()
        for column in cutlass.range(thread, self.spec.columns, self.config.threads):
            shared.weight[column % CHUNK, column // CHUNK] = Float32(o.weight[column])
            shared.dweight[column % CHUNK, column // CHUNK] = Float32(0.0)
        cute.arch.sync_threads()
        if warp == self.config.warps:
            self.load(o, shared)
        else:
            self.consume(o, shared)

    @cute.jit
    def allocate(self, o: BackwardOperands) -> Shared:
        spec, config, smem = self.spec, self.config, SmemAllocator()
        rows = config.rows_per_stage
        layout = cute.make_layout(
            (rows, CHUNK, self.chunks, config.stages), stride=(spec.columns, 1, CHUNK, rows * spec.columns)
        )
        by_column = cute.make_layout((CHUNK, self.chunks), stride=(1, CHUNK))
        sums = (2, config.rows_at_once, config.warps_per_row)
        barriers = smem.allocate_array(Int64, 2 * config.stages)
        return Shared(
            full=barriers,
            empty=barriers + config.stages,
            stage_facts=smem.allocate_tensor(Int32, cute.make_layout((config.stages, 2)), 16),
            dy=smem.allocate_tensor(o.dy.element_type, layout, 128),
            values=smem.allocate_tensor(o.values.element_type, layout, 128),
            dv=smem.allocate_tensor(Float8E4M3FN, layout, 128) if const_expr(spec.adds_dv) else None,
            dv_scales=smem.allocate_tensor(Float32, cute.make_layout((spec.columns // BLOCK, config.stages)), 16),
            rstd=smem.allocate_tensor(Float32, cute.make_layout((rows, config.stages)), 16),
            weight=smem.allocate_tensor(Float32, by_column, 16),
            dweight=smem.allocate_tensor(Float32, by_column, 16),
            sums=smem.allocate_tensor(Float32, cute.make_layout(sums, stride=(sums[1] * sums[2], sums[2], 1)), 16),
        )

    # ------------------------------------------------------------------------------------------ loading warp

    @cute.jit
    def load(self, o: BackwardOperands, shared: Shared):
        num_segments = cute.size(o.offsets, mode=[0]) - 1
        num_tiles = cute.size(o.values, mode=[0]) // TILE_ROWS + num_segments
        tile, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        stage, parity, step = Int32(0), Int32(1), self.config.rows_per_stage
        while tile < num_tiles:
            rows = tile_rows(o.offsets, num_segments, tile)
            slot = rows.begin // BLOCK + rows.segment + (rows.first_row - rows.begin) // BLOCK
            for i in cutlass.range((rows.num_rows + step - 1) // step):
                count = cutlass.min(rows.num_rows - i * step, step)
                facts = (rows.first_row + i * step, count, slot + i * step // BLOCK)
                self.fill_stage(o, shared, facts, stage, parity)
                stage, parity = next_stage(stage, parity, self.config.stages)
            tile += stride
        cute.arch.mbarrier_wait(shared.empty + stage, parity)
        with cute.arch.elect_one():
            shared.stage_facts[stage, 1] = Int32(-1)
            cute.arch.mbarrier_arrive(shared.full + stage)

    @cute.jit
    def fill_stage(self, o: BackwardOperands, shared: Shared, facts, stage: Int32, parity: Int32):
        """facts: (first row, number of rows, slot of their scales)."""
        first_row, count, slot = facts
        lane, columns = cute.arch.lane_idx(), const_expr(self.spec.columns // BLOCK)
        cute.arch.mbarrier_wait(shared.empty + stage, parity)
        if lane < count:
            shared.rstd[lane, stage] = o.rstd[first_row + lane]
        if const_expr(self.spec.adds_dv):
            scales = cute.make_tensor(element_pointer(o.dv_scales, Int64(slot) * columns, 1), cute.make_layout(columns))
            for column in cutlass.range(lane, columns, 32):
                shared.dv_scales[column, stage] = block_scale(Int32(scales[column]))
        cute.arch.sync_warp()
        full = shared.full + stage
        with cute.arch.elect_one():
            shared.stage_facts[stage, 0] = first_row
            shared.stage_facts[stage, 1] = count
            elements, offset = count * self.spec.columns, Int64(first_row) * self.spec.columns
            cute.arch.mbarrier_arrive_and_expect_tx(full, count * self.spec.row_bytes)
            for source, target in ((o.dy, shared.dy), (o.values, shared.values), (o.dv_data, shared.dv)):
                if const_expr(source is not None):
                    start = target[None, None, None, stage].iterator
                    num_bytes = elements * (target.element_type.width // 8)
                    bulk_load(start, element_pointer(source, offset, 16), num_bytes, full)

    # ---------------------------------------------------------------------------------------- computing warps

    @cute.jit
    def consume(self, o: BackwardOperands, shared: Shared):
        thread, _, _ = cute.arch.thread_idx()
        group = thread // self.config.lanes_per_row
        dweight = cute.make_rmem_tensor(cute.make_layout((CHUNK, self.chunks_per_lane)), Float32)
        dweight.fill(0.0)
        stage, parity, turn, is_busy = Int32(0), Int32(0), Int32(0), True
        while is_busy:
            cute.arch.mbarrier_wait(shared.full + stage, parity)
            first_row, num_rows = shared.stage_facts[stage, 0], shared.stage_facts[stage, 1]
            is_busy = num_rows >= 0
            for start in cutlass.range(0, num_rows, self.config.rows_at_once):
                self.row_gradient(o, shared, dweight, (first_row, num_rows, start + group), (stage, turn))
                turn ^= 1
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.empty + stage)
            stage, parity = next_stage(stage, parity, self.config.stages)
        self.store_dweight(o, shared, dweight)
        self.clear_outside(o)

    @cute.jit
    def row_gradient(self, o: BackwardOperands, shared: Shared, dweight: cute.Tensor, place, turn):
        """One row. place: (first row of the stage, number of rows, own row); turn: (stage, set of sums).

        A group without a row repeats the stage's last one with rstd 0, which adds 0 to dw, and stores nothing.
        """
        (first_row, num_rows, own), (stage, parity) = place, turn
        is_row, row = own < num_rows, cutlass.min(own, num_rows - 1)
        rstd = shared.rstd[row, stage] if is_row else Float32(0.0)
        total = Float32(0.0)
        for j in cutlass.range_constexpr(self.chunks_per_lane):
            chunk, has_chunk = self.chunk_of(j)
            gradient, x_hat = self.load_terms(shared, (row, chunk, stage), rstd if has_chunk else Float32(0.0))
            for k in cutlass.range_constexpr(CHUNK):
                dweight[k, j] += gradient[k] * x_hat[k]
                total += gradient[k] * shared.weight[k, chunk] * x_hat[k]
        mean = self.sum_over_row(shared, total, own % self.config.rows_at_once, parity) / self.spec.columns
        cute.arch.sync_warp()  # keeps the compiler from holding the row in registers, which spills
        offset = Int64(first_row + row) * self.spec.columns
        layout = cute.make_layout((CHUNK, self.chunks), stride=(1, CHUNK))
        for j in cutlass.range_constexpr(self.chunks_per_lane):
            chunk, has_chunk = self.chunk_of(j)
            if is_row and has_chunk:
                gradient, x_hat = self.load_terms(shared, (row, chunk, stage), rstd)
                wide = cute.make_rmem_tensor(CHUNK, Float32)
                for k in cutlass.range_constexpr(CHUNK):
                    wide[k] = rstd * (gradient[k] * shared.weight[k, chunk] - x_hat[k] * mean)
                self.store_chunk(wide, row_tensor(o.dvalues, offset, layout)[None, chunk])
                if const_expr(self.spec.writes_normalised):
                    for k in cutlass.range_constexpr(CHUNK):
                        wide[k] = x_hat[k] * shared.weight[k, chunk]
                    self.store_chunk(wide, row_tensor(o.normalised, offset, layout)[None, chunk])

    @cute.jit
    def load_terms(self, shared: Shared, place, rstd: Float32):
        """t = dy + dV and x̂ = x·rstd of one chunk. place: (row, chunk, stage)."""
        row, chunk, stage = place
        dy = self.load_chunk(shared.dy, row, chunk, stage)
        values = self.load_chunk(shared.values, row, chunk, stage)
        gradient = [dy[k] for k in range(CHUNK)]
        if const_expr(self.spec.adds_dv):
            dv, scale = self.load_chunk(shared.dv, row, chunk, stage), shared.dv_scales[chunk * CHUNK // BLOCK, stage]
            gradient = [gradient[k] + dv[k] * scale for k in range(CHUNK)]
        return gradient, [values[k] * rstd for k in range(CHUNK)]

    @cute.jit
    def store_chunk(self, values: cute.Tensor, target: cute.Tensor):
        rounded = cute.make_rmem_tensor(CHUNK, target.element_type)
        rounded.store(values.load().to(target.element_type))
        cute.autovec_copy(rounded, target)

    @cute.jit
    def chunk_of(self, j: cutlass.Constexpr[int]):
        """The thread's j-th chunk, and whether there is one; without one the last chunk stands in."""
        thread, _, _ = cute.arch.thread_idx()
        chunk, has_chunk = j * self.config.lanes_per_row + thread % self.config.lanes_per_row, Boolean(True)
        if const_expr(self.is_ragged):
            has_chunk = chunk < self.chunks
            chunk = cutlass.min(chunk, self.chunks - 1)
        return chunk, has_chunk

    @cute.jit
    def load_chunk(self, rows: cute.Tensor, row: Int32, chunk: Int32, stage: Int32):
        """CHUNK values as fp32."""
        fragment = cute.make_rmem_tensor(CHUNK, rows.element_type)
        cute.autovec_copy(rows[row, None, chunk, stage], fragment)
        return fragment.load().to(Float32)

    @cute.jit
    def sum_over_row(self, shared: Shared, value: Float32, group: Int32, parity: Int32) -> Float32:
        """The sum over the threads of a row, in a fixed order."""
        value = cute.arch.warp_reduction_sum(value, threads_in_group=min(32, self.config.lanes_per_row))
        if const_expr(self.config.warps_per_row > 1):
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            shared.sums[parity, group, warp % self.config.warps_per_row] = value
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.consumers)
            value = Float32(0.0)
            for index in cutlass.range_constexpr(self.config.warps_per_row):
                value += shared.sums[parity, group, index]
        return value

    @cute.jit
    def store_dweight(self, o: BackwardOperands, shared: Shared, dweight: cute.Tensor):
        """Add up the groups of the block, one after the other, and write the block's row of partial sums."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        for group in cutlass.range(self.config.rows_at_once):
            if thread // self.config.lanes_per_row == group:
                for j in cutlass.range_constexpr(self.chunks_per_lane):
                    chunk, has_chunk = self.chunk_of(j)
                    if has_chunk:
                        for k in cutlass.range_constexpr(CHUNK):
                            shared.dweight[k, chunk] += dweight[k, j]
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.consumers)
        for column in cutlass.range(thread, self.spec.columns, self.consumers):
            o.dweight[block, column] = shared.dweight[column % CHUNK, column // CHUNK]

    @cute.jit
    def clear_outside(self, o: BackwardOperands):
        """Zero the gradient of rows in front of the first offset and behind the last."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        num_segments = cute.size(o.offsets, mode=[0]) - 1
        worker, workers = block * self.consumers + thread, blocks * self.consumers
        head, tail = Int32(o.offsets[0]), Int32(o.offsets[num_segments])
        for begin, end in ((Int32(0), head), (tail, cute.size(o.values, mode=[0]))):
            for target in (o.dvalues, o.normalised):
                if const_expr(target is not None):
                    row_bytes = self.spec.columns * (target.element_type.width // 8)
                    clear_rows(target, begin, end, (row_bytes, worker, workers))


def build(arch: str, spec: RMSNormBackwardSpec, config: RMSNormBackwardConfig, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    columns, f32 = spec.columns, torch.float32
    operands = BackwardOperands(
        dy=fake_tensor(spec.dy_dtype, None, columns),
        values=fake_tensor(spec.dtype, None, columns),
        weight=fake_tensor(spec.weight_dtype, columns, alignment=spec.weight_dtype.itemsize),
        rstd=fake_tensor(f32, None, alignment=4),
        offsets=fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize),
        dv_data=fake_tensor(torch.uint8, None, columns) if spec.adds_dv else None,
        dv_scales=fake_tensor(torch.uint8, None, columns // BLOCK, alignment=1) if spec.adds_dv else None,
        dvalues=fake_tensor(spec.dtype, None, columns),
        dweight=fake_tensor(f32, None, columns, alignment=4),
        normalised=fake_tensor(torch.bfloat16, None, columns) if spec.writes_normalised else None,
    )
    return compile_for(arch, RMSNormBackward(spec, config), operands, options=options)


compiled = cached(build)


class NormGradients(NamedTuple):
    """dvalues [T, C] in the dtype of the values, dweight [C] float32, normalised [T, C] bfloat16 if asked for."""

    dvalues: Tensor
    dweight: Tensor
    normalised: Tensor | None


def launch(
    spec: RMSNormBackwardSpec, dy: Tensor, values: Tensor, weight: Tensor, rstd: Tensor, offsets: Tensor,
    dv: tuple[Tensor, Tensor] | None = None,
) -> NormGradients:  # fmt: skip
    """Allocate the results and start the kernel on the current stream. dv: (data, scales) of the MXFP8 gradient."""
    rows, columns = values.shape
    dvalues = torch.empty((rows, columns), dtype=values.dtype, device=values.device)
    normalised = torch.empty_like(dvalues, dtype=torch.bfloat16) if spec.writes_normalised else None
    if rows == 0:
        return NormGradients(dvalues, torch.zeros(columns, device=values.device), normalised)
    facts = device_facts(values.device)
    config = choose_config(spec, facts)
    num_tiles = num_row_blocks(rows, offsets.shape[0] - 1, TILE_ROWS)
    num_blocks = max(1, min(num_tiles, num_multiprocessors(values.device) * config.blocks_per_sm))
    dweight = torch.empty((num_blocks, columns), dtype=torch.float32, device=values.device)
    dv_data, dv_scales = (None, None) if dv is None else (aligned(dv[0]), dv[1].contiguous())
    operands = BackwardOperands(
        aligned(dy), aligned(values), weight.contiguous(), rstd, offsets.contiguous(), dv_data, dv_scales, dvalues,
        dweight, normalised,
    )  # fmt: skip
    with torch.cuda.device(values.device):
        compiled(facts.arch, spec, config)(operands)
    return NormGradients(dvalues, dweight.sum(0), normalised)
