"""Kernels that nobody here wrote, unmodified, right against float64 and silent under every checker."""

from collections.abc import Callable
from pathlib import Path

import attention_cases as attention
import pytest
import quack_cases as quack

from pma.testing import ULPS_FP32, relative_error
from ptxsim.checks.findings import read_suppressions

pytestmark = [pytest.mark.ptxsim]
SUPPRESSIONS = read_suppressions(Path(__file__).parent / "suppressions.toml")
SEEDS = range(20)
BF16_ROUNDING = 2.0**-8

# name → (case, arguments). Shapes wrap the pipelines: more tiles than stages, more than one tile for each CTA.
FAST: dict[str, Callable] = {
    "gemm mxfp8": lambda **o: quack.mxfp8_gemm(384, 128, 1536, num_sms=1, **o),
    "gemm mxfp8, 2 CTAs": lambda **o: quack.mxfp8_gemm(512, 512, 256, (256, 256), (2, 1), num_sms=2, **o),
    "gemm mxfp8, quantised output": lambda **o: quack.mxfp8_gemm_quantized(256, 256, 256, num_sms=1, **o),
    "gemm mxfp8, varlen m": lambda **o: quack.mxfp8_gemm_varlen_m([100, 256, 37, 131], 128, 256, num_sms=1, **o),
    "gemm mxfp8, varlen k": lambda **o: quack.mxfp8_gemm_varlen_k([100, 256, 37, 131], 128, 128, num_sms=1, **o),
    "gemm mxfp8, launch control": lambda **o: quack.mxfp8_gemm(
        512, 512, 256, gemm_options={"is_dynamic_persistent": True}, num_sms=4, **o
    ),
    "gemm bf16, ragged": lambda **o: quack.bf16_gemm(200, 136, 72, (128, 64), (1, 1), num_sms=2, **o),
    "gemm bf16, MN-major, 2 CTAs": lambda **o: quack.bf16_gemm(
        256, 256, 128, (256, 128), (2, 1), is_transposed=True, num_sms=2, **o
    ),
    "gemm bf16, M-major output": lambda **o: quack.bf16_gemm(  # loads 16 rows at a time
        256, 256, 128, (128, 128), (1, 1), is_out_transposed=True, num_sms=2, **o
    ),
    "gemm bf16, 64 rows": lambda **o: quack.bf16_gemm(  # two accumulators in the same columns, 16 lanes apart
        128, 256, 192, (64, 128), (1, 1), num_sms=2, **o
    ),
    "flash forward, causal": lambda **o: attention.flash_forward([384], 2, 1, is_causal=True, num_sms=148, **o),
    "flash forward, 2 CTAs": lambda **o: attention.flash_forward([384], is_causal=False, num_sms=148, **o),
    "flash forward, varlen": lambda **o: attention.flash_forward(
        [130, 256, 17], 2, 1, is_causal=True, is_varlen=True, num_sms=148, **o
    ),
    "flash forward, loads that reduce": lambda **o: attention.flash_forward(
        [384], 1, 1, is_causal=True, arch="sm_103a", num_sms=148, **o
    ),
    "flash backward, causal": lambda **o: attention.flash_backward([256], 2, 1, is_causal=True, num_sms=148, **o),
    "flash backward, 2 CTAs": lambda **o: attention.flash_backward([256], is_causal=False, num_sms=148, **o),
    "cudnn mxfp8 forward": lambda **o: attention.cudnn_forward(128, 256, 2, is_causal=False, num_sms=148, **o),
}
FULL: dict[str, Callable] = FAST | {
    "gemm mxfp8, quantised output, 2 CTAs": lambda **o: quack.mxfp8_gemm_quantized(
        256, 256, 256, (256, 256), (2, 1), num_sms=2, **o
    ),
    "gemm mxfp8, launch control, 2 CTAs": lambda **o: quack.mxfp8_gemm(
        512, 512, 256, (256, 256), (2, 1), gemm_options={"is_dynamic_persistent": True}, num_sms=4, **o
    ),
    "flash backward, varlen": lambda **o: attention.flash_backward(
        [130, 256, 17], 2, 1, is_causal=True, is_varlen=True, num_sms=148, **o
    ),
    "cudnn mxfp8 forward, causal": lambda **o: attention.cudnn_forward(128, 256, 2, is_causal=True, num_sms=148, **o),
    "cudnn mxfp8 forward, 192": lambda **o: attention.cudnn_forward(192, 256, 1, is_causal=True, num_sms=148, **o),
    "cudnn mxfp8 backward": lambda **o: attention.cudnn_backward(256, is_causal=False, num_sms=148, **o),
    "cudnn mxfp8 backward, causal": lambda **o: attention.cudnn_backward(256, is_causal=True, num_sms=148, **o),
}


def run(case: Callable, **options) -> None:
    simulation = case(suppressions=SUPPRESSIONS, **options)
    assert [str(finding) for finding in simulation.findings] == []


@pytest.mark.parametrize("name", FAST)
def test_right_and_silent(name):
    run(FAST[name], seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FULL)
def test_right_and_silent_whatever_the_order(name, seed):
    run(FULL[name], seed=seed)


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_right_without_checks(name):
    run(FULL[name], checks=False)


def test_rmsnorm_forward_and_backward():
    simulation, results = quack.rmsnorm(16, 1024, num_sms=2, seed=1)
    assert not simulation.findings
    for name, (actual, exact) in results.items():
        budget = ULPS_FP32 if name in ("rstd", "dw") else BF16_ROUNDING
        assert relative_error(actual, exact) < budget, name
