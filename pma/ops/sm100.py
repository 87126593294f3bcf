"""The module on Blackwell: one operator forward and one backward, each a sequence of kernels.

A kernel takes the scale tiles that another one wrote: nothing between them is repacked, and only kernels see tiles,
which is why the sequence is one operator. What the reference composes in `autograd.py` rounds at the same places.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple, cast

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
from pma.layouts.scale_tiles import Direction
from pma.numerics import AttentionNumerics
from pma.ops.pool import SEED_OFFSETS, PoolShape, backward_flops, dx_dtype, empty_gradients, forward_flops, one_segment


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


class Tiled(NamedTuple):
    """An MXFP8 matrix as products take it: payload and scale tiles."""

    data: Tensor
    row_tiles: Tensor
    column_tiles: Tensor


@cache
def specs_of(shape: PoolShape, token: str) -> PoolSpecs:
    """What a module asks of each kernel; token: of its `AttentionNumerics`."""
    numerics = AttentionNumerics.from_token(token)
    embed_dim, offsets = shape.embed_dim, shape.offsets
    head_dim, of_dx = embed_dim // shape.num_heads, dx_dtype(shape.events)
    attention = (head_dim, shape.num_heads, shape.num_seeds, True, numerics)
    norm = partial(QuantizeSpec, embed_dim, writes_tiles=True, weight_dtype=shape.parameters)
    projection = partial(GemmQuantizeSpec, embed_dim, embed_dim, writes_scales=False)
    headroom = numerics.headroom_exponent
    return PoolSpecs(
        norm_seeds=norm(shape.parameters, SEED_OFFSETS),
        norm_events=norm(shape.events, offsets),
        weights=QuantizeSpec(embed_dim, shape.parameters, SEED_OFFSETS, writes_tiles=True),
        q=projection(SEED_OFFSETS, headroom_exponent=headroom),
        k=projection(offsets, headroom_exponent=headroom, k_smoothing=numerics.k_smoothing),
        v=projection(offsets),
        attention_forward=AttentionForwardSpec(*attention, shape.out, offsets),
        dout=QuantizeSpec(
            embed_dim, shape.out, SEED_OFFSETS, writes_tiles=True, delta_columns=head_dim, out_dtype=shape.out
        ),
        attention_backward=AttentionBackwardSpec(*attention, offsets),
        gemm=GemmSpec(embed_dim, embed_dim, offsets, of_dx),
        weight_grad=WeightGradSpec(embed_dim, embed_dim, offsets),
        rmsnorm_backward=RMSNormBackwardSpec(
            embed_dim, shape.events, of_dx, shape.parameters, offsets, adds_dv=not shape.has_value_proj
        ),
    )


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
    s = specs_of(PoolShape(events.shape[1], *shape), numerics)
    of_seeds = one_segment(seeds)
    xq = quantize.launch(s.norm_seeds, seeds, of_seeds, weight=query_norm, eps=norm_eps)
    x = quantize.launch(s.norm_events, events, offsets, weight=key_norm, eps=norm_eps)
    wq, wk = (quantize.launch(s.weights, w, one_segment(w)) for w in (query_proj, key_proj))
    events_, weight_of_keys = _tiled(x.data, x), _tiled(wk.data, wk)

    def project(spec: GemmQuantizeSpec, rows: Tiled, weight: Tiled, offsets: Tensor) -> Tiled:
        row, column = projection.ProjectionOperand(*rows[:2]), projection.ProjectionOperand(*weight[:2])
        result = projection.launch(spec, row, column, offsets)
        return _tiled(result.out, result)

    q = project(s.q, _tiled(xq.data, xq), _tiled(wq.data, wq), of_seeds)
    k = project(s.k, events_, weight_of_keys, offsets)
    v, of_values = events_, cast(tuple[Tensor, ...], ())
    if value_proj is not None:
        wv = quantize.launch(s.weights, value_proj, one_segment(value_proj))
        weight_of_values = _tiled(wv.data, wv)
        v = project(s.v, events_, weight_of_values, offsets)
        of_values = (*v[:2], weight_of_values.data, weight_of_values.column_tiles)
    operand = attention.AttentionOperand
    attended = attention.launch(
        s.attention_forward, operand(*q[:2]), operand(*k[:2]), operand(v.data, v.column_tiles), offsets
    )
    rstds = cast(tuple[Tensor, Tensor], (xq.rstd, x.rstd))
    keys = (*k, *events_, weight_of_keys.data, weight_of_keys.column_tiles)
    return [*attended, *rstds, xq.data, xq.scales, wq.data, wq.scales, *q, *keys, *of_values]


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
                yield empty(*tile_shape(rows, segments, columns, cast(Direction, direction)))

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
    shape = (num_heads, num_seeds, p.v is not None, events.dtype, key_norm.dtype, offsets.dtype, p.out.dtype)
    s = specs_of(PoolShape(events.shape[1], *shape), numerics)
    rows, row_offsets = dout.reshape(-1, dout.shape[2]), equal_offsets(dout.shape[0], num_seeds, dout.device)
    do = quantize.launch(s.dout, rows.to(p.out.dtype), row_offsets, out=p.out.reshape(rows.shape))
    x, operand = Tiled(p.x, p.x_rows, p.x_columns), attention.BackwardOperand
    v = x if p.v is None else Tiled(p.v, cast(Tensor, p.v_rows), cast(Tensor, p.v_rows))  # column tiles aren't read
    saved = attention.SavedState(cast(Tensor, do.delta), p.lse, p.row_sum_log2)
    q, k = operand(p.q, p.q_rows, p.q_columns), operand(p.k, p.k_rows, p.k_columns)
    gradients = attention.launch(s.attention_backward, q, k, operand(*v), offsets, operand(*_tiled(do.data, do)), saved)

    def through(gradient: Tiled, weight: Tensor, weight_columns: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of a projection's input and weight."""
        rows = projection.ProjectionOperand(gradient.data, gradient.row_tiles)
        dx = projection.launch(s.gemm, rows, projection.ProjectionOperand(weight, weight_columns), offsets).out
        own, other = (MXFP8Tensor(each.data, each.column_tiles) for each in (gradient, x))
        return dx, weight_grad.launch(s.weight_grad, own, other, offsets)

    dk, dv = cast(tuple[Any, Any], gradients[1:])
    dx, dkey_proj = through(_tiled(dk.data, dk), p.wk, p.wk_columns)
    added: tuple[Tensor, Tensor] | None = (dv.data, dv.scales)
    of_values = []
    if p.v is not None:
        dx_of_values, dvalue_proj = through(_tiled(dv.data, dv), cast(Tensor, p.wv), cast(Tensor, p.wv_columns))
        dx, added, of_values = dx + dx_of_values, None, [dvalue_proj]
    normed = norm.launch(s.rmsnorm_backward, dx, events, key_norm, p.rstd, offsets, added)
    return [gradients.dq, normed.dvalues, normed.dweight, dkey_proj, *of_values]


def _tiled(data: Tensor, result: Any) -> Tiled:
    """Of what a kernel wrote that was asked for tiles."""
    return Tiled(data, result.row_tiles, result.column_tiles)


pool_backward.register_fake(partial(empty_gradients, len(Pooled._fields)))
register_flop_formula(torch.ops.pma.pool_sm100)(forward_flops)
register_flop_formula(torch.ops.pma.pool_backward_sm100)(partial(backward_flops, len(Pooled._fields)))
