"""Scales of P and dS in the attention backward where products have no block scales (Hopper's contract).

What is summed over must have one scale. dV sums over seeds, so P takes dO's scale of its 32 seeds before the cast; dK
and dQ take Q and K folded: cast again under the largest scale of the head's seeds, of the tile's events. Exponents of
two, the greatest for which bounds known beforehand keep P, dS, and in fp16 what dS is made of, in range:

    P is cast as P·2^(x + o)    x of a segment and head, o = log2 of dO's scale
    dS is cast as dS·2^y        y of a tile and head

    P ≤ 2^-t, t = ⌊log2 l⌋ below the largest score     x = min over seeds of (8 + t − o)
    |dS| ≤ P·(|dO|·max |V| + |δ|)                      2^y ≤ 448 / (max |V| · max(2^-t·|dO|) + max(2^-t·|δ|))
    |dP| < 2^15 with scales of 1 (their headroom)      y ≤ x − log2 of V's largest scale
    |δ|·2^(y − x − o) ≤ 2^15                           y ≤ 14 + x − ⌊log2 max(|δ|·2^-o)⌋

Maxima are over the seeds of a segment, V's over the events of a tile; NaN counts for nothing in them, and a scale that
is NaN as the least one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pma.jagged import equal_offsets, rows_to_blocks, segment_of_rows
from pma.layouts import BLOCK, MXFP8Tensor
from pma.layouts.mxfp8 import SCALE_NAN, SCALE_ONE, round_e4m3
from pma.numerics import DELTA_ROOM, E4M3_MAX, P_ROOM

NONE = -(1 << 20)  # exponent of what is not there


class Folding(NamedTuple):
    """What is known before the tiles of one backward; exponents are integers."""

    p: Tensor  # [B, H, S]: x + o
    x: Tensor  # [B, H]
    dout_norm: Tensor  # [B, H] float64: max 2^-t·|dO|
    delta: Tensor  # [B, H] float64: max 2^-t·|δ|
    payload_of_delta: Tensor  # [B, H] float64: max |δ|·2^-o
    k: Tensor  # [T + 1, H]: log2 of K's scale, NONE in the last row
    v: Tensor  # [T + 1, H]: of V's
    q: Tensor  # [S, E] or [B·S, E]: Q folded

    def round_p(self, p: Tensor, segment: Tensor) -> Tensor:
        """P of some tiles as its product takes it. p [C, H, S, N], segment [C] → float64."""
        return _round_at(p, self.p[segment][..., None])

    def round_ds(self, ds: Tensor, v: Tensor, rows: Tensor, segment: Tensor) -> Tensor:
        """dS of some tiles. ds [C, H, S, N], v [C, H, N, D] dequantised, rows [C, N] (T for none) → float64."""
        norm = norms(v).amax(-1)
        bound = norm * self.dout_norm[segment] + self.delta[segment]
        x = self.x[segment]
        of_delta = DELTA_ROOM - 1 + x - _floor_log2(self.payload_of_delta[segment])
        y = torch.stack([_floor_log2(E4M3_MAX / bound), x - self.v[rows].amax(1), of_delta]).amin(0)
        return _round_at(ds, y[..., None, None])

    def fold_k(self, k: Tensor, rows: Tensor) -> Tensor:
        """K of some tiles under one scale. k [C, H, N, D] dequantised, rows [C, N] → float64."""
        return _fold(k, self.k[rows].amax(1)[..., None, None])


def norms(vectors: Tensor) -> Tensor:
    """|x| of each vector, 0 where it is NaN. [..., D] → [...] float64"""
    return torch.nan_to_num(vectors.double().square().sum(-1).sqrt(), nan=0.0)


def fold(
    matrices: tuple[MXFP8Tensor, MXFP8Tensor, MXFP8Tensor, MXFP8Tensor], values: tuple[Tensor, Tensor],
    saved: tuple[Tensor, Tensor], offsets: Tensor,
) -> Folding:  # fmt: skip
    """What is known before the tiles.

    Args:
        matrices: Q [S, E] or [B·S, E], K and V [T, E], dO [B·S, E].    values: Q and dO dequantised.
        saved: δ [B·S, H], ⌊log2 l⌋ [B, H, S].    offsets: [B + 1].
    """
    (q, k, v, dout), (q_values, dout_values), (delta, row_sum_log2) = matrices, values, saved
    num_segments, num_heads, num_seeds = row_sum_log2.shape
    own_offsets = equal_offsets(q.data.shape[0] // num_seeds, num_seeds, q.data.device)
    seed_offsets = equal_offsets(num_segments, num_seeds, q.data.device)

    def by_head(rows: Tensor) -> Tensor:
        return rows.view(-1, num_seeds, num_heads).transpose(1, 2)  # [B, H, S]

    o, t = by_head(_scale_log2(dout, seed_offsets, num_heads)), row_sum_log2.long()
    x = (P_ROOM + t - o).amin(-1)
    norm, size = by_head(norms(dout_values.unflatten(1, (num_heads, -1)))), by_head(delta.double().abs().nan_to_num(0))
    largest, of_delta, of_payload = (torch.ldexp(*pair).amax(-1) for pair in ((norm, -t), (size, -t), (size, -o)))
    of_q = by_head(_scale_log2(q, own_offsets, num_heads)).amax(-1)  # [1 or B, H]
    of_q = of_q[:, None, :, None].expand(-1, num_seeds, -1, -1).flatten(0, 1)
    folded_q = _fold(q_values.unflatten(1, (num_heads, -1)), of_q).flatten(1).to(q_values.dtype)
    of_k, of_v = (torch.nn.functional.pad(_scale_log2(m, offsets, num_heads), (0, 0, 0, 1), value=NONE) for m in (k, v))
    return Folding(x[..., None] + o, x, largest, of_delta, of_payload, of_k, of_v, folded_q)


def _round_at(values: Tensor, exponent: Tensor) -> Tensor:
    """Cast under the scale 2^-exponent; → float64."""
    rounded = round_e4m3(torch.ldexp(values.double(), exponent).float())
    return torch.ldexp(rounded.double(), -exponent)


def _fold(values: Tensor, exponent: Tensor) -> Tensor:
    return _round_at(values, -exponent.clamp(min=-SCALE_ONE))  # no event at all


def _floor_log2(values: Tensor) -> Tensor:
    """⌊log2⌋ of float64 from 0 on, within −127 … 127."""
    _, exponent = torch.frexp(values)
    exponent = torch.where(values.isinf(), SCALE_ONE, exponent.long() - 1)
    return torch.where(values > 0, exponent, -SCALE_ONE).clamp(-SCALE_ONE, SCALE_ONE)


def _scale_log2(matrix: MXFP8Tensor, offsets: Tensor, num_heads: int) -> Tensor:
    """log2 of the scale of each row and head; of rows outside the offsets the least. → [rows, H]"""
    num_rows = matrix.data.shape[0]
    slot = rows_to_blocks(offsets, num_rows, BLOCK).clamp(max=max(matrix.scales.shape[0] - 1, 0))
    byte = matrix.scales.long()[slot].unflatten(1, (num_heads, -1))[..., 0]
    is_known = (segment_of_rows(offsets, num_rows) >= 0)[:, None] & (byte != SCALE_NAN)
    return torch.where(is_known, byte, 0) - SCALE_ONE
