"""Attention forward in the simulator: right beside float64, jagged without a trace of neighbours and pads, silent."""

import importlib
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from jagged_attention import HEAD, LENGTHS, NAN_PAYLOAD, SHORT, STEPS_OF_ONE_TILE, TAIL, part, spoil
from torch import Tensor

import ptxsim
from pma.jagged import equal_offsets, segment_of_rows
from pma.kernels.attention_forward.spec import AttentionForwardConfig, AttentionForwardSpec, choose_config
from pma.kernels.device_facts import SM100, SM103, DeviceFacts
from pma.layouts import MXFP8Tensor, dequantize, quantize, scatter_scales
from pma.layouts.mxfp8 import SCALE_ONE
from pma.numerics import AttentionNumerics
from pma.reference import operators as reference
from pma.reference.attention import AttentionShape, Operands, attention_forward
from pma.reference.rounding import PlainRounding
from pma.testing import E4M3_ROUNDING, KERNEL_BUDGET, ULPS_FP32, relative_error

pytestmark = [pytest.mark.ptxsim]
POISON = 0xFF
DEFAULT = AttentionNumerics()


@pytest.fixture
def on(simulated, gpu_stand_in) -> Callable:
    """`with on(num_sms, seed, facts):` the launcher runs in the simulator."""
    sm100 = importlib.import_module("pma.kernels.attention_forward.sm100")

    def start(num_sms: int, seed: int = 0, facts: DeviceFacts = SM100):
        gpu_stand_in(facts, num_sms, sm100)
        return simulated(arch=facts.arch, num_sms=num_sms, seed=seed, check_bounds=True)

    return start


# ----------------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    """Inputs of one attention; spread: standard deviation of the seeds, which sets that of the scores."""

    spec: AttentionForwardSpec
    q: MXFP8Tensor
    k: MXFP8Tensor
    v: MXFP8Tensor
    offsets: Tensor

    @property
    def seed_offsets(self) -> Tensor:
        num_segments = 1 if self.spec.is_shared else len(self.offsets) - 1
        return equal_offsets(num_segments, self.spec.num_seeds, self.offsets.device)


def make_problem(
    lengths: tuple[int, ...], head_dim: int, num_heads: int, num_seeds: int, *, is_shared: bool = True,
    numerics: AttentionNumerics = DEFAULT, spread: float = 1.0,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.int64),
) -> Problem:  # fmt: skip
    """Rows of normal numbers, each with a scale of its own. dtypes: of out and of the offsets."""
    generator = torch.Generator().manual_seed(sum(lengths) + num_seeds)
    spec = AttentionForwardSpec(head_dim, num_heads, num_seeds, is_shared, numerics, *dtypes)
    assert spec.why_unsupported() is None
    offsets = torch.tensor([HEAD, *lengths]).cumsum(0).to(dtypes[1])

    def normal(rows: int) -> Tensor:
        scales = torch.exp(torch.randn(rows, 1, generator=generator) / 2)
        return torch.randn(rows, spec.columns, generator=generator) * scales

    def events() -> MXFP8Tensor:
        rows = int(offsets[-1]) + TAIL
        data, scales = quantize(normal(rows), offsets)
        data[segment_of_rows(offsets, rows) < 0] = NAN_PAYLOAD
        return MXFP8Tensor(data, scales)

    rows = num_seeds * (1 if is_shared else len(lengths))
    problem = Problem(spec, *[MXFP8Tensor(offsets, offsets)] * 3, offsets)
    return problem._replace(q=quantize(normal(rows) * spread, problem.seed_offsets), k=events(), v=events())


def tiles(matrix: MXFP8Tensor, offsets: Tensor, direction: str) -> Tensor:
    """Scale tiles whose pads are NaN, although the contract says 1: nobody may use them."""
    rows = matrix.data.shape[0]
    pads = scatter_scales(torch.zeros_like(matrix.scales), offsets, rows, direction) == SCALE_ONE
    return torch.where(pads, POISON, scatter_scales(matrix.scales, offsets, rows, direction))


def attend(p: Problem, config: AttentionForwardConfig | None = None):
    sm100 = importlib.import_module("pma.kernels.attention_forward.sm100")
    operand = sm100.AttentionOperand
    return sm100.launch(
        p.spec,
        operand(p.q.data, tiles(p.q, p.seed_offsets, "row")),
        operand(p.k.data, tiles(p.k, p.offsets, "row")),
        operand(p.v.data, tiles(p.v, p.offsets, "column")),
        p.offsets,
        config,
    )


def shape_of(p: Problem) -> AttentionShape:
    return AttentionShape(p.spec.num_seeds, p.spec.num_heads)


def expected(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The reference with the kernel's rounding points."""
    return reference.attention_forward(p.q, p.k, p.v, p.offsets, shape_of(p), p.spec.numerics.token(), p.spec.out_dtype)


def exact(p: Problem):
    """Attention of the same operands in float64, P not rounded."""
    pairs = ((p.q, p.seed_offsets), (p.k, p.offsets), (p.v, p.offsets))
    values = [dequantize(*matrix, offsets, torch.float64) for matrix, offsets in pairs]
    return attention_forward(Operands(*values, p.offsets), shape_of(p), PlainRounding(torch.float64))


def check(p: Problem, actual) -> None:
    """As near to float64 as the reference, within the kernel budget; ⌊log2 l⌋ equal but next to a power of two."""
    out, lse, row_sum_log2 = expected(p)
    true = exact(p)
    budget = KERNEL_BUDGET * relative_error(out, true.out) + ULPS_FP32
    assert relative_error(actual.out, true.out) <= budget
    for index in range(len(p.offsets) - 1):  # a short segment must not hide behind long ones
        own = KERNEL_BUDGET * relative_error(out[index], true.out[index]) + 2 * budget
        assert relative_error(actual.out[index], true.out[index]) <= own, index
    is_empty = p.offsets.diff() == 0
    assert (actual.out[is_empty] == 0).all() and (actual.lse[is_empty] == -torch.inf).all()
    assert (actual.row_sum_log2[is_empty] == -127).all()
    there = ~is_empty
    magnitude = 1 + lse[there].abs().max() if there.any() else 1
    difference = (actual.lse[there] - lse[there]).abs()  # a score's last bit may move a P by a step of E4M3
    assert (difference > ULPS_FP32 * magnitude * 4).double().sum() <= 1 + 0.05 * difference.numel()
    assert (difference <= 2 * E4M3_ROUNDING).all()
    differs = actual.row_sum_log2 != row_sum_log2
    log2 = (true.lse - true.lse.floor())[differs]
    assert differs.double().mean() < 0.2, log2
    assert ((actual.row_sum_log2 - row_sum_log2)[differs].abs() == 1).all()


CASES = {
    "every length": make_problem(LENGTHS, 128, 1, 200),
    "three heads, part of a seed tile": make_problem(SHORT, 128, 3, 200),
    "one seed": make_problem(LENGTHS, 128, 1, 1),
    "three seed tiles": make_problem((300, 40), 128, 1, 384),
    "four seed tiles, heads of 64": make_problem(SHORT, 64, 3, 512),
    "32 seeds, one head of 64": make_problem(SHORT, 64, 1, 32),
    "seeds of each segment": make_problem(SHORT, 128, 1, 200, is_shared=False),
    "seeds of each segment, heads of 64": make_problem(SHORT, 64, 2, 128, is_shared=False),
    "scales of P by block": make_problem(SHORT, 128, 1, 200, numerics=AttentionNumerics(p_cast="block")),
    "forward order": make_problem(SHORT, 128, 1, 200, numerics=AttentionNumerics(kv_order="forward")),
    "scales by block, forward order": make_problem(
        SHORT, 128, 1, 200, numerics=AttentionNumerics(p_cast="block", kv_order="forward")
    ),
    "sharp scores": make_problem(SHORT, 128, 1, 200, spread=4.0),
    "bf16": make_problem(SHORT, 128, 1, 200, dtypes=(torch.bfloat16, torch.int64)),
    "fp16, int32 offsets": make_problem((40,), 128, 1, 200, dtypes=(torch.float16, torch.int32)),
    "whole tiles only": make_problem((128, 256, 128, 384), 128, 1, 200),
    "steps of one tile": make_problem(STEPS_OF_ONE_TILE, 128, 1, 200),
    "steps of one tile, seeds of each segment": make_problem(STEPS_OF_ONE_TILE, 64, 2, 128, is_shared=False),
}
ELSEWHERE = ("one seed", "32 seeds, one head of 64", "forward order", "bf16")  # only with -m full
PLACES = [(name, SM100) for name in CASES if name not in ELSEWHERE]
PLACES += [(name, SM103) for name in ("every length", "scales of P by block")]


@pytest.mark.parametrize(("name", "facts"), PLACES, ids=[f"{facts.arch}-{name}" for name, facts in PLACES])
def test_right_and_silent(on, name, facts):
    p = CASES[name]
    with on(p.spec.groups, facts=facts):
        actual = attend(p)
    check(p, actual)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("name", CASES)
def test_right_and_silent_whatever_the_order(on, name, seed):
    p = CASES[name]
    with on(p.spec.groups * (1 + seed % 2), seed, SM103 if seed % 5 == 0 else SM100):
        actual = attend(p)
    check(p, actual)


CHOICES = {
    "length": LENGTHS,
    "num_seeds": (1, 32, 128, 200, 512),
    "num_heads": (1, 3),
    "head_dim": (64, 128),
    "p_cast": ("tile", "block"),
    "kv_order": ("reverse", "forward"),
    "is_shared": (True, False),
}


def combinations() -> list[tuple[Any, ...]]:
    """Every length with every number of seeds, the other choices drawn; 11 is a draw in which all pairs occur."""
    draw = random.Random(11)
    first_two = itertools.product(CHOICES["length"], CHOICES["num_seeds"])
    others = [CHOICES[name] for name in list(CHOICES)[2:]]
    return [(*pair, *(draw.choice(values) for values in others)) for pair in first_two]


def test_combinations_hold_every_pair():
    for (i, first), (j, second) in itertools.combinations(enumerate(CHOICES.values()), 2):
        assert {(each[i], each[j]) for each in combinations()} == set(itertools.product(first, second))


@pytest.mark.full
@pytest.mark.parametrize("combination", combinations(), ids=lambda values: "-".join(map(str, values)))
def test_every_pair_of_choices(on, combination):
    length, num_seeds, num_heads, head_dim, p_cast, kv_order, is_shared = combination
    numerics = AttentionNumerics(p_cast=p_cast, kv_order=kv_order)
    lengths = (length, 70, length)
    p = make_problem(lengths, head_dim, num_heads, num_seeds, is_shared=is_shared, numerics=numerics)
    with on(p.spec.groups, seed=length):
        actual = attend(p)
    check(p, actual)


def test_the_order_of_completion_changes_no_bit(on):
    p = CASES["three heads, part of a seed tile"]
    results = []
    for seed, ctas in ((0, 1), (1, 2), (2, 9)):
        with on(p.spec.groups * ctas, seed):
            results.append(attend(p))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["four seed tiles, heads of 64", "seeds of each segment"])
def test_shared_loads_change_no_bit(on, name):
    """CTAs by themselves, beside those of a cluster."""
    p = CASES[name]
    together = choose_config(p.spec, SM100)
    assert together.ctas == 2
    with on(2 * p.spec.groups):
        results = [attend(p, config) for config in (together, replace(together, ctas=1))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------------------------- jagged and degenerate input


def test_neighbours_change_no_bit(on):
    p = CASES["every length"]
    with on(1):
        together = attend(p)
    for segment in (3, 4, 7):
        with on(1):
            alone = attend(part(p, segment))
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole[segment], single[0])


NAN_LENGTHS = (32,) * 16 + (40, 300, 300, 60, 300)
NAN_CASES = [
    (SM100, DEFAULT),
    (SM100, CASES["scales by block, forward order"].spec.numerics),
    (SM103, DEFAULT),
]


def spoiled(p: Problem) -> Problem:
    """NaN in a row of Q; in K, in another pair of events in each segment of 32; in rows of V, in one column."""
    begins = p.offsets.tolist()
    keys = [(begins[segment] + 2 * segment + segment % 2, segment) for segment in range(16)]
    keys += [(begins[17] + 290, 5), (begins[18] + 7, 5)]  # in the tile that a segment begins or ends with
    values = [(begins[19] + 3, 7), (begins[20] + 200, 127)]
    return p._replace(q=spoil(p.q, (5, 2)), k=spoil(p.k, *keys), v=spoil(p.v, *values))


@pytest.mark.parametrize(("facts", "numerics"), NAN_CASES, ids=["tile", "block", "sm_103a"])
def test_nan_of_an_element_goes_where_the_reference_has_it(on, facts, numerics):
    """Whichever unit computes the event's exponential, and nowhere else."""
    p = make_problem(NAN_LENGTHS, 128, 1, 200, numerics=numerics)
    results = []
    for each in (p, spoiled(p)):
        with on(1, facts=facts):
            results.append(attend(each))
    clean, actual = results
    out, lse, _ = expected(spoiled(p))
    assert torch.equal(actual.out.isnan(), out.isnan()) and torch.equal(actual.lse.isnan(), lse.isnan())
    assert torch.equal(actual.out[~out.isnan()], clean.out[~out.isnan()])
    for before, after in zip(clean[1:], actual[1:], strict=True):
        assert torch.equal(after[~lse.isnan()], before[~lse.isnan()])


@pytest.mark.parametrize("cast", ["tile", "block"])
def test_equal_values_come_back(on, cast):
    """V = 1 exactly, but for the reciprocal: the sum is of the cast P."""
    p = make_problem(SHORT, 128, 1, 200, numerics=AttentionNumerics(p_cast=cast))
    p = p._replace(v=quantize(torch.ones(p.v.data.shape), p.offsets))
    with on(1):
        out = attend(p).out[[0, 2, 3]]
    assert relative_error(out, torch.ones_like(out)) <= ULPS_FP32


def climbing(p: Problem, octaves: tuple[float, ...]) -> Problem:
    """Tile j of each segment scores about `octaves[j]` in every row, in the order that the kernel takes them."""
    steps = len(octaves)
    assert set(p.offsets.diff().tolist()) == {steps * 128} and p.spec.numerics.kv_order == "forward"
    q, k = torch.ones(p.q.data.shape), torch.zeros(p.k.data.shape)
    rows = torch.arange(k.shape[0]) - HEAD
    for step, octave in enumerate(octaves):
        k[(rows // 128) % steps == step] = octave * math.log(2) / math.sqrt(p.spec.head_dim)
    k += torch.randn(k.shape, generator=torch.Generator().manual_seed(5)) / 64
    return p._replace(q=quantize(q, p.seed_offsets), k=quantize(k, p.offsets))


@pytest.mark.parametrize("facts", [SM100, SM103], ids=["sm_100a", "sm_103a"])
@pytest.mark.parametrize(
    "octaves", [(0.0, 60.0, 65.0, 130.0), (-2000.0, 10.0, 1500.0, 1400.0), (20.0, -30.0, -400.0, 19.0)], ids=str
)
def test_rows_that_outgrow_what_they_are_relative_to(on, octaves, facts):
    """O and its sum are rescaled, once or twice in a row, by either warpgroup; small tiles beside great ones vanish."""
    numerics = AttentionNumerics(kv_order="forward")
    p = climbing(make_problem((512, 512), 128, 1, 200, numerics=numerics), octaves)
    with on(1, facts=facts):
        actual = attend(p)
    check(p, actual)


def test_one_event_returns_its_value(on):
    p = make_problem((1, 1, 1), 128, 1, 200, dtypes=(torch.bfloat16, torch.int64))
    with on(1):
        out = attend(p).out
    values = dequantize(*p.v, p.offsets)[HEAD:-TAIL].bfloat16()
    assert torch.equal(out, values[:, None].expand_as(out))


def test_no_events_at_all(on):
    for lengths in ((0, 0, 0), ()):
        p = make_problem(lengths, 128, 1, 200)
        with on(1):
            result = attend(p)
        assert result.out.shape == (len(lengths), 200, 128)
        assert (result.out == 0).all() and (result.lse == -torch.inf).all()


# ------------------------------------------------------------------------------------------------ synchronisation


def test_every_wait_of_the_product_is_needed(gpu_stand_in, waits_of_the_product):
    """Without one, a race or a deadlock."""
    sm100 = importlib.import_module("pma.kernels.attention_forward.sm100")
    p = make_problem((300, 129), 128, 1, 200)
    gpu_stand_in(SM100, 1, sm100)

    def case(options: dict[str, Any]) -> None:
        with ptxsim.simulate(arch="sm_100a", num_sms=1, check_bounds=True, **options):
            check(p, attend(p))

    verdicts = waits_of_the_product(case, opener="setmaxnreg")
    assert len(verdicts) == 6, "for Q, K, S read; O read, V, P"
