"""The values that the parts of Hopper's attention forward kernel hand to each other."""

from typing import NamedTuple

import cutlass.cute as cute

from pma.kernels.blocks.ring import Ring


class HopperForwardOperands(NamedTuple):
    """Tensors in global memory: B segments, S seeds, T events, E = H·D columns; scales are compact."""

    q: cute.Tensor  # [S, E] bytes shared by all segments, or [B·S, E]
    q_scales: cute.Tensor  # [S // 32 + 1, E / 32] bytes, or [B·S // 32 + B, E / 32]
    k: cute.Tensor  # [T, E] bytes
    k_scales: cute.Tensor  # [T // 32 + B, E / 32] bytes
    v: cute.Tensor  # [T // 16 + B, E, 16] bytes: the transposed payload
    v_scales: cute.Tensor  # [T // 32 + B, E / 32] bytes
    work: cute.Tensor  # [B, 4] int32: `Work` of each segment, the longest first
    out: cute.Tensor  # [B·S, E]
    lse: cute.Tensor  # [B, H, S] float32
    row_sum_log2: cute.Tensor  # [B, H, S] int32


class Shared(NamedTuple):
    """Shared memory."""

    k: Ring  # of tiles of K with the scales of K and V: loads and scales → compute
    v: Ring  # of tiles of V with the rows that sum P: loads and scales → compute
    records: (
        cute.Tensor
    )  # [16, stages] words by four: scales of K, folds of V, V's largest scale byte, what undoes the folds
    k_bytes: cute.Tensor  # [128·D, stages]
    v_bytes: cute.Tensor  # [128·(rows of Vᵀ), stages]
    sums: cute.Tensor | None  # [4, 128, (rows of Vᵀ) / 8, 2] float32: O of the thread of a warpgroup


class Registers(NamedTuple):
    """What a thread that computes keeps while it goes through a segment; two rows, g and g + 8, of its warp's 16."""

    q: cute.Tensor
    q_words: cute.Tensor
    p: cute.Tensor
    p_words: cute.Tensor
    out: cute.Tensor
    shifts: cute.Tensor  # [2] float32: P = 2^(score + shift)
    ended_shifts: cute.Tensor  # [2] float32: those that a segment ended with
    totals: cute.Tensor  # [2] float32: of the lane's P before the cast, if they are summed
    ended_totals: cute.Tensor  # [2] float32
    tops: cute.Tensor  # [2] float32: largest of the lane's scores, in octaves
    ended_tops: cute.Tensor  # [2] float32
    factors: cute.Tensor  # [2] float32: by which a moved maximum lowers what came before
    missed: cute.Tensor  # [2] float32: product of those that the sums in shared memory have not seen
