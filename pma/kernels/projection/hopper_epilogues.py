"""What becomes of a warpgroup's sums of a projection on Hopper: they are quantised, or stored in a float dtype.

A thread holds the sums (e, r, j) of two rows, r = 0, 1, and 128 columns. The weight's rows lie in shared memory in an
order (`lane_order`) that gives lane q of four that share a row runs of neighbouring columns, 16 bytes of the result:

    position 8j + 2q + e of 4·run positions is column run·q + 2j + e        run = 16 (E4M3), 8 (bf16), 4 (fp32)

Rows past the segment's end hold products of other rows: they are selected away.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr

from pma.kernels.blocks.block_quantize import clear_unused_scales, store_compact_scales, with_bytes
from pma.kernels.blocks.block_scales import inverse_scale, max_magnitude, scale_byte
from pma.kernels.blocks.memory import clear_rows, store_words
from pma.kernels.blocks.quad_transpose import transpose_matrix, transpose_quad
from pma.kernels.blocks.row_tiles import RowTile
from pma.kernels.blocks.segments import first_slot
from pma.kernels.blocks.transpose import permute_bytes
from pma.kernels.blocks.warpgroup_product import LANE_ROWS, WARP_ROWS
from pma.kernels.compile import CUTE_DTYPES
from pma.kernels.projection.hopper_operands import HopperProjectionOperands, Place, Shared
from pma.kernels.projection.hopper_spec import (
    TILE,
    WARPGROUPS,
    HopperGemmQuantizeSpec,
    HopperGemmSpec,
)
from pma.layouts import BLOCK
from pma.layouts.mxfp8 import SCALE_NAN
from pma.layouts.transposed import GROUP, permuted_column

HALF = TILE // 2  # columns of a tile in which each of four lanes has 16 neighbours
HALF_GROUPS = HALF // 8  # of indices j
PAIR_BARRIER = 1  # named barriers 1 … 4 of two warps that hold a row block


class QuantizeEpilogue:
    """Sums → MXFP8: payload, compact scales and, if asked for, the transposed payload."""

    leaves_registers = True  # for chunks of the next column tile

    def __init__(self, spec: HopperGemmQuantizeSpec):
        self.spec = spec
        self.halves_of_scale = spec.columns_per_scale // HALF

    @cute.jit
    def store(
        self, o: HopperProjectionOperands, shared: Shared, facts: RowTile, sums: cute.Tensor, column_tile: Int32,
        turn: Int32,
    ) -> Int32:  # fmt: skip
        """Quantise and store the thread's part of a tile; the whole warpgroup calls.

        turn: of exchanging maxima. → the next
        """
        place = place_of_thread()
        word = Uint32(0)
        if place.row_block() * BLOCK < facts.num_rows:
            bits = self.amax_bits(shared, facts, sums, place, turn)
            payload = cute.make_rmem_tensor((4, LANE_ROWS, 2), Uint32)
            for half in cutlass.range_constexpr(2):
                byte = scale_byte(bits[half // self.halves_of_scale], self.spec.headroom_exponent)
                word = with_bytes(word, byte, 2 * half, 2)
                self.cast(sums, payload, half, byte)
            self.store_payload(o, facts, payload, column_tile, place)
            if const_expr(self.spec.writes_transposed):
                self.store_transposed(o, facts, payload, column_tile, place)
            turn += 1
        self.store_scales(o, facts, word, column_tile)
        return turn

    @cute.jit
    def store_scales(self, o: HopperProjectionOperands, facts: RowTile, word: Uint32, column_tile: Int32):
        """Store a row block's scale bytes, and those of a slot that no segment uses."""
        place = place_of_thread()
        if place.warp % 2 == 0:
            blocks = const_expr(TILE // BLOCK)
            store_compact_scales(o.scales, facts, word, (place.row_block(), column_tile * blocks, blocks))

    @cute.jit
    def amax_bits(self, shared: Shared, facts: RowTile, sums: cute.Tensor, place: Place, turn: Int32):
        """Bits of the maximum of 32 rows and the columns of a scale, for each scale; two warps call."""
        scales = const_expr(2 // self.halves_of_scale)
        bits = cute.make_rmem_tensor(scales, Uint32)
        for scale in cutlass.range_constexpr(scales):
            maximum = Float32(0.0)
            for r in cutlass.range_constexpr(LANE_ROWS):
                of_row = Float32(0.0)
                first = scale * self.halves_of_scale * HALF_GROUPS
                for j in cutlass.range_constexpr(first, first + self.halves_of_scale * HALF_GROUPS):
                    for e in cutlass.range_constexpr(2):
                        of_row = max_magnitude(of_row, sums[e, r, j])
                maximum = max_magnitude(maximum, of_row if place.row(r) < facts.num_rows else Float32(0.0))
            bits[scale] = cute.arch.warp_redux_sync(maximum.bitcast(Uint32), "umax")
        if place.lane == 0:
            for scale in cutlass.range_constexpr(scales):
                shared.maxima[scale, turn % 2, place.warp] = bits[scale]
        cute.arch.barrier(barrier_id=PAIR_BARRIER + place.row_block(), number_of_threads=64)
        for scale in cutlass.range_constexpr(scales):
            bits[scale] = cutlass.max(bits[scale], Uint32(shared.maxima[scale, turn % 2, place.warp ^ 1]))
        return bits

    @cute.jit
    def cast(self, sums: cute.Tensor, payload: cute.Tensor, half: cutlass.Constexpr[int], byte: Int32):
        """Payload words (k, r) of a half tile: 16 neighbouring columns of a row; 0 under the scale NaN."""
        inverse = inverse_scale(byte)
        four, cast = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float8E4M3FN)
        for r in cutlass.range_constexpr(LANE_ROWS):
            for k in cutlass.range_constexpr(4):
                for i in cutlass.range_constexpr(4):
                    four[i] = sums[i % 2, r, half * HALF_GROUPS + 2 * k + i // 2] * inverse
                cast.store(four.load().to(Float8E4M3FN))  # saturates
                word = cute.recast_tensor(cast, Uint32)[0]
                payload[k, r, half] = Uint32(0) if byte == SCALE_NAN else word

    @cute.jit
    def store_payload(
        self, o: HopperProjectionOperands, facts: RowTile, payload: cute.Tensor, column_tile: Int32, place: Place
    ):
        for r in cutlass.range_constexpr(LANE_ROWS):
            if place.row(r) < facts.num_rows:
                row = Int64(facts.first_row + place.row(r)) * self.spec.out_columns
                for half in cutlass.range_constexpr(2):
                    column = column_tile * TILE + half * HALF
                    if const_expr(self.spec.has_whole_tiles) or column < self.spec.out_columns:
                        store_words(o.out, row + column + GROUP * (place.lane % 4), payload[None, r, half])

    @cute.jit
    def store_transposed(
        self, o: HopperProjectionOperands, facts: RowTile, payload: cute.Tensor, column_tile: Int32, place: Place
    ):
        """Store the warp's 16 rows as one group: 16 bytes of a column in each lane, zeros for rows that don't exist.

        A matrix of 8 × 8 pairs of bytes, rows g and g + 8, has the columns 2k and 2k + 1 of each lane's run.
        """
        lane, words = place.lane, cute.make_rmem_tensor(4, Uint32)
        rows = [place.row(r) < facts.num_rows for r in range(LANE_ROWS)]
        group = facts.begin // GROUP + facts.segment + (facts.first_row - facts.begin) // GROUP + place.warp
        if place.warp * WARP_ROWS < facts.num_rows:
            for half in cutlass.range_constexpr(2):
                for quarter in cutlass.range_constexpr(2):
                    for k in cutlass.range_constexpr(4):
                        pair = [payload[2 * quarter + k // 2, r, half] for r in range(LANE_ROWS)]
                        pair = [pair[r] if rows[r] else Uint32(0) for r in range(LANE_ROWS)]
                        matrix = permute_bytes(*pair, Int32(0x7362 if const_expr(k % 2) else 0x5140))
                        words[k] = permute_bytes(transpose_matrix(matrix), Uint32(0), Int32(0x3120))
                    transpose_quad(words)
                    column = column_tile * TILE + half * HALF + 8 * quarter
                    column += GROUP * (lane // 8) + 2 * (lane % 4) + lane // 4 % 2
                    if const_expr(self.spec.has_whole_tiles) or column < self.spec.out_columns:
                        row = Int64(group) * self.spec.out_columns + permuted_column(column)
                        store_words(o.transposed, row * GROUP, words)

    @cute.jit
    def store_nothing(self, o: HopperProjectionOperands, facts: RowTile, column_tile: Int32):
        """What a tile without rows leaves: scale bytes of a slot that no segment uses."""
        self.store_scales(o, facts, Uint32(0), column_tile)

    @cute.jit
    def end_tile(self, o: HopperProjectionOperands, facts: RowTile, columns):
        """Zero the group, if any, between a segment's last and the next segment's first. columns: (first, last + 1)."""
        if const_expr(self.spec.writes_transposed):
            end = Int32(-1)
            if facts.segment >= 0:
                end = Int32(o.offsets[facts.segment + 1])
            has_begun = (facts.num_rows > 0) | (facts.first_row == facts.begin)
            if has_begun & (facts.first_row + facts.num_rows == end):
                used = facts.begin // GROUP + facts.segment + (end - facts.begin + GROUP - 1) // GROUP
                if used < end // GROUP + facts.segment + 1:
                    first, last = columns
                    worker, workers = workers_of_cta()
                    start = Int64(used) * self.spec.out_columns
                    clear_chunks(o.transposed, start + first, start + last, worker, workers)

    @cute.jit
    def clear_outside(self, o: HopperProjectionOperands):
        """Zero the payload, the scale slots and the groups in front of the first segment and behind the last."""
        clear_outside_rows(o, self.spec.out_columns)
        workers = workers_of_grid()
        clear_unused_scales(o.scales, o.offsets, workers)
        if const_expr(self.spec.writes_transposed):
            used = first_slot(o.offsets, cute.size(o.offsets, mode=[0]) - 1, GROUP)
            for begin, end in ((Int32(0), Int32(o.offsets[0]) // GROUP), (used, cute.size(o.transposed, mode=[0]))):
                clear_rows(o.transposed, begin, end, (self.spec.out_columns * GROUP, *workers))


class StoreEpilogue:
    """Sums → bf16 or fp32 rows."""

    leaves_registers = False

    def __init__(self, spec: HopperGemmSpec):
        self.spec = spec

    @cute.jit
    def store(
        self, o: HopperProjectionOperands, shared: Shared, facts: RowTile, sums: cute.Tensor, column_tile: Int32,
        turn: Int32,
    ) -> Int32:  # fmt: skip
        """Store the thread's part of a tile."""
        place, dtype, run = place_of_thread(), CUTE_DTYPES[self.spec.out_dtype], self.spec.run_columns
        values = cute.make_rmem_tensor(run, dtype)
        numbers = cute.make_rmem_tensor(run, Float32)
        for r in cutlass.range_constexpr(LANE_ROWS):
            if place.row(r) < facts.num_rows:
                row = Int64(facts.first_row + place.row(r)) * self.spec.out_columns
                for piece in cutlass.range_constexpr(TILE // (4 * run)):
                    for i in cutlass.range_constexpr(run):
                        numbers[i] = sums[i % 2, r, piece * (run // 2) + i // 2]
                    values.store(numbers.load().to(dtype))
                    column = column_tile * TILE + piece * 4 * run
                    if const_expr(self.spec.has_whole_tiles) or column < self.spec.out_columns:
                        element = row + column + run * (place.lane % 4)
                        store_words(o.out, element * (dtype.width // 8), cute.recast_tensor(values, Uint32))
        return turn

    @cute.jit
    def store_nothing(self, o: HopperProjectionOperands, facts: RowTile, column_tile: Int32):
        pass

    @cute.jit
    def end_tile(self, o: HopperProjectionOperands, facts: RowTile, columns):
        pass

    @cute.jit
    def clear_outside(self, o: HopperProjectionOperands):
        """Zero the rows in front of the first segment and behind the last."""
        clear_outside_rows(o, self.spec.out_columns * self.spec.out_dtype.itemsize)


@cute.jit
def clear_outside_rows(o: HopperProjectionOperands, row_bytes: cutlass.Constexpr[int]):
    head, tail = Int32(o.offsets[0]), Int32(o.offsets[cute.size(o.offsets, mode=[0]) - 1])
    for begin, end in ((Int32(0), head), (tail, cute.size(o.x, mode=[0]))):
        clear_rows(o.out, begin, end, (row_bytes, *workers_of_grid()))


@cute.jit
def clear_chunks(tensor: cute.Tensor, begin: Int64, end: Int64, worker: Int32, workers: Int32):
    """Zero pieces begin … end − 1 of 16 bytes."""
    zeros = cute.make_rmem_tensor(4, Uint32)
    zeros.fill(0)
    index = begin + worker
    while index < end:
        store_words(tensor, index * GROUP, zeros)
        index += workers


@cute.jit
def place_of_thread() -> Place:
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return Place(warp - 4, cute.arch.lane_idx())


@cute.jit
def workers_of_cta():
    """(index of this thread, number of threads) among those that compute."""
    thread, _, _ = cute.arch.thread_idx()
    return thread - 128, Int32(128 * WARPGROUPS)


@cute.jit
def workers_of_grid():
    """The same of all CTAs."""
    worker, workers = workers_of_cta()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    return block * workers + worker, blocks * workers
