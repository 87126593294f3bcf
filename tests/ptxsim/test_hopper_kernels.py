"""Unmodified sm_90a kernels of FlashAttention-4 and quack: right, and without findings."""

import math

import numpy as np
import pytest
import torch

import ptxsim

cutlass = pytest.importorskip("cutlass")
attention = pytest.importorskip("flash_attn.cute.interface")
gemm_module = pytest.importorskip("quack.gemm")

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

pytestmark = pytest.mark.ptxsim
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would run a kernel on host memory")

HEAD = 128
OUTPUT_BUDGET = 6e-3  # relative error of a bf16 output in the Frobenius norm: rounding of P and of O
LSE_BUDGET = 2e-5  # absolute, fp32


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(O [s, h, d], log-sum-exp [h, s]) of [s, h, d] tensors in float64."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), v))
    v = v.repeat_interleave(len(q) // len(v), 0)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~allowed, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


@without_gpu
@pytest.mark.parametrize(
    ("length", "heads", "heads_kv", "causal", "checks"),
    [
        (384, 1, 1, True, True),
        (200, 2, 1, True, False),
        (256, 1, 1, False, False),
        (384, 1, 1, False, True),
    ],
)
def test_attention(length: int, heads: int, heads_kv: int, causal: bool, checks: bool) -> None:
    generator = torch.Generator().manual_seed(length + heads)
    q, k, v = (
        torch.randn(1, length, number, HEAD, generator=generator).bfloat16() for number in (heads, heads_kv, heads_kv)
    )
    with ptxsim.simulate(arch="sm_90a", num_sms=132, seed=1, checks=checks) as simulation:
        output, lse = attention._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2]
    expected, expected_lse = reference(q[0], k[0], v[0], causal)
    assert relative_error(output[0], expected) < OUTPUT_BUDGET
    assert (lse[0].double() - expected_lse).abs().max() < LSE_BUDGET
    assert not simulation.findings
    assert simulation.launches[0].num_mma


@without_gpu
@pytest.mark.parametrize(
    ("shape", "tile", "cluster", "num_sms", "checks"),
    [
        ((256, 256, 512), (128, 128), (1, 1), 1, True),
        ((512, 512, 256), (128, 256), (2, 1), 2, False),
        ((200, 136, 200), (128, 128), (1, 1), 2, False),
    ],
)
def test_gemm(
    shape: tuple[int, int, int], tile: tuple[int, int], cluster: tuple[int, int], num_sms: int, checks: bool
) -> None:
    """quack's bf16 GEMM: persistent, with a cluster that multicasts, and with ragged edges."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n)
    a = torch.randint(-3, 4, (1, m, k), generator=generator).bfloat16()
    b = torch.randint(-3, 4, (1, n, k), generator=generator).bfloat16()
    d = torch.full((1, m, n), math.nan).bfloat16()
    with ptxsim.simulate(arch="sm_90a", num_sms=num_sms, seed=1, checks=checks) as simulation:
        gemm_module.gemm(a, b, d, None, None, *tile, *cluster)
    expected = (a[0].double() @ b[0].double().T).bfloat16()  # the sums are exact in fp32
    np.testing.assert_array_equal(d[0].float().numpy(), expected.float().numpy())
    assert not simulation.findings


@cute.kernel
def _permute(output: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor(8, cutlass.Int32)
    for i in cutlass.range_constexpr(8):
        values[i] = thread * 8 + i
    values[thread * 3 % 8] = -thread
    output[thread] = values[thread % 8]


@cute.jit
def _launch_permute(output: cute.Tensor) -> None:
    _permute(output).launch(grid=(1, 1, 1), block=(64, 1, 1))


@without_gpu
def test_index_of_registers_in_a_register() -> None:
    """The compiler puts such an array into local memory."""
    output, texts = torch.zeros(64, dtype=torch.int32), []
    with ptxsim.simulate(arch="sm_90a", patch=lambda ptx, name: texts.append(ptx) or ptx) as simulation:
        _launch_permute(from_dlpack(output))
    thread = torch.arange(64, dtype=torch.int32)
    assert "st.local" in texts[0]
    assert torch.equal(output, torch.where(thread % 8 == thread * 3 % 8, -thread, thread * 8 + thread % 8))
    assert not simulation.findings


FAULTS = {
    "wgmma.wait_group.sync.aligned 	0;": "wgmma registers used before wait",
    "wgmma.fence.sync.aligned;": "wgmma registers changed without fence",
}


@without_gpu
@pytest.mark.parametrize("text", FAULTS)
def test_planted_fault(text: str) -> None:
    """Instructions taken out of a kernel are missed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 256, 1, HEAD, generator=generator).bfloat16() for _ in range(3))

    def remove(ptx: str, name: str) -> str:
        assert text in ptx
        return ptx.replace(text, "")

    with ptxsim.simulate(arch="sm_90a", num_sms=132, seed=1, patch=remove) as simulation:
        attention._flash_attn_fwd(q, k, v, causal=False, return_lse=True)
    assert FAULTS[text] in {finding.kind for finding in simulation.findings}
