"""Kernels that nobody here wrote, on a Hopper GPU or in the simulator: the same inputs, outputs to compare.

    python tests/ptxsim/hardware_cases.py FILE.npz [--simulated]

A process does one or the other: what a framework compiled and kept for a GPU can't be run in the simulator.
"""

import argparse
import contextlib
import importlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

HEAD_DIM = 128


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).bfloat16()


def rmsnorm(device: str) -> dict[str, Tensor]:
    """quack's forward and backward."""
    module, generator = importlib.import_module("quack.rmsnorm"), torch.Generator().manual_seed(3)
    x, dout, weight = (_normal(generator, *shape).to(device) for shape in ((37, 1024), (37, 1024), (1024,)))
    out, dx = torch.zeros_like(x), torch.zeros_like(x)
    rstd, dw = torch.zeros(37, device=device), torch.zeros(2, 1024, device=device)
    module._rmsnorm_fwd(x, weight, out, rstd=rstd)
    module._rmsnorm_bwd(x, weight, dout, rstd, dx, dw, None, None, None, 2)
    return {"out": out, "rstd": rstd, "dx": dx, "dw": dw}


def gemm(device: str) -> dict[str, Tensor]:
    """quack's sm90 GEMM in bf16, persistent, a cluster that multicasts."""
    generator = torch.Generator().manual_seed(5)
    a, b = (_normal(generator, 1, rows, 256).to(device) for rows in (512, 512))
    out = torch.full((1, 512, 512), float("nan"), device=device).bfloat16()
    importlib.import_module("quack.gemm").gemm(a, b, out, None, None, 128, 256, 2, 1)
    return {"out": out}


def _attention(device: str, length: int, heads: int, kv_heads: int, is_causal: bool) -> dict[str, Tensor]:
    flash, generator = importlib.import_module("flash_attn.cute.interface"), torch.Generator().manual_seed(length)
    q, dout = (_normal(generator, 1, length, heads, HEAD_DIM).to(device) for _ in range(2))
    k, v = (_normal(generator, 1, length, kv_heads, HEAD_DIM).to(device) for _ in range(2))
    out, lse = flash._flash_attn_fwd(q, k, v, causal=is_causal, return_lse=True)[:2]
    results = {"out": out, "lse": lse}
    if length <= 128:  # one tile of keys: no atomic order in dQ
        dq, dk, dv = flash._flash_attn_bwd(q, k, v, out, dout, lse, causal=is_causal)[:3]
        results |= {"dq": dq, "dk": dk, "dv": dv}
    return results


def attention(device: str) -> dict[str, Tensor]:
    return _attention(device, 384, 2, 1, False)


def attention_causal(device: str) -> dict[str, Tensor]:
    return _attention(device, 200, 2, 1, True)


def attention_with_gradients(device: str) -> dict[str, Tensor]:
    return _attention(device, 128, 1, 1, False)


CASES: tuple[Callable[[str], dict[str, Tensor]], ...] = (
    rmsnorm, gemm, attention, attention_causal, attention_with_gradients,
)  # fmt: skip


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--simulated", action="store_true")
    arguments = parser.parse_args()
    context: contextlib.AbstractContextManager = contextlib.nullcontext()
    if arguments.simulated:
        context = importlib.import_module("ptxsim").simulate(arch="sm_90a", num_sms=132, seed=1, checks=False)
    results = {}
    with context:
        for case in CASES:
            for name, tensor in case("cpu" if arguments.simulated else "cuda").items():
                results[f"{case.__name__}.{name}"] = tensor
    np.savez_compressed(arguments.file, **{name: bits(tensor) for name, tensor in results.items()})


if __name__ == "__main__":
    main()
