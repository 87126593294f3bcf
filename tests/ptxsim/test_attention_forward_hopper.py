"""Hopper's attention forward in the simulator: right beside float64, without a trace of neighbours and pads, silent."""

import importlib
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_attention import (
    CASES,
    FP32_SUM,
    Problem,
    attend,
    check,
    expected,
    make_problem,
)
from jagged_attention import HEAD, LENGTHS, SHORT, TAIL, part, spoil

from pma.kernels.attention_forward.hopper_spec import choose_config
from pma.kernels.device_facts import SM90
from pma.layouts import dequantize, quantize
from pma.numerics import HOPPER_NUMERICS
from pma.testing import ULPS_FP16, ULPS_FP32, relative_error

pytestmark = [pytest.mark.ptxsim]


@pytest.fixture
def on(simulated, gpu_stand_in) -> Callable:
    """`with on(num_sms, seed):` the launcher runs in the simulator."""
    sm90 = importlib.import_module("pma.kernels.attention_forward.sm90")

    def start(num_sms: int, seed: int = 0):
        gpu_stand_in(SM90, num_sms, sm90)
        return simulated(arch="sm_90a", num_sms=num_sms, seed=seed, check_bounds=True)

    return start


ELSEWHERE = (  # only with -m full
    "one seed", "32 seeds, one head of 64", "forward order", "bf16", "fp32 scores, heads of 64",
    "whole tiles only", "no promotion, no cluster", "three seed tiles",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name not in ELSEWHERE])
def test_right_and_silent(on, name):
    p = CASES[name]
    with on(p.spec.groups):
        actual = attend(p)
    check(p, actual)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("name", CASES)
def test_right_and_silent_whatever_the_order(on, name, seed):
    p = CASES[name]
    with on(p.spec.groups * (1 + seed % 2), seed):
        actual = attend(p)
    check(p, actual)


CHOICES = {
    "length": LENGTHS,
    "num_seeds": (1, 32, 128, 200, 512),
    "num_heads": (1, 3),
    "head_dim": (64, 128),
    "denominator": ("quantized", "fp32"),
    "kv_order": ("reverse", "forward"),
    "is_shared": (True, False),
    "scores": ("fp16", "fp32"),
}


def combinations() -> list[tuple[Any, ...]]:
    """Every length with every number of seeds, the other choices drawn; 101 is a draw in which all pairs occur."""
    draw = random.Random(101)
    first_two = itertools.product(CHOICES["length"], CHOICES["num_seeds"])
    others = [CHOICES[name] for name in list(CHOICES)[2:]]
    return [(*pair, *(draw.choice(values) for values in others)) for pair in first_two]


def test_combinations_hold_every_pair():
    for (i, first), (j, second) in itertools.combinations(enumerate(CHOICES.values()), 2):
        assert {(each[i], each[j]) for each in combinations()} == set(itertools.product(first, second))


@pytest.mark.full
@pytest.mark.parametrize("combination", combinations(), ids=lambda values: "-".join(map(str, values)))
def test_every_pair_of_choices(on, combination):
    length, num_seeds, num_heads, head_dim, denominator, kv_order, is_shared, scores = combination
    numerics = replace(HOPPER_NUMERICS, denominator=denominator, kv_order=kv_order)
    lengths = (length, 70, length)
    p = make_problem(lengths, head_dim, num_heads, num_seeds, is_shared=is_shared, numerics=numerics, scores=scores)
    with on(p.spec.groups, seed=length):
        actual = attend(p)
    check(p, actual)


def test_the_order_of_completion_changes_no_bit(on):
    p = CASES["three heads, part of a seed tile"]
    results = []
    for seed, workers in ((0, 1), (1, 2), (2, 4)):
        with on(p.spec.groups * workers, seed):
            results.append(attend(p))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ------------------------------------------------------------------------------------- jagged and degenerate input


def test_neighbours_change_no_bit(on):
    p = CASES["every length"]
    with on(1):
        together = attend(p)
    for segment in (3, 4, 7):
        with on(1):
            alone = attend(part(p, segment))
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole[segment], single[0])


NAN_LENGTHS = (32,) * 16 + (40, 300, 300, 60, 300)


def spoiled(p: Problem) -> Problem:
    """NaN in a row of Q; in K, in another pair of events in each segment of 32; in rows of V, in one column."""
    begins = p.offsets.tolist()
    keys = [(begins[segment] + 2 * segment + segment % 2, segment) for segment in range(16)]
    keys += [(begins[17] + 290, 5), (begins[18] + 7, 5)]  # in the tile that a segment begins or ends with
    values = [(begins[19] + 3, 7), (begins[20] + 200, 127)]
    return p._replace(q=spoil(p.q, (5, 2)), k=spoil(p.k, *keys), v=spoil(p.v, *values))


@pytest.mark.parametrize("scores", ["fp16", "fp32"])
@pytest.mark.parametrize("denominator", ["quantized", "fp32"])
def test_nan_of_an_element_goes_where_the_reference_has_it(on, denominator, scores):
    """And nowhere else: not into the sums of a later segment either."""
    numerics = replace(HOPPER_NUMERICS, denominator=denominator)
    p = make_problem(NAN_LENGTHS, 128, 1, 128, numerics=numerics, scores=scores, promotion=1)
    results = []
    for each in (p, spoiled(p)):
        with on(1):
            results.append(attend(each))
    clean, actual = results
    out, lse, _ = expected(spoiled(p))
    assert torch.equal(actual.out.isnan(), out.isnan()) and torch.equal(actual.lse.isnan(), lse.isnan())
    assert torch.equal(actual.out[~out.isnan()], clean.out[~out.isnan()])
    for before, after in zip(clean[1:], actual[1:], strict=True):
        assert torch.equal(after[~lse.isnan()], before[~lse.isnan()])


def test_a_scale_that_is_nan_spoils_its_rows_only(on):
    """A block of K makes its segment's rows NaN, one of V their values, not lse."""
    p = make_problem((70, 70, 70), 128, 1, 128)
    first = HEAD // 32
    p.k.scales[first + 1] = 255  # the second block of the first segment
    p.v.scales[(HEAD + 70) // 32 + 1] = 255
    with on(1):
        actual = attend(p)
    assert actual.out[:2].isnan().all() and actual.lse[0].isnan().all()
    assert actual.out[2].isfinite().all() and actual.lse[1:].isfinite().all()


@pytest.mark.parametrize(("denominator", "error"), [("quantized", ULPS_FP32), ("fp32", 0.01)])
def test_equal_values_come_back(on, denominator, error):
    """V = 1: exactly with the sum of the cast P, but for the reciprocal; within 1 % with that of P."""
    p = make_problem(SHORT, 128, 1, 128, numerics=replace(HOPPER_NUMERICS, denominator=denominator))
    p = p._replace(v=quantize(torch.ones(p.v.data.shape), p.offsets, columns_per_scale=128))
    with on(1):
        out = attend(p).out[[0, 2, 3]]
    assert relative_error(out, torch.ones_like(out)) <= error


@pytest.mark.parametrize("denominator", ["quantized", "fp32"])
def test_blocks_of_small_values_count_in_the_sum(on, denominator):
    """Every other block of V is 0, its scale byte too: half the weight, whatever that block's fold is."""
    p = make_problem((256, 128), 128, 1, 128, numerics=replace(HOPPER_NUMERICS, denominator=denominator))
    ones = torch.ones(p.v.data.shape)
    for begin, end in itertools.pairwise(p.offsets.tolist()):
        ones[begin:end][torch.arange(end - begin) // 32 % 2 == 1] = 0
    p = p._replace(v=quantize(ones, p.offsets, columns_per_scale=128), q=p.q._replace(data=torch.zeros_like(p.q.data)))
    with on(1):
        out = attend(p).out
    assert relative_error(out, torch.full_like(out, 0.5)) <= ULPS_FP16


@pytest.mark.parametrize(("numerics", "error"), [(HOPPER_NUMERICS, 0.0), (FP32_SUM, ULPS_FP16)])
def test_one_event_returns_its_value(on, numerics, error):
    p = make_problem((1, 1, 1), 128, 1, 128, dtypes=(torch.bfloat16, torch.int64), numerics=numerics)
    with on(1):
        out = attend(p).out
    values = dequantize(*p.v, p.offsets)[HEAD:-TAIL].bfloat16()[:, None].expand_as(out)
    assert relative_error(out, values) <= error


def test_no_events_at_all(on):
    for lengths in ((0, 0, 0), ()):
        p = make_problem(lengths, 128, 1, 128)
        for each in (p, p._replace(k=p.k._replace(data=p.k.data[:0]))):
            with on(1):
                result = attend(each)
            assert result.out.shape == (len(lengths), 128, 128)
            assert (result.out == 0).all() and (result.lse == -torch.inf).all()


def test_keys_of_zero_in_a_partial_tile(on):
    """Their factor would be 0, and 0 times the mask's −inf NaN."""
    p = make_problem((40, 300), 128, 1, 128)
    p = p._replace(k=quantize(torch.zeros(p.k.data.shape), p.offsets, columns_per_scale=128))
    with on(1):
        actual = attend(p)
    check(p, actual)


def test_choices_reach_the_configuration():
    p = make_problem((1,), 128, 1, 256, promotion=4, ctas=1, stages=3)
    config = choose_config(p.spec, SM90, **p.choices)
    assert (config.promotion, config.ctas, config.stages, config.scores) == (4, 1, 3, "fp16")
