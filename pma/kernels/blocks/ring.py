"""A ring of shared-memory stages filled by bulk copies: one warp loads, the others consume.

Each stage has a barrier `full` (one arrival, and the bytes of its copies) and a barrier `empty` (one arrival for each
consuming warp). A stage's n-th use waits for parity n % 2 of `full`, and its refill for the release before.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.experimental import primitives

CONSUMER_BARRIER = 1  # named barrier of the consuming warps


class Ring(NamedTuple):
    """Barriers of a ring's stages."""

    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def init_ring(
    full: cute.Pointer, empty: cute.Pointer, stages: cutlass.Constexpr[int], consumers: cutlass.Constexpr[int],
    producers: cutlass.Constexpr[int] = 1,
):  # fmt: skip
    """Initialise the barriers; call in one thread, then `mbarrier_init_fence` and a block-wide barrier."""
    for stage in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(full + stage, producers)
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
def drain(empty: cute.Pointer, stage: Int32, parity: Int32, stages: cutlass.Constexpr[int]):
    """Wait until every stage is free, beginning with the next to be filled: no arrival is on its way any more."""
    for _ in cutlass.range(stages, unroll=1):
        cute.arch.mbarrier_wait(empty + stage, parity)
        stage, parity = next_stage(stage, parity, stages)


@cute.jit
def arrive(barrier: cute.Pointer, ctas: cutlass.Constexpr[int] = 1):
    """One arrival, by a whole warp and behind all of it; in a cluster at the barrier of each of its `ctas` CTAs."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if cutlass.const_expr(ctas == 1):
            cute.arch.mbarrier_arrive(barrier)
        else:
            for rank in cutlass.range_constexpr(ctas):
                cute.arch.mbarrier_arrive(barrier, rank)


@cute.jit
def bulk_load(
    shared: cute.Pointer, source: cute.Pointer, num_bytes: Int32, full: cute.Pointer,
    ctas: cutlass.Constexpr[int] = 1,
):  # fmt: skip
    """Copy bytes from global to shared memory, of each CTA of a cluster of `ctas`; call in one thread.

    Both addresses and the size are multiples of 16.
    """
    primitives.cp_async_bulk_shared_cluster_global(
        shared.to_llvm_ptr(), source.to_llvm_ptr(), full.to_llvm_ptr(), num_bytes,
        multicast_mask=Int16((1 << ctas) - 1) if cutlass.const_expr(ctas > 1) else None,
    )  # fmt: skip


@cute.jit
def bulk_send(shared: cute.Pointer, num_bytes: cutlass.Constexpr[int], full: cute.Pointer, rank: Int32):
    """Copy shared memory to the same place in another CTA of the cluster, whose barrier is told; call in one thread."""
    target, barrier = (primitives.mapa(each.to_llvm_ptr(), rank) for each in (shared, full))
    primitives.cp_async_bulk_shared_cluster_shared_cta(target, shared.to_llvm_ptr(), barrier, num_bytes)


@cute.jit
def meet(ctas: cutlass.Constexpr[int]):
    """Wait for all threads of the CTA, or of a cluster of several."""
    if cutlass.const_expr(ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
