"""What an attention sink does to P in E4M3, and what the order of the keys and the static scale S of P repair.

Reproduces the claims of "P-Cast Precision in FP8 Attention: Sink-Induced Collapse and the Optimality of S = 2^8"
(arXiv 2606.06521) with this project's reference. Q, K and V stay in float32, so the cast of P is the only rounding
that matters. Scores of ordinary events are unit normal for every seed; those of each segment's first four events,
the sink, lie Δ natural-log units higher.

    python examples/attention_sink.py                 # tables, and a plot in outputs/
    python examples/attention_sink.py --quick         # fewer seeds and events
"""

import argparse
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from pma.jagged import row_blocks
from pma.layouts.mxfp8 import E4M3_MAX, from_payload, round_e4m3
from pma.numerics import AttentionNumerics, underflow_fraction, underflow_threshold
from pma.reference.attention import AttentionShape, Operands, attention_forward
from pma.reference.rounding import MXFP8Rounding

HEAD_DIM = 128
NUM_SINKS = 4
P_SCALES = (1.0, 16.0, 256.0, 448.0)  # 448, the largest E4M3, is no power of two: AttentionNumerics cannot name it
Order = Literal["forward", "reverse"]
ORDERS: tuple[Order, ...] = ("forward", "reverse")
SINK_STRENGTHS = tuple(range(15))  # Δ
MODERATE = (4, 5, 6, 7)  # Δ around the threshold 5.93 of S = 1, where ordinary events still carry weight
PAPER_IMPROVEMENT = (3.0, 10.0)
SMALLEST_NORMAL = 2.0**-6  # of E4M3
LENGTHS = (1024, 2048, 4096, 8192)
SAME_FLOOR = 0.05  # excess of the MSE that counts as none
Setting = tuple[Order, float]  # order, S
BASELINE: Setting = ("forward", 1.0)
BOTH_FIXES: Setting = ("reverse", 256.0)
FIXES = (BASELINE, BOTH_FIXES)


class StaticPRounding(MXFP8Rounding):
    """P·S → E4M3 → /S in float32 for any S, a power of two or not. `underflow` holds what became zero in the forward.

    For S = 2^k this is `MXFP8Rounding` bit for bit. The backward is inherited, with the power of two below S.
    """

    def __init__(self, p_scale: float, kv_order: Order) -> None:
        if not 1.0 <= p_scale <= E4M3_MAX:
            raise ValueError(f"p_scale must lie in [1, {E4M3_MAX:g}], so that P fits E4M3, got {p_scale}")
        exponent = math.floor(math.log2(p_scale))
        super().__init__(AttentionNumerics(
            p_cast="static", kv_order=kv_order, p_scale_log2=exponent, denominator="fp32", lse_sum="fp32"
        ))  # fmt: skip
        self.p_scale = p_scale
        self.underflow: list[Tensor] = []  # for each call [C, 1, S, N] bool

    def p_forward(self, p: Tensor) -> Tensor:
        rounded = round_e4m3(p * self.p_scale) / self.p_scale
        self.underflow.append((rounded == 0) & (p > 0))
        return rounded.double()


class Problem(NamedTuple):
    """Segments of equal length, each with seeds of its own; the sink is each segment's first events."""

    seeds: Tensor  # [B, S, D]; column 0 is 1 for all: the direction that lifts the sink
    keys: Tensor  # [B, L, D]; column 0 is 0
    values: Tensor  # [B, L, D]

    @property
    def offsets(self) -> Tensor:
        return torch.arange(self.keys.shape[0] + 1) * self.keys.shape[1]

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(num_seeds=self.seeds.shape[1], num_heads=1)

    def with_sink(self, strength: float) -> "Problem":
        """Δ = `strength`: the sink's scores rise by it, seed by seed, and nothing else changes."""
        keys = self.keys.clone()
        keys[:, :NUM_SINKS, 0] = strength * math.sqrt(HEAD_DIM)
        return self._replace(keys=keys)

    def with_silent_sink(self) -> "Problem":
        """The sink's values are zero: trained models put their sinks on events with small values."""
        values = self.values.clone()
        values[:, :NUM_SINKS] = 0.0
        return self._replace(values=values)

    def with_tiles_reversed(self, kv_tile: int) -> "Problem":
        """The same events, whole tiles in the opposite order, so that the sink's tile is the last one."""
        keys, values = (x.unflatten(1, (-1, kv_tile)).flip(1).flatten(1, 2) for x in (self.keys, self.values))
        return self._replace(keys=keys, values=values)

    def operands(self) -> Operands:
        seeds, keys, values = (x.flatten(0, 1) for x in self)
        return Operands(seeds, keys, values, self.offsets)

    def oracle(self) -> Tensor:
        """Plain attention in float64. → [B, S, D]."""
        seeds, keys, values = (x.double() for x in self)
        return (seeds @ keys.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ values


class Measurement(NamedTuple):
    """One forward against the oracle."""

    mse: Tensor  # [B] float64
    underflow: Tensor  # [B, S, L] bool, P that became zero

    @property
    def mean_squared_error(self) -> float:
        return float(self.mse.mean())

    def fraction(self, first_event: int = NUM_SINKS) -> float:
        """Share of P that became zero among the events from `first_event` of a segment on; the sink is left out."""
        return float(self.underflow[..., first_event:].double().mean())


Sweep = dict[tuple[int, Setting], Measurement]  # by Δ, (order, S)


def make_problem(num_segments: int, num_seeds: int, num_events: int, *, seed: int = 0) -> Problem:
    """Standard-normal seeds, keys and values, with seeds scaled so that the scores are exactly unit normal."""
    kv_tile = AttentionNumerics().kv_tile
    if num_events % kv_tile:
        raise ValueError(f"num_events must be a multiple of kv_tile = {kv_tile}, got {num_events}")
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randn(num_segments, num_seeds, HEAD_DIM, generator=generator)
    keys, values = (torch.randn(num_segments, num_events, HEAD_DIM, generator=generator) for _ in range(2))
    seeds[..., 0], keys[..., 0] = 0.0, 0.0
    seeds *= math.sqrt(HEAD_DIM) / seeds.norm(dim=-1, keepdim=True)
    seeds[..., 0] = 1.0
    return Problem(seeds, keys, values)


def measure(problem: Problem, setting: Setting, oracle: Tensor | None = None) -> Measurement:
    """The reference's forward with P cast as `setting` says, against `oracle` (computed if None)."""
    order, p_scale = setting
    rounding = StaticPRounding(p_scale, order)
    operands = problem.operands()
    out = attention_forward(operands, problem.shape, rounding).out
    mse = (out.double() - (problem.oracle() if oracle is None else oracle)).square().mean((1, 2))
    tiles = row_blocks(problem.offsets, operands.k.shape[0], rounding.numerics.kv_tile)
    used = torch.cat(rounding.underflow)[tiles.num_rows > 0, 0]  # tiles are full; slots between segments are not used
    underflow = used.unflatten(0, (problem.keys.shape[0], -1)).transpose(1, 2).flatten(2)
    return Measurement(mse, underflow)


def sweep_strengths(problem: Problem, strengths: Sequence[int], settings: Sequence[Setting]) -> Sweep:
    """Every Δ with every (order, S)."""
    sweep = {}
    for strength in strengths:
        lifted = problem.with_sink(strength)
        oracle = lifted.oracle()
        for setting in settings:
            sweep[strength, setting] = measure(lifted, setting, oracle)
    return sweep


def half_underflow_strength(strengths: Sequence[float], fractions: Sequence[float]) -> float:
    """Δ at which half of non-sink P becomes zero, linear between the neighbours in the normal quantile; NaN: nowhere.

    Fractions follow a normal distribution function of Δ, whose quantile is a line.
    """
    points = list(zip(strengths, fractions, strict=True))
    for (left, below), (right, above) in zip(points, points[1:], strict=False):
        if below < 0.5 <= above:
            quantiles = torch.special.ndtri(torch.tensor([below, above], dtype=torch.float64)).clamp(-8.0, 8.0)
            low, high = quantiles.tolist()
            return left - low * (right - left) / (high - low)
    return math.nan


def worst_step(p_scale: float) -> float:
    """d_p(S): the widest gap of the E4M3 number line below S, over S: P in [0, 1] never meets a coarser one."""
    numbers = from_payload(torch.arange(127, dtype=torch.uint8), torch.float64)  # 0 … 448 in order
    gaps = numbers.diff()[numbers[:-1] < p_scale]
    return float(gaps.max()) / p_scale


def normal_octaves(p_scale: float) -> float:
    """Octaves of P below 1 that P·S keeps in the normal range of E4M3, with the full relative precision."""
    return math.log2(p_scale / SMALLEST_NORMAL)


def paired_difference(measured: Measurement, floor: Measurement) -> tuple[float, float]:
    """How much larger than `floor`'s the MSE is, segment against segment, and two standard errors (as fractions)."""
    logs = (measured.mse / floor.mse).log()
    return float(logs.mean().expm1()), float(2.0 * logs.std() / math.sqrt(logs.numel()))


def improvements(sweep: Sweep, strengths: Sequence[int]) -> dict[int, float]:
    """MSE(forward, S = 1) / MSE(reverse, S = 256) for each Δ."""
    return {
        strength: sweep[strength, BASELINE].mean_squared_error / sweep[strength, BOTH_FIXES].mean_squared_error
        for strength in strengths
    }


def verdict(holds: bool) -> str:
    return "reproduces" if holds else "DOES NOT REPRODUCE"


def report_errors(sweep: Sweep, settings: Sequence[Setting]) -> None:
    print("1. Mean squared error of the output against float64\n")
    print("   Δ  " + "".join(f"{order[:3]} S={p_scale:<6g}" for order, p_scale in settings))
    for strength in SINK_STRENGTHS:
        row = "".join(f"{sweep[strength, setting].mean_squared_error:<12.2e}" for setting in settings)
        print(f"  {strength:>2}  {row}")


def report_underflow(sweep: Sweep) -> None:
    print("\n2. Share of non-sink P that becomes zero, forward order: simulated | closed form\n")
    print("   Δ  " + "".join(f"S={p_scale:<14g}" for p_scale in P_SCALES))
    for strength in SINK_STRENGTHS:
        cells = (
            f"{sweep[strength, ('forward', p_scale)].fraction():.4f} | {underflow_fraction(strength, p_scale):.4f}"
            for p_scale in P_SCALES
        )
        print(f"  {strength:>2}  " + " ".join(cells))
    print("\n   Δ where half of non-sink P becomes zero; largest gap between the two columns above:")
    for p_scale in P_SCALES:
        fractions = [sweep[strength, ("forward", p_scale)].fraction() for strength in SINK_STRENGTHS]
        half, closed = half_underflow_strength(SINK_STRENGTHS, fractions), underflow_threshold(p_scale)
        gap = max(abs(f - underflow_fraction(x, p_scale)) for x, f in zip(SINK_STRENGTHS, fractions, strict=True))
        halves = f"simulated {half:6.2f}, closed form {closed:6.2f} ({half - closed:+.2f})"
        print(f"   S={p_scale:<4g} {halves}; {gap:.3f}")
    print("   The threshold reproduces. The closed form is the steeper one: it takes the sink's largest score as fixed")
    print(
        "   at Δ + 1, but it varies from seed to seed (standard deviation 0.70), which widens Φ by √(1 + 0.49) = 1.22."
    )

    kv_tile = AttentionNumerics().kv_tile
    outside, anywhere = ([sweep[x, BOTH_FIXES].fraction(n) for x in SINK_STRENGTHS] for n in (kv_tile, NUM_SINKS))
    print("\n   Reverse order with S = 256: no underflow, whatever Δ")
    print(f"   outside the sink's tile: largest share {max(outside):.1e}: {verdict(max(outside) == 0)}")
    first = next((x for x, share in zip(SINK_STRENGTHS, anywhere, strict=True) if share), None)
    where = f", first at Δ = {first}" if first is not None else ""
    print(f"   with the sink's tile:    largest share {max(anywhere):.1e}{where}: {verdict(max(anywhere) == 0)}")
    print("   The sink's own tile is relative to the sink in either order: there, S only moves the threshold.")


def report_improvement(sweep: Sweep, silent: Sweep) -> None:
    low, high = PAPER_IMPROVEMENT
    print("\n3. Improvement: MSE(S=1, forward) / MSE(S=256, reverse)\n")
    for title, measured in (("values of the sink like the others'", sweep), ("values of the sink zero", silent)):
        factors = improvements(measured, SINK_STRENGTHS)
        best = max(factors, key=factors.__getitem__)
        listed = ", ".join(f"Δ={strength}: {factors[strength]:.1f}×" for strength in MODERATE)
        print(f"   {title}: best {factors[best]:.1f}× at Δ = {best}; moderate sinks {listed}")
    inside = [x for x, factor in improvements(sweep, MODERATE).items() if low <= factor <= high]
    print(f"   The paper's {low:g} to {high:g}× at moderate sinks: {verdict(bool(inside))} at Δ in {inside}.")
    print(
        "   It is no constant: the rounding of the sink's own P, which neither fix touches, is a floor in proportion to"
    )
    print("   the sink's values and share, so the factor grows without that floor, and with the length of a segment:")
    for num_events in LENGTHS:
        factors = improvements(sweep_strengths(make_problem(2, 32, num_events), MODERATE, FIXES), MODERATE)
        print(f"   {num_events:>6,} events: " + ", ".join(f"Δ={x}: {factor:.1f}×" for x, factor in factors.items()))


def report_floor(sweep: Sweep) -> None:
    print("\n   Do both fixes meet at one floor? MSE above that of reverse order with S = 256,")
    print("   paired by segment (± two standard errors):")
    for setting in (("reverse", 1.0), ("forward", 256.0)):
        excess = {x: paired_difference(sweep[x, setting], sweep[x, BOTH_FIXES]) for x in MODERATE}
        met = [x for x in MODERATE if excess[x][0] < SAME_FLOOR]
        cells = ", ".join(f"Δ={x}: {mean:+.1%} ± {error:.1%}" for x, (mean, error) in excess.items())
        where = f"{verdict(bool(met))} at Δ in {met}" if met else verdict(False)
        print(f"   {setting[0]} S={setting[1]:<4g} {cells}; within {SAME_FLOOR:.0%}: {where}")
    print(
        "   Reverse order with S = 1 stays above: its P below 2^-6 is subnormal. Forward order with S = 256 stays above"
    )
    print(
        "   at the weakest sinks: every new running maximum is P = 1, which E4M3 holds exactly, and reverse order has"
    )
    print("   more of them.")


def report_scales(sweep: Sweep) -> None:
    print("\n4. Worst quantisation step d_p(S) on [0, 1], and octaves of P in the normal range\n")
    for p_scale in (1.0, 1.25, 16.0, 128.0, 136.0, 192.0, 240.0, 256.0, 257.0, 320.0, 384.0, 448.0):
        print(
            f"   S={p_scale:<5g} d_p = 2^{math.log2(worst_step(p_scale)):<6.3f} {normal_octaves(p_scale):6.2f} octaves"
        )
    powers = [worst_step(2.0**k) for k in range(9)]
    lowest = min(worst_step(1.0 + i / 16) for i in range(16 * 447 + 1))
    holds = all(step == 2.0**-4 for step in powers) and lowest == 2.0**-4
    share = normal_octaves(256.0) / normal_octaves(E4M3_MAX)
    print(f"   d_p = 2^-4 at every power of two, and nowhere lower: {verdict(holds)}")
    print(f"   256 covers the most of all powers of two <= 448; it has {share:.1%} of the octaves of 448.")
    excess = {x: paired_difference(sweep[x, ("reverse", 448.0)], sweep[x, BOTH_FIXES]) for x in (0, *MODERATE)}
    cells = ", ".join(f"Δ={x}: {mean:+.1%} ± {error:.1%}" for x, (mean, error) in excess.items())
    print(f"   The coarser step hardly shows in the mean. MSE of S = 448 above that of 256, reverse: {cells}")


def plot(sweep: Sweep, settings: Sequence[Setting], path: Path) -> None:
    """Two panels: MSE over Δ, and the simulated underflow beside the closed form."""
    figure = Figure(figsize=(12.0, 4.8), layout="constrained")
    errors, underflow = figure.subplots(1, 2)
    colours = dict(zip(P_SCALES, ("tab:red", "tab:orange", "tab:blue", "tab:green"), strict=True))
    for order, p_scale in settings:
        curve = [sweep[strength, (order, p_scale)].mean_squared_error for strength in SINK_STRENGTHS]
        style = "-" if order == "forward" else "--"
        errors.semilogy(SINK_STRENGTHS, curve, style, color=colours[p_scale], label=f"{order}, S = {p_scale:g}")
    errors.set(xlabel="sink strength Δ (natural log)", ylabel="MSE of the output", title="Error of the cast of P")
    dense = [i / 20 for i in range(20 * SINK_STRENGTHS[-1] + 1)]
    for p_scale, colour in colours.items():
        shares = [sweep[strength, ("forward", p_scale)].fraction() for strength in SINK_STRENGTHS]
        closed = [underflow_fraction(strength, p_scale) for strength in dense]
        underflow.plot(SINK_STRENGTHS, shares, "o", color=colour, label=f"S = {p_scale:g}, simulated")
        underflow.plot(dense, closed, "-", color=colour, linewidth=1.0, label="closed form")
    underflow.set(xlabel="sink strength Δ (natural log)", title="Non-sink P that becomes zero, forward order")
    for axes in (errors, underflow):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    parser.add_argument("--quick", action="store_true", help="4 segments and 16 seeds, for 8 and 32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # products of single tiles: threads would mostly wait for each other
    sizes = (4, 16, 2048) if arguments.quick else (8, 32, 2048)
    problem = make_problem(*sizes)
    settings = tuple(product(ORDERS, P_SCALES))
    print("{} segments, {} seeds each, {} events each, D = {}\n".format(*sizes, HEAD_DIM))
    sweep = sweep_strengths(problem, SINK_STRENGTHS, settings)
    silent = sweep_strengths(problem.with_silent_sink(), SINK_STRENGTHS, FIXES)
    report_errors(sweep, settings)
    report_underflow(sweep)
    report_improvement(sweep, silent)
    report_floor(sweep)
    report_scales(sweep)
    path = arguments.output_dir / "attention_sink.png"
    plot(sweep, settings, path)
    print(f"\nPlot: {path}")


if __name__ == "__main__":
    main()
