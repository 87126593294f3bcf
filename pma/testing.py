"""For tests and benchmarks: input makers, error budgets, the oracle, frozen SQNR floors, hardware marks.

Budgets are derived, not tuned: a kernel may err twice as much as eager PyTorch with the same rounding points
(`KERNEL_BUDGET`), plain float32 work a few units in the last place (`ULPS_FP32`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pma.modules import PMA

# Streams of random numbers must not coincide: events that repeat the weights make attention artificially sharp.
_EVENTS, _WEIGHTS, _DOUT, _LENGTHS = (1_000_003 * i for i in range(4))

KERNEL_BUDGET = 2.0
ULPS_FP32 = 16 * torch.finfo(torch.float32).eps
ULPS_FP16 = 2 * torch.finfo(torch.float16).eps  # of scores in fp16: their rounding and that of their factor
E4M3_ROUNDING = 2.0**-4  # largest relative error of a rounding to E4M3
FP8_SUM_ROUNDING = 2.0**-13  # of a sum that Hopper's tensor core adds 32 products to: about 13 bits, truncated
NASTY_LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129)

# SQNR floors in dB of precision="mxfp8" against "fp32" (fp32 dQ, fp16 dQ), half a decibel below what the reference
# measures on `benchmarks.numerics`' default problem, which prints measured and source figures beside them.
SQNR_FLOORS: dict[str, tuple[float, float]] = {
    "forward_output": (22.6, 22.6),
    "event_embs.grad": (20.6, 20.6),
    "seed_embs.grad": (20.5, 20.5),
    "query_norm.weight.grad": (20.4, 20.4),
    "query_proj.weight.grad": (20.5, 20.5),
    "key_norm.weight.grad": (21.3, 21.3),
    "key_proj.weight.grad": (20.3, 20.3),
}


def make_jagged(
    lengths: Sequence[int], embed_dim: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Standard-normal events of the given lengths. → events [Σ lengths, E] dtype, offsets [B+1] int64."""
    generator = torch.Generator().manual_seed(seed + _EVENTS)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.randn(int(offsets[-1]), embed_dim, generator=generator).to(dtype), offsets


def make_pma(seed: int = 0, projection_gain: float = 1.0, **arguments: Any) -> PMA:
    """A PMA with weights drawn from `seed` alone: seeds standard normal, projections std projection_gain/√E.

    The same seed gives the same weights whatever precision, numerics or device the arguments say.
    """
    module = PMA(**arguments)
    generator = torch.Generator().manual_seed(seed + _WEIGHTS)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.endswith("norm.weight"):
                std = 1.0 if name == "seed_embs" else projection_gain / math.sqrt(module.embed_dim)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return module


def uneven_lengths(num_segments: int, max_length: int, *, seed: int = 0) -> list[int]:
    """Lengths drawn uniformly from 0 … max_length."""
    generator = torch.Generator().manual_seed(seed + _LENGTHS)
    return torch.randint(0, max_length + 1, (num_segments,), generator=generator).tolist()


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """10·log10(Σ expected² / Σ (actual − expected)²): inf when equal, NaN when NaN came."""
    actual, expected = actual.detach().double(), expected.detach().double()
    noise, signal = (actual - expected).square().sum(), expected.square().sum()
    return float(10.0 * torch.log10(signal / noise)) if noise != 0 else math.inf


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; 0 when both are 0."""
    actual, expected = actual.detach().double(), expected.detach().double()
    error = (actual - expected).norm()
    return 0.0 if error == 0 else float(error / expected.norm())


def make_dout(out: Tensor, *, seed: int = 0) -> Tensor:
    """Standard-normal output gradient, like `out`."""
    generator = torch.Generator().manual_seed(seed + _DOUT)
    return torch.randn(out.shape, generator=generator).to(out)


def run_with_gradients(
    module: PMA, events: Tensor, offsets: Tensor, *, seed: int = 0, dout: str = "normal"
) -> dict[str, Tensor]:
    """Output and every named gradient of `module`; the output gradient is standard normal from `seed`, or "ones"."""
    module.zero_grad(set_to_none=True)
    leaf = events.detach().clone().requires_grad_()
    out = module(leaf, offsets)
    out.backward(torch.ones_like(out) if dout == "ones" else make_dout(out, seed=seed))
    grads = {f"{name}.grad": p.grad for name, p in module.named_parameters()}
    return {"forward_output": out.detach(), "event_embs.grad": leaf.grad, **grads}


def oracle(module: PMA, events: Tensor, offsets: Tensor) -> Tensor:
    """The module's mathematics, segment by segment in plain differentiable PyTorch, no rounding. → [B, S, E] float64.

    Differentiable in `events` and the module's parameters; shares no code with `pma.reference`.
    """

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (module.embed_dim,), weight.double(), module.norm_eps)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (module.num_heads, -1)).transpose(0, 1)

    q = heads(norm(module.seed_embs.double(), module.query_norm.weight) @ module.query_proj.weight.double().t())
    pooled = []
    for first, last in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        x = norm(events[first:last].double(), module.key_norm.weight)
        k = heads(x @ module.key_proj.weight.double().t())
        v = heads(x if module.value_proj is None else x @ module.value_proj.weight.double().t())
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        out = scores.softmax(-1) @ v if last > first else torch.zeros_like(q)
        pooled.append(out.transpose(0, 1).flatten(1))
    shape = (offsets.shape[0] - 1, module.num_seeds, module.embed_dim)
    return torch.stack(pooled) if pooled else events.new_zeros(shape, dtype=torch.float64)
