"""`rmsnorm_quantize`, `quantize` and `quantize_dout`: jagged rows in, MXFP8 out, one pass, for Hopper and Blackwell.

    x      = values · rstd · weight   (with a weight)      or      values
    amax   over the 32 rows of a row block and `columns_per_scale` columns
    data   = e4m3(x · 2^−k),  scales = k + 127,  k from amax        (pma/layouts/mxfp8.py)

Two phases for each row block (source 2.3.1). First: every lane takes its chunks of its rows, the lanes of a row share
the sum of squares, column maxima run over the rows, and the maximum of a block meets in shared memory. Second: the rows
are read again from shared memory, x is computed again, scaled and cast. Multiplying by |weight| commutes with the
maximum over rows (rounding is monotone), so the first phase multiplies by the weight once for each column.

Warps: `warps` that compute and one that loads. The loading warp finds the segment of each tile of 128 rows (a slot of
`pma.jagged.row_blocks`), and passes for each of its row blocks the rows (one bulk copy: they are contiguous) and eight
integers, `Stage`. Rows past a segment's end are never read: lanes of such rows repeat the last row, which changes no
maximum and stores the same bytes twice.

Shared memory: `stages` row blocks of input; weight in fp32; three sets of maxima, one collected, one read and one
cleared; scale bytes of a tile; with a transposed payload one row block of payload.
Bound: device memory, 3 bytes for each bf16 element and 0.1 to 6 % of scales.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.memory import SmemAllocator
from torch import Tensor

from pma.jagged import num_row_blocks
from pma.kernels.blocks.block_scales import block_scale, inverse_scale, max_magnitude, scale_byte
from pma.kernels.blocks.memory import clear_bytes, clear_rows, element_pointer, row_tensor, store_byte, store_words
from pma.kernels.blocks.ring import CONSUMER_BARRIER, bulk_load, init_ring, next_stage
from pma.kernels.blocks.scale_tiles import reset_scales, store_tile
from pma.kernels.blocks.segments import first_slot, spare_slots, tile_rows
from pma.kernels.blocks.transpose import store_transposed
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.kernels.quantize.spec import CHUNK, QuantizeConfig, QuantizeSpec, choose_config
from pma.layouts import BLOCK, tile_shape
from pma.layouts.mxfp8 import SCALE_NAN, SCALE_ONE
from pma.layouts.scale_tiles import TILE_ROWS
from pma.layouts.transposed import GROUP


class QuantizeOperands(NamedTuple):
    """Tensors in global memory: T rows, B segments, C columns, R = T // 32 + B. What a spec doesn't ask for is None."""

    values: cute.Tensor  # [T, C]
    offsets: cute.Tensor  # [B + 1]
    data: cute.Tensor  # [T, C] bytes
    scales: cute.Tensor  # [R, C / 32] bytes
    row_tiles: cute.Tensor | None  # [T // 128 + B, ⌈C/128⌉, 512] bytes
    column_tiles: cute.Tensor | None  # [⌈C/128⌉, T // 128 + B, 512] bytes
    transposed: cute.Tensor | None  # [T // 16 + B, C, 16] bytes
    weight: cute.Tensor | None  # [C]
    rstd: cute.Tensor | None  # [T] float32
    out: cute.Tensor | None  # [T, C], O of δ
    delta: cute.Tensor | None  # [T, C / delta_columns] float32


class Shared(NamedTuple):
    """Tensors in shared memory."""

    full: cute.Pointer
    empty: cute.Pointer
    stage_facts: cute.Tensor  # [stages, 8] int32, see Stage
    rows: cute.Tensor | None  # [32, CHUNK, chunks, stages]
    out_rows: cute.Tensor | None  # same, of O
    weight: cute.Tensor | None  # [CHUNK, chunks] float32
    maxima: cute.Tensor  # [C / columns_per_scale, 3] bits of amax
    tile_scales: cute.Tensor  # [4, 4·⌈C/128⌉] bytes
    payload: cute.Tensor | None  # [32, C / 4] words


class Stage(NamedTuple):
    """What the loading warp says of one row block."""

    first_row: Int32  # in the buffer
    num_rows: Int32  # 0 … 32; 0: nothing but scales to fill in
    segment: Int32
    block: Int32  # of the segment
    tile: Int32  # slot of its tile of 128 rows; −1: no more work
    ends_tile: Int32
    spare_slots: Int32  # compact slots after the segment's last block that no segment uses
    spare_groups: Int32  # groups of 16 tokens likewise


class Quantize:
    """The kernel of one spec and one configuration."""

    def __init__(self, spec: QuantizeSpec, config: QuantizeConfig):
        self.spec, self.config = spec, config
        self.chunks = spec.chunks
        self.chunks_per_lane = spec.chunks // config.lanes_per_row
        self.is_unrolled = self.chunks_per_lane * config.rows_per_lane <= 16
        self.column_tiles = -(-spec.columns // TILE_ROWS)
        self.normalises = spec.weight_dtype is not None

    @cute.jit
    def __call__(self, operands: QuantizeOperands, eps: Float32, num_blocks: Int32, stream):
        self.kernel(operands, eps).launch(
            grid=[num_blocks, 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=self.config.blocks_per_sm,
            preferred_smem_carveout=100 if self.config.is_resident else 25,  # percent; stated, else the driver is asked
            stream=stream,
        )

    @cute.kernel
    def kernel(self, o: QuantizeOperands, eps: Float32):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(o)
        if thread == 0:
            init_ring(shared.full, shared.empty, self.config.stages, self.config.warps)
        cute.arch.mbarrier_init_fence()
        for index in cutlass.range(thread, self.spec.columns // self.spec.columns_per_scale, self.config.threads):
            for third in cutlass.range_constexpr(3):
                shared.maxima[index, third] = Uint32(0)
        reset_scales(shared.tile_scales, thread, self.config.threads)
        if const_expr(self.normalises):
            for column in cutlass.range(thread, self.spec.columns, self.config.threads):
                shared.weight[column % CHUNK, column // CHUNK] = Float32(o.weight[column])
        cute.arch.sync_threads()
        if warp == self.config.warps:
            self.load(o, shared)
        else:
            self.consume(o, shared, eps)

    @cute.jit
    def allocate(self, o: QuantizeOperands) -> Shared:
        spec, config, smem = self.spec, self.config, SmemAllocator()
        row_shape = (BLOCK, CHUNK, self.chunks, config.stages)
        row_layout = cute.make_layout(row_shape, stride=(spec.columns, 1, CHUNK, BLOCK * spec.columns))
        barriers = smem.allocate_array(Int64, 2 * config.stages)
        tile_columns = 4 * self.column_tiles
        return Shared(
            full=barriers,
            empty=barriers + config.stages,
            stage_facts=smem.allocate_tensor(
                Int32, cute.make_layout((config.stages, len(Stage._fields)), stride=(len(Stage._fields), 1)), 16
            ),
            rows=smem.allocate_tensor(o.values.element_type, row_layout, 128) if config.is_resident else None,
            out_rows=(
                smem.allocate_tensor(o.out.element_type, row_layout, 128)
                if const_expr(config.is_resident and o.out is not None)
                else None
            ),
            weight=(
                smem.allocate_tensor(Float32, cute.make_layout((CHUNK, self.chunks), stride=(1, CHUNK)), 16)
                if const_expr(self.normalises)
                else None
            ),
            maxima=smem.allocate_tensor(Uint32, cute.make_layout((spec.columns // spec.columns_per_scale, 3)), 16),
            tile_scales=smem.allocate_tensor(Uint8, cute.make_layout((4, tile_columns), stride=(tile_columns, 1)), 16),
            payload=(
                smem.allocate_tensor(
                    Uint32, cute.make_layout((BLOCK, spec.columns // 4), stride=(spec.columns // 4, 1)), 16
                )
                if const_expr(spec.writes_transposed)
                else None
            ),
        )

    # ------------------------------------------------------------------------------------------ loading warp

    @cute.jit
    def load(self, o: QuantizeOperands, shared: Shared):
        num_segments = cute.size(o.offsets, mode=[0]) - 1
        num_tiles = cute.size(o.values, mode=[0]) // TILE_ROWS + num_segments
        tile, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        stage, parity = Int32(0), Int32(1)
        while tile < num_tiles:
            rows = tile_rows(o.offsets, num_segments, tile)
            blocks = cutlass.max((rows.num_rows + BLOCK - 1) // BLOCK, 1)
            slots, groups = spare_slots(o.offsets, rows, BLOCK), spare_slots(o.offsets, rows, GROUP)
            for i in cutlass.range(blocks):
                ends_tile = Int32(i == blocks - 1)
                facts = Stage(
                    first_row=rows.first_row + i * BLOCK,
                    num_rows=cutlass.min(rows.num_rows - i * BLOCK, BLOCK),
                    segment=rows.segment,
                    block=(rows.first_row - rows.begin) // BLOCK + i,
                    tile=tile,
                    ends_tile=ends_tile,
                    spare_slots=ends_tile * slots,
                    spare_groups=ends_tile * groups,
                )
                self.fill_stage(o, shared, facts, stage, parity)
                stage, parity = next_stage(stage, parity, self.config.stages)
            tile += stride
        no_more = Stage(*(Int32(-1 if name == "tile" else 0) for name in Stage._fields))
        self.fill_stage(o, shared, no_more, stage, parity)

    @cute.jit
    def fill_stage(self, o: QuantizeOperands, shared: Shared, facts: Stage, stage: Int32, parity: Int32):
        cute.arch.mbarrier_wait(shared.empty + stage, parity)
        full = shared.full + stage
        with cute.arch.elect_one():
            for index in cutlass.range_constexpr(len(Stage._fields)):
                shared.stage_facts[stage, index] = facts[index]
            if const_expr(self.config.is_resident):
                elements = cutlass.max(facts.num_rows, 0) * self.spec.columns
                offset = Int64(facts.first_row) * self.spec.columns
                num_bytes = elements * (o.values.element_type.width // 8)
                out_bytes = Int32(0)
                if const_expr(o.out is not None):
                    out_bytes = elements * (o.out.element_type.width // 8)
                cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes + out_bytes)
                if num_bytes > 0:
                    source = element_pointer(o.values, offset, 16)
                    bulk_load(shared.rows[None, None, None, stage].iterator, source, num_bytes, full)
                    if const_expr(o.out is not None):
                        source = element_pointer(o.out, offset, 16)
                        bulk_load(shared.out_rows[None, None, None, stage].iterator, source, out_bytes, full)
            else:
                cute.arch.mbarrier_arrive(full)

    # ---------------------------------------------------------------------------------------- computing warps

    @cute.jit
    def consume(self, o: QuantizeOperands, shared: Shared, eps: Float32):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        stage, parity, third, is_busy = Int32(0), Int32(0), Int32(0), True
        while is_busy:
            cute.arch.mbarrier_wait(shared.full + stage, parity)
            facts = Stage(*(shared.stage_facts[stage, index] for index in range(len(Stage._fields))))
            is_busy = facts.tile >= 0
            if facts.num_rows > 0:
                self.quantize_rows(o, shared, facts, (stage, third), eps)
                third = third + 1 if third < 2 else Int32(0)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.empty + stage)
            if is_busy and warp == 0:
                self.finish_block(o, shared, facts)
            stage, parity = next_stage(stage, parity, self.config.stages)
        self.clear_outside(o)

    @cute.jit
    def quantize_rows(self, o: QuantizeOperands, shared: Shared, facts: Stage, turn, eps: Float32):
        """Both phases for one row block. turn: (stage, set of maxima)."""
        stage, third = turn
        lane, lanes = cute.arch.lane_idx(), self.config.lanes_per_row
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        x, out = self.tiles(o, shared, facts, stage)
        own_row = warp * (32 // lanes) + lane // lanes
        rows = [cutlass.min(own_row + i * self.config.rows_at_once, facts.num_rows - 1) for i in self.row_range()]
        rstd = [Float32(1.0) for _ in self.row_range()]
        if const_expr(self.normalises):
            rstd = [self.row_rstd(x, row, eps) for row in rows]
            if lane % lanes == 0:
                for i in cutlass.range_constexpr(self.config.rows_per_lane):
                    o.rstd[facts.first_row + rows[i]] = rstd[i]
        for j in cutlass.range(self.chunks_per_lane, unroll_full=self.is_unrolled):
            self.collect_maximum(x, shared, rows, rstd, (j * lanes + lane % lanes, third))
        self.clear_maxima(shared, third)
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=32 * self.config.warps)
        for j in cutlass.range(self.chunks_per_lane, unroll_full=self.is_unrolled):
            chunk = j * lanes + lane % lanes
            amax = shared.maxima[chunk * CHUNK // self.spec.columns_per_scale, third]
            byte = scale_byte(amax, self.spec.headroom_exponent)
            if warp == 0 and lane < lanes and lane % 4 == 0:
                self.store_scale(o, shared, facts, chunk // 4, byte)
            for i in cutlass.range_constexpr(self.config.rows_per_lane):
                words = self.cast(x, shared, (rows[i], chunk), rstd[i], byte)
                self.store_payload(o, facts.first_row + rows[i], chunk, words)
                if const_expr(self.spec.writes_transposed):
                    is_row = own_row + i * self.config.rows_at_once < facts.num_rows
                    for word in cutlass.range_constexpr(2):
                        kept = words[word] if is_row else Uint32(0)
                        shared.payload[own_row + i * self.config.rows_at_once, 2 * chunk + word] = kept
                if const_expr(self.spec.delta_columns > 0):
                    self.store_delta(o, x, out, facts, (rows[i], chunk), (words, byte))
        if const_expr(self.spec.writes_transposed):
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=32 * self.config.warps)
            place = (facts.first_row, facts.segment, facts.block, facts.num_rows)
            store_transposed(o.transposed, shared.payload, place, 32 * self.config.warps)

    def row_range(self):
        return range(self.config.rows_per_lane)

    @cute.jit
    def tiles(self, o: QuantizeOperands, shared: Shared, facts: Stage, stage: Int32):
        """The row block of the values and of O, [32, CHUNK, chunks] in shared or global memory."""
        if const_expr(self.config.is_resident):
            x = shared.rows[None, None, None, stage]
            out = shared.out_rows[None, None, None, stage] if const_expr(o.out is not None) else None
        else:
            layout = cute.make_layout((BLOCK, CHUNK, self.chunks), stride=(self.spec.columns, 1, CHUNK))
            offset = Int64(facts.first_row) * self.spec.columns
            x = row_tensor(o.values, offset, layout)
            out = row_tensor(o.out, offset, layout) if const_expr(o.out is not None) else None
        return x, out

    @cute.jit
    def load_chunk(self, x: cute.Tensor, row: Int32, chunk: Int32):
        """CHUNK values as fp32."""
        fragment = cute.make_rmem_tensor(CHUNK, x.element_type)
        cute.autovec_copy(x[row, None, chunk], fragment)
        return fragment.load().to(Float32)

    @cute.jit
    def row_rstd(self, x: cute.Tensor, row: Int32, eps: Float32) -> Float32:
        lane, lanes = cute.arch.lane_idx(), self.config.lanes_per_row
        total = Float32(0.0)
        for j in cutlass.range(self.chunks_per_lane, unroll_full=self.is_unrolled):
            values = self.load_chunk(x, row, j * lanes + lane % lanes)
            for k in cutlass.range_constexpr(CHUNK):
                total += values[k] * values[k]
        total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
        return 1.0 / cute.math.sqrt(total / self.spec.columns + eps)

    @cute.jit
    def collect_maximum(self, x: cute.Tensor, shared: Shared, rows, rstd, position):
        """Raise the block's maximum to that of this lane's columns. position: (chunk, set of maxima)."""
        chunk, third = position
        lane, lanes = cute.arch.lane_idx(), self.config.lanes_per_row
        columns = [Float32(0.0) for _ in range(CHUNK)]
        for i in cutlass.range_constexpr(self.config.rows_per_lane):
            values = self.load_chunk(x, rows[i], chunk)
            for k in cutlass.range_constexpr(CHUNK):
                scaled = values[k] * rstd[i] if const_expr(self.normalises) else values[k]
                columns[k] = max_magnitude(columns[k], scaled)
        maximum = Float32(0.0)
        for k in cutlass.range_constexpr(CHUNK):
            column = columns[k]
            if const_expr(self.normalises):
                column *= shared.weight[k, chunk]
            maximum = max_magnitude(maximum, column)
        for offset in (1, 2, 4, 8, 16):  # the four lanes of a block's columns, and the rows that the warp holds
            if const_expr(offset < 4 or offset >= lanes):
                maximum = max_magnitude(maximum, cute.arch.shuffle_sync_bfly(maximum, offset=offset))
        if lane < lanes and lane % 4 == 0:
            group = chunk * CHUNK // self.spec.columns_per_scale
            cute.arch.atomic_max(
                shared.maxima[None, third].iterator + group, maximum.bitcast(Uint32), sem="relaxed", scope="cta"
            )

    @cute.jit
    def clear_maxima(self, shared: Shared, third: Int32):
        """Clear the set that the next row block collects in: its last reader has passed the barrier before this one."""
        thread, _, _ = cute.arch.thread_idx()
        following = third + 1 if third < 2 else Int32(0)
        for group in cutlass.range(thread, self.spec.columns // self.spec.columns_per_scale, 32 * self.config.warps):
            shared.maxima[group, following] = Uint32(0)

    @cute.jit
    def cast(self, x: cute.Tensor, shared: Shared, position, rstd: Float32, byte: Int32):
        """Payload of one chunk as two words. position: (row, chunk)."""
        row, chunk = position
        values = self.load_chunk(x, row, chunk)
        scaled = cute.make_rmem_tensor(CHUNK, Float32)
        inverse = inverse_scale(byte)
        for k in cutlass.range_constexpr(CHUNK):
            value = values[k]
            if const_expr(self.normalises):
                value = value * rstd * shared.weight[k, chunk]
            scaled[k] = value * inverse
        payload = cute.make_rmem_tensor(CHUNK, Float8E4M3FN)
        payload.store(scaled.load().to(Float8E4M3FN))  # saturates
        words = cute.recast_tensor(payload, Uint32)
        is_nan = byte == SCALE_NAN
        return (Uint32(0) if is_nan else words[0]), (Uint32(0) if is_nan else words[1])

    @cute.jit
    def store_payload(self, o: QuantizeOperands, row: Int32, chunk: Int32, words):
        pair = cute.make_rmem_tensor(2, Uint32)
        pair[0], pair[1] = words
        store_words(o.data, Int64(row) * self.spec.columns + chunk * CHUNK, pair)

    @cute.jit
    def store_delta(self, o: QuantizeOperands, x: cute.Tensor, out: cute.Tensor, facts: Stage, position, quantized):
        """δ of the heads that this chunk belongs to. position: (row, chunk); quantized: (words, scale byte)."""
        (row, chunk), (words, byte) = position, quantized
        if const_expr(self.spec.delta_from_input):
            dout = self.load_chunk(x, row, chunk).to(cutlass.BFloat16).to(Float32)
        else:
            fragment = cute.make_rmem_tensor(CHUNK, Float8E4M3FN)
            pair = cute.recast_tensor(fragment, Uint32)
            pair[0], pair[1] = words
            dout = fragment.load().to(Float32) * block_scale(byte)
        pooled = self.load_chunk(out, row, chunk)
        total = Float32(0.0)
        for k in cutlass.range_constexpr(CHUNK):
            total += dout[k] * pooled[k]
        lanes = self.spec.delta_columns // CHUNK
        total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
        if chunk % lanes == 0:
            heads = self.spec.columns // self.spec.delta_columns
            offset = Int64(facts.first_row + row) * heads + chunk // lanes
            cute.make_tensor(element_pointer(o.delta, offset, 4), cute.make_layout(1))[0] = total

    # ------------------------------------------------------------------------------------- scales and the rest

    @cute.jit
    def store_scale(self, o: QuantizeOperands, shared: Shared, facts: Stage, column: Int32, byte: Int32):
        begin = facts.first_row - facts.block * BLOCK
        slot = begin // BLOCK + facts.segment + facts.block
        store_byte(o.scales, Int64(slot) * (self.spec.columns // BLOCK) + column, byte)
        if const_expr(self.spec.writes_tiles):
            shared.tile_scales[facts.block % 4, column] = Uint8(byte)

    @cute.jit
    def finish_block(self, o: QuantizeOperands, shared: Shared, facts: Stage):
        """Warp 0, after a row block: the tile's scales when it was the last, and what no segment uses behind it."""
        lane, columns = cute.arch.lane_idx(), self.spec.columns // BLOCK
        if facts.spare_slots > 0:
            begin = facts.first_row - facts.block * BLOCK
            slot = begin // BLOCK + facts.segment + facts.block + Int32(facts.num_rows > 0)
            clear_bytes(o.scales, Int64(slot) * columns, Int64(slot + 1) * columns, lane, Int32(32))
        if const_expr(self.spec.writes_transposed):
            if facts.spare_groups > 0:
                begin = facts.first_row - facts.block * BLOCK
                group = begin // GROUP + facts.segment + facts.block * 2 + (facts.num_rows + GROUP - 1) // GROUP
                clear_rows(o.transposed, group, group + 1, (self.spec.columns * GROUP, lane, Int32(32)))
        if const_expr(self.spec.writes_tiles):
            if facts.ends_tile != 0:
                cute.arch.sync_warp()
                store_tile(o.row_tiles, o.column_tiles, shared.tile_scales, facts.tile)
                cute.arch.sync_warp()
                reset_scales(shared.tile_scales, lane, 32)
                cute.arch.sync_warp()

    @cute.jit
    def clear_outside(self, o: QuantizeOperands):
        """Zero what belongs to rows in front of the first offset and behind the last."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        threads = 32 * self.config.warps
        num_rows, num_segments = cute.size(o.values, mode=[0]), cute.size(o.offsets, mode=[0]) - 1
        head, tail = Int32(o.offsets[0]), Int32(o.offsets[num_segments])
        worker, workers = block * threads + thread, blocks * threads
        for begin, end in ((Int32(0), head), (tail, num_rows)):
            clear_rows(o.data, begin, end, (self.spec.columns, worker, workers))
            if const_expr(o.rstd is not None):
                for row in cutlass.range(begin + worker, end, workers):
                    o.rstd[row] = Float32(0.0)
        columns = const_expr(self.spec.columns // BLOCK)
        used, slots = first_slot(o.offsets, num_segments, BLOCK), cute.size(o.scales, mode=[0])
        for begin, end in ((Int32(0), head // BLOCK), (used, slots)):
            clear_bytes(o.scales, Int64(begin) * columns, Int64(end) * columns, worker, workers)
        if const_expr(self.spec.writes_transposed):
            used, groups = first_slot(o.offsets, num_segments, GROUP), cute.size(o.transposed, mode=[0])
            for begin, end in ((Int32(0), head // GROUP), (used, groups)):
                clear_rows(o.transposed, begin, end, (self.spec.columns * GROUP, worker, workers))


def build(arch: str, spec: QuantizeSpec, config: QuantizeConfig, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    columns, u8, f32 = spec.columns, torch.uint8, torch.float32
    column_tiles = -(-columns // 128)
    tiles = (fake_tensor(u8, None, column_tiles, 512), fake_tensor(u8, column_tiles, None, 512))
    operands = QuantizeOperands(
        values=fake_tensor(spec.dtype, None, columns),
        offsets=fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize),
        data=fake_tensor(u8, None, columns),
        scales=fake_tensor(u8, None, columns // 32),
        row_tiles=tiles[0] if spec.writes_tiles else None,
        column_tiles=tiles[1] if spec.writes_tiles else None,
        transposed=fake_tensor(u8, None, columns, GROUP) if spec.writes_transposed else None,
        weight=fake_tensor(spec.weight_dtype, columns, alignment=spec.weight_dtype.itemsize)
        if spec.weight_dtype
        else None,
        rstd=fake_tensor(f32, None, alignment=4) if spec.weight_dtype else None,
        out=fake_tensor(spec.out_dtype, None, columns) if spec.out_dtype else None,
        delta=fake_tensor(f32, None, columns // spec.delta_columns, alignment=4) if spec.delta_columns else None,
    )
    return compile_for(arch, Quantize(spec, config), operands, Float32(0), Int32(0), options=options)


compiled = cached(build)


class QuantizedRows(NamedTuple):
    """What the kernel wrote; None for what the spec doesn't ask for. Shapes: `QuantizeOperands`."""

    data: Tensor
    scales: Tensor
    row_tiles: Tensor | None
    column_tiles: Tensor | None
    transposed: Tensor | None
    rstd: Tensor | None
    delta: Tensor | None


def launch(
    spec: QuantizeSpec, values: Tensor, offsets: Tensor, *, weight: Tensor | None = None, eps: float = 0.0,
    out: Tensor | None = None,
) -> QuantizedRows:  # fmt: skip
    """Allocate the results and start the kernel on the current stream. Rows that aren't contiguous and 16-byte aligned
    are copied first."""
    values, offsets = aligned(values), offsets.contiguous()
    result = _allocate(spec, values, offsets.shape[0] - 1)
    if values.shape[0] == 0:
        return _without_rows(result)
    facts = device_facts(values.device)
    config = choose_config(spec, facts)
    num_tiles = num_row_blocks(values.shape[0], offsets.shape[0] - 1, TILE_ROWS)
    num_blocks = max(1, min(num_tiles, num_multiprocessors(values.device) * config.blocks_per_sm))
    operands = QuantizeOperands(
        values, offsets, result.data, result.scales, result.row_tiles, result.column_tiles, result.transposed,
        None if weight is None else weight.contiguous(), result.rstd, None if out is None else aligned(out),
        result.delta,
    )  # fmt: skip
    with torch.cuda.device(values.device):
        compiled(facts.arch, spec, config)(operands, eps, num_blocks)
    return result


def _allocate(spec: QuantizeSpec, values: Tensor, num_segments: int) -> QuantizedRows:
    (rows, columns), device = values.shape, values.device

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def tiles(direction: str) -> Tensor | None:
        return empty(*tile_shape(rows, num_segments, columns, direction)) if spec.writes_tiles else None

    groups = num_row_blocks(rows, num_segments, GROUP)
    return QuantizedRows(
        data=empty(rows, columns),
        scales=empty(num_row_blocks(rows, num_segments, BLOCK), columns // BLOCK),
        row_tiles=tiles("row"),
        column_tiles=tiles("column"),
        transposed=empty(groups, columns, GROUP) if spec.writes_transposed else None,
        rstd=empty(rows, dtype=torch.float32) if spec.weight_dtype else None,
        delta=empty(rows, columns // spec.delta_columns, dtype=torch.float32) if spec.delta_columns else None,
    )


def _without_rows(result: QuantizedRows) -> QuantizedRows:
    for tensor in (result.scales, result.transposed):
        if tensor is not None:
            tensor.zero_()
    for tiles in (result.row_tiles, result.column_tiles):
        if tiles is not None:
            tiles.fill_(SCALE_ONE)
    return result
