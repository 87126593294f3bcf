"""Kernels that are compared with published figures, as cases of `python -m ptxsim timeline`."""

from typing import Any

import attention_cases as attention
import quack_cases as quack

Options = dict[str, Any]


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
