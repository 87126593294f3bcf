"""Kernels side by side on one chip: a row each.

    python -m ptxsim.timeline.beside tests/ptxsim/timeline_cases.py:attention_forward_mxfp8 flash.npz --chip gb300

Steps of two kernels compare only if they do the same work: the column "MFLOP" is that of one SM in a step.
"exponentials apart" is how many cycles ptxas leaves between them: `cycles_ex2` of the chip where it feeds the unit at
its full rate, more where it schedules for something else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from ptxsim.timeline.analysis import Analysis
from ptxsim.timeline.command import capture
from ptxsim.timeline.parameters import Chip, chip_names, load_chip
from ptxsim.timeline.path import bubbles
from ptxsim.timeline.replay import Timeline
from ptxsim.timeline.study import bands
from ptxsim.timeline.trace import EXECUTED, Trace


def row(name: str, chip: Chip, draws: int) -> dict[str, str]:
    """Columns of one case or saved trace."""
    timeline = Timeline(Trace.load(name) if name.endswith(".npz") else capture(name, chip))
    analysis, band = Analysis(timeline.run(chip)), bands(timeline, chip, draws)
    step = analysis.one_step()
    longest = max(bubbles(analysis, 0, step), key=lambda bubble: bubble.cycles, default=None)
    waits, mix = analysis.waits(), analysis.mix()
    apart = exponentials_apart(analysis)
    return {
        "kernel": name.rpartition("/")[2],
        "cycles of a step (band)": f"{analysis.step_cycles:,.0f} ({band.step_cycles})",
        "MFLOP": f"{analysis.product_flop(step.products).sum() / 1e6:.1f}",
        "tensor share": f"{analysis.tensor_share:.3f}",
        "instructions of a step": f"{sum(each.total * len(each.warps) for each in mix):,.0f}",
        "exponentials apart": str(apart or "-"),
        "longest bubble": f"{longest.cycles:.0f}" if longest else "0",
        "longest wait": f"{waits[0].share * analysis.step_cycles:.0f} at {waits[0].where}" if waits else "-",
    }


def exponentials_apart(analysis: Analysis) -> int:
    """Cycles that stall counts leave between two in a row in the steady state, the median; 0 without exponentials."""
    timeline, (window, _) = analysis.timeline, analysis.whole_steps()
    code = timeline.mapping.code.instructions
    stalls = np.array([max(instruction.stall, 1) for instruction in code])
    is_exponential = np.array([instruction.opcode.startswith("MUFU.EX2") for instruction in code])
    distances = []
    for warp in np.flatnonzero(timeline.trace.warps[:, 0] == 0):
        span = timeline.span(warp)
        issued = analysis.result.issued[span]
        indices = timeline.streams[span][(issued >= window.begin) & (issued < window.end)] & ~np.uint32(EXECUTED)
        times = np.concatenate([[0], np.cumsum(stalls[indices])])[:-1]
        distances += np.diff(times[is_exponential[indices]]).tolist()
    return round(float(np.median(distances))) if distances else 0


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([each[name] for name in names] for each in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m ptxsim.timeline.beside", description=__doc__)
    parser.add_argument("cases", nargs="+", help="as for `python -m ptxsim timeline`")
    parser.add_argument("--chip", default="b200", choices=chip_names())
    parser.add_argument("--draws", type=int, default=10)
    arguments = parser.parse_args(argv)
    chip = load_chip(arguments.chip)
    print(table([row(case, chip, arguments.draws) for case in arguments.cases]))


if __name__ == "__main__":
    main()
