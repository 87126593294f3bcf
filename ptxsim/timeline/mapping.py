"""From executed PTX to executed machine code.

ptxas moves, merges and duplicates instructions, so there is no map from one to the other. But it keeps the order of
what synchronises and of what starts asynchronous work, and the line table says which PTX instruction each of these
comes from. They are the anchors: a warp's log gives the sequence of anchors that it passed, and between two of them the
machine code is walked along the one path free of other anchors whose instructions come from the PTX lines that the log
has in between. What cannot be followed (the two sides of a divergent branch, executed one after the other) is a jump,
and jumps are counted: `Mapping.num_jumps`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ptxsim.ptx.parse import Kernel, parse_kernel
from ptxsim.timeline.machine_code import MachineCode, MachineInstruction, assemble
from ptxsim.timeline.trace import EXECUTED, Trace

WARPGROUP_PRODUCT = "[HQI]GMMA"
# PTX opcode → what its machine instruction begins with. The order of these is kept by ptxas.
ANCHORS = {
    r"mbarrier\.(try|test)_wait": "SYNCS.PHASECHK",
    r"mbarrier\.(arrive|expect_tx|complete_tx)": "SYNCS.ARRIVE",
    r"(bar|barrier)(\.cta)?\.(sync|arrive|red)": "BAR",
    r"barrier\.cluster\.arrive": "UCGABAR_ARV",
    r"barrier\.cluster\.wait": "UCGABAR_WAIT",
    r"tcgen05\.mma": r"UTC[HQIO]MMA",
    r"tcgen05\.commit": "UTCBAR",
    r"tcgen05\.cp": "UTCCP",
    r"tcgen05\.ld": "LDTM",
    r"tcgen05\.st": "STTM",
    r"cp\.(reduce\.)?async\.bulk\.tensor": "UTMA(LDG|STG|REDG)",
    r"cp\.(reduce\.)?async\.bulk\.(shared|global)": "UBLK(CP|RED)",
    r"cp\.async\.bulk\.wait_group": "DEPBAR",
    r"cp\.async\.(ca|cg)": "LDGSTS",
    r"st\.async": "STAS",
    r"clusterlaunchcontrol\.try_cancel": "UGETNEXTWORKID",
    r"wgmma\.mma_async": WARPGROUP_PRODUCT,
    r"wgmma\.wait_group": r"WARPGROUP\.DEPBAR",
    r"ldmatrix": "LDSM",
    r"stmatrix": "STSM",
}
MOST_PATHS = 3000  # tried between two anchors
MOST_VISITS = 64  # of one segment on one path: a loop without anchors
MOST_BETWEEN = 200  # instructions from a wait to the branch on its outcome
SLOW_PATH = 6  # instructions that the repetition of a wait has at least


@dataclass(frozen=True)
class Segment:
    """Machine instructions [first, end), no way in or out between; anchor: PTX instruction of the first, or −1."""

    first: int
    end: int
    anchor: int
    is_guarded: bool  # the anchor may be skipped
    following: tuple[int, ...]  # segments


@dataclass
class Mapping:
    """Machine instructions that each warp executed.

    streams: for each warp uint32 [executed], index of the instruction, with `EXECUTED` unless its guard was false.
    places: for each warp int64 [log], the position in the stream that an anchor of its log is at, −1 for other entries.
    """

    kernel: Kernel
    code: MachineCode
    streams: list[np.ndarray] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list)
    num_anchors: int = 0
    num_jumps: int = 0  # between anchors, for want of a path
    num_lost: int = 0  # executed anchors of which the machine code has no trace

    @property
    def followed(self) -> float:
        """Share of the executed anchors that were found where they are."""
        return 1 - (self.num_jumps + self.num_lost) / max(self.num_anchors + self.num_lost + len(self.streams), 1)


def map_trace(trace: Trace, target: str | None = None) -> Mapping:
    """Assemble a trace's PTX and follow every warp through the machine code. target: instead of the PTX's own."""
    ptx = trace.ptx if target is None else re.sub(r"^(\s*\.target\s+)\w+", rf"\g<1>{target}", trace.ptx, flags=re.M)
    kernel, code = parse_kernel(ptx, trace.kernel), assemble(ptx, trace.kernel)
    walker, mapping = _Walker(kernel, code), Mapping(kernel, code)
    for log in trace.logs:
        stream, places, num_anchors, num_jumps = walker.follow(log)
        mapping.streams.append(stream)
        mapping.places.append(places)
        mapping.num_anchors += num_anchors
        mapping.num_jumps += num_jumps
        mapping.num_lost += walker.num_lost(log)
    return mapping


def machine_pattern(opcode: str) -> str | None:
    """What the machine instruction of a PTX anchor begins with; None: no anchor."""
    return next((machine for ptx, machine in ANCHORS.items() if re.match(ptx, opcode)), None)


class _Walker:
    def __init__(self, kernel: Kernel, code: MachineCode):
        self.code = code.instructions
        self.lines: dict[int, list[int]] = defaultdict(list)  # PTX line → PTX instructions
        for index, instruction in enumerate(kernel.instructions):
            self.lines[instruction.line].append(index)
        self.patterns = [machine_pattern(instruction.opcode) for instruction in kernel.instructions]
        self.origin = [self._origin(index) for index in range(len(self.code))]
        self._resolve_waits()
        self._resolve_products()
        self.segments = list(_segments(self.code, self.origin))
        self.images: dict[int, list[int]] = defaultdict(list)
        for number, segment in enumerate(self.segments):
            if segment.anchor >= 0:
                self.images[segment.anchor].append(number)
        self.sources = [self._sources(segment) for segment in self.segments]
        self.visible = {pc for each in self.sources for pc in each}
        self._paths: dict[tuple, tuple[int, ...] | None] = {}
        self._pieces: dict[tuple, np.ndarray] = {}

    # ------------------------------------------------------------------------------------ what belongs together

    def _origin(self, index: int) -> int:
        """The PTX anchor that a machine instruction comes from, −1 if none."""
        instruction = self.code[index]
        for pc in self.lines.get(instruction.line, ()):
            if self.patterns[pc] and re.match(self.patterns[pc] or "", instruction.opcode):
                return pc
        return -1

    def _resolve_waits(self) -> None:
        """The line table has a wait's slow path only: the branch to it shows which wait the fast path is."""
        for index, instruction in enumerate(self.code):
            if self.origin[index] >= 0 or not instruction.opcode.startswith("SYNCS.PHASECHK"):
                continue
            outcome = instruction.text.split()[1].rstrip(",")
            for other in self.code[index + 1 : index + MOST_BETWEEN]:
                if other.base == "BRA" and other.guard.lstrip("@!") == outcome and other.targets:
                    slow = range(other.targets[0], min(other.targets[0] + SLOW_PATH, len(self.code)))
                    waits = [each for each in slow if self.code[each].opcode.startswith("SYNCS.PHASECHK")]
                    self.origin[index] = self.origin[waits[0]] if waits else -1
                    break

    def _resolve_products(self) -> None:
        """The line table has few wgmmas: the others are those that follow the anchor before them in the PTX."""
        products = [pc for pc, pattern in enumerate(self.patterns) if pattern == WARPGROUP_PRODUCT]
        last = -1
        for index, instruction in enumerate(self.code):
            if re.match(WARPGROUP_PRODUCT, instruction.opcode) and self.origin[index] in (-1, last):
                self.origin[index] = next((pc for pc in products if pc > last), -1)
            last = self.origin[index] if self.origin[index] >= 0 else last

    def _sources(self, segment: Segment) -> Counter[int]:
        """PTX instructions that a segment comes from; of a line with several the first stands for all."""
        lines = (self.code[index].line for index in range(segment.first, segment.end))
        return Counter(self.lines[line][0] for line in lines if line in self.lines)

    # -------------------------------------------------------------------------------------------- following

    def follow(self, log: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, int]:
        """→ stream, places, number of anchors, number of jumps"""
        counters, is_executed = log & ~np.uint32(EXECUTED), log >= EXECUTED
        is_anchor = np.isin(counters, list(self.images)) & is_executed
        anchors = np.flatnonzero(is_anchor)
        firsts = np.array([self.lines[line][0] for line in sorted(self.lines) for _ in self.lines[line]])
        pieces: list[np.ndarray] = []
        places = np.full(len(log), -1, np.int64)
        at, begin, size, num_jumps = -1, 0, 0, 0
        for end in [*anchors, len(log)]:
            pc = int(counters[end]) if end < len(log) else -1
            between = counters[begin:end]
            window = tuple(between[firsts[between] == between].tolist())
            begin = end + 1
            path = self._path(at, pc, window)
            if path is None:
                num_jumps += 1
                path = (self._nearest(at, pc),) if pc >= 0 else ()
            for number in path:
                piece = self._piece(number, frozenset(window) | {pc})
                if number == path[-1] and pc >= 0:
                    places[end] = size
                size += len(piece)
                pieces.append(piece)
            if path:
                at = path[-1]
        stream = np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)
        return stream, places, len(anchors), num_jumps

    def num_lost(self, log: np.ndarray) -> int:
        """Anchors that a log has executed and the machine code does not show."""
        lost = [pc for pc, pattern in enumerate(self.patterns) if pattern and pc not in self.images]
        return int(np.isin(log[log >= EXECUTED] & ~np.uint32(EXECUTED), lost).sum())

    def _piece(self, number: int, executed: frozenset[int]) -> np.ndarray:
        segment = self.segments[number]
        key = (number, frozenset(executed & self.sources[number].keys()))
        if key not in self._pieces:
            indices = np.arange(segment.first, segment.end, dtype=np.uint32)
            for place, index in enumerate(range(segment.first, segment.end)):
                instruction = self.code[index]
                lines = self.lines.get(instruction.line, [])
                if not instruction.guard or not lines or lines[0] in executed or any(pc in executed for pc in lines):
                    indices[place] |= np.uint32(EXECUTED)
            self._pieces[key] = indices
        return self._pieces[key]

    def _nearest(self, at: int, pc: int) -> int:
        images = self.images[pc]
        return next((number for number in images if number > at), images[0])

    def _path(self, at: int, pc: int, window: tuple[int, ...]) -> tuple[int, ...] | None:
        """Segments from behind `at` up to the anchor `pc` (−1: to the end of the program); None: there are none."""
        key = (at, pc, window)
        if key not in self._paths:
            self._paths[key] = _Search(self, Counter(each for each in window if each in self.visible)).best(at, pc)
        return self._paths[key]


class _Search:
    """The path that agrees best with the PTX instructions executed in between."""

    def __init__(self, walker: _Walker, wanted: Counter[int]):
        self.walker, self.wanted = walker, wanted
        self.best_score, self.best_path, self.tried = -(10**9), None, 0

    def best(self, at: int, pc: int) -> tuple[int, ...] | None:
        starts = self.walker.segments[at].following if at >= 0 else (0,)
        for number in starts:
            self._extend(number, pc, [], Counter(), 0)
        return self.best_path

    def _extend(self, number: int, pc: int, path: list[int], seen: Counter[int], score: int) -> None:
        """Depth first along straight code, branching where it branches."""
        path, seen = list(path), Counter(seen)
        while True:
            segment = self.walker.segments[number]
            is_goal = pc >= 0 and segment.anchor == pc
            if segment.anchor >= 0 and not is_goal and not segment.is_guarded:
                return
            if is_goal:
                self._offer([*path, number], score)
                if not segment.is_guarded:
                    return
            path.append(number)
            if path.count(number) > MOST_VISITS:
                return
            gain = self._gain(number, seen)
            if path.count(number) > 1 and gain <= 0:
                return
            score += gain
            following = segment.following
            if pc < 0 and self.walker.code[segment.end - 1].base == "EXIT":
                self._offer(path, score)
            if not following:
                return
            if len(following) > 1:
                for other in following[1:]:
                    if self.tried >= MOST_PATHS:
                        break
                    self.tried += 1
                    self._extend(other, pc, path, seen, score)
            number = following[0]

    def _gain(self, number: int, seen: Counter[int]) -> int:
        gain = 0
        for pc, count in self.walker.sources[number].items():
            fresh = min(count, max(self.wanted[pc] - seen[pc], 0))
            gain += fresh - (count - fresh if self.wanted[pc] == 0 else 0)
            seen[pc] += count
        return gain

    def _offer(self, path: list[int], score: int) -> None:
        if score > self.best_score or (score == self.best_score and len(path) < len(self.best_path or ())):
            self.best_score, self.best_path = score, tuple(path)


def _segments(code: tuple[MachineInstruction, ...], origin: list[int]) -> Iterator[Segment]:
    """Cut before anchors and branch targets, and behind branches."""
    cuts = {0, len(code)}
    for index, instruction in enumerate(code):
        cuts.update(instruction.targets)
        if origin[index] >= 0:
            cuts.add(index)
        if instruction.is_branch or instruction.base == "EXIT":
            cuts.add(index + 1)
    bounds = sorted(cuts)
    number_of = {first: number for number, first in enumerate(bounds[:-1])}
    for first, end in zip(bounds, bounds[1:], strict=False):
        last = code[end - 1]
        following = [number_of[end]] if last.may_fall_through and end < len(code) else []
        if last.is_branch and last.base != "CALL":
            following += [number_of[target] for target in last.targets]
        yield Segment(first, end, origin[first], bool(code[first].guard), tuple(dict.fromkeys(following)))
