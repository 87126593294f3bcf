"""Hopper's projections in the simulator: bytes of the reference, masks and pads, silent."""

import importlib
from collections.abc import Callable

import pytest
import torch
from hopper_projection import CASES, I64, LENGTHS, OTHERS, SHORT, WIDTHS, check, launch, make_problem, one_segment

from pma.jagged import rows_to_blocks
from pma.kernels.device_facts import SM90
from pma.kernels.projection.hopper_spec import HopperGemmQuantizeSpec, HopperGemmSpec, HopperProjectionSpec
from pma.layouts import MXFP8Tensor, quantize, transpose_payload
from pma.layouts.mxfp8 import SCALE_NAN
from pma.reference import operators as reference

pytestmark = [pytest.mark.ptxsim]


@pytest.fixture
def on(simulated, gpu_stand_in) -> Callable:
    """`with on(num_sms, seed):` the launcher runs in the simulator."""
    sm90 = importlib.import_module("pma.kernels.projection.sm90")

    def start(num_sms: int, seed: int = 0):
        gpu_stand_in(SM90, num_sms, sm90)
        return simulated(arch="sm_90a", num_sms=num_sms, seed=seed, check_bounds=True)

    return start


def run(on, spec: HopperProjectionSpec, lengths: tuple[int, ...], num_sms: int, seed: int) -> None:
    assert spec.why_unsupported() is None
    p = make_problem(spec, lengths, seed=seed)
    with on(num_sms, seed):
        actual = launch(spec, p)
    check(spec, p, actual)


@pytest.mark.parametrize("name", WIDTHS)
def test_usual_widths(on, name):
    run(on, *WIDTHS[name], seed=0)


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes(on, name):
    run(on, *OTHERS[name], seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("name", CASES)
def test_every_shape(on, name, seed):
    run(on, *CASES[name], seed)


@pytest.mark.parametrize("lengths", [(), (0, 0, 0)], ids=["no segments", "empty segments"])
def test_rows_of_no_segment(on, lengths):
    """Everything is defined although nothing is computed: zeros."""
    spec = HopperGemmQuantizeSpec(128, 128, I64, writes_transposed=True)
    p, rows = make_problem(spec, (5,)), 300
    x = torch.zeros(rows, 128, dtype=torch.uint8), torch.zeros(rows // 32 + len(lengths), 4, dtype=torch.uint8)
    p = p._replace(x=MXFP8Tensor(*x), offsets=torch.full((len(lengths) + 1,), 150))
    with on(2):
        actual = launch(spec, p)
    assert not any(each.any() for each in actual)


def test_nothing_to_multiply(on):
    spec = HopperGemmQuantizeSpec(128, 128, I64, writes_transposed=True)
    p = make_problem(spec, (0, 0))
    p = p._replace(x=MXFP8Tensor(p.x.data[:0], p.x.scales[:2]), offsets=torch.zeros(3, dtype=I64))
    with on(1):
        actual = launch(spec, p)
    assert actual.out.shape == (0, 128) and not actual.scales.any() and not actual.transposed.any()


@pytest.mark.parametrize("headroom_exponent", [0, 5])
@pytest.mark.parametrize("gain", [2.0**-10, 4.0])
def test_every_magnitude(on, gain, headroom_exponent):
    """A multiple of the identity as weight, so that sums are exact: the reference's bytes from 2^−146 to Inf."""
    spec = HopperGemmQuantizeSpec(128, 128, I64, headroom_exponent=headroom_exponent, writes_transposed=True)
    p = make_problem(spec, (33, 1000, 1500))
    scales = torch.arange(p.x.scales.shape[0])[:, None] * 37 % 247  # 448·2^(247 − 127) is past float32
    identity = quantize(gain * torch.eye(128), one_segment(128), columns_per_scale=128)
    p = p._replace(x=p.x._replace(scales=scales.to(torch.uint8).expand(-1, 4)), weight=identity)
    with on(1):
        actual = launch(spec, p)
    data, scales = reference.gemm_quantize(p.x, p.weight, p.offsets, 128, headroom_exponent, False)
    assert torch.equal(actual.scales, scales) and torch.equal(actual.out, data)
    assert torch.equal(actual.transposed, transpose_payload(data, p.offsets))
    assert (scales == SCALE_NAN).any() == (gain > 1), "some products are past float32"


def test_a_nan_stays_in_its_blocks(on):
    """A block of X that is NaN makes its row block NaN, one of the weight its head, and nothing else changes."""
    spec = HopperGemmQuantizeSpec(128, 256, I64)
    p = make_problem(spec, SHORT)
    x, weight = p.x.scales.clone(), p.weight.scales.clone()
    block = int(p.offsets[1]) // 32 + 1 + 2  # rows 64 … 95 of the second segment
    x[block], weight[1] = SCALE_NAN, SCALE_NAN
    poisoned = p._replace(x=p.x._replace(scales=x), weight=p.weight._replace(scales=weight))
    with on(1):
        expected, actual = launch(spec, p), launch(spec, poisoned)
    is_nan = torch.zeros_like(expected.scales, dtype=torch.bool)
    is_nan[block], is_nan[:, :4] = True, True
    is_used = rows_to_blocks(p.offsets, p.x.data.shape[0], 32).unique()[:-1]
    assert torch.equal(actual.scales[is_used], torch.where(is_nan, SCALE_NAN, expected.scales)[is_used])
    slots = rows_to_blocks(p.offsets, p.x.data.shape[0], 32).clamp(max=len(is_nan) - 1)
    assert torch.equal(actual.out, torch.where(is_nan[slots].repeat_interleave(32, -1), 0, expected.out))


def test_a_nan_stays_in_its_rows_and_columns(on):
    """Of a product that is not quantised: the 32 rows of a block of X, the 32 columns of a block of the weight."""
    for dtype in (torch.bfloat16, torch.float32):
        spec = HopperGemmSpec(128, 128, I64, out_dtype=dtype)
        p = make_problem(spec, SHORT)
        x, weight = p.x.scales.clone(), p.weight.scales.clone()
        first = int(p.offsets[1]) + 64
        x[int(p.offsets[1]) // 32 + 1 + 2], weight[1] = SCALE_NAN, SCALE_NAN
        poisoned = p._replace(x=p.x._replace(scales=x), weight=p.weight._replace(scales=weight))
        with on(1):
            expected, actual = launch(spec, p).out, launch(spec, poisoned).out
        expected[first : first + 32] = float("nan")
        expected[int(p.offsets[0]) : int(p.offsets[-1]), 32:64] = float("nan")
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


def test_the_order_of_completion_changes_no_bit(on):
    spec = HopperGemmQuantizeSpec(384, 384, I64, writes_transposed=True)
    p, results = make_problem(spec, LENGTHS), []
    for seed, num_sms in ((0, 1), (1, 3)):
        with on(num_sms, seed):
            results.append(launch(spec, p))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_view_that_is_not_aligned(on):
    """Rows of a buffer that begin at an odd address are copied first."""
    spec = HopperGemmSpec(128, 128, I64)
    p = make_problem(spec, SHORT)
    buffer = torch.empty(p.x.data.numel() + 1, dtype=torch.uint8)
    view = buffer[1:].view_as(p.x.data).copy_(p.x.data)
    with on(1):
        expected, actual = launch(spec, p), launch(spec, p._replace(x=p.x._replace(data=view)))
    assert torch.equal(actual.out, expected.out)
