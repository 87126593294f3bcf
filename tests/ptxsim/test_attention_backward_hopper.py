"""Hopper's attention backward in the simulator: right beside float64, no trace of neighbours and pads, silent."""

import importlib
from collections.abc import Callable

import pytest
from hopper_backward import CASES, call, check, gradients, make

from pma.kernels.device_facts import SM90

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


@pytest.mark.parametrize("name", CASES)
def test_right_and_silent(on, name):
    p = CASES[name]
    with on(p.spec.num_heads):
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
