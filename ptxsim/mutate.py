"""The mutation study: take every wait, fence and barrier out of a kernel in turn, and see whether a test notices.

A case that stays right and silent without a wait does not exercise it: the shape may be too small to wrap a pipeline,
or the wait may be covered by another one. Whether it is executed at all is found by a trap in its place. The study
tells the author of a kernel which synchronisation a test depends on, and the author of a checker what it misses.

    python -m ptxsim mutate path/to/case.py:function --seeds 0,1

where the function takes options of `ptxsim.simulate`, runs the kernel and compares:

    def case(options):
        with ptxsim.simulate(num_sms=1, **options):
            multiply(a, b, out)
        assert torch.equal(out, expected)

Not among the mutants, because nothing is modelled that could tell: fence.acq_rel and fence.mbarrier_init,
tcgen05.fence, griddepcontrol.wait.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ptxsim.checks.findings import Finding, Suppression, read_suppressions
from ptxsim.checks.monitor import Monitor
from ptxsim.machine.cluster import Cluster
from ptxsim.machine.grid import Deadlock, Grid
from ptxsim.ptx.program import Unsupported

Case = Callable[[dict[str, Any]], "str | None"]

MBARRIER_WAIT = "mbarrier wait"
KINDS = {
    MBARRIER_WAIT: r"mbarrier\.(?:try|test)_wait",
    "fence.proxy.async": r"fence\.proxy\.async",
    "tcgen05.wait::ld": r"tcgen05\.wait::ld",
    "tcgen05.wait::st": r"tcgen05\.wait::st",
    "bulk wait_group": r"cp\.async\.bulk\.wait_group",
    "cp.async wait": r"cp\.async\.wait_(?:group|all)",
    "bar.sync": r"(?:bar|barrier)(?:\.cta)?\.sync",
    "barrier.cluster.wait": r"barrier\.cluster\.wait",
    "wgmma.wait_group": r"wgmma\.wait_group",
    "tcgen05.commit": r"tcgen05\.commit",
}
_GUARD = r"@!?%?[\w$]+\s+"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
TRAPPED = "the kernel executed trap"  # what the simulator says
TEXT_WIDTH, DETAIL_WIDTH = 44, 150  # of a table's columns, in characters
MOST_TIME, LEAST_SECONDS = 20, 20.0  # a mutant may take so many times the unmodified kernel's time, at least so long


class StudyRefused(RuntimeError):
    """The unmodified kernel is wrong or has findings, or there is nothing to mutate."""


class NoEnd(RuntimeError):
    """A mutant ran far longer than the unmodified kernel."""


# --------------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """One instruction to take out: its guard, opcode and operands are replaced, so that no PTX line moves."""

    kind: str
    line: int  # of the PTX text, from 1
    text: str
    replacement: str
    begin: int = field(default=0, repr=False)  # where the text is, in characters

    def apply(self, ptx: str) -> str:
        """The PTX with this one change.

        Raises:
            ValueError: it is not the PTX that the mutant was made for.
        """
        return self._replaced(ptx, self.replacement)

    def trapped(self, ptx: str) -> str:
        """The PTX with a trap in its place, which tells whether it is executed at all."""
        guard = re.match(_GUARD, self.text)
        return self._replaced(ptx, (guard[0] if guard else "") + "trap" + "\n" * self.text.count("\n"))

    def _replaced(self, ptx: str, replacement: str) -> str:
        end = self.begin + len(self.text)
        if ptx[self.begin : end] != self.text:
            raise ValueError(f"PTX line {self.line} holds no {self.text!r}")
        return ptx[: self.begin] + replacement + ptx[end:]


def mutants(ptx: str, kernel: str | None = None) -> list[Mutant]:
    """Every wait, fence and barrier of a PTX text, or of one of its kernels, in the order of `KINDS` and of lines."""
    first, end = _extent(ptx, kernel)
    visible = _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), ptx)
    found = []
    for kind, opcode in KINDS.items():
        statement = re.compile(rf"(?P<guard>{_GUARD})?(?<![\w.%$]){opcode}(?![\w])[^\s;]*(?P<operands>[^;]*)")
        for match in statement.finditer(visible, first, end):
            text = ptx[match.start() : match.end()]
            replacement = _replacement(kind, match["guard"] or "", match["operands"]) + "\n" * text.count("\n")
            line = ptx.count("\n", 0, match.start()) + 1
            found.append(Mutant(kind, line, text, replacement, match.start()))
    return found


def _replacement(kind: str, guard: str, operands: str) -> str:
    """Nothing; in place of a wait that gives a predicate, an instruction that sets it."""
    if kind != MBARRIER_WAIT:
        return ""
    return f"{guard}setp.eq.u32 {operands.partition(',')[0].strip()}, 0, 0"


def _extent(ptx: str, kernel: str | None) -> tuple[int, int]:
    """Where an entry's text begins, and where the next one's does."""
    if kernel is None:
        return 0, len(ptx)
    header = re.search(rf"\.entry\s+{re.escape(kernel)}\s*\(", ptx)
    if header is None:
        raise KeyError(f"no entry {kernel} in the PTX")
    following = re.compile(r"\.entry\s").search(ptx, header.end())
    return header.start(), following.start() if following else len(ptx)


# ------------------------------------------------------------------------------------------------ one run


@dataclass
class Outcome:
    """What one run of a case showed, by sign: "finding", "wrong result", "deadlock", "fault", "no end"."""

    signs: dict[str, str] = field(default_factory=dict)  # sign → what was said
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0


def observe(
    case: Case, seed: int = 0, patch: Callable[[str, str], str] = lambda ptx, kernel: ptx, *,
    suppressions: Sequence[Suppression] = (), limit: float | None = None,
) -> Outcome:  # fmt: skip
    """Run a case once, with a change of its PTX, for at most `limit` seconds.

    Findings are read off the grids, which become known through their monitors: a grid that ends in a fault has
    findings too.

    Raises:
        Unsupported: an instruction form that the simulator does not know.
    """
    grids: dict[int, Grid] = {}

    def watch(cluster: Cluster) -> Monitor:
        grids[id(cluster.grid)] = cluster.grid
        return Monitor(cluster)

    outcome, begin = Outcome(), time.perf_counter()
    try:
        with _time_limit(limit):
            complaint = case({"seed": seed, "patch": patch, "monitor": watch})
        if complaint:
            outcome.signs["wrong result"] = str(complaint)
    except Unsupported:
        raise  # of the simulator, not of the kernel
    except Exception as error:
        sign, message = _sign(error)
        outcome.signs[sign] = message
    found = [finding for grid in grids.values() for finding in grid.findings]
    outcome.findings = [each for each in found if not any(s.covers(each) for s in suppressions)]
    if outcome.findings:
        outcome.signs = {"finding": "\n".join(map(str, outcome.findings))} | outcome.signs
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _sign(error: Exception) -> tuple[str, str]:
    """What an exception that left a case is a sign of, and its message."""
    if isinstance(error, AssertionError):
        return "wrong result", str(error) or "AssertionError"
    if isinstance(error, Deadlock):
        return "deadlock", str(error)
    if isinstance(error, NoEnd):
        return "no end", str(error)
    notes = "; ".join(getattr(error, "__notes__", []))
    return "fault", f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise NoEnd in the block after so long. Only the main thread can be interrupted: elsewhere there is no limit."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise NoEnd(f"still running after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -------------------------------------------------------------------------------------------------- study


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. `signs`: how it was noticed → what was said; empty: it was not."""

    kernel: str
    mutant: Mutant
    signs: dict[str, str]
    seed: int  # the first that noticed, or the last that was tried
    seconds: float
    is_executed: bool = True  # by the unmodified kernel, as far as it was asked: noticed mutants are

    @property
    def is_noticed(self) -> bool:
        return bool(self.signs)

    def record(self) -> dict[str, Any]:
        mutant = dataclasses.asdict(self.mutant)
        del mutant["begin"]
        return {"kernel": self.kernel, **mutant, "noticed": self.is_noticed, "how": list(self.signs)} | {
            "executed": self.is_executed, "detail": self.signs, "seed": self.seed, "seconds": round(self.seconds, 3),
        }  # fmt: skip


@dataclass
class Study:
    """The verdicts on the mutants of a case; `str` is a table."""

    verdicts: list[Verdict] = field(default_factory=list)

    def unnoticed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.is_noticed]

    def counts(self) -> dict[str, tuple[int, int]]:
        """For each kind, how many mutants were noticed, of how many."""
        total = Counter(verdict.mutant.kind for verdict in self.verdicts)
        noticed = Counter(verdict.mutant.kind for verdict in self.verdicts if verdict.is_noticed)
        return {kind: (noticed[kind], count) for kind, count in total.items()}

    def json_lines(self) -> str:
        return "".join(json.dumps(verdict.record()) + "\n" for verdict in self.verdicts)

    def __str__(self) -> str:
        lines = []
        for kernel in dict.fromkeys(verdict.kernel for verdict in self.verdicts):
            lines += [
                f"kernel {kernel}",
                f"{'line':>6}  {'kind':20}  {'noticed as':24}  instruction, and what was said",
            ]
            lines += [row(verdict) for verdict in self.verdicts if verdict.kernel == kernel]
        counts = ", ".join(f"{kind} {noticed}/{total}" for kind, (noticed, total) in self.counts().items())
        return "\n".join([*lines, f"noticed: {counts or 'there was nothing to mutate'}"])


def row(verdict: Verdict) -> str:
    """A verdict as a line of the table."""
    mutant = verdict.mutant
    how = ", ".join(verdict.signs) or ("NOT NOTICED" if verdict.is_executed else "never executed")
    text = " ".join(mutant.text.split())
    said = " | ".join(_summary(sign, message) for sign, message in verdict.signs.items())
    detail = f": {said}" if said else ""
    return f"{mutant.line:6}  {mutant.kind:20}  {how:24}  {text[:TEXT_WIDTH]}{detail}"


def _summary(sign: str, message: str) -> str:
    """The beginning of a message; of a deadlock also what the first warp waits for."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    return " ".join(lines[: 2 if sign == "deadlock" else 1])[:DETAIL_WIDTH]


def study(
    case: Case, kernel: str = "", seeds: Sequence[int] = (0, 1), *, limit: int | None = None,
    only: Callable[[Mutant], bool] = lambda mutant: True, suppressions: Sequence[Suppression] = (),
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> Study:  # fmt: skip
    """Run a case unmodified, then once for each mutant of its kernels until a seed notices.

    Args:
        case: takes options for `ptxsim.simulate`; raises AssertionError, or returns a complaint, if results are wrong.
        kernel: regular expression, searched for in the names of the kernels to mutate.
        limit: at most so many mutants.    only: says which mutants to try.
        suppressions: findings that are none.
        progress: told every verdict.
    Raises:
        StudyRefused: the unmodified case is not right and silent under every seed, or launches no such kernel.
    """
    launched: dict[tuple[str, str], None] = {}

    def remember(ptx: str, name: str) -> str:
        if re.search(kernel, name):
            launched[name, ptx] = None
        return ptx

    slowest = 0.0
    for seed in seeds:
        outcome = observe(case, seed, remember, suppressions=suppressions)
        slowest = max(slowest, outcome.seconds)
        if outcome.signs:
            said = "\n".join(f"{sign}: {message}" for sign, message in outcome.signs.items())
            raise StudyRefused(f"the unmodified case is not right and silent, seed {seed}:\n{said}")
    if not launched:
        raise StudyRefused(f"the case launches no kernel whose name matches {kernel!r}, or takes no `patch` option")
    planned = [(name, ptx, mutant) for name, ptx in launched for mutant in mutants(ptx, name) if only(mutant)]
    result = Study()
    for name, ptx, mutant in planned[:limit]:
        verdict = _judge(case, (name, ptx, mutant), seeds, suppressions, max(LEAST_SECONDS, MOST_TIME * slowest))
        result.verdicts.append(verdict)
        progress(verdict)
    return result


def _judge(
    case: Case, target: tuple[str, str, Mutant], seeds: Sequence[int], suppressions: Sequence[Suppression], limit: float
) -> Verdict:
    """Try seeds until one notices."""
    name, ptx, mutant = target
    changed, begin, outcome, seed = mutant.apply(ptx), time.perf_counter(), Outcome(), 0

    def change(launched_ptx: str, launched_name: str) -> str:  # to what `changed` is by then
        return changed if (launched_name, launched_ptx) == (name, ptx) else launched_ptx

    for seed in seeds:
        outcome = observe(case, seed, change, suppressions=suppressions, limit=limit)
        if outcome.signs:
            break
    is_executed = bool(outcome.signs)
    if not is_executed:
        changed = mutant.trapped(ptx)
        is_executed = TRAPPED in observe(case, seed, change, limit=limit).signs.get("fault", "")
    return Verdict(name, mutant, outcome.signs, seed, time.perf_counter() - begin, is_executed)


# ------------------------------------------------------------------------------------------- command line


def load_case(place: str, default: str = "case") -> Case:
    """`path.py[:function]` → the function."""
    path, _, name = place.partition(":")
    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    if not callable(function := getattr(module, name or default, None)):
        raise AttributeError(f"{path} defines no function {name or default}")
    return function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", help="path.py[:function]; the function takes options of ptxsim.simulate")
    parser.add_argument("--kernel", default="", metavar="REGEX", help="mutate kernels with such names only")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N mutants")
    parser.add_argument("--seeds", default="0,1", help="tried in turn until one notices (default 0,1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object per mutant")
    parser.add_argument("--suppressions", type=Path, metavar="FILE", help="TOML file of findings that are none")


def main(arguments: argparse.Namespace) -> int:
    """0: every mutant was noticed. 1: some were not. 2: no study was possible."""
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    suppressions = read_suppressions(arguments.suppressions) if arguments.suppressions else ()

    def tell(verdict: Verdict) -> None:
        print(row(verdict)[:100], file=sys.stderr, flush=True)

    try:
        result = study(
            load_case(arguments.case), arguments.kernel, seeds, limit=arguments.limit, suppressions=suppressions,
            progress=tell,
        )  # fmt: skip
    except StudyRefused as error:
        print(error, file=sys.stderr)
        return 2
    print(result)
    if arguments.json:
        arguments.json.write_text(result.json_lines())
    return 1 if result.unnoticed() else 0
