"""Block-scaled products of Blackwell's tensor core: MXFP8 tiles in shared memory; scales and sum in tensor memory.

A tile is 128 deep, four blocks of 32 with one product (tcgen05.mma kind mxf8f6f4) each. The products of a tile differ
in an offset of both operands and in which byte of a column of scales they take. Both are constants here, and one thread
issues all four, so that little is computed between them: CuTe's `gemm`, a product at a time, puts 13 to 30 instructions
before each, too many to keep the tensor core busy with products of 64 cycles.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Int32, Uint8
from cutlass.experimental import primitives

from pma.layouts import BLOCK
from pma.layouts.scale_tiles import TILE_ROWS

ROW_BYTES = 128  # of a tile in shared memory, over which it is swizzled
ATOM_ROWS = 8  # after which the swizzle repeats
PAYLOAD_BYTES = TILE_ROWS * ROW_BYTES
BLOCKS = TILE_ROWS // BLOCK
SWIZZLES = {64: primitives.Tcgen05SmemSwizzle.SWIZZLE_64B, 128: primitives.Tcgen05SmemSwizzle.SWIZZLE_128B}


class Operand(NamedTuple):
    """Rows of an operand, 128 or 256, 128 deep, as TMA leaves them with a swizzle over whole rows.

    K-major: each row of shared memory is a row of the operand. MN-major: each is one step of the contraction for 128
    rows of the operand, and 256 are two such tiles, one behind the other. Where rows have 64 bytes the operand is 64
    deep or has 64 rows.
    """

    address: Int32  # in shared memory
    scales: Int32  # in tensor memory, as `copy_scale_tile` puts them: four columns for 128 rows, a byte for each block
    is_k_major: bool
    row_bytes: int = ROW_BYTES
    first_scale: int = 0  # which byte of a column of scales is the first block's


class TensorOperand(NamedTuple):
    """128 rows of an operand in tensor memory, a row in each lane."""

    blocks: tuple[Int32, ...]  # first of the eight columns of each block
    scales: Int32
    is_k_major: bool = True
    first_scale: int = 0


@cute.jit
def multiply_tiles(
    total: Int32, a: Operand | TensorOperand, b: Operand, columns: cutlass.Constexpr[int], depth,
    blocks: cutlass.Constexpr[tuple[int, ...]] = tuple(range(BLOCKS)),
):  # fmt: skip
    """Put a · bᵀ over the first blocks of a tile in tensor memory at `total`, [128, columns] fp32.

    depth: (blocks there are, an int or 1 … 4; whether to add to what is there). blocks: those to take of them.
    Called by one thread, the one that copies the scales.
    """
    num_blocks, accumulates = depth
    a_start, b_start = _start(a), _start(b)
    for index in cutlass.range_constexpr(len(blocks)):
        block = blocks[index]
        if block < num_blocks:
            primitives.tcgen05_mma_block_scale(
                primitives.Tcgen05MMAKind.MXF8F6F4, primitives.CTAGroup.CTA_1, _pointer(total),
                _at(a, a_start, block), _at(b, b_start, block), _instruction(a, b, columns, block),
                True if cutlass.const_expr(block > 0) else Boolean(accumulates), _pointer(a.scales), _pointer(b.scales),
                scale_vec_size=primitives.Tcgen05MMAScaleVecSize.BLOCK32,
            )  # fmt: skip


def _instruction(a: Operand | TensorOperand, b: Operand, columns: int, block: int) -> primitives.Tcgen05MxInstrDesc:
    return primitives.Tcgen05MxInstrDesc.build(
        a_dtype=Float8E4M3FN, b_dtype=Float8E4M3FN, m_dim=TILE_ROWS, n_dim=columns,
        a_sf_id=a.first_scale + block, b_sf_id=b.first_scale + block,
        a_major=int(not a.is_k_major), b_major=int(not b.is_k_major),
    )  # fmt: skip


def _start(operand: Operand | TensorOperand) -> primitives.Tcgen05SmemDesc | None:
    """Descriptor of an operand in shared memory."""
    if isinstance(operand, TensorOperand):
        return None
    return primitives.Tcgen05SmemDesc.build(
        operand.address, leading_byte_offset=TILE_ROWS * operand.row_bytes,
        stride_byte_offset=ATOM_ROWS * operand.row_bytes, layout=SWIZZLES[operand.row_bytes],
    )  # fmt: skip


def _at(operand: Operand | TensorOperand, start: primitives.Tcgen05SmemDesc | None, block: int):
    """What an instruction takes for a block of the contraction."""
    if isinstance(operand, TensorOperand):
        return _pointer(operand.blocks[block])
    return start.advance_start_address(block * (BLOCK if operand.is_k_major else BLOCK * operand.row_bytes))


def _pointer(address: Int32):
    return primitives.TmemAddr(address).as_ptr(Uint8)
