"""The differentiable boundary: what is differentiable in PMA goes through one of the two functions below."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pma.jagged import equal_offsets
from pma.layouts import BLOCK
from pma.ops import backends
from pma.ops import operators as ops


class PMAConfig(NamedTuple):
    """Static facts of one module, all plain values so that compilers can guard on them."""

    num_heads: int
    norm_eps: float
    numerics: str  # AttentionNumerics.token()
    dp_operands: str
    columns_per_scale: int  # of Q, K, V and their gradients
    projection_columns_per_scale: int  # of x and the weights
    headroom_exponent: int  # of Q and K
    dp_headroom_exponent: int  # of V and dO
    k_smoothing: bool
    out_dtype: torch.dtype
    backend: str


class PMAFunction(torch.autograd.Function):
    """Events → pooled events in MXFP8: norms, projections and attention with FP8 between all of them."""

    @staticmethod
    def forward(
        ctx: Any, events: Tensor, offsets: Tensor, seeds: Tensor, query_norm: Tensor, query_proj: Tensor,
        key_norm: Tensor, key_proj: Tensor, value_proj: Tensor | None, config: PMAConfig,
    ) -> Tensor:  # fmt: skip
        ctx.config, ctx.norm_dtype, ctx.projection_dtype = config, key_norm.dtype, query_proj.dtype
        dtypes = (events.dtype, key_proj.dtype, offsets.dtype, config.out_dtype)
        shape = (events.shape[1], config.num_heads, seeds.shape[0], value_proj is not None, *dtypes)
        ctx.family = backends.serving_module(config.backend, events.device, config.numerics, *shape)
        if ctx.family:
            projections = (query_norm, query_proj, key_norm, key_proj, value_proj)
            pooled = backends.MODULES[ctx.family].pool(
                events,
                offsets,
                seeds,
                *projections,
                config.num_heads,
                config.norm_eps,
                config.numerics,
                config.out_dtype,
            )
            ctx.save_for_backward(events, offsets, seeds, query_norm, key_norm, *pooled)
            return pooled[0]
        c, wide, backend = config, config.projection_columns_per_scale, config.backend
        seed_offsets, weight_offsets = _one_segment(seeds), _one_segment(query_proj)
        wq, wk = (ops.quantize(w, weight_offsets, wide, backend) for w in (query_proj, key_proj))
        xq, xq_scales, seeds_rstd = ops.rmsnorm_quantize(seeds, query_norm, seed_offsets, c.norm_eps, wide, 0, backend)
        headroom = c.dp_headroom_exponent if value_proj is None else 0
        x, x_scales, rstd = ops.rmsnorm_quantize(events, key_norm, offsets, c.norm_eps, wide, headroom, backend)
        narrow = (c.columns_per_scale, c.headroom_exponent)
        q = ops.gemm_quantize(xq, xq_scales, *wq, seed_offsets, *narrow, False)
        k = ops.gemm_quantize(x, x_scales, *wk, offsets, *narrow, c.k_smoothing)
        wv, v = (None, None), (x, x_scales)
        if value_proj is not None:
            wv = ops.quantize(value_proj, weight_offsets, wide, backend)
            v = ops.gemm_quantize(x, x_scales, *wv, offsets, c.columns_per_scale, c.dp_headroom_exponent, False)
        sizes = (seeds.shape[0], c.num_heads)
        out, lse, row_sum_log2 = ops.attention_forward(*q, *k, *v, offsets, *sizes, c.numerics, c.out_dtype)
        saved_v = v if value_proj is not None else (None, None)
        wk_of_dx, wv_of_dx = _for_input_gradient(key_proj, wk, c), _for_input_gradient(value_proj, wv, c)
        ctx.save_for_backward(
            events, offsets, seeds, query_norm, key_norm, seeds_rstd, rstd, out, lse, row_sum_log2,
            xq, xq_scales, x, x_scales, *q, *k, *saved_v, *wq, *wk_of_dx, *wv_of_dx,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        c: PMAConfig = ctx.config
        if ctx.family:
            return _backward_on_kernels(ctx, dout)
        (
            events, offsets, seeds, query_norm, key_norm, seeds_rstd, rstd, out, lse, row_sum_log2,
            xq, xq_scales, x, x_scales, q, q_scales, k, k_scales, v, v_scales, wq, wq_scales, wk, wk_scales,
            wv, wv_scales,
        ) = ctx.saved_tensors  # fmt: skip
        has_value_projection = v is not None
        if not has_value_projection:
            v, v_scales = x, x_scales
        of_dout = (c.num_heads, c.columns_per_scale, c.dp_operands, c.dp_headroom_exponent, c.backend)
        do, do_scales, delta = ops.quantize_dout(dout, out, *of_dout)
        dq, dk, dk_scales, dv, dv_scales = ops.attention_backward(
            q, q_scales, k, k_scales, v, v_scales, offsets, do, do_scales, dout, delta, lse, row_sum_log2,
            seeds.shape[0], c.num_heads, c.numerics,
        )  # fmt: skip
        dx_dtype = torch.bfloat16 if events.dtype == torch.bfloat16 else torch.float32
        of_dx = (offsets, dx_dtype, _is_uniform(c))
        dx = ops.gemm(dk, dk_scales, wk, wk_scales, *of_dx)
        dwk = ops.weight_grad(dk, dk_scales, x, x_scales, offsets)
        dwv, added = None, (dv, dv_scales)
        if has_value_projection:
            dx = dx + ops.gemm(dv, dv_scales, wv, wv_scales, *of_dx)
            dwv = ops.weight_grad(dv, dv_scales, x, x_scales, offsets)
            added = (None, None)
        devents, dkey_norm = ops.rmsnorm_backward(dx, *added, events, key_norm, rstd, offsets, c.backend)
        dseeds, dquery_norm, dwq = _seed_gradients(
            dq, (xq, xq_scales), (wq, wq_scales), (seeds, query_norm, seeds_rstd), c.backend
        )
        return _in_order(ctx, out, devents, (dseeds, dquery_norm, dwq), (dkey_norm, dwk, dwv))


def _backward_on_kernels(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    events, offsets, seeds, query_norm, key_norm, *pooled = ctx.saved_tensors
    c, module = ctx.config, backends.MODULES[ctx.family]
    p = module.Pooled(*pooled)
    dq, devents, dkey_norm, dwk, *dwv = module.pool_backward(
        dout, events, offsets, key_norm, pooled, c.num_heads, c.numerics
    )
    of_seeds = _seed_gradients(
        dq, (p.xq, p.xq_scales), (p.wq, p.wq_scales), (seeds, query_norm, p.seeds_rstd), c.backend
    )
    return _in_order(ctx, p.out, devents, of_seeds, (dkey_norm, dwk, dwv[0] if dwv else None))


def _is_uniform(config: PMAConfig) -> bool:
    """Whether weights have one scale along what is contracted, so that products need no block scales."""
    return config.projection_columns_per_scale != BLOCK


def _for_input_gradient(weight: Tensor | None, quantized: tuple, config: PMAConfig) -> tuple:
    """(data, scales) of a weight as its input gradient takes it: transposed, and quantised so, with uniform scales."""
    if weight is None or not _is_uniform(config):
        return quantized
    transposed = weight.t().contiguous()
    return ops.quantize(transposed, _one_segment(transposed), config.projection_columns_per_scale, config.backend)


def _seed_gradients(dq: Tensor, xq: tuple, wq: tuple, normed: tuple, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the seeds, of their norm and of their projection: small products, in float32 always.

    xq, wq: (data, compact scales); normed: (seeds, weight of the norm, rstd).
    """
    seeds, query_norm, rstd = normed
    seed_offsets = _one_segment(seeds)
    with without_autocast(dq):
        dwq = dq.t() @ ops.dequantize(*xq, seed_offsets)
        dxq = dq @ ops.dequantize(*wq, _one_segment(wq[0]))
    dseeds, dquery_norm = ops.rmsnorm_backward(dxq, None, None, seeds, query_norm, rstd, seed_offsets, backend)
    return dseeds, dquery_norm.to(query_norm.dtype), dwq


def _in_order(ctx: Any, out: Tensor, devents: Tensor, of_seeds: tuple, of_keys: tuple) -> tuple[Tensor | None, ...]:
    """What `PMAFunction.backward` returns, in the dtypes of the parameters.

    It does not read `ctx.saved_tensors`: activation checkpointing lets a backward do so once.
    """
    (dseeds, dquery_norm, dwq), (dkey_norm, dwk, dwv) = of_seeds, of_keys
    of_projections = (None if each is None else each.to(ctx.projection_dtype) for each in (dwq, dwk, dwv))
    query_proj, key_proj, value_proj = of_projections
    key_norm = dkey_norm.to(ctx.norm_dtype)
    of_events, *others = _once(out, devents, dseeds, dquery_norm, query_proj, key_norm, key_proj, value_proj)
    return of_events, None, *others, None


class PlainAttentionFunction(torch.autograd.Function):
    """Jagged attention without block scales, in the dtype of its operands."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_heads: int) -> Tensor:
        out, lse = ops.plain_attention_forward(q, k, v, offsets, num_heads)
        ctx.save_for_backward(q, k, v, offsets, out, lse)
        ctx.num_heads = num_heads
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, offsets, out, lse = ctx.saved_tensors
        dq, dk, dv = ops.plain_attention_backward(dout, q, k, v, offsets, out, lse, ctx.num_heads)
        return *_once(out, dq, dk, dv), None, None


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Context in which products on the tensor's device keep their dtype; the meta device knows no autocast."""
    if tensor.device.type == "meta":
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


class _Once(torch.autograd.Function):
    """Gradients as they are; differentiating through them raises."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("pma.PMA cannot be differentiated twice; call backward without create_graph=True")


def _once(anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Tie gradients to `anchor`, which requires grad: a second differentiation cannot take them for constants."""
    if not torch.is_grad_enabled():  # no create_graph: nothing could be differentiated
        return gradients
    return tuple(None if g is None else _Once.apply(anchor, g) for g in gradients)


def _one_segment(rows: Tensor) -> Tensor:
    """Offsets of a matrix that is one segment: [0, number of rows]."""
    return equal_offsets(1, rows.shape[0], rows.device)
