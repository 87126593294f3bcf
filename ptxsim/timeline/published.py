"""Predictions beside published figures.

    python -m ptxsim.timeline.published TRACES [--jsonl benchmarks/results/timeline.jsonl]

TRACES is a folder with `<case>.npz` of `tests/ptxsim/timeline_cases.py`, each kept with `python -m ptxsim timeline
tests/ptxsim/timeline_cases.py:<case> --chip <chip> --save TRACES/<case>.npz`. No parameter was fitted to a figure that
stands here; where a chip's clock comes from products of the same kind the row says so and is left out of the mean.
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
from ptxsim.timeline.parameters import load_chip
from ptxsim.timeline.replay import Timeline
from ptxsim.timeline.study import bands
from ptxsim.timeline.trace import Trace

GB200_CSV = "cudnn-frontend, benchmark/sdpa_benchmark_training/results/llama3.1/gb200/llama3.1_20260813_111214.csv"
GB300_CSV = "cudnn-frontend, benchmark/attention_training/results/llama3.1/gb300/llama3.1_20260928_174357.csv"


@dataclass(frozen=True)
class Figure:
    """tflops: published, the middle of a range. is_independent: no parameter of the chip comes from such a figure."""

    case: str
    chip: str
    tflops: float
    source: str
    is_independent: bool = True


FIGURES = (
    Figure("flash_forward", "b200", 1609, "FlashAttention-4 paper (arXiv 2603.05451) and together.ai: 1605 to 1613"),
    Figure("flash_forward_causal", "gb200", 1734, f"{GB200_CSV}, S = 16384, best of its lengths"),
    Figure("flash_forward_gb300", "gb300", 2138, f"{GB300_CSV}, S = 16384"),
    Figure("flash_backward", "gb200", 1553, f"{GB200_CSV}, S = 8192, best of its lengths"),
    Figure("flash_backward_gb300", "gb300", 1563, f"{GB300_CSV}, S = 16384"),
    Figure("cudnn_forward", "gb300", 2823, f"{GB300_CSV}, cudnn_oss MXFP8, S = 16384"),
    Figure("gemm", "b200", 1744, "75 to 80 % of 2250, not citable; the clock comes from a GEMM", is_independent=False),
    Figure("flash_forward_h200", "h200", 667, "measured on one H200: 16 x 8192, 16 heads"),
    Figure("gemm_h200", "h200", 695, "measured on one H200: 680 to 710; the clock is that of products alone", False),
)


def compare(figure: Figure, folder: Path, draws: int) -> dict[str, Any]:
    """One row: predicted with its band, published, error."""
    chip = load_chip(figure.chip)
    timeline = Timeline(Trace.load(folder / f"{figure.case}.npz"))
    analysis, band = Analysis(timeline.run(chip)), bands(timeline, chip, draws)
    return {
        "case": figure.case, "chip": figure.chip, "step cycles": round(analysis.step_cycles),
        "tensor share": round(analysis.tensor_share, 3),
        "tensor share, band": [round(each, 3) for each in vars(band.tensor_share).values()],
        "TFLOP/s": round(analysis.tflops), "TFLOP/s, band": [round(each) for each in vars(band.tflops).values()],
        "clock GHz": chip["clock_ghz"], "published": figure.tflops,
        "error": round(analysis.tflops / figure.tflops - 1, 3),
        "error of the median": round(band.tflops.median / figure.tflops - 1, 3),
        "is independent": figure.is_independent, "source": figure.source, "date": date.today().isoformat(),
        "assembler": timeline.mapping.code.assembler,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, with the mean of the absolute errors."""
    lines = ["| kernel | chip | cycles of a step | tensor share | TFLOP/s (band) | published | error (median draw) |"]
    lines.append("|" + "---|" * 7)
    for row in rows:
        low, median, high = row["TFLOP/s, band"]
        mark = "" if row["is independent"] else " *"
        lines.append(
            f"| {row['case']} | {row['chip']} | {row['step cycles']:,} | {row['tensor share']:.3f} | "
            f"{row['TFLOP/s']:,} ({low:,} / {median:,} / {high:,}) at {row['clock GHz']} GHz | {row['published']:,} | "
            f"{row['error']:+.0%} ({row['error of the median']:+.0%}){mark} |"
        )
    independent = [row for row in rows if row["is independent"]]
    if independent:
        means = [
            sum(abs(row[key]) for row in independent) / len(independent) for key in ("error", "error of the median")
        ]
        lines.append(f"\nMean absolute error without *: {means[0]:.1%}, of the median draw {means[1]:.1%}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m ptxsim.timeline.published", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jsonl", type=Path, help="append one object for each row")
    parser.add_argument("--draws", type=int, default=20)
    arguments = parser.parse_args(argv)
    present = [figure for figure in FIGURES if (arguments.folder / f"{figure.case}.npz").exists()]
    rows = [compare(figure, arguments.folder, arguments.draws) for figure in present]
    print(table(rows))
    if arguments.jsonl:
        with arguments.jsonl.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
