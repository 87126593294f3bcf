"""Hopper's weight gradient in the simulator: exact sums, tails, poison, schedules; nothing for the checkers to find.

Most operands here are small integers times small powers of two, so that every fp32 sum is exact in any order and
results are compared bit for bit. Rows outside the offsets hold NaN payloads.
"""

import importlib
import math
from collections.abc import Callable

import pytest
import torch
from hopper_weight_grad import budget, exact, integers, normal, offsets_of, weight_grad

from pma.kernels.device_facts import SM90
from pma.kernels.weight_grad.hopper_spec import HopperWeightGradSpec
from pma.layouts import MXFP8Tensor, dequantize, quantize
from pma.layouts.mxfp8 import SCALE_NAN
from pma.reference import projection
from pma.testing import relative_error

pytestmark = [pytest.mark.ptxsim]
I32, I64 = torch.int32, torch.int64
LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 700)
TINY = (5, 0, 1, 1, 40, 3, 0, 0, 129, 7, 32, 33, 2, 2, 9, 64, 1, 0, 31, 6, 0)


@pytest.fixture
def on(simulated, gpu_stand_in) -> Callable:
    """`with on(num_sms, seed):` the launcher runs in the simulator."""
    sm90 = importlib.import_module("pma.kernels.weight_grad.sm90")

    def start(num_sms: int = 1, seed: int = 1):
        gpu_stand_in(SM90, num_sms, sm90)
        return simulated(arch="sm_90a", num_sms=num_sms, seed=seed, check_bounds=True)

    return start


def check_integers(on, spec: HopperWeightGradSpec, lengths, *, num_sms=1, seed=1, tail=5) -> None:
    offsets = offsets_of(lengths, dtype=spec.offsets_dtype)
    dout = integers(spec.out_columns, offsets, 0, tail=tail, width=spec.dout_columns_per_scale)
    x = integers(spec.in_columns, offsets, 1, tail=tail, width=spec.x_columns_per_scale)
    with on(num_sms, seed):
        actual = weight_grad(spec, dout, x, offsets)
    assert torch.equal(actual, exact(dout, x, offsets).to(spec.out_dtype))


# name → (spec, lengths, multiprocessors): tiles of 128, 256, 384 columns; more work items than CTAs; parts of CTAs
CASES = {
    "one tile": (HopperWeightGradSpec(128, 128, I64), LENGTHS, 1),
    "one tile, heads of 64, in parts": (HopperWeightGradSpec(128, 128, I32, torch.float32, False, 64, 64), LENGTHS, 5),
    "tiles of 384": (HopperWeightGradSpec(384, 384, I64), LENGTHS, 3),
    "tiles of 256, two on one CTA, heads of 64 and all": (
        HopperWeightGradSpec(128, 512, I64, torch.float32, False, 64, 512), TINY, 1,
    ),
    "bf16": (HopperWeightGradSpec(256, 128, I64, torch.bfloat16), (130, 33), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_length(on, name):
    spec, lengths, num_sms = CASES[name]
    check_integers(on, spec, lengths, num_sms=num_sms)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("lengths", [LENGTHS, TINY], ids=["lengths", "tiny"])
@pytest.mark.parametrize("name", CASES)
def test_whatever_the_order(on, name, lengths, seed):
    spec, _, num_sms = CASES[name]
    check_integers(on, spec, lengths, num_sms=num_sms, seed=seed)


@pytest.mark.parametrize("lengths", [(700,), TINY, (0, 0), (1,) * 40], ids=["one", "tiny", "empty", "ones"])
def test_batches(on, lengths):
    """One segment, many tiny ones, none that has rows; also fewer slots than parts."""
    check_integers(on, HopperWeightGradSpec(128, 128, I64), lengths, num_sms=3)


def test_parts_without_rows(on):
    """A buffer much longer than the segments has more parts than they have slots."""
    check_integers(on, HopperWeightGradSpec(128, 128, I64), (20, 9), num_sms=4, tail=300)


def test_sums_are_those_of_float32(on):
    offsets = offsets_of(LENGTHS)
    dout, x = normal(128, offsets, 0), normal(384, offsets, 1)
    with on(num_sms=4):
        actual = weight_grad(HopperWeightGradSpec(128, 384, I64), dout, x, offsets)
    limit = budget(int(offsets[-1]))
    assert relative_error(actual, exact(dout, x, offsets)) < limit
    dense = [dequantize(*each, offsets) for each in (dout, x)]
    assert relative_error(actual, projection.weight_grad(*dense)) < limit


def test_magnitudes_far_apart(on):
    """Blocks from 2^-60 to 2^60 of either operand: what is far below the largest vanishes as it does in fp32."""
    offsets = offsets_of((1500,))
    generator = torch.Generator().manual_seed(0)
    matrices = []
    for seed in range(2):
        octaves = torch.randint(-60, 61, (47, 1), generator=generator).repeat_interleave(32, 0)[:1503]
        values = torch.randn(1503, 128, generator=torch.Generator().manual_seed(seed)) * torch.exp2(octaves.float())
        matrices.append(quantize(values, offsets, columns_per_scale=128))
    with on():
        actual = weight_grad(HopperWeightGradSpec(128, 128, I64), *matrices, offsets)
    largest = [dequantize(*each, offsets, torch.float64).abs().amax() for each in matrices]
    error = (actual - exact(*matrices, offsets)).abs().amax()
    assert error <= 1500 * 2.0**-24 * largest[0] * largest[1]
    assert relative_error(actual, exact(*matrices, offsets)) < budget(1500)


def test_extreme_scales(on):
    """The two factors together leave fp32 only where the result does."""
    offsets = offsets_of((64,))
    dout, x = integers(128, offsets, 0), integers(128, offsets, 1)
    spec = HopperWeightGradSpec(128, 128, I64)
    for shifts in ((120, -120), (-120, 110), (-100, -80), (60, 80)):
        shifted = [
            MXFP8Tensor(each.data, torch.where(each.scales > 0, each.scales.int() + shift, 0).to(torch.uint8))
            for each, shift in zip((dout, x), shifts, strict=True)
        ]
        with on():
            actual = weight_grad(spec, *shifted, offsets)
        assert torch.equal(actual, exact(*shifted, offsets).float())


def test_runs_repeat(on):
    offsets = offsets_of(LENGTHS)
    dout, x = normal(128, offsets, 0), normal(128, offsets, 1)
    results = []
    for seed in (1, 2):
        with on(3, seed):
            results.append(weight_grad(HopperWeightGradSpec(128, 128, I64), dout, x, offsets))
    assert torch.equal(*results)


@pytest.mark.parametrize("of_x", [False, True], ids=["dout", "x"])
def test_a_nan_block_stays_in_its_rows(on, of_x):
    """A block of scale 255 and payload 0 makes the rows of dW of its head NaN, or the columns, and no other."""
    offsets = offsets_of((40, 130, 20))
    dout, x = integers(256, offsets, 0), integers(256, offsets, 1)
    expected = exact(dout, x, offsets).float()
    spoiled = x if of_x else dout
    (expected.T if of_x else expected)[128:] = math.nan
    first = int(offsets[1])
    spoiled.scales[first // 32 + 1 + 4, 4:] = SCALE_NAN  # the last block, two rows, of the second segment
    spoiled.data[first + 128 : first + 130, 128:] = 0
    with on():
        actual = weight_grad(HopperWeightGradSpec(256, 256, I64), dout, x, offsets)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[~expected.isnan()], expected[~expected.isnan()])


def test_without_tokens():
    empty = MXFP8Tensor(torch.empty(0, 128, dtype=torch.uint8), torch.empty(1, 4, dtype=torch.uint8))
    out = weight_grad(HopperWeightGradSpec(128, 128, I64), empty, empty, torch.zeros(2, dtype=I64))
    assert torch.equal(out, torch.zeros(128, 128))
