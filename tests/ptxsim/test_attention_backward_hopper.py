"""Hopper's attention backward in the simulator: right beside float64, no trace of neighbours and pads, silent."""

import importlib
from collections.abc import Callable

import pytest
from hopper_backward import CASES, check, gradients

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
