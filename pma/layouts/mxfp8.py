"""The MXFP8 format (OCP Microscaling v1.0): E4M3 payload, one E8M0 scale byte for a block, value = payload·2^(e−127).

Blocks are [32 rows, 32 columns]; rows are counted from each segment's first row. The payload lies at the jagged
positions [T, C]; scales are compact [T // 32 + B, C // 32] (slots of `pma.jagged.row_blocks`). Both are uint8
between operators.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pma.numerics import E4M3_MAX

BLOCK = 32
SCALE_BIAS = 127
SCALE_NAN = 255
SCALE_ONE = 127


class MXFP8Tensor(NamedTuple):
    """A jagged matrix in MXFP8."""

    data: Tensor  # [T, C] uint8, bits of float8_e4m3fn
    scales: Tensor  # [T // 32 + B, C // 32] uint8, bits of float8_e8m0fnu


def amax_bits(values: Tensor) -> Tensor:
    """Bits of |values| as int32, ordered like the magnitudes with Inf and NaN on top. float32 → int32."""
    return values.view(torch.int32) & 0x7FFFFFFF


def scale_from_amax_bits(bits: Tensor, headroom_exponent: int = 0) -> Tensor:
    """E8M0 byte of the least 2^k with amax <= 448·2^k (plus headroom), from the bits of the fp32 amax.

    448 = 1.75·2^8, so with exponent E and mantissa m:  k = E − 8 + (m > 0x600000). A subnormal or zero amax gives
    byte 0, a NaN or Inf gives 255. int32 [...] → uint8 [...].
    """
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    byte = (exponent - 8 + (mantissa > 0x600000).int() + headroom_exponent).clamp(0, 254)
    byte = torch.where(bits == 0, 0, byte)
    return torch.where(exponent == 255, SCALE_NAN, byte).to(torch.uint8)


def decode_scales(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(e−127) for each byte, NaN for 255; byte 0 is the subnormal 2^−127. uint8 → float32 or float64, exact."""
    byte = scales.int()
    normal = (byte << 23).view(torch.float32)
    value = torch.where(byte == 0, 2.0**-127, normal)
    return torch.where(byte == SCALE_NAN, float("nan"), value).to(dtype)


def inverse_scales(scales: Tensor) -> Tensor:
    """2^(127−e) as fp32, exact for every byte (254 → the subnormal 2^−127); 255 → 0, so that its payload is 0."""
    byte = scales.int()
    normal = ((254 - byte).clamp(min=0) << 23).view(torch.float32)
    value = torch.where(byte == 254, 2.0**-127, normal)
    return torch.where(byte == SCALE_NAN, 0.0, value)


def to_payload(scaled: Tensor) -> Tensor:
    """Round to nearest even E4M3, saturating at ±448. float32 → uint8."""
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_payload(data: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 bits as numbers, exact. uint8 → dtype."""
    return data.view(torch.float8_e4m3fn).to(dtype)


def round_e4m3(values: Tensor) -> Tensor:
    """`values` rounded to E4M3 and back, saturating at ±448. float32 → float32."""
    return from_payload(to_payload(values))
