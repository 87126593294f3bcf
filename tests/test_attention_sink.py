"""The P-cast paper's claims hold for the reference, as `examples/attention_sink.py` measures them."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from architecture import ROOT

from pma.numerics import AttentionNumerics, underflow_threshold
from pma.reference.attention import attention_forward
from pma.reference.rounding import MXFP8Rounding, PlainRounding
from pma.testing import relative_error

sys.path.append(str(ROOT / "examples"))

from attention_sink import (
    BASELINE,
    BOTH_FIXES,
    FIXES,
    NUM_SINKS,
    ORDERS,
    StaticPRounding,
    half_underflow_strength,
    improvements,
    make_problem,
    measure,
    normal_octaves,
    paired_difference,
    sweep_strengths,
    worst_step,
)

KV_TILE = AttentionNumerics().kv_tile
STRONGEST = 14  # Δ, beyond the threshold of every S

# The sink's largest score is one draw for each row of a segment's seeds: the maximum of four normals, standard
# deviation 0.70, mean 1.03 where the closed form has 1. 512 rows leave 0.70 / sqrt(512) = 0.031, and their common keys
# a little more: six draws lay between −0.085 and −0.027. Three deviations and the mean: 3 · 0.031 + 0.03, rounded up.
# A wrong constant would show: half of 2^-10 moves the threshold by 0.69, a missing δ_k by 1.
HALF_UNDERFLOW_BAND = 0.15
# The draws above are the same for every S and cancel; what is left is the interpolation (at most 0.006 in 16 draws).
THRESHOLD_SHIFT_BAND = 0.02
# 2,048 events: 3.5 to 4.5 at Δ = 5 in six draws, more for longer segments; the paper says 3 to 10.
LEAST_IMPROVEMENT, MOST_IMPROVEMENT = 3.0, 10.0
# MSE above that of both fixes, Δ = 5, sixteen draws: S = 256 alone up to 3.4 %, reverse order alone 16 to 23 %, no fix
# at least 130 %.
S256_EXCESS, REVERSE_EXCESS = 0.05, 0.3
# Sums of the same fp64 numbers in another order, rounded to fp32: at most one ulp.
REORDERED_SUM = 2.0**-23
# S = 192 and 448 round p·S and the quotient: 2^-24 each, of numbers up to one.
FP32_SCALING = 2.0**-23
# fp32 scores: 2^-24 relative of scores up to 10, against values near 1.
UNROUNDED_MSE = 1e-11


def underflow_half(problem, p_scale):
    """Simulated Δ where half of non-sink P becomes zero, forward order."""
    centre = round(underflow_threshold(p_scale))
    strengths = (centre - 1, centre, centre + 1)
    measured = [measure(problem.with_sink(strength), ("forward", p_scale)) for strength in strengths]
    return half_underflow_strength(strengths, [each.fraction() for each in measured])


@pytest.fixture(scope="module")
def many_rows():
    return make_problem(16, 32, 512)


@pytest.fixture(scope="module")
def small():
    return make_problem(2, 32, 512)


@pytest.mark.parametrize("p_scale", [1.0, 16.0, 256.0])
def test_half_underflow_lies_at_the_closed_form(many_rows, p_scale):
    assert abs(underflow_half(many_rows, p_scale) - underflow_threshold(p_scale)) < HALF_UNDERFLOW_BAND


def test_threshold_moves_by_the_logarithm_of_the_scale(many_rows):
    shift = underflow_half(many_rows, 256.0) - underflow_half(many_rows, 1.0)
    assert abs(shift - math.log(256.0)) < THRESHOLD_SHIFT_BAND


@pytest.mark.parametrize("strength", [0, 3, 5])
def test_no_underflow_with_both_fixes_at_moderate_sinks(small, strength):
    assert not measure(small.with_sink(strength), BOTH_FIXES).underflow.any()


@pytest.mark.parametrize("strength", [8, STRONGEST, 30])
def test_no_underflow_outside_the_tile_of_a_strong_sink(small, strength):
    """The sink's own tile cannot be helped: its events are relative to the sink in either order."""
    measured = measure(small.with_sink(strength), BOTH_FIXES)
    assert measured.fraction(KV_TILE) == 0
    assert measured.underflow[..., NUM_SINKS:KV_TILE].any()
    assert not measured.underflow[..., :NUM_SINKS].any()


def test_improvement_at_moderate_sinks():
    problem = make_problem(4, 32, 2048)
    factors = improvements(sweep_strengths(problem, (5, 6), FIXES), (5, 6))
    assert LEAST_IMPROVEMENT <= max(factors.values()) <= MOST_IMPROVEMENT


def test_each_fix_comes_close_to_the_floor():
    problem = make_problem(4, 32, 1024).with_sink(5)
    floor = measure(problem, BOTH_FIXES)
    assert paired_difference(measure(problem, ("forward", 256.0)), floor)[0] < S256_EXCESS
    assert paired_difference(measure(problem, ("reverse", 1.0)), floor)[0] < REVERSE_EXCESS
    assert paired_difference(measure(problem, BASELINE), floor)[0] > 1.0


def test_strong_sink_with_silent_values_leaves_no_floor(small):
    """Without the sink's own rounding, the fixes gain far more than at ordinary values."""
    problem = small.with_silent_sink()
    factors = improvements(sweep_strengths(problem, (7,), FIXES), (7,))
    assert factors[7] > 10 * LEAST_IMPROVEMENT


def test_worst_step_is_least_at_powers_of_two():
    assert all(worst_step(2.0**exponent) == 2.0**-4 for exponent in range(9))
    assert min(worst_step(1.0 + i / 8) for i in range(8 * 447 + 1)) == 2.0**-4
    assert all(worst_step(p_scale) > 2.0**-4 for p_scale in (1.25, 192.0, 255.0, 257.0, 448.0))
    assert worst_step(448.0) == 32 / 448


def test_worst_step_bounds_the_rounding():
    p = torch.linspace(0.0, 1.0, 4097)
    for p_scale in (1.0, 16.0, 192.0, 256.0, 448.0):
        error = (StaticPRounding(p_scale, "reverse").p_forward(p) - p.double()).abs().max()
        assert 0.49 * worst_step(p_scale) < error <= 0.5 * worst_step(p_scale) + FP32_SCALING


def test_normal_range():
    assert normal_octaves(256.0) == 14.0
    assert 14.0 < normal_octaves(448.0) < 15.0
    assert all(normal_octaves(2.0**exponent) < 14.0 for exponent in range(8))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("exponent", [0, 4, 8])
def test_power_of_two_is_the_mxfp8_rounding(small, exponent, order):
    problem = small.with_sink(6)
    numerics = replace(StaticPRounding(2.0**exponent, order).numerics, p_scale_log2=exponent)
    expected = attention_forward(problem.operands(), problem.shape, MXFP8Rounding(numerics))
    actual = attention_forward(problem.operands(), problem.shape, StaticPRounding(2.0**exponent, order))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_scale_that_is_no_power_of_two_rounds_otherwise(small):
    p = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    inexact = StaticPRounding(448.0, "reverse").p_forward(p)
    assert not torch.equal(inexact, StaticPRounding(256.0, "reverse").p_forward(p))
    assert StaticPRounding(448.0, "reverse").p_forward(torch.ones(1)).item() == 1.0
    for p_scale in (0.5, 449.0):
        with pytest.raises(ValueError, match="p_scale"):
            StaticPRounding(p_scale, "reverse")


def test_construction(small):
    """Unit-normal scores, lifted by exactly Δ for the sink; without a cast the reference is the oracle."""
    problem = small.with_sink(6)
    scores, before = (p.seeds.double() @ p.keys.double().mT / math.sqrt(p.keys.shape[2]) for p in (problem, small))
    lift = scores - before
    assert torch.allclose(lift[..., :NUM_SINKS], torch.full_like(lift[..., :NUM_SINKS], 6.0), rtol=REORDERED_SUM)
    assert not lift[..., NUM_SINKS:].any()
    assert abs(before.std().item() - 1.0) < 5 / math.sqrt(before.numel() / KV_TILE)
    out = attention_forward(problem.operands(), problem.shape, PlainRounding(torch.float32)).out
    assert (out.double() - problem.oracle()).square().mean() < UNROUNDED_MSE


# ---- the order of the keys: each of these fails when `kv_order` is ignored


@pytest.mark.parametrize("p_scale", [1.0, 256.0])
def test_order_decides_whether_a_first_tile_sink_collapses_p(small, p_scale):
    problem = small.with_sink(STRONGEST)
    forward, reverse = (measure(problem, (order, p_scale)) for order in ORDERS)
    assert forward.fraction(KV_TILE) > 0.9
    assert reverse.fraction(KV_TILE) < 0.01
    sink_tile = slice(0, KV_TILE)
    assert torch.equal(forward.underflow[..., sink_tile], reverse.underflow[..., sink_tile])


@pytest.mark.parametrize("p_scale", [1.0, 256.0, 448.0])
def test_order_mirrors_the_tiles(small, p_scale):
    """Forward on tiles in the opposite order is reverse: the same P bit for bit, summed in another order."""
    problem = small.with_sink(10)
    mirrored = problem.with_tiles_reversed(KV_TILE)
    num_tiles = problem.keys.shape[1] // KV_TILE
    underflow, out = {}, {}
    for name, each, order in (("given", problem, "forward"), ("mirrored", mirrored, "reverse")):
        rounding = StaticPRounding(p_scale, order)
        out[name] = attention_forward(each.operands(), each.shape, rounding).out
        underflow[name] = measure(each, (order, p_scale)).underflow.unflatten(-1, (num_tiles, KV_TILE))
    assert underflow["given"].any()
    assert torch.equal(underflow["given"], underflow["mirrored"].flip(-2))
    assert relative_error(out["mirrored"], out["given"]) <= REORDERED_SUM


def test_order_protects_a_sink_in_the_last_tile_only_when_forward(small):
    mirrored = small.with_sink(STRONGEST).with_tiles_reversed(KV_TILE)
    ordinary = slice(0, -KV_TILE)
    forward, reverse = (measure(mirrored, (order, 256.0)).underflow[..., ordinary] for order in ORDERS)
    assert not forward.any()
    assert reverse.double().mean() > 0.9


def test_order_is_nothing_to_a_single_tile():
    problem = make_problem(2, 32, KV_TILE).with_sink(6)
    forward, reverse = (
        attention_forward(problem.operands(), problem.shape, StaticPRounding(256.0, order)).out for order in ORDERS
    )
    assert torch.equal(forward, reverse)


@pytest.mark.parametrize("threshold", [0.0, 4.0])
def test_order_is_obeyed_by_lazy_rescaling(small, threshold):
    """The running maximum is another code path when it moves lazily."""
    problem = small.with_sink(STRONGEST)
    zeros = {}
    for order in ORDERS:
        rounding = StaticPRounding(16.0, order)
        rounding.numerics = replace(rounding.numerics, rescale_threshold_log2=threshold)
        attention_forward(problem.operands(), problem.shape, rounding)
        zeros[order] = torch.cat(rounding.underflow).double().mean()
    assert zeros["forward"] > 2 * zeros["reverse"]


def test_refuses_ragged_tiles():
    with pytest.raises(ValueError, match="num_events"):
        make_problem(1, 1, KV_TILE + 1)
