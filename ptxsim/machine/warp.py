"""A warp: its state in the SIMT core, its registers, and what it has under way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxsim.core import binding
from ptxsim.machine.barriers import Wait

if TYPE_CHECKING:
    from ptxsim.machine.cluster import CTA

LANES = 32
ALL_LANES = (1 << LANES) - 1
UNWRITTEN = 0x7FC0DEAD  # what registers hold before the first write: a NaN as fp32
_LANE = np.arange(LANES, dtype=np.uint64)
_BIT = np.uint64(1) << _LANE
LANE_MASKS = {
    "lanemask_eq": _BIT,
    "lanemask_lt": _BIT - 1,
    "lanemask_le": 2 * _BIT - 1,
    "lanemask_gt": ALL_LANES - (2 * _BIT - 1),
    "lanemask_ge": ALL_LANES - (_BIT - 1),
}


class PendingLoad:
    """A tcgen05.ld under way. deliver: fills the registers; end: says that the columns are read no more."""

    def __init__(self, registers: np.ndarray, deliver: Callable[[], None], end: Callable[[], None]):
        self.registers, self.end, self.has_arrived = registers, end, False
        self._deliver = deliver

    def arrive(self) -> None:
        if not self.has_arrived:
            self._deliver()
            self.has_arrived = True


class Warp:
    """One warp of a CTA; registers are uint64 [num_registers, 32], `words` the same memory as one sequence."""

    def __init__(self, cta: CTA, index: int, num_lanes: int, checks_registers: bool):
        self.cta, self.index, self.id = cta, index, 0
        self.program = cta.cluster.grid.program
        self.state = binding.WarpState(live=(1 << num_lanes) - 1)
        self.pointer = ctypes.addressof(self.state)
        self.registers = np.zeros((self.program.num_registers, LANES), np.uint64)
        self.words, self.registers_at = memoryview(self.registers.reshape(-1)), self.registers.ctypes.data
        self.waits: list[tuple[int, Wait]] = []
        self.open_copies: dict[int, list[Wait]] = {}  # lane → bulk copies since its last commit_group
        self.copy_groups: dict[int, list[list[Wait]]] = {}
        self.pending_loads: dict[int, PendingLoad] = {}
        self.pending = np.zeros(self.program.num_registers, np.uint8)
        self.state.pending = self.pending.ctypes.data
        self.pending_stores: list[Callable[[], None]] = []  # tcgen05.st before its wait::st
        self.member: Any = None  # its part in a warpgroup, once it executes a wgmma
        self.cluster_phase = 0  # of the cluster barrier it has arrived at
        self.clock: Any = None
        constants = self.program.constants
        self.registers[list(constants.values())] = np.array(list(constants), np.uint64)[:, None]
        vectors = self._vectors()
        for name, register in self.program.specials.items():
            self.registers[register] = self._special(name, vectors)
        if local_bytes := self.program.kernel.local_bytes:
            poison = self.cta.cluster.grid.options.poison
            self.local = np.full((LANES, local_bytes), 0xFF if poison else 0, np.uint8)
            self.state.local, self.state.local_size = self.local.ctypes.data, local_bytes
        if checks_registers:
            self.written = np.zeros(self.program.num_registers, np.uint32)
            known = [0, *self.program.constants.values(), *self.program.specials.values()]
            self.written[known] = ALL_LANES
            self.state.written = self.written.ctypes.data

    @property
    def is_live(self) -> bool:
        return bool(self.state.live)

    def __str__(self) -> str:
        return f"warp {self.index} of CTA {self.cta.index}"

    def at(self) -> int:
        """Index of the instruction that the warp is at (the least of its lanes')."""
        state = self.state
        if not state.is_diverged:
            return state.at
        return min((state.pc[lane] for lane in range(LANES) if state.live >> lane & 1), default=state.at)

    def instruction(self) -> Any:
        instructions = self.program.kernel.instructions
        return instructions[min(self.state.at, len(instructions) - 1)]

    def wake(self) -> int:
        """Drop the waits that are over; returns the lanes that can run."""
        if self.waits and any(wait.is_done for _, wait in self.waits):
            for _, wait in self.waits:
                if wait.is_done:
                    self.cta.cluster.monitor.acquire(self, wait.clock)
            self.waits = [entry for entry in self.waits if not entry[1].is_done]
            self.state.blocked = 0
            for lanes, _ in self.waits:
                self.state.blocked |= lanes
        return self.state.live & ~self.state.blocked

    def wait(self, waits: list[tuple[int, Wait]]) -> None:
        self.waits += waits
        for lanes, _ in waits:
            self.state.blocked |= lanes

    def mark_written(self, registers: Any, lanes: int) -> None:
        """A handler has written registers; nothing is done unless reads of unwritten registers are looked for."""
        if self.state.written:
            self.written[registers] |= np.uint32(lanes)

    # ---------------------------------------------------------------------------- loads from tensor memory

    def start_load(self, load: PendingLoad) -> None:
        """A tcgen05.ld begins; it ends at its wait, or when an instruction needs its values."""
        if len(self.pending_loads) == binding.MAX_PENDING:
            self.end_load(next(iter(self.pending_loads)))
        number = next(n for n in range(1, binding.MAX_PENDING + 1) if n not in self.pending_loads)
        self.pending_loads[number], self.pending[load.registers] = load, number
        self.state.num_pending = len(self.pending_loads)

    def needs_load(self, number: int) -> None:
        """The instruction that the warp is at names a register of a load: a move only wants the values."""
        load = self.pending_loads[number]
        if self.program.table["is_move"][self.state.at] and not load.has_arrived:
            load.arrive()
            self.pending[self.pending == number] = number | binding.HAS_ARRIVED
        else:
            self.end_load(number)

    def end_load(self, number: int) -> None:
        load = self.pending_loads.pop(number)
        load.arrive()
        load.end()
        self.pending[self.pending & ~np.uint8(binding.HAS_ARRIVED) == number] = 0
        self.state.num_pending = len(self.pending_loads)

    def end_loads(self, registers: list[int] | None = None) -> None:
        """End all loads, or those whose values are in the registers given."""
        numbers = self.pending_loads if registers is None else self.pending[registers] & ~np.uint8(binding.HAS_ARRIVED)
        for number in sorted({int(number) for number in numbers} - {0}):
            self.end_load(number)

    # ------------------------------------------------------------------------------------ special registers

    def _special(self, name: str, vectors: dict[str, Any]) -> Any:
        if not name.startswith("%"):
            grid = self.cta.cluster.grid
            local = self.program.kernel.local.get(name)
            if local is not None:
                return binding.LOCAL_BASE + local.offset
            return grid.parameter_addresses.get(name) or self.cta.shared_symbols[name]
        base, _, axis = name[1:].partition(".")
        if axis:
            return vectors[base]["xyz".index(axis)]
        if base in LANE_MASKS:
            return LANE_MASKS[base]
        cluster = self.cta.cluster
        return {
            "laneid": _LANE, "warpid": self.index, "nwarpid": len(self.cta.warps) or 1,
            "cluster_ctarank": self.cta.rank, "cluster_nctarank": len(cluster.ctas), "is_explicit_cluster": 1,
            "dynamic_smem_size": cluster.grid.launch_shared_bytes, "total_smem_size": cluster.shared_size,
            "smid": self.cta.rank, "nsmid": cluster.grid.num_sms, "clock": 0, "clock64": 0, "globaltimer": 0,
        }[base]  # fmt: skip

    def _vectors(self) -> dict[str, Any]:
        grid, thread = self.cta.cluster.grid, _LANE + np.uint64(LANES * self.index)
        x, y, _ = grid.block
        return {
            "tid": (thread % x, thread // x % y, thread // (x * y)), "ntid": grid.block, "ctaid": self.cta.index,
            "nctaid": grid.dimensions, "cluster_ctaid": self.cta.position, "cluster_nctaid": grid.cluster_dimensions,
            "clusterid": tuple(a // b for a, b in zip(self.cta.index, grid.cluster_dimensions, strict=True)),
            "nclusterid": tuple(a // b for a, b in zip(grid.dimensions, grid.cluster_dimensions, strict=True)),
        }  # fmt: skip
