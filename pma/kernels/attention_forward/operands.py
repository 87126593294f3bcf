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
    weights: cute.Pointer  # P(j) and its scales are there: softmax → product
    sums: cute.Pointer  # P(j) V(j) is in O, P(j) 1 in l: product → correction, softmax
    ends: Ring  # one: exponents of a segment are there: softmax → correction; they, O and l have been read → both
    tensor_memory: cute.Pointer  # where its address is told
    references: cute.Tensor  # [128] float32: r, the exponent that O's rows are relative to
    exponents: cute.Tensor  # [2, 128, 2] float32: of a segment's rows, r and the greatest, from each warpgroup
    p_scales: cute.Tensor  # [512, 2] bytes
    one_scales: cute.Tensor  # [512] bytes
    ones: cute.Tensor  # [8·128] bytes: what P is multiplied by for its sum
    q_bytes: cute.Tensor  # [128·D, buffers]
    q_scales: cute.Tensor  # [512, buffers] bytes
    k_bytes: cute.Tensor  # [128·D, buffers]
    k_scales: cute.Tensor  # [512, buffers] bytes
    v_bytes: cute.Tensor  # [128·D, buffers]
    v_scales: cute.Tensor  # [512, buffers] bytes


class Place(NamedTuple):
    """Where a softmax warp works."""

    group: Int32  # its warpgroup, 0 or 1
    own_turn: Int32  # named barriers: behind the other warpgroup's exponentials
    other_turn: Int32  # and behind this one's
    tensor_memory: cute.Pointer  # O
    scores: cute.Pointer  # tensor memory
    weights: cute.Pointer  # tensor memory


class Row(NamedTuple):
    """What a thread knows of its row from the tiles of its warpgroup."""

    reference: Float32  # r at the last of them
    highest: Float32  # the greatest exponent
