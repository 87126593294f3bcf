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


class PendingLoad:
    """A tcgen05.ld whose registers have not got their values yet."""

    def __init__(self, registers: np.ndarray, land: Callable[[], None]):
        self.first, self.last, self.land = int(registers.min()), int(registers.max()), land


class Warp:
    """One warp of a CTA; registers are uint64 [num_registers, 32]."""

    def __init__(self, cta: CTA, index: int, num_lanes: int, checks_registers: bool):
        self.cta, self.index, self.id = cta, index, 0
        self.program = cta.cluster.grid.program
        self.state = binding.WarpState(live=(1 << num_lanes) - 1)
        self.pointer = ctypes.addressof(self.state)
        self.registers = np.zeros((self.program.num_registers, LANES), np.uint64)
        self.waits: list[tuple[int, Wait]] = []
        self.open_copies: dict[int, list[Wait]] = {}  # lane → bulk copies since its last commit_group
        self.copy_groups: dict[int, list[list[Wait]]] = {}
        self.pending_loads: list[PendingLoad] = []
        self.pending_stores: list[Callable[[], None]] = []  # tcgen05.st before its wait::st
        self.member: Any = None  # its part in a warpgroup, once it executes a wgmma
        self.cluster_phase = 0  # of the cluster barrier it has arrived at
        self.clock: Any = None
        for value, register in self.program.constants.items():
            self.registers[register] = value
        for name, register in self.program.specials.items():
            self.registers[register] = np.asarray(self._special(name), np.uint64)
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
        if any(wait.is_done for _, wait in self.waits):
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

    def add_pending_load(self, load: PendingLoad) -> None:
        if len(self.pending_loads) == binding.MAX_PENDING:
            self.land(0)
        self.pending_loads.append(load)
        self._publish_pending()

    def land(self, index: int) -> None:
        self.pending_loads.pop(index).land()
        self._publish_pending()

    def land_all(self) -> None:
        while self.pending_loads:
            self.land(0)

    def land_touching(self, registers: list[int]) -> None:
        """Land the loads whose registers are among those given."""
        for index in reversed(range(len(self.pending_loads))):
            load = self.pending_loads[index]
            if any(load.first <= register <= load.last for register in registers):
                self.land(index)

    def _publish_pending(self) -> None:
        self.state.num_pending = len(self.pending_loads)
        for index, load in enumerate(self.pending_loads):
            self.state.pending_first[index], self.state.pending_last[index] = load.first, load.last

    # ------------------------------------------------------------------------------------ special registers

    def _special(self, name: str) -> Any:
        if not name.startswith("%"):
            grid = self.cta.cluster.grid
            local = self.program.kernel.local.get(name)
            if local is not None:
                return binding.LOCAL_BASE + local.offset
            return grid.parameter_addresses.get(name) or self.cta.shared_symbols[name]
        base, _, axis = name[1:].partition(".")
        if axis:
            return self._vectors()[base]["xyz".index(axis)]
        lanes = range(LANES)
        masks = {
            "lanemask_eq": [1 << lane for lane in lanes],
            "lanemask_lt": [(1 << lane) - 1 for lane in lanes],
            "lanemask_le": [(2 << lane) - 1 for lane in lanes],
            "lanemask_gt": [ALL_LANES & ~((2 << lane) - 1) for lane in lanes],
            "lanemask_ge": [ALL_LANES & ~((1 << lane) - 1) for lane in lanes],
        }
        cluster = self.cta.cluster
        return masks.get(base) or {
            "laneid": np.arange(LANES), "warpid": self.index, "nwarpid": len(self.cta.warps) or 1,
            "cluster_ctarank": self.cta.rank, "cluster_nctarank": len(cluster.ctas), "is_explicit_cluster": 1,
            "dynamic_smem_size": cluster.grid.launch_shared_bytes, "total_smem_size": cluster.shared_size,
            "smid": self.cta.rank, "nsmid": cluster.grid.num_sms, "clock": 0, "clock64": 0, "globaltimer": 0,
        }[base]  # fmt: skip

    def _vectors(self) -> dict[str, Any]:
        grid, thread = self.cta.cluster.grid, np.arange(LANES) + LANES * self.index
        x, y, _ = grid.block
        return {
            "tid": (thread % x, thread // x % y, thread // (x * y)), "ntid": grid.block, "ctaid": self.cta.index,
            "nctaid": grid.dimensions, "cluster_ctaid": self.cta.position, "cluster_nctaid": grid.cluster_dimensions,
            "clusterid": tuple(a // b for a, b in zip(self.cta.index, grid.cluster_dimensions, strict=True)),
            "nclusterid": tuple(a // b for a, b in zip(grid.dimensions, grid.cluster_dimensions, strict=True)),
        }  # fmt: skip
