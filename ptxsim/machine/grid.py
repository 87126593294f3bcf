"""A launch: its clusters, run to the end by a scheduler that interleaves warps in a seeded order."""

from __future__ import annotations

import ctypes
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim.checks.findings import Finding, Findings, Site
from ptxsim.core import binding
from ptxsim.machine.cluster import Cluster, MachineFault
from ptxsim.machine.tensor_map import TensorMap
from ptxsim.machine.warp import Warp
from ptxsim.ptx.program import Program

IDLE_ROUNDS = 20_000  # rounds without any synchronisation before a spinning grid counts as stuck


class Deadlock(RuntimeError):
    """No warp can run; the message lists what each waits for."""


@dataclass(frozen=True)
class Options:
    """How a launch is run. delay: see `machine/engine.py`; None also runs warps in a fixed order."""

    delay: int | None = None
    seed: int = 0
    poison: bool = False  # shared and tensor memory start as NaN
    check_registers: bool = False  # reads of registers that were never written
    monitor: Callable[[Cluster], Any] | None = None
    concurrent: bool = False  # all clusters at once instead of one after the other
    global_ranges: tuple[tuple[int, int], ...] | None = None  # (first, end) that may be touched; None: what is mapped


class Grid:
    """One launch of a program."""

    def __init__(self, program: Program, launch: Any, options: Options, num_sms: int):
        self.program, self.options, self.num_sms = program, options, num_sms
        self.dimensions, self.block = tuple(launch.grid), tuple(launch.block)
        self.cluster_dimensions, self.launch_shared_bytes = tuple(launch.cluster), launch.shared_bytes
        self.rng = random.Random(options.seed)
        self.findings = Findings()
        self.sources = {i.line: i.source for i in program.kernel.instructions if i.source}
        self.executed = self.num_mma = 0
        self.seconds = 0.0
        self._maps: dict[bytes, TensorMap] = {}
        self._place_parameters(launch.params)
        self._merge_ranges()
        counts = [a // b for a, b in zip(self.dimensions, self.cluster_dimensions, strict=True)]
        if any(a % b for a, b in zip(self.dimensions, self.cluster_dimensions, strict=True)):
            raise MachineFault(f"grid {self.dimensions} is no multiple of the cluster {self.cluster_dimensions}")
        self.waiting = [(x, y, z) for z in range(counts[2]) for y in range(counts[1]) for x in range(counts[0])]

    def _place_parameters(self, values: dict[str, bytes]) -> None:
        parameters = self.program.kernel.parameters
        size = max([parameter.offset + parameter.size for parameter in parameters], default=8)
        self._buffer = np.zeros(size + 128, np.uint8)
        self._base = -(-self._buffer.ctypes.data // 128) * 128
        self._parameter_bytes = size
        self.parameter_addresses = {}
        for parameter in parameters:
            address = self._base + parameter.offset
            ctypes.memmove(address, values[parameter.name], parameter.size)
            self.parameter_addresses[parameter.name] = address

    def _merge_ranges(self) -> None:
        merged: list[list[int]] = []
        ranges = self.options.global_ranges if self.options.global_ranges is not None else mapped_memory()
        for first, end in sorted({*ranges, (self._base, self._base + self._parameter_bytes)}):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([first, end])
        self._ranges = np.array(merged, np.uint64).ravel()

    def restrict_global_memory(self, context: binding.Context) -> None:
        context.num_ranges, context.ranges = len(self._ranges) // 2, self._ranges.ctypes.data

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map at an address in global or parameter memory."""
        raw = ctypes.string_at(address, 128)
        if raw[:64] not in self._maps:  # the upper half holds nothing
            self._maps[raw[:64]] = TensorMap.decode(raw)
        return self._maps[raw[:64]]

    def note(self, kind: str, message: str, who: str, line: int) -> None:
        site = Site(who, line, self.sources.get(line))
        self.findings.add(Finding(kind, message, site, kernel=self.program.kernel.name))

    def next_cluster(self) -> tuple[int, ...] | None:
        """Index of a cluster that has not started, taken from the queue: for launch control too."""
        return self.waiting.pop(0) if self.waiting else None

    def run(self) -> None:
        """Run every cluster to its end.

        Raises:
            Deadlock: no warp can run.    MachineFault: a fault, with the warp, the PTX line and the instruction.
        """
        begin = time.process_time()  # other processes do not count
        while (index := self.next_cluster()) is not None:
            clusters = [Cluster(self, index)]
            while self.options.concurrent and (index := self.next_cluster()) is not None:
                clusters.append(Cluster(self, index))
            Scheduler(self, clusters).run()
        self.seconds = time.process_time() - begin


def mapped_memory() -> list[tuple[int, int]]:
    """(first, end) of what this process has mapped for reading, so that a wild address is a fault and no crash."""
    with open("/proc/self/maps") as maps:
        spans = re.findall(r"^(\w+)-(\w+) r", maps.read(), re.M)
    return [(int(first, 16), int(end, 16)) for first, end in spans]


class Scheduler:
    """Runs the warps of some clusters until all have exited."""

    def __init__(self, grid: Grid, clusters: list[Cluster]):
        self.grid, self.clusters = grid, clusters
        self.is_random = grid.options.delay is not None
        self.core, self.handlers = grid.program.core, grid.program.handlers
        self.table = grid.program.table.ctypes.data

    def _random_key(self, _: Warp) -> float:
        return self.grid.rng.random()

    def run(self) -> None:
        live = [warp for cluster in self.clusters for warp in cluster.warps]
        idle = 0
        while live:
            before = self._activity()
            if self.is_random:
                live.sort(key=self._random_key)
            has_progress = False
            for warp in live:
                if warp.wake():
                    has_progress |= self._run_warp(warp)
            live = [warp for warp in live if warp.is_live]
            idle = 0 if self._activity() != before else idle + 1
            if live and not has_progress and not self._let_time_pass():
                raise Deadlock(self._report("no warp can run"))
            if idle > IDLE_ROUNDS:
                raise Deadlock(self._report("warps spin without any synchronisation"))
        for cluster in self.clusters:
            self._finish(cluster)

    def _activity(self) -> int:
        return sum(cluster.activity + cluster.engine.completed for cluster in self.clusters)

    def _let_time_pass(self) -> bool:
        moved = False
        for cluster in self.clusters:
            if cluster.engine.run_due() or cluster.engine.skip_ahead():
                moved = True
        return moved

    def _run_warp(self, warp: Warp) -> bool:
        """Run a warp until it waits, ends, or has had its turn; whether anything happened."""
        state, cluster = warp.state, warp.cta.cluster
        first = state.executed
        budget = self.grid.rng.randrange(16, 2000) if self.is_random else 100_000
        happened = False
        while True:
            code = self.core.run(warp.pointer, self.table, warp.registers_at, cluster.context_at, budget)
            if cluster.context.log_count:
                cluster.monitor.drain(warp)
            if code == binding.SYSTEM:
                happened = True
                self._handle(warp)
                budget -= state.executed - first
                if state.blocked & state.live == state.live or budget <= 0:
                    break
                continue
            if code == binding.TOUCHED:
                warp.needs_load(state.touched)
                continue
            if code == binding.RESERVED:
                warp.member.report_use(state.touched)
                continue
            if code == binding.EXITED:
                happened = True
                self._retire(warp)
            elif code == binding.FAULT:
                raise MachineFault(self._fault(warp))
            break
        executed = state.executed - first
        cluster.engine.now += executed
        return cluster.engine.run_due() or happened or executed > 0

    def _handle(self, warp: Warp) -> None:
        """Let the machine execute the system instruction that the warp is at."""
        state, index = warp.state, warp.state.at
        if warp.pending_loads:
            warp.end_loads(self.grid.program.system_registers.get(index, []))
        if state.reserved and self.grid.program.kernel.instructions[index].words[0] != "wgmma":
            warp.member.check_use(self.grid.program.system_registers.get(index, []))
        try:
            waits = self.handlers[index](warp, state.executing)
        except Exception as error:
            instruction = self.grid.program.kernel.instructions[index]
            error.add_note(f"in {warp}, {instruction.where()}: {str(instruction)[:200]}")
            raise
        if waits and (state.is_diverged or any(lanes != state.live for lanes, _ in waits)):
            self.core.diverge(warp.pointer)
        self.core.advance(warp.pointer)
        if waits:
            warp.wait(waits)

    def _retire(self, warp: Warp) -> None:
        cta, cluster = warp.cta, warp.cta.cluster
        cluster.barrier.retire(32)
        in_flight = cluster.engine.in_flight(cta)
        if in_flight and not any(other.is_live for other in cta.warps):
            what, line = in_flight[0]
            message = f"CTA {cta.index} exits while {len(in_flight)} operations are under way, the first"
            self.grid.note("in flight at exit", message, what, line)

    def _fault(self, warp: Warp) -> str:
        state, program = warp.state, self.grid.program
        instruction = program.kernel.instructions[state.at]
        what = binding.FAULTS[state.fault]
        if state.fault == binding.UNWRITTEN_REGISTER:
            names = {register: name for name, register in program.registers.items()}
            detail = names.get(state.fault_address, f"register {state.fault_address}")
        else:
            detail = f"{state.fault_address:#x}"
        return f"{warp}, {instruction.where()}: {str(instruction)[:200]}: {what} ({detail})"

    def _finish(self, cluster: Cluster) -> None:
        while cluster.engine.skip_ahead():
            cluster.engine.run_due()
        for cta in cluster.ctas:
            for (column, columns), line in cta.tmem_allocations.items():
                message = f"CTA {cta.index} exits with {columns} columns of tensor memory allocated from {column}"
                self.grid.note("leak", message, "tcgen05.alloc", line)
        self.grid.executed += sum(warp.state.executed for warp in cluster.warps)
        cluster.monitor.finish()

    def _report(self, reason: str) -> str:
        lines = [f"{reason}; {sum(len(c.engine.in_flight()) for c in self.clusters)} operations under way:"]
        for cluster in self.clusters:
            for warp in cluster.warps:
                if warp.is_live:
                    waits = sorted({str(wait.what) for _, wait in warp.waits}) or ["nothing known"]
                    instruction = warp.program.kernel.instructions[max(warp.at() - 1, 0)]
                    lines.append(f"  {warp} waits for {', '.join(waits)} behind {instruction.where()}: {instruction}")
        return "\n".join(lines)
