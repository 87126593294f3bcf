"""Hopper's attention backward (FP8) beside FlashAttention-4's bf16 kernel, on the source's shapes.

    python -m benchmarks.attention_backward [--max-length 4096 16384] [--uniform] [--variants pma ...] [--check]

The problem of `benchmarks.attention_forward` with a standard-normal dO in bf16. TFLOP/s counts 10·S·T·E of the real
events. Variants share one run, each alone for most of a second (`sustained.py`). "pma" is all that follows dO: the pass
that quantises it and takes δ, statistics of the seeds, the kernel, the sum of dQ's slabs; "without-pass" leaves the
first out, "fp16-dq" adds dQ in fp16, "cluster" takes clusters of two CTAs, "deterministic" gives each CTA a slab of its
own.

--check compares every segment's dK and dV, and dQ, with float64 on the dequantised operands.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.attention_forward import DEVICE, PEER, Problem, Shape, attention, dense, make_problem, report
from pma.jagged import equal_offsets
from pma.kernels.attention_backward.hopper_spec import HopperBackwardSpec, choose_config
from pma.kernels.device_facts import SM90
from pma.kernels.quantize.spec import QuantizeSpec
from pma.layouts import dequantize
from pma.numerics import HOPPER_NUMERICS
from pma.testing import relative_error

# What differs from the default: fields of the numerics, fields of the configuration.
VARIANTS: dict[str, tuple[dict, dict]] = {
    "pma": ({}, {}),
    "without-pass": ({}, {}),
    "fp16-dq": ({"dq_accumulation": "fp16"}, {}),
    "cluster": ({}, {"ctas": 2}),
    "cluster-fp16-dq": ({"dq_accumulation": "fp16"}, {"ctas": 2}),
    "deterministic": ({}, {"slabs": 0}),
    "1-slab": ({}, {"slabs": 1}),
    "16-slabs": ({}, {"slabs": 16}),
    "travelling-seeds": ({}, {"q_is_resident": False}),
}


def backward(p: Problem, shape: Shape, variant: str, out: Tensor, saved: tuple[Tensor, Tensor], dout: Tensor):
    """A call of a variant of ours. saved: lse, ⌊log2 l⌋."""
    from pma.kernels.attention_backward import sm90
    from pma.kernels.quantize import any_arch

    numerics, choices = VARIANTS[variant]
    record_ = type(HOPPER_NUMERICS)(**vars(HOPPER_NUMERICS) | numerics)
    spec = HopperBackwardSpec(shape.head_dim, shape.heads, shape.seeds, True, record_, p.offsets.dtype)
    if (reason := spec.why_unsupported()) is not None:
        raise ValueError(reason)
    config = choose_config(spec, SM90, **choices)
    seed_offsets = equal_offsets(shape.segments, shape.seeds, p.offsets.device)
    pre_pass = QuantizeSpec(
        shape.columns, torch.bfloat16, seed_offsets.dtype, columns_per_scale=shape.head_dim, writes_transposed=True,
        delta_columns=shape.head_dim, out_dtype=torch.bfloat16, headroom_exponent=record_.dp_headroom_exponent,
    )  # fmt: skip
    q, k, v = (sm90.HopperOperand(*each) for each in (p.q8, p.k8, p.v8))

    def quantized():
        return any_arch.launch(pre_pass, dout, seed_offsets, out=out)

    ready = quantized()

    def call(do=None):
        do = do or (ready if variant == "without-pass" else quantized())
        of_dout = (do.data, do.transposed, do.scales)
        return sm90.launch(spec, q, k, v, p.offsets, of_dout, (do.delta, *saved), config), do

    return call


def flash_attention(p: Problem, shape: Shape, dout: Tensor) -> Callable[[], object]:
    from flash_attn.cute import flash_attn_varlen_func

    def heads(rows: Tensor) -> Tensor:
        return rows.view(-1, shape.heads, shape.head_dim).requires_grad_()

    inputs = [heads(p.q.repeat(shape.segments, 1)), heads(p.k), heads(p.v)]
    q_offsets, k_offsets = equal_offsets(shape.segments, shape.seeds, p.k.device).int(), p.offsets.int()
    result = flash_attn_varlen_func(
        *inputs, cu_seqlens_q=q_offsets, cu_seqlens_k=k_offsets, max_seqlen_q=shape.seeds,
        max_seqlen_k=int(p.offsets.diff().max()),
    )  # fmt: skip
    out = result[0] if isinstance(result, tuple) else result
    return lambda: torch.autograd.grad(out, inputs, dout.view(out.shape), retain_graph=True)


def prepare(shape: Shape, max_length: int, *, is_uniform: bool):
    p = make_problem(shape, max_length, is_uniform=is_uniform)
    out, *saved = attention(p, shape, "pma")()
    generator = torch.Generator(device=DEVICE).manual_seed(2)
    rows = (shape.segments * shape.seeds, shape.columns)
    dout = torch.randn(rows, dtype=torch.bfloat16, device=DEVICE, generator=generator)
    return p, out.view(rows), tuple(saved), dout


def compare(shape: Shape, max_length: int, variants: list[str], *, is_uniform: bool) -> None:
    p, out, saved, dout = prepare(shape, max_length, is_uniform=is_uniform)
    events = int(p.offsets[-1])
    calls = {name: backward(p, shape, name, out, saved, dout) for name in variants}
    calls[PEER] = flash_attention(p, shape, dout)
    problem = f"{shape.segments} segments, {events:,} events, {'all' if is_uniform else 'up to'} {max_length:,}"
    report("attention_backward", problem, calls, shape, 10 * shape.seeds * events * shape.columns)


def check(shape: Shape, max_length: int, variants: list[str]) -> None:
    """Print the errors of dQ, and of dK and dV of all segments together and of the worst."""
    p, out, saved, dout = prepare(shape, max_length, is_uniform=False)
    for variant in variants:
        (dq, dk, dv), do = backward(p, shape, variant, out, saved, dout)()
        right_q, worst = torch.zeros(shape.heads, shape.seeds, shape.head_dim, dtype=torch.float64, device=DEVICE), {}
        total = {"dk": [0.0, 0.0], "dv": [0.0, 0.0]}
        ours = {"dk": dequantize(*dk, p.offsets), "dv": dequantize(*dv, p.offsets)}
        seed_offsets = equal_offsets(shape.segments, shape.seeds, p.offsets.device)
        do_values = dequantize(do.data, do.scales, seed_offsets).view(shape.segments, shape.seeds, shape.heads, -1)
        for segment in range(shape.segments):
            q, k, v, (begin, end) = dense(p, shape, segment)
            of_dout = do_values[segment].double().transpose(0, 1)
            delta = do.delta.view(shape.segments, shape.seeds, shape.heads)[segment].double().t()[..., None]
            scale = 1 / math.sqrt(shape.head_dim)
            weights = torch.exp(q @ k.transpose(1, 2) * scale - saved[0][segment].double()[..., None])
            ds = weights * (of_dout @ v.transpose(1, 2) - delta) * scale
            right_q += ds @ k
            right = {"dk": ds.transpose(1, 2) @ q, "dv": weights.transpose(1, 2) @ of_dout}
            for name, values in right.items():
                values = values.transpose(0, 1).flatten(1)
                error, size = (ours[name][begin:end] - values).norm(), values.norm()
                worst[name] = max(worst.get(name, 0.0), float(error / size))
                total[name] = [total[name][0] + float(error) ** 2, total[name][1] + float(size) ** 2]
        errors = {name: (error / size) ** 0.5 for name, (error, size) in total.items()}
        of_q = relative_error(dq, right_q.transpose(0, 1).flatten(1))
        num_nan = sum(int(values.isnan().sum()) for values in (dq, *ours.values()))
        print(f"    {variant:20} dQ {of_q:.4f}, {errors}, worst segment {worst}, {num_nan} NaN", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-length", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--uniform", action="store_true", help="also with every length at its maximum")
    parser.add_argument("--variants", nargs="+", choices=["all", *VARIANTS], default=["pma", "without-pass", "fp16-dq"])
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
            check(shape, max_length, variants)
            continue
        for is_uniform in (False, True) if arguments.uniform else (False,):
            compare(shape, max_length, variants, is_uniform=is_uniform)


if __name__ == "__main__":
    main()
