"""Blackwell's tensor memory: what moves between it, shared memory and registers. An address is lane·2^16 + column.

Who may touch it is passed on by mbarriers. Work of the tensor core is not ordered by a barrier alone: the thread that
passes on fences before its arrival, the one that takes over behind its wait (PTX ISA 9.7.16.6, canonical patterns).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8
from cutlass.cute.nvgpu import tcgen05
from cutlass.experimental import primitives

from pma.kernels.blocks.ring import arrive

LANES = 128
LANE_STRIDE = 1 << 16


@cute.jit
def take_over(barrier: cute.Pointer, parity: Int32):
    """Wait until tensor memory is passed on, by `pass_on` or by `release`."""
    cute.arch.mbarrier_wait(barrier, parity)
    primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)


@cute.jit
def pass_on(barrier: cute.Pointer):
    """Pass on tensor memory that this warp has read: one arrival, by the whole warp."""
    primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)
    arrive(barrier)


@cute.jit
def release(barrier: cute.Pointer, ctas: cutlass.Constexpr[int] = 1):
    """Arrive when all products and copies that this warp has issued are done; nobody waits for that here.

    In a cluster at the barrier of each of its `ctas` CTAs.
    """
    with cute.arch.elect_one():
        tcgen05.commit(barrier, (1 << ctas) - 1 if cutlass.const_expr(ctas > 1) else None)


@cute.jit
def load_row(
    address: cute.Pointer, columns: cutlass.Constexpr[int], at_once: cutlass.Constexpr[int] = LANES
) -> cute.Tensor:
    """`columns` fp32 values of this thread's lane, from the column at `address` on; a power of two up to 128.

    at_once: columns of one instruction, whose registers must all fit in those of the launch, before any are added.
    Called by four warps whose first has an index divisible by four: warp w of them sees lanes 32w … 32w + 31.
    """
    thread, _, _ = cute.arch.thread_idx()
    step = cutlass.const_expr(min(columns, at_once))
    values = cute.make_rmem_tensor(columns, Float32)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(step)), Float32)
    for first in cutlass.range_constexpr(0, columns, step):
        source = cute.make_tensor(address + first, cute.make_layout((LANES, step), stride=(LANE_STRIDE, 1)))
        copy = tcgen05.make_tmem_copy(atom, source)
        part = copy.get_slice(thread % LANES)
        target = cute.make_tensor(values.iterator + first, cute.make_layout(part.partition_D(source).shape))
        cute.copy(copy, part.partition_S(source), target)
    cute.arch.fence_view_async_tmem_load()
    return values


@cute.jit
def load_row_and_maxima(address: cute.Pointer, columns: cutlass.Constexpr[int]):
    """(`load_row`, the maximum of each 32 values, from the load itself; NaN counts for nothing). On sm_103a."""
    thread, _, _ = cute.arch.thread_idx()
    step = 32
    values = cute.make_rmem_tensor(columns, Float32)
    maxima = cute.make_rmem_tensor(columns // step, Float32)
    atom = cute.make_copy_atom(tcgen05.copy.LdRed32x32bOp(tcgen05.Repetition(step)), Float32)
    for first in cutlass.range_constexpr(0, columns, step):
        source = cute.make_tensor(address + first, cute.make_layout((LANES, step), stride=(LANE_STRIDE, 1)))
        copy = tcgen05.make_tmem_copy(atom, source)
        part = copy.get_slice(thread % LANES)
        target = cute.make_tensor(values.iterator + first, cute.make_layout(part.partition_D(source).shape))
        maximum = cute.make_tensor(
            maxima.iterator + first // step, cute.make_layout(((1, 1), *part.partition_S(source).shape[1:]))
        )
        cute.copy(copy, part.partition_S(source), (target, maximum))
    cute.arch.fence_view_async_tmem_load()
    return values, maxima


@cute.jit
def column_pointer(column: Int32) -> cute.Pointer:
    """Tensor memory from a column on, as fp32."""
    return cute.make_ptr(Float32, column, cute.AddressSpace.tmem, assumed_align=16)


@cute.jit
def copy_scale_tile(source: cute.Pointer, address: cute.Pointer):
    """Copy a scale tile, 512 contiguous bytes of shared memory, to four columns of every quarter of the lanes.

    Asynchronous, in order with the products that the same thread issues later. Called by one warp.
    """
    bytes_of_lane, lanes_of_group = 16, 8
    descriptor = primitives.Tcgen05SmemDesc.build(
        source.toint(), leading_byte_offset=bytes_of_lane, stride_byte_offset=lanes_of_group * bytes_of_lane
    )
    target = primitives.TmemAddr(address.toint()).as_ptr(Uint8)
    with cute.arch.elect_one():
        primitives.tcgen05_cp(
            primitives.Tcgen05CpShape.SHAPE_32X128B, target, descriptor,
            multicast=primitives.Tcgen05CpMulticast.WARPX4,
        )  # fmt: skip


@cute.jit
def store_row(address: cute.Pointer, words: cute.Tensor):
    """Store 32-bit words to this thread's lane, from the column at `address` on; the counterpart of `load_row`.

    The stores have ended behind `cute.arch.fence_view_async_tmem_store()`.
    """
    thread, _, _ = cute.arch.thread_idx()
    columns = cutlass.const_expr(cute.size(words))
    layout = cute.make_layout((LANES, columns), stride=(LANE_STRIDE, 1))
    target = cute.make_tensor(cute.recast_ptr(address, dtype=words.element_type), layout)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(columns)), words.element_type)
    copy = tcgen05.make_tmem_copy(atom, target)
    part = copy.get_slice(thread % LANES)
    source = cute.make_tensor(words.iterator, part.partition_S(target).layout)
    cute.copy(copy, source, part.partition_D(target))
