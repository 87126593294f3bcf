"""The values that the parts of the projection kernels hand to each other."""

from typing import NamedTuple

import cutlass.cute as cute

from pma.kernels.blocks.ring import Ring
from pma.kernels.blocks.row_tiles import Announcements


class ProjectionOperands(NamedTuple):
    """Tensors in global memory: T rows, B segments, R = T // 128 + B. What a spec doesn't ask for is None."""

    x: cute.Tensor  # [T, in_columns] bytes
    x_tiles: cute.Tensor  # [R, ⌈in_columns/128⌉, 512] bytes: row tiles
    offsets: cute.Tensor  # [B + 1]
    weight: cute.Tensor  # [out_columns, in_columns] bytes; gemm: [in_columns, out_columns]
    weight_tiles: cute.Tensor  # row tiles of the weight as one segment; gemm: its column tiles
    out: cute.Tensor  # [T, out_columns] bytes; gemm: out_dtype
    scales: cute.Tensor | None  # [T // 32 + B, out_columns / 32] bytes
    row_tiles: cute.Tensor | None  # [R, ⌈out_columns/128⌉, 512] bytes
    column_tiles: cute.Tensor | None  # [⌈out_columns/128⌉, R, 512] bytes


class Loads(NamedTuple):
    """X and the weight as E4M3 [rows, in_columns], through tensor maps."""

    x_atom: cute.CopyAtom
    x: cute.Tensor
    weight_atom: cute.CopyAtom
    weight: cute.Tensor


class Shared(NamedTuple):
    """Shared memory."""

    stages: Ring  # of tiles of X: loader → product
    accumulators: Ring  # product → epilogue
    weight_full: cute.Pointer
    products_done: cute.Pointer
    tensor_memory: cute.Pointer  # where its address is told
    board: Announcements  # of row tiles: searching warp → all others
    scale_words: cute.Tensor  # [4, 2] words: scale bytes of four row blocks, one set collected and one read
    x: cute.Tensor  # (MMA, MMA_M, MMA_K, stages)
    weight: cute.Tensor  # (MMA, MMA_N, MMA_K, weight buffers)
    x_scales: cute.Tensor  # [512, stages] bytes
    weight_scales: cute.Tensor  # [512, weight buffers] bytes
