"""FP8 products of a warpgroup (wgmma): A [64, k] in registers or shared memory, B [n, k] in shared memory, K-major.

Lane l of warp w, g = l / 4, q = l % 4, holds of

    the accumulators    value (e, r, j): row 16w + g + 8r, column 8j + 2q + e
    the operand A       byte i of word (r, h, b): row 16w + g + 8r, column 32b + 16h + 4q + i

so that the word (r, h, b) made of the accumulators j = 4b + 2h and 4b + 2h + 1 stands for columns in another order,
which is that of the tokens of a transposed payload (`pma/layouts/transposed.py`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

ROWS, WARP_ROWS, LANE_ROWS = 64, 16, 2
COLUMN_GROUP = 8  # columns of the accumulators of one index j
BLOCK = 32  # bytes along K that an instruction takes


@cute.jit
def fp8_product(
    columns: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr,
    source: cutlass.Constexpr = warpgroup.OperandSource.RMEM,
) -> cute.TiledMma:
    """Products with B of so many rows and accumulators of a type, fp32 or fp16; source: where A is."""
    k_major = OperandMajorMode.K
    return make_trivial_tiled_mma(
        Float8E4M3FN, Float8E4M3FN, k_major, k_major, dtype, (1, 1, 1), (ROWS, columns), a_source=source
    )  # fmt: skip


@cute.jit
def operand_registers(product: cute.TiledMma, k: cutlass.Constexpr[int]):
    """(registers of A [64, k], the same as words at r + 2h + 4b)."""
    part = product.get_slice(0)
    operand = part.make_fragment_A(part.partition_shape_A((ROWS, k)))
    words = cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Uint32), cute.make_layout(k // 8))
    return operand, words


@cute.jit
def accumulators(product: cute.TiledMma, columns: cutlass.Constexpr[int], dtype: cutlass.Constexpr) -> cute.Tensor:
    return cute.make_rmem_tensor(product.get_slice(0).partition_shape_C((ROWS, columns)), dtype)


@cute.jit
def multiply(
    product: cute.TiledMma, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulates,
    blocks: cutlass.Constexpr[tuple[int, int] | None] = None,
):  # fmt: skip
    """Issue sums ← a bᵀ, or sums + a bᵀ, as one group. blocks: (first, last + 1) along K, else all."""
    warpgroup.fence()
    atom = cute.make_mma_atom(product.op)
    atom.set(warpgroup.Field.ACCUMULATE, Boolean(accumulates))
    first, end = (0, cute.size(a.shape[2])) if cutlass.const_expr(blocks is None) else blocks
    for block in cutlass.range_constexpr(first, end):
        cute.gemm(atom, sums, a[None, None, block], b[None, None, block], sums)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def group_layout(rows: int, columns: int, buffers: int):
    """Shared-memory layout of rows K-major: of each 16 columns 16 bytes of every row, one row behind the other."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_INTER, Float8E4M3FN)
    return cute.tile_to_shape(atom, (rows, columns, buffers), order=(0, 1, 2))


@cute.jit
def with_layout(data: cute.Tensor, layout) -> cute.Tensor:
    """Bytes of shared memory as E4M3."""
    return cute.make_tensor(cute.recast_ptr(data.iterator, layout.inner, dtype=Float8E4M3FN), layout.outer)


@cute.jit
def settle(values: cute.Tensor):
    """Have these fp32 values computed before the next products are issued, whatever the compiler would rather do.

    It moves arithmetic behind products that follow, and then has too few registers for their accumulators.
    """
    for index in cutlass.range_constexpr(cute.size(values)):
        values[index] = _settled(values[index])


@dsl_user_op
def _settled(value: Float32, *, loc=None, ip=None) -> Float32:
    return Float32(
        llvm.inline_asm(
            T.f32(), [Float32(value).ir_value(loc=loc, ip=ip)], "", "=f,0", has_side_effects=True,
            is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip
