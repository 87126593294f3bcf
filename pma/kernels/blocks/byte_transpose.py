"""Transposing E4M3 tiles of shared memory, whose units `ldmatrix` knows are of two bytes, and folding a scale in.

`ldmatrix.trans` of rows of bytes gives lane l = 4g + c of a warp the words

    (row 2c, columns 2g and 2g + 1) and (row 2c + 1, the same columns)        of rows 0–7
    (row 2c + 8, …) and (row 2c + 9, …)                                       of rows 8–15

so that two byte permutations make of both the four bytes of column 2g and those of column 2g + 1, in one of two orders:

    PAIRS    rows 2c, 2c + 8, 2c + 1, 2c + 9: that in which `stmatrix.trans` writes pairs of rows r and r + 8
    GROUPS   rows 2c, 2c + 1, 2c + 8, 2c + 9: that of the transposed payload (`pma/layouts/transposed.py`)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.experimental import primitives

from pma.kernels.blocks import half_pairs as half

PAIRS, GROUPS = (0x6240, 0x7351), (0x6420, 0x7531)  # for even columns and odd ones


@cute.jit
def load_transposed(source: cute.Pointer):
    """Four matrices of eight rows of 16 bytes, transposed; each lane gives the address of a row."""
    return primitives.ldmatrix(source.to_llvm_ptr(), 4, "col")


@cute.jit
def store_transposed(target: cute.Pointer, words):
    """The other way round: four words of each lane, rows of 16 bytes."""
    primitives.stmatrix(target.to_llvm_ptr(), [Int32(word) for word in words], "col")


@cute.jit
def permuted(low: Uint32, high: Uint32, selector: cutlass.Constexpr[int]) -> Uint32:
    return Uint32(cute.arch.prmt(low, high, Int32(selector)))


@cute.jit
def scaled_bytes(word: Uint32, factor: Uint32) -> Uint32:
    """Four E4M3 bytes times a pair of fp16, cast again."""
    low, high = half.pair_of_e4m3(word, 0), half.pair_of_e4m3(word, 1)
    return half.e4m3_of_pairs(half.mul_pairs(low, factor), half.mul_pairs(high, factor))
