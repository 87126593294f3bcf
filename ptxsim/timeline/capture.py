"""Capture of a launch's trace: what each warp executed, and what that made the machine do.

A run in which every operation completes at once and no wait spins leaves two things: the program counters that each
warp executed, logged by the SIMT core, and the timing operations of its system instructions, noted by this monitor,
which stands where the race monitor stands otherwise. What race checking calls a clock is here a `Node`: the phase of a
barrier, with all that arrives at it. Waits and arrivals name nodes, so that a trace is a graph of dependencies that
does not depend on the order in which the functional run happened to execute warps.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxsim.checks.silent import SilentMonitor
from ptxsim.timeline.trace import NO_OPERATION, OPERATION, PRODUCT_KINDS, Kind, Trace

if TYPE_CHECKING:
    from ptxsim.machine.cluster import Cluster
    from ptxsim.machine.warp import Warp
    from ptxsim.ptx.parse import Instruction

CAPACITY = 1 << 22  # instructions of a warp; pages that are not touched take no memory
K_BYTES = 32  # of the contraction in one tensor-core instruction, at every element width
MOST_BARRIERS = 16  # named barriers of a CTA


class TraceTooLong(RuntimeError):
    """A warp executed more instructions than a trace holds."""


class Node:
    """A phase of a barrier, or the completion of an operation."""

    def __init__(self, number: int):
        self.number, self.label = number, -1


class _Note:
    """An arrival: who, at which executed instruction, and through which operation (none: the instruction itself)."""

    def __init__(self, monitor: TimelineMonitor, warp: Warp, operation: int):
        self.monitor, self.warp, self.operation = monitor, warp, operation

    @property
    def clock(self) -> _Note:
        return self

    def shared_read(self, rank: int, offset: int, count: int) -> None:
        self.monitor.add_bytes(self.operation, rank, count)

    def shared_write(self, rank: int, offset: int, count: int) -> None:
        self.monitor.add_bytes(self.operation, rank, count)

    def shared_read_at(self, rank: int, offsets: Any) -> None: ...

    def shared_write_at(self, rank: int, offsets: Any) -> None: ...

    def tmem_read(self, rank: int, bands: range, columns: range) -> None: ...

    def tmem_write(self, rank: int, bands: range, columns: range) -> None: ...


class TimelineMonitor(SilentMonitor):
    """Notes the timing operations of one cluster."""

    def __init__(self, capture: Capture, cluster: Cluster):
        self.capture, self.cluster = capture, cluster
        self.rows: list[list[int]] = []  # fields of OPERATION
        self.nodes: list[Node] = []
        self._logs = {}
        for warp in cluster.warps:
            log = self._logs[warp] = np.empty(CAPACITY, np.uint32)
            warp.state.trace, warp.state.trace_capacity = log.ctypes.data, CAPACITY

    # -------------------------------------------------------------------------------------- arrivals and waits

    def release(self, warp: Warp) -> _Note:
        return _Note(self, warp, NO_OPERATION)

    def merge(self, clock: Any, other: Any) -> Any:
        """Something arrives at a phase, which its first arrival begins."""
        node = clock if isinstance(clock, Node) else self._new_node()
        self._arrive(other, node)
        return node

    def acquire(self, warp: Warp, clock: Any) -> None:
        """A warp waited for a phase, or for one operation."""
        if clock is None:  # a wait for the phase before the first
            return
        if isinstance(clock, _Note):
            note, clock = clock, self._new_node()
            self._arrive(note, clock)
        index = self._log_index(warp)
        instruction = self._instruction(warp, index)
        if clock.label < 0:
            clock.label = self._address(warp, instruction)
        self._add(Kind.WAIT, warp, node=clock.number)

    def _new_node(self) -> Node:
        self.nodes.append(Node(len(self.nodes)))
        return self.nodes[-1]

    def _arrive(self, note: _Note, node: Node) -> None:
        self._add(Kind.ARRIVE, note.warp, node=node.number, source=note.operation)

    def _address(self, warp: Warp, instruction: Instruction) -> int:
        """Shared address of the mbarrier, number of the named barrier: what tells a user which barrier it is."""
        program, words = self.cluster.grid.program, instruction.words
        if words[0] == "mbarrier":
            register, offset = program.address(instruction.operands[1])
        elif words[0] in ("bar", "barrier") and instruction.operands:
            register, offset = program.register(instruction.operands[0]), 0
        else:
            return -1
        lane = (warp.state.executing & -warp.state.executing).bit_length() - 1
        return int(warp.registers[register, lane]) + offset & 0xFFFFFFFF

    # ------------------------------------------------------------------------------------------- operations

    def start(self, warp: Warp, what: str) -> _Note:
        is_remote = self._current(warp).words[0] == "st"
        return _Note(self, warp, self._add(Kind.REMOTE_STORE if is_remote else Kind.LOAD, warp))

    def start_store(self, warp: Warp, what: str) -> _Note:
        is_reduction = self._current(warp).words[1] == "reduce"
        return _Note(self, warp, self._add(Kind.REDUCTION if is_reduction else Kind.STORE, warp))

    def start_tensor(self, warp: Warp, what: str, pair: int, is_commit: bool) -> _Note:
        opcode = self._current(warp).opcode
        if is_commit:
            return _Note(self, warp, self._add(Kind.COMMIT, warp, group=_group(opcode)))
        if opcode.startswith("tcgen05.mma"):
            return _Note(self, warp, NO_OPERATION)  # see note_product
        rows, bits = (int(number) for number in re.search(r"(\d+)x(\d+)b", opcode).groups())  # type: ignore[union-attr]
        return _Note(self, warp, self._add(Kind.COPY, warp, count=rows * bits // 8, group=_group(opcode)))

    def note_product(self, warp: Warp, kind: str, m: int, n: int, column: int) -> None:
        """A tcgen05.mma of m × n, into column `column` of tensor memory."""
        instruction = self._current(warp)
        row = {"group": _group(instruction.opcode), "m": m, "n": n, "column": column, "format": PRODUCT_KINDS[kind]}
        self._add(Kind.PRODUCT, warp, count=K_BYTES, a_in_place=instruction.operands[1].startswith("["), **row)

    def start_product(self, warp: Warp, what: str) -> _Note:
        """A warp's quarter of a wgmma."""
        instruction = self._current(warp)
        shape, *_, element, _ = instruction.words[-4:]
        n = int(re.fullmatch(r"m64n(\d+)k\d+", shape)[1])  # type: ignore[index]
        kind = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "s8": "i8", "u8": "i8"}.get(element, "f8f6f4")
        row = {"m": 64, "n": n, "group": 1, "format": PRODUCT_KINDS[kind], "column": warp.index // 4}
        in_registers = instruction.operands[1].startswith("{")
        number = self._add(Kind.WGMMA, warp, count=K_BYTES, a_in_place=in_registers, **row)
        return _Note(self, warp, number)

    def add_bytes(self, operation: int, rank: int, count: int) -> None:
        if operation != NO_OPERATION:
            row = self.rows[operation]
            row[OPERATION.names.index("count")] += count
            row[OPERATION.names.index("rank")] = rank

    # ------------------------------------------------------------------------------------------------ rows

    def _add(self, kind: Kind, warp: Warp, **fields: int) -> int:
        values = {"kind": kind, "warp": warp.id, "position": self._log_index(warp), "source": NO_OPERATION, **fields}
        self.rows.append([int(values.get(name, 0)) for name in OPERATION.names])
        return len(self.rows) - 1

    @staticmethod
    def _log_index(warp: Warp) -> int:
        return warp.state.trace_count - 1

    def _instruction(self, warp: Warp, index: int) -> Instruction:
        counter = int(self._logs[warp][index]) & 0x7FFFFFFF
        return self.cluster.grid.program.kernel.instructions[counter]

    def _current(self, warp: Warp) -> Instruction:
        return self._instruction(warp, self._log_index(warp))

    def finish(self) -> None:
        counts = [warp.state.trace_count for warp in self.cluster.warps]
        if max(counts) >= CAPACITY:
            raise TraceTooLong(f"a warp executed {CAPACITY} instructions or more; trace a smaller problem")
        self.capture.offer(self, sum(counts))

    def logs(self) -> list[np.ndarray]:
        """The log of each warp. → uint32 [executed]"""
        return [log[: warp.state.trace_count].copy() for warp, log in self._logs.items()]


def _group(opcode: str) -> int:
    return 2 if "cta_group::2" in opcode else 1


class Capture:
    """Keeps the longest cluster of a launch; `Options.monitor` of a run that is traced."""

    def __init__(self) -> None:
        self._best: TimelineMonitor | None = None
        self._length = 0
        self._num_clusters = 0

    def __call__(self, cluster: Cluster) -> TimelineMonitor:
        return TimelineMonitor(self, cluster)

    def offer(self, monitor: TimelineMonitor, length: int) -> None:
        self._num_clusters += 1
        if length > self._length:
            self._best, self._length = monitor, length

    def take(self, kernel: str, ptx: str) -> Trace:
        """The trace of the launch of a kernel that has just run."""
        best = self._best
        if best is None:
            raise RuntimeError(f"kernel {kernel} ran no cluster, so there is nothing to trace")
        cluster, logs = best.cluster, best.logs()
        trace = Trace(
            kernel=kernel,
            ptx=ptx,
            logs=logs,
            warps=np.array([(warp.cta.rank, warp.index) for warp in cluster.warps], np.int32),
            operations=np.array([tuple(row) for row in best.rows], OPERATION),
            labels=np.array([node.label for node in best.nodes], np.int64),
            num_clusters=self._num_clusters,
        )
        self._best, self._length, self._num_clusters = None, 0, 0
        return trace
