"""Times and clocks of kernels whose speed `ptxsim.timeline` predicts: what `ptxsim/timeline/measured.py` compares with.

    python -m benchmarks.hopper_kernels
    ncu --clock-control none --profile-from-start off --metrics sm__cycles_active.avg,gpu__time_duration.sum \\
        python -m benchmarks.hopper_kernels --once

Each runs alone for most of a second (`sustained.py`). Appends to results/hopper_kernels.jsonl. --once runs each kernel
once where a profiler watches, which counts cycles: under load the clock that NVML tells is higher than what cycles and
times say.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator

import torch

from benchmarks import record
from benchmarks.sustained import measure
from pma.kernels.quantize import any_arch as quantize
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward import any_arch as rmsnorm_backward
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec

EPS = 1e-6
Case = tuple[Callable[[], object], dict[str, float]]  # the call; its work: "FLOP" or "bytes", and what shape it has


def attention(is_causal: bool, batch: int, length: int, heads: int) -> Iterator[tuple[str, Case]]:
    flash = importlib.import_module("flash_attn.cute.interface")
    q, k, v, dout = (torch.randn(batch, length, heads, 128, device="cuda").bfloat16() for _ in range(4))
    flop = 4.0 * batch * heads * length**2 * 128 / (2 if is_causal else 1)
    out, lse = flash._flash_attn_fwd(q, k, v, causal=is_causal, return_lse=True)[:2]
    name = "_causal" if is_causal else ""
    forward = lambda: flash._flash_attn_fwd(q, k, v, causal=is_causal, return_lse=True)  # noqa: E731
    yield f"flash_forward{name}_h200", (forward, {"FLOP": flop})
    backward = lambda: flash._flash_attn_bwd(q, k, v, out, dout, lse, causal=is_causal)  # noqa: E731
    yield f"flash_backward{name}_h200", (backward, {"FLOP": 2.5 * flop})


def gemm(size: int) -> Iterator[tuple[str, Case]]:
    module = importlib.import_module("quack.gemm")
    a, b = (torch.randn(1, size, size, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    yield "gemm_h200", (lambda: module.gemm(a, b, out, None, None, 128, 256, 2, 1), {"FLOP": 2.0 * size**3})


def memory_bound(rows: int, columns: int) -> Iterator[tuple[str, Case]]:
    norm = importlib.import_module("quack.rmsnorm")
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randint(0, rows + 1, (1023,), generator=generator).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([rows])]).cuda()
    x, dy, out = (torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    weight, rstd = torch.randn(columns, device="cuda"), torch.rand(rows, device="cuda")
    size = float(rows * columns)
    yield f"copy_{columns}", (lambda: out.copy_(x), {"bytes": 4 * size})
    yield (
        f"rmsnorm_{columns}_h200",
        (lambda: norm._rmsnorm_fwd(x, weight, out, rstd=rstd, eps=EPS), {"bytes": 4 * size + 4 * rows}),
    )
    spec = QuantizeSpec(columns, x.dtype, offsets.dtype, weight_dtype=weight.dtype)
    yield (
        f"rmsnorm_quantize_{columns}_h200",
        (
            lambda: quantize.launch(spec, x, offsets, weight=weight, eps=EPS),
            {"bytes": (3 + 1 / 1024) * size + 4 * rows},
        ),
    )
    dv = quantize.launch(QuantizeSpec(columns, dy.dtype, offsets.dtype), dy, offsets)
    backward = RMSNormBackwardSpec(columns, x.dtype, dy.dtype, weight.dtype, offsets.dtype, adds_dv=True)
    call = lambda: rmsnorm_backward.launch(backward, dy, x, weight, rstd, offsets, (dv.data, dv.scales))  # noqa: E731
    yield f"rmsnorm_backward_{columns}_h200", (call, {"bytes": (7 + 1 / 1024) * size + 4 * rows})


def cases() -> Iterator[tuple[str, Case]]:
    yield from attention(False, 16, 8192, 16)
    yield from attention(True, 16, 8192, 16)
    yield from gemm(8192)
    yield from memory_bound(4_000_000, 384)
    yield from memory_bound(1_000_000, 1024)


def run_once() -> None:
    for name, (call, work) in cases():
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(name, work, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="each kernel once, for a profiler")
    if parser.parse_args().once:
        return run_once()
    rows = []
    for name, (call, work) in cases():
        row = {"case": name} | measure(call) | work
        row["TFLOP/s"] = round(work.get("FLOP", 0) / row["ms"] / 1e9, 1)
        row["TB/s"] = round(work.get("bytes", 0) / row["ms"] / 1e9, 3)
        rows.append(row)
        print(
            f"{name:32} {row['ms']:9.4f} ms {row['TFLOP/s']:8.1f} TFLOP/s {row['TB/s']:6.2f} TB/s at "
            f"{row['clock MHz']:.0f} MHz, {row['power W']:.0f} W", flush=True,
        )  # fmt: skip
    print(record.append("hopper_kernels", rows))


if __name__ == "__main__":
    main()
