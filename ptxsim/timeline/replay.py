"""Times of a trace on a chip: the front end of `replay.c`."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptxsim.host.build import build_shared_object
from ptxsim.timeline import units
from ptxsim.timeline.mapping import Mapping, map_trace
from ptxsim.timeline.parameters import Chip
from ptxsim.timeline.trace import EXECUTED, Kind, Trace

PARAMETERS = (
    "arrive", "wake", "block", "sync_issue", "tensor_start", "commit", "pair", "tensor_rate_16bit",
    "tensor_rate_tf32", "tensor_rate_8bit", "tensor_rate_4bit", "shared_rate", "tmem_read_rate", "tmem_write_rate",
    "load_rate", "load_latency", "store_rate", "reduction_rate", "store_latency", "remote_latency", "branch_taken",
    "fill_share", "is_greedy", "stolen_by_fma", "alu_beside_wgmma", "special_beside_wgmma",
)  # fmt: skip
NODE = np.dtype([("remaining", "i4"), ("time", "i8")], align=True)
CAUSES = ("on time", "barrier", "scoreboard", "pipe", "other warp")
ON_TIME, ON_BARRIER, ON_SCOREBOARD, ON_PIPE, ON_SELECTION = range(5)
PARTITIONS, MOST_SMS = 4, 16


class ReplayStuck(RuntimeError):
    """Warps wait for what never comes: the trace or its mapping is wrong."""


class Timeline:
    """A trace, ready to be replayed with one set of parameters after the other."""

    def __init__(self, trace: Trace, mapping: Mapping | None = None):
        if trace.num_ctas > MOST_SMS:
            raise ValueError(f"the trace's cluster has {trace.num_ctas} CTAs; up to {MOST_SMS} can be replayed")
        self.trace = trace
        self.mapping = mapping or map_trace(trace)
        self.streams = np.concatenate(self.mapping.streams)
        self.lengths = np.array([len(stream) for stream in self.mapping.streams], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.operations, self.counters, bounds = self._placed_operations()
        self.spans = np.zeros((len(self.lengths), 6), np.int64)
        self.spans[:, 0], self.spans[:, 1] = trace.warps[:, 0], trace.warps[:, 1] % PARTITIONS
        self.spans[:, 2], self.spans[:, 3] = self.starts, self.lengths
        self.spans[:, 4], self.spans[:, 5] = bounds[:-1], bounds[1:]
        self.nodes = np.zeros(len(trace.labels), NODE)
        arrivals = self.operations[self.operations["kind"] == Kind.ARRIVE]
        np.add.at(self.nodes["remaining"], arrivals["node"], 1)

    def _placed_operations(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Operations by warp and place in its stream, the PTX instruction of each, and the first of each warp."""
        given = self.trace.operations
        order = np.lexsort((np.arange(len(given)), given["position"], given["warp"]))
        new_index = np.empty(len(given), np.int32)
        new_index[order] = np.arange(len(given))
        operations = given[order].copy()
        counters = np.zeros(len(given), np.int64)
        has_source = operations["source"] >= 0
        operations["source"][has_source] = new_index[operations["source"][has_source]]
        for warp, places in enumerate(self.mapping.places):
            rows = operations["warp"] == warp
            counters[rows] = self.trace.logs[warp][operations["position"][rows]] & ~np.uint32(EXECUTED)
            known = np.maximum.accumulate(np.where(places >= 0, places, 0)) if len(places) else places
            operations["position"][rows] = known[operations["position"][rows]]
        return operations, counters, np.searchsorted(operations["warp"], np.arange(len(self.lengths) + 1))

    def span(self, warp: int) -> slice:
        """Where a warp's instructions are in `streams` and in the arrays of a `Result`."""
        return slice(int(self.starts[warp]), int(self.starts[warp] + self.lengths[warp]))

    def run(self, chip: Chip) -> Result:
        """Replay.

        Raises:
            ReplayStuck: warps wait for ever.
        """
        rows = units.rows(self.mapping.code, chip)
        parameters = np.array([chip[name] for name in PARAMETERS])
        nodes, count, size = self.nodes.copy(), len(self.operations), len(self.streams)
        issued, ready = np.zeros(size, np.int64), np.zeros(size, np.int64)
        causes, blames = np.zeros(size, np.uint8), np.zeros(size, np.int32)
        begin, end = np.zeros(count), np.zeros(count)
        arrays = (parameters, rows, self.streams, self.spans)
        outputs = (nodes, issued, ready, causes, blames, begin, end)
        cycles = _library().replay(
            *map(_pointer, arrays), len(self.lengths), self.trace.num_ctas, _pointer(self.operations), count,
            *map(_pointer, outputs),
        )  # fmt: skip
        if cycles < 0:
            raise ReplayStuck(self._stuck(-cycles - 1, issued, nodes))
        return Result(self, chip, cycles, issued, ready, causes, blames, begin, end)

    def _stuck(self, cycle: int, issued: np.ndarray, nodes: np.ndarray) -> str:
        open_nodes = np.flatnonzero(nodes["remaining"] > 0)
        lines = [f"stuck at cycle {cycle}; {len(open_nodes)} phases are incomplete"]
        for warp, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            done = int((issued[start : start + length] > 0).sum())
            if done < length - 1:
                at = int(self.streams[start + done]) & 0x7FFFFFFF
                lines.append(f"  warp {warp} at {done} of {length}: {self.mapping.code.instructions[at].text}")
        return "\n".join(lines)


@dataclass
class Result:
    """Times in cycles. issued, ready: of each executed machine instruction, when it issued and when its stall count was
    over; causes: what it then waited for (`CAUSES`), blames: node, machine instruction or pipe. begin, end: of each
    operation of `timeline.operations`."""

    timeline: Timeline
    chip: Chip
    cycles: int
    issued: np.ndarray
    ready: np.ndarray
    causes: np.ndarray
    blames: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(np.ascontiguousarray(array).ctypes.data)


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("replay.c").read_text()
    library = ctypes.CDLL(str(build_shared_object(source, "replay")))
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    library.replay.argtypes = [pointer] * 4 + [number] * 2 + [pointer, number] + [pointer] * 7
    library.replay.restype = ctypes.c_int64
    return library
