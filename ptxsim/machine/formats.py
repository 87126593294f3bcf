"""Number formats of the tensor cores and of the TMA unit: codes to float64 and back.

Every format of at most 16 bits is exact in float64, so decoding never rounds. Encoding rounds once, to nearest even,
straight from the given float64 or float32 value.

Names are those of PTX without the dot: "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "e8m0", "bf16", "f16", "tf32", "f32".
Layouts: PTX ISA "Alternate Floating-Point Data Formats" and the OCP Microscaling specification. Codes of fewer than
eight bits are taken from the low bits of a byte.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class FloatFormat:
    """Sign, exponent and mantissa bits of a binary floating-point format, and what its topmost codes mean.

    special: "ieee" (topmost exponent: infinities and NaNs), "nan" (only the topmost code of either sign is NaN, no
    infinities) or "finite" (every code is a number).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    special: str

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def max_code(self) -> int:
        """Code of the largest finite number."""
        topmost = (1 << (self.bits - 1)) - 1
        if self.special == "ieee":
            return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
        return topmost - 1 if self.special == "nan" else topmost

    @property
    def nan_code(self) -> int:
        """The NaN that conversions produce (PTX ISA, cvt: 0x7f for e4m3 and e5m2, 0x7fff for f16 and bf16)."""
        if self.special == "finite":
            raise ValueError(f"{self.name} has no NaN")
        return (1 << (self.bits - 1)) - 1


E4M3 = FloatFormat("e4m3", 4, 3, "nan")
E5M2 = FloatFormat("e5m2", 5, 2, "ieee")
E2M3 = FloatFormat("e2m3", 2, 3, "finite")
E3M2 = FloatFormat("e3m2", 3, 2, "finite")
E2M1 = FloatFormat("e2m1", 2, 1, "finite")
BF16 = FloatFormat("bf16", 8, 7, "ieee")
F16 = FloatFormat("f16", 5, 10, "ieee")

FORMATS = {known.name: known for known in (E4M3, E5M2, E2M3, E3M2, E2M1, BF16, F16)}
ELEMENT_BYTES = {
    "e4m3": 1,
    "e5m2": 1,
    "e2m3": 1,
    "e3m2": 1,
    "e2m1": 1,
    "e8m0": 1,
    "bf16": 2,
    "f16": 2,
    "tf32": 4,
    "f32": 4,
}
STORAGE = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


# ------------------------------------------------------------------------------------------- codes to numbers


@cache
def table(name: str) -> FloatArray:
    """Values of all byte codes of an 8-, 6- or 4-bit format, or of all codes of bf16 and f16. → float64, read-only.

    Bits of the byte above the format's width are ignored. "e8m0": 2^(code − 127), code 255 is NaN.
    """
    if name == "e8m0":
        values = np.exp2(np.arange(256) - 127.0)
        values[255] = np.nan
    else:
        known = _known(name, 16)
        values = _numbers(known, np.arange(1 << max(known.bits, 8)))
    values.flags.writeable = False
    return values


def _known(name: str, max_bits: int) -> FloatFormat:
    known = FORMATS.get(name)
    if known is None or known.bits > max_bits:
        allowed = sorted(n for n, f in FORMATS.items() if f.bits <= max_bits)
        raise ValueError(f"format {name!r}; allowed: {', '.join(allowed)}")
    return known


def _numbers(known: FloatFormat, codes: Array) -> FloatArray:
    mantissa = (codes & ((1 << known.mantissa_bits) - 1)).astype(np.float64)
    exponent = (codes >> known.mantissa_bits) & ((1 << known.exponent_bits) - 1)
    sign = np.where((codes >> (known.bits - 1)) & 1, -1.0, 1.0)
    hidden = np.where(exponent == 0, 0.0, float(1 << known.mantissa_bits))
    scale = np.exp2(np.maximum(exponent, 1) - float(known.bias + known.mantissa_bits))
    values = sign * (hidden + mantissa) * scale
    magnitude = codes & ((1 << (known.bits - 1)) - 1)
    above = magnitude > known.max_code
    is_infinite = above & (magnitude == known.max_code + 1) & (known.special == "ieee")
    return np.where(above, np.where(is_infinite, sign * np.inf, np.nan), values)


def decode(name: str, codes: Array) -> FloatArray:
    """Numbers of an array of codes, in the same shape. → float64

    codes: uint8 for formats of at most 8 bits, uint16 for "bf16" and "f16", uint32 for "tf32" and "f32". "tf32" reads
    the upper 19 bits of a 32-bit word and ignores the lower 13, as the tensor core does.
    """
    if name == "tf32":
        narrow = (codes & np.uint32(0xFFFFE000)).view(np.float32)
    elif name == "f32":
        narrow = codes.view(np.float32)
    else:
        return table(name).take(codes)
    with np.errstate(invalid="ignore"):  # numpy warns of signalling NaNs
        return narrow.astype(np.float64)


# ------------------------------------------------------------------------------------------- numbers to codes


def encode(name: str, values: Array, saturate: bool = False) -> Array:
    """Codes of numbers, rounded to nearest even. → uint8 or uint16, same shape as `values`

    values: float64 or float32; both are rounded once. saturate: numbers beyond the largest finite one, infinities
    included, become that number (PTX ISA, cvt.satfinite); otherwise they become infinity, or NaN in e4m3. Formats
    without NaN always saturate and refuse NaN. Negative zero keeps its sign.
    """
    if name == "bf16" and values.dtype == np.float32 and not saturate:
        return _bf16_of_float32(values)
    known = _known(name, 16)
    saturate |= known.special == "finite"
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = np.asarray(values, np.float64)
    is_nan = np.isnan(values)
    sign = np.signbit(values).astype(np.int64) << (known.bits - 1)
    codes = _rounded_magnitude(known, np.where(is_nan, 0.0, np.abs(values)))
    overflow = known.max_code + 1 if known.special == "ieee" else known.max_code if saturate else known.nan_code
    codes = np.where(codes > known.max_code, known.max_code if saturate else overflow, codes) | sign
    if is_nan.any():
        codes = np.where(is_nan, known.nan_code, codes)
    return codes.astype(np.uint8 if known.bits <= 8 else np.uint16)


def _rounded_magnitude(known: FloatFormat, magnitude: FloatArray) -> NDArray[np.int64]:
    """Code of a number ≥ 0 without overflow handling: anything too large gives some code above `max_code`."""
    smallest_normal = 1 - known.bias
    largest = float(_numbers(known, np.array([known.max_code]))[0])
    magnitude = np.minimum(magnitude, 4 * largest)
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, smallest_normal), smallest_normal)
    steps = np.rint(np.ldexp(magnitude, known.mantissa_bits - exponent)).astype(np.int64)
    # A normal number has `steps` in [2^m, 2^(m+1)]. Adding instead of or-ing lets a rounding that reaches the upper
    # end carry into the exponent, and makes subnormals (steps below 2^m) come out with exponent field 0.
    return ((exponent - smallest_normal).astype(np.int64) << known.mantissa_bits) + steps


def _bf16_of_float32(values: Array) -> Array:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16).reshape(values.shape)


def tf32_of_float32(values: Array) -> Array:
    """Float32 numbers rounded to nearest even to the 10 mantissa bits of tf32. → float32, same shape"""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, bits).view(np.float32).reshape(values.shape)
