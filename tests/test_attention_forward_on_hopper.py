"""Hopper's attention forward on a Hopper GPU: the simulator's cases, and what only hardware can tell."""

from dataclasses import replace

import pytest
import torch
from hopper_attention import CASES, Magnitudes, attend, call, check, make_problem
from hopper_gpu import NEEDS_HOPPER
from jagged_attention import LENGTHS

from pma.layouts import quantize
from pma.numerics import HOPPER_NUMERICS
from pma.testing import ULPS_FP16, relative_error

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), *NEEDS_HOPPER]


@pytest.mark.parametrize("name", CASES)
def test_right(name):
    p = CASES[name].to("cuda")
    check(p, attend(p))


@pytest.mark.parametrize("denominator", ["quantized", "fp32"])
@pytest.mark.parametrize("v_mean", [0.0, 1.0])
def test_long_segments(v_mean, denominator):
    """16,384 events: sums of 13 bits would be 17 % off for V with a mean."""
    numerics = replace(HOPPER_NUMERICS, denominator=denominator)
    lengths = (*LENGTHS, 16384, 2000, 8500, 4100)
    p = make_problem(lengths, 128, 1, 256, magnitudes=Magnitudes(v_mean=v_mean), numerics=numerics).to("cuda")
    check(p, attend(p))


def test_many_segments_repeat_bit_for_bit():
    lengths = tuple(torch.randint(0, 700, (300,), generator=torch.Generator().manual_seed(0)).tolist())
    p = make_problem(lengths, 128, 3, 512, dtypes=(torch.bfloat16, torch.int64)).to("cuda")
    first = attend(p)
    check(p, first)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, attend(p), strict=True))


def test_equal_values_come_back():
    """V = 1: sum and product share their roundings."""
    p = make_problem((3000, 129, 1), 128, 1, 128)
    p = p._replace(v=quantize(torch.ones(p.v.data.shape), p.offsets, columns_per_scale=128)).to("cuda")
    out = attend(p).out
    assert relative_error(out, torch.ones_like(out)) <= ULPS_FP16


def test_no_host_sync():
    launch = call(CASES["three heads, part of a seed tile"].to("cuda"))
    launch()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
