"""Where a slot of row blocks lies (`pma/jagged/row_blocks.py`), on the device: one warp asks, every lane gets the answer."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

WARP = 32


@cute.jit
def first_slot(offsets: cute.Tensor, segment: Int32, rows_per_block: cutlass.Constexpr[int]) -> Int32:
    """Slot of a segment's first block: offsets[b] // R + b. Also defined for b = B, one past the last slot in use."""
    return Int32(offsets[segment]) // rows_per_block + segment


@cute.jit
def find_segment(
    offsets: cute.Tensor, num_segments: Int32, slot: Int32, rows_per_block: cutlass.Constexpr[int]
) -> Int32:
    """The last segment whose first slot is not past `slot`, −1 if there is none.

    A 32-way search: in each round the lanes probe evenly spaced segments, so that 1,000 segments take two rounds
    of one load each.
    """
    lane = cute.arch.lane_idx()
    low, count = Int32(-1), num_segments + 1  # the answer is one of low … low + count − 1
    while count > 1:
        step = (count + WARP - 1) // WARP
        probe = low + lane * step
        is_not_past = lane == 0
        if lane > 0 and lane * step < count:
            is_not_past = first_slot(offsets, probe, rows_per_block) <= slot
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(is_not_past)) - 1
        low += passed * step
        count = cutlass.min(step, count - passed * step)
    return low


@cute.jit
def element_pointer(tensor: cute.Tensor, offset: Int64, alignment: cutlass.Constexpr[int]) -> cute.Pointer:
    """Pointer `offset` elements behind the start of a tensor in global memory; 64-bit, with a promised alignment."""
    element_bytes = cutlass.const_expr(tensor.element_type.width // 8)
    address = tensor.iterator.toint() + offset * element_bytes
    return cute.make_ptr(tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=alignment)
