"""The values that the parts of Hopper's projection kernels hand to each other."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from pma.kernels.blocks.ring import Ring
from pma.kernels.blocks.row_tiles import Announcements


class HopperProjectionOperands(NamedTuple):
    """Tensors in global memory: T rows, B segments; scales are compact. What a spec doesn't ask for is None."""

    x: cute.Tensor  # [T, in_columns] bytes
    x_scales: cute.Tensor  # [T // 32 + B, in_columns / 32] bytes
    offsets: cute.Tensor  # [B + 1]
    weight: cute.Tensor  # [out_columns, in_columns] bytes
    weight_scales: cute.Tensor  # [out_columns / 32 + 1, in_columns / 32] bytes
    out: cute.Tensor  # [T, out_columns] bytes; gemm: out_dtype
    scales: cute.Tensor | None  # [T // 32 + B, out_columns / 32] bytes
    transposed: cute.Tensor | None  # [T // 16 + B, out_columns, 16] bytes


class Loads(NamedTuple):
    """X and the weight as E4M3 [rows, in_columns], through tensor maps; the weight's rows in another order."""

    x_atom: cute.CopyAtom
    x: cute.Tensor
    weight_atom: cute.CopyAtom
    weight: cute.Tensor


class Shared(NamedTuple):
    """Shared memory."""

    stages: Ring  # of tiles of X: loads → compute
    records: Ring  # of the scales of X's row tiles: scales → compute
    weight_full: cute.Pointer
    board: Announcements  # of row tiles: searching warp → all others
    maxima: cute.Tensor  # [2, 2, 8] words: maximum of a half tile, twice by turns, of each warp
    x_scales: cute.Tensor  # [chunks, 4, records] float32
    weight_scales: cute.Tensor  # [chunks, 4, weight tiles] float32
    x: cute.Tensor  # [128·128, stages] bytes
    weight: cute.Tensor  # [128·128, weight buffers] bytes


class Place(NamedTuple):
    """Where the rows of a thread of a computing warp lie in a row tile of 128."""

    warp: Int32  # 0 … 7
    lane: Int32

    def row_block(self) -> Int32:
        return self.warp // 2

    def row(self, r: int) -> Int32:
        return self.warp * 16 + self.lane // 4 + 8 * r
