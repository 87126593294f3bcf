"""The values that the parts of the attention forward kernel hand to each other."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from pma.kernels.blocks.ring import Ring


class AttentionForwardOperands(NamedTuple):
    """Tensors in global memory: B segments, S seeds, T events, E = H·D columns, R = T // 128 + B tile slots."""

    q: cute.Tensor  # [S, E] bytes shared by all segments, or [B·S, E]
    q_tiles: cute.Tensor  # row tiles of q: [S // 128 + 1, ⌈E/128⌉, 512] bytes, or [B·S // 128 + B, ⌈E/128⌉, 512]
    k: cute.Tensor  # [T, E] bytes
    k_tiles: cute.Tensor  # [R, ⌈E/128⌉, 512] bytes: row tiles
    v: cute.Tensor  # [T, E] bytes
    v_tiles: cute.Tensor  # [⌈E/128⌉, R, 512] bytes: column tiles
    work: cute.Tensor  # [B, 4] int32: `Work` of each segment, the longest first
    out: cute.Tensor  # [B·S, E]
    lse: cute.Tensor  # [B, H, S] float32
    row_sum_log2: cute.Tensor  # [B, H, S] int32


class Loads(NamedTuple):
    """Q [rows, E], K [T, E] and Vᵀ [E, T] as E4M3, through tensor maps."""

    q_atom: cute.CopyAtom
    q: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor


class Shared(NamedTuple):
    """Shared memory. Barriers without another word have one for each of the two buffers of scores and weights."""

    k: Ring  # of tiles of K: loads of all CTAs of the cluster → product → loads of all
    v: Ring  # of tiles of V: the same
    seeds: Ring  # of the seed tile of a segment: loads → product
    scores: cute.Pointer  # S(j) is there: product → softmax
    drained: cute.Pointer  # S(j) has been read: softmax → product
    weights: cute.Pointer  # [2 pieces, 2]: P(j) is there (piece 0 only), the piece of O may be added to → product
    sums: cute.Pointer  # [2 pieces, 2]: P(j) V(j) is in the piece of O: product → correction, softmax
    moved: cute.Pointer  # [4 warps, 4]: `moves` of tile j are there: softmax → correction, the other warpgroup
    turns: cute.Pointer  # [4 warps, 2]: most exponentials of tile j are issued: softmax → the other warpgroup
    ends: Ring  # one: totals and divisors of a segment: softmax → correction
    tensor_memory: cute.Pointer  # where its address is told
    moves: cute.Tensor  # [2, 128, 4] float32: what P's rows are relative to from tile j on, and the factor of O's
    totals: cute.Tensor  # [128, 2] float32: sums of P's rows over every other tile
    divisors: cute.Tensor  # [128, 2] float32: the same of the cast P
    p_scales: cute.Tensor  # [512, 2] bytes
    q_bytes: cute.Tensor  # [128·D, buffers]
    q_scales: cute.Tensor  # [512, buffers] bytes
    k_bytes: cute.Tensor  # [128·D, buffers]
    k_scales: cute.Tensor  # [512, buffers] bytes
    v_bytes: cute.Tensor  # [128·D, buffers]
    v_scales: cute.Tensor  # [512, buffers] bytes


class Place(NamedTuple):
    """Where a softmax warp works."""

    group: Int32  # its warpgroup, 0 or 1
    quarter: Int32  # of the rows
    scores: cute.Pointer  # tensor memory
    weights: cute.Pointer  # tensor memory


class Row(NamedTuple):
    """What a thread has summed of its row over the tiles of its warpgroup, relative to the maximum of the last."""

    total: Float32  # sum of P, in units of its static scale
    divisor: Float32  # the same of the cast P, if it is asked for
