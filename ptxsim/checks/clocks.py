"""Happens-before clocks.

Actors are the warps, one tensor core for each CTA pair, a queue of bulk stores for each warp, and in programs with
wgmma each warp's part of its warpgroup's products: each orders what it does itself. Operations that complete in no
order (tensor loads, remote stores) are numbered one by one. A clock says what its owner knows to have happened before:

    ordered[a]   the epoch up to which accesses of actor a are ordered before
    proxied[a]   the same, made visible to the async proxy by a fence.proxy.async on the way
    operations   the numbered operations known to be complete, as bits of an integer
"""

from __future__ import annotations

import numpy as np


class Clock:
    """What happened before."""

    __slots__ = ("ordered", "proxied", "operations")

    def __init__(self, ordered: np.ndarray, proxied: np.ndarray, operations: int = 0):
        self.ordered, self.proxied, self.operations = ordered, proxied, operations

    @classmethod
    def zero(cls, num_actors: int) -> Clock:
        return cls(np.zeros(num_actors, np.int32), np.zeros(num_actors, np.int32))

    def copy(self) -> Clock:
        return Clock(self.ordered.copy(), self.proxied.copy(), self.operations)

    def join(self, other: Clock) -> None:
        np.maximum(self.ordered, other.ordered, out=self.ordered)
        np.maximum(self.proxied, other.proxied, out=self.proxied)
        self.operations |= other.operations
