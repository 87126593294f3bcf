"""Guards a kernel's speed without a GPU: cycles of a steady step against a recorded figure.

    check("attention forward", trace, chip="b200", figures=Path(__file__).parent / "step_cycles.json")

The model is wrong by more than the growth that this catches, but by the same amount before and after a change.
"""

from __future__ import annotations

import json
from pathlib import Path

from ptxsim.timeline.analysis import Analysis
from ptxsim.timeline.parameters import load_chip
from ptxsim.timeline.replay import Timeline
from ptxsim.timeline.trace import Trace

GROWTH = 0.10


class SlowerThanRecorded(AssertionError):
    """A steady step takes more cycles than the recorded figure allows."""


def step_cycles(trace: Trace, chip: str) -> float:
    """Cycles of a steady step of a trace, the median; of the whole run if nothing repeats."""
    return Analysis(Timeline(trace).run(load_chip(chip))).step_cycles


def check(name: str, trace: Trace, chip: str, figures: Path, growth: float = GROWTH) -> float:
    """Compare with the figure of that name in a JSON file of {name: {chip: cycles}}; returns the cycles.

    Raises:
        SlowerThanRecorded: more than `growth` above the figure.
        KeyError: no figure is recorded; the message holds the one to write.
    """
    cycles = step_cycles(trace, chip)
    recorded = json.loads(figures.read_text()).get(name, {}).get(chip) if figures.exists() else None
    if recorded is None:
        raise KeyError(f"{figures} has no figure for {name!r} on {chip}; it takes {cycles:.0f} cycles now")
    if cycles > recorded * (1 + growth):
        raise SlowerThanRecorded(
            f"{name} on {chip}: a step takes {cycles:.0f} cycles, {cycles / recorded - 1:+.0%} on the recorded "
            f"{recorded:.0f}; allowed is {growth:+.0%}. If that is meant, record the new figure in {figures}"
        )
    return cycles


def record(name: str, trace: Trace, chip: str, figures: Path) -> float:
    """Write the figure that `check` compares with; returns the cycles."""
    cycles = step_cycles(trace, chip)
    known = json.loads(figures.read_text()) if figures.exists() else {}
    known.setdefault(name, {})[chip] = round(cycles)
    figures.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    return cycles
