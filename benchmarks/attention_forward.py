"""Hopper's attention forward (FP8) beside FlashAttention-4's bf16 kernel, on the source's shapes.

    python -m benchmarks.attention_forward [--max-length 4096 16384] [--uniform] [--variants pma ...] [--check]

768 segments, 512 shared seeds, 3 heads of 128: lengths drawn uniformly from 1 … max-length, with --uniform all of the
greatest. TFLOP/s counts 4·S·T·E of the real events. Standard-normal V; K with a magnitude of 1/2 … 2 for each 32
events. Variants share one run, each alone for most of a second (`sustained.py`). "pma" includes the order of segments,
"kernel-alone" does not; the others change one thing of it (`VARIANTS`).

--check compares seven segments with float64 on the dequantised operands, for V with mean 0 and mean 1, and counts NaN.
"""

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.sustained import measure
from pma.jagged import equal_offsets, row_block_starts
from pma.kernels.attention_forward.hopper_spec import HopperForwardSpec, choose_config
from pma.kernels.attention_forward.shares import work_by_length
from pma.kernels.device_facts import SM90
from pma.layouts import MXFP8Tensor, dequantize, quantize, transpose_payload
from pma.numerics import HOPPER_NUMERICS
from pma.testing import relative_error

DEVICE = "cuda"
PEER = "FlashAttention-4, bf16"
ALONE = "kernel-alone"
HEADROOM = {"p_scale_log2": 4, "rescale_threshold_log2": 4.8}
# What differs from the default: fields of the numerics, fields of the configuration.
VARIANTS: dict[str, tuple[dict, dict]] = {
    "pma": ({}, {}),
    ALONE: ({}, {}),
    "cluster": ({}, {"ctas": 2}),
    "lse-of-product": ({}, {"exact_lse": False}),
    "fp32-sum": ({"denominator": "fp32"}, {}),
    "no-promotion": ({}, {"promotion": 0}),
    "promotion-4": ({}, {"promotion": 4}),
    "promotion-16": ({}, {"promotion": 16}),
    "fp32-scores": ({}, {"scores": "fp32"}),
    "3-stages": ({}, {"stages": 3}),
    "optimistic": ({}, {"optimistic": True}),
    "more-headroom": (HEADROOM, {}),
    "optimistic-more-headroom": (HEADROOM, {"optimistic": True}),
    "forward-order": ({"kv_order": "forward"}, {}),
}


class Shape(NamedTuple):
    """What does not change with the lengths."""

    segments: int
    seeds: int
    heads: int
    head_dim: int

    @property
    def columns(self) -> int:
        return self.heads * self.head_dim


class Problem(NamedTuple):
    """Operands in bf16 and in FP8."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    q8: MXFP8Tensor
    k8: MXFP8Tensor
    v8: MXFP8Tensor
    v_transposed: Tensor


def make_problem(shape: Shape, max_length: int, *, is_uniform: bool, v_mean: float = 0.0) -> Problem:
    host = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, max_length + 1, (shape.segments,), generator=host)
    if is_uniform:
        lengths.fill_(max_length)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(DEVICE)
    rows, generator = int(lengths.sum()), torch.Generator(device=DEVICE).manual_seed(1)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, shape.columns, dtype=torch.bfloat16, device=DEVICE, generator=generator)

    q, k, v = normal(shape.seeds), normal(rows), normal(rows)
    octaves = torch.randint(-2, 3, (-(-rows // 32), 1), device=DEVICE, generator=generator) / 2
    k *= torch.exp2(octaves).to(k.dtype).repeat_interleave(32, 0)[:rows]
    v += v_mean
    headroom, width = HOPPER_NUMERICS.headroom_exponent, shape.head_dim
    seed_offsets = equal_offsets(1, shape.seeds, q.device)
    v8 = quantize(v, offsets, columns_per_scale=width, headroom_exponent=HOPPER_NUMERICS.dp_headroom_exponent)
    return Problem(
        q, k, v, offsets,
        q8=quantize(q, seed_offsets, columns_per_scale=width, headroom_exponent=headroom),
        k8=quantize(k, offsets, columns_per_scale=width, headroom_exponent=headroom),
        v8=v8, v_transposed=transpose_payload(v8.data, offsets),
    )  # fmt: skip


def attention(p: Problem, shape: Shape, variant: str) -> Callable[[], object]:
    """A call of a variant of ours."""
    from pma.kernels.attention_forward import sm90

    numerics, choices = VARIANTS[variant]
    record_ = type(HOPPER_NUMERICS)(**vars(HOPPER_NUMERICS) | numerics)
    spec = HopperForwardSpec(shape.head_dim, shape.heads, shape.seeds, True, record_, torch.bfloat16, p.offsets.dtype)
    if (reason := spec.why_unsupported()) is not None:
        raise ValueError(reason)
    config = choose_config(spec, SM90, **choices)
    q, k, v = (sm90.HopperOperand(*each) for each in (p.q8, p.k8, (p.v_transposed, p.v8.scales)))
    work = work_by_length(p.offsets) if variant == ALONE else None
    return lambda: sm90.launch(spec, q, k, v, p.offsets, config, work)


def flash_attention(p: Problem, shape: Shape) -> Callable[[], object]:
    from flash_attn.cute import flash_attn_varlen_func

    def heads(rows: Tensor) -> Tensor:
        return rows.view(-1, shape.heads, shape.head_dim)

    q, k, v = heads(p.q.repeat(shape.segments, 1)), heads(p.k), heads(p.v)
    q_offsets, k_offsets = equal_offsets(shape.segments, shape.seeds, q.device).int(), p.offsets.int()
    longest = int(p.offsets.diff().max())

    def call() -> object:
        with torch.no_grad():
            return flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=q_offsets, cu_seqlens_k=k_offsets, max_seqlen_q=shape.seeds,
                max_seqlen_k=longest,
            )  # fmt: skip

    return call


def compare(shape: Shape, max_length: int, variants: list[str], *, is_uniform: bool) -> None:
    p = make_problem(shape, max_length, is_uniform=is_uniform)
    events = int(p.offsets[-1])
    calls = {name: attention(p, shape, name) for name in variants} | {PEER: flash_attention(p, shape)}
    problem = f"{shape.segments} segments, {events:,} events, {'all' if is_uniform else 'up to'} {max_length:,}"
    report("attention_forward", problem, calls, shape, 4 * shape.seeds * events * shape.columns)


def report(name: str, problem: str, calls: dict[str, Callable[[], object]], shape: Shape, flops: int) -> None:
    """Measure each call alone, print a table, append it to results/<name>.jsonl."""
    measured = {variant: measure(call) for variant, call in calls.items()}
    print(problem, flush=True)
    rows = []
    for variant, each in measured.items():
        speed, ratio = flops / each["ms"] / 1e9, measured[PEER]["ms"] / each["ms"]
        state = f"{each['clock MHz']:.0f} MHz, {each['power W']} W"
        print(f"    {variant:32}{each['ms']:9.3f} ms{speed:8.0f} TFLOP/s{ratio:7.3f}x  {state}", flush=True)
        rows.append(
            {
                "problem": problem, **shape._asdict(), "variant": variant, **each,
                "TFLOP/s": round(speed, 1), "times peer": round(ratio, 4),
                "protocol": "each alone for 0.8 s, median of the second half",
            }
        )  # fmt: skip
    record.append(name, rows)


def check(shape: Shape, max_length: int, variants: list[str], v_mean: float) -> None:
    """Print the errors of seven segments, from the shortest to the longest."""
    p = make_problem(shape, max_length, is_uniform=False, v_mean=v_mean)
    order = p.offsets.diff().argsort()
    last = shape.segments - 1
    segments = order[[0, last // 200, last // 8, last // 2, last * 3 // 4, last - 1, last]].tolist()
    exact = {segment: exact_attention(p, shape, segment) for segment in segments}
    lengths = [int(p.offsets.diff()[segment]) for segment in segments]
    print(f"V with mean {v_mean:g}: relative error of out, absolute of lse, for lengths {lengths}", flush=True)
    for variant in variants:
        out, lse, _ = attention(p, shape, variant)()
        errors = [relative_error(out[segment], exact[segment][0]) for segment in segments]
        of_lse = [float((lse[segment].double() - exact[segment][1]).abs().max()) for segment in segments]
        num_nan = int(out.isnan().sum() + lse.isnan().sum())
        print(f"    {variant:32}" + " ".join(f"{error:.4f}" for error in errors), end="   lse ")
        print(" ".join(f"{error:.4f}" for error in of_lse) + f"   {num_nan} NaN", flush=True)


def exact_attention(p: Problem, shape: Shape, segment: int) -> tuple[Tensor, Tensor]:
    """(out [S, E], lse [H, S]) of one segment in float64."""
    q, k, v, _ = dense(p, shape, segment)
    scores = q @ k.transpose(1, 2) / math.sqrt(shape.head_dim)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1), scores.logsumexp(-1)


def dense(p: Problem, shape: Shape, segment: int) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """Q, K and V of one segment in float64, [H, rows, D] each, and its rows."""
    begin, end = p.offsets[segment : segment + 2].tolist()
    slot = int(row_block_starts(p.offsets, 32)[segment])

    def heads(matrix: MXFP8Tensor, rows: int) -> Tensor:
        values = dequantize(*matrix, torch.tensor([0, rows], device=DEVICE), torch.float64)
        return values.view(rows, shape.heads, -1).transpose(0, 1)

    def part(matrix: MXFP8Tensor) -> MXFP8Tensor:
        return MXFP8Tensor(matrix.data[begin:end], matrix.scales[slot : slot + (end - begin) // 32 + 1])

    k, v = (heads(part(matrix), end - begin) for matrix in (p.k8, p.v8))
    return heads(p.q8, shape.seeds), k, v, (begin, end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-length", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--uniform", action="store_true", help="also with every length at its maximum")
    parser.add_argument("--variants", nargs="+", choices=["all", *VARIANTS], default=["pma", ALONE])
    parser.add_argument("--check", action="store_true", help="errors instead of times")
    parser.add_argument("--segments", type=int, default=768)
    parser.add_argument("--seeds", type=int, default=512)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    arguments = parser.parse_args()
    shape = Shape(arguments.segments, arguments.seeds, arguments.heads, arguments.head_dim)
    variants = list(VARIANTS) if "all" in arguments.variants else arguments.variants
    for max_length in arguments.max_length:
        if arguments.check:
            for v_mean in (0.0, 1.0):
                check(shape, max_length, variants, v_mean)
            continue
        for is_uniform in (False, True) if arguments.uniform else (False,):
            compare(shape, max_length, variants, is_uniform=is_uniform)


if __name__ == "__main__":
    main()
