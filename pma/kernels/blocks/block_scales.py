"""E8M0 scales and E4M3 payloads on the device, bit for bit as `pma/layouts/mxfp8.py` has them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from pma.layouts.mxfp8 import SCALE_NAN, SCALE_ONE


@cute.jit
def scale_byte(amax_bits: Uint32, headroom_exponent: cutlass.Constexpr[int] = 0) -> Int32:
    """Byte of the least 2^k with amax <= 448·2^k, raised by the headroom, from the bits of the fp32 amax.

    0 for an amax of 0; 255 for NaN and Inf.
    """
    exponent = Int32(amax_bits >> 23)
    is_past_448 = Int32((amax_bits & Uint32(0x7FFFFF)) > Uint32(0x600000))
    byte = cutlass.min(cutlass.max(exponent - 8 + is_past_448 + headroom_exponent, 0), 254)
    if amax_bits == Uint32(0):
        byte = Int32(0)
    if exponent == 255:
        byte = Int32(SCALE_NAN)
    return byte


@cute.jit
def inverse_scale(byte: Int32) -> Float32:
    """2^(127−byte), exact (254 gives the subnormal 2^−127). Unspecified for 255, whose payload is 0 by selection."""
    bits = Uint32(254 - byte) << 23
    if byte >= 254:
        bits = Uint32(0x400000)
    return bits.bitcast(Float32)


@cute.jit
def block_scale(byte: Int32) -> Float32:
    """2^(byte−127), exact (0 gives the subnormal 2^−127); NaN for 255."""
    bits = Uint32(byte) << 23
    if byte == 0:
        bits = Uint32(0x400000)
    if byte == SCALE_NAN:
        bits = Uint32(0x7FC00000)
    return bits.bitcast(Float32)


@cute.jit
def max_magnitude(a: Float32, b: Float32) -> Float32:
    """max(a, |b|) for a >= 0; a NaN on either side wins."""
    return cute.arch.fmax(a, cute.math.absf(b), nan=True)


@cute.jit
def log2_of_scale(byte: Int32) -> Int32:
    """A scale that is NaN counts as the least one."""
    return (Int32(0) if byte == SCALE_NAN else byte) - SCALE_ONE


@cute.jit
def power_of_two(exponent: Int32) -> Float32:
    """2^exponent within 2^-126 … 2^127."""
    return Uint32(cutlass.min(cutlass.max(exponent + SCALE_ONE, 1), 2 * SCALE_ONE) << 23).bitcast(Float32)


@cute.jit
def floor_log2(value: Float32) -> Int32:
    """⌊log2⌋ of a value from 0 on, within −127 … 127."""
    return cutlass.min(Int32(value.bitcast(Uint32) >> 23) - SCALE_ONE, SCALE_ONE)
