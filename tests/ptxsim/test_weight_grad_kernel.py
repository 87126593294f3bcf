"""The weight gradient's kernels on a CPU: exact sums, tails, poison, schedules; nothing for the checkers to find.

Most operands here are small integers times small powers of two, so that every fp32 sum is exact in any order and
results are compared bit for bit. Rows outside the offsets hold NaN payloads, pads of scale tiles the byte of NaN.
"""

import importlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pma.jagged import num_row_blocks, segment_of_rows
from pma.kernels.device_facts import SM100
from pma.kernels.weight_grad.spec import WeightGradSpec, segments_per_part
from pma.layouts import MXFP8Tensor, dequantize, quantize, scatter_scales
from pma.layouts.mxfp8 import SCALE_NAN, SCALE_ONE, to_payload
from pma.reference import projection
from pma.testing import ULPS_FP32, relative_error

pytestmark = [pytest.mark.ptxsim]
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 700)
TINY = (5, 0, 1, 1, 40, 3, 0, 0, 129, 7, 32, 33, 2, 2, 9, 64, 1, 0, 31, 6, 0)
WIDTHS = (128, 384, 512)
NAN_PAYLOADS = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)


@pytest.fixture
def on(simulated, gpu_stand_in) -> Callable:
    """`with on(num_sms, seed):` the launcher runs in the simulator."""
    sm100 = importlib.import_module("pma.kernels.weight_grad.sm100")

    def start(num_sms: int = 1, seed: int = 1):
        gpu_stand_in(SM100, num_sms, sm100)
        return simulated(arch="sm_100a", num_sms=num_sms, seed=seed, check_bounds=True)

    return start


def offsets_of(lengths, *, head: int = 3) -> Tensor:
    return torch.tensor([head, *lengths]).cumsum(0)


def integers(columns: int, offsets: Tensor, seed: int, *, tail: int = 5) -> MXFP8Tensor:
    """Compact MXFP8: integers up to 3 with block scales 1/2 … 4; NaN payloads outside the offsets."""
    generator = torch.Generator().manual_seed(seed)
    rows = int(offsets[-1]) + tail
    data = to_payload(torch.randint(-3, 4, (rows, columns), generator=generator).float())
    data[segment_of_rows(offsets, rows) < 0] = NAN_PAYLOADS.repeat(columns // 2)
    slots = num_row_blocks(rows, offsets.shape[0] - 1, 32)
    scales = torch.randint(SCALE_ONE - 1, SCALE_ONE + 3, (slots, columns // 32), generator=generator)
    return MXFP8Tensor(data, scales.to(torch.uint8))


def normal(columns: int, offsets: Tensor, seed: int) -> MXFP8Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(int(offsets[-1]), columns, generator=generator)
    return quantize(values * torch.exp(torch.randn(columns, generator=generator)), offsets)


def in_tiles(operand: MXFP8Tensor, offsets: Tensor) -> MXFP8Tensor:
    """With column tiles whose pads are the byte of NaN."""
    rows = operand.data.shape[0]
    tiles = scatter_scales(operand.scales, offsets, rows, "column")
    is_pad = scatter_scales(torch.zeros_like(operand.scales), offsets, rows, "column") == SCALE_ONE
    return MXFP8Tensor(operand.data, torch.where(is_pad, SCALE_NAN, tiles))


def exact(dout: MXFP8Tensor, x: MXFP8Tensor, offsets: Tensor) -> Tensor:
    inside = segment_of_rows(offsets, x.data.shape[0]) >= 0
    dense = [dequantize(*each, offsets, torch.float64)[inside] for each in (dout, x)]
    return dense[0].T @ dense[1]


def weight_grad(spec: WeightGradSpec, dout: MXFP8Tensor, x: MXFP8Tensor, offsets: Tensor) -> Tensor:
    from pma.kernels.weight_grad.sm100 import launch

    return launch(spec, in_tiles(dout, offsets), in_tiles(x, offsets), offsets)


def check_integers(on, widths, lengths, *, num_sms=1, seed=1, tail=5, **options) -> None:
    offsets = offsets_of(lengths)
    dout, x = (integers(columns, offsets, index, tail=tail) for index, columns in enumerate(widths))
    spec = WeightGradSpec(*widths, offsets.dtype, **options)
    with on(num_sms, seed):
        actual = weight_grad(spec, dout, x, offsets)
    assert torch.equal(actual, exact(dout, x, offsets).to(spec.out_dtype))


# name → (widths of dout and x, multiprocessors, segments kept apart): a cluster of 1, 3, 4 CTAs; tiles of 128, 256,
# 384 columns; more work items than CTAs; parts of several CTAs
CASES = {
    "one tile": ((128, 128), 1, False),
    "one tile, in parts": ((128, 128), 5, False),
    "two tiles on one CTA": ((128, 512), 1, False),
    "cluster of 3": ((384, 384), 6, False),
    "cluster of 4": ((512, 128), 4, False),
    "apart": ((128, 128), 1, True),
    "apart, cluster of 2": ((256, 128), 2, True),
}


SLOW = ("two tiles on one CTA", "cluster of 4")


@pytest.mark.parametrize("name, seed", [(name, seed) for name in CASES for seed in range(1 if name in SLOW else 3)])
def test_every_length(on, name, seed):
    widths, num_sms, apart = CASES[name]
    check_integers(on, widths, LENGTHS, num_sms=num_sms, seed=seed, keeps_segments_apart=apart)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("lengths", [LENGTHS, TINY], ids=["lengths", "tiny"])
@pytest.mark.parametrize("name", CASES)
def test_whatever_the_order(on, name, lengths, seed):
    widths, num_sms, apart = CASES[name]
    check_integers(on, widths, lengths, num_sms=num_sms, seed=seed, keeps_segments_apart=apart)


@pytest.mark.full
@pytest.mark.parametrize("apart", [False, True], ids=["run on", "apart"])
@pytest.mark.parametrize("in_columns", WIDTHS)
@pytest.mark.parametrize("out_columns", WIDTHS)
def test_every_width(on, out_columns, in_columns, apart):
    check_integers(on, (out_columns, in_columns), LENGTHS, num_sms=9, keeps_segments_apart=apart)


@pytest.mark.parametrize("apart", [False, True], ids=["run on", "apart"])
@pytest.mark.parametrize("lengths", [(700,), TINY, (0, 0), (1,) * 40], ids=["one", "tiny", "empty", "ones"])
def test_batches(on, lengths, apart):
    """One segment, many tiny ones, none that has rows; also fewer K tiles than parts."""
    check_integers(on, (128, 128), lengths, num_sms=3, keeps_segments_apart=apart)


def test_parts_without_rows(on):
    """A buffer much longer than the segments has more parts than they have K tiles."""
    check_integers(on, (128, 128), (20, 9), num_sms=4, tail=300)


def test_bfloat16(on):
    check_integers(on, (128, 128), (130, 33), out_dtype=torch.bfloat16)


@pytest.mark.parametrize("apart", [False, True], ids=["run on", "apart"])
def test_sums_are_those_of_float32(on, apart):
    offsets = offsets_of(LENGTHS)
    dout, x = normal(128, offsets, 0), normal(128, offsets, 1)
    with on(num_sms=4):
        actual = weight_grad(WeightGradSpec(128, 128, offsets.dtype, keeps_segments_apart=apart), dout, x, offsets)
    assert relative_error(actual, exact(dout, x, offsets)) < ULPS_FP32
    dense = [dequantize(*each, offsets) for each in (dout, x)]
    assert relative_error(actual, projection.weight_grad(*dense)) < ULPS_FP32


def alone(operand: MXFP8Tensor, offsets: Tensor, segment: int) -> tuple[MXFP8Tensor, Tensor]:
    """One segment as a batch of its own, in place, everything around it NaN."""
    rows = slice(*offsets[segment : segment + 2].tolist())
    own = offsets[segment : segment + 2]
    data = torch.full_like(operand.data, 0x7F)
    data[rows] = operand.data[rows]
    blocks = -(-(rows.stop - rows.start) // 32)
    source, target = rows.start // 32 + segment, rows.start // 32
    scales = torch.full((data.shape[0] // 32 + 1, operand.scales.shape[1]), SCALE_NAN, dtype=torch.uint8)
    scales[target : target + blocks] = operand.scales[source : source + blocks]
    return MXFP8Tensor(data, scales), own


def test_apart_is_the_sum_of_segments_alone(on):
    """Bit for bit, with values whose sums round: in runs of `segments_per_part`, then over the runs."""
    offsets = offsets_of(TINY)
    dout, x = normal(128, offsets, 0), normal(128, offsets, 1)
    spec = WeightGradSpec(128, 128, offsets.dtype, keeps_segments_apart=True)
    expected, size = torch.zeros(128, 128), segments_per_part(len(TINY))
    assert size < len(TINY)
    with on():
        actual = weight_grad(spec, dout, x, offsets)
        for first in range(0, len(TINY), size):
            run = torch.zeros(128, 128)
            for segment in range(first, min(first + size, len(TINY))):
                (own_dout, own), (own_x, _) = alone(dout, offsets, segment), alone(x, offsets, segment)
                run += weight_grad(spec, own_dout, own_x, own)
            expected += run
    assert torch.equal(actual, expected)


def test_apart_does_not_depend_on_the_machine(on):
    offsets = offsets_of(TINY)
    dout, x = normal(256, offsets, 0), normal(128, offsets, 1)
    spec = WeightGradSpec(256, 128, offsets.dtype, keeps_segments_apart=True)
    results = []
    for num_sms in (2, 8):
        with on(num_sms, seed=num_sms):
            results.append(weight_grad(spec, dout, x, offsets))
    assert torch.equal(*results)


def test_runs_repeat(on):
    offsets = offsets_of(LENGTHS)
    dout, x = normal(128, offsets, 0), normal(128, offsets, 1)
    results = []
    for seed in (1, 2):
        with on(3, seed):
            results.append(weight_grad(WeightGradSpec(128, 128, offsets.dtype), dout, x, offsets))
    assert torch.equal(*results)


@pytest.mark.parametrize("apart", [False, True], ids=["run on", "apart"])
def test_a_nan_block_stays_in_its_rows(on, apart):
    """A block of scale 255 and payload 0 makes its 32 rows of dW NaN and no other."""
    offsets = offsets_of((40, 130, 20))
    dout, x = integers(128, offsets, 0), integers(128, offsets, 1)
    expected = exact(dout, x, offsets).float()
    expected[32:64] = math.nan
    first = int(offsets[1])
    dout.scales[first // 32 + 1 + 4, 1] = SCALE_NAN  # the last block, two rows, of the second segment
    dout.data[first + 128 : first + 130, 32:64] = 0
    with on():
        actual = weight_grad(WeightGradSpec(128, 128, offsets.dtype, keeps_segments_apart=apart), dout, x, offsets)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[~expected.isnan()], expected[~expected.isnan()])


def test_without_tokens():
    from pma.kernels.weight_grad.sm100 import launch

    empty = MXFP8Tensor(torch.empty(0, 128, dtype=torch.uint8), torch.empty(1, 1, 512, dtype=torch.uint8))
    out = launch(WeightGradSpec(128, 128, torch.int64), empty, empty, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(128, 128))
