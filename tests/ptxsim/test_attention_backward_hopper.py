"""Hopper's attention backward in the simulator: right beside float64, no trace of neighbours and pads, silent."""

import importlib
from collections.abc import Callable

import pytest
import torch
from hopper_backward import CASES, call, check, expected_gradients, gradients, make, with_dout
from jagged_attention import SHORT, part, spoil

from pma.kernels.attention_backward.hopper_spec import choose_config
from pma.kernels.device_facts import SM90
from pma.layouts import BLOCK, MXFP8Tensor, quantize

pytestmark = [pytest.mark.ptxsim]


@pytest.fixture
def on(simulated, gpu_stand_in) -> Callable:
    """`with on(num_sms, seed):` the launchers run in the simulator."""
    names = ("sm90", "seed_statistics")
    modules = [importlib.import_module(f"pma.kernels.attention_backward.{name}") for name in names]

    def start(num_sms: int, seed: int = 0):
        gpu_stand_in(SM90, num_sms, *modules)
        return simulated(arch="sm_90a", num_sms=num_sms, seed=seed, check_bounds=True)

    return start


BY_DEFAULT = (
    "every length", "heads of 64", "seeds of each segment", "fp16 dQ", "640 seeds", "dO of many scales",
    "clusters of two", "clusters of two, every length", "clusters of two, V of many scales",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.full) for n in CASES])
def test_right_and_silent(on, name):
    p = CASES[name]
    with on(p.spec.num_heads):
        actual = gradients(p)
    check(p, actual)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("name", CASES)
def test_right_and_silent_whatever_the_order(on, name, seed):
    p = CASES[name]
    with on(p.choices.get("ctas", 1) * p.spec.num_heads * (1 + seed % 2), seed):
        actual = gradients(p)
    check(p, actual)


def test_events_without_weight_get_zero(on):
    """All of a block's dS may underflow: its scale is the least, whose inverse times any factor could overflow."""
    p = make((128,), 128, 1, 64)
    dout = p.dout._replace(scales=p.dout.scales + 30)
    p = p._replace(lse=p.lse + 200.0, dout=dout, delta=p.delta * 2.0**30)  # weights of 2^-288, a factor above 1
    with on(1):
        dq, dk, dv = call(p)()
    for gradient in (dk, dv):
        assert (gradient.data & 0x7F == 0).all() and (gradient.scales == 0).all()
    assert (dq == 0).all()


@pytest.mark.parametrize("block", range(4))
def test_the_largest_events_choose_the_scale_of_ds(on, block):
    """V of one block of 32 is 2^10 larger, its signs alternate so that δ is small, and dO is parallel: |dS| is at its
    bound, so that a scale chosen by the other blocks would leave E4M3."""
    p = make((128,), 128, 1, 64)
    signs, first = 1.0 - 2.0 * (torch.arange(len(p.forward.k.data)) % 2), int(p.forward.offsets[0]) + block * BLOCK
    sizes = torch.full_like(signs, 2.0**-6)
    sizes[first : first + BLOCK] *= 2.0**10
    v = (signs * sizes).unsqueeze(1).expand(-1, 128).contiguous()
    headroom = p.spec.numerics.dp_headroom_exponent
    forward = p.forward._replace(
        k=p.forward.k._replace(scales=p.forward.k.scales - 12),  # scores near 0
        v=MXFP8Tensor(*quantize(v, p.forward.offsets, columns_per_scale=128, headroom_exponent=headroom)),
    )
    p = with_dout(p.spec, forward, torch.ones(64, 128), {})
    with on(1):
        actual = gradients(p)
    check(p, actual)


@pytest.mark.parametrize("ctas", [1, 2])
def test_the_order_of_completion_changes_no_bit(on, ctas):
    """With a slab of each cluster; dK and dV always."""
    p, results = make(SHORT, 128, 1, 128, slabs=0, ctas=ctas), []
    for seed in range(3):
        with on(2 * ctas, seed):
            results.append(gradients(p))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["32 seeds, one head of 64", "clusters of two, V of many scales"])
def test_neighbours_change_no_bit(on, name):
    p = CASES[name]
    begins, segment = p.forward.offsets.tolist(), 2
    alone = p._replace(
        forward=part(p.forward, segment),
        dout=MXFP8Tensor(*(each.unflatten(0, (len(begins) - 1, -1))[segment] for each in p.dout)),
        delta=p.delta.unflatten(0, (len(begins) - 1, -1))[segment],
        lse=p.lse[segment : segment + 1],
        row_sum_log2=p.row_sum_log2[segment : segment + 1],
    )
    with on(1):
        together = gradients(p)
    with on(1):
        single = gradients(alone)
    for which in ("dk", "dv"):
        whole = getattr(together, which)[begins[segment] : begins[segment + 1]]
        assert torch.equal(whole, getattr(single, which)), which


@pytest.mark.parametrize("ctas", [1, 2])
def test_nan_of_an_element_goes_where_the_reference_has_it(on, ctas):
    """A NaN in K, V, Q or dO; in rows of dK and dV, in dQ, and nowhere else."""
    p = make((40, 129, 33), 128, 1, 64, ctas=ctas)
    begins = p.forward.offsets.tolist()
    places = {"k": (begins[1] + 100, 5), "v": (begins[2] + 3, 7)}
    for name, place in places.items():
        spoiled = p._replace(forward=p.forward._replace(**{name: spoil(getattr(p.forward, name), place)}))
        with on(1):
            actual = gradients(spoiled)
        for ours, theirs in zip(actual, expected_gradients(spoiled), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan()), name
    spoiled = p._replace(dout=spoil(p.dout, (64 + 9, 3)))
    with on(1):
        actual = gradients(spoiled)
    assert actual.dv[: begins[1]].isfinite().all() and actual.dv[begins[2] :].isfinite().all()
    assert actual.dv[begins[1] : begins[2], 3].isnan().all()


@pytest.mark.parametrize("ctas", [1, 2])
def test_no_events_at_all(on, ctas):
    for lengths in ((0, 0, 0), ()):
        p = make(lengths, 128, 1, 64, ctas=ctas)
        with on(2):
            result = gradients(p)
        assert all((each == 0).all() for each in result)


def test_choices_reach_the_configuration():
    p = make((1,), 128, 1, 200, stages=2, q_is_resident=False, slabs=7, ctas=2)
    config = choose_config(p.spec, SM90, **p.choices)
    assert (config.stages, config.q_is_resident, config.slabs, config.ctas) == (2, False, 7, 2)
