"""Kernels that are compared with published figures, and our own, as cases of `python -m ptxsim timeline`."""

import contextlib
import importlib
from typing import Any
from unittest import mock

import attention_cases as attention
import quack_cases as quack
import torch

import ptxsim
from pma.jagged import equal_offsets
from pma.kernels import device_facts
from pma.kernels.attention_forward.spec import AttentionForwardSpec
from pma.layouts import dequantize, quantize, scatter_scales
from pma.numerics import AttentionNumerics

Options = dict[str, Any]
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


def cudnn_forward(options: Options) -> None:
    attention.cudnn_forward(128, 2048, 1, is_causal=False, num_sms=152, **options)


def gemm(options: Options) -> None:
    quack.bf16_gemm(512, 512, 4096, (256, 256), (2, 1), num_sms=2, **options)


def flash_forward_h200(options: Options) -> None:
    attention.flash_forward([4096], is_causal=False, num_sms=132, **options)


def gemm_h200(options: Options) -> None:
    quack.bf16_gemm(512, 512, 4096, (128, 256), (2, 1), num_sms=2, **options)


# ------------------------------------------------------------------------------------------------------ our own


def attention_forward_mxfp8(options: Options) -> None:
    """256 seeds of one head against one segment of 2,048 events."""
    _attention_forward((2048,), num_seeds=256, num_heads=1, options=options)


def attention_forward_own_seeds(options: Options) -> None:
    """The same with seeds that belong to the segment."""
    _attention_forward((2048,), num_seeds=256, num_heads=1, options=options, is_shared=False)


def attention_forward_jagged(options: Options) -> None:
    """Like a recommender: three heads, 512 seeds, segments of 300 to 2,000 events, one CTA for all of a head's."""
    _attention_forward((300, 2000, 700, 1200, 450, 900), num_seeds=512, num_heads=3, options=options)


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
        matrix = quantize(torch.randn(int(each[-1]), spec.columns, generator=generator), each)
        tiles = scatter_scales(matrix.scales, each, matrix.data.shape[0], direction)
        heads = dequantize(*matrix, each, torch.float64).unflatten(1, (num_heads, -1))
        return heads, sm100.AttentionOperand(matrix.data, tiles)

    (q, q_operand), (k, k_operand), (v, v_operand) = (
        operand(*each) for each in ((seed_offsets, "row"), (offsets, "row"), (offsets, "column"))
    )
    with (
        ptxsim.simulate(num_sms=spec.groups, **options),
        mock.patch.object(sm100, "device_facts", lambda device: FACTS[options.get("arch", "sm_100a")]),
        mock.patch.object(sm100, "num_multiprocessors", lambda device: spec.groups),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        out = sm100.launch(spec, q_operand, k_operand, v_operand, offsets).out
    for segment, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        seeds = q if is_shared else q[seed_offsets[segment] : seed_offsets[segment + 1]]
        exact, _ = attention.attention(seeds, k[begin:end], v[begin:end], is_causal=False)
        assert attention.relative_error(out[segment], exact) < attention.MXFP8_ERROR
