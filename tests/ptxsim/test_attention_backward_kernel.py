"""Attention backward in the simulator: right beside float64, jagged without a trace of neighbours and pads, silent."""

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ptxsim
from pma.jagged import equal_offsets
from pma.kernels.attention_backward.spec import AttentionBackwardSpec
from pma.kernels.device_facts import SM100
from pma.layouts import MXFP8Tensor, dequantize, quantize, scatter_scales
from pma.layouts.mxfp8 import SCALE_ONE
from pma.numerics import AttentionNumerics
from pma.reference import operators as reference
from pma.reference.attention import AttentionShape, BackwardInputs, Gradients, Operands, attention_backward
from pma.reference.rounding import PlainRounding
from pma.testing import E4M3_ROUNDING, KERNEL_BUDGET, ULPS_FP32, relative_error

pytestmark = [pytest.mark.ptxsim]
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 300)
SHORT = (129, 0, 300, 33)
EMPTY_FIRST = (0, 129, 0, 300, 33)
NAN_PAYLOAD, POISON = 0x7F, 0xFF
MOST_UNEQUAL_BYTES = 1e-3  # an fp32 sum near a rounding boundary may differ by its own error
DEFAULT = AttentionNumerics()
HALF_DQ = AttentionNumerics(dq_accumulation="fp16")
BY_BLOCK = AttentionNumerics(p_cast_backward="block")
BY_BLOCK_HALF_DQ = AttentionNumerics(p_cast_backward="block", dq_accumulation="fp16", dq_scale_log2=3)  # no overflow


@pytest.fixture
def on(simulated, gpu_stand_in) -> Callable:
    """`with on(num_sms, seed):` the launcher runs in the simulator."""
    sm100 = importlib.import_module("pma.kernels.attention_backward.sm100")

    def start(num_sms: int, seed: int = 0, **options: Any):
        gpu_stand_in(SM100, num_sms, sm100)
        return simulated(arch="sm_100a", num_sms=num_sms, seed=seed, check_bounds=True, **options)

    return start


# ----------------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    """Inputs of one backward, and what a forward of the same operands leaves."""

    spec: AttentionBackwardSpec
    q: MXFP8Tensor
    k: MXFP8Tensor
    v: MXFP8Tensor
    dout: MXFP8Tensor
    offsets: Tensor
    delta: Tensor
    lse: Tensor
    row_sum_log2: Tensor

    @property
    def seed_offsets(self) -> Tensor:
        return equal_offsets(1 if self.spec.is_shared else self.num_segments, self.spec.num_seeds, self.offsets.device)

    @property
    def dout_offsets(self) -> Tensor:
        return equal_offsets(self.num_segments, self.spec.num_seeds, self.offsets.device)

    @property
    def num_segments(self) -> int:
        return len(self.offsets) - 1

    @property
    def saved(self) -> BackwardInputs:
        nowhere = torch.zeros(1)
        return BackwardInputs(nowhere, self.delta, self.lse, self.row_sum_log2, nowhere)


def make_problem(
    lengths: tuple[int, ...], head_dim: int, num_heads: int, num_seeds: int, *, is_shared: bool = True,
    numerics: AttentionNumerics = DEFAULT, spread: float = 1.0,
) -> Problem:  # fmt: skip
    """spread: standard deviation of the seeds, which sets that of the scores. V and dO: each block another scale."""
    generator = torch.Generator().manual_seed(sum(lengths) + num_seeds)
    spec = AttentionBackwardSpec(head_dim, num_heads, num_seeds, is_shared, numerics, torch.int64)
    assert spec.why_unsupported() is None
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    num_segments, events = len(lengths), int(offsets[-1])
    seed_offsets = equal_offsets(1 if is_shared else num_segments, num_seeds, offsets.device)
    dout_offsets = equal_offsets(num_segments, num_seeds, offsets.device)

    def normal(rows: int) -> Tensor:
        scales = torch.exp(torch.randn(rows, 1, generator=generator) / 2)
        return torch.randn(rows, spec.columns, generator=generator) * scales

    def uneven(rows: int) -> Tensor:
        exponents = torch.randint(-3, 4, (rows // 32 + 1, spec.columns // 32), generator=generator)
        return normal(rows) * exponents.exp2().repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)

    q = quantize(normal(int(seed_offsets[-1])) * spread, seed_offsets)
    k, v = quantize(normal(events), offsets), quantize(uneven(events), offsets)
    dout = quantize(uneven(num_segments * num_seeds), dout_offsets)
    shape = AttentionShape(num_seeds, num_heads)
    out, lse, row_sum_log2 = reference.attention_forward(q, k, v, offsets, shape, numerics.token(), torch.float32)
    products = dequantize(*dout, dout_offsets) * out.reshape(num_segments * num_seeds, spec.columns)
    delta = products.view(-1, num_heads, head_dim).sum(-1) if num_segments else torch.zeros(0, num_heads)
    return Problem(spec, q, k, v, dout, offsets, delta, lse, row_sum_log2)


def tiles(matrix: MXFP8Tensor, offsets: Tensor, direction: str) -> Tensor:
    """Scale tiles whose pads are NaN, although the contract says 1: nobody may use them."""
    rows = matrix.data.shape[0]
    pads = scatter_scales(torch.zeros_like(matrix.scales), offsets, rows, direction) == SCALE_ONE
    return torch.where(pads, POISON, scatter_scales(matrix.scales, offsets, rows, direction))


def differentiate(p: Problem):
    sm100 = importlib.import_module("pma.kernels.attention_backward.sm100")

    def operand(matrix: MXFP8Tensor, offsets: Tensor):
        return sm100.BackwardOperand(matrix.data, *(tiles(matrix, offsets, each) for each in ("row", "column")))

    return sm100.launch(
        p.spec, operand(p.q, p.seed_offsets), operand(p.k, p.offsets), operand(p.v, p.offsets), p.offsets,
        operand(p.dout, p.dout_offsets), sm100.SavedState(p.delta, p.lse, p.row_sum_log2),
    )  # fmt: skip


def shape_of(p: Problem) -> AttentionShape:
    return AttentionShape(p.spec.num_seeds, p.spec.num_heads)


def expected(p: Problem) -> tuple[Tensor, MXFP8Tensor, MXFP8Tensor]:
    """The reference with the kernel's rounding points: dQ, dK, dV."""
    dq, dk_data, dk_scales, dv_data, dv_scales = reference.attention_backward(
        p.q, p.k, p.v, p.offsets, p.dout, p.saved, shape_of(p), p.spec.numerics.token()
    )
    return dq, MXFP8Tensor(dk_data, dk_scales), MXFP8Tensor(dv_data, dv_scales)


def exact(p: Problem) -> Gradients:
    """Gradients of the same operands in float64; P, dS and the gradients not rounded."""
    pairs = ((p.q, p.seed_offsets), (p.k, p.offsets), (p.v, p.offsets))
    values = [dequantize(*matrix, offsets, torch.float64) for matrix, offsets in pairs]
    dout = dequantize(*p.dout, p.dout_offsets, torch.float64)
    inputs = p.saved._replace(dout=dout, dp_dout=dout, delta=p.delta.double(), lse=p.lse.double())
    return attention_backward(Operands(*values, p.offsets), inputs, shape_of(p), PlainRounding(torch.float64))


def check(p: Problem, actual) -> None:
    """As near to float64 as the reference, within the kernel budget; payload and scales its bytes; tiles in place."""
    dq, dk, dv = expected(p)
    true = exact(p)
    assert relative_error(actual.dq, true.dq) <= KERNEL_BUDGET * relative_error(dq, true.dq) + ULPS_FP32
    check_gradient(
        p, actual.dk, dk, (true.dk, p.offsets.diff() > 1)
    )  # of one event dS is the rounding error of δ alone
    check_gradient(p, actual.dv, dv, (true.dv, p.offsets.diff() > 0))
    if not p.spec.is_shared:
        is_empty = (p.offsets.diff() == 0).repeat_interleave(p.spec.num_seeds)
        assert not actual.dq[is_empty].any()


def check_gradient(p: Problem, actual, of_reference: MXFP8Tensor, exactly: tuple[Tensor, Tensor]) -> None:
    """exactly: (float64, segments whose bytes are more than noise)."""
    true, counts = exactly
    rows, values = true.shape[0], dequantize(actual.data, actual.scales, p.offsets)
    of_reference_values = dequantize(*of_reference, p.offsets)
    budget = KERNEL_BUDGET * relative_error(of_reference_values, true) + ULPS_FP32
    assert relative_error(values, true) <= budget
    for begin, end in zip(p.offsets[:-1], p.offsets[1:], strict=True):  # a short segment must not hide behind long ones
        own = KERNEL_BUDGET * relative_error(of_reference_values[begin:end], true[begin:end]) + ULPS_FP32
        assert relative_error(values[begin:end], true[begin:end]) <= own + budget, (begin, end)
    for found, wanted, of_segment in zip(actual[:2], of_reference, places(p.offsets), strict=True):
        differs = (found != wanted)[counts[of_segment]]
        assert differs.sum() <= MOST_UNEQUAL_BYTES * differs.numel()
    for found, direction in ((actual.row_tiles, "row"), (actual.column_tiles, "column")):
        assert torch.equal(found, scatter_scales(actual.scales, p.offsets, rows, direction)), direction


def places(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The segment of each row, and of each compact scale slot."""
    segments = torch.arange(len(offsets) - 1)
    starts = offsets // 32 + torch.arange(len(offsets))
    return segments.repeat_interleave(offsets.diff()), segments.repeat_interleave(starts.diff())


CASES = {
    "every length": make_problem(LENGTHS, 128, 1, 128),
    "three heads, part of a seed tile": make_problem((129, 0, 33), 128, 3, 200),
    "three heads of 64, four steps": make_problem((129, 0, 33), 64, 3, 512),
    "seeds do not stay": make_problem(SHORT, 128, 1, 640, numerics=HALF_DQ),
    "seeds of each segment": make_problem(EMPTY_FIRST, 128, 1, 200, is_shared=False),
    "seeds of each segment, heads of 64": make_problem(EMPTY_FIRST, 64, 2, 128, is_shared=False, numerics=HALF_DQ),
    "scales of P by block, heads of 64, fp16 dQ": make_problem(SHORT, 64, 3, 32, numerics=BY_BLOCK_HALF_DQ),
}
MORE_CASES = CASES | {
    "one seed": make_problem(LENGTHS, 128, 1, 1),
    "32 seeds, one head of 64": make_problem(LENGTHS, 64, 1, 32),
    "scales of P by block": make_problem(SHORT, 128, 1, 200, numerics=BY_BLOCK),
}


@pytest.mark.parametrize("name", CASES)
def test_right_and_silent(on, name):
    p = CASES[name]
    with on(p.spec.num_heads):
        actual = differentiate(p)
    check(p, actual)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("name", MORE_CASES)
def test_right_and_silent_whatever_the_order(on, name, seed):
    p = MORE_CASES[name]
    with on(p.spec.num_heads * (1 + seed % 3), seed):
        actual = differentiate(p)
    check(p, actual)


FULL = {
    f"{num_seeds} {'shared' if is_shared else 'own'} seeds, {num_heads} of {head_dim}, {numerics.dq_accumulation}": (
        EMPTY_FIRST, head_dim, num_heads, num_seeds, is_shared, numerics,
    )
    for num_seeds in (1, 32, 128, 200, 512)
    for num_heads in (1, 3)
    for head_dim in (64, 128)
    for is_shared in (True, False)
    for numerics in (DEFAULT, BY_BLOCK_HALF_DQ)
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_every_shape(on, name):
    lengths, head_dim, num_heads, num_seeds, is_shared, numerics = FULL[name]
    p = make_problem(lengths, head_dim, num_heads, num_seeds, is_shared=is_shared, numerics=numerics)
    with on(p.spec.num_heads):
        actual = differentiate(p)
    check(p, actual)


@pytest.mark.full
@pytest.mark.parametrize("numerics", [DEFAULT, BY_BLOCK], ids=["row_sum", "block"])
def test_near_uniform_attention_to_many_events(on, numerics):
    """P is 1/4,096: without its scale all of it would round to zero."""
    p = make_problem((4096,), 128, 1, 32, spread=2.0**-6, numerics=numerics)
    with on(1):
        actual = differentiate(p)
    check(p, actual)
    assert relative_error(dequantize(actual.dv.data, actual.dv.scales, p.offsets), exact(p).dv) < 0.05


def each(gradients) -> dict[str, Tensor]:
    """Every tensor of the result by name."""
    named = {"dq": gradients.dq}
    for name, quantized in (("dk", gradients.dk), ("dv", gradients.dv)):
        named |= {f"{name}.{part}": tensor for part, tensor in quantized._asdict().items()}
    return named


def assert_same(a, b) -> None:
    for (name, one), other in zip(each(a).items(), each(b).values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("seeds", [range(1, 3), pytest.param(range(3, 21), marks=pytest.mark.full)], ids=len)
@pytest.mark.parametrize("name", ["three heads, part of a seed tile"])
def test_the_order_of_completion_changes_no_bit(on, name, seeds):
    """Nor that of dQ of seeds that all segments share: a slab has one CTA, an element one thread."""
    p = CASES[name]
    with on(2 * p.spec.num_heads):
        first = differentiate(p)
    for seed in seeds:
        with on(2 * p.spec.num_heads, seed):
            assert_same(first, differentiate(p))


@pytest.mark.parametrize("name", ["seeds of each segment", "seeds of each segment, heads of 64"])
def test_a_segments_own_seeds_in_deterministic_mode(on, name):
    p = CASES[name]
    torch.use_deterministic_algorithms(True)
    try:
        with on(3 * p.spec.num_heads, concurrent=True):
            first = differentiate(p)
        for seed in (1, 2):
            with on(3 * p.spec.num_heads, seed, concurrent=True):
                assert_same(first, differentiate(p))
    finally:
        torch.use_deterministic_algorithms(False)
    check(p, first)


def test_more_ctas_give_the_same_gradients(on):
    """One CTA for a head and two; sums of dQ over CTAs have another order."""
    p = CASES["three heads, part of a seed tile"]
    with on(p.spec.num_heads):
        one = each(differentiate(p))
    with on(2 * p.spec.num_heads):
        two = each(differentiate(p))
    assert relative_error(two.pop("dq"), one.pop("dq")) <= ULPS_FP32
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("exponent", [20, -20])
def test_gradients_scale_with_that_of_the_output(on, exponent):
    """By a power of two exactly, whatever its size."""
    p = CASES["every length"]
    factor = 2.0**exponent
    scaled = p._replace(dout=p.dout._replace(scales=shifted(p.dout.scales, exponent)), delta=p.delta * factor)
    with on(1):
        before = differentiate(p)
    with on(1):
        after = differentiate(scaled)
    assert torch.equal(after.dq, before.dq * factor)
    for one, other in ((before.dk, after.dk), (before.dv, after.dv)):
        assert torch.equal(one.data, other.data) and torch.equal(shifted(one.scales, exponent), other.scales)


def shifted(scales: Tensor, exponent: int) -> Tensor:
    """Scale bytes of 2^exponent as much; a block of zeros has the byte 0 and keeps it."""
    return torch.where(scales > 0, scales.int() + exponent, 0).to(torch.uint8)


# ------------------------------------------------------------------------------------- jagged and degenerate input


def part(p: Problem, segment: int) -> Problem:
    """One segment of a problem with seeds for each, alone."""
    begin, end = p.offsets[segment].item(), p.offsets[segment + 1].item()

    def cut(matrix: MXFP8Tensor, first: int, last: int) -> MXFP8Tensor:
        slot = first // 32 + segment
        return MXFP8Tensor(
            matrix.data[first:last].clone(), matrix.scales[slot : slot + (last - first) // 32 + 1].clone()
        )

    seeds = (segment * p.spec.num_seeds, (segment + 1) * p.spec.num_seeds)
    return p._replace(
        q=cut(p.q, *seeds), k=cut(p.k, begin, end), v=cut(p.v, begin, end), dout=cut(p.dout, *seeds),
        offsets=torch.tensor([0, end - begin]), delta=p.delta[slice(*seeds)],
        lse=p.lse[segment : segment + 1], row_sum_log2=p.row_sum_log2[segment : segment + 1],
    )  # fmt: skip


def test_neighbours_change_no_bit(on):
    p = CASES["seeds of each segment"]
    with on(1):
        together = differentiate(p)
    for segment in (1, 3, 4):
        with on(1):
            alone = differentiate(part(p, segment))
        begin, end = p.offsets[segment], p.offsets[segment + 1]
        seeds = slice(segment * p.spec.num_seeds, (segment + 1) * p.spec.num_seeds)
        assert torch.equal(together.dq[seeds], alone.dq)
        for whole, single in ((together.dk, alone.dk), (together.dv, alone.dv)):
            slots = slice(begin // 32 + segment, begin // 32 + segment + (end - begin + 31) // 32)
            assert torch.equal(whole.data[begin:end], single.data)
            assert torch.equal(whole.scales[slots], single.scales[: (end - begin + 31) // 32])


def test_nan_outside_and_in_a_neighbour_changes_nothing(on):
    """Segment 3 of five is spoiled, in K, V and dO; rows in front of the first segment and behind the last too."""
    p = CASES["seeds of each segment"]
    with on(1):
        clean = differentiate(p)
    front, tail, spoiled_segment = 64, 70, 3
    begin, end = p.offsets[spoiled_segment], p.offsets[spoiled_segment + 1]
    seeds = slice(spoiled_segment * p.spec.num_seeds, (spoiled_segment + 1) * p.spec.num_seeds)

    def spoil(m: MXFP8Tensor) -> MXFP8Tensor:
        data, scales = m.data.clone(), m.scales
        data[begin:end] = NAN_PAYLOAD
        outside = [torch.full((rows, p.spec.columns), NAN_PAYLOAD, dtype=torch.uint8) for rows in (front, tail)]
        around = [torch.full((rows // 32, scales.shape[1]), POISON, dtype=torch.uint8) for rows in (front, tail)]
        return MXFP8Tensor(torch.cat([outside[0], data, outside[1]]), torch.cat([around[0], scales, around[1]]))

    dout = p.dout._replace(data=p.dout.data.clone())
    dout.data[seeds] = NAN_PAYLOAD
    with on(1):
        spoiled = differentiate(p._replace(k=spoil(p.k), v=spoil(p.v), dout=dout, offsets=p.offsets + front))
    assert torch.equal(spoiled.dq[: seeds.start], clean.dq[: seeds.start])
    assert torch.equal(spoiled.dq[seeds.stop :], clean.dq[seeds.stop :])
    assert spoiled.dq[seeds].isnan().all()
    last = front + int(p.offsets[-1])
    for before, after in ((clean.dk, spoiled.dk), (clean.dv, spoiled.dv)):
        inside = after.data[front:last]
        assert torch.equal(inside[:begin], before.data[:begin]) and torch.equal(inside[end:], before.data[end:])
        assert not after.data[:front].any() and not after.data[last:].any()
        values = dequantize(after.data, after.scales, p.offsets + front)
        assert values[front + begin : front + end].isnan().all()
        for found, direction in ((after.row_tiles, "row"), (after.column_tiles, "column")):
            wanted = scatter_scales(after.scales, p.offsets + front, after.data.shape[0], direction)
            assert torch.equal(found, wanted), direction


@pytest.mark.parametrize("lengths", [(), (0, 0, 0)], ids=["no segments", "empty segments"])
@pytest.mark.parametrize("rows", [0, 300])
@pytest.mark.parametrize("is_shared", [True, False])
def test_no_events_at_all(on, lengths, rows, is_shared):
    """Everything is defined although nothing is computed: zeros, and the scale 1.0 in tiles."""
    p = make_problem(lengths, 128, 1, 128 if is_shared else 200, is_shared=is_shared)
    empty = MXFP8Tensor(
        torch.full((rows, 128), NAN_PAYLOAD, dtype=torch.uint8),
        torch.zeros(rows // 32 + len(lengths), 4, dtype=torch.uint8),
    )
    p = p._replace(k=empty, v=empty, offsets=torch.full((len(lengths) + 1,), rows // 2))
    with on(1):
        result = differentiate(p)
    assert result.dq.shape == p.q.data.shape and not result.dq.any()
    for gradient in (result.dk, result.dv):
        assert gradient.data.shape == (rows, 128) and not gradient.data.any() and not gradient.scales.any()
        assert (gradient.row_tiles == SCALE_ONE).all() and (gradient.column_tiles == SCALE_ONE).all()


def test_one_event_takes_the_whole_gradient(on):
    """Softmax of one score is 1: dV is the sum of dO's rows, dQ and dK are zero but for the rounding of δ.

    With lse of the cast P, up to the rounding of one P.
    """
    p = make_problem((1,), 128, 1, 128)
    with on(1):
        result = differentiate(p)
    dout = dequantize(*p.dout, p.dout_offsets)
    dv = dequantize(result.dv.data, result.dv.scales, p.offsets)
    assert p.spec.numerics.lse_sum == "quantized"
    assert relative_error(dv, quantized(dout.double().sum(0, keepdim=True).float(), p.offsets)) <= E4M3_ROUNDING
    magnitude = p.delta.abs().max() * dequantize(*p.q, p.seed_offsets).abs().max() / math.sqrt(128)
    dk = dequantize(result.dk.data, result.dk.scales, p.offsets)
    assert dk.abs().max() <= ULPS_FP32 * 128 * magnitude


def quantized(values: Tensor, offsets: Tensor) -> Tensor:
    return dequantize(*quantize(values, offsets), offsets)


# ------------------------------------------------------------------------------------------------ synchronisation


def test_every_wait_of_the_product_is_needed(gpu_stand_in, waits_of_the_product):
    """Among them those that scale factors in a full tensor memory ask for: without one, a race or a deadlock."""
    sm100 = importlib.import_module("pma.kernels.attention_backward.sm100")
    p = make_problem((300, 129), 128, 1, 300, is_shared=False)
    gpu_stand_in(SM100, 1, sm100)

    def case(options: dict[str, Any]) -> None:
        with ptxsim.simulate(arch="sm_100a", num_sms=1, check_bounds=True, **options):
            check(p, differentiate(p))

    assert len(waits_of_the_product(case)) == 10, "first dO and P; K and V, Q, dP read, dS, S read, dO, dQ read, P"
