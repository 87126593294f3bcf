"""The chain behind a product: what it waited for, what that waited for, and so on back in time.

A step takes as long as this chain; shortening anything else changes nothing. Every link is exact in the replay: an
instruction issues late for a stated cause, a phase completes with one last arrival, the tensor core begins a product
when it has arrived and the one before has ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from ptxsim.timeline import units
from ptxsim.timeline.analysis import Analysis, Window
from ptxsim.timeline.replay import ON_BARRIER, ON_PIPE, ON_SCOREBOARD, ON_SELECTION
from ptxsim.timeline.trace import EXECUTED, NO_OPERATION, Kind

TENSOR_KINDS = (Kind.PRODUCT, Kind.WGMMA, Kind.COPY, Kind.COMMIT)
ROUNDING = 1.5  # cycles: operations have fractions of them, instructions have not
MOST_LINKS = 100_000


@dataclass
class Leg:
    """A stay of the chain at one place. causes: cycles by what they went to; first, last: PTX lines, 0 unknown."""

    place: str
    begin: float
    end: float
    first: int = 0
    last: int = 0
    causes: Counter[str] = field(default_factory=Counter)

    @property
    def cycles(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Bubble:
    """The tensor core idle in cycles [begin, end) of a window; chain: what the product behind it waited for."""

    begin: float
    end: float
    chain: list[Leg]

    @property
    def cycles(self) -> float:
        return self.end - self.begin


class Chain:
    """Follows one product of an `Analysis` back in time.

    On a warp: "issue" is one cycle for each instruction, "stall counts" what ptxas put between them (dependencies of
    fixed latency and the pace at which it feeds a pipe), "wakes" the way from an arrival to the warp that waits.
    """

    def __init__(self, analysis: Analysis):
        self.analysis, self.result, self.timeline = analysis, analysis.result, analysis.timeline
        self.rows, self.chip = self.timeline.operations, self.result.chip
        self.arrivals: dict[int, list[int]] = defaultdict(list)
        for index in np.flatnonzero(self.rows["kind"] == Kind.ARRIVE).tolist():
            self.arrivals[int(self.rows["node"][index])].append(index)
        self.issues = self._issue_times()
        ranks = self.timeline.trace.warps[self.rows["warp"], 0]
        busy = np.flatnonzero(np.isin(self.rows["kind"], (Kind.PRODUCT, Kind.WGMMA, Kind.COPY)) & (ranks == 0))
        self.busy = busy[np.argsort(self.result.end[busy], kind="stable")]
        self.legs: list[Leg] = []
        self.begin = 0.0

    def _issue_times(self) -> np.ndarray:
        """When the instruction of each operation issued."""
        places = self.timeline.starts[self.rows["warp"]] + self.rows["position"]
        return self.result.issued[places] if len(places) else np.zeros(0)

    def behind(self, product: int, begin: float) -> list[Leg]:
        """The chain that ends with the start of a product, back to a time; the earliest leg first."""
        self.legs, self.begin = [], begin
        step = self._start(product)
        for _ in range(MOST_LINKS):
            if step is None:
                break
            step = step[0](*step[1:])
        legs = [leg for leg in self.legs if leg.end > begin]
        return legs[::-1]

    # Each of the following adds legs, later ones first, and says how to go on: (method, arguments) or None.

    def _add(self, place: str, begin: float, end: float, what: str = "", line: int = 0) -> Leg:
        leg = Leg(place, max(begin, self.begin), end, line, line)
        if what:
            leg.causes[what] += leg.cycles
        self.legs.append(leg)
        return leg

    def _start(self, operation: int):
        """An operation starts when it has reached its unit and the unit is free."""
        begin, issue = float(self.result.begin[operation]), float(self.issues[operation])
        if begin <= self.begin:
            return None
        is_tensor = self.rows["kind"][operation] in TENSOR_KINDS
        if is_tensor and begin > issue + self.chip["tensor_start"] + ROUNDING:
            before = self._before(begin)
            if before is not None and before != operation:
                return (self._run, before, begin)
        if is_tensor:
            self._add("tensor core", issue, begin, "start", self._line_of(operation))
        elif begin > issue:
            self._add("TMA", issue, begin, "port taken", self._line_of(operation))
        return (self._warp, self._place(operation))

    def _run(self, operation: int, end: float):
        """An operation of the tensor core that something behind it waited for."""
        what = "scales" if self.rows["kind"][operation] == Kind.COPY else "products"
        line, begin = self._line_of(operation), float(self.result.begin[operation])
        if self.legs and self.legs[-1].place == "tensor core" and what in self.legs[-1].causes:
            leg = self.legs[-1]
            leg.causes[what] += leg.begin - max(begin, self.begin)
            leg.begin, leg.first = max(begin, self.begin), line
        else:
            self._add("tensor core", begin, end, what, line)
        return (self._start, operation)

    def _before(self, time: float) -> int | None:
        """What the tensor core ended at that time."""
        ends = self.result.end[self.busy]
        place = int(np.searchsorted(ends, time + ROUNDING)) - 1
        return int(self.busy[place]) if place >= 0 and ends[place] >= time - ROUNDING else None

    def _end(self, operation: int):
        """An operation that a phase waited for."""
        kind, end = int(self.rows["kind"][operation]), float(self.result.end[operation])
        if kind != Kind.COMMIT:
            if kind in TENSOR_KINDS:
                return (self._run, operation, end)
            place = "TMA" if kind in (Kind.LOAD, Kind.STORE, Kind.REDUCTION) else "shared memory"
            name = Kind(kind).name.lower()
            self._add(place, float(self.result.begin[operation]), end, name, self._line_of(operation))
            return (self._start, operation)
        latency = self.chip["commit"] + (self.chip["pair"] if self.rows["group"][operation] == 2 else 0)
        self._add("tensor core", end - latency, end, "commit", self._line_of(operation))
        before = self._before(end - latency)
        if before is not None and end - latency > self.issues[operation] + self.chip["tensor_start"] + ROUNDING:
            return (self._run, before, end - latency)
        return (self._warp, self._place(operation))

    def _place(self, operation: int) -> tuple[int, int]:
        warp = int(self.rows["warp"][operation])
        return warp, int(self.timeline.starts[warp] + self.rows["position"][operation])

    def _warp(self, where: tuple[int, int]):
        """A warp from an instruction back to its last wait for a barrier."""
        warp, place = where
        issued, ready = self.result.issued, self.result.ready
        first = int(self.timeline.starts[warp])
        leg = self._add(self._name(warp), float(issued[place]), float(issued[place]), line=self._line(place))
        while leg.begin > self.begin:
            leg.first = self._line(place)
            lost = float(issued[place] - max(ready[place], self.begin))
            if lost > 0 and self.result.causes[place] == ON_BARRIER:
                return (self._phase, int(self.result.blames[place]), leg)
            if lost > 0:
                leg.causes[self._cause(place)] += lost
            leg.begin = max(float(ready[place]), self.begin)
            if place == first:
                return None
            place -= 1
            spent = leg.begin - max(float(issued[place]), self.begin)
            leg.causes["issue"] += min(spent, 1)
            leg.causes["stall counts"] += max(spent - 1, 0)
            leg.begin -= spent
        return None

    def _phase(self, node: int, leg: Leg):
        """A phase of a barrier: it completes with the last of its arrivals."""
        times = {arrival: self._arrival_time(arrival) for arrival in self.arrivals[node]}
        if not times:
            return None
        last = max(times, key=times.__getitem__)
        leg.causes["wakes"] += leg.begin - max(times[last], self.begin)
        leg.begin = max(times[last], self.begin)
        if leg.begin <= self.begin:
            return None
        source = int(self.rows["source"][last])
        if source != NO_OPERATION:
            return (self._end, source)
        place = self._place(last)
        issue = float(self.result.issued[place[1]])
        leg.causes["wakes"] += leg.begin - max(issue, self.begin)
        leg.begin = max(issue, self.begin)
        return (self._warp, place)

    def _arrival_time(self, arrival: int) -> float:
        source = int(self.rows["source"][arrival])
        return float(self.result.end[source]) if source >= 0 else float(self.issues[arrival]) + self.chip["arrive"]

    def _name(self, warp: int) -> str:
        rank, index = self.timeline.trace.warps[warp]
        return f"warp {index}" + (f" of CTA {rank}" if rank else "")

    def _cause(self, place: int) -> str:
        cause, blame = self.result.causes[place], int(self.result.blames[place])
        if cause == ON_SCOREBOARD:
            return f"result of {self.timeline.mapping.code.instructions[blame].base}"
        if cause == ON_PIPE:
            return f"{units.PIPES[blame]} pipe taken"
        return "other warps issue" if cause == ON_SELECTION else "issue"

    def _line(self, place: int) -> int:
        return self.timeline.mapping.code.instructions[int(self.timeline.streams[place]) & ~EXECUTED].line

    def _line_of(self, operation: int) -> int:
        return self.timeline.mapping.kernel.instructions[int(self.timeline.counters[operation])].line


def step_chain(analysis: Analysis, window: Window | None = None) -> list[Leg]:
    """The chain from the start of a step to the first product of the next one."""
    window = window or analysis.one_step()
    following = analysis.products[analysis.result.begin[analysis.products] >= window.end]
    return Chain(analysis).behind(int(following[0]), window.begin) if len(following) else []


def bubbles(analysis: Analysis, least: float, window: Window | None = None) -> list[Bubble]:
    """Stretches of a step in which the tensor core is idle for at least so many cycles."""
    window, chain = window or analysis.one_step(), Chain(analysis)
    begins, ends = analysis.result.begin[analysis.products], analysis.result.end[analysis.products]
    inside = np.flatnonzero((begins > window.begin) & (begins <= window.end) & (np.arange(len(begins)) > 0))
    found = []
    for place in inside:
        begin, end = float(ends[place - 1]), float(begins[place])
        if end - begin >= least:
            found.append(Bubble(begin, end, chain.behind(int(analysis.products[place]), begin)))
    return found
