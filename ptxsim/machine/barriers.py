"""mbarriers, named barriers of a CTA, the barrier of a cluster (PTX ISA 9.7.13).

Lanes that wait hold a `Wait`. Each barrier collects the clocks of those who arrive (None without a race monitor) and
hands their union to those who leave.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Clock = Any  # of ptxsim.checks, or None
Merge = Callable[[Clock, Clock], Clock]


class BarrierMisuse(RuntimeError):
    """More arrivals than a barrier expects."""


@dataclass(eq=False)
class Wait:
    """Something that lanes wait for."""

    what: object  # whose text says it
    is_done: bool = False
    clock: Clock = None

    def finish(self, clock: Clock) -> None:
        self.is_done, self.clock = True, clock


@dataclass(eq=False)
class MBarrier:
    """A phase completes when pending arrivals and pending bytes are both zero (PTX ISA 9.7.13.15)."""

    address: int
    count: int
    merge: Merge
    made_at: Any = None  # a moment as the race monitor counts
    phase: int = 0
    pending_bytes: int = 0
    waiters: list[tuple[int, Wait]] = field(default_factory=list)
    clock: Clock = None  # of arrivals in this phase
    done_clock: Clock = None  # of the phase before

    def __post_init__(self) -> None:
        self.pending = self.count

    def __str__(self) -> str:
        state = f"phase {self.phase}, {self.pending} of {self.count} arrivals and {self.pending_bytes} bytes missing"
        return f"mbarrier at shared {self.address:#x} ({state})"

    def arrive(self, count: int, clock: Clock) -> None:
        self.clock = self.merge(self.clock, clock)
        self.pending -= count
        if self.pending < 0:
            raise BarrierMisuse(f"more arrivals than expected: {self}")
        self._check()

    def expect_bytes(self, count: int) -> None:
        self.pending_bytes += count

    def complete_bytes(self, count: int, clock: Clock) -> None:
        self.clock = self.merge(self.clock, clock)
        self.pending_bytes -= count
        self._check()

    def has_completed(self, parity: int) -> bool:
        """Whether the phase of this parity is over: the running phase has the other one."""
        return self.phase & 1 != parity

    def _check(self) -> None:
        if self.pending or self.pending_bytes:
            return
        parity = self.phase & 1
        self.phase += 1
        self.pending, self.done_clock, self.clock = self.count, self.clock, None
        for waited, wait in self.waiters:
            if waited == parity:
                wait.finish(self.done_clock)
        self.waiters = [entry for entry in self.waiters if not entry[1].is_done]


@dataclass(eq=False)
class NamedBarrier:
    """bar.sync and bar.arrive: counts threads in whole warps."""

    index: int
    merge: Merge
    arrived: int = 0
    expected: int = 0
    waiters: list[Wait] = field(default_factory=list)
    clock: Clock = None

    def __str__(self) -> str:
        return f"barrier {self.index} ({self.arrived} of {self.expected} threads arrived)"

    def arrive(self, threads: int, expected: int, wait: Wait | None, clock: Clock) -> None:
        if self.arrived and expected != self.expected:
            raise BarrierMisuse(f"{self}: a warp names {expected} threads")
        self.clock = self.merge(self.clock, clock)
        self.expected = expected
        self.arrived += threads
        if wait is not None:
            self.waiters.append(wait)
        if self.arrived > expected:
            raise BarrierMisuse(f"more arrivals than expected: {self}")
        if self.arrived == expected:
            for waiter in self.waiters:
                waiter.finish(self.clock)
            self.arrived, self.waiters, self.clock = 0, [], None


@dataclass(eq=False)
class ClusterBarrier:
    """barrier.cluster: arriving and waiting are separate; every live thread of the cluster takes part."""

    threads: int
    merge: Merge
    phase: int = 0
    arrived: int = 0
    waiters: list[Wait] = field(default_factory=list)
    clock: Clock = None
    done_clock: Clock = None

    def __str__(self) -> str:
        return f"barrier.cluster ({self.arrived} of {self.threads} threads arrived)"

    def arrive(self, threads: int, clock: Clock) -> None:
        self.clock = self.merge(self.clock, clock)
        self.arrived += threads
        self._check()

    def retire(self, threads: int) -> None:
        """Threads that have exited take part no more."""
        self.threads -= threads
        if self.threads:
            self._check()

    def _check(self) -> None:
        if self.arrived < self.threads:
            return
        self.arrived, self.phase = 0, self.phase + 1
        self.done_clock, self.clock = self.clock, None
        for waiter in self.waiters:
            waiter.finish(self.done_clock)
        self.waiters = []
