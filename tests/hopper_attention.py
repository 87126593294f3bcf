"""Attention problems with Hopper's contract, and what its forward kernel is held to; in the simulator and on a GPU."""

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from jagged_attention import HEAD, LENGTHS, NAN_PAYLOAD, SHORT, STEPS_OF_ONE_TILE, TAIL
from torch import Tensor

from pma.jagged import equal_offsets, segment_of_rows
from pma.kernels.attention_forward.hopper_spec import TILE, HopperForwardSpec, choose_config
from pma.kernels.device_facts import SM90
from pma.layouts import BLOCK, MXFP8Tensor, dequantize, quantize, transpose_payload
from pma.numerics import HOPPER_NUMERICS, AttentionNumerics
from pma.reference import operators as reference
from pma.reference.attention import AttentionShape, ForwardResult, Operands, attention_forward
from pma.reference.rounding import PlainRounding
from pma.testing import E4M3_ROUNDING, FP8_SUM_ROUNDING, KERNEL_BUDGET, ULPS_FP16, ULPS_FP32, relative_error

FP32_SUM = replace(HOPPER_NUMERICS, denominator="fp32")
FORWARD = replace(HOPPER_NUMERICS, kv_order="forward")
NO_HEADROOM = replace(HOPPER_NUMERICS, p_scale_log2=8, rescale_threshold_log2=0.0, headroom_exponent=0)


class Magnitudes(NamedTuple):
    """Standard deviation of the seeds, which sets that of the scores; of log V and log dO by rows; V mean."""

    seeds: float = 1.0
    v: float = 0.5
    v_mean: float = 0.0
    dout: float = 0.5


ORDINARY, SHARP = Magnitudes(), Magnitudes(seeds=4.0)


class Problem(NamedTuple):
    """Inputs of one attention; choices: of the kernel's configuration."""

    spec: HopperForwardSpec
    q: MXFP8Tensor
    k: MXFP8Tensor
    v: MXFP8Tensor
    offsets: Tensor
    choices: dict

    @property
    def seed_offsets(self) -> Tensor:
        num_segments = 1 if self.spec.is_shared else len(self.offsets) - 1
        return equal_offsets(num_segments, self.spec.num_seeds, self.offsets.device)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.spec.num_seeds, self.spec.num_heads)

    def to(self, device: str) -> "Problem":
        matrices = (MXFP8Tensor(*(each.to(device) for each in matrix)) for matrix in (self.q, self.k, self.v))
        return Problem(self.spec, *matrices, self.offsets.to(device), self.choices)


def make_problem(
    lengths: tuple[int, ...], head_dim: int, num_heads: int, num_seeds: int, *, is_shared: bool = True,
    numerics: AttentionNumerics = HOPPER_NUMERICS, magnitudes: Magnitudes = ORDINARY,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.int64), **choices,
) -> Problem:  # fmt: skip
    """Rows of normal numbers, each with a magnitude of its own. dtypes: of out and of the offsets."""
    generator = torch.Generator().manual_seed(sum(lengths) + num_seeds)
    spec = HopperForwardSpec(head_dim, num_heads, num_seeds, is_shared, numerics, *dtypes)
    assert spec.why_unsupported() is None
    offsets = torch.tensor([HEAD, *lengths]).cumsum(0).to(dtypes[1])
    rows = int(offsets[-1]) + TAIL

    def normal(rows: int, spread: float = 0.5) -> Tensor:
        magnitudes = torch.exp(torch.randn(rows, 1, generator=generator) * spread)
        return torch.randn(rows, spec.columns, generator=generator) * magnitudes

    def matrix(values: Tensor, offsets: Tensor, headroom: int = 0) -> MXFP8Tensor:
        data, scales = quantize(values, offsets, columns_per_scale=head_dim, headroom_exponent=headroom)
        data[segment_of_rows(offsets, len(values)) < 0] = NAN_PAYLOAD
        return MXFP8Tensor(data, scales)

    problem = Problem(spec, *[MXFP8Tensor(offsets, offsets)] * 3, offsets, choices)
    seeds = normal(num_seeds * (1 if is_shared else len(lengths))) * magnitudes.seeds
    return problem._replace(
        q=matrix(seeds, problem.seed_offsets, numerics.headroom_exponent),
        k=matrix(normal(rows), offsets, numerics.headroom_exponent),
        v=matrix(normal(rows, magnitudes.v) + magnitudes.v_mean, offsets, numerics.dp_headroom_exponent),
    )


def call(p: Problem) -> Callable:
    """The launch, its operands made."""
    sm90 = importlib.import_module("pma.kernels.attention_forward.sm90")
    transposed = transpose_payload(p.v.data, p.offsets)
    operands = [sm90.HopperOperand(*each) for each in (p.q, p.k, (transposed, p.v.scales))]
    config = choose_config(p.spec, SM90, **p.choices)
    return lambda: sm90.launch(p.spec, *operands, p.offsets, config)


def attend(p: Problem):
    """What the kernel says."""
    return call(p)()


def expected(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The reference with the kernel's rounding points."""
    return reference.attention_forward(p.q, p.k, p.v, p.offsets, p.shape, p.spec.numerics.token(), p.spec.out_dtype)


def exact(p: Problem) -> ForwardResult:
    """Attention of the same operands in float64, P not rounded."""
    pairs = ((p.q, p.seed_offsets), (p.k, p.offsets), (p.v, p.offsets))
    values = [dequantize(*matrix, offsets, torch.float64) for matrix, offsets in pairs]
    return attention_forward(Operands(*values, p.offsets), p.shape, PlainRounding(torch.float64))


def error_of_sums(p: Problem) -> float:
    """Relative error of the longest sum that the tensor core takes."""
    tiles = -(-int(p.offsets.diff().max()) // TILE) if len(p.offsets) > 1 else 0
    promotion = choose_config(p.spec, SM90, **p.choices).promotion
    return FP8_SUM_ROUNDING * (TILE // BLOCK) * (min(tiles, promotion) if promotion else tiles)


def check(p: Problem, actual) -> None:
    """As near to float64 as the reference, within the kernel budget; lse as near as its sum can be."""
    sums = error_of_sums(p)
    out, lse, row_sum_log2 = expected(p)
    true = exact(p)
    config = choose_config(p.spec, SM90, **p.choices)
    of_scores = FP8_SUM_ROUNDING * (p.spec.head_dim // BLOCK)
    rounding = ULPS_FP16 if config.scores == "fp16" else ULPS_FP32 + of_scores
    budget = KERNEL_BUDGET * (relative_error(out, true.out) + sums) + rounding
    assert relative_error(actual.out, true.out) <= budget
    for index in range(len(p.offsets) - 1):  # a short segment must not hide behind long ones
        own = KERNEL_BUDGET * relative_error(out[index], true.out[index]) + 2 * budget
        assert relative_error(actual.out[index], true.out[index]) <= own, index
    is_empty = p.offsets.diff() == 0
    assert (actual.out[is_empty] == 0).all() and (actual.lse[is_empty] == -torch.inf).all()
    assert (actual.row_sum_log2[is_empty] == -127).all()
    there = ~is_empty
    if there.any():
        is_exact = config.exact_lse or p.spec.numerics.denominator == "fp32"
        of_sum = 0.0 if is_exact else math.log1p(E4M3_ROUNDING + KERNEL_BUDGET * sums)
        scores = 1 + lse[there].abs().max()
        assert ((actual.lse[there] - lse[there]).abs() <= of_sum + 4 * rounding * scores).all()
    difference = (actual.row_sum_log2 - row_sum_log2).abs()
    assert (difference > 0).double().mean() < 0.2, "only next to a power of two"
    assert difference.max() <= 1


CASES = {
    "every length": make_problem(LENGTHS, 128, 1, 200),
    "three heads, part of a seed tile": make_problem(SHORT, 128, 3, 200),
    "one seed": make_problem(LENGTHS, 128, 1, 1),
    "three seed tiles": make_problem((300, 40), 128, 1, 384),
    "four seed tiles, heads of 64": make_problem(SHORT, 64, 3, 512),
    "32 seeds, one head of 64": make_problem(SHORT, 64, 1, 32),
    "seeds of each segment": make_problem(SHORT, 128, 1, 200, is_shared=False),
    "seeds of each segment, heads of 64": make_problem(SHORT, 64, 2, 128, is_shared=False),
    "forward order": make_problem(SHORT, 128, 1, 200, numerics=FORWARD),
    "fp32 sum": make_problem(LENGTHS, 128, 1, 200, numerics=FP32_SUM),
    "lse of the product": make_problem(SHORT, 128, 1, 200, exact_lse=False),
    "fp32 scores": make_problem(LENGTHS, 128, 1, 200, scores="fp32"),
    "fp32 scores and sum": make_problem(SHORT, 128, 3, 200, numerics=FP32_SUM, scores="fp32"),
    "fp32 scores, heads of 64": make_problem(SHORT, 64, 1, 128, scores="fp32"),
    "no headroom, every maximum": make_problem(SHORT, 128, 1, 200, numerics=NO_HEADROOM),
    "sharp scores": make_problem(SHORT, 128, 1, 200, magnitudes=SHARP, numerics=FORWARD),
    "optimistic": make_problem(LENGTHS, 128, 1, 200, optimistic=True),
    "optimistic, sharp scores": make_problem(
        (300, 700, 40), 64, 2, 128, magnitudes=SHARP, numerics=FORWARD, optimistic=True
    ),
    "promotion of each tile, two stages": make_problem((700, 0, 520), 128, 1, 128, promotion=1, stages=2),
    "promotion of two tiles, fp32 sum": make_problem((700, 129), 64, 1, 256, promotion=2, numerics=FP32_SUM),
    "no promotion, no cluster": make_problem(SHORT, 128, 1, 256, promotion=0, ctas=1),
    "V with a mean": make_problem((700, 300), 128, 1, 128, magnitudes=Magnitudes(v_mean=1.0), promotion=2),
    "V of many scales": make_problem((300, 200), 128, 1, 128, magnitudes=Magnitudes(v=2.0)),
    "bf16": make_problem(SHORT, 128, 1, 200, dtypes=(torch.bfloat16, torch.int64)),
    "fp16, int32 offsets": make_problem((40,), 128, 1, 200, dtypes=(torch.float16, torch.int32)),
    "whole tiles only": make_problem((128, 256, 128, 384), 128, 1, 200),
    "steps of one tile": make_problem(STEPS_OF_ONE_TILE, 128, 1, 200),
    "steps of one tile, seeds of each segment": make_problem(STEPS_OF_ONE_TILE, 64, 2, 128, is_shared=False),
}
