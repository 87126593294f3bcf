"""When each warp and unit of a kernel is busy, what waits for what, and how fast the kernel would be.

    python -m ptxsim timeline path/to/case.py:function --chip b200 --picture step.png
    python -m ptxsim timeline trace.npz --chip gb300

PTX lines have their line of Python where the DSL was told to say it, before it compiles: CUTE_DSL_LINEINFO=1.

A case takes options of `ptxsim.simulate`, as for `mutate`; its traces can be kept with --save and replayed without
running it again. The prediction assumes that every SM is busy with the same steady state.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ptxsim.mutate import load_case
from ptxsim.timeline import path, study
from ptxsim.timeline.analysis import Analysis
from ptxsim.timeline.parameters import Chip, chip_names, load_chip
from ptxsim.timeline.replay import Timeline
from ptxsim.timeline.trace import Trace

ROWS = 12  # of the table of waits
OPCODES = 12  # of a warp's instructions
NAME_WIDTH = 70
RELEASES_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", help="path.py[:function] that takes options of ptxsim.simulate, or a saved trace.npz")
    parser.add_argument("--chip", default="b200", choices=chip_names(), help="whose parameters to use (default b200)")
    parser.add_argument("--launch", type=int, help="which launch of the case (default: the one with most instructions)")
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="keep the trace")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw one steady step")
    parser.add_argument("--draws", type=int, default=study.DRAWS, help="of the assumed parameters, for the band")
    parser.add_argument(
        "--period", type=int, metavar="PRODUCTS", help="of a step, where ends of tiles hide what repeats"
    )
    parser.add_argument("--least-bubble", type=float, default=100, metavar="CYCLES", help="of those that are listed")
    parser.add_argument("--no-what-if", action="store_true", help="leave the what-if table out")


def main(arguments: argparse.Namespace) -> int:
    chip = load_chip(arguments.chip)
    if arguments.draws < 1:
        print(f"--draws must be at least 1, got {arguments.draws}", file=sys.stderr)
        return 2
    trace = _trace(arguments, chip)
    if arguments.save:
        trace.save(arguments.save)
    timeline = Timeline(trace)
    analysis = Analysis(timeline.run(chip), arguments.period)
    print(_header(analysis))
    print(_waits(analysis))
    print(_chain(analysis))
    print(_bubbles(analysis, arguments.least_bubble))
    print(_occupancy(analysis))
    print(_mix(analysis))
    if arguments.picture:
        from ptxsim.timeline.picture import draw  # needs matplotlib

        draw(analysis, arguments.picture, f"{trace.kernel[:NAME_WIDTH]} on {chip.name}")
    if not arguments.no_what_if:
        print(_what_if(timeline, chip, arguments.period))
    print(_prediction(analysis, study.bands(timeline, chip, arguments.draws, period=arguments.period)))
    return 0


def _trace(arguments: argparse.Namespace, chip: Chip) -> Trace:
    if arguments.case.endswith(".npz"):
        return Trace.load(arguments.case)
    return capture(arguments.case, chip, arguments.launch)


def capture(case: str, chip: Chip, launch: int | None = None) -> Trace:
    """Run a case of `path.py[:function]` and return the trace of one of its launches.

    Raises:
        ValueError: no such launch.
    """
    traces: list[Trace] = []
    load_case(case)({"timeline": traces, "arch": chip.arch})
    if not traces or (launch is not None and not 0 <= launch < len(traces)):
        raise ValueError(
            f"launch must be in 0 … {len(traces) - 1}, got {launch}" if traces else f"{case} ran no kernel"
        )
    return traces[launch] if launch is not None else max(traces, key=lambda trace: trace.num_instructions)


def _header(analysis: Analysis) -> str:
    trace, mapping, result = analysis.timeline.trace, analysis.timeline.mapping, analysis.result
    kind = f"{analysis.period} products a step" if analysis.period else "no repetition: the step is the whole run"
    return (
        f"{trace.kernel[:NAME_WIDTH]}\n{trace.num_ctas} CTAs of {len(trace.logs) // trace.num_ctas} warps; "
        f"{trace.num_instructions:,} PTX, {len(analysis.timeline.streams):,} machine instructions "
        f"({mapping.code.assembler}, {mapping.followed:.2%} of the anchors followed)\n"
        f"chip {result.chip.name}; {result.cycles:,} cycles, steady step {analysis.step_cycles:.0f} cycles ({kind})"
    )


def _waits(analysis: Analysis) -> str:
    lines = ["", "waits for barriers, share of the steady state for each warp that waits", ""]
    lines.append(f"{'share':>6}  {'cycles':>7}  {'barrier':>8}  {'warps':<12} waits at, released by (PTX lines)")
    step_share = analysis.step_cycles
    for row in analysis.waits()[:ROWS]:
        released = sorted(row.released_by)
        more = f" and {len(released) - RELEASES_SHOWN} more" if len(released) > RELEASES_SHOWN else ""
        barrier = "?" if row.barrier < 0 else f"{row.barrier:#x}"
        lines.append(
            f"{row.share:6.1%}  {row.share * step_share:7.0f}  {barrier:>8}  {_ranges(sorted(row.warps)):<12} "
            f"{row.where} <- {', '.join(released[:RELEASES_SHOWN])}{more}"
        )
    return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5\""""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _chain(analysis: Analysis) -> str:
    lines = ["", "what one step waited for: from its first product to that of the next step", ""]
    lines.append(f"{'from':>6}  {'cycles':>7}  {'where':<16} PTX lines, and what the cycles went to")
    begin = analysis.one_step().begin
    for leg in path.step_chain(analysis):
        lines.append(
            f"{leg.begin - begin:6.0f}  {leg.cycles:7.0f}  {leg.place:<16} {leg.first}-{leg.last}: {_causes(leg)}"
        )
    return "\n".join(lines)


def _causes(leg: path.Leg) -> str:
    return ", ".join(f"{cause} {cycles:.0f}" for cause, cycles in leg.causes.most_common() if cycles >= 1)


def _bubbles(analysis: Analysis, least: float) -> str:
    lines = [
        "",
        f"tensor core idle for {least:.0f} cycles or more in that step, and what the next product waited for",
        "",
    ]
    begin = analysis.one_step().begin
    for bubble in path.bubbles(analysis, least):
        legs = "; ".join(f"{leg.place} {leg.cycles:.0f} ({_causes(leg)})" for leg in bubble.chain)
        lines.append(f"{bubble.begin - begin:6.0f}  {bubble.cycles:7.0f}  {legs}")
    return "\n".join(lines) if len(lines) > 3 else "\n".join([*lines, "none"])


def _mix(analysis: Analysis) -> str:
    lines = ["", "machine instructions of one warp in a step", ""]
    for row in analysis.mix():
        shown = ", ".join(f"{count:.0f} {opcode}" for opcode, count in list(row.counts.items())[:OPCODES])
        lines.append(f"warps {_ranges(sorted(row.warps)):<8} {row.total:6.0f}  {shown}")
    return "\n".join(lines)


def _occupancy(analysis: Analysis) -> str:
    shares = sorted(analysis.occupancy().items(), key=lambda item: -item[1])
    return "\n".join(["", "busy share of each unit, steady state", "", *(f"{v:6.1%}  {name}" for name, v in shares)])


def _what_if(timeline: Timeline, chip: Chip, period: int | None) -> str:
    lines = ["", "what if: cycles of a step against the chip as it is", ""]
    lines += [f"{share - 1:+7.1%}  {question}" for question, share in study.what_if(timeline, chip, period).items()]
    return "\n".join(lines)


def _prediction(analysis: Analysis, bands: study.Bands) -> str:
    chip = analysis.result.chip
    number = chip.numbers["clock_ghz"]
    span = f", drawn from {number.low} to {number.high}" if number.is_assumed else ""
    lines = ["", "prediction (least / median / greatest over the draws of assumed parameters)", ""]
    lines.append(f"cycles of a step     {analysis.step_cycles:.0f}  ({bands.step_cycles})")
    lines.append(f"with ends of tiles   {analysis.mean_step_cycles:.0f}  ({bands.mean_step_cycles})")
    lines.append(f"of the launch        {analysis.result.cycles}  ({bands.cycles})")
    if len(analysis.products):
        lines.append(f"tensor core's share  {analysis.tensor_share:.3f}  ({bands.tensor_share})")
        lines.append(
            f"TFLOP/s of the chip  {analysis.tflops:.0f}  ({bands.tflops}), {chip.num_sms} SMs at "
            f"{chip['clock_ghz']} GHz{span}"
        )
    return "\n".join(lines)
