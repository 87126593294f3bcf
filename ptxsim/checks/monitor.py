"""The race monitor: happens-before over the generic and the async proxy, on shared and tensor memory.

Reported: accesses that no barrier orders; generic writes that the async proxy reads without a fence.proxy.async on the
way (PTX ISA 8.9, proxies); reads of memory that was never written. A granule of shared memory is as small as the
program's smallest store there, so that warps that write different bytes of one word are not confused.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from ptxsim.checks import shadow as shadows
from ptxsim.checks.clocks import ORDERED, Clock
from ptxsim.checks.findings import Finding, Site
from ptxsim.checks.shadow import FOREVER, OPERATION, Access, Problem, Problems, Shadow
from ptxsim.core import binding

if TYPE_CHECKING:
    from ptxsim.machine.cluster import Cluster
    from ptxsim.machine.warp import Warp

LOG_SIZE = 1 << 16
BAND, BANDS, COLUMNS = 16, 8, 512  # of tensor memory: a granule is a column of 16 lanes
CHUNK = 16  # bytes of an operand's chunk
KINDS = {  # of a problem: the finding's kind and message; the memory's name follows
    (shadows.UNORDERED_WRITE, False): ("race", "a read is not ordered behind a write of"),
    (shadows.UNORDERED_WRITE, True): ("race", "a write is not ordered behind a write of"),
    (shadows.UNORDERED_READ, True): ("race", "a write is not ordered behind a read of"),
    (shadows.NO_PROXY_FENCE, False): (
        "missing proxy fence", "the async proxy reads, without fence.proxy.async behind the write,",
    ),
    (shadows.NEVER_WRITTEN, False): ("uninitialised read", "nothing was written to"),
}  # fmt: skip


class Operation:
    """An asynchronous operation: its clock, and the accesses it makes when it completes."""

    def __init__(self, monitor: Monitor, who: str, access: Access):
        self.monitor, self.who, self.access = monitor, who, access

    @property
    def clock(self) -> Clock:
        return self.access.clock

    def shared_read(self, rank: int, offset: int, count: int) -> None:
        self.monitor.touch(self.monitor.shared[rank], self.monitor.span(offset, count), self.access, self.who)

    def shared_write(self, rank: int, offset: int, count: int) -> None:
        where = self.monitor.span(offset, count)
        self.monitor.touch(self.monitor.shared[rank], where, self.access, self.who, is_write=True)

    def shared_read_at(self, rank: int, offsets: np.ndarray) -> None:
        self.monitor.touch_chunks(self.monitor.shared[rank], offsets, self.access, self.who)

    def tmem_read(self, rank: int, bands: range, columns: range) -> None:
        for where in tmem_spans(bands, columns):
            self.monitor.touch(self.monitor.tmem[rank], where, self.access, self.who)

    def tmem_write(self, rank: int, bands: range, columns: range) -> None:
        for where in tmem_spans(bands, columns):
            self.monitor.touch(self.monitor.tmem[rank], where, self.access, self.who, is_write=True)


def tmem_spans(bands: range, columns: range) -> list[slice]:
    return [slice(band * COLUMNS + columns.start, band * COLUMNS + columns.stop) for band in bands]


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
        self.epochs = [0] * self.num_actors
        self.num_operations = 0
        self.operation_names: dict[int, str] = {}
        self.accesses: list[Access] = []  # of each warp
        for warp in cluster.warps:
            warp.clock = Clock.zero(self.num_actors)
            self.accesses.append(Access(warp.id, warp.clock, is_async=False))
            self._next_epoch(warp)
        self._make_shadows(cluster)
        self.log = np.zeros(LOG_SIZE, binding.ACCESS)
        cluster.context.log, cluster.context.log_capacity = self.log.ctypes.data, LOG_SIZE
        self.lines = np.array([each.line for each in cluster.grid.program.kernel.instructions], np.int32)
        self.library, self.problems = shadows.library(), Problems()
        self.problems_at = ctypes.addressof(self.problems)

    def _make_shadows(self, cluster: Cluster) -> None:
        self.granule = smallest_store(cluster.grid.program.table)
        self.shared, self.tmem = [], []
        for cta in cluster.ctas:
            sizes = {"shared": -(-cluster.shared_size // self.granule), "tensor": BANDS * COLUMNS}
            made = [
                Shadow(
                    f"{kind} memory of CTA {cta.index}", size, self.num_actors, num_warps=self.num_warps,
                    granule_bytes=self.granule, has_proxies=kind == "shared",
                )
                for kind, size in sizes.items()
            ]  # fmt: skip
            self.shared.append(made[0])
            self.tmem.append(made[1])
        self.shared_pointers = (ctypes.c_void_p * len(self.shared))(*(each.pointer for each in self.shared))

    def span(self, offset: int, count: int) -> slice:
        """Granules of shared memory."""
        return slice(offset // self.granule, -(-(offset + count) // self.granule))

    # ----------------------------------------------------------------------------------------------- clocks

    def _next_epoch(self, warp: Warp) -> None:
        """What the warp does from now on is not known to those who hold its clock so far."""
        self.epochs[warp.id] += 1
        warp.clock.epochs[ORDERED, warp.id] = self.accesses[warp.id].epoch = self.epochs[warp.id]

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

    def now(self, warp: Warp) -> tuple[int, int]:
        """A moment in a warp's life: the warp and its epoch."""
        return warp.id, self.epochs[warp.id]

    def check_knows(self, warp: Warp, moment: tuple[int, int], what: object) -> None:
        """Report a warp that uses what another one may not have made yet."""
        maker, epoch = moment
        if warp.clock.epochs[ORDERED, maker] < epoch:
            sites = self._site(str(warp), warp.instruction().line), Site(self.names[maker])
            kernel = self.cluster.grid.program.kernel.name
            message = "an mbarrier is used without order behind its initialisation"
            self.cluster.grid.findings.add(Finding("race", message, *sites, kernel, str(what)))

    def proxy_fence(self, warp: Warp) -> None:
        warp.clock.make_visible_to_async_proxy()
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

    def note_product(self, warp: Warp, kind: str, m: int, n: int, column: int) -> None:
        """The shape of a tcgen05.mma; only timelines ask."""

    def _start_ordered(self, warp: Warp, what: str, actor: int) -> Operation:
        clock = self.release(warp)
        self.epochs[actor] += 1
        clock.epochs[ORDERED, actor] = self.epochs[actor]
        return self._operation(warp, what, actor, self.epochs[actor], clock)

    def _operation(self, warp: Warp, what: str, actor: int, epoch: int, clock: Clock) -> Operation:
        line = warp.instruction().line
        return Operation(self, what, Access(actor, clock, is_async=True, epoch=epoch, line=line))

    # --------------------------------------------------------------------------------------------- accesses

    def touch(
        self, shadow: Shadow, where: slice, access: Access, who: str, *, is_write: bool = False,
        only_record: bool = False,
    ) -> None:  # fmt: skip
        """An access to granules; only_record: it was looked at before."""
        first, count = where.start, where.stop - where.start
        found = self.library.shadow_span(
            shadow.pointer, ctypes.addressof(access), first, count, is_write, only_record, self.problems_at
        )
        if found:
            self._report(shadow, who)

    def touch_chunks(
        self, shadow: Shadow, offsets: np.ndarray, access: Access, who: str, *, is_write: bool = False
    ) -> None:
        """16-byte chunks."""
        found = self.library.shadow_chunks(
            shadow.pointer, ctypes.addressof(access), offsets.ctypes.data, len(offsets), CHUNK, is_write,
            self.problems_at,
        )  # fmt: skip
        if found:
            self._report(shadow, who)

    def _of_warp(self, warp: Warp) -> Access:
        access = self.accesses[warp.id]
        access.line = warp.instruction().line
        access.refresh()
        return access

    def shared_read(self, warp: Warp, rank: int, offset: int, count: int) -> None:
        self.touch(self.shared[rank], self.span(offset, count), self._of_warp(warp), str(warp))

    def shared_write(self, warp: Warp, rank: int, offset: int, count: int) -> None:
        self.touch(self.shared[rank], self.span(offset, count), self._of_warp(warp), str(warp), is_write=True)

    def shared_read_at(self, warp: Warp, rank: int, offsets: np.ndarray) -> None:
        """16-byte chunks."""
        self.touch_chunks(self.shared[rank], offsets, self._of_warp(warp), str(warp))

    def shared_write_at(self, warp: Warp, rank: int, offsets: np.ndarray) -> None:
        self.touch_chunks(self.shared[rank], offsets, self._of_warp(warp), str(warp), is_write=True)

    def shared_atomic(self, warp: Warp, rank: int, offset: int, count: int) -> None:
        """Atomics do not race with each other."""
        self.shared[rank].mark_atomic(self.span(offset, count))

    def tmem_access(
        self, warp: Warp, bands: range, columns: range, *, line: int, is_write: bool, state: str = "done"
    ) -> None:
        """state: "pending" from a tcgen05.ld or .st to its end, when nobody else may touch the columns; "landing"."""
        shadow, access = self.tmem[warp.cta.rank], self._of_warp(warp)
        access.line = line
        epoch, who = access.epoch, str(warp)
        if state == "pending":
            access.epoch = FOREVER
        for where in tmem_spans(bands, columns):
            self.touch(shadow, where, access, who, is_write=is_write, only_record=state == "landing")
        access.epoch = epoch

    def tmem_freed(self, warp: Warp, columns: range) -> None:
        """tcgen05.dealloc: nobody may be at the columns; they hold nothing from now on."""
        shadow, access = self.tmem[warp.cta.rank], self._of_warp(warp)
        for where in tmem_spans(range(BANDS), columns):
            self.touch(shadow, where, access, str(warp), is_write=True)
            shadow.forget(where)

    def drain(self, warp: Warp) -> None:
        """Accesses to shared memory that the SIMT core has logged; the warp's clock did not change meanwhile."""
        context, access = self.cluster.context, self._of_warp(warp)
        found = self.library.shadow_log(
            self.shared_pointers, ctypes.addressof(access), context.log, context.log_count, self.lines.ctypes.data,
            self.problems_at,
        )  # fmt: skip
        context.log_count = 0
        if found:
            self._report(None, str(warp))

    def finish(self) -> None: ...

    # ---------------------------------------------------------------------------------------------- reports

    def _report(self, shadow: Shadow | None, who: str) -> None:
        """Make findings of what the last call has found; shadow None: shared memory of the CTA that a problem names."""
        for problem in self.problems.problems[: self.problems.count]:
            self._add(problem, shadow or self.shared[problem.shadow], who)

    def _add(self, problem: Problem, shadow: Shadow, who: str) -> None:
        kind, message = KINDS[problem.kind, bool(problem.is_write)]
        other = None
        if problem.other_actor >= 0:
            other = self._site(self.names[problem.other_actor], problem.other_line)
        elif problem.other_actor == OPERATION:
            name = self.operation_names.get(problem.other_epoch, "an operation")
            other = self._site(name, problem.other_line)
        grid = self.cluster.grid
        message, site = f"{message} {shadow.name}", self._site(who, problem.line)
        location = self._location(shadow, problem.granule)
        grid.findings.add(Finding(kind, message, site, other, grid.program.kernel.name, location))

    def _site(self, who: str, line: int) -> Site:
        return Site(who, line, self.cluster.grid.sources.get(line))

    def _location(self, shadow: Shadow, granule: int) -> str:
        if shadow in self.tmem:
            lane = granule // COLUMNS * BAND
            return f"lanes {lane} … {lane + BAND - 1}, column {granule % COLUMNS}"
        return f"byte {granule * self.granule:#x}"


def smallest_store(table: np.ndarray) -> int:
    """Bytes of the smallest store to shared memory in a program, at most 4."""
    is_store = (table["op"] == binding.OPCODE["STORE"]) & ((table["space"] == 1) | (table["element_bytes"] < 4))
    sizes = (table["element_bytes"] * table["count"])[is_store]
    return int(min([4, *sizes.tolist()]))
