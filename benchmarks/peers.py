"""What a user would run instead of the memory-bound kernels: quack's norm, and torch.compile of the plain formulas.

The formulas know no segments: they quantise 32-row blocks counted from row 0, which is less work than ours.
"""

import torch
from torch import Tensor


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """[T, E] → payload [T, E], scales [T/32, E/32]; for finite values whose scale byte is 1 or more."""
    rows, columns = values.shape
    blocks = values.float().view(rows // 32, 32, columns // 32, 32)
    bits = blocks.abs().amax((1, 3)).view(torch.int32)
    byte = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp_min(1)
    inverse = ((254 - byte) << 23).view(torch.float32)
    payload = (blocks * inverse[:, None, :, None]).to(torch.float8_e4m3fn)
    return payload.view(rows, columns), byte.to(torch.uint8)


def rmsnorm(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = values.float()
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd[:, None] * weight.float(), rstd


def rmsnorm_quantize(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    normalised, rstd = rmsnorm(values, weight, eps)
    return *quantize(normalised), rstd


def quantize_with_delta(dout: Tensor, out: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    payload, scales = quantize(dout)
    delta = (dequantize(payload, scales) * out.float()).view(dout.shape[0], num_heads, -1).sum(-1)
    return payload, scales, delta


def dequantize(payload: Tensor, scales: Tensor) -> Tensor:
    rows, columns = payload.shape
    block_scales = (scales.int() << 23).view(torch.float32)
    return (payload.float().view(rows // 32, 32, columns // 32, 32) * block_scales[:, None, :, None]).view(
        rows, columns
    )


def dequantize_add(dy: Tensor, payload: Tensor, scales: Tensor) -> Tensor:
    return (dy.float() + dequantize(payload, scales)).to(dy.dtype)


def rmsnorm_backward(
    dy: Tensor, values: Tensor, weight: Tensor, rstd: Tensor, payload: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    total = dy.float() + dequantize(payload, scales)
    x_hat = values.float() * rstd[:, None]
    g = total * weight
    dx = rstd[:, None] * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    return dx.to(values.dtype), (total * x_hat).sum(0)


compiled_quantize = torch.compile(quantize, dynamic=False)
compiled_rmsnorm_quantize = torch.compile(rmsnorm_quantize, dynamic=False)
compiled_quantize_with_delta = torch.compile(quantize_with_delta, dynamic=False)
compiled_dequantize_add = torch.compile(dequantize_add, dynamic=False)
compiled_rmsnorm_backward = torch.compile(rmsnorm_backward, dynamic=False)
