"""Exchange of words among the lanes of a warp that hold a warpgroup's accumulators."""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


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


@dsl_user_op
def transpose_matrix(word: Uint32, *, loc=None, ip=None) -> Uint32:
    """Of 8 × 8 elements of 16 bits, 2q and 2q + 1 of row g in lane 4g + q, the same of column g; in whole warps."""
    return Uint32(
        llvm.inline_asm(
            T.i32(), [Uint32(word).ir_value(loc=loc, ip=ip)], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r",
            has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip
