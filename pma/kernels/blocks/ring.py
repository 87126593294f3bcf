"""A ring of shared-memory stages filled by bulk copies: one warp loads, the others consume.

Each stage has a barrier `full` (one arrival, and the bytes of its copies) and a barrier `empty` (one arrival for each
consuming warp). A stage's n-th use waits for parity n % 2 of `full`, and its refill for the release before.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental import primitives

CONSUMER_BARRIER = 1  # named barrier of the consuming warps


class Ring(NamedTuple):
    """Barriers of a ring's stages."""

    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def init_ring(
    full: cute.Pointer, empty: cute.Pointer, stages: cutlass.Constexpr[int], consumers: cutlass.Constexpr[int]
):
    """Initialise the barriers; call in one thread, then `mbarrier_init_fence` and a block-wide barrier."""
    for stage in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(full + stage, 1)
        cute.arch.mbarrier_init(empty + stage, consumers)


@cute.jit
def next_stage(stage: Int32, parity: Int32, stages: cutlass.Constexpr[int]):
    """(stage, parity) of the next use."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        parity ^= 1
    return stage, parity


@cute.jit
def arrive(barrier: cute.Pointer):
    """One arrival, by a whole warp and behind all of it."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def bulk_load(shared: cute.Pointer, source: cute.Pointer, num_bytes: Int32, full: cute.Pointer):
    """Copy bytes from global to shared memory; both addresses and the size are multiples of 16. Call in one thread."""
    primitives.cp_async_bulk_shared_cluster_global(
        shared.to_llvm_ptr(), source.to_llvm_ptr(), full.to_llvm_ptr(), num_bytes
    )
