"""Projection problems with Hopper's contract, and what its kernels are held to; in the simulator and on a GPU.

FP8 sums of the tensor core are cut behind their 13th bit, so a byte may differ from the reference where the exact
product lies as near a rounding boundary as such sums err: it must be what some value within that error gives.
"""

import importlib
from typing import NamedTuple

import torch
from torch import Tensor

from pma.jagged import equal_offsets, rows_to_blocks, segment_of_rows
from pma.kernels.projection.hopper_spec import HopperGemmQuantizeSpec, HopperGemmSpec, HopperProjectionSpec
from pma.layouts import BLOCK, MXFP8Tensor, dequantize, quantize, transpose_payload
from pma.layouts.mxfp8 import (
    SCALE_NAN,
    amax_bits,
    from_payload,
    inverse_scales,
    scale_from_amax_bits,
    to_payload,
)
from pma.reference import operators as reference
from pma.testing import FP8_SUM_ROUNDING

NAN_PAYLOAD = 0x7F
CUT = 1e-2  # of the bytes that sums which are cut change: those near a rounding boundary of E4M3
I32, I64, FP32 = torch.int32, torch.int64, torch.float32
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 700)
SHORT = (0, 130, 31, 0, 65)
MANY = (0,) * 40 + (1,) * 30 + (300, 33, 140, 1, 1)  # more row tiles than are announced before a place is used again
# name → (spec, lengths, multiprocessors): more row tiles than CTAs, more tiles of X than stages
WIDTHS: dict[str, tuple[HopperProjectionSpec, tuple[int, ...], int]] = {
    "quantize 128": (HopperGemmQuantizeSpec(128, 128, I64), LENGTHS, 1),
    "quantize 384, the whole weight in one CTA, transposed": (
        HopperGemmQuantizeSpec(384, 384, I64, writes_transposed=True), LENGTHS, 2,
    ),
    "quantize 512, heads of 64, two groups of CTAs": (
        HopperGemmQuantizeSpec(512, 512, I64, in_columns_per_scale=64, columns_per_scale=64), LENGTHS, 2,
    ),
}  # fmt: skip
OTHERS: dict[str, tuple[HopperProjectionSpec, tuple[int, ...], int]] = {
    "quantize 128 to 256, headroom": (HopperGemmQuantizeSpec(128, 256, I64, headroom_exponent=5), SHORT, 1),
    "quantize 192 to 192, one scale for a row, transposed": (
        HopperGemmQuantizeSpec(192, 192, I32, in_columns_per_scale=192, columns_per_scale=64, writes_transposed=True),
        SHORT, 1,
    ),
    "quantize, one segment of seeds": (HopperGemmQuantizeSpec(128, 128, I64), (200,), 4),
    "quantize 256, many segments, transposed": (
        HopperGemmQuantizeSpec(256, 256, I64, writes_transposed=True), MANY, 1,
    ),
    "quantize, streamed weight": (HopperGemmQuantizeSpec(2048, 128, I64), (130, 33), 1),
    "quantize 1024, more depth than stages": (HopperGemmQuantizeSpec(1024, 128, I64), SHORT, 1),
    "gemm 128": (HopperGemmSpec(128, 128, I64), LENGTHS, 1),
    "gemm 384": (HopperGemmSpec(384, 384, I64), SHORT, 1),
    "gemm 512 to 384, fp32": (HopperGemmSpec(512, 384, I64, out_dtype=FP32), SHORT, 2),
    "gemm 64 to 192": (HopperGemmSpec(64, 192, I32, in_columns_per_scale=64), SHORT, 1),
}  # fmt: skip
CASES = WIDTHS | OTHERS


class Problem(NamedTuple):
    """A jagged matrix and a weight, quantised."""

    x: MXFP8Tensor
    weight: MXFP8Tensor
    offsets: Tensor

    def to(self, device: str) -> "Problem":
        matrices = (MXFP8Tensor(*(each.to(device) for each in matrix)) for matrix in (self.x, self.weight))
        return Problem(*matrices, self.offsets.to(device))


def make_problem(spec: HopperProjectionSpec, lengths: tuple[int, ...], *, seed: int = 0, device="cpu") -> Problem:
    """Rows with a magnitude of their own, of X and of the weight; NaN payloads outside the segments."""
    generator = torch.Generator(device).manual_seed(1000 * spec.in_columns + seed)
    head, tail = (3, 5) if len(lengths) > 1 else (0, 0)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0) + head
    rows = int(offsets[-1]) + tail

    def normal(rows: int) -> Tensor:
        magnitudes = torch.exp(torch.randn(rows, 1, generator=generator, device=device))
        return torch.randn(rows, spec.in_columns, generator=generator, device=device) * magnitudes

    width = spec.in_columns_per_scale
    x = quantize(normal(rows), offsets, columns_per_scale=width)
    x.data[segment_of_rows(offsets, rows) < 0] = NAN_PAYLOAD
    weight = quantize(normal(spec.out_columns), one_segment(spec.out_columns, device), columns_per_scale=width)
    return Problem(x, weight, offsets.to(spec.offsets_dtype))


def one_segment(rows: int, device="cpu") -> Tensor:
    return equal_offsets(1, rows, torch.device(device))


def launch(spec: HopperProjectionSpec, p: Problem):
    sm90 = importlib.import_module("pma.kernels.projection.sm90")
    return sm90.launch(spec, sm90.HopperOperand(*p.x), sm90.HopperOperand(*p.weight), p.offsets)


class Exact(NamedTuple):
    """The float64 product, and how far a sum of the kernel can be from it."""

    values: Tensor
    error: Tensor


def exact_product(spec: HopperProjectionSpec, p: Problem) -> Exact:
    """An instruction cuts each of its terms and their sum behind the 13th bit of the largest, here of a chunk's."""
    x = dequantize(*p.x, p.offsets, torch.float64)
    x[segment_of_rows(p.offsets, len(x)) < 0] = 0
    weight = dequantize(*p.weight, one_segment(len(p.weight.data), x.device), torch.float64)
    largest = [each.abs().unflatten(1, (spec.chunks, -1)).amax(-1) for each in (x, weight)]
    cuts = spec.chunk // BLOCK * (BLOCK + 2)
    return Exact(x @ weight.t(), cuts * FP8_SUM_ROUNDING * (largest[0] @ largest[1].t()))


def check(spec: HopperProjectionSpec, p: Problem, actual) -> None:
    if isinstance(spec, HopperGemmQuantizeSpec):
        check_quantised(spec, p, actual)
    else:
        check_stored(spec, p, actual.out)


def check_quantised(spec: HopperGemmQuantizeSpec, p: Problem, actual) -> None:
    """Every byte: payload, compact scales, transposed payload."""
    rows, width = p.x.data.shape[0], spec.columns_per_scale
    data, scales = reference.gemm_quantize(p.x, p.weight, p.offsets, width, spec.headroom_exponent, False)
    exact = exact_product(spec, p)
    slots = rows_to_blocks(p.offsets, rows, BLOCK)
    is_inside = slots < scales.shape[0]
    amax = exact.values.new_zeros(scales.shape[0] + 1, spec.out_columns // width)
    bounds = []
    for sign in (-1, 1):
        each = (exact.values.abs() + sign * exact.error).clamp(min=0).view(rows, -1, width).amax(-1)
        block = amax.scatter_reduce(0, slots[:, None].expand_as(each), each, "amax").float()
        bytes_ = scale_from_amax_bits(amax_bits(block), spec.headroom_exponent)[:-1]
        bounds.append(bytes_.repeat_interleave(width // BLOCK, -1))
    assert torch.equal(actual.scales == SCALE_NAN, scales == SCALE_NAN)
    is_finite = scales != SCALE_NAN
    assert (actual.scales >= bounds[0])[is_finite].all() and (actual.scales <= bounds[1])[is_finite].all()
    of_rows = torch.cat([actual.scales, actual.scales.new_full((1, scales.shape[1]), SCALE_NAN)])[slots]
    inverse = inverse_scales(of_rows).repeat_interleave(BLOCK, -1)
    low, high = ((exact.values + sign * exact.error).float() * inverse for sign in (-1, 1))
    payload, is_finite = from_payload(actual.out), inverse != 0
    assert (payload >= from_payload(to_payload(low)))[is_finite].all()
    assert (payload <= from_payload(to_payload(high)))[is_finite].all()
    assert (actual.out[~is_finite] == 0).all() and (actual.out[~is_inside] == 0).all()
    for got, expected in ((actual.out, data), (actual.scales, scales)):
        assert (got != expected).double().mean() <= CUT
    if spec.writes_transposed:
        assert torch.equal(actual.transposed, transpose_payload(actual.out, p.offsets))


def check_stored(spec: HopperGemmSpec, p: Problem, out: Tensor) -> None:
    exact = exact_product(spec, p)
    low, high = ((exact.values + sign * exact.error).to(spec.out_dtype) for sign in (-1, 1))
    assert ((out >= low) & (out <= high)).all()
    assert (out[segment_of_rows(p.offsets, out.shape[0]) < 0] == 0).all()
