"""What a thread does with its scores of a KV tile on Hopper, in fp32 or in pairs of fp16.

A thread holds the values (e, r, j) of two rows r (`pma/kernels/blocks/warpgroup_product.py`); j // 4 is the block of 32
events. Scores are sums of payloads; a factor for each block brings them to octaves:

    P = 2^(score · factor + shift + fold)

with the shift of the row (what P is relative to, and its static scale) and the fold of the block (V's scale).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32

from pma.kernels.attention_forward.hopper_spec import TILE
from pma.kernels.blocks import half_pairs as half
from pma.kernels.blocks.warpgroup_product import BLOCK, COLUMN_GROUP, LANE_ROWS

BLOCKS = TILE // BLOCK
GROUPS = TILE // COLUMN_GROUP
BLOCK_GROUPS = BLOCK // COLUMN_GROUP
LEAST_FACTOR, MOST_FACTOR = 2.0**-100, 2.0**100  # so that −inf stays −inf, and 0 stays 0


class FloatScores:
    """Scores in fp32."""

    dtype = Float32

    @cute.jit
    def view(self, accumulators: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(accumulators.iterator, cute.make_layout((2, LANE_ROWS, GROUPS)))

    @cute.jit
    def new_weights(self) -> cute.Tensor:
        return cute.make_rmem_tensor(cute.make_layout((2, LANE_ROWS, GROUPS)), Float32)

    @cute.jit
    def encode(self, value: Float32) -> Uint32:
        """A fold, or what undoes it, as `exponentials` and `total` take it."""
        return value.bitcast(Uint32)

    @cute.jit
    def round_shift(self, shift: Float32) -> Float32:
        return shift

    @cute.jit
    def factors(self, scales: cute.Tensor, q_factor: Float32) -> cute.Tensor:
        """Octaves of a unit of score, for each block. scales: words of fp32."""
        factors = cute.make_rmem_tensor(BLOCKS, Float32)
        for block in cutlass.range_constexpr(BLOCKS):
            factors[block] = clamp(scales[block].bitcast(Float32) * q_factor, LEAST_FACTOR, MOST_FACTOR)
        return factors

    @cute.jit
    def mask(self, scores: cute.Tensor, count: Int32):
        """−inf for events that don't exist; of those from the lane's first column on `count` do."""
        for j in cutlass.range_constexpr(GROUPS):
            for r in cutlass.range_constexpr(LANE_ROWS):
                for e in cutlass.range_constexpr(2):
                    is_there = count > COLUMN_GROUP * j + e
                    scores[e, r, j] = scores[e, r, j] if is_there else -Float32.inf

    @cute.jit
    def maxima(self, scores: cute.Tensor, factors: cute.Tensor) -> cute.Tensor:
        """Largest of the lane's scores of each row, in octaves; NaN is passed over."""
        maxima = cute.make_rmem_tensor(LANE_ROWS, Float32)
        for r in cutlass.range_constexpr(LANE_ROWS):
            for block in cutlass.range_constexpr(BLOCKS):
                first = block * BLOCK_GROUPS
                largest = cute.arch.fmax(scores[0, r, first], scores[1, r, first])
                for j in cutlass.range_constexpr(first + 1, first + BLOCK_GROUPS):
                    largest = cute.arch.fmax(largest, cute.arch.fmax(scores[0, r, j], scores[1, r, j]))
                octaves = largest * factors[block]
                maxima[r] = octaves if cutlass.const_expr(block == 0) else cute.arch.fmax(maxima[r], octaves)
        return maxima

    @cute.jit
    def exponentials(
        self, weights: cute.Tensor, scores: cute.Tensor, factors: cute.Tensor, shifts: cute.Tensor, folds: cute.Tensor
    ):
        for r in cutlass.range_constexpr(LANE_ROWS):
            for block in cutlass.range_constexpr(BLOCKS):
                shift = shifts[r] + folds[block].bitcast(Float32)
                for j in cutlass.range_constexpr(block * BLOCK_GROUPS, (block + 1) * BLOCK_GROUPS):
                    for e in cutlass.range_constexpr(2):
                        octaves = scores[e, r, j] * factors[block] + shift
                        weights[e, r, j] = cute.math.exp2(octaves, fastmath=True)

    @cute.jit
    def total(self, weights: cute.Tensor, unfolds: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
        """Sum of the lane's P of a row, without folds."""
        total = Float32(0.0)
        for block in cutlass.range_constexpr(BLOCKS):
            first = block * BLOCK_GROUPS
            of_block = weights[0, r, first] + weights[1, r, first]
            for j in cutlass.range_constexpr(first + 1, first + BLOCK_GROUPS):
                of_block += weights[0, r, j] + weights[1, r, j]
            total += of_block * unfolds[block].bitcast(Float32)
        return total

    @cute.jit
    def cast(self, weights: cute.Tensor, words: cute.Tensor):
        """P as E4M3, saturating, in the words of an operand A."""
        four = cute.make_rmem_tensor(4, Float32)
        payload = cute.make_rmem_tensor(4, cutlass.Float8E4M3FN)
        for word in cutlass.range_constexpr(GROUPS):
            r, j = word % 2, 2 * (word // 2)
            for i in cutlass.range_constexpr(4):
                four[i] = weights[i % 2, r, j + i // 2]
            payload.store(four.load().to(cutlass.Float8E4M3FN))
            words[word] = cute.recast_tensor(payload, Uint32)[0]


class HalfScores:
    """Scores in pairs e = 0, 1 of fp16."""

    dtype = Float16

    @cute.jit
    def view(self, accumulators: cute.Tensor) -> cute.Tensor:
        pointer = cute.recast_ptr(accumulators.iterator, dtype=Uint32)
        return cute.make_tensor(pointer, cute.make_layout((LANE_ROWS, GROUPS)))

    @cute.jit
    def new_weights(self) -> cute.Tensor:
        return cute.make_rmem_tensor(cute.make_layout((LANE_ROWS, GROUPS)), Uint32)

    @cute.jit
    def encode(self, value: Float32) -> Uint32:
        return half.pair_of(value)

    @cute.jit
    def round_shift(self, shift: Float32) -> Float32:
        return half.rounded_to_half(shift)

    @cute.jit
    def factors(self, scales: cute.Tensor, q_factor: Float32) -> cute.Tensor:
        factors = cute.make_rmem_tensor(BLOCKS, Uint32)
        for block in cutlass.range_constexpr(BLOCKS):
            factors[block] = half.pair_of_factor(scales[block].bitcast(Float32) * q_factor)
        return factors

    @cute.jit
    def mask(self, scores: cute.Tensor, count: Int32):
        nothing = Uint32(half.MINUS_INFINITY << 16 | half.MINUS_INFINITY)
        for j in cutlass.range_constexpr(GROUPS):
            for r in cutlass.range_constexpr(LANE_ROWS):
                pair = Uint32(scores[r, j])
                first_only = Uint32(pair & 0xFFFF | half.MINUS_INFINITY << 16)
                masked = first_only if count > COLUMN_GROUP * j else nothing
                scores[r, j] = pair if count > COLUMN_GROUP * j + 1 else masked

    @cute.jit
    def maxima(self, scores: cute.Tensor, factors: cute.Tensor) -> cute.Tensor:
        maxima = cute.make_rmem_tensor(LANE_ROWS, Float32)
        for r in cutlass.range_constexpr(LANE_ROWS):
            both = Uint32(0)
            for block in cutlass.range_constexpr(BLOCKS):
                first = block * BLOCK_GROUPS
                left = half.max_of_pairs(scores[r, first], scores[r, first + 1])
                right = half.max_of_pairs(scores[r, first + 2], scores[r, first + 3])
                octaves = half.mul_pairs(half.max_of_pairs(left, right), factors[block])
                both = octaves if cutlass.const_expr(block == 0) else half.max_of_pairs(both, octaves)
            maxima[r] = half.largest_of(both)
        return maxima

    @cute.jit
    def exponentials(
        self, weights: cute.Tensor, scores: cute.Tensor, factors: cute.Tensor, shifts: cute.Tensor, folds: cute.Tensor
    ):
        for r in cutlass.range_constexpr(LANE_ROWS):
            row_shift = half.pair_of(shifts[r])
            for block in cutlass.range_constexpr(BLOCKS):
                shift = half.add_pairs(row_shift, folds[block])
                for j in cutlass.range_constexpr(block * BLOCK_GROUPS, (block + 1) * BLOCK_GROUPS):
                    weights[r, j] = half.exp2_of_pair(half.fma_pairs(scores[r, j], factors[block], shift))

    @cute.jit
    def lower(self, weights: cute.Tensor, row_factors: cute.Tensor):
        """Multiply each row by its factor, that of a maximum which has moved."""
        for r in cutlass.range_constexpr(LANE_ROWS):
            factor = half.pair_of(row_factors[r])
            for j in cutlass.range_constexpr(GROUPS):
                weights[r, j] = half.mul_pairs(weights[r, j], factor)

    @cute.jit
    def total(self, weights: cute.Tensor, unfolds: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
        both = Uint32(0)
        for block in cutlass.range_constexpr(BLOCKS):
            first = block * BLOCK_GROUPS
            left = half.add_pairs(weights[r, first], weights[r, first + 1])
            right = half.add_pairs(weights[r, first + 2], weights[r, first + 3])
            both = half.fma_pairs(half.add_pairs(left, right), unfolds[block], both)
        return half.sum_of_pair(both)

    @cute.jit
    def cast(self, weights: cute.Tensor, words: cute.Tensor):
        for word in cutlass.range_constexpr(GROUPS):
            r, j = word % 2, 2 * (word // 2)
            words[word] = half.e4m3_of_pairs(weights[r, j], weights[r, j + 1])


@cute.jit
def clamp(value: Float32, least: cutlass.Constexpr[float], most: cutlass.Constexpr[float]) -> Float32:
    """The value between the two; NaN stays."""
    return cute.arch.fmin(cute.arch.fmax(value, least, nan=True), most, nan=True)
