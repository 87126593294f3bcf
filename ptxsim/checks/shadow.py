"""Shadow memory: for each granule of shared or tensor memory who wrote it last, and who has read it since."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NOBODY, OPERATION = -1, -2  # in place of an actor: never written, written by a numbered operation
FOREVER = np.iinfo(np.int32).max  # the epoch of an access that has not ended


@dataclass
class Access:
    """One access as the monitor sees it. `actor` OPERATION: `epoch` is the operation's number."""

    actor: int
    epoch: int
    clock: object  # Clock
    who: str
    line: int
    is_async: bool  # through the async proxy


class Shadow:
    """State of `size` granules. has_proxies: the memory is reached through two proxies, as shared memory is."""

    def __init__(self, name: str, size: int, num_actors: int, *, has_proxies: bool):
        self.name, self.has_proxies = name, has_proxies
        self.writer = np.full(size, NOBODY, np.int32)
        self.write_epoch = np.zeros(size, np.int32)
        self.write_line = np.zeros(size, np.int32)
        self.read_epochs = np.zeros((num_actors, size), np.int32)
        self.is_written = np.zeros(size, bool)

    def unordered_writes(self, where: slice | np.ndarray, access: Access) -> np.ndarray:
        """Granules whose last write is not ordered before the access."""
        writer, epoch = self.writer[where], self.write_epoch[where]
        unordered = (writer >= 0) & (epoch > access.clock.ordered[np.maximum(writer, 0)])
        by_operation = writer == OPERATION
        if by_operation.any():
            missing = [n for n in np.unique(epoch[by_operation]).tolist() if not access.clock.operations >> n & 1]
            if missing:
                unordered |= by_operation & np.isin(epoch, missing)
        return unordered

    def unfenced_writes(self, where: slice | np.ndarray, access: Access, num_warps: int) -> np.ndarray:
        """Granules that a warp wrote, ordered before the access but without a fence.proxy.async on the way."""
        writer, epoch = self.writer[where], self.write_epoch[where]
        return (writer >= 0) & (writer < num_warps) & (epoch > access.clock.proxied[np.maximum(writer, 0)])

    def unordered_reads(self, where: slice | np.ndarray, access: Access) -> np.ndarray:
        """Reads that are not ordered before the access. → bool [actors, granules]

        An actor's own reads are in order, but for those that have not ended: a tcgen05.st may overtake a tcgen05.ld.
        """
        epochs = self.read_epochs[:, where]
        unordered = epochs > access.clock.ordered[:, None]
        if access.actor >= 0:
            unordered[access.actor] = epochs[access.actor] == FOREVER
        return unordered

    def record_read(self, where: slice | np.ndarray, access: Access) -> None:
        if access.actor >= 0:
            self.read_epochs[access.actor, where] = access.epoch

    def record_write(self, where: slice | np.ndarray, access: Access) -> None:
        self.writer[where], self.write_epoch[where] = access.actor, access.epoch
        self.write_line[where], self.is_written[where] = access.line, True
