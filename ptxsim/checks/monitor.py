"""The race monitor: happens-before over the generic and the async proxy, on shared and tensor memory.

Reported: accesses that no barrier orders; generic writes that the async proxy reads without a fence.proxy.async on the
way (PTX ISA 8.9, proxies); reads of memory that was never written. A granule of shared memory is as small as the
program's smallest store there, so that warps that write different bytes of one word are not confused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptxsim.checks.clocks import Clock
from ptxsim.checks.findings import Finding, Site
from ptxsim.checks.shadow import FOREVER, NOBODY, OPERATION, Access, Shadow
from ptxsim.core import binding
from ptxsim.machine.addresses import offset_of, rank_of

if TYPE_CHECKING:
    from ptxsim.machine.cluster import Cluster
    from ptxsim.machine.warp import Warp

LOG_SIZE = 1 << 20
QUARTERS, COLUMNS = 4, 512
CHUNK = 16  # bytes of an operand's chunk


class Operation:
    """An asynchronous operation: its clock, and the accesses it makes when it completes."""

    def __init__(self, monitor: Monitor, access: Access):
        self.monitor, self.access = monitor, access

    @property
    def clock(self) -> Clock:
        return self.access.clock

    def shared_read(self, rank: int, offset: int, count: int) -> None:
        self.monitor.read(self.monitor.shared[rank], self.monitor.span(offset, count), self.access)

    def shared_write(self, rank: int, offset: int, count: int) -> None:
        self.monitor.write(self.monitor.shared[rank], self.monitor.span(offset, count), self.access)

    def shared_read_at(self, rank: int, offsets: np.ndarray) -> None:
        self.monitor.read(self.monitor.shared[rank], self.monitor.chunks(offsets), self.access)

    def tmem_read(self, rank: int, quarters: range, columns: range) -> None:
        for where in tmem_spans(quarters, columns):
            self.monitor.read(self.monitor.tmem[rank], where, self.access)

    def tmem_write(self, rank: int, quarters: range, columns: range) -> None:
        for where in tmem_spans(quarters, columns):
            self.monitor.write(self.monitor.tmem[rank], where, self.access)


def tmem_spans(quarters: range, columns: range) -> list[slice]:
    return [slice(q * COLUMNS + columns.start, q * COLUMNS + columns.stop) for q in quarters]


class Monitor:
    """Watches one cluster."""

    is_watching = True

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.num_warps, num_ctas = len(cluster.warps), len(cluster.ctas)
        has_products = any(each.words[0] == "wgmma" for each in cluster.grid.program.kernel.instructions)
        self.first_product_actor = 2 * self.num_warps + num_ctas
        self.num_actors = self.first_product_actor + (self.num_warps if has_products else 0)
        self.names = [
            *(str(warp) for warp in cluster.warps),
            *(f"tensor core of CTA {cta.index}" for cta in cluster.ctas),
            *(f"bulk stores of {warp}" for warp in cluster.warps),
            *(f"wgmma of {warp}" for warp in cluster.warps if has_products),
        ]
        self.epochs = np.zeros(self.num_actors, np.int32)
        self.num_operations = 0
        self.operation_names: dict[int, str] = {}
        for warp in cluster.warps:
            warp.clock = Clock.zero(self.num_actors)
            self._next_epoch(warp)
        self.granule = smallest_store(cluster.grid.program.table)
        granules = -(-cluster.shared_size // self.granule)
        self.shared, self.tmem = [], []
        for cta in cluster.ctas:
            shared, tmem = (f"{kind} memory of CTA {cta.index}" for kind in ("shared", "tensor"))
            self.shared.append(Shadow(shared, granules, self.num_actors, has_proxies=True))
            self.tmem.append(Shadow(tmem, QUARTERS * COLUMNS, self.num_actors, has_proxies=False))
        self.log = np.zeros(LOG_SIZE, binding.ACCESS)
        cluster.context.log, cluster.context.log_capacity = self.log.ctypes.data, LOG_SIZE

    # --------------------------------------------------------------------------------------------- granules

    def span(self, offset: int, count: int) -> slice:
        return slice(offset // self.granule, -(-(offset + count) // self.granule))

    def chunks(self, offsets: np.ndarray) -> np.ndarray:
        """Granules of 16-byte chunks."""
        return (offsets[:, None] // self.granule + np.arange(CHUNK // self.granule)).ravel()

    # ----------------------------------------------------------------------------------------------- clocks

    def _next_epoch(self, warp: Warp) -> None:
        """What the warp does from now on is not known to those who hold its clock so far."""
        self.epochs[warp.id] += 1
        warp.clock.ordered[warp.id] = self.epochs[warp.id]

    def release(self, warp: Warp) -> Clock:
        clock = warp.clock.copy()
        self._next_epoch(warp)
        return clock

    def acquire(self, warp: Warp, clock: Clock | None) -> None:
        if clock is not None:
            warp.clock.join(clock)

    def merge(self, clock: Clock | None, other: Clock | None) -> Clock | None:
        if other is None:
            return clock
        if clock is None:
            return other.copy()
        clock.join(other)
        return clock

    def proxy_fence(self, warp: Warp) -> None:
        np.maximum(warp.clock.proxied, warp.clock.ordered, out=warp.clock.proxied)
        self._next_epoch(warp)

    def start(self, warp: Warp, what: str) -> Operation:
        clock, self.num_operations = self.release(warp), self.num_operations + 1
        clock.operations |= 1 << self.num_operations
        self.operation_names[self.num_operations] = what
        return self._operation(warp, what, OPERATION, self.num_operations, clock)

    def start_store(self, warp: Warp, what: str) -> Operation:
        return self._start_ordered(warp, what, self.num_warps + len(self.cluster.ctas) + warp.id)

    def start_tensor(self, warp: Warp, what: str, pair: int, is_commit: bool) -> Operation:
        return self._start_ordered(warp, what, self.num_warps + pair)

    def start_product(self, warp: Warp, what: str) -> Operation:
        """A warp's part of a wgmma."""
        return self._start_ordered(warp, what, self.first_product_actor + warp.id)

    def _start_ordered(self, warp: Warp, what: str, actor: int) -> Operation:
        clock = self.release(warp)
        self.epochs[actor] += 1
        clock.ordered[actor] = self.epochs[actor]
        return self._operation(warp, what, actor, int(self.epochs[actor]), clock)

    def _operation(self, warp: Warp, what: str, actor: int, epoch: int, clock: Clock) -> Operation:
        return Operation(self, Access(actor, epoch, clock, what, warp.instruction().line, is_async=True))

    # --------------------------------------------------------------------------------------------- accesses

    def read(self, shadow: Shadow, where: slice | np.ndarray, access: Access) -> None:
        unordered = shadow.unordered_writes(where, access)
        if unordered.any():
            self._report("race", "a read is not ordered behind a write of", shadow, where, (access, unordered))
        elif access.is_async and shadow.has_proxies:
            unfenced = shadow.unfenced_writes(where, access, self.num_warps)
            if unfenced.any():
                message = "the async proxy reads, without fence.proxy.async behind the write,"
                self._report("missing proxy fence", message, shadow, where, (access, unfenced))
        unwritten = ~shadow.is_written[where]
        if unwritten.any():
            self._report("uninitialised read", "nothing was written to", shadow, where, (access, unwritten))
        shadow.record_read(where, access)

    def write(self, shadow: Shadow, where: slice | np.ndarray, access: Access) -> None:
        unordered = shadow.unordered_writes(where, access)
        if access.actor >= 0:
            unordered &= shadow.writer[where] != access.actor  # an actor's own writes are in order
        if unordered.any():
            self._report("race", "a write is not ordered behind a write of", shadow, where, (access, unordered))
        reads = shadow.unordered_reads(where, access)
        if reads.any():
            reader = int(np.nonzero(reads.any(1))[0][0])
            site, other = self._site(access.who, access.line), Site(self.names[reader])
            message = f"a write is not ordered behind a read of {shadow.name}"
            self._add("race", message, (site, other), self._location(shadow, where, reads.any(0)))
        shadow.record_write(where, access)

    def shared_read(self, warp: Warp, rank: int, offset: int, count: int) -> None:
        self.read(self.shared[rank], self.span(offset, count), self._warp_access(warp))

    def shared_write(self, warp: Warp, rank: int, offset: int, count: int) -> None:
        self.write(self.shared[rank], self.span(offset, count), self._warp_access(warp))

    def shared_read_at(self, warp: Warp, rank: int, offsets: np.ndarray) -> None:
        """16-byte chunks."""
        self.read(self.shared[rank], self.chunks(offsets), self._warp_access(warp))

    def shared_write_at(self, warp: Warp, rank: int, offsets: np.ndarray) -> None:
        self.write(self.shared[rank], self.chunks(offsets), self._warp_access(warp))

    def shared_atomic(self, warp: Warp, rank: int, offset: int, count: int) -> None:
        """Atomics do not race with each other; they count as writes that those who read must be ordered behind."""
        shadow, where, access = self.shared[rank], self.span(offset, count), self._warp_access(warp)
        shadow.is_written[where] = True
        shadow.write_line[where] = access.line

    def tmem_access(self, warp: Warp, quarters: range, columns: range, *, is_write: bool, state: str = "done") -> None:
        """state: "pending" from a tcgen05.ld or .st to its end, when nobody else may touch the columns; "landing"."""
        shadow, access = self.tmem[warp.cta.rank], self._warp_access(warp)
        for where in tmem_spans(quarters, columns):
            if state == "landing":
                shadow.record_read(where, access)
            elif is_write:
                self.write(shadow, where, access)
                if state == "pending":
                    shadow.write_epoch[where] = FOREVER
            else:
                self.read(shadow, where, access)
                if state == "pending":
                    shadow.read_epochs[warp.id, where] = FOREVER

    def _warp_access(self, warp: Warp, line: int | None = None) -> Access:
        line = warp.instruction().line if line is None else line
        return Access(warp.id, int(self.epochs[warp.id]), warp.clock, str(warp), line, is_async=False)

    def drain(self, warp: Warp) -> None:
        """Accesses to shared memory that the SIMT core has logged; the warp's clock did not change meanwhile."""
        count = self.cluster.context.log_count
        self.cluster.context.log_count = 0
        log = self.log[:count]
        changes = np.nonzero((np.diff(log["instruction"]) != 0) | (np.diff(log["bytes"]) != 0))[0] + 1
        instructions = self.cluster.grid.program.kernel.instructions
        for first, end in zip([0, *changes.tolist()], [*changes.tolist(), count], strict=True):
            entries = log[first:end]
            is_store, size = bool(entries["bytes"][0] & binding.STORE_BIT), int(entries["bytes"][0]) & 0x7FFFFFFF
            access = self._warp_access(warp, instructions[int(entries["instruction"][0])].line)
            ranks = rank_of_all(entries["address"])
            for rank in np.unique(ranks).tolist():
                offsets = offset_of(entries["address"][ranks == rank].astype(np.int64))
                inside = np.arange(0, max(size, self.granule), self.granule)
                where = np.unique((offsets[:, None] + inside) // self.granule)
                (self.write if is_store else self.read)(self.shared[rank], where, access)

    def finish(self) -> None: ...

    # ---------------------------------------------------------------------------------------------- reports

    def _report(self, kind: str, message: str, shadow: Shadow, where: slice | np.ndarray, found: Any) -> None:
        access, is_bad = found
        index = int(np.nonzero(is_bad)[0][0])
        writer, epoch = int(shadow.writer[where][index]), int(shadow.write_epoch[where][index])
        other = None
        if writer != NOBODY:
            name = self.names[writer] if writer >= 0 else self.operation_names.get(epoch, "an operation")
            other = self._site(name, int(shadow.write_line[where][index]))
        sites = (self._site(access.who, access.line), other)
        self._add(kind, f"{message} {shadow.name}", sites, self._location(shadow, where, is_bad))

    def _add(self, kind: str, message: str, sites: tuple[Site, Site | None], location: str) -> None:
        kernel = self.cluster.grid.program.kernel.name
        self.cluster.grid.findings.add(Finding(kind, message, sites[0], sites[1], kernel, location))

    def _site(self, who: str, line: int) -> Site:
        return Site(who, line, self.cluster.grid.sources.get(line))

    def _location(self, shadow: Shadow, where: slice | np.ndarray, is_bad: np.ndarray) -> str:
        index = int(np.nonzero(is_bad)[0][0])
        granule = int(where.start + index) if isinstance(where, slice) else int(np.asarray(where)[index])
        if shadow in self.tmem:
            return f"lanes {granule // COLUMNS * 32} … {granule // COLUMNS * 32 + 31}, column {granule % COLUMNS}"
        return f"byte {granule * self.granule:#x}"


def rank_of_all(addresses: np.ndarray) -> np.ndarray:
    return rank_of(addresses.astype(np.int64))


def smallest_store(table: np.ndarray) -> int:
    """Bytes of the smallest store to shared memory in a program, at most 4."""
    is_store = (table["op"] == binding.OPCODE["STORE"]) & ((table["space"] == 1) | (table["element_bytes"] < 4))
    sizes = (table["element_bytes"] * table["count"])[is_store]
    return int(min([4, *sizes.tolist()]))
