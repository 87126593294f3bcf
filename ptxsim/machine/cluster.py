"""A cluster and its CTAs: shared memory, tensor memory, barriers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxsim.checks.silent import SilentMonitor
from ptxsim.core import binding
from ptxsim.machine.addresses import SYSTEM_BYTES, offset_of, rank_of, shared_address
from ptxsim.machine.barriers import ClusterBarrier, MBarrier, NamedBarrier
from ptxsim.machine.engine import Engine
from ptxsim.machine.warp import LANES, Warp

if TYPE_CHECKING:
    from ptxsim.machine.grid import Grid

TMEM_LANES, TMEM_COLUMNS = 128, 512
POISON_BYTE, POISON_CELL = 0xFF, 0x7FC00000  # NaN in every format that kernels put there
ALLOCATION_UNIT = 32  # columns


class MachineFault(RuntimeError):
    """What hardware would trap on, or do silently wrong."""


class CTA:
    """A thread block."""

    def __init__(self, cluster: Cluster, rank: int, position: tuple[int, ...], index: tuple[int, ...]):
        self.cluster, self.rank, self.position, self.index = cluster, rank, position, index
        grid = cluster.grid
        fill = POISON_BYTE if grid.options.poison else 0
        self.shared = np.full(cluster.shared_size, fill, np.uint8)
        self.tmem: np.ndarray = np.full(
            (TMEM_LANES, TMEM_COLUMNS), POISON_CELL if grid.options.poison else 0, np.uint32
        )
        self.tmem_allocations: dict[tuple[int, int], int] = {}  # (first column, columns) → PTX line
        self.named_barriers: dict[int, NamedBarrier] = {}
        self.shared_symbols = self._place_symbols()
        self.warps: list[Warp] = []
        threads = int(np.prod(grid.block))
        for first in range(0, threads, LANES):
            lanes = min(LANES, threads - first)
            self.warps.append(Warp(self, first // LANES, lanes, grid.options.check_registers))

    def _place_symbols(self) -> dict[str, int]:
        """Addresses of shared variables: static ones first, the dynamic one behind them."""
        symbols, offset = {}, SYSTEM_BYTES
        declared = self.cluster.grid.program.kernel.shared
        for name, symbol in sorted(declared.items(), key=lambda item: item[1].size is None):
            offset = -(-offset // symbol.align) * symbol.align
            symbols[name] = shared_address(self.rank, offset)
            offset += symbol.size or 0
        return symbols

    def barrier(self, index: int) -> NamedBarrier:
        return self.named_barriers.setdefault(index, NamedBarrier(index, self.cluster.monitor.merge))

    def num_live_threads(self) -> int:
        return LANES * sum(warp.is_live for warp in self.warps)

    def allocate_tmem(self, columns: int, line: int) -> int:
        """First column of a new allocation: the least that is free. `line`: of the instruction that asks."""
        if columns & (columns - 1) or not ALLOCATION_UNIT <= columns <= TMEM_COLUMNS:
            raise MachineFault(f"tcgen05.alloc of {columns} columns; allowed are 32, 64, 128, 256, 512")
        base = 0
        while any(base < first + count and first < base + columns for first, count in self.tmem_allocations):
            base += ALLOCATION_UNIT
        if base + columns > TMEM_COLUMNS:
            taken = list(self.tmem_allocations)
            raise MachineFault(f"tcgen05.alloc of {columns} columns would block: allocated are {taken}")
        self.tmem_allocations[base, columns] = line
        return base

    def free_tmem(self, base: int, columns: int) -> None:
        if (base, columns) not in self.tmem_allocations:
            raise MachineFault(
                f"tcgen05.dealloc of {columns} columns at {base}, which is no allocation; "
                f"allocated are {list(self.tmem_allocations)}"
            )
        del self.tmem_allocations[base, columns]

    def check_tmem(self, column: int, columns: int) -> None:
        """Raise unless the columns lie inside allocations."""
        covered = any(base <= column and column + columns <= base + count for base, count in self.tmem_allocations)
        if not covered:
            raise MachineFault(
                f"tensor memory columns {column} … {column + columns - 1} are outside the allocations "
                f"{list(self.tmem_allocations)} (first column, columns)"
            )


class Cluster:
    """CTAs that share their shared memory, with the asynchronous units that serve them."""

    def __init__(self, grid: Grid, index: tuple[int, ...]):
        self.grid, self.index = grid, index
        symbols = sum(symbol.size or 0 for symbol in grid.program.kernel.shared.values())
        self.shared_size = -(-(SYSTEM_BYTES + grid.launch_shared_bytes + symbols) // 1024) * 1024
        self.mbarriers: dict[int, MBarrier] = {}
        self.activity = 0  # grows with every synchronisation: tells spinning from progress
        self.monitor: Any = SilentMonitor()
        shape = grid.cluster_dimensions
        self.ctas: list[CTA] = []
        for rank in range(int(np.prod(shape))):
            position = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
            place = tuple(i * n + p for i, n, p in zip(index, shape, position, strict=True))
            self.ctas.append(CTA(self, rank, position, place))
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        for number, warp in enumerate(self.warps):
            warp.id = number
        self.context = binding.Context(shared_size=self.shared_size)
        self.context_at = ctypes.addressof(self.context)
        for cta in self.ctas:
            self.context.shared[cta.rank] = cta.shared.ctypes.data
        grid.restrict_global_memory(self.context)
        if grid.options.monitor is not None:
            self.monitor = grid.options.monitor(self)
        self.barrier = ClusterBarrier(sum(warp.state.live.bit_count() for warp in self.warps), self.monitor.merge)
        self.engine = Engine(self.monitor, grid.rng, grid.options.delay)

    def shared_of(self, address: int) -> np.ndarray:
        """The window that a shared address is in."""
        rank = rank_of(address)
        if rank >= len(self.ctas):
            raise MachineFault(f"shared address {address:#x} names CTA {rank} of a cluster of {len(self.ctas)}")
        return self.ctas[rank].shared

    def shared_bytes(self, address: int, count: int) -> np.ndarray:
        """`count` bytes of shared memory, writable."""
        offset = offset_of(address)
        if offset + count > self.shared_size:
            raise MachineFault(
                f"{count} bytes at shared address {address:#x} end outside the window of {self.shared_size} bytes"
            )
        return self.shared_of(address)[offset : offset + count]

    def init_mbarrier(self, warp: Warp, address: int, count: int) -> None:
        self.mbarriers[address] = MBarrier(address, count, self.monitor.merge, made_at=self.monitor.now(warp))

    def mbarrier(self, address: int, user: Warp | None = None) -> MBarrier:
        """`user`: the warp that names the barrier, which must know of its initialisation."""
        if address not in self.mbarriers:
            known = ", ".join(f"{each:#x}" for each in sorted(self.mbarriers)) or "none"
            raise MachineFault(f"no mbarrier was initialised at shared {address:#x}; there are {known}")
        barrier = self.mbarriers[address]
        if user is not None:
            self.monitor.check_knows(user, barrier.made_at, barrier)
        return barrier
