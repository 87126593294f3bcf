"""Kept results as pictures: for each problem a panel, for each variant the time of its newest result.

    python -m benchmarks.charts [attention_forward ...] [--out FOLDER]

Draws results/<name>.jsonl of the benchmarks that compare variants as FOLDER/<name>.png; all where none is named.
"""

import argparse
import json
from pathlib import Path

import matplotlib

from benchmarks.record import RESULTS

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # behind the choice of the backend

OURS, OTHERS = "#2a6fbb", "#9aa5b1"
BAR_INCHES = 0.34


def newest(path: Path) -> dict[str, list[dict]]:
    """Rows that have a problem, a variant and a time, by problem; of several the last that was added."""
    rows: dict[tuple[str, str], dict] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if {"problem", "variant", "ms"} <= row.keys():
            rows[row["problem"], row["variant"]] = row
    problems: dict[str, list[dict]] = {}
    for (problem, _), row in rows.items():
        problems.setdefault(problem, []).append(row)
    return problems


def draw(path: Path, picture: Path) -> None:
    """One picture. Raises ValueError where the results compare no variants."""
    problems = newest(path)
    if not problems:
        raise ValueError(f"{path.name} compares no variants: rows need a problem, a variant and ms")
    sizes = [len(rows) for rows in problems.values()]
    figure, panels = plt.subplots(
        len(problems), 1, figsize=(9, BAR_INCHES * sum(sizes) + 0.75 * len(sizes) + 0.6), squeeze=False,
        gridspec_kw={"height_ratios": [size + 0.6 for size in sizes]},
    )  # fmt: skip
    for axes, (problem, rows) in zip(panels[:, 0], problems.items(), strict=True):
        colours = [OURS if is_ours(row) else OTHERS for row in rows]
        bars = axes.barh([row["variant"] for row in rows], [row["ms"] for row in rows], height=0.7, color=colours)
        axes.bar_label(bars, [label(row) for row in rows], padding=4, fontsize=8)
        axes.set_title(problem, fontsize=9, loc="left")
        axes.set_xlim(0, 1.3 * max(row["ms"] for row in rows))
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("milliseconds", fontsize=8)
    devices = sorted({row["device"] for rows in problems.values() for row in rows})
    figure.suptitle(f"{path.stem}, {', '.join(devices)}", fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def is_ours(row: dict) -> bool:
    """Whether the kernel is of this project: where there is a peer, all that are not it are variants of ours."""
    return row["times peer"] != 1.0 if "times peer" in row else row["variant"].startswith("pma")


def label(row: dict) -> str:
    """The time, and what it is beside the peer, or of copy bandwidth."""
    text = f"{row['ms']:.3g} ms"
    if "times peer" in row:
        return f"{text}, {row['times peer']:.2f}x"
    return f"{text}, {row['share of copy']:.0%} of copy" if "share of copy" in row else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of benchmarks, all that compare variants if none is given")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    paths = [RESULTS / f"{name}.jsonl" for name in arguments.names]
    if missing := [path.stem for path in paths if not path.exists()]:
        parser.error(f"no results of {', '.join(missing)}; there are {', '.join(sorted(p.stem for p in results()))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in paths or [path for path in results() if newest(path)]:
        draw(path, arguments.out / f"{path.stem}.png")
        print(arguments.out / f"{path.stem}.png")


def results() -> list[Path]:
    return sorted(RESULTS.glob("*.jsonl"))


if __name__ == "__main__":
    main()
