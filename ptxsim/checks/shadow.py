"""Shadow memory: for each granule of shared or tensor memory who wrote it last, and who has read it since.

The work is done by `core/shadow.c`; the structures here are its. Its results are problems, which the monitor explains.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

import ptxsim.core
from ptxsim.checks.clocks import Clock
from ptxsim.host.build import build_shared_object

NOBODY, OPERATION, ATOMICALLY = -1, -2, -3  # in place of an actor: never written; a numbered operation; by atomics only
FOREVER = np.iinfo(np.int32).max  # the epoch of an access that has not ended
UNORDERED_WRITE, UNORDERED_READ, NO_PROXY_FENCE, NEVER_WRITTEN = range(4)  # kinds of problems
MAX_PROBLEMS = 64  # in one call; more of one call are not kept


class Access(ctypes.Structure):
    """Who accesses, and what is known to have happened before. `line`: of the PTX."""

    _fields_ = [
        ("actor", ctypes.c_int32), ("epoch", ctypes.c_int32), ("line", ctypes.c_int32), ("is_async", ctypes.c_int32),
        ("ordered", ctypes.c_void_p), ("proxied", ctypes.c_void_p), ("operations", ctypes.c_char_p),
        ("num_operations", ctypes.c_int64),
    ]  # fmt: skip

    def __init__(self, actor: int, clock: Clock, *, is_async: bool, epoch: int = 0, line: int = 0):
        super().__init__(actor, epoch, line, is_async)
        self.clock = clock
        self.ordered = clock.epochs.ctypes.data
        self.proxied = self.ordered + clock.epochs.strides[0]
        self._known = 0
        self.refresh()

    def refresh(self) -> None:
        """Take over the operations of the clock; its epochs are seen as they are."""
        if self.clock.operations != self._known:
            self._known = self.clock.operations
            count = -(-self._known.bit_length() // 8)
            self.operations, self.num_operations = self._known.to_bytes(count, "little"), 8 * count


class Problem(ctypes.Structure):
    """An access by `line` of the PTX against an earlier one, first seen at `granule` of a CTA's shadow."""

    _fields_ = [
        ("kind", ctypes.c_int32), ("is_write", ctypes.c_int32), ("line", ctypes.c_int32),
        ("other_actor", ctypes.c_int32), ("other_epoch", ctypes.c_int32), ("other_line", ctypes.c_int32),
        ("granule", ctypes.c_int64), ("shadow", ctypes.c_int64),
    ]  # fmt: skip


class Problems(ctypes.Structure):
    """What one call has found."""

    _fields_ = [("count", ctypes.c_int32), ("shadow", ctypes.c_int32), ("problems", Problem * MAX_PROBLEMS)]


class _State(ctypes.Structure):
    _fields_ = [
        ("writer", ctypes.c_void_p), ("write_epoch", ctypes.c_void_p), ("write_line", ctypes.c_void_p),
        ("reader", ctypes.c_void_p), ("read_epoch", ctypes.c_void_p), ("readers", ctypes.c_void_p),
        ("granules", ctypes.c_int64), ("actors", ctypes.c_int64), ("granule_bytes", ctypes.c_int64),
        ("num_warps", ctypes.c_int32), ("has_proxies", ctypes.c_int32),
    ]  # fmt: skip


class Shadow:
    """State of one memory's granules. has_proxies: it is reached through two proxies, as shared memory is."""

    def __init__(self, name: str, granules: int, actors: int, *, num_warps: int, granule_bytes: int, has_proxies: bool):
        self.name, self.granule_bytes = name, granule_bytes
        self.writer, self.reader = (np.full(granules, NOBODY, np.int32) for _ in range(2))
        self.write_epoch, self.write_line, self.read_epoch = (np.zeros(granules, np.int32) for _ in range(3))
        self.readers = np.empty((granules, actors), np.int32)
        arrays = (self.writer, self.write_epoch, self.write_line, self.reader, self.read_epoch, self.readers)
        state = _State(*(a.ctypes.data for a in arrays), granules, actors, granule_bytes, num_warps, has_proxies)
        self._state, self.pointer = state, ctypes.addressof(state)

    def mark_atomic(self, where: slice) -> None:
        """Atomics have written here: they don't race with each other."""
        written = self.writer[where]
        written[written == NOBODY] = ATOMICALLY

    def forget(self, where: slice) -> None:
        """Nothing is there any more."""
        self.writer[where] = self.reader[where] = NOBODY


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled `shadow.c`."""
    source = Path(ptxsim.core.__path__[0], "shadow.c").read_text()
    loaded = ctypes.CDLL(str(build_shared_object(source, "shadow")))
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.shadow_span.argtypes = [pointer, pointer, number, number, flag, flag, pointer]
    loaded.shadow_chunks.argtypes = [pointer, pointer, pointer, number, number, flag, pointer]
    loaded.shadow_log.argtypes = [pointer, pointer, pointer, number, pointer, pointer]
    return loaded
