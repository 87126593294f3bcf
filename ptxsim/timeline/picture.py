"""A picture of one steady step: a lane for each warp and each unit of the first CTA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.patches import Patch

from ptxsim.timeline import units
from ptxsim.timeline.analysis import Analysis, Window
from ptxsim.timeline.replay import ON_BARRIER, ON_SCOREBOARD
from ptxsim.timeline.trace import EXECUTED, Kind

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # behind the choice of the backend

COLOURS = {
    "fma": "#4c78a8", "alu": "#f58518", "special": "#e45756", "memory": "#72b7b2", "uniform": "#b279a2",
    "async": "#333333", "branch": "#9d755d", "none": "#9d755d",
}  # fmt: skip
BARRIER, SCOREBOARD = "#bbbbbb", "#dddddd"
STEPS_SHOWN = 1.15
LEAST_BARS = 400  # bars of a warp's lane across the picture


def draw(analysis: Analysis, path: Path | str, title: str) -> None:
    """Write a PNG.

    The height of a colour in a warp's lane is the share of issue cycles of that pipe; grey is waiting, darker for a
    barrier, lighter for a result.
    """
    step = analysis.one_step()
    shown = Window(step.begin, step.begin + STEPS_SHOWN * step.cycles, step.products)
    warps = [int(warp) for warp in np.flatnonzero(analysis.timeline.trace.warps[:, 0] == 0)]
    figure, axes = plt.subplots(figsize=(15, 2 + 0.45 * (len(warps) + 4)))
    labels = ["tensor core (colour: column of D)", "TMA loads in flight", "TMA stores in flight"]
    _units(axes, analysis, shown)
    for lane, warp in enumerate(warps, len(labels)):
        _warp(axes, analysis, warp, lane, shown)
        labels.append(f"warp {int(analysis.timeline.trace.warps[warp, 1])}")
    axes.axvline(step.cycles, color="black", linestyle="--", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, shown.cycles)
    axes.set_xlabel("cycles")
    busy = analysis.product_cycles(step.products).sum()
    axes.set_title(f"{title}\none step {step.cycles:.0f} cycles, tensor core {busy:.0f}", fontsize=10)
    patches = [Patch(color=colour, label=name) for name, colour in list(COLOURS.items())[:6]]
    patches += [Patch(color=BARRIER, label="waits for a barrier"), Patch(color=SCOREBOARD, label="waits for a result")]
    axes.legend(handles=patches, loc="upper right", fontsize=7, ncol=4)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _units(axes: Any, analysis: Analysis, shown: Window) -> None:
    result, rows = analysis.result, analysis.timeline.operations
    rank = np.where(rows["kind"] == Kind.LOAD, rows["rank"], analysis.timeline.trace.warps[rows["warp"], 0])
    visible = (result.begin < shown.end) & (result.end > shown.begin) & (rank == 0)
    products = np.flatnonzero(visible & np.isin(rows["kind"], (Kind.PRODUCT, Kind.WGMMA)))
    columns = sorted(set(rows["column"][products].tolist()))
    for index in products:
        colour = plt.cm.tab10(columns.index(int(rows["column"][index])) % 10)  # type: ignore[attr-defined]
        begin, end = result.begin[index] - shown.begin, result.end[index] - shown.begin
        axes.broken_barh([(begin, max(end - begin - 1, 1))], (-0.4, 0.8), color=colour)
    for lane, kinds in ((1, (Kind.LOAD,)), (2, (Kind.STORE, Kind.REDUCTION))):
        chosen = np.flatnonzero(visible & np.isin(rows["kind"], kinds))
        spans = [(result.begin[index] - shown.begin, result.end[index] - result.begin[index]) for index in chosen]
        axes.broken_barh(spans, (lane - 0.3, 0.6), color="#bbbbff", edgecolor="#5555aa", alpha=0.5)


def _warp(axes: Any, analysis: Analysis, warp: int, lane: int, shown: Window) -> None:
    result, timeline = analysis.result, analysis.timeline
    span = timeline.span(warp)
    issued, ready, causes = result.issued[span], result.ready[span], result.causes[span]
    for cause, colour in ((ON_SCOREBOARD, SCOREBOARD), (ON_BARRIER, BARRIER)):
        waiting = (causes == cause) & (issued > shown.begin) & (ready < shown.end)
        bars = [(begin - shown.begin, end - begin) for begin, end in zip(ready[waiting], issued[waiting], strict=True)]
        axes.broken_barh(bars, (lane - 0.12, 0.24), color=colour)
    inside = (issued >= shown.begin) & (issued < shown.end)
    rows = units.rows(timeline.mapping.code, result.chip)[timeline.streams[span][inside] & ~np.uint32(EXECUTED)]
    width = max(shown.cycles / LEAST_BARS, 4)
    bins = ((issued[inside] - shown.begin) // width).astype(int)
    heights = np.zeros((len(units.PIPES), int(shown.cycles // width) + 1))
    np.add.at(heights, (rows["pipe"], bins), rows["occupancy"])
    heights *= 0.8 / np.maximum(heights.sum(axis=0), width)
    bottom = np.full(heights.shape[1], lane - 0.4)
    places = np.arange(heights.shape[1]) * width
    for pipe, height in zip(units.PIPES, heights, strict=True):
        axes.fill_between(places, bottom, bottom + height, step="post", color=COLOURS[pipe], linewidth=0)
        bottom += height
