"""The values that the parts of Hopper's attention backward kernel hand to each other."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32

from pma.kernels.blocks.ring import Ring
from pma.kernels.blocks.row_tiles import RowTile


class Gradient(NamedTuple):
    """A gradient as MXFP8 with one scale for a head and 32 rows."""

    data: cute.Tensor  # [T, E] bytes
    scales: cute.Tensor  # [T // 32 + B, E / 32] bytes


class HopperBackwardOperands(NamedTuple):
    """Tensors in global memory: B segments, S seeds, T events, E = H·D columns, I = ⌈S/64⌉ steps. Compact scales."""

    q: cute.Tensor  # [S, E] bytes shared by all segments, or [B·S, E]
    q_scales: cute.Tensor  # [S // 32 + 1, E / 32] bytes, or [B·S // 32 + B, E / 32]
    k: cute.Tensor  # [T, E] bytes
    k_scales: cute.Tensor  # [T // 32 + B, E / 32] bytes
    v: cute.Tensor  # [T, E] bytes
    v_scales: cute.Tensor  # [T // 32 + B, E / 32] bytes
    dout: cute.Tensor  # [B·S, E] bytes
    dout_transposed: cute.Tensor  # [B·S // 16 + B, E, 16] bytes
    offsets: cute.Tensor  # [B + 1]
    records: cute.Tensor  # [B, H, I, 68] words, see `seed_statistics.py`
    summaries: cute.Tensor  # [B, H, 4] words
    dk: Gradient
    dv: Gradient
    dq: cute.Tensor  # see `hopper_spec.slab_shape`


class Loads(NamedTuple):
    """Payloads as E4M3 through tensor maps; rows of Q and dO end with a segment's seeds."""

    q_atom: cute.CopyAtom
    q: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    dout_atom: cute.CopyAtom
    dout: cute.Tensor


class Shared(NamedTuple):
    """Shared memory. Barriers are passed once a step, but for those that a comment says are passed once a tile."""

    tiles: Ring  # once a tile: search → all others
    q_full: cute.Pointer  # once, resident seeds only: loads → all who read them
    q_transposed: cute.Pointer  # of each buffer of Qᵀ: reduce → compute
    k: Ring  # once a tile: loads → compute, reduce
    v: Ring  # once a tile: loads → compute
    k_transposed: cute.Pointer  # once a tile, in a cluster: the other's reduce → reduce
    scale_full: cute.Pointer  # of each slot of facts: dS's scale is there: norms, of both CTAs → compute, reduce
    step: Ring  # loads → compute, and reduce where Q travels too
    ds: Ring  # compute → reduce, in a cluster from both to both
    facts: cute.Tensor  # [16, 2] words: `TileFacts`, behind them log2 of dS's scale and the other's unit of dQ
    maxima: cute.Tensor  # [2, 8, 2] float32: largest dV and dK of a warp's 16 events; by turn
    norms: cute.Tensor  # [2, 2] float32: largest |V| of a warp's 64 events; by turn
    records: cute.Tensor  # [68, stages] words
    q_bytes: cute.Tensor  # [64·D, buffers]
    q_transposed_bytes: cute.Tensor  # [64·D, buffers]
    k_bytes: cute.Tensor  # [128·D]
    v_bytes: cute.Tensor  # [128·D]
    k_transposed_bytes: cute.Tensor  # [128·D]: halves of the columns; in a cluster one, of both CTAs' events
    dout_bytes: cute.Tensor  # [64·D, stages]
    dout_transposed_bytes: cute.Tensor  # [64·D, stages]
    ds_bytes: cute.Tensor  # [64·128·ctas, 2 / ctas]: of each 16 events 16 bytes for each seed


class TileFacts(NamedTuple):
    """A tile of events and what is known of it before it is read."""

    rows: RowTile
    k_scales: Uint32  # four bytes
    v_scales: Uint32
    x: Int32  # see `pma/reference/folded.py`
    delta_log2: Int32  # δ of records is in units of 2^this
    dout_norm: Uint32  # bits of float32: max 2^-t·|dO|
    delta: Uint32  # bits of float32: max 2^-t·|δ|


class Sums(NamedTuple):
    """What a thread that computes keeps: rows g and g + 8 of its warp's 16 events."""

    p: cute.Tensor
    p_words: cute.Tensor
    ds: cute.Tensor
    ds_words: cute.Tensor
    dv: cute.Tensor
    dk: cute.Tensor
