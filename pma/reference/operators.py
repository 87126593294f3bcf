"""Reference implementation of every `pma` operator: the schemas of `pma/ops/operators.py`, in eager PyTorch.

Arguments, results and units are documented there; these functions put the pieces of this package together.
"""

import torch
from torch import Tensor

from pma import layouts
from pma.jagged import equal_offsets, rows_to_blocks, segment_of_rows
from pma.layouts import BLOCK, MXFP8Tensor
from pma.numerics import MAX_FOLD_LOG2, AttentionNumerics
from pma.reference import attention, norm, projection
from pma.reference.attention import AttentionShape, BackwardInputs, Operands
from pma.reference.folded import fold
from pma.reference.rounding import MXFP8Rounding, PlainRounding


def rmsnorm_quantize(
    values: Tensor, weight: Tensor, offsets: Tensor, eps: float, columns_per_scale: int, headroom_exponent: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    normalised, rstd = norm.rmsnorm(values, weight, eps)
    data, scales = layouts.quantize(
        normalised, offsets, columns_per_scale=columns_per_scale, headroom_exponent=headroom_exponent
    )
    return data, scales, torch.where(segment_of_rows(offsets, values.shape[0]) >= 0, rstd, 0.0)


def quantize(values: Tensor, offsets: Tensor, columns_per_scale: int) -> tuple[Tensor, Tensor]:
    data, scales = layouts.quantize(values, offsets, columns_per_scale=columns_per_scale)
    return data, scales


def quantize_dout(
    dout: Tensor, out: Tensor, num_heads: int, columns_per_scale: int, dp_operands: str, headroom_exponent: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    num_segments, num_seeds, embed_dim = dout.shape
    rows = dout.reshape(-1, embed_dim)
    offsets = equal_offsets(num_segments, num_seeds, dout.device)
    data, scales = layouts.quantize(
        rows, offsets, columns_per_scale=columns_per_scale, headroom_exponent=headroom_exponent
    )
    seen = rows.bfloat16() if dp_operands == "bf16" else layouts.dequantize(data, scales, offsets)
    products = seen.double() * out.reshape(-1, embed_dim).double()
    delta = products.view(-1, num_heads, embed_dim // num_heads).sum(-1).float()
    return data, scales, delta


def dequantize(data: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    return layouts.dequantize(data, scales, offsets)


def scatter_scales(scales: Tensor, offsets: Tensor, total_rows: int, direction: str) -> Tensor:
    return layouts.scatter_scales(scales, offsets, total_rows, direction)  # type: ignore[arg-type]


def gemm_quantize(
    x: MXFP8Tensor, weight: MXFP8Tensor, offsets: Tensor, columns_per_scale: int, headroom_exponent: int,
    k_smoothing: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    values = projection.linear(layouts.dequantize(*x, offsets), _dense(weight))
    if k_smoothing:
        values = projection.subtract_segment_means(values, offsets)
    data, scales = layouts.quantize(
        values, offsets, columns_per_scale=columns_per_scale, headroom_exponent=headroom_exponent
    )
    return data, scales


def gemm(
    x: MXFP8Tensor, weight: MXFP8Tensor, offsets: Tensor, out_dtype: torch.dtype, is_transposed: bool = False
) -> Tensor:
    dense = _dense(weight)
    return projection.linear(layouts.dequantize(*x, offsets), dense if is_transposed else dense.t()).to(out_dtype)


def weight_grad(dout: MXFP8Tensor, x: MXFP8Tensor, offsets: Tensor) -> Tensor:
    return projection.weight_grad(layouts.dequantize(*dout, offsets), layouts.dequantize(*x, offsets))


def attention_forward(
    q: MXFP8Tensor, k: MXFP8Tensor, v: MXFP8Tensor, offsets: Tensor, shape: AttentionShape, numerics: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    operands, record = _operands(q, k, v, offsets, shape), AttentionNumerics.from_token(numerics)
    if record.folds_v_scales:
        operands = operands._replace(v_fold=_fold_of_scales(v, offsets, shape.num_heads))
    out, lse, row_sum_log2 = attention.attention_forward(operands, shape, MXFP8Rounding(record))
    return out.to(out_dtype), lse, row_sum_log2


def attention_backward(
    q: MXFP8Tensor, k: MXFP8Tensor, v: MXFP8Tensor, offsets: Tensor, dout: MXFP8Tensor, saved: BackwardInputs,
    shape: AttentionShape, numerics: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`saved.dout` is the unquantised dO here; it is used only with dp_operands="bf16"."""
    operands, record = _operands(q, k, v, offsets, shape), AttentionNumerics.from_token(numerics)
    dout_offsets = equal_offsets(offsets.shape[0] - 1, shape.num_seeds, offsets.device)
    dequantized = layouts.dequantize(*dout, dout_offsets)
    dp_dout = saved.dp_dout.bfloat16().float() if record.dp_operands == "bf16" else dequantized
    folding = None
    if record.folds_v_scales:
        values, state = (operands.q, dequantized), (saved.delta, saved.row_sum_log2)
        folding = fold((q, k, v, dout), values, state, offsets)
    inputs = saved._replace(dout=dequantized, dp_dout=dp_dout, folding=folding)
    dq, dk, dv = attention.attention_backward(operands, inputs, shape, MXFP8Rounding(record))
    columns = record.columns_per_scale(k.data.shape[1] // shape.num_heads)
    quantized_dk = layouts.quantize(dk, offsets, columns_per_scale=columns)
    quantized_dv = layouts.quantize(dv, offsets, columns_per_scale=columns)
    return dq, *quantized_dk, *quantized_dv


def rmsnorm_backward(
    dy: Tensor, dv: MXFP8Tensor | None, values: Tensor, weight: Tensor, rstd: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    total = dy.float()
    if dv is not None:
        total = total + layouts.dequantize(*dv, offsets)
    return norm.rmsnorm_backward(total, values, weight, rstd, offsets)


def plain_attention_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    operands, dtype = _plain(q, k, v, offsets), q.dtype
    shape = AttentionShape(q.shape[0], num_heads)
    out, lse, _ = attention.attention_forward(operands, shape, PlainRounding(dtype))
    return out.to(dtype), lse


def plain_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, out: Tensor, lse: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    operands, dtype = _plain(q, k, v, offsets), q.dtype
    shape = AttentionShape(q.shape[0], num_heads)
    rows = dout.reshape(-1, dout.shape[-1]).to(operands.q.dtype)
    products = rows.double() * out.reshape(rows.shape).double()
    delta = products.view(rows.shape[0], num_heads, rows.shape[1] // num_heads).sum(-1).to(rows.dtype)
    inputs = BackwardInputs(rows, delta, lse, torch.zeros_like(lse, dtype=torch.int32), rows)
    dq, dk, dv = attention.attention_backward(operands, inputs, shape, PlainRounding(dtype))
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _dense(matrix: MXFP8Tensor) -> Tensor:
    return layouts.dequantize(*matrix, equal_offsets(1, matrix.data.shape[0], matrix.data.device))


def _operands(q: MXFP8Tensor, k: MXFP8Tensor, v: MXFP8Tensor, offsets: Tensor, shape: AttentionShape) -> Operands:
    q_offsets = equal_offsets(q.data.shape[0] // shape.num_seeds, shape.num_seeds, q.data.device)
    return Operands(
        layouts.dequantize(*q, q_offsets),
        layouts.dequantize(*k, offsets),
        layouts.dequantize(*v, offsets),
        offsets,
    )


def _fold_of_scales(v: MXFP8Tensor, offsets: Tensor, num_heads: int) -> Tensor:
    """V's scale of each event and head over the largest of its segment, at least 2^-12; 1 where there is none."""
    segment = segment_of_rows(offsets, v.data.shape[0])
    slot = rows_to_blocks(offsets, v.data.shape[0], BLOCK).clamp(max=v.scales.shape[0] - 1)
    byte = v.scales.int()[slot].unflatten(1, (num_heads, -1))[..., 0]  # [T, H]
    byte = torch.where(segment[:, None] >= 0, byte, 0)
    index = segment.clamp(min=0)[:, None].expand_as(byte)
    largest = byte.new_zeros(offsets.shape[0], num_heads).scatter_reduce(0, index, byte, "amax").gather(0, index)
    octaves = torch.where(segment[:, None] >= 0, largest - byte, 0).clamp(max=MAX_FOLD_LOG2)
    return torch.ldexp(torch.ones_like(octaves, dtype=torch.float32), -octaves)


def _plain(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Operands:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return Operands(q.to(dtype), k.to(dtype), v.to(dtype), offsets)
