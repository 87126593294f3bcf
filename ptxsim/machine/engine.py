"""Asynchronous operations: TMA copies, bulk stores, tensor-core work, remote stores.

With `delay` None each completes at once. With a delay each completes at a time drawn from the seed, up to `delay`
warp instructions later: tensor-core operations of a CTA pair in order of issue, bulk stores of a warp in order, others
in any order. That is what hardware may do, and what a missing wait does not survive.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ptxsim.machine.barriers import Wait

if TYPE_CHECKING:
    import random

    from ptxsim.machine.warp import Warp
    from ptxsim.ptx.parse import Instruction

Action = Callable[[Any], None]  # takes the monitor's record of the operation


@dataclass(order=True)
class _Event:
    time: int
    number: int
    finish: Callable[[], None] = field(compare=False)
    what: str = field(compare=False)
    instruction: Instruction = field(compare=False)
    warp: Warp = field(compare=False)

    def complete(self) -> None:
        try:
            self.finish()
        except Exception as error:
            place = f"{self.instruction.where()}: {str(self.instruction)[:200]}"
            error.add_note(f"in {self.what}, issued by {self.warp}, {place}")
            raise


class Engine:
    """The asynchronous units of one cluster."""

    def __init__(self, monitor: Any, rng: random.Random, delay: int | None):
        self.monitor, self.rng, self.delay = monitor, rng, delay
        self.now = 0
        self.completed = 0
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._last: dict[Any, int] = {}  # queue → time of its last operation

    def submit(self, warp: Warp, what: str, action: Action) -> Wait:
        """An operation without order."""
        return self._submit(warp, what, action, self.monitor.start(warp, what), None)

    def submit_store(self, warp: Warp, what: str, action: Action) -> Wait:
        """A bulk store: after the warp's earlier ones."""
        return self._submit(warp, what, action, self.monitor.start_store(warp, what), ("stores", warp))

    def submit_tensor(self, warp: Warp, what: str, action: Action, *, is_commit: bool = False) -> Wait:
        """Tensor-core work: after the earlier work of the CTA pair."""
        pair = warp.cta.rank & ~1
        operation = self.monitor.start_tensor(warp, what, pair, is_commit)
        return self._submit(warp, what, action, operation, ("tensor", pair))

    def submit_product(self, warp: Warp, what: str, action: Action, operation: Any) -> Wait:
        """A wgmma of the warp's warpgroup: after the warpgroup's earlier ones. `operation`: the monitor's record."""
        return self._submit(warp, what, action, operation, ("wgmma", warp.cta.rank, warp.index // 4))

    def _submit(self, warp: Warp, what: str, action: Action, operation: Any, queue: Any) -> Wait:
        wait = Wait(what)

        def finish() -> None:
            action(operation)
            self.completed += 1
            wait.finish(operation.clock)

        if self.delay is None:
            finish()
            return wait
        time = self.now + self.rng.randrange(self.delay)
        if queue is not None:
            time = self._last[queue] = max(time, self._last.get(queue, 0))
        heapq.heappush(self._events, _Event(time, next(self._numbers), finish, what, warp.instruction(), warp))
        return wait

    def run_due(self) -> bool:
        """Complete what is due; whether anything was."""
        was_due = bool(self._events) and self._events[0].time <= self.now
        while self._events and self._events[0].time <= self.now:
            heapq.heappop(self._events).complete()
        return was_due

    def skip_ahead(self) -> bool:
        """Let time pass until the next operation is due; False if there is none."""
        if not self._events:
            return False
        self.now = max(self.now, self._events[0].time)
        return True

    def in_flight(self, cta: Any = None) -> list[tuple[str, int]]:
        """(what, PTX line) of operations under way, of one CTA or of all."""
        return [(each.what, each.instruction.line) for each in self._events if cta is None or each.warp.cta is cta]
