"""The module on Blackwell: one operator forward and one backward, each a sequence of kernels.

A kernel takes the scale tiles that another one wrote: nothing between them is repacked, and only kernels see tiles,
which is why the sequence is one operator. What the reference composes in `autograd.py` rounds at the same places.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from pma.jagged import equal_offsets, num_row_blocks
from pma.kernels.attention_backward.spec import AttentionBackwardSpec
from pma.kernels.attention_forward.spec import AttentionForwardSpec
from pma.kernels.projection.spec import GemmQuantizeSpec, GemmSpec
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec
from pma.kernels.weight_grad.spec import WeightGradSpec
from pma.layouts import BLOCK, MXFP8Tensor, tile_shape
from pma.numerics import AttentionNumerics

SEED_OFFSETS = torch.int64  # of `equal_offsets`


class PoolSpecs(NamedTuple):
    """What is asked of each kernel."""

    norm_seeds: QuantizeSpec
    norm_events: QuantizeSpec
    weights: QuantizeSpec
    q: GemmQuantizeSpec
    k: GemmQuantizeSpec
    v: GemmQuantizeSpec
    attention_forward: AttentionForwardSpec
    dout: QuantizeSpec
    attention_backward: AttentionBackwardSpec
    gemm: GemmSpec
    weight_grad: WeightGradSpec
    rmsnorm_backward: RMSNormBackwardSpec


class PoolShape(NamedTuple):
    """Static facts of a module and of the tensors it is called with."""

    embed_dim: int
    num_heads: int
    num_seeds: int
    has_value_proj: bool
    events: torch.dtype
    parameters: torch.dtype
    offsets: torch.dtype
    out: torch.dtype


class Pooled(NamedTuple):
    """Results of the forward: the first one is the module's, all are the backward's. Payloads and scales are uint8.

    `_rows`, `_columns`: scale tiles in that direction. Without a value projection the last four are None.
    """

    out: Tensor  # [B, S, E]
    lse: Tensor  # [B, H, S] float32
    row_sum_log2: Tensor  # [B, H, S] int32
    seeds_rstd: Tensor  # [S] float32
    rstd: Tensor  # [T] float32
    xq: Tensor  # [S, E], normalised seeds
    xq_scales: Tensor  # compact
    wq: Tensor  # [E, E]
    wq_scales: Tensor  # compact
    q: Tensor  # [S, E]
    q_rows: Tensor
    q_columns: Tensor
    k: Tensor  # [T, E]
    k_rows: Tensor
    k_columns: Tensor
    x: Tensor  # [T, E], normalised events
    x_rows: Tensor
    x_columns: Tensor
    wk: Tensor  # [E, E]
    wk_columns: Tensor
    v: Tensor | None = None
    v_rows: Tensor | None = None
    wv: Tensor | None = None
    wv_columns: Tensor | None = None


def specs_of(shape: PoolShape, numerics: AttentionNumerics) -> PoolSpecs:
    """What a module asks of each kernel."""
    embed_dim, offsets = shape.embed_dim, shape.offsets
    head_dim, dx_dtype = embed_dim // shape.num_heads, _dx_dtype(shape.events)
    attention = (head_dim, shape.num_heads, shape.num_seeds, True, numerics)
    keys = {"headroom_exponent": numerics.headroom_exponent, "writes_scales": False}
    norm = {"writes_tiles": True, "weight_dtype": shape.parameters}
    return PoolSpecs(
        norm_seeds=QuantizeSpec(embed_dim, shape.parameters, SEED_OFFSETS, **norm),
        norm_events=QuantizeSpec(embed_dim, shape.events, offsets, **norm),
        weights=QuantizeSpec(embed_dim, shape.parameters, SEED_OFFSETS, writes_tiles=True),
        q=GemmQuantizeSpec(embed_dim, embed_dim, SEED_OFFSETS, **keys),
        k=GemmQuantizeSpec(embed_dim, embed_dim, offsets, k_smoothing=numerics.k_smoothing, **keys),
        v=GemmQuantizeSpec(embed_dim, embed_dim, offsets, writes_scales=False),
        attention_forward=AttentionForwardSpec(*attention, shape.out, offsets),
        dout=QuantizeSpec(
            embed_dim, shape.out, SEED_OFFSETS, writes_tiles=True, delta_columns=head_dim, out_dtype=shape.out
        ),
        attention_backward=AttentionBackwardSpec(*attention, offsets),
        gemm=GemmSpec(embed_dim, embed_dim, offsets, dx_dtype),
        weight_grad=WeightGradSpec(embed_dim, embed_dim, offsets),
        rmsnorm_backward=RMSNormBackwardSpec(
            embed_dim, shape.events, dx_dtype, shape.parameters, offsets, adds_dv=not shape.has_value_proj
        ),
    )


def _dx_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@custom_op("pma::pool_sm100", mutates_args=())
def pool(
    events: Tensor, offsets: Tensor, seeds: Tensor, query_norm: Tensor, query_proj: Tensor, key_norm: Tensor,
    key_proj: Tensor, value_proj: Tensor | None, num_heads: int, norm_eps: float, numerics: str,
    out_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """The module's forward. events [T, E], seeds [S, E], projections [E, E] → those of `Pooled` that aren't None."""
    from pma.kernels.attention_forward import sm100 as attention
    from pma.kernels.projection import sm100 as projection
    from pma.kernels.quantize import any_arch as quantize

    shape = (num_heads, seeds.shape[0], value_proj is not None, events.dtype, key_proj.dtype, offsets.dtype, out_dtype)
    s = specs_of(PoolShape(events.shape[1], *shape), AttentionNumerics.from_token(numerics))
    operand, one_segment = projection.ProjectionOperand, _one_segment(seeds)
    xq = quantize.launch(s.norm_seeds, seeds, one_segment, weight=query_norm, eps=norm_eps)
    x = quantize.launch(s.norm_events, events, offsets, weight=key_norm, eps=norm_eps)
    wq, wk = (quantize.launch(s.weights, w, _one_segment(w)) for w in (query_proj, key_proj))
    q = projection.launch(s.q, operand(xq.data, xq.row_tiles), operand(wq.data, wq.row_tiles), one_segment)
    k = projection.launch(s.k, operand(x.data, x.row_tiles), operand(wk.data, wk.row_tiles), offsets)
    values, of_values = attention.AttentionOperand(x.data, x.column_tiles), ()
    if value_proj is not None:
        wv = quantize.launch(s.weights, value_proj, _one_segment(value_proj))
        v = projection.launch(s.v, operand(x.data, x.row_tiles), operand(wv.data, wv.row_tiles), offsets)
        values = attention.AttentionOperand(v.out, v.column_tiles)
        of_values = (v.out, v.row_tiles, wv.data, wv.column_tiles)
    attended = attention.launch(
        s.attention_forward, attention.AttentionOperand(q.out, q.row_tiles),
        attention.AttentionOperand(k.out, k.row_tiles), values, offsets,
    )  # fmt: skip
    pooled = (
        *attended, xq.rstd, x.rstd, xq.data, xq.scales, wq.data, wq.scales, q.out, q.row_tiles, q.column_tiles,
        k.out, k.row_tiles, k.column_tiles, x.data, x.row_tiles, x.column_tiles, wk.data, wk.column_tiles, *of_values,
    )  # fmt: skip
    return list(cast(tuple[Tensor, ...], pooled))


@pool.register_fake
def _(
    events, offsets, seeds, query_norm, query_proj, key_norm, key_proj, value_proj, num_heads, norm_eps, numerics,
    out_dtype,
):  # fmt: skip
    num_rows, num_segments, (num_seeds, columns) = events.shape[0], offsets.shape[0] - 1, seeds.shape

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=events.device)

    def matrix(rows: int, segments: int, *directions: str) -> Iterator[Tensor]:
        yield empty(rows, columns)
        for direction in directions:
            if direction == "compact":
                yield empty(num_row_blocks(rows, segments, BLOCK), columns // BLOCK)
            else:
                yield empty(*tile_shape(rows, segments, columns, direction))

    state = (num_segments, num_heads, num_seeds)
    pooled = [
        empty(num_segments, num_seeds, columns, dtype=out_dtype),
        empty(*state, dtype=torch.float32),
        empty(*state, dtype=torch.int32),
        empty(num_seeds, dtype=torch.float32),
        empty(num_rows, dtype=torch.float32),
        *matrix(num_seeds, 1, "compact"),
        *matrix(columns, 1, "compact"),
        *matrix(num_seeds, 1, "row", "column"),
        *matrix(num_rows, num_segments, "row", "column"),
        *matrix(num_rows, num_segments, "row", "column"),
        *matrix(columns, 1, "column"),
    ]
    if value_proj is not None:
        pooled += [*matrix(num_rows, num_segments, "row"), *matrix(columns, 1, "column")]
    return pooled


@custom_op("pma::pool_backward_sm100", mutates_args=())
def pool_backward(
    dout: Tensor, events: Tensor, offsets: Tensor, key_norm: Tensor, pooled: list[Tensor], num_heads: int, numerics: str
) -> list[Tensor]:
    """Gradients of `pool`, but for the seeds' norm and projection.

    → dq [S, E] float32, devents [T, E], dkey_norm [E] float32, dkey_proj [E, E] float32, and dvalue_proj likewise if
    there is a value projection.
    """
    from pma.kernels.attention_backward import sm100 as attention
    from pma.kernels.projection import sm100 as projection
    from pma.kernels.quantize import any_arch as quantize
    from pma.kernels.rmsnorm_backward import any_arch as norm
    from pma.kernels.weight_grad import sm100 as weight_grad

    p, num_seeds = Pooled(*pooled), pooled[0].shape[1]
    has_value_proj = p.v is not None
    shape = (num_heads, num_seeds, has_value_proj, events.dtype, key_norm.dtype, offsets.dtype, p.out.dtype)
    s = specs_of(PoolShape(events.shape[1], *shape), AttentionNumerics.from_token(numerics))
    rows, row_offsets = dout.reshape(-1, dout.shape[2]), equal_offsets(dout.shape[0], num_seeds, dout.device)
    do = quantize.launch(s.dout, rows.to(p.out.dtype), row_offsets, out=p.out.reshape(rows.shape))
    tiles = attention.BackwardOperand
    values = tiles(p.v, p.v_rows, p.v_rows) if has_value_proj else tiles(p.x, p.x_rows, p.x_columns)
    gradients = attention.launch(
        s.attention_backward, tiles(p.q, p.q_rows, p.q_columns), tiles(p.k, p.k_rows, p.k_columns), values, offsets,
        tiles(do.data, do.row_tiles, do.column_tiles), attention.SavedState(do.delta, p.lse, p.row_sum_log2),
    )  # fmt: skip
    x, operand = MXFP8Tensor(p.x, p.x_columns), projection.ProjectionOperand

    def through(gradient, weight: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of a projection's input and weight."""
        dx = projection.launch(s.gemm, operand(gradient.data, gradient.row_tiles), operand(weight, columns), offsets)
        own = MXFP8Tensor(gradient.data, gradient.column_tiles)
        return dx.out, weight_grad.launch(s.weight_grad, own, x, offsets)

    dx, dkey_proj = through(gradients.dk, p.wk, p.wk_columns)
    added, of_values = (gradients.dv.data, gradients.dv.scales), []
    if has_value_proj:
        dx_of_values, dvalue_proj = through(gradients.dv, cast(Tensor, p.wv), cast(Tensor, p.wv_columns))
        dx, added, of_values = dx + dx_of_values, None, [dvalue_proj]
    normed = norm.launch(s.rmsnorm_backward, dx, events, key_norm, p.rstd, offsets, added)
    return [gradients.dq, normed.dvalues, normed.dweight, dkey_proj, *of_values]


@pool_backward.register_fake
def _(dout, events, offsets, key_norm, pooled, num_heads, numerics):
    columns, has_value_proj = events.shape[1], len(pooled) == len(Pooled._fields)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=events.device)

    gradients = [empty(dout.shape[1], columns), empty(*events.shape, dtype=events.dtype), empty(columns)]
    return gradients + [empty(columns, columns) for _ in range(1 + has_value_proj)]


@register_flop_formula(torch.ops.pma.pool_sm100)
def _forward_flops(events, offsets, seeds, query_norm, query_proj, key_norm, key_proj, value_proj, *_, **__) -> int:
    num_projected = (1 if value_proj is None else 2) * events[0] + seeds[0]
    return 4 * seeds[0] * events[0] * events[1] + 2 * num_projected * events[1] ** 2


@register_flop_formula(torch.ops.pma.pool_backward_sm100)
def _backward_flops(dout, events, offsets, key_norm, pooled, *_, **__) -> int:
    num_projections = 2 if len(pooled) == len(Pooled._fields) else 1
    return 10 * dout[1] * events[0] * events[1] + 4 * num_projections * events[0] * events[1] ** 2


def _one_segment(rows: Tensor) -> Tensor:
    return equal_offsets(1, rows.shape[0], rows.device)
