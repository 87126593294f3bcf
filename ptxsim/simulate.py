"""`with simulate(…):` run unmodified CuTe DSL code on CPU tensors; its kernels run in the simulator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from ptxsim.checks.findings import Finding, Suppression
from ptxsim.checks.monitor import Monitor
from ptxsim.host.launches import Launch
from ptxsim.host.session import HostSession
from ptxsim.machine.decode import decode_system
from ptxsim.machine.grid import Grid, Options
from ptxsim.ptx.parse import parse_kernel
from ptxsim.ptx.program import Program
from ptxsim.timeline.capture import Capture
from ptxsim.timeline.trace import Trace

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
CHECKED = Options(delay=3000, poison=True, check_registers=True, monitor=Monitor)


class simulate:
    """A context in which kernels of cutlass-dsl run on the CPU.

        with ptxsim.simulate(arch="sm_100a", num_sms=2, seed=1) as simulation:
            compiled_function(cpu_tensor, …)
        print(simulation.launches, simulation.findings)

    Args:
        arch: what kernels are compiled for and think they run on.
        num_sms: multiprocessors that frameworks see: a small number makes persistent kernels persistent.
        seed: of the order of warps and of the times at which asynchronous operations complete.
        checks: False runs without any checker, operations complete at once, about four times as fast.
        check_bounds: loads and stores to global memory must hit a tensor that was passed in.
        suppressions: findings that are none.
        patch: (PTX, kernel name) → PTX, to plant faults.
        timeline: keep a trace of the longest cluster of each launch in `traces`, for `ptxsim.timeline`; runs unchecked.
            A list instead of True gets the traces too.
        options: fields of `Options` by name, over what `checks` chooses.
    """

    def __init__(
        self, arch: str = "sm_100a", num_sms: int = 2, *, seed: int = 0, checks: bool = True,
        check_bounds: bool = False,
        suppressions: Sequence[Suppression] = (), patch: Callable[[str, str], str] | None = None,
        timeline: bool | list[Trace] = False, **options: object,
    ):  # fmt: skip
        if arch not in ARCHITECTURES:
            raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
        self.is_traced = timeline is not False
        self.traces: list[Trace] = timeline if isinstance(timeline, list) else []
        chosen = CHECKED if checks and not self.is_traced else Options()
        self.options = replace(chosen, seed=seed, **options)  # type: ignore[arg-type]
        self.num_sms, self.check_bounds, self.patch = num_sms, check_bounds, patch
        self.suppressions = list(suppressions)
        self.launches: list[Grid] = []
        self.findings: list[Finding] = []
        self._session = HostSession(arch, num_sms, self._run)

    def __enter__(self) -> simulate:
        self._session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)

    def _run(self, launch: Launch) -> None:
        ptx = self.patch(launch.ptx, launch.kernel) if self.patch else launch.ptx
        options = self.options
        if self.check_bounds:
            options = replace(options, global_ranges=tuple(self._session.tensor_ranges()))
        capture = Capture()
        if self.is_traced:
            options = replace(options, delay=None, monitor=capture)
        grid = Grid(load_program(ptx, launch.kernel), launch, options, self.num_sms)
        try:
            grid.run()
            if self.is_traced:
                self.traces.append(capture.take(launch.kernel, ptx))
        finally:
            self.launches.append(grid)
            self.findings += [each for each in grid.findings if not any(s.covers(each) for s in self.suppressions)]


@functools.lru_cache(maxsize=64)
def load_program(ptx: str, kernel: str) -> Program:
    """Parse and decode a kernel, once for each text."""
    return Program(parse_kernel(ptx, kernel), decode_system)
