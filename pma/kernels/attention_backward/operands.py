"""The values that the parts of the attention backward kernel hand to each other."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from pma.kernels.blocks.ring import Ring
from pma.kernels.blocks.row_tiles import Announcements


class InTiles(NamedTuple):
    """An operand that products contract over features and over rows: payload and scale tiles in both directions."""

    data: cute.Tensor  # [rows, E] bytes
    row_tiles: cute.Tensor  # [slots, ⌈E/128⌉, 512] bytes
    column_tiles: cute.Tensor  # [⌈E/128⌉, slots, 512] bytes


class Quantized(NamedTuple):
    """A gradient as MXFP8: T rows, B segments."""

    data: cute.Tensor  # [T, E] bytes
    scales: cute.Tensor  # [T // 32 + B, E / 32] bytes
    row_tiles: cute.Tensor  # [T // 128 + B, ⌈E/128⌉, 512] bytes
    column_tiles: cute.Tensor  # [⌈E/128⌉, T // 128 + B, 512] bytes


class AttentionBackwardOperands(NamedTuple):
    """Tensors in global memory: B segments, S seeds, T events, E = H·D columns, I = ⌈S/128⌉ steps."""

    q: InTiles  # [S, E] shared by all segments, or [B·S, E]
    k: InTiles  # [T, E]
    v: cute.Tensor  # [T, E] bytes
    v_tiles: cute.Tensor  # [T // 128 + B, ⌈E/128⌉, 512] bytes: row tiles
    dout: InTiles  # [B·S, E]
    offsets: cute.Tensor  # [B + 1]
    delta: cute.Tensor  # [B·S, H] float32, rowsum(dO∘O)
    lse: cute.Tensor  # [B, H, S] float32
    row_sum_log2: cute.Tensor  # [B, H, S] int32
    dk: Quantized
    dv: Quantized
    dq: cute.Tensor  # [slabs, I, D·128] float32 or float16; see `sm100.sum_slabs`


class Loads(NamedTuple):
    """Payloads as E4M3, through tensor maps whose rows end where a tile's do."""

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

    board: Announcements  # of tiles of events: searching warp → all others
    q: Ring  # loads → product
    dout: Ring
    kv: Ring  # once a tile
    statistics: Ring  # row statistics → compute
    scores_full: cute.Pointer  # S is there: product → compute
    scores_read: cute.Pointer  # compute → product
    weights: cute.Pointer  # P is there: compute → product
    dp_full: cute.Pointer  # dP is there: product → compute
    dp_read: cute.Pointer  # compute → product
    ds: cute.Pointer  # dS is there: compute → product
    dq_full: cute.Pointer  # dQ is there: product → reduce
    dq_read: cute.Pointer  # reduce → product
    sums_full: cute.Pointer  # once a tile: dV and dK are there: product → compute
    tensor_memory: cute.Pointer  # where its address is told
    scale_words: cute.Tensor  # [4, 2] words: scale bytes of four row blocks, of dV and dK
    seeds: cute.Tensor  # [128, 2, STATISTICS] float32: of a step's seeds, −lse·log2(e) + P's scale exponent, and δ
    exponents: cute.Tensor  # [4, STATISTICS] int32: log2 of P's scale for each block of 32 seeds
    p_scales: cute.Tensor  # [512] bytes
    ds_scales: cute.Tensor  # [512, 2] bytes: a row is an event, for dK; a row is a seed, for dQ
    ds_bytes: cute.Tensor  # [128·128] bytes: dS, a row of 128 seeds for each event
    q_bytes: cute.Tensor  # [128·D, buffers]
    q_scales: cute.Tensor  # [512, 2, buffers] bytes: row tile, column tile
    dout_bytes: cute.Tensor  # [128·D, buffers]
    dout_scales: cute.Tensor  # [512, 2, buffers] bytes
    kv_bytes: cute.Tensor  # [128·D, 2·buffers]: K, V
    kv_scales: cute.Tensor  # [512, 3, buffers] bytes: row tile of K, its column tile, row tile of V


class Step(NamedTuple):
    """Where the product warp is."""

    kv: Int32  # buffer
    q: Int32  # buffer
    dout: Int32  # buffer
    num_rows: Int32  # events of the tile
    seeds: Int32  # of the step's tile
