"""2^x on the special-function unit, or for a part of the elements as a polynomial on the FMA pipes.

Sixteen exponentials a clock and SM are the tightest bound of attention in 8 bits; the FMA pipes have room beside them
(FlashAttention-4's idea). x = n + f with f in [−1/2, 1/2]: adding 1.5·2^23 leaves n in the low bits, a polynomial of
degree 3 gives 2^f, and n goes to the exponent field.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

ROUND_TO_INTEGER = 1.5 * 2.0**23
LEAST = -126.0  # smaller powers would leave the exponent field; they are 0 once cast to 8 bits
# Minimax in relative error, 7.5e-5: a fiftieth of E4M3's half ulp.
COEFFICIENTS = (0.9999280571937561, 0.6932609677314758, 0.2426111251115799, 0.0551716685295105)


@cute.jit
def exp2_pair(x: Float32, y: Float32):
    """(2^x, 2^y) by the polynomial, for x, y <= 127. NaN gives the greatest finite number: let it show elsewhere."""
    x, y = cute.arch.fmax(x, LEAST, nan=True), cute.arch.fmax(y, LEAST, nan=True)
    magic = (Float32(ROUND_TO_INTEGER), Float32(ROUND_TO_INTEGER))
    rounded = cute.arch.add_packed_f32x2((x, y), magic)
    whole = cute.arch.sub_packed_f32x2(rounded, magic)
    f = cute.arch.sub_packed_f32x2((x, y), whole)
    power = (Float32(COEFFICIENTS[-1]), Float32(COEFFICIENTS[-1]))
    for coefficient in COEFFICIENTS[-2::-1]:
        power = cute.arch.fma_packed_f32x2(power, f, (Float32(coefficient), Float32(coefficient)))
    return _times_power_of_two(power[0], rounded[0]), _times_power_of_two(power[1], rounded[1])


@cute.jit
def _times_power_of_two(value: Float32, rounded: Float32) -> Float32:
    """value · 2^n, n in the low bits of `rounded`."""
    return Float32(Int32(value.bitcast(Int32) + (rounded.bitcast(Int32) << 23)).bitcast(Float32))


@cute.jit
def exp2_of_row(values: cute.Tensor, factor: Float32, shift: Float32, emulated: cutlass.Constexpr[int]):
    """values ← 2^(values·factor + shift), in place; of every 16 pairs `emulated` by the polynomial."""
    for pair in cutlass.range_constexpr(cute.size(values) // 2):
        x, y = cute.arch.fma_packed_f32x2((values[2 * pair], values[2 * pair + 1]), (factor, factor), (shift, shift))
        if cutlass.const_expr(pair * emulated % 16 + emulated > 15):  # spread evenly
            values[2 * pair], values[2 * pair + 1] = exp2_pair(x, y)
        else:
            values[2 * pair], values[2 * pair + 1] = cute.arch.exp2(x), cute.arch.exp2(y)
