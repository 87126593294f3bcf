"""Questions to a timeline that need more than one replay: how uncertain is it, and what would change it.

A band comes from draws of all assumed parameters at once, each uniformly from its range: it says how far the prediction
depends on what nobody has measured, and not how wrong the model is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ptxsim.timeline.analysis import Analysis
from ptxsim.timeline.mapping import map_trace
from ptxsim.timeline.parameters import Chip
from ptxsim.timeline.replay import Timeline

DRAWS = 20
SLOW_EXPONENTIALS, FAST_EXPONENTIALS = "sm_100a", "sm_103a"
TENSOR = ("tensor_rate_16bit", "tensor_rate_tf32", "tensor_rate_8bit", "tensor_rate_4bit")
BARRIERS = ("arrive", "wake", "block", "commit", "tensor_start", "latency_sync", "latency_fence")
# what is asked → factor for each parameter
WHAT_IF: dict[str, dict[str, float]] = {
    "tensor core twice as fast": dict.fromkeys(TENSOR, 2.0),
    "tensor core half as fast": dict.fromkeys(TENSOR, 0.5),
    "tensor memory twice as fast": {"tmem_read_rate": 2.0, "tmem_write_rate": 2.0},
    "shared memory twice as fast": {"shared_rate": 2.0},
    "packed FMA twice as fast": {"cycles_fma2": 0.5},
    "ALU and conversions twice as fast": {"cycles_alu": 0.5, "cycles_convert": 0.5},
    "loads at three quarters of the rate": {"load_rate": 0.75},
    "loads half as long again": {"load_latency": 1.5},
    "no synchronisation latency": dict.fromkeys(BARRIERS, 0.0),
    "twice the synchronisation latency": dict.fromkeys(BARRIERS, 2.0),
    "free taken branches": {"branch_taken": 0.0},
}


@dataclass(frozen=True)
class Band:
    """Least, middle and greatest of a quantity over the draws."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Band:
        ordered = sorted(values)
        return cls(ordered[0], ordered[len(ordered) // 2], ordered[-1])

    def __str__(self) -> str:
        digits = 3 if self.high < 10 else 0
        return f"{self.low:.{digits}f} / {self.median:.{digits}f} / {self.high:.{digits}f}"


@dataclass(frozen=True)
class Bands:
    """Of the tensor core's share, of the cycles of a step without and with the ends of tiles and of the launch, and of
    the chip's TFLOP/s."""

    tensor_share: Band
    step_cycles: Band
    mean_step_cycles: Band
    cycles: Band
    tflops: Band


def bands(timeline: Timeline, chip: Chip, draws: int = DRAWS, seed: int = 0, period: int | None = None) -> Bands:
    """Replay with the chip as it is and with random draws of the assumed parameters.

    period: products of a step, if it is known; else it is found.

    Raises:
        ValueError: fewer than one draw.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    rng = random.Random(seed)
    base = Analysis(timeline.run(chip), period)
    analyses = [base, *(Analysis(timeline.run(chip.drawn(rng)), base.period) for _ in range(draws))]
    return Bands(
        Band.of([each.tensor_share for each in analyses]),
        Band.of([each.step_cycles for each in analyses]),
        Band.of([each.mean_step_cycles for each in analyses]),
        Band.of([each.result.cycles for each in analyses]),
        Band.of([each.tflops for each in analyses]),
    )


def what_if(timeline: Timeline, chip: Chip, period: int | None = None) -> dict[str, float]:
    """Cycles of a step under each change, as a share of the unchanged chip's."""
    base = Analysis(timeline.run(chip), period)
    answers = {}
    if chip.arch == SLOW_EXPONENTIALS:  # ptxas schedules around their rate, so that the code changes too
        other = Timeline(timeline.trace, map_trace(timeline.trace, FAST_EXPONENTIALS))
        answers[f"exponentials twice as fast, code for {FAST_EXPONENTIALS}"] = scaled(chip, {"cycles_ex2": 0.5}), other
    answers |= {question: (scaled(chip, factors), timeline) for question, factors in WHAT_IF.items()}
    return {
        question: Analysis(run.run(changed), base.period).step_cycles / base.step_cycles
        for question, (changed, run) in answers.items()
    }


def scaled(chip: Chip, factors: dict[str, float]) -> Chip:
    """The chip with parameters multiplied."""
    return chip.changed(**{name: chip[name] * factor for name, factor in factors.items()})
