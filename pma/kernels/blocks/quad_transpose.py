"""Exchange of words among the four lanes that share a row of a warpgroup's accumulators."""

import cutlass
import cutlass.cute as cute


@cute.jit
def transpose_quad(words: cute.Tensor):
    """Word a of lane q of four becomes word q of lane a; call in whole warps. words: four of 32 bits, in place."""
    for bit in cutlass.range_constexpr(2):
        step = 1 << bit
        is_upper = (cute.arch.lane_idx() >> bit) % 2 == 1
        for low in cutlass.range_constexpr(4):
            if cutlass.const_expr(low & step == 0):
                high = low | step
                a, b = words[low], words[high]
                got = cute.arch.shuffle_sync_bfly(a if is_upper else b, offset=step)
                words[low] = got if is_upper else a
                words[high] = b if is_upper else got
