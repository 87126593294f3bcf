"""PMA as a function of its parameters; `pma.PMA` holds them for you."""

from typing import NamedTuple

import torch
from torch import Tensor

from pma.checks import UnsupportedError
from pma.jagged import JaggedInput, to_values_and_offsets
from pma.ops.autograd import PlainAttentionFunction, PMAConfig, PMAFunction, without_autocast


class PMAWeights(NamedTuple):
    """Parameters of one PMA, all float, on one device."""

    seeds: Tensor  # [S, E]
    query_norm: Tensor  # [E]
    query_proj: Tensor  # [E, E]
    key_norm: Tensor  # [E]
    key_proj: Tensor  # [E, E]
    value_proj: Tensor | None = None  # [E, E]; None: the values are the normalised events


def pooled_attention(events: Tensor, offsets: Tensor, weights: PMAWeights, config: PMAConfig) -> Tensor:
    """Pool each segment's events by MXFP8 attention of the shared seeds.

    Args:
        events: [T, E] float, any strides.    offsets: [B+1] int32 or int64, on the same device.
        weights: see `PMAWeights`.    config: see `PMAConfig`; `PMA.config()` makes one.
    Returns:
        [B, S, E] in config.out_dtype; 0 for empty segments. Differentiable once in events and every weight; rows of
        events outside the offsets get gradient 0. No host sync. Source: MXFP8 FlashAttention-4 report, section 2.
    """
    with without_autocast(events):
        return PMAFunction.apply(events, offsets, *weights, config)


def pooled_attention_unquantized(
    events: Tensor, offsets: Tensor, weights: PMAWeights, config: PMAConfig, dtype: torch.dtype
) -> Tensor:
    """`pooled_attention` without MXFP8: norms and products in float64, rounded to `dtype`.

    Args:
        events, offsets, weights, config: as there.    dtype: bfloat16, float32 or float64.
    Returns:
        [B, S, E] in config.out_dtype. Products accumulate in float64, so that no bit depends on a segment's neighbours.
    """
    with without_autocast(events):
        q = _linear(_rmsnorm(weights.seeds, weights.query_norm, config.norm_eps, dtype), weights.query_proj)
        x = _rmsnorm(_used_rows(events, offsets), weights.key_norm, config.norm_eps, dtype)
        k = _linear(x, weights.key_proj)
        v = x if weights.value_proj is None else _linear(x, weights.value_proj)
        out = PlainAttentionFunction.apply(q, k, v, offsets, config.num_heads)
    return out.to(config.out_dtype)


def mark_dynamic(events: JaggedInput, offsets: Tensor | None = None) -> None:
    """Tell torch.compile that T and B vary, 0 and 1 included, so that one compilation serves every batch.

    Call it on the inputs of the first compiled call.

    Args:
        events, offsets: as passed to the module.
    Raises:
        UnsupportedError: a nested tensor.    TypeError, ValueError: as the module raises.
    """
    if isinstance(events, Tensor) and events.is_nested:
        raise UnsupportedError(
            "mark_dynamic cannot mark a nested events tensor, got one; pass events.values() and events.offsets() to "
            "mark_dynamic and to the module"
        )
    values, offsets = to_values_and_offsets(events, offsets)
    torch._dynamo.decorators.mark_unbacked(values, 0)
    torch._dynamo.decorators.mark_unbacked(offsets, 0)


def _rmsnorm(values: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x = values.double()
    normalised = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return normalised.to(dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.to(x.dtype).double().t()).to(x.dtype)


def _used_rows(events: Tensor, offsets: Tensor) -> Tensor:
    """Events with rows outside the offsets replaced by 0, so that a NaN there reaches nothing."""
    row = torch.arange(events.shape[0], device=events.device)
    inside = (row >= offsets[0]) & (row < offsets[-1])
    return torch.where(inside[:, None], events, 0.0)
