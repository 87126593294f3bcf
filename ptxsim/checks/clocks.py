"""Happens-before clocks.

Actors are the warps, one tensor core for each CTA pair, a queue of bulk stores for each warp, and in programs with
wgmma each warp's part of its warpgroup's products: each orders what it does itself. Operations that complete in no
order (tensor loads, remote stores) are numbered one by one. A clock says what its owner knows to have happened before:

    epochs[ORDERED, a]   the epoch up to which accesses of actor a are ordered before
    epochs[PROXIED, a]   the same, made visible to the async proxy by a fence.proxy.async on the way
    operations           the numbered operations known to be complete, as bits of an integer
"""

from __future__ import annotations

import numpy as np

ORDERED, PROXIED = 0, 1


class Clock:
    """What happened before. The array `epochs` stays the same object for the life of a clock."""

    __slots__ = ("epochs", "operations")

    def __init__(self, epochs: np.ndarray, operations: int = 0):
        self.epochs, self.operations = epochs, operations

    @classmethod
    def zero(cls, num_actors: int) -> Clock:
        return cls(np.zeros((2, num_actors), np.int32))

    def copy(self) -> Clock:
        return Clock(self.epochs.copy(), self.operations)

    def join(self, other: Clock) -> None:
        np.maximum(self.epochs, other.epochs, out=self.epochs)
        self.operations |= other.operations

    def make_visible_to_async_proxy(self) -> None:
        np.maximum(self.epochs[PROXIED], self.epochs[ORDERED], out=self.epochs[PROXIED])
