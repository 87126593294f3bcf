"""A fixture for tests of kernels: `pytest_plugins = ["ptxsim.pytest_plugin"]`."""

from collections.abc import Callable, Iterator

import pytest

from ptxsim.simulate import simulate


@pytest.fixture
def simulated() -> Iterator[Callable[..., simulate]]:
    """`with simulated(arch="sm_100a", seed=1) as simulation:`; the test fails if any checker has found anything."""
    simulations: list[simulate] = []

    def start(**options: object) -> simulate:
        simulations.append(simulate(**options))  # type: ignore[arg-type]
        return simulations[-1]

    yield start
    findings = [str(finding) for simulation in simulations for finding in simulation.findings]
    assert not findings, "\n".join(["the simulator's checkers found:", *findings])
