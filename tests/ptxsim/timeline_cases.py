"""Kernels that are compared with published figures, and our own, as cases of `python -m ptxsim timeline`."""

import contextlib
import importlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import attention_cases as attention
import quack_cases as quack
import torch

import ptxsim
from pma.jagged import equal_offsets
from pma.kernels import device_facts
from pma.kernels.attention_backward.spec import AttentionBackwardSpec
from pma.kernels.attention_forward.spec import AttentionForwardSpec
from pma.kernels.projection.spec import GemmQuantizeSpec
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec
from pma.kernels.weight_grad.spec import WeightGradSpec
from pma.layouts import MXFP8Tensor, dequantize, quantize, scatter_scales
from pma.numerics import AttentionNumerics

Options = dict[str, Any]
JAGGED_LENGTHS = (300, 2000, 700, 1200, 450, 900)
FACTS = {facts.arch: facts for facts in (device_facts.SM90, device_facts.SM100, device_facts.SM103)}


def flash_forward(options: Options) -> None:
    attention.flash_forward([4096], is_causal=False, num_sms=148, **options)


def flash_forward_causal(options: Options) -> None:
    attention.flash_forward([2048], is_causal=True, num_sms=152, **options)


def flash_forward_gb300(options: Options) -> None:
    attention.flash_forward([2048], is_causal=False, num_sms=152, **options)


def flash_backward(options: Options) -> None:
    attention.flash_backward([2048], is_causal=False, num_sms=152, **options)


flash_backward_gb300 = flash_backward


def flash_forward_jagged(options: Options) -> None:
    """The problem of `attention_forward_jagged`: a launch for each segment, as FA4 takes a CTA for each tile of Q, and
    a trace holds one. Heads and tiles of seeds are alike."""
    for length in JAGGED_LENGTHS:
        attention.flash_cross_forward(512, [length], 1, num_sms=152, **options)


def flash_forward_jagged_dynamic(options: Options) -> None:
    """The same with one CTA for the 256 seeds of a tile of Q and all segments."""
    attention.flash_cross_forward(256, list(JAGGED_LENGTHS), 1, scheduler="dynamic", num_sms=1, **options)


def flash_forward_jagged_dense(options: Options) -> None:
    """The same, seeds not as sequences of any lengths: a pair of CTAs for 512 seeds and all segments."""
    attention.flash_cross_forward(512, list(JAGGED_LENGTHS), 1, scheduler="dense", num_sms=2, **options)


def cudnn_forward(options: Options) -> None:
    attention.cudnn_forward(128, 2048, 1, is_causal=False, num_sms=152, **options)


def gemm(options: Options) -> None:
    quack.bf16_gemm(512, 512, 4096, (256, 256), (2, 1), num_sms=2, **options)


def flash_forward_h200(options: Options) -> None:
    attention.flash_forward([4096], is_causal=False, num_sms=132, **options)


def gemm_h200(options: Options) -> None:
    quack.bf16_gemm(512, 512, 4096, (128, 256), (2, 1), num_sms=2, **options)


def flash_backward_h200(options: Options) -> None:
    attention.flash_backward([1024], is_causal=False, num_sms=132, **options)


def rmsnorm_h200(options: Options) -> None:
    """quack's RMSNorm, one CTA of it."""
    norm, generator = importlib.import_module("quack.rmsnorm"), torch.Generator().manual_seed(3)
    x, weight = torch.randn(4, 384, generator=generator).bfloat16(), torch.randn(384, generator=generator)
    out, rstd = torch.zeros_like(x), torch.zeros(4)
    with ptxsim.simulate(num_sms=132, **options):
        norm._rmsnorm_fwd(x, weight, out, rstd=rstd)
    assert attention.relative_error(out, reference_norm(x, weight)) < attention.BF16_ERROR


def reference_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


def rmsnorm_quantize_h200(options: Options) -> None:
    """Ours, 4,096 rows of 384 in segments of odd lengths on one SM."""
    any_arch = importlib.import_module("pma.kernels.quantize.any_arch")
    offsets, generator = torch.tensor([0, 700, 1801, 4096]), torch.Generator().manual_seed(3)
    x, weight = torch.randn(4096, 384, generator=generator).bfloat16(), torch.randn(384, generator=generator)
    spec = QuantizeSpec(384, x.dtype, offsets.dtype, weight_dtype=weight.dtype)
    with _gpu(any_arch, 1, options):
        actual = any_arch.launch(spec, x, offsets, weight=weight, eps=1e-6)
    exact = dequantize(actual.data, actual.scales, offsets)
    assert attention.relative_error(exact, reference_norm(x, weight)) < attention.MXFP8_ERROR


def rmsnorm_backward_h200(options: Options) -> None:
    """Ours with dV, as many rows."""
    any_arch = importlib.import_module("pma.kernels.rmsnorm_backward.any_arch")
    offsets, generator = torch.tensor([0, 700, 1801, 4096]), torch.Generator().manual_seed(3)
    x, dy = (torch.randn(4096, 384, generator=generator).bfloat16() for _ in range(2))
    weight, rstd = torch.randn(384, generator=generator), (x.float().square().mean(-1) + 1e-6).rsqrt()
    dv = _matrix(offsets, 384, generator)
    spec = RMSNormBackwardSpec(384, x.dtype, dy.dtype, weight.dtype, offsets.dtype, adds_dv=True)
    with _gpu(any_arch, 1, options):
        dx = any_arch.launch(spec, dy, x, weight, rstd, offsets, (dv.data, dv.scales))[0]
    total, x_hat = dy.double() + dequantize(*dv, offsets, torch.float64), x.double() * rstd[:, None].double()
    g = total * weight.double()
    exact = rstd[:, None].double() * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    assert attention.relative_error(dx, exact) < attention.BF16_ERROR


# ------------------------------------------------------------------------------------------------------ our own


def attention_forward_mxfp8(options: Options) -> None:
    """256 seeds of one head against one segment of 2,048 events."""
    _attention_forward((2048,), num_seeds=256, num_heads=1, options=options)


def attention_forward_own_seeds(options: Options) -> None:
    """The same with seeds that belong to the segment."""
    _attention_forward((2048,), num_seeds=256, num_heads=1, options=options, is_shared=False)


def attention_forward_jagged(options: Options) -> None:
    """Like a recommender: three heads, 512 seeds, segments of 300 to 2,000 events, one CTA for all of a head's."""
    _attention_forward(JAGGED_LENGTHS, num_seeds=512, num_heads=3, options=options)


def gemm_quantize_384(options: Options) -> None:
    """1,536 rows in two segments, twelve row tiles or more of one CTA."""
    sm100 = importlib.import_module("pma.kernels.projection.sm100")
    offsets, whole = torch.tensor([0, 700, 1536]), torch.tensor([0, 384])
    generator = torch.Generator().manual_seed(1)
    x, weight = (_matrix(rows, 384, generator) for rows in (offsets, whole))
    exact = dequantize(*x, offsets, torch.float64) @ dequantize(*weight, whole, torch.float64).T
    with _gpu(sm100, 1, options):
        actual = sm100.launch(
            GemmQuantizeSpec(384, 384, torch.int64),
            sm100.ProjectionOperand(x.data, scatter_scales(x.scales, offsets, 1536, "row")),
            sm100.ProjectionOperand(weight.data, scatter_scales(weight.scales, whole, 384, "row")),
            offsets,
        )
    assert attention.relative_error(dequantize(actual.out, actual.scales, offsets), exact) < attention.MXFP8_ERROR


def weight_grad_384(options: Options) -> None:
    """3,000 tokens of two segments, a cluster of three CTAs."""
    sm100 = importlib.import_module("pma.kernels.weight_grad.sm100")
    offsets, generator = torch.tensor([0, 1300, 3000]), torch.Generator().manual_seed(1)
    dout, x = (_matrix(offsets, 384, generator) for _ in range(2))
    exact = dequantize(*dout, offsets, torch.float64).T @ dequantize(*x, offsets, torch.float64)
    operands = (MXFP8Tensor(each.data, scatter_scales(each.scales, offsets, 3000, "column")) for each in (dout, x))
    with _gpu(sm100, 3, options):
        actual = sm100.launch(WeightGradSpec(384, 384, torch.int64), *operands, offsets)
    assert attention.relative_error(actual, exact) < attention.BF16_ERROR


def _matrix(offsets: torch.Tensor, columns: int, generator: torch.Generator) -> MXFP8Tensor:
    return quantize(torch.randn(int(offsets[-1]), columns, generator=generator), offsets)


@contextlib.contextmanager
def _gpu(sm100: ModuleType, num_sms: int, options: Options) -> Iterator[None]:
    """A launcher of ours in the simulator."""
    facts = FACTS[options.get("arch", "sm_100a")]
    with (
        ptxsim.simulate(num_sms=num_sms, **options),
        mock.patch.object(sm100, "device_facts", lambda device: facts),
        mock.patch.object(sm100, "num_multiprocessors", lambda device: num_sms, create=True),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        yield


def _attention_forward(
    lengths: tuple[int, ...], num_seeds: int, num_heads: int, options: Options, is_shared: bool = True
) -> None:
    sm100 = importlib.import_module("pma.kernels.attention_forward.sm100")
    spec = AttentionForwardSpec(
        attention.HEAD_DIM, num_heads, num_seeds, is_shared, AttentionNumerics(), torch.bfloat16, torch.int64
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    seed_offsets = equal_offsets(1 if is_shared else len(lengths), num_seeds, offsets.device)
    generator = torch.Generator().manual_seed(1)

    def operand(each: torch.Tensor, direction: str) -> tuple[torch.Tensor, Any]:
        matrix = _matrix(each, spec.columns, generator)
        tiles = scatter_scales(matrix.scales, each, matrix.data.shape[0], direction)
        heads = dequantize(*matrix, each, torch.float64).unflatten(1, (num_heads, -1))
        return heads, sm100.AttentionOperand(matrix.data, tiles)

    (q, q_operand), (k, k_operand), (v, v_operand) = (
        operand(*each) for each in ((seed_offsets, "row"), (offsets, "row"), (offsets, "column"))
    )
    with _gpu(sm100, spec.groups, options):
        out = sm100.launch(spec, q_operand, k_operand, v_operand, offsets).out
    for segment, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        seeds = q if is_shared else q[seed_offsets[segment] : seed_offsets[segment + 1]]
        exact, _ = attention.attention(seeds, k[begin:end], v[begin:end], is_causal=False)
        assert attention.relative_error(out[segment], exact) < attention.MXFP8_ERROR


def attention_backward_mxfp8(options: Options) -> None:
    """512 seeds of one head against one segment of 1,024 events."""
    _attention_backward(1024, 512, AttentionNumerics(), options)


def attention_backward_half_dq(options: Options) -> None:
    """The same with dQ summed in fp16."""
    _attention_backward(1024, 512, AttentionNumerics(dq_accumulation="fp16"), options)


def _attention_backward(length: int, num_seeds: int, numerics: AttentionNumerics, options: Options) -> None:
    sm100 = importlib.import_module("pma.kernels.attention_backward.sm100")
    spec = AttentionBackwardSpec(attention.HEAD_DIM, 1, num_seeds, True, numerics, torch.int64)
    generator = torch.Generator().manual_seed(1)

    def operand(rows: int) -> tuple[torch.Tensor, Any]:
        offsets = torch.tensor([0, rows])
        matrix = quantize(torch.randn(rows, spec.columns, generator=generator), offsets)
        tiles = (scatter_scales(matrix.scales, offsets, rows, direction) for direction in ("row", "column"))
        return dequantize(*matrix, offsets, torch.float64), sm100.BackwardOperand(matrix.data, *tiles)

    (q, q_operand), (k, k_operand), (v, v_operand), (dout, dout_operand) = (
        operand(rows) for rows in (num_seeds, length, length, num_seeds)
    )
    leaves = [each[:, None].clone().requires_grad_() for each in (q, k, v)]
    out, lse = attention.attention(*leaves, is_causal=False)
    exact = [each[:, 0] for each in torch.autograd.grad(out, leaves, dout[:, None])]
    delta = (out[:, 0].detach() * dout).sum(-1, keepdim=True).float()
    lse = lse.detach()[None]
    row_sum_log2 = ((lse - (q @ k.T / math.sqrt(spec.head_dim)).amax(-1)) / math.log(2.0)).floor().int()
    saved = sm100.SavedState(delta, lse.float(), row_sum_log2)
    offsets = torch.tensor([0, length])
    with (
        ptxsim.simulate(num_sms=1, **options),
        mock.patch.object(sm100, "device_facts", lambda device: FACTS[options.get("arch", "sm_100a")]),
        mock.patch.object(sm100, "num_multiprocessors", lambda device: 1),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        result = sm100.launch(spec, q_operand, k_operand, v_operand, offsets, dout_operand, saved)
    dk, dv = (dequantize(each.data, each.scales, offsets) for each in (result.dk, result.dv))
    for actual, expected in zip((result.dq, dk, dv), exact, strict=True):
        assert attention.relative_error(actual, expected) < attention.MXFP8_GRADIENT_ERROR
