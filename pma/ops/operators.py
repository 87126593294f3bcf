"""Schemas, fakes and FLOP formulas of the `pma` operators.

All are non-differentiable and return plain tensors: `data` is the uint8 bits of float8_e4m3fn, `scales` those of
float8_e8m0fnu. Sizes: T rows of the jagged buffer, B segments, S seeds, H heads, E model width, R = T // 32 + B
scale slots. `offsets` is [B+1] int32 or int64. Operators compute in float32 whatever autocast says.
`autograd.py` is the one differentiable boundary. `backend`: see `backends.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from pma.jagged import equal_offsets, num_row_blocks
from pma.layouts import BLOCK, MXFP8Tensor, tile_shape
from pma.ops import any_arch, backends
from pma.reference import operators as reference
from pma.reference.attention import AttentionShape, BackwardInputs


@custom_op("pma::rmsnorm_quantize", mutates_args=())
def rmsnorm_quantize(
    values: Tensor, weight: Tensor, offsets: Tensor, eps: float, columns_per_scale: int, headroom_exponent: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """RMSNorm and quantise. values [T, E], weight [E] → data [T, E], scales [R, E/32], rstd [T] float32.

    Rows outside the offsets: data 0, rstd 0.
    """
    spec = any_arch.quantize_spec(values, offsets, columns_per_scale, weight, headroom_exponent)
    if backends.uses_kernel(backend, values.device, spec):
        return any_arch.rmsnorm_quantize(spec, values, weight, offsets, eps)
    return reference.rmsnorm_quantize(values, weight, offsets, eps, columns_per_scale, headroom_exponent)


@rmsnorm_quantize.register_fake
def _(values, weight, offsets, eps, columns_per_scale, headroom_exponent=0, backend="auto"):
    return (*_mxfp8_like(values, offsets), _empty(values, values.shape[0]))


@custom_op("pma::quantize", mutates_args=())
def quantize(values: Tensor, offsets: Tensor, columns_per_scale: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Quantise. values [T, E] → data [T, E], scales [R, E/32]."""
    spec = any_arch.quantize_spec(values, offsets, columns_per_scale)
    if backends.uses_kernel(backend, values.device, spec):
        return any_arch.quantize(spec, values, offsets)
    return reference.quantize(values, offsets, columns_per_scale)


@quantize.register_fake
def _(values, offsets, columns_per_scale, backend="auto"):
    return _mxfp8_like(values, offsets)


@custom_op("pma::quantize_dout", mutates_args=())
def quantize_dout(
    dout: Tensor, out: Tensor, num_heads: int, columns_per_scale: int, dp_operands: str, headroom_exponent: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantise dO and take δ = rowsum(dO∘O) from the dO that dP will see.

    dout, out [B, S, E] → data [B·S, E], scales [B·S // 32 + B, E/32], delta [B·S, H] float32.
    """
    offsets = equal_offsets(dout.shape[0], dout.shape[1], dout.device)
    numbers = (num_heads, columns_per_scale, dp_operands, headroom_exponent)
    spec = any_arch.quantize_dout_spec(dout, out, offsets, *numbers)
    if backends.uses_kernel(backend, dout.device, spec):
        return any_arch.quantize_dout(spec, dout, out, offsets)
    return reference.quantize_dout(dout, out, *numbers)


@quantize_dout.register_fake
def _(dout, out, num_heads, columns_per_scale, dp_operands, headroom_exponent=0, backend="auto"):
    num_segments, num_seeds, embed_dim = dout.shape
    rows = num_segments * num_seeds
    slots = num_row_blocks(rows, num_segments, BLOCK)
    scales = _empty(dout, slots, embed_dim // BLOCK, dtype=torch.uint8)
    return _empty(dout, rows, embed_dim, dtype=torch.uint8), scales, _empty(dout, rows, num_heads)


@custom_op("pma::dequantize", mutates_args=())
def dequantize(data: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """Values of an MXFP8 matrix, 0 outside the offsets. data [T, E], scales [R, E/32] → [T, E] float32."""
    return reference.dequantize(data, scales, offsets)


@dequantize.register_fake
def _(data, scales, offsets):
    return _empty(data, *data.shape)


@custom_op("pma::scatter_scales", mutates_args=())
def scatter_scales(scales: Tensor, offsets: Tensor, total_rows: int, direction: str, backend: str = "auto") -> Tensor:
    """Compact scales [R, E/32] → "row" or "column" tiles of a matrix of `total_rows` rows; see layouts/scale_tiles."""
    spec = any_arch.scatter_scales_spec(scales, offsets, direction)
    if backends.uses_kernel(backend, scales.device, spec):
        return any_arch.scatter_scales(scales, offsets, total_rows, direction)
    return reference.scatter_scales(scales, offsets, total_rows, direction)


@scatter_scales.register_fake
def _(scales, offsets, total_rows, direction, backend="auto"):
    shape = tile_shape(total_rows, offsets.shape[0] - 1, scales.shape[1] * BLOCK, direction)
    return _empty(scales, *shape, dtype=torch.uint8)


@custom_op("pma::gemm_quantize", mutates_args=())
def gemm_quantize(
    data: Tensor, scales: Tensor, weight_data: Tensor, weight_scales: Tensor, offsets: Tensor,
    columns_per_scale: int, headroom_exponent: int, k_smoothing: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x Wᵀ, quantised from the fp32 sums. x [T, C], W [N, C] (one segment) → data [T, N], scales [R, N/32]."""
    x, weight = MXFP8Tensor(data, scales), MXFP8Tensor(weight_data, weight_scales)
    return reference.gemm_quantize(x, weight, offsets, columns_per_scale, headroom_exponent, k_smoothing)


@gemm_quantize.register_fake
def _(data, scales, weight_data, weight_scales, offsets, columns_per_scale, headroom_exponent, k_smoothing):
    columns = weight_data.shape[0]
    return (
        _empty(data, data.shape[0], columns, dtype=torch.uint8),
        _empty(data, scales.shape[0], columns // BLOCK, dtype=torch.uint8),
    )


@custom_op("pma::gemm", mutates_args=())
def gemm(
    data: Tensor, scales: Tensor, weight_data: Tensor, weight_scales: Tensor, offsets: Tensor, out_dtype: torch.dtype,
    is_transposed: bool = False,
) -> Tensor:  # fmt: skip
    """x W, the input gradient of a projection. x [T, N], W [N, C] (one segment) → [T, C] out_dtype.

    is_transposed: the weight is Wᵀ [C, N], quantised as such.
    """
    x, weight = MXFP8Tensor(data, scales), MXFP8Tensor(weight_data, weight_scales)
    return reference.gemm(x, weight, offsets, out_dtype, is_transposed)


@gemm.register_fake
def _(data, scales, weight_data, weight_scales, offsets, out_dtype, is_transposed=False):
    return _empty(data, data.shape[0], weight_data.shape[0 if is_transposed else 1], dtype=out_dtype)


@custom_op("pma::weight_grad", mutates_args=())
def weight_grad(data: Tensor, scales: Tensor, x_data: Tensor, x_scales: Tensor, offsets: Tensor) -> Tensor:
    """dKᵀ x, contracted over the tokens of every segment. dK [T, N], x [T, C] → [N, C] float32."""
    return reference.weight_grad(MXFP8Tensor(data, scales), MXFP8Tensor(x_data, x_scales), offsets)


@weight_grad.register_fake
def _(data, scales, x_data, x_scales, offsets):
    return _empty(data, data.shape[1], x_data.shape[1])


@custom_op("pma::attention_forward", mutates_args=())
def attention_forward(
    q_data: Tensor, q_scales: Tensor, k_data: Tensor, k_scales: Tensor, v_data: Tensor, v_scales: Tensor,
    offsets: Tensor, num_seeds: int, num_heads: int, numerics: str, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """softmax(q kᵀ / sqrt(D)) v, jagged. q [S, E] shared (or [B·S, E]), k and v [T, E], `numerics` a record's token.

    → out [B, S, E] out_dtype (0 for empty segments), lse [B, H, S] float32 natural log (−inf for empty segments),
    row_sum_log2 [B, H, S] int32.
    """
    q, k, v = MXFP8Tensor(q_data, q_scales), MXFP8Tensor(k_data, k_scales), MXFP8Tensor(v_data, v_scales)
    return reference.attention_forward(q, k, v, offsets, AttentionShape(num_seeds, num_heads), numerics, out_dtype)


@attention_forward.register_fake
def _(q_data, q_scales, k_data, k_scales, v_data, v_scales, offsets, num_seeds, num_heads, numerics, out_dtype):
    num_segments = offsets.shape[0] - 1
    state = (num_segments, num_heads, num_seeds)
    out = _empty(k_data, num_segments, num_seeds, k_data.shape[1], dtype=out_dtype)
    return out, _empty(k_data, *state), _empty(k_data, *state, dtype=torch.int32)


@custom_op("pma::attention_backward", mutates_args=())
def attention_backward(
    q_data: Tensor, q_scales: Tensor, k_data: Tensor, k_scales: Tensor, v_data: Tensor, v_scales: Tensor,
    offsets: Tensor, dout_data: Tensor, dout_scales: Tensor, dout: Tensor, delta: Tensor, lse: Tensor,
    row_sum_log2: Tensor, num_seeds: int, num_heads: int, numerics: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `attention_forward`.

    dout_data, dout_scales, delta come from `quantize_dout`; dout [B, S, E] is read only with dp_operands="bf16".
    → dq like q float32 (summed over segments for shared q), dk_data, dk_scales, dv_data, dv_scales.
    """
    q, k, v = MXFP8Tensor(q_data, q_scales), MXFP8Tensor(k_data, k_scales), MXFP8Tensor(v_data, v_scales)
    raw = dout.reshape(-1, dout.shape[-1])
    saved = BackwardInputs(raw, delta, lse, row_sum_log2, raw)
    quantized, shape = MXFP8Tensor(dout_data, dout_scales), AttentionShape(num_seeds, num_heads)
    return reference.attention_backward(q, k, v, offsets, quantized, saved, shape, numerics)


@attention_backward.register_fake
def _(
    q_data, q_scales, k_data, k_scales, v_data, v_scales, offsets, dout_data, dout_scales, dout, delta, lse,
    row_sum_log2, num_seeds, num_heads, numerics,
):  # fmt: skip
    dk, dv = _mxfp8_like(k_data, offsets), _mxfp8_like(k_data, offsets)
    return _empty(q_data, *q_data.shape), *dk, *dv


@custom_op("pma::rmsnorm_backward", mutates_args=())
def rmsnorm_backward(
    dy: Tensor, dv_data: Tensor | None, dv_scales: Tensor | None, values: Tensor, weight: Tensor, rstd: Tensor,
    offsets: Tensor, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of RMSNorm for dy + dequantised dV (when given).

    dy, values [T, E] → dvalues [T, E] in the dtype of values (0 outside the offsets), dweight [E] float32.
    """
    dv = None if dv_data is None or dv_scales is None else MXFP8Tensor(dv_data, dv_scales)
    spec = any_arch.rmsnorm_backward_spec(dy, dv, values, weight, offsets)
    if backends.uses_kernel(backend, values.device, spec):
        return any_arch.rmsnorm_backward(spec, dy, dv, values, weight, rstd, offsets)
    return reference.rmsnorm_backward(dy, dv, values, weight, rstd, offsets)


@rmsnorm_backward.register_fake
def _(dy, dv_data, dv_scales, values, weight, rstd, offsets, backend="auto"):
    return _empty(values, *values.shape, dtype=values.dtype), _empty(values, weight.shape[0])


@custom_op("pma::plain_attention_forward", mutates_args=())
def plain_attention_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Attention without block scales, in the dtype of q. q [S, E], k, v [T, E] → out [B, S, E], lse [B, H, S]."""
    return reference.plain_attention_forward(q, k, v, offsets, num_heads)


@plain_attention_forward.register_fake
def _(q, k, v, offsets, num_heads):
    num_segments, (num_seeds, embed_dim) = offsets.shape[0] - 1, q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = _empty(q, num_segments, num_seeds, embed_dim, dtype=q.dtype)
    return out, _empty(q, num_segments, num_heads, num_seeds, dtype=lse_dtype)


@custom_op("pma::plain_attention_backward", mutates_args=())
def plain_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, out: Tensor, lse: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of `plain_attention_forward`, like q, k, v."""
    return reference.plain_attention_backward(dout, q, k, v, offsets, out, lse, num_heads)


@plain_attention_backward.register_fake
def _(dout, q, k, v, offsets, out, lse, num_heads):
    return tuple(_empty(x, *x.shape, dtype=x.dtype) for x in (q, k, v))


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _mxfp8_like(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    total_rows, columns = values.shape
    slots = num_row_blocks(total_rows, offsets.shape[0] - 1, BLOCK)
    data = _empty(values, total_rows, columns, dtype=torch.uint8)
    return data, _empty(values, slots, columns // BLOCK, dtype=torch.uint8)


for _operator in (rmsnorm_quantize, quantize, quantize_dout, rmsnorm_backward):
    for _device in ("cpu", "cuda"):
        _operator.register_autocast(_device, torch.float32)


def _register_flops(name: str, formula: Callable[..., int]) -> None:
    register_flop_formula(getattr(torch.ops.pma, name))(formula)


def _attention_flops(products: int, q: tuple, k: tuple, num_seeds: int) -> int:
    return 2 * products * num_seeds * k[0] * k[1]


_register_flops("attention_forward", lambda q, qs, k, ks, v, vs, o, seeds, *a, **kw: _attention_flops(2, q, k, seeds))
_register_flops(
    "attention_backward",
    lambda q, qs, k, *rest, **kw: _attention_flops(5, q, k, rest[10]),
)
_register_flops("plain_attention_forward", lambda q, k, v, *a, **kw: _attention_flops(2, q, k, q[0]))
_register_flops("plain_attention_backward", lambda do, q, k, v, *a, **kw: _attention_flops(5, q, k, q[0]))
_register_flops("gemm_quantize", lambda x, xs, w, *a, **kw: 2 * x[0] * w[0] * w[1])
_register_flops("gemm", lambda x, xs, w, *a, **kw: 2 * x[0] * w[0] * w[1])
_register_flops("weight_grad", lambda d, ds, x, *a, **kw: 2 * d[0] * d[1] * x[1])
