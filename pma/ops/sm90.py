"""The module on Hopper: one operator forward and one backward, each a sequence of kernels.

All scales are compact and uniform over a head, or over the whole width where a projection contracts. V, and dO in the
backward, come with a transposed payload from the kernel that makes them; what the reference composes in `autograd.py`
rounds at the same places.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from pma.jagged import equal_offsets, num_row_blocks
from pma.kernels.attention_backward.hopper_spec import HopperBackwardSpec
from pma.kernels.attention_forward.hopper_spec import HopperForwardSpec
from pma.kernels.projection.hopper_spec import HopperGemmQuantizeSpec, HopperGemmSpec
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec
from pma.kernels.weight_grad.hopper_spec import HopperWeightGradSpec
from pma.layouts import BLOCK, MXFP8Tensor
from pma.numerics import AttentionNumerics
from pma.ops.pool import SEED_OFFSETS, PoolShape, backward_flops, dx_dtype, empty_gradients, forward_flops, one_segment


class PoolSpecs(NamedTuple):
    """What is asked of each kernel."""

    norm_seeds: QuantizeSpec
    norm_events: QuantizeSpec
    weights: QuantizeSpec
    q: HopperGemmQuantizeSpec
    k: HopperGemmQuantizeSpec
    v: HopperGemmQuantizeSpec
    attention_forward: HopperForwardSpec
    dout: QuantizeSpec
    attention_backward: HopperBackwardSpec
    gemm: HopperGemmSpec
    weight_grad: HopperWeightGradSpec
    rmsnorm_backward: RMSNormBackwardSpec


class Pooled(NamedTuple):
    """Results of the forward: the first one is the module's, all are the backward's. Payloads and scales are uint8.

    Weights of keys and values are transposed, as the input gradient contracts them. Without a value projection the
    last four are None.
    """

    out: Tensor  # [B, S, E]
    lse: Tensor  # [B, H, S] float32
    row_sum_log2: Tensor  # [B, H, S] int32
    seeds_rstd: Tensor  # [S] float32
    rstd: Tensor  # [T] float32
    xq: Tensor  # [S, E], normalised seeds
    xq_scales: Tensor
    wq: Tensor  # [E, E]
    wq_scales: Tensor
    q: Tensor  # [S, E]
    q_scales: Tensor
    k: Tensor  # [T, E]
    k_scales: Tensor
    x: Tensor  # [T, E], normalised events
    x_scales: Tensor
    wk: Tensor  # [E, E]
    wk_scales: Tensor
    v: Tensor | None = None
    v_scales: Tensor | None = None
    wv: Tensor | None = None
    wv_scales: Tensor | None = None


@cache
def specs_of(shape: PoolShape, token: str) -> PoolSpecs:
    """What a module asks of each kernel; token: of its `AttentionNumerics`."""
    numerics = AttentionNumerics.from_token(token)
    embed_dim, offsets, headroom = shape.embed_dim, shape.offsets, numerics.headroom_exponent
    head_dim, of_dp = embed_dim // shape.num_heads, numerics.dp_headroom_exponent
    attention = (head_dim, shape.num_heads, shape.num_seeds, True, numerics)
    norm = partial(QuantizeSpec, embed_dim, columns_per_scale=embed_dim, weight_dtype=shape.parameters)
    projection = partial(
        HopperGemmQuantizeSpec, embed_dim, embed_dim, in_columns_per_scale=embed_dim, columns_per_scale=head_dim
    )
    of_dx = dx_dtype(shape.events)
    events_are_values = not shape.has_value_proj
    return PoolSpecs(
        norm_seeds=norm(shape.parameters, SEED_OFFSETS),
        norm_events=norm(
            shape.events, offsets, writes_transposed=events_are_values, headroom_exponent=of_dp * events_are_values
        ),
        weights=QuantizeSpec(embed_dim, shape.parameters, SEED_OFFSETS, columns_per_scale=embed_dim),
        q=projection(SEED_OFFSETS, headroom_exponent=headroom),
        k=projection(offsets, headroom_exponent=headroom, k_smoothing=numerics.k_smoothing),
        v=projection(offsets, headroom_exponent=of_dp, writes_transposed=True),
        attention_forward=HopperForwardSpec(*attention, shape.out, offsets),
        dout=QuantizeSpec(
            embed_dim, shape.out, SEED_OFFSETS, columns_per_scale=head_dim, writes_transposed=True,
            delta_columns=head_dim, out_dtype=shape.out, headroom_exponent=of_dp,
        ),
        attention_backward=HopperBackwardSpec(*attention, offsets),
        gemm=HopperGemmSpec(embed_dim, embed_dim, offsets, in_columns_per_scale=head_dim, out_dtype=of_dx),
        weight_grad=HopperWeightGradSpec(
            embed_dim, embed_dim, offsets, dout_columns_per_scale=head_dim, x_columns_per_scale=embed_dim
        ),
        rmsnorm_backward=RMSNormBackwardSpec(
            embed_dim, shape.events, of_dx, shape.parameters, offsets, adds_dv=events_are_values
        ),
    )  # fmt: skip


@custom_op("pma::pool_sm90", mutates_args=())
def pool(
    events: Tensor, offsets: Tensor, seeds: Tensor, query_norm: Tensor, query_proj: Tensor, key_norm: Tensor,
    key_proj: Tensor, value_proj: Tensor | None, num_heads: int, norm_eps: float, numerics: str,
    out_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """The module's forward. events [T, E], seeds [S, E], projections [E, E] → those of `Pooled` that aren't None."""
    from pma.kernels.attention_forward import sm90 as attention
    from pma.kernels.projection import sm90 as projection
    from pma.kernels.quantize import any_arch as quantize

    shape = (num_heads, seeds.shape[0], value_proj is not None, events.dtype, key_proj.dtype, offsets.dtype, out_dtype)
    s = specs_of(PoolShape(events.shape[1], *shape), numerics)
    of_seeds, operand = one_segment(seeds), projection.HopperOperand
    xq = quantize.launch(s.norm_seeds, seeds, of_seeds, weight=query_norm, eps=norm_eps)
    x = quantize.launch(s.norm_events, events, offsets, weight=key_norm, eps=norm_eps)

    def quantized(weight: Tensor) -> Any:
        rows = quantize.launch(s.weights, weight, one_segment(weight))
        return operand(rows.data, rows.scales)

    events_, wq = operand(x.data, x.scales), quantized(query_proj)
    q = projection.launch(s.q, operand(xq.data, xq.scales), wq, of_seeds)
    k = projection.launch(s.k, events_, quantized(key_proj), offsets)
    v, of_values = (cast(Tensor, x.transposed), x.scales), cast(tuple[Tensor, ...], ())
    if value_proj is not None:
        values = projection.launch(s.v, events_, quantized(value_proj), offsets)
        v = (cast(Tensor, values.transposed), cast(Tensor, values.scales))
        of_values = (values.out, v[1], *quantized(value_proj.t().contiguous()))
    matrices = ((q.out, q.scales), (k.out, k.scales), v)
    q_, k_, v_ = (attention.HopperOperand(*cast(tuple[Tensor, Tensor], each)) for each in matrices)
    attended = attention.launch(s.attention_forward, q_, k_, v_, offsets)
    rstds = cast(tuple[Tensor, Tensor], (xq.rstd, x.rstd))
    of_keys = (*k_, *events_, *quantized(key_proj.t().contiguous()))
    return [*attended, *rstds, xq.data, xq.scales, *wq, *q_, *of_keys, *of_values]


@pool.register_fake
def _(
    events, offsets, seeds, query_norm, query_proj, key_norm, key_proj, value_proj, num_heads, norm_eps, numerics,
    out_dtype,
):  # fmt: skip
    num_rows, num_segments, (num_seeds, columns) = events.shape[0], offsets.shape[0] - 1, seeds.shape

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=events.device)

    def matrix(rows: int, segments: int) -> Iterator[Tensor]:
        yield empty(rows, columns)
        yield empty(num_row_blocks(rows, segments, BLOCK), columns // BLOCK)

    state = (num_segments, num_heads, num_seeds)
    of_events, of_weights = (num_rows, num_segments), (columns, 1)
    matrices = [(num_seeds, 1), of_weights, (num_seeds, 1), of_events, of_events, of_weights]
    if value_proj is not None:
        matrices += [of_events, of_weights]
    return [
        empty(num_segments, num_seeds, columns, dtype=out_dtype),
        empty(*state, dtype=torch.float32),
        empty(*state, dtype=torch.int32),
        empty(num_seeds, dtype=torch.float32),
        empty(num_rows, dtype=torch.float32),
        *(each for sizes in matrices for each in matrix(*sizes)),
    ]


@custom_op("pma::pool_backward_sm90", mutates_args=())
def pool_backward(
    dout: Tensor, events: Tensor, offsets: Tensor, key_norm: Tensor, pooled: list[Tensor], num_heads: int, numerics: str
) -> list[Tensor]:
    """Gradients of `pool`, but for the seeds' norm and projection.

    → dq [S, E] float32, devents [T, E], dkey_norm [E] float32, dkey_proj [E, E] float32, and dvalue_proj likewise if
    there is a value projection.
    """
    from pma.kernels.attention_backward import sm90 as attention
    from pma.kernels.projection import sm90 as projection
    from pma.kernels.quantize import any_arch as quantize
    from pma.kernels.rmsnorm_backward import any_arch as norm
    from pma.kernels.weight_grad import sm90 as weight_grad

    p, num_seeds = Pooled(*pooled), pooled[0].shape[1]
    shape = (num_heads, num_seeds, p.v is not None, events.dtype, key_norm.dtype, offsets.dtype, p.out.dtype)
    s = specs_of(PoolShape(events.shape[1], *shape), numerics)
    rows, row_offsets = dout.reshape(-1, dout.shape[2]), equal_offsets(dout.shape[0], num_seeds, dout.device)
    do = quantize.launch(s.dout, rows.to(p.out.dtype), row_offsets, out=p.out.reshape(rows.shape))
    operand = attention.HopperOperand
    q, k, x = operand(p.q, p.q_scales), operand(p.k, p.k_scales), operand(p.x, p.x_scales)
    v = x if p.v is None else operand(p.v, cast(Tensor, p.v_scales))
    of_dout = (do.data, cast(Tensor, do.transposed), do.scales)
    saved = (cast(Tensor, do.delta), p.lse, p.row_sum_log2)
    dq, dk, dv = attention.launch(s.attention_backward, q, k, v, offsets, of_dout, saved)

    def through(gradient: Any, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of a projection's input and weight."""
        rows, of_weight = (projection.HopperOperand(*each) for each in (gradient, (weight, scales)))
        dx = projection.launch(s.gemm, rows, of_weight, offsets).out
        own, other = MXFP8Tensor(*gradient), MXFP8Tensor(*x)
        return dx, weight_grad.launch(s.weight_grad, own, other, offsets)

    dx, dkey_proj = through(dk, p.wk, p.wk_scales)
    added: tuple[Tensor, Tensor] | None = (dv.data, dv.scales)
    of_values = []
    if p.v is not None:
        dx_of_values, dvalue_proj = through(dv, cast(Tensor, p.wv), cast(Tensor, p.wv_scales))
        dx, added, of_values = dx + dx_of_values, None, [dvalue_proj]
    normed = norm.launch(s.rmsnorm_backward, dx, events, key_norm, p.rstd, offsets, added)
    return [dq, normed.dvalues, normed.dweight, dkey_proj, *of_values]


pool_backward.register_fake(partial(empty_gradients, len(Pooled._fields)))
register_flop_formula(torch.ops.pma.pool_sm90)(forward_flops)
register_flop_formula(torch.ops.pma.pool_backward_sm90)(partial(backward_flops, len(Pooled._fields)))
