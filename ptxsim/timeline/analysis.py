"""What a timeline says: the steady state and one step of it, waits by barrier, how busy each unit is, the rate."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from ptxsim.timeline import units
from ptxsim.timeline.replay import ON_BARRIER, PARTITIONS, Result
from ptxsim.timeline.trace import EXECUTED, Kind

STEADY = (0.35, 0.75)  # of the products of the leading CTA: between fill and drain
CONTRACTION = np.array([16, 8, 32, 64])  # elements of one instruction, by product format
RATES = ("tensor_rate_16bit", "tensor_rate_tf32", "tensor_rate_8bit", "tensor_rate_4bit")
FULL_ROWS = 128  # that the tensor core of one SM works on at once, whatever M is; a pair splits N where M is small
LONGEST_PERIOD = 512  # products of a step
LEAST_PRODUCTS = 32  # that the time of a step is measured over
LEAST_AGREEMENT, TOLERANCE = 0.85, 0.02  # share of products that equal the one a period before: tiles begin and end
WARPGROUP = 4


@dataclass(frozen=True)
class Window:
    """A stretch of a timeline: cycles [begin, end), and the products of the first CTA that start in it."""

    begin: float
    end: float
    products: np.ndarray

    @property
    def cycles(self) -> float:
        return self.end - self.begin


class Analysis:
    """Reads a `Result`. The first CTA of the cluster stands for all.

    period: products of a step, if it is known from the same trace on another chip; else it is found.
    """

    def __init__(self, result: Result, period: int | None = None):
        self.result, self.timeline = result, result.timeline
        self.products = self._products()
        self.steady = self._steady()
        self.period = self._period() if period is None else period

    # -------------------------------------------------------------------------------------- the steady state

    def _products(self) -> np.ndarray:
        """Products that the first CTA issues, in the order of their start; of a wgmma one of the four quarters."""
        rows, warps = self.timeline.operations, self.timeline.trace.warps
        is_first = warps[rows["warp"], 0] == 0
        is_quarter = (rows["kind"] == Kind.WGMMA) & (warps[rows["warp"], 1] % WARPGROUP == 0)
        products = np.flatnonzero(is_first & ((rows["kind"] == Kind.PRODUCT) | is_quarter))
        return products[np.argsort(self.result.begin[products], kind="stable")]

    def _steady(self) -> Window:
        count = len(self.products)
        first, last = (int(count * share) for share in STEADY)
        if last <= first:
            return Window(0, self.result.cycles, self.products)
        begin, end = self.result.begin[self.products[[first, last]]]
        return Window(begin, end, self.products[first:last])

    def _period(self) -> int:
        """Products after which their sequence repeats, but for the ends of tiles; 0 if it does not.

        Where several warps issue, the interleaving of theirs may change from step to step while each repeats its own.
        """
        products = self.steady.products
        if period := self._repetition(products):
            return period
        issuers = self.timeline.operations["warp"]
        warps, counts = np.unique(issuers[self.products], return_counts=True)
        periods = np.array([self._repetition(products[issuers[products] == warp]) for warp in warps])
        if len(warps) == 1 or not periods.all():
            return 0
        repeats = counts / periods
        return int((periods * np.round(repeats / repeats.min())).sum())

    def _repetition(self, products: np.ndarray) -> int:
        """Products after which this sequence repeats; 0 if it does not."""
        rows = self.timeline.operations[products]
        signature = np.stack([rows[name] for name in ("m", "n", "column", "a_in_place")], axis=1)
        longest = min(len(signature) // 3, LONGEST_PERIOD)
        agreeing = [(signature[p:] == signature[:-p]).all(axis=1).mean() for p in range(1, longest + 1)]
        best = max(agreeing, default=0)
        if best < LEAST_AGREEMENT:
            return 0
        return 1 + next(index for index, share in enumerate(agreeing) if share > best - TOLERANCE)

    @property
    def step_cycles(self) -> float:
        """Cycles of one repetition of the products' sequence, the median of the steady state: the ends of tiles, which
        long problems have few of, do not count. Of the whole run if nothing repeats."""
        if not self.period:
            return self.result.cycles
        repeats = -(-LEAST_PRODUCTS // self.period)  # short steps come in bursts, as fast as operands allow
        begin, distance = self.result.begin[self.steady.products], repeats * self.period
        if distance >= len(begin):
            return self.mean_step_cycles
        return float(np.median(begin[distance:] - begin[:-distance])) / repeats

    @property
    def mean_step_cycles(self) -> float:
        """The same, on average: with the ends of tiles as often as the traced problem has them."""
        if not self.period:
            return self.result.cycles
        return self.steady.cycles * self.period / len(self.steady.products)

    def one_step(self) -> Window:
        """A step in the middle of the steady state."""
        if not self.period:
            return self.steady
        products = self.steady.products
        first = len(products) // 2 // self.period * self.period
        last = min(first + self.period, len(products) - 1)
        begin, end = self.result.begin[products[[first, last]]]
        return Window(begin, end, products[first:last])

    def whole_steps(self) -> tuple[Window, int]:
        """As many whole steps as the steady state has, and how many those are."""
        products = self.steady.products
        count = (len(products) - 1) // self.period if self.period else 0
        if not count:
            return self.steady, 1
        last = count * self.period
        begin, end = self.result.begin[products[[0, last]]]
        return Window(begin, end, products[:last]), count

    # ------------------------------------------------------------------------------------------------- rates

    def product_flop(self, products: np.ndarray) -> np.ndarray:
        """Floating-point operations of one SM in each product."""
        rows = self.timeline.operations[products]
        return 2.0 * rows["m"] / rows["group"] * rows["n"] * CONTRACTION[rows["format"]]

    def product_cycles(self, products: np.ndarray) -> np.ndarray:
        """Cycles of the tensor core in each product if operands are there."""
        rows = self.timeline.operations[products]
        per_sm = rows["m"] / rows["group"]
        is_full = (rows["kind"] == Kind.WGMMA) | (rows["group"] == 2)
        full = np.where(is_full, per_sm, np.maximum(per_sm, FULL_ROWS))
        rate = np.array([self.result.chip[name] for name in RATES])[rows["format"]]
        return 2 * full * rows["n"] * CONTRACTION[rows["format"]] / rate

    @property
    def tensor_share(self) -> float:
        """Of the tensor core's rate, in a step."""
        return float(self.product_cycles(self.steady.products).sum() / self._cycles_of_steps)

    @property
    def tflops(self) -> float:
        """Of the whole chip in a step, every SM busy, at the chip's clock."""
        flop = self.product_flop(self.steady.products).sum() / self._cycles_of_steps
        return float(flop * self.result.chip.num_sms * self.result.chip["clock_ghz"] / 1e3)

    @property
    def _cycles_of_steps(self) -> float:
        """Of the steady state if all its steps were the median one."""
        return self.step_cycles * len(self.steady.products) / self.period if self.period else self.steady.cycles

    # -------------------------------------------------------------------------------------------- occupancy

    def occupancy(self, window: Window | None = None) -> dict[str, float]:
        """Share of the cycles that each unit of the first CTA's SM is busy."""
        window = window or self.steady
        timeline, chip = self.timeline, self.result.chip
        table = units.rows(timeline.mapping.code, chip)
        pipes, bytes_ = np.zeros(len(units.PIPES)), np.zeros(6)
        num_issued = 0
        for warp in np.flatnonzero(timeline.trace.warps[:, 0] == 0):
            span = timeline.span(warp)
            entries = timeline.streams[span][self._inside(self.result.issued[span], window)]
            rows = table[entries & ~np.uint32(EXECUTED)]
            num_issued += len(rows)
            np.add.at(pipes, rows["pipe"], rows["occupancy"])
            executed = rows[entries >= EXECUTED]
            np.add.at(bytes_, executed["kind"], executed["bytes"])
        shares = {"tensor core": float(self.product_cycles(window.products).sum()) / window.cycles}
        names = {"special": "special functions", "fma": "FMA pipe", "alu": "ALU", "memory": "memory issue"}
        for pipe, name in names.items():
            shares[name] = pipes[units.PIPES.index(pipe)] / PARTITIONS / window.cycles
        shares["issue slots"] = num_issued / PARTITIONS / window.cycles
        shared = bytes_[units.SHARED_READ] + bytes_[units.SHARED_WRITE] + self._operand_bytes(window)
        shares["shared memory"] = shared / chip["shared_rate"] / window.cycles
        for kind, key, name in (
            (units.TMEM_READ, "tmem_read_rate", "tensor memory reads"),
            (units.TMEM_WRITE, "tmem_write_rate", "tensor memory writes"),
        ):
            shares[name] = bytes_[kind] / PARTITIONS / chip[key] / window.cycles
        shares["TMA loads"] = self._moved(window, Kind.LOAD) / chip["load_rate"] / window.cycles
        reductions, stores = self._moved(window, Kind.REDUCTION), self._moved(window, Kind.STORE)
        shares["TMA stores"] = (reductions / chip["reduction_rate"] + stores / chip["store_rate"]) / window.cycles
        return shares

    @staticmethod
    def _inside(times: np.ndarray, window: Window) -> np.ndarray:
        return (times >= window.begin) & (times < window.end)

    def _operand_bytes(self, window: Window) -> float:
        rows = self.timeline.operations[window.products]
        a = np.where(rows["a_in_place"] > 0, 0, rows["m"] // rows["group"])
        return float(((a + rows["n"] // rows["group"]) * rows["count"]).sum())

    def _moved(self, window: Window, kind: Kind) -> float:
        rows = self.timeline.operations
        rank = rows["rank"] if kind == Kind.LOAD else self.timeline.trace.warps[rows["warp"], 0]
        chosen = (rows["kind"] == kind) & (rank == 0) & self._inside(self.result.begin, window)
        return float(rows["count"][chosen].sum())

    # ------------------------------------------------------------------------------------------------ issue

    def mix(self) -> list[MixRow]:
        """Machine instructions of a step by opcode, for each group of warps of the first CTA that run the same code."""
        window, steps = self.whole_steps()
        code = self.timeline.mapping.code.instructions
        groups: dict[frozenset[int], tuple[list[int], Counter[str]]] = {}
        for warp in np.flatnonzero(self.timeline.trace.warps[:, 0] == 0):
            span = self.timeline.span(warp)
            inside = self.timeline.streams[span][self._inside(self.result.issued[span], window)]
            indices, counts = np.unique(inside & ~np.uint32(EXECUTED), return_counts=True)
            warps, total = groups.setdefault(frozenset(indices.tolist()), ([], Counter()))
            warps.append(int(self.timeline.trace.warps[warp, 1]))
            for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
                total[".".join(code[index].opcode.split(".")[:2])] += count
        rows = [
            MixRow(warps, {opcode: count / steps / len(warps) for opcode, count in total.most_common()})
            for warps, total in groups.values()
            if total
        ]
        return sorted(rows, key=lambda row: row.warps)

    # ------------------------------------------------------------------------------------------------- waits

    def waits(self, window: Window | None = None) -> list[WaitRow]:
        """Waits for barriers in a window, the longest first."""
        window = window or self.steady
        rows, counters = self.timeline.operations, self.timeline.counters
        waited_at = {
            (int(row["warp"]), int(row["node"])): int(pc) for row, pc in self._of_kind(rows, counters, Kind.WAIT)
        }
        arrivals: dict[int, set[int]] = defaultdict(set)
        for row, pc in self._of_kind(rows, counters, Kind.ARRIVE):
            source = int(row["source"])
            arrivals[int(row["node"])].add(int(counters[source]) if source >= 0 else int(pc))
        found: dict[int, WaitRow] = {}
        for warp in np.flatnonzero(self.timeline.trace.warps[:, 0] == 0):
            span = self.timeline.span(warp)
            inside = self._inside(self.result.issued[span], window) & (self.result.causes[span] == ON_BARRIER)
            lost = (self.result.issued[span] - np.maximum(self.result.ready[span], window.begin))[inside]
            for node, cycles in zip(self.result.blames[span][inside], lost, strict=True):
                pc = waited_at.get((int(warp), int(node)), -1)
                row = found.setdefault(
                    pc, WaitRow(self.where(pc), int(self.timeline.trace.labels[node]), window.cycles)
                )
                row.warps.add(int(self.timeline.trace.warps[warp, 1]))
                row.cycles += float(cycles)
                row.count += 1
                row.released_by |= {self.where(other) for other in arrivals[int(node)]}
        return sorted(found.values(), key=lambda row: -row.share)

    @staticmethod
    def _of_kind(rows: np.ndarray, counters: np.ndarray, kind: Kind) -> zip[tuple[np.void, np.int64]]:
        chosen = rows["kind"] == kind
        return zip(rows[chosen], counters[chosen], strict=True)

    def where(self, counter: int) -> str:
        """PTX line and, if known, the program's line of a PTX instruction."""
        instructions = self.timeline.mapping.kernel.instructions
        if not 0 <= counter < len(instructions):
            return "?"
        instruction = instructions[counter]
        source = (instruction.source or "").rpartition("/")[2]
        return f"{instruction.line} {'.'.join(instruction.words[:2])}" + (f" ({source})" if source else "")


@dataclass(frozen=True)
class MixRow:
    """Machine instructions of one warp in a step, those with false guards too: they take issue slots as well."""

    warps: list[int]
    counts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.counts.values())


class WaitRow:
    """Waits at one PTX instruction. barrier: its shared address or number, −1 unknown; share: of the window, for each
    of the warps that wait there."""

    def __init__(self, where: str, barrier: int, window_cycles: float):
        self.where, self.barrier, self.window_cycles = where, barrier, window_cycles
        self.warps: set[int] = set()
        self.cycles, self.count = 0.0, 0
        self.released_by: set[str] = set()

    @property
    def share(self) -> float:
        return self.cycles / max(len(self.warps), 1) / self.window_cycles
