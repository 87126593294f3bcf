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
    """Shared memory. Barriers without another word have one for each of the two seed tiles."""

    kv: Ring  # of tiles of K and V in turn: loads → product
    seeds: Ring  # of the seed tiles of a segment: loads → product
    scores: cute.Pointer  # S(i) is there: product → softmax
    drained: cute.Pointer  # S(i) has been read: softmax → product
    weights: tuple[cute.Pointer, ...]  # parts of P(i) are there, the first: O(i) may be added to → product
    sums: cute.Pointer  # O(i) of a segment is there: product → correction
    corrections: cute.Pointer  # factors of O(i) are there: softmax → correction
    ends: Ring  # totals, divisors and maxima of a segment: softmax → correction
    tensor_memory: cute.Pointer  # where its address is told
    factors: cute.Tensor  # [128, 2] float32: of O's rows
    totals: cute.Tensor  # [128, 2] float32: sums of P's rows
    divisors: cute.Tensor  # [128, 2] float32: what O's rows are divided by
    maxima: cute.Tensor  # [128, 2] float32: what P's rows are relative to
    p_scales: cute.Tensor  # [512, 2] bytes
    q_bytes: cute.Tensor  # [128·D, 2·buffers]
    q_scales: cute.Tensor  # [512, 2·buffers] bytes
    kv_bytes: cute.Tensor  # [128·D, buffers]
    kv_scales: cute.Tensor  # [512, buffers] bytes


class Work(NamedTuple):
    """A segment's part in a CTA's work."""

    segment: Int32  # −1: no more work; the steps are 0 then
    first_row: Int32
    num_rows: Int32
    steps: Int32  # KV tiles


class Share(NamedTuple):
    """What a CTA works on, whatever the segment."""

    head: Int32
    seed_tile: Int32  # the first of its two
    stages: Int32  # 1 or 2 seed tiles


class Place(NamedTuple):
    """Where a softmax warp works."""

    stage: Int32
    region: cute.Pointer  # tensor memory of the stage's scores


class Row(NamedTuple):
    """What softmax knows of a row of scores after some KV tiles."""

    maximum: Float32  # what P is relative to
    total: Float32  # sum of P, in units of its static scale
    divisor: Float32  # the same of the cast P, if it is asked for
