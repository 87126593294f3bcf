"""Backward problems with Hopper's contract, and what its kernel is held to; in the simulator and on a GPU."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from hopper_attention import ORDINARY, Magnitudes, expected, make_problem
from hopper_attention import Problem as ForwardProblem
from jagged_attention import LENGTHS, SHORT, STEPS_OF_ONE_TILE
from torch import Tensor

from pma.jagged import equal_offsets
from pma.kernels.attention_backward.hopper_spec import HopperBackwardSpec, choose_config
from pma.kernels.device_facts import SM90
from pma.layouts import MXFP8Tensor, dequantize, quantize, transpose_payload
from pma.numerics import HOPPER_NUMERICS, AttentionNumerics
from pma.reference import operators as reference
from pma.reference.attention import BackwardInputs, Gradients, Operands, attention_backward
from pma.reference.rounding import PlainRounding
from pma.testing import FP8_SUM_ROUNDING, KERNEL_BUDGET, ULPS_FP16, relative_error

FP16_DQ = replace(HOPPER_NUMERICS, dq_accumulation="fp16")


class Problem(NamedTuple):
    """Inputs of one backward; choices: of the kernel's configuration."""

    spec: HopperBackwardSpec
    forward: ForwardProblem
    dout: MXFP8Tensor
    delta: Tensor
    lse: Tensor
    row_sum_log2: Tensor
    choices: dict

    @property
    def seed_offsets(self) -> Tensor:
        offsets = self.forward.offsets
        return equal_offsets(len(offsets) - 1, self.spec.num_seeds, offsets.device)

    @property
    def saved(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.delta, self.lse, self.row_sum_log2

    def to(self, device: str) -> "Problem":
        dout = MXFP8Tensor(*(each.to(device) for each in self.dout))
        saved = (each.to(device) for each in self.saved)
        return Problem(self.spec, self.forward.to(device), dout, *saved, self.choices)


def make(
    lengths: tuple[int, ...], head_dim: int, num_heads: int, num_seeds: int, *, is_shared: bool = True,
    numerics: AttentionNumerics = HOPPER_NUMERICS, magnitudes: Magnitudes = ORDINARY,
    offsets_dtype: torch.dtype = torch.int64, **choices,
) -> Problem:  # fmt: skip
    """Beside a forward's problem a dO of normal numbers, each row with a magnitude of its own."""
    dtypes = (torch.float32, offsets_dtype)
    forward = make_problem(
        lengths, head_dim, num_heads, num_seeds, is_shared=is_shared, numerics=numerics, magnitudes=magnitudes,
        dtypes=dtypes,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(len(lengths))
    rows, columns = len(lengths) * num_seeds, forward.spec.columns
    spread = torch.exp(torch.randn(rows, 1, generator=generator) * magnitudes.dout)
    spec = HopperBackwardSpec(head_dim, num_heads, num_seeds, is_shared, numerics, offsets_dtype)
    return with_dout(spec, forward, torch.randn(rows, columns, generator=generator) * spread, choices)


def with_dout(spec: HopperBackwardSpec, forward: ForwardProblem, values: Tensor, choices: dict) -> Problem:
    """The problem with a dO [B·S, E], and what the forward and the pre-pass leave."""
    segments, headroom = len(forward.offsets) - 1, spec.numerics.dp_headroom_exponent
    seed_offsets = equal_offsets(segments, spec.num_seeds, values.device)
    dout = quantize(values, seed_offsets, columns_per_scale=spec.head_dim, headroom_exponent=headroom)
    out, lse, row_sum_log2 = expected(forward)
    products = dequantize(*dout, seed_offsets).double() * out.reshape(values.shape).double()
    delta = products.view(-1, spec.num_heads, spec.head_dim).sum(-1).float()
    return Problem(spec, forward, MXFP8Tensor(*dout), delta, lse, row_sum_log2, choices)


def call(p: Problem) -> Callable:
    """The launch, its operands made."""
    sm90, f = importlib.import_module("pma.kernels.attention_backward.sm90"), p.forward
    operands = [sm90.HopperOperand(*each) for each in (f.q, f.k, f.v)]
    dout = (p.dout.data, transpose_payload(p.dout.data, p.seed_offsets), p.dout.scales)
    config = choose_config(p.spec, SM90, **p.choices)
    return lambda: sm90.launch(p.spec, *operands, f.offsets, dout, p.saved, config)


def gradients(p: Problem) -> Gradients:
    """What the kernel says, dequantised."""
    dq, dk, dv = call(p)()
    return Gradients(dq, *(dequantize(*each, p.forward.offsets) for each in (dk, dv)))


def expected_gradients(p: Problem) -> Gradients:
    """The reference with the kernel's rounding points."""
    f, saved = p.forward, BackwardInputs(p.dout.data, *p.saved, p.dout.data)
    dq, *quantized = reference.attention_backward(
        f.q, f.k, f.v, f.offsets, p.dout, saved, f.shape, p.spec.numerics.token()
    )
    return Gradients(dq, *(dequantize(*quantized[i : i + 2], f.offsets) for i in (0, 2)))


def exact(p: Problem, *, without_delta: bool = False) -> Gradients:
    """Gradients of the same operands in float64, nothing rounded; without δ: the terms that it cancels."""
    f = p.forward
    pairs = ((f.q, f.seed_offsets), (f.k, f.offsets), (f.v, f.offsets))
    values = [dequantize(*matrix, offsets, torch.float64) for matrix, offsets in pairs]
    dout = dequantize(*p.dout, p.seed_offsets, torch.float64)
    delta = torch.zeros_like(p.delta) if without_delta else p.delta
    inputs = BackwardInputs(dout, delta.double(), p.lse.double(), p.row_sum_log2, dout)
    return attention_backward(Operands(*values, f.offsets), inputs, f.shape, PlainRounding(torch.float64))


def check(p: Problem, actual: Gradients) -> None:
    """As near to float64 as the reference, within the kernel budget, each segment on its own."""
    true, reference_ = exact(p), expected_gradients(p)
    rounding = 8 * ULPS_FP16 + FP8_SUM_ROUNDING * max(p.spec.num_seeds // 32, 4)
    for name in Gradients._fields:
        ours, theirs, right = (getattr(each, name) for each in (actual, reference_, true))
        budget = KERNEL_BUDGET * relative_error(theirs, right) + rounding
        assert relative_error(ours, right) <= budget, name
    begins = p.forward.offsets.tolist()
    terms = exact(p, without_delta=True)
    for begin, end in zip(begins, begins[1:], strict=False):
        for name in ("dk", "dv"):
            ours, theirs, right = (getattr(each, name)[begin:end] for each in (actual, reference_, true))
            budget = KERNEL_BUDGET * (theirs - right).norm() + 2 * rounding * right.norm()
            budget += 2 * rounding * getattr(terms, name)[begin:end].norm()  # where dP − δ cancels
            assert (ours - right).norm() <= budget, (name, begin, end)
    for name in ("dk", "dv"):
        outside = torch.cat([getattr(actual, name)[: begins[0]], getattr(actual, name)[begins[-1] :]])
        assert (outside == 0).all()


CASES = {
    "every length": make(LENGTHS, 128, 1, 200),
    "three heads, resident": make(SHORT, 128, 3, 512),
    "one seed": make(LENGTHS, 128, 1, 1),
    "heads of 64": make(SHORT, 64, 3, 512),
    "32 seeds, one head of 64": make(SHORT, 64, 1, 32),
    "seeds of each segment": make(SHORT, 128, 1, 200, is_shared=False),
    "seeds of each segment, heads of 64": make(SHORT, 64, 2, 128, is_shared=False),
    "640 seeds": make((129, 0, 33), 128, 1, 640),
    "fp16 dQ": make(SHORT, 128, 1, 200, numerics=FP16_DQ),
    "fp16 dQ, heads of 64": make(SHORT, 64, 2, 64, numerics=FP16_DQ),
    "a slab of each CTA": make(SHORT, 128, 1, 128, slabs=0),
    "sharp scores": make(SHORT, 128, 1, 128, magnitudes=Magnitudes(seeds=4.0)),
    "V with a mean": make(SHORT, 128, 1, 128, magnitudes=Magnitudes(v_mean=1.0)),
    "V of many scales": make(SHORT, 128, 1, 128, magnitudes=Magnitudes(v=2.0)),
    "dO of many scales": make(SHORT, 128, 1, 128, magnitudes=Magnitudes(dout=3.0)),
    "int32 offsets": make((40, 70), 128, 1, 64, offsets_dtype=torch.int32),
    "steps of one tile": make(STEPS_OF_ONE_TILE, 128, 1, 64),
    "three stages": make((128, 256), 64, 1, 300, stages=3),
    "clusters of two": make(SHORT, 128, 1, 200, ctas=2),
    "clusters of two, resident": make(SHORT, 128, 3, 512, ctas=2),
    "clusters of two, every length": make(LENGTHS, 128, 1, 1, ctas=2),
    "clusters of two, a slab of each": make(SHORT, 128, 1, 128, ctas=2, slabs=0),
    "clusters of two, fp16 dQ": make(SHORT, 128, 1, 640, numerics=FP16_DQ, ctas=2),
    "clusters of two, steps of one tile": make(STEPS_OF_ONE_TILE, 128, 1, 64, ctas=2),
    "clusters of two, V of many scales": make(SHORT, 128, 1, 128, magnitudes=Magnitudes(v=2.0), ctas=2),
}
