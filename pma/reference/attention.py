"""Jagged attention, forward and backward, tile by tile as the kernels do it.

A tile is `kv_tile` events of one segment. All tiles of the batch are worked on side by side, in chunks that bound the
memory; what a kernel carries from tile to tile (the running maximum) is a segmented scan over tiles. Nothing is read
on the host, so lengths may be anything.

Scores are fp32 sums of dequantised products; c = softmax_scale·log2(e); p = exp2((s − m)·c) with one rounding before
exp2. O sums P V·exp2((m_tile − m_segment)·c) over a segment's tiles.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pma.jagged import RowBlocks, row_block_starts, row_blocks
from pma.numerics import E4M3_MAX_MANTISSA, AttentionNumerics
from pma.reference.folded import Folding
from pma.reference.rounding import Rounding

SCORES_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}  # bounds temporaries, not results
LOG2_E = math.log2(math.e)


class Operands(NamedTuple):
    """Dequantised inputs; float32, or float64 to have softmax in float64 too."""

    q: Tensor  # [S, E] shared by all segments, or [B·S, E]
    k: Tensor  # [T, E]
    v: Tensor  # [T, E]
    offsets: Tensor  # [B+1] integer
    v_fold: Tensor | None = None  # [T, H] powers of two up to 1, by which P is multiplied for its cast


class AttentionShape(NamedTuple):
    """Static sizes."""

    num_seeds: int  # S
    num_heads: int  # H


class ForwardResult(NamedTuple):
    """Zero events: out 0, lse −inf, row_sum_log2 −127."""

    out: Tensor  # [B, S, E] float32 (float64 for float64 operands)
    lse: Tensor  # [B, H, S], natural log
    # [B, H, S] int32, ⌊log2 l⌋: l relative to the final running maximum, or to its `_whole_octaves` where P is; with
    # folded scales relative to the largest score
    row_sum_log2: Tensor


class BackwardInputs(NamedTuple):
    """What the gradient needs beside the operands."""

    dout: Tensor  # [B·S, E], dequantised
    delta: Tensor  # [B·S, H], rowsum(dO∘O)
    lse: Tensor  # [B, H, S]
    row_sum_log2: Tensor  # [B, H, S] int32
    dp_dout: Tensor  # [B·S, E], the dO of dP: `dout`, or the unquantised one
    folding: Folding | None = None  # P and dS are cast under its scales instead of the rounding's


class Gradients(NamedTuple):
    """Rows of dk and dv outside the offsets are 0."""

    dq: Tensor  # like q, float32 or float64
    dk: Tensor  # [T, E]
    dv: Tensor  # [T, E]


class _Chunk(NamedTuple):
    """Some tiles, gathered: masked rows of k and v are 0."""

    tiles: slice
    segment: Tensor  # [C]
    rows: Tensor  # [C, N] row of each event, T where there is none
    valid: Tensor  # [C, N] bool
    q: Tensor  # [H, S, D] or [C, H, S, D] float64
    k: Tensor  # [C, H, N, D] float64
    v: Tensor  # [C, H, N, D] float64
    fold: Tensor | None  # [C, H, 1, N]


def attention_forward(operands: Operands, shape: AttentionShape, rounding: Rounding) -> ForwardResult:
    """softmax(q kᵀ / sqrt(D)) v for each segment and head; see the types for shapes."""
    k, offsets = operands.k, operands.offsets
    num_segments, head_dim = offsets.shape[0] - 1, k.shape[1] // shape.num_heads
    state = (num_segments, shape.num_heads, shape.num_seeds)
    out = torch.zeros(*state, head_dim, dtype=torch.float64, device=k.device)
    row_sum = torch.zeros(state, dtype=torch.float64, device=k.device)
    rounded_sum = torch.zeros_like(row_sum)
    final_max = torch.full(state, -math.inf, dtype=k.dtype, device=k.device)
    numerics = rounding.numerics
    if num_segments and k.shape[0]:
        tiles = row_blocks(offsets, k.shape[0], numerics.kv_tile)
        scale_log2 = _scale_log2(head_dim)
        maxima = _tile_maxima(operands, shape, rounding, tiles)
        running = running_maximum(maxima, tiles.segment, numerics, scale_log2)
        final_max = running[_last_tile(offsets, tiles, numerics.kv_tile, numerics.kv_order)]
        if numerics.p_cast != "static":
            running, final_max = (_whole_octaves(each, scale_log2) for each in (maxima, final_max))
        for chunk in _chunks(operands, shape, tiles, numerics.kv_tile):
            scores, tile_max = _scores(chunk, k.dtype), running[chunk.tiles]
            p = _exp2_difference(scores, _finite(tile_max)[..., None], scale_log2)
            weight = _exp2_difference(tile_max, _finite(final_max)[chunk.segment], scale_log2).double()
            rounded = rounding.p_forward(p) if chunk.fold is None else rounding.p_forward(p * chunk.fold) / chunk.fold
            out.index_add_(0, chunk.segment, rounded @ chunk.v * weight[..., None])
            row_sum.index_add_(0, chunk.segment, p.double().sum(-1) * weight)
            rounded_sum.index_add_(0, chunk.segment, rounded.sum(-1) * weight)
    total = (row_sum if numerics.denominator == "fp32" else rounded_sum).to(k.dtype)[..., None].double()
    out = torch.where(total == 0, 0.0, out / total).to(k.dtype)
    sums = (row_sum if numerics.lse_sum == "fp32" else rounded_sum).to(k.dtype)
    lse = (final_max.double() / math.sqrt(head_dim) + sums.double().log()).to(k.dtype)
    if operands.v_fold is not None and num_segments and k.shape[0]:
        last = _last_tile(offsets, tiles, numerics.kv_tile, "forward")
        largest = _scan_maximum(maxima, tiles.segment, 0.0)[last]
        sums = sums * _exp2_difference(final_max, _finite(largest), _scale_log2(head_dim))
    return ForwardResult(out.transpose(1, 2).flatten(2), lse, _floor_log2(sums))


def attention_backward(
    operands: Operands, inputs: BackwardInputs, shape: AttentionShape, rounding: Rounding
) -> Gradients:
    """Gradients of `attention_forward`: five products, P recomputed from lse; dQ of shared seeds is summed."""
    q, k, _, offsets, _ = operands
    head_dim, numerics = k.shape[1] // shape.num_heads, rounding.numerics
    scale = 1.0 / math.sqrt(head_dim)
    dk = torch.zeros(k.shape[0] + 1, k.shape[1], dtype=k.dtype, device=k.device)  # the last row takes what is masked
    dv = torch.zeros_like(dk)
    is_shared = q.shape[0] == shape.num_seeds
    dq = _DqSum(q, shape, numerics.dq_accumulation, numerics.dq_scale_log2)
    if offsets.shape[0] > 1 and k.shape[0]:
        tiles = row_blocks(offsets, k.shape[0], numerics.kv_tile)
        dout, dp_dout = (_split_segments(x, shape) for x in (inputs.dout, inputs.dp_dout))
        delta = inputs.delta.view(-1, shape.num_seeds, shape.num_heads).transpose(1, 2)
        lse_log2, folding = inputs.lse.double() * LOG2_E, inputs.folding
        folded_q = q if folding is None else _split_segments(folding.q, shape).double()
        for chunk in _chunks(operands, shape, tiles, numerics.kv_tile):
            scores, of = _scores(chunk, k.dtype), chunk.segment
            exponent = scores.double() * _scale_log2(head_dim) - lse_log2[of][..., None]
            p = torch.where(chunk.valid[:, None, None], _exp2(exponent.to(k.dtype)), 0.0)
            dp = (dp_dout[of].double() @ chunk.v.transpose(-1, -2)).to(k.dtype)
            ds = p * (dp - delta[of][..., None])
            ds = torch.where(chunk.valid[:, None, None], ds, 0.0)
            if folding is None:
                rounded, ds = rounding.p_backward(p, inputs.row_sum_log2[of]), rounding.ds(ds)
                own_q, own_k = chunk.q, chunk.k
            else:
                rounded, ds = folding.round_p(p, of), folding.round_ds(ds, chunk.v, chunk.rows, of)
                own_q, own_k = folded_q[0 if is_shared else of], folding.fold_k(chunk.k, chunk.rows)
            _store(dv, chunk, rounded.transpose(-1, -2) @ dout[of].double())
            _store(dk, chunk, ds.transpose(-1, -2) @ own_q * scale)
            dq.add(ds @ own_k * scale, None if is_shared else of)
    return Gradients(dq.result(), dk[:-1], dv[:-1])


def running_maximum(tile_max: Tensor, segment: Tensor, numerics: AttentionNumerics, scale_log2: float) -> Tensor:
    """Maximum that each tile's P is relative to. tile_max [N, H, S], segment [N] (non-decreasing) → [N, H, S]."""
    threshold = numerics.rescale_threshold_log2 / scale_log2
    if numerics.kv_order == "reverse":
        return _scan_maximum(tile_max.flip(0), segment.flip(0), threshold).flip(0)
    return _scan_maximum(tile_max, segment, threshold)


def _scan_maximum(tile_max: Tensor, segment: Tensor, threshold: float) -> Tensor:
    """Segmented running maximum; with a threshold it moves only when exceeded by more than that."""
    if threshold == 0:
        shift = 1
        while shift < tile_max.shape[0]:
            same = (segment[shift:] == segment[:-shift])[:, None, None]
            merged = torch.maximum(tile_max[shift:], tile_max[:-shift])
            tile_max = torch.cat([tile_max[:shift], torch.where(same, merged, tile_max[shift:])])
            shift *= 2
        return tile_max
    running = tile_max.clone()
    for i in range(1, running.shape[0]):  # sequential: each decision depends on the one before
        carried = torch.where(segment[i] == segment[i - 1], running[i - 1], -math.inf)
        keep = tile_max[i] <= carried + threshold  # false for NaN, which is carried on
        running[i] = torch.where(keep, carried, tile_max[i])
    return running


def _tile_maxima(operands: Operands, shape: AttentionShape, rounding: Rounding, tiles: RowBlocks) -> Tensor:
    """Row maximum of each tile's scores, raised when it repeats and the guard is on. → [N, H, S]."""
    numerics, k = rounding.numerics, operands.k
    maxima = torch.empty(tiles.segment.shape[0], shape.num_heads, shape.num_seeds, dtype=k.dtype, device=k.device)
    for chunk in _chunks(operands, shape, tiles, numerics.kv_tile):
        scores = _scores(chunk, k.dtype)
        largest = scores.amax(-1)
        if numerics.repeated_max_guard:
            repeats = (scores == largest[..., None]).sum(-1) > 1
            half_octave = 0.5 / _scale_log2(k.shape[1] // shape.num_heads)
            largest = torch.where(repeats, largest + half_octave, largest)
        maxima[chunk.tiles] = largest
    return maxima


def _chunks(operands: Operands, shape: AttentionShape, tiles: RowBlocks, kv_tile: int) -> Iterator[_Chunk]:
    """Tiles in chunks of bounded size, gathered and masked."""
    q, k, v, _, v_fold = operands
    at_once = max(1, SCORES_AT_ONCE[k.device.type] // (shape.num_heads * shape.num_seeds * kv_tile))
    local = torch.arange(kv_tile, device=k.device)
    heads = _split_segments(q, shape).double()
    for start in range(0, tiles.segment.shape[0], at_once):
        part = slice(start, start + at_once)
        valid = local < tiles.num_rows[part, None]
        rows = tiles.first_row[part, None] + local
        inside = torch.where(valid, rows, 0)

        def gather(values: Tensor, inside: Tensor = inside, valid: Tensor = valid) -> Tensor:
            picked = torch.where(valid[..., None], values[inside], 0.0).double()
            return picked.unflatten(-1, (shape.num_heads, -1)).transpose(1, 2)

        segment = tiles.segment[part]
        own_q = heads[0] if q.shape[0] == shape.num_seeds else heads[segment]
        fold = None if v_fold is None else v_fold[inside].transpose(1, 2)[:, :, None]
        yield _Chunk(part, segment, torch.where(valid, rows, k.shape[0]), valid, own_q, gather(k), gather(v), fold)


def _scores(chunk: _Chunk, dtype: torch.dtype) -> Tensor:
    """q kᵀ rounded to `dtype`, −inf where there is no event. → [C, H, S, N]."""
    scores = (chunk.q @ chunk.k.transpose(-1, -2)).to(dtype)
    return torch.where(chunk.valid[:, None, None], scores, -math.inf)


def _store(into: Tensor, chunk: _Chunk, values: Tensor) -> None:
    """Write [C, H, N, D] to the rows of the chunk's events."""
    into.index_copy_(0, chunk.rows.flatten(), values.transpose(1, 2).flatten(2).flatten(0, 1).to(into.dtype))


class _DqSum:
    """Sum of dQ over tiles, in fp64 rounded once, or in one fp16 buffer with a static scale (tile by tile)."""

    def __init__(self, q: Tensor, shape: AttentionShape, accumulation: str, scale_log2: int) -> None:
        self.shape, self.dtype, self.is_fp16 = shape, q.dtype, accumulation == "fp16"
        self.scale = 2.0**scale_log2
        buffer = torch.zeros_like(_split_segments(q, shape), memory_format=torch.contiguous_format)
        self.total = buffer.to(torch.float16 if self.is_fp16 else torch.float64)  # [1 or B, H, S, D]

    def add(self, contributions: Tensor, segment: Tensor | None) -> None:
        """contributions [C, H, S, D] float64; segment [C], or None for shared seeds."""
        if not self.is_fp16:
            if segment is None:
                self.total += contributions.sum(0, keepdim=True)
            else:
                self.total.index_add_(0, segment, contributions)
            return
        halves = (contributions.float() * self.scale).half()
        for i in range(halves.shape[0]):
            where = slice(0, 1) if segment is None else segment[i : i + 1]
            self.total[where] = (self.total[where].float() + halves[i].float()).half()

    def result(self) -> Tensor:
        total = self.total.float() / self.scale if self.is_fp16 else self.total
        return total.transpose(1, 2).flatten(2).flatten(0, 1).to(self.dtype)


def _split_segments(rows: Tensor, shape: AttentionShape) -> Tensor:
    """[G·S, E] → [G, H, S, D] view."""
    return rows.view(-1, shape.num_seeds, shape.num_heads, rows.shape[1] // shape.num_heads).transpose(1, 2)


def _last_tile(offsets: Tensor, tiles: RowBlocks, kv_tile: int, order: str) -> Tensor:
    """Slot of the tile that each segment finishes with. → [B]."""
    first = row_block_starts(offsets, kv_tile)
    if order == "reverse":
        return first
    count = (offsets.diff().long() + kv_tile - 1) // kv_tile
    return first + (count - 1).clamp(min=0)


def _scale_log2(head_dim: int) -> float:
    return LOG2_E / math.sqrt(head_dim)


def _exp2_difference(value: Tensor, reference: Tensor, scale_log2: float) -> Tensor:
    """exp2((value − reference)·scale_log2), the exponent rounded once."""
    return _exp2(((value.double() - reference.double()) * scale_log2).to(value.dtype))


def _exp2(exponent: Tensor) -> Tensor:
    """Correctly rounded 2^exponent: torch's fp32 exp2 differs by an ulp between vector lanes and loop tails."""
    return torch.exp2(exponent.double()).to(exponent.dtype)


def _whole_octaves(maximum: Tensor, scale_log2: float) -> Tensor:
    """The score of the least power of two of which weights are at most 1.75 times, as E4M3 allows. → float64"""
    return torch.ceil(maximum.double() * scale_log2 - math.log2(E4M3_MAX_MANTISSA)) / scale_log2


def _finite(maximum: Tensor) -> Tensor:
    """−inf (no event yet) → 0, so that −inf − 0 stays −inf; NaN is kept."""
    return torch.where(maximum == -math.inf, 0.0, maximum)


def _floor_log2(sums: Tensor) -> Tensor:
    """⌊log2⌋ of positive float32, −127 for 0. → int32."""
    return (sums.float().view(torch.int32) >> 23) - 127
