"""Predictions beside what an H200 took, in cycles of one SM.

    python -m ptxsim.timeline.measured TRACES [--jsonl benchmarks/results/timeline.jsonl]

TRACES is a folder with `<case>.npz` of `tests/ptxsim/timeline_cases.py` (see `published.py`). Cycles are those of ncu's
sm__cycles_active.avg for a launch of `python -m benchmarks.hopper_kernels --once`; the chip's numbers come from
`benchmarks/hopper_units.py` and a device copy, none from these kernels. Cycles, because the clock that NVML reports
under load is not the one that cycles and times give.

A kernel of products is predicted by its steady state; one that streams through device memory by the slower of its
instructions, with as many CTAs on the SM as reside there, and its bytes at the rate of a copy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ptxsim.timeline.analysis import Analysis
from ptxsim.timeline.parameters import Chip, load_chip
from ptxsim.timeline.replay import Timeline
from ptxsim.timeline.trace import Trace

CHIP = "h200"


@dataclass(frozen=True)
class Products:
    """cycles: measured, of the whole launch on one SM; flop: of the launch."""

    case: str
    cycles: float
    flop: float

    def predict(self, trace: Trace, chip: Chip) -> tuple[float, str]:
        analysis = Analysis(Timeline(trace).run(chip))
        flop_of_a_cycle = analysis.tflops * 1e3 / chip["clock_ghz"]  # of the chip
        return self.flop / flop_of_a_cycle, f"tensor core {analysis.tensor_share:.0%} busy"


@dataclass(frozen=True)
class Stream:
    """rows, row_bytes: of the launch, and what must move for each; traced_rows: of the traced CTA; residents: CTAs on
    an SM."""

    case: str
    cycles: float
    rows: int
    row_bytes: float
    traced_rows: int
    residents: int

    def predict(self, trace: Trace, chip: Chip) -> tuple[float, str]:
        replayed = Timeline(trace.repeated(self.residents)).run(chip)
        instructions = replayed.cycles / (self.traced_rows * self.residents)
        memory = self.row_bytes / chip["memory_rate"]
        bound = "device memory" if memory > instructions else "instructions"
        return max(instructions, memory) * self.rows / chip.num_sms, f"bound by {bound}"


FIGURES: tuple[Products | Stream, ...] = (
    Products("flash_forward_h200", 19_230_028, 4.0 * 16 * 16 * 8192**2 * 128),
    Products("flash_backward_h200", 51_886_589, 10.0 * 16 * 16 * 8192**2 * 128),
    Products("gemm_h200", 2_070_936, 2.0 * 8192**3),
    Stream("rmsnorm_h200", 2_923_831, 4_000_000, 4 * 384 + 4, traced_rows=4, residents=16),
    Stream("rmsnorm_quantize_h200", 2_250_134, 4_000_000, (3 + 1 / 1024) * 384 + 4, traced_rows=2048, residents=2),
    Stream("rmsnorm_backward_h200", 4_859_484, 4_000_000, (7 + 1 / 1024) * 384 + 4, traced_rows=2048, residents=2),
)


def compare(figure: Products | Stream, folder: Path) -> dict[str, Any]:
    """One row: predicted, measured, error."""
    cycles, remark = figure.predict(Trace.load(folder / f"{figure.case}.npz"), load_chip(CHIP))
    return {
        "case": figure.case, "chip": CHIP, "predicted cycles": round(cycles), "measured cycles": round(figure.cycles),
        "error": round(cycles / figure.cycles - 1, 3), "remark": remark, "date": date.today().isoformat(),
    }  # fmt: skip


def mean_error(rows: Sequence[dict[str, Any]]) -> float:
    return sum(abs(row["error"]) for row in rows) / len(rows)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, with the mean of the absolute errors."""
    lines = [
        "| kernel on an H200 | predicted cycles of an SM | measured | error | predicted to be |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case'].removesuffix('_h200')} | {row['predicted cycles']:,} | {row['measured cycles']:,} | "
        f"{row['error']:+.1%} | {row['remark']} |"
        for row in rows
    ]
    return "\n".join([*lines, f"\nMean absolute error: {mean_error(rows):.1%}"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m ptxsim.timeline.measured", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jsonl", type=Path, help="append one object for each row")
    arguments = parser.parse_args(argv)
    rows = [compare(figure, arguments.folder) for figure in FIGURES]
    print(table(rows))
    if arguments.jsonl:
        with arguments.jsonl.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
