"""The projections in the simulator: bytes of the reference, masks and pads, products that take the tiles as they are.

A kernel sums in fp32 in another order than the reference, so a byte may differ from it where the exact product lies as
near a rounding boundary as such sums err: the byte must be what some value within that error gives, and at most one in
a thousand may differ from the reference at all.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from quack_cases import AT_BOUNDARY, assert_rounded_once, gemm
from torch import Tensor

from pma import reference
from pma.jagged import equal_offsets, rows_to_blocks, segment_of_rows
from pma.kernels.device_facts import SM100
from pma.kernels.projection.spec import GemmQuantizeSpec, GemmSpec, ProjectionSpec
from pma.kernels.weight_grad.spec import WeightGradSpec
from pma.layouts import MXFP8Tensor, dequantize, quantize, scatter_scales
from pma.layouts.mxfp8 import (
    SCALE_NAN,
    SCALE_ONE,
    amax_bits,
    from_payload,
    inverse_scales,
    scale_from_amax_bits,
    to_payload,
)
from pma.testing import ULPS_FP32, relative_error

pytestmark = [pytest.mark.ptxsim]
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 700)
SHORT = (0, 130, 31, 0, 65)
MANY = (0,) * 40 + (1,) * 30 + (300, 33, 140, 1, 1)  # more row tiles than are announced before a place is used again
NAN_PAYLOAD, POISON = 0x7F, 0xFF


@pytest.fixture
def on(simulated, gpu_stand_in) -> Callable:
    """`with on(num_sms, seed):` the launchers run in the simulator."""
    modules = [importlib.import_module(f"pma.kernels.{name}.sm100") for name in ("projection", "weight_grad")]

    def start(num_sms: int, seed: int = 0):
        gpu_stand_in(SM100, num_sms, *modules)
        return simulated(arch="sm_100a", num_sms=num_sms, seed=seed, check_bounds=True)

    return start


# ----------------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    """A jagged matrix and a weight, quantised."""

    x: MXFP8Tensor
    weight: MXFP8Tensor
    offsets: Tensor


def make_problem(in_columns: int, weight_shape: tuple[int, int], lengths: tuple[int, ...], *, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(1000 * in_columns + seed)
    head, tail = (3, 5) if len(lengths) > 1 else (0, 0)
    offsets = torch.tensor([0, *lengths]).cumsum(0) + head
    rows = int(offsets[-1]) + tail
    x = torch.randn(rows, in_columns, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator))
    weight = torch.randn(weight_shape, generator=generator) * torch.exp(
        torch.randn(weight_shape[1], generator=generator)
    )
    return Problem(quantize(x, offsets), quantize(weight, one_segment(weight_shape[0])), offsets)


def one_segment(rows: int) -> Tensor:
    return equal_offsets(1, rows, torch.device("cpu"))


def poisoned_tiles(scales: Tensor, offsets: Tensor, rows: int, direction: str) -> Tensor:
    """Scale tiles whose pad bytes are 0xFF, the scale NaN."""
    is_pad = scatter_scales(torch.zeros_like(scales), offsets, rows, direction) == SCALE_ONE
    return torch.where(is_pad, POISON, scatter_scales(scales, offsets, rows, direction))


def launch(spec: ProjectionSpec, p: Problem, x_tiles: Tensor | None = None):
    """Start the kernel with the worst in what it must not use: pads of scale tiles, rows outside the segments."""
    sm100 = importlib.import_module("pma.kernels.projection.sm100")
    rows, weight_rows = p.x.data.shape[0], p.weight.data.shape[0]
    direction = "column" if spec.weight_is_transposed else "row"
    weight_tiles = poisoned_tiles(p.weight.scales, one_segment(weight_rows), weight_rows, direction)
    if x_tiles is None:
        x_tiles = poisoned_tiles(p.x.scales, p.offsets, rows, "row")
    is_outside = segment_of_rows(p.offsets, rows) < 0
    x_data = torch.where(is_outside[:, None], NAN_PAYLOAD, p.x.data)
    x, weight = sm100.ProjectionOperand(x_data, x_tiles), sm100.ProjectionOperand(p.weight.data, weight_tiles)
    return sm100.launch(spec, x, weight, p.offsets)


class Exact(NamedTuple):
    """The float64 product, and how far a sum in fp32 can be from it."""

    values: Tensor
    error: Tensor


def exact_product(p: Problem, is_transposed: bool) -> Exact:
    x = dequantize(*p.x, p.offsets, torch.float64)
    weight = dequantize(*p.weight, one_segment(p.weight.data.shape[0]), torch.float64)
    weight = weight if is_transposed else weight.t()
    roundings = x.shape[1] // 32 + 1  # one after each block of 32, and the last
    return Exact(x @ weight, roundings * torch.finfo(torch.float32).eps / 2 * (x.abs() @ weight.abs()))


# ------------------------------------------------------------------------------------------------ checks


def assert_quantised(actual, p: Problem, spec: GemmQuantizeSpec) -> None:
    """Every byte: payload, compact scales, tiles in both directions."""
    rows, width = p.x.data.shape[0], spec.columns_per_scale
    options = (spec.columns_per_scale, spec.headroom_exponent, False)
    data, scales = reference.operators.gemm_quantize(p.x, p.weight, p.offsets, *options)
    exact = exact_product(p, is_transposed=False)
    slots = rows_to_blocks(p.offsets, rows, 32)
    is_inside = slots < scales.shape[0]
    amax = torch.zeros(scales.shape[0] + 1, spec.out_columns // width, dtype=torch.float64)
    highest = (exact.values.abs() + exact.error).view(rows, -1, width).amax(-1)
    lowest = (exact.values.abs() - exact.error).clamp(min=0).view(rows, -1, width).amax(-1)
    bounds = []
    for each in (lowest, highest):
        block = amax.scatter_reduce(0, slots[:, None].expand_as(each), each, "amax").float()
        bounds.append(
            scale_from_amax_bits(amax_bits(block), spec.headroom_exponent)[:-1].repeat_interleave(width // 32, -1)
        )
    is_finite = scales != SCALE_NAN
    assert torch.equal(actual.scales == SCALE_NAN, scales == SCALE_NAN)
    assert (actual.scales >= bounds[0])[is_finite].all() and (actual.scales <= bounds[1])[is_finite].all()
    of_rows = torch.cat([actual.scales, actual.scales.new_full((1, scales.shape[1]), SCALE_NAN)])[slots]
    inverse = inverse_scales(of_rows).repeat_interleave(32, -1)
    low, high = ((exact.values + sign * exact.error).float() * inverse for sign in (-1, 1))
    payload, is_finite = from_payload(actual.out), inverse != 0
    assert (payload >= from_payload(to_payload(low)))[is_finite].all()
    assert (payload <= from_payload(to_payload(high)))[is_finite].all()
    assert (actual.out[~is_finite] == 0).all() and (actual.out[~is_inside] == 0).all()
    for got, expected in ((actual.out, data), (actual.scales, scales)):
        assert (got != expected).double().mean() <= AT_BOUNDARY
    for tiles, direction in ((actual.row_tiles, "row"), (actual.column_tiles, "column")):
        assert torch.equal(tiles, scatter_scales(actual.scales, p.offsets, rows, direction))


def assert_stored(actual, p: Problem, spec: GemmSpec) -> None:
    exact, out = exact_product(p, is_transposed=True), actual.out
    low, high = ((exact.values + sign * exact.error).to(spec.out_dtype) for sign in (-1, 1))
    assert ((out >= low) & (out <= high)).all()
    if spec.out_dtype == torch.bfloat16:
        expected = reference.operators.gemm(p.x, p.weight, p.offsets, spec.out_dtype)
        assert (out != expected).double().mean() <= AT_BOUNDARY
    assert (out[segment_of_rows(p.offsets, out.shape[0]) < 0] == 0).all()


def run(on, spec: ProjectionSpec, lengths: tuple[int, ...], num_sms: int, seed: int) -> None:
    assert spec.why_unsupported() is None
    transposed = spec.weight_is_transposed
    shape = (spec.in_columns, spec.out_columns) if transposed else (spec.out_columns, spec.in_columns)
    p = make_problem(spec.in_columns, shape, lengths, seed=seed)
    p = p._replace(offsets=p.offsets.to(spec.offsets_dtype))
    with on(num_sms, seed):
        actual = launch(spec, p)
    (assert_stored if transposed else assert_quantised)(actual, p, spec)


# ------------------------------------------------------------------------------------------------- tests

I32, I64, FP32 = torch.int32, torch.int64, torch.float32
# name → (spec, lengths, multiprocessors): more row tiles than CTAs, more tiles of X than stages
WIDTHS: dict[str, tuple[ProjectionSpec, tuple[int, ...], int]] = {
    "quantize 128": (GemmQuantizeSpec(128, 128, I64), LENGTHS, 1),
    "quantize 384, the whole weight in one CTA": (GemmQuantizeSpec(384, 384, I64), LENGTHS, 2),
    "quantize 512, two groups of CTAs": (GemmQuantizeSpec(512, 512, I64), LENGTHS, 2),
}
OTHERS: dict[str, tuple[ProjectionSpec, tuple[int, ...], int]] = {
    "quantize 128 to 256, heads of 128 under one scale": (
        GemmQuantizeSpec(128, 256, I64, columns_per_scale=128, headroom_exponent=5), SHORT, 1,
    ),
    "quantize 128 to 192, heads of 64 under one scale": (
        GemmQuantizeSpec(128, 192, I64, columns_per_scale=64), SHORT, 1,
    ),
    "quantize 160 to 96, ragged": (GemmQuantizeSpec(160, 96, I32), SHORT, 1),
    "quantize, one segment of seeds": (GemmQuantizeSpec(128, 128, I64), (200,), 4),
    "quantize 256, many segments": (GemmQuantizeSpec(256, 256, I64), MANY, 1),
    "quantize, streamed weight": (GemmQuantizeSpec(2048, 64, I64), (130, *(0,) * 80, 33, 1, 2), 1),
    "gemm 128": (GemmSpec(128, 128, I64), LENGTHS, 1),
    "gemm 384": (GemmSpec(384, 384, I64), SHORT, 1),
    "gemm 512 to 384, fp32": (GemmSpec(512, 384, I64, out_dtype=FP32), SHORT, 2),
    "gemm 96 to 160, ragged": (GemmSpec(96, 160, I32), SHORT, 1),
    "gemm, streamed weight": (GemmSpec(1536, 64, I64), (130,), 1),
}  # fmt: skip
FULL = {
    **WIDTHS,
    **OTHERS,
    "quantize 384, heads of 128 under one scale": (GemmQuantizeSpec(384, 384, I32, columns_per_scale=128), LENGTHS, 1),
    "quantize 512, heads of 64 under one scale": (
        GemmQuantizeSpec(512, 512, I64, columns_per_scale=64, headroom_exponent=5), LENGTHS, 2,
    ),
    "gemm 384, every length": (GemmSpec(384, 384, I64), LENGTHS, 1),
    "gemm 512, every length": (GemmSpec(512, 512, I64), LENGTHS, 2),
    "quantize 1024": (GemmQuantizeSpec(1024, 1024, I64), SHORT, 8),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WIDTHS)
def test_usual_widths(on, name, seed):
    run(on, *WIDTHS[name], seed)


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes(on, name):
    run(on, *OTHERS[name], seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", FULL)
def test_every_shape(on, name, seed):
    run(on, *FULL[name], seed)


@pytest.mark.parametrize("lengths", [(), (0, 0, 0)], ids=["no segments", "empty segments"])
def test_rows_of_no_segment(on, lengths):
    """Everything is defined although nothing is computed: zeros, and the scale 1.0 in tiles."""
    spec = GemmQuantizeSpec(128, 96, I64)
    p = make_problem(128, (96, 128), (5,))
    rows = 300
    x = MXFP8Tensor(
        torch.zeros(rows, 128, dtype=torch.uint8), torch.zeros(rows // 32 + len(lengths), 4, dtype=torch.uint8)
    )
    p = p._replace(x=x, offsets=torch.full((len(lengths) + 1,), 150))
    with on(2):
        actual = launch(spec, p)
    assert not actual.out.any() and not actual.scales.any()
    assert (actual.row_tiles == SCALE_ONE).all() and (actual.column_tiles == SCALE_ONE).all()


def test_nothing_to_multiply(on):
    p = make_problem(128, (96, 128), (0, 0))
    p = p._replace(x=MXFP8Tensor(p.x.data[:0], p.x.scales[:2]), offsets=torch.zeros(3, dtype=I64))
    actual = launch(GemmQuantizeSpec(128, 96, I64), p)
    assert actual.out.shape == (0, 96) and not actual.scales.any()
    assert (actual.row_tiles == SCALE_ONE).all() and (actual.column_tiles == SCALE_ONE).all()


@pytest.mark.parametrize("headroom_exponent", [0, 5])
@pytest.mark.parametrize("gain", [2.0**-10, 4.0])
def test_every_magnitude(on, gain, headroom_exponent):
    """A multiple of the identity as weight, so that maxima are exact: the reference's bytes from 2^−146 to Inf."""
    spec = GemmQuantizeSpec(128, 128, I64, headroom_exponent=headroom_exponent)
    p = make_problem(128, (128, 128), (33, 1000, 1500))
    scales = torch.arange(p.x.scales.numel()).view(p.x.scales.shape) % 247  # 448·2^(247 − 127) is past float32
    identity = quantize(gain * torch.eye(128), one_segment(128))
    p = p._replace(x=p.x._replace(scales=scales.to(torch.uint8)), weight=identity)
    with on(1):
        actual = launch(spec, p)
    data, scales = reference.operators.gemm_quantize(p.x, p.weight, p.offsets, 32, headroom_exponent, False)
    assert torch.equal(actual.scales, scales) and torch.equal(actual.out, data)
    assert (scales == SCALE_NAN).any() == (gain > 1), "some products are past float32"


def test_a_nan_stays_in_its_blocks(on):
    """A block of X that is NaN makes its row block NaN, a block of the weight its columns, and nothing else changes."""
    spec = GemmQuantizeSpec(128, 128, I64)
    p = make_problem(128, (128, 128), SHORT)
    x, weight = p.x.scales.clone(), p.weight.scales.clone()
    block = int(p.offsets[1]) // 32 + 1 + 2  # rows 64 … 95 of the second segment
    x[block, 3], weight[1, 0] = SCALE_NAN, SCALE_NAN
    poisoned = p._replace(x=p.x._replace(scales=x), weight=p.weight._replace(scales=weight))
    with on(1):
        expected, actual = launch(spec, p), launch(spec, poisoned)
    is_nan = torch.zeros_like(expected.scales, dtype=torch.bool)
    is_nan[block], is_nan[:, 1] = True, True
    is_used = rows_to_blocks(p.offsets, p.x.data.shape[0], 32).unique()[:-1]
    assert torch.equal(actual.scales[is_used], torch.where(is_nan, SCALE_NAN, expected.scales)[is_used])
    slots = rows_to_blocks(p.offsets, p.x.data.shape[0], 32).clamp(max=len(is_nan) - 1)
    assert torch.equal(actual.out, torch.where(is_nan[slots].repeat_interleave(32, -1), 0, expected.out))


def test_a_nan_stays_in_its_rows_and_columns(on):
    """Of a product that is not quantised: the 32 rows of a block of X, the 32 columns of a block of the weight."""
    spec = GemmSpec(128, 128, I64)
    p = make_problem(128, (128, 128), SHORT)
    x, weight = p.x.scales.clone(), p.weight.scales.clone()
    first = int(p.offsets[1]) + 64
    x[int(p.offsets[1]) // 32 + 1 + 2, 3], weight[0, 1] = SCALE_NAN, SCALE_NAN
    poisoned = p._replace(x=p.x._replace(scales=x), weight=p.weight._replace(scales=weight))
    with on(1):
        expected, actual = launch(spec, p).out, launch(spec, poisoned).out
    expected[first : first + 32] = float("nan")
    expected[int(p.offsets[0]) : int(p.offsets[-1]), 32:64] = float("nan")
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


def test_row_tiles_feed_the_next_product(on):
    """K = X Wᵀ, then K W₂: the second kernel reads what the first has written, pads included."""
    p = make_problem(128, (160, 128), SHORT)
    second = make_problem(160, (160, 96), SHORT, seed=1)
    spec = GemmSpec(160, 96, I64, FP32)
    with on(2):
        key = launch(GemmQuantizeSpec(128, 160, I64), p)
        p = second._replace(x=MXFP8Tensor(key.out, key.scales), offsets=p.offsets)
        actual = launch(spec, p, key.row_tiles)
    assert_stored(actual, p, spec)


VALUE_PROJECTION = pytest.mark.parametrize(
    "has_value_projection", [False, True], ids=["values are x", "values projected"]
)


@VALUE_PROJECTION
@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_of_a_module(on, head_dim, has_value_projection):
    check_products_of_a_module(on, (128, head_dim), has_value_projection, (0, 1, 33, 129), num_sms=2)


@pytest.mark.full
@VALUE_PROJECTION
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("width", [128, 384, 512])
def test_products_of_every_module(on, width, head_dim, has_value_projection):
    check_products_of_a_module(on, (width, head_dim), has_value_projection, LENGTHS, num_sms=8)


def check_products_of_a_module(on, widths, has_value_projection: bool, lengths: tuple[int, ...], num_sms: int) -> None:
    """Forward and backward of the projections, every operand as a kernel wrote it: payload, tiles of both directions.

    K and V stand in for their gradients, which have the same format. widths: (of the model, of a head).
    """
    width, head_dim = widths
    p = make_problem(width, (width, width), lengths)
    query = make_problem(width, (width, width), (40,), seed=2)  # the seeds: one segment
    spec, dx_spec = GemmQuantizeSpec(width, width, I64, columns_per_scale=head_dim), GemmSpec(width, width, I64)
    with on(num_sms):
        assert_quantised(launch(spec, query), query, spec)
        for weight in (p.weight, query.weight) if has_value_projection else (p.weight,):
            forward = p._replace(weight=weight)
            dout = launch(spec, forward)
            assert_quantised(dout, forward, spec)
            back = Problem(MXFP8Tensor(dout.out, dout.scales), weight, p.offsets)
            assert_stored(launch(dx_spec, back, dout.row_tiles), back, dx_spec)
            assert_weight_grad(dout, p)


def assert_weight_grad(dout, p: Problem) -> None:
    """doutᵀ x by the weight gradient's kernel, from the column tiles that the projection has written."""
    sm100 = importlib.import_module("pma.kernels.weight_grad.sm100")
    tiles = poisoned_tiles(p.x.scales, p.offsets, p.x.data.shape[0], "column")
    spec = WeightGradSpec(dout.out.shape[1], p.x.data.shape[1], I64)
    actual = sm100.launch(spec, MXFP8Tensor(dout.out, dout.column_tiles), MXFP8Tensor(p.x.data, tiles), p.offsets)
    dense = [dequantize(*each, p.offsets, torch.float64) for each in (MXFP8Tensor(dout.out, dout.scales), p.x)]
    assert relative_error(actual, dense[0].T @ dense[1]) < ULPS_FP32


def test_column_tiles_feed_a_product_over_tokens(on):
    """KᵀK for each segment by quack's GEMM, contracted over tokens, however many: payload and tiles as they are."""
    p = make_problem(128, (128, 128), (33, 128, 0, 129))
    p = p._replace(offsets=p.offsets - 3)  # that GEMM starts at row 0
    p = p._replace(x=MXFP8Tensor(p.x.data[3:], p.x.scales))
    count = len(p.offsets) - 1
    with on(2):
        key = launch(GemmQuantizeSpec(128, 128, I64), p)
    out = torch.full((count, 128, 128), float("nan"), dtype=torch.bfloat16)
    data = key.out.view(torch.float8_e4m3fn).t()
    tiles = key.column_tiles.view(1, *key.column_tiles.shape[:2], 32, 4, 4).view(torch.float8_e8m0fnu)
    with on(2):
        gemm(data, data, out, None, None, 128, 128, 1, 1, SFA=tiles, SFB=tiles, cu_seqlens_k=p.offsets.int())
    values = dequantize(key.out, key.scales, p.offsets, torch.float64)
    for index in range(count):
        rows = values[p.offsets[index] : p.offsets[index + 1]]
        assert_rounded_once(out[index], rows.T @ rows)
