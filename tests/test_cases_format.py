"""Faults that users of comparable libraries reported, as tests of the number format, of single operators and of widths.

C04, C05, C11 to C17, C19 and C26 of the list in `test_cases.py`, from which the makers and comparisons come.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from test_cases import NEEDS_CUDA, PRECISIONS, E, assert_same_bits, run, small_pma, strided_events, weight_grads
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.overrides import TorchFunctionMode

import pma
from pma.layouts import BLOCK, decode_scales, dequantize, quantize, scatter_scales
from pma.layouts.mxfp8 import amax_bits, inverse_scales, round_e4m3, scale_from_amax_bits
from pma.ops import operators
from pma.reference.attention import AttentionShape, BackwardInputs, Operands, attention_backward, attention_forward
from pma.reference.rounding import MXFP8Rounding
from pma.testing import ULPS_FP32, make_jagged, relative_error

TAILS = (1, 31, 32, 33, 127, 128, 129)
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
E4M3_RELATIVE = 2.0**-4  # half a unit in the last place of four significant bits
E4M3_ABSOLUTE = 2.0**-10  # half the least subnormal


# ------------------------------------------------------------------------------------- tails, padding, tiles


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_c04_quantiser_leaves_out_rows_outside_the_offsets(garbage: float) -> None:
    """Rows outside the offsets must not enter a block's amax, and their payload is 0."""
    values, offsets = make_jagged((7, 0, 26), E)
    used = quantize(values, offsets)
    buffer = torch.full((40, E), garbage)
    buffer[5:38] = values
    data, scales = quantize(buffer, offsets + 5)
    assert torch.equal(data[5:38], used.data) and not data[:5].any() and not data[38:].any()
    assert torch.equal(dequantize(data, scales, offsets + 5)[5:38], dequantize(*used, offsets))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN in float tensors and 0xFF in byte tensors."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_c05_fresh_memory_reaches_nothing(request: pytest.FixtureRequest) -> None:
    """What an allocation held before, scale bytes 0xFF above all, must not reach a result."""
    modules = [small_pma(precision=precision, value_projection=True) for precision in PRECISIONS]
    events, offsets = make_jagged((*TAILS, 0, 3), E)
    expected = [run(module, module, events, offsets[:-1]) for module in modules]  # the last three rows lie outside
    request.getfixturevalue("poisoned_memory")
    assert torch.empty(1000, dtype=torch.uint8).eq(0xFF).all()
    for module, result in zip(modules, expected, strict=True):
        assert_same_bits(run(module, module, events, offsets[:-1]), result)
        assert all(value.isfinite().all() for value in result.values())


def expected_tiles(scales: Tensor, offsets: list[int], total_rows: int, direction: str) -> Tensor:
    """Scale tiles byte by byte: every tile row of a block has the block's byte, all else is 127 (the scale 1)."""
    tiles, column_tiles = total_rows // 128 + len(offsets) - 1, -(-scales.shape[1] // 4)
    result = torch.full((tiles, column_tiles, 512) if direction == "row" else (column_tiles, tiles, 512), 127)
    for b, (first, last) in enumerate(zip(offsets, offsets[1:], strict=False)):
        for r in range(-(-(last - first) // 32)):
            for c in range(scales.shape[1]):
                byte, tile = scales[first // 32 + b + r, c], first // 128 + b + r // 4
                for lane in range(32):
                    if direction == "row":
                        result[tile, c // 4, lane * 16 + r % 4 * 4 + c % 4] = byte
                    else:
                        result[c // 4, tile, lane * 16 + c % 4 * 4 + r % 4] = byte
    return result.to(torch.uint8)


@pytest.mark.parametrize("direction", ["row", "column"])
@pytest.mark.parametrize("lengths", [TAILS, (0, 5, 0, 130, 0)], ids=str)
def test_c05_every_pad_byte_is_defined(lengths: tuple[int, ...], direction: str, poisoned_memory: None) -> None:
    """Scale bytes of rows or token blocks that don't exist must be 1.0: 0xFF there is NaN, and NaN times 0 is NaN."""
    events, offsets = make_jagged(lengths, 5 * BLOCK)
    used = quantize(events, offsets).scales
    scales = torch.full_like(used, 0xFF)
    for b, length in enumerate(lengths):
        slots = slice(offsets[b] // BLOCK + b, offsets[b] // BLOCK + b + -(-length // BLOCK))
        scales[slots] = used[slots]
    tiles = scatter_scales(scales, offsets, len(events), direction)
    assert not tiles.eq(0xFF).any()
    assert torch.equal(tiles, expected_tiles(used, offsets.tolist(), len(events), direction))


# ------------------------------------------------------------------------------------------------ the P cast


@pytest.mark.parametrize(
    ("p_scale_log2", "threshold", "fits"),
    [
        (8, 0.0, True),
        (8, 0.8, True),
        (8, 0.81, False),
        (8, 4.0, False),
        (9, 0.0, False),
        (4, 4.0, True),
        (6, 3.0, False),
    ],
)
def test_c11_records_without_headroom_are_refused(p_scale_log2: int, threshold: float, fits: bool) -> None:
    """A P scale and a lazy maximum that together pass 448 must be refused: P would saturate, its sum would not."""
    choices = {"p_cast": "static", "p_scale_log2": p_scale_log2, "rescale_threshold_log2": threshold}
    if fits:
        assert pma.AttentionNumerics.from_token(pma.AttentionNumerics(**choices).token()) == pma.AttentionNumerics(
            **choices
        )
    else:
        with pytest.raises(ValueError, match=r"log2\(448\)"):
            pma.AttentionNumerics(**choices)


@pytest.mark.parametrize("order", ["reverse", "forward"])
@pytest.mark.parametrize(("p_scale_log2", "threshold"), [(8, 0.0), (8, 0.8), (4, 4.0)])
@pytest.mark.parametrize("length", [127, 128, 129, 130, 257])
def test_c11_a_late_maximum_is_not_clipped(length: int, p_scale_log2: int, threshold: float, order: str) -> None:
    """The largest score, 3.9 octaves above what came before and in the last tile, must keep its weight."""
    numerics = pma.AttentionNumerics(
        p_cast="static", kv_order=order, p_scale_log2=p_scale_log2, rescale_threshold_log2=threshold,
        denominator="fp32", lse_sum="fp32",
    )  # fmt: skip
    shape, rounding, dim = AttentionShape(1, 1), MXFP8Rounding(numerics), 64
    for peak in (0, length - 1):
        k, v, q = torch.zeros(length, dim), torch.zeros(length, dim), torch.zeros(1, dim)
        q[0, 0], v[peak] = 1.0, 1.0
        k[peak, 0] = 3.9 * math.log(2) * math.sqrt(dim)
        weight = 2**3.9 / (2**3.9 + length - 1)
        operands = Operands(q, k, v, torch.tensor([0, length]))
        out, lse, row_sum_log2 = attention_forward(operands, shape, rounding)
        assert (out / weight - 1).abs().max() <= E4M3_RELATIVE
        dout = torch.ones(1, dim)
        inputs = BackwardInputs(dout, torch.full((1, 1), weight * dim), lse, row_sum_log2, dout)
        dv = attention_backward(operands, inputs, shape, rounding).dv
        assert (dv[peak] / weight - 1).abs().max() <= E4M3_RELATIVE


# ------------------------------------------------------------------------------------------- scales, payload


def least_exponent(amax: float) -> int:
    """The least k >= −127 with amax <= 448·2^k; float64 holds every step exactly."""
    k = -127
    while amax > math.ldexp(448.0, k):
        k += 1
    return k


TINY = (0.0, -0.0, 1e-45, 9e-40, 6e-39, 1e-38, 2.0**-126, 2.0**-120, 448 * 2.0**-127)


def test_c12_tiny_blocks_are_rounded_not_lost() -> None:
    """The reciprocal of a tiny scale must not overflow: values near 0 round like all others, never to NaN."""
    values = torch.cat([torch.tensor(amax) * torch.linspace(-1, 1, BLOCK) for amax in TINY])[None]
    offsets = torch.tensor([0, 1])
    data, scales = quantize(values, offsets)
    exponents = [least_exponent(values[0, i : i + BLOCK].abs().max().item()) for i in range(0, values.shape[1], BLOCK)]
    assert scales[0].tolist() == [k + 127 for k in exponents]
    error = (dequantize(data, scales, offsets, torch.float64) - values.double()).abs()
    smallest = torch.tensor([math.ldexp(E4M3_ABSOLUTE, k) for k in exponents], dtype=torch.float64)
    assert (error <= torch.maximum(E4M3_RELATIVE * values.double().abs(), smallest.repeat_interleave(BLOCK))).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_c12_tiny_events_and_gradients(precision: str) -> None:
    """Events and output gradients of any tiny size must give finite results."""
    module = small_pma(precision=precision)
    events, offsets = make_jagged((3, 0, 40), E)
    for amax in TINY:
        result = run(module, module, events * amax, offsets, dout=torch.ones(3, 2, E) * amax)
        assert all(value.isfinite().all() for value in result.values())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("exponent", [-100, 60])
def test_c12_no_event_is_too_small_for_the_norm(exponent: int, precision: str) -> None:
    """Without epsilon the norm must remove a power of two exactly, though its square is no float32."""
    module = small_pma(precision=precision, norm_eps=0.0)
    events, offsets = make_jagged((3, 0, 40), E)
    dout = torch.ones(3, 2, E)
    expected = run(module, module, events, offsets, dout=dout)
    result = run(module, module, events * 2.0**exponent, offsets, dout=dout)
    assert_same_bits(result | {"events": result["events"] * 2.0**exponent}, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_c13_every_scale_byte(compile_it: bool, device: str) -> None:
    """Byte 0 is 2^−127, byte 254 is 2^127, byte 255 is NaN: decoded, inverted and encoded again."""

    def decode_and_invert(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return decode_scales(scales), inverse_scales(scales), decode_scales(scales, torch.float64)

    call = torch.compile(decode_and_invert, fullgraph=True, backend="aot_eager") if compile_it else decode_and_invert
    decoded, inverse, wide = (x.cpu() for x in call(ALL_BYTES.to(device)))
    powers = torch.tensor([math.ldexp(1.0, e - 127) for e in range(255)], dtype=torch.float64)
    assert torch.equal(decoded[:255].double(), powers) and torch.equal(wide[:255], powers)
    assert decoded[255].isnan() and wide[255].isnan() and inverse[255] == 0
    assert torch.equal(inverse[:255].double(), powers.flip(0))
    assert torch.equal(decoded.to(torch.float8_e8m0fnu).view(torch.uint8), ALL_BYTES)
    largest = torch.tensor([math.ldexp(448.0, e - 127) for e in range(247)])  # 448·2^120 is the last in float32
    again = scale_from_amax_bits(amax_bits(torch.cat([largest, torch.tensor([torch.nan, -torch.inf])])).to(device))
    assert again.tolist() == [*range(247), 255, 255]


def test_c14_scales_round_up_exactly() -> None:
    """The scale must be the least power of two that holds the block, at 448·2^k and an ulp to either side of it."""
    edges = torch.tensor([math.ldexp(448.0, k) for k in range(-150, 120)])
    mantissas = torch.arange(1, 2, 2**-7)
    spread = torch.cat([mantissas * 2.0**k for k in (-126, -100, -9, -8, -1, 0, 1, 8, 9, 100, 127)])
    below, above = torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(torch.inf))
    amax = torch.cat([edges, below, above, spread])
    values = torch.zeros(1, len(amax) * BLOCK)
    values[0, 7::BLOCK] = amax * torch.tensor([1.0, -1.0]).repeat(len(amax))[: len(amax)]
    data, scales = quantize(values, torch.tensor([0, 1]))
    assert scales[0].tolist() == [least_exponent(a) + 127 for a in amax.tolist()]
    payload = data.view(torch.float8_e4m3fn).float()[0, 7::BLOCK].abs()
    assert (payload <= 448).all() and (payload[scales[0] > 0] >= 224).all()


BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])


@BAD
@pytest.mark.parametrize("columns_per_scale", [32, 64])
def test_c15_a_bad_value_makes_its_block_nan(columns_per_scale: int, bad: float) -> None:
    """A NaN or Inf must not be clamped to a number: its block reads NaN, its payload 0, all others keep their bits."""
    values, offsets = make_jagged((40, 0, 24), E)
    data, scales = quantize(values, offsets, columns_per_scale=columns_per_scale)
    data[:32, :columns_per_scale], scales[0, : columns_per_scale // BLOCK] = 0, 0xFF
    values[5, 7] = bad
    result = quantize(values, offsets, columns_per_scale=columns_per_scale)
    assert torch.equal(result.data, data) and torch.equal(result.scales, scales)
    is_nan = dequantize(*result, offsets).isnan()
    assert is_nan[:32, :columns_per_scale].all() and is_nan.sum() == 32 * columns_per_scale


@BAD
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("where", ["events", "dout"])
def test_c15_a_bad_value_stays_in_its_segment(where: str, precision: str, bad: float) -> None:
    """A NaN or Inf in an event or an output gradient must show in its segment and the weights, nowhere else."""
    module = small_pma(precision=precision, value_projection=True)
    events, offsets = make_jagged((3, 40, 0, 2), E)
    dout = torch.randn(4, 2, E)
    expected = run(module, module, events, offsets, dout=dout)
    if where == "events":
        events[5, 7] = bad
    else:
        dout[1, 0, 7] = bad
    result = run(module, module, events, offsets, dout=dout)
    others, rows = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 2, 43, 44])
    assert torch.equal(result["out"][others], expected["out"][others])
    assert torch.equal(result["events"][rows], expected["events"][rows])
    assert result["out"][1].isnan().all() == (where == "events")
    assert not result["events"][3:43].isfinite().any(-1).any()
    assert not any(grad.isfinite().all() for grad in weight_grads(result).values())


class CastInputs(TorchFunctionMode):
    """Remembers the largest magnitude that reaches torch's cast to E4M3."""

    largest = 0.0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.to and torch.float8_e4m3fn in args:
            self.largest = max(self.largest, args[0].nan_to_num(0, torch.inf, torch.inf).abs().max().item())
        return function(*args, **(kwargs or {}))


def test_c16_the_cast_saturates_whatever_torch_does() -> None:
    """Above 448 torch's own cast saturates or turns to NaN depending on its version: we clamp before it."""
    values = torch.tensor([447, 448, 464, 465, 1e4, torch.inf, -465, -torch.inf, torch.nan])
    expected = torch.tensor([448.0, 448, 448, 448, 448, 448, -448, -448, torch.nan])
    with CastInputs() as seen:
        assert torch.equal(round_e4m3(values).nan_to_num(-1), expected.nan_to_num(-1))
        p = (values[:6] / 2**8)[None, None, None]
        assert torch.equal(MXFP8Rounding(pma.AttentionNumerics()).p_forward(p), torch.full_like(p, 1.75).double())
    assert seen.largest == 448


# ------------------------------------------------------------------------------------ operators and compilers


def operator_arguments(strided: bool) -> dict[str, tuple]:
    """Arguments for each operator, B = 3 with odd lengths; with `strided`, transposed or sliced where float."""
    ops = torch.ops.pma
    events, offsets = make_jagged((5, 0, 33), E)
    dout = torch.randn(3, 2, E, generator=torch.Generator().manual_seed(1))
    weight, seeds = torch.eye(E)[:, torch.randperm(E)], events[:2]
    seed_offsets, weight_offsets = torch.tensor([0, 2]), torch.tensor([0, E])
    if strided:
        events, weight = strided_events(events)["transposed"], weight.t().contiguous().t()
        dout = torch.empty(3, 2, 2 * E)[..., ::2].copy_(dout)
    x, x_scales, rstd = ops.rmsnorm_quantize(events, torch.ones(E), offsets, 1e-6, 32)
    q, k, w = ops.quantize(seeds, seed_offsets, 32), (x, x_scales), ops.quantize(weight, weight_offsets, 32)
    attention = (*q, *k, *k, offsets)
    out, lse, row_sum = ops.attention_forward(*attention, 2, 2, "{}", torch.float32)
    do, do_scales, delta = ops.quantize_dout(dout, out, 2, 32, "mxfp8")
    plain = (seeds, events, events, offsets)
    plain_out, plain_lse = ops.plain_attention_forward(*plain, 2)
    backward = (*attention, do, do_scales, dout, delta, lse, row_sum, 2, 2, "{}")
    return {
        "rmsnorm_quantize": (events, torch.ones(E), offsets, 1e-6, 32),
        "quantize": (events, offsets, 32),
        "quantize_dout": (dout, out, 2, 32, "mxfp8"),
        "dequantize": (x, x_scales, offsets),
        "scatter_scales": (x_scales, offsets, 38, "column"),
        "gemm_quantize": (*k, *w, offsets, 32, 0, True),
        "gemm": (*k, *w, offsets, torch.bfloat16),
        "weight_grad": (*k, *k, offsets),
        "attention_forward": (*attention, 2, 2, "{}", torch.bfloat16),
        "attention_backward": backward,
        "rmsnorm_backward": (events, x, x_scales, events, torch.ones(E), rstd, offsets),
        "plain_attention_forward": (*plain, 2),
        "plain_attention_backward": (dout, *plain, plain_out, plain_lse, 2),
    }


def layout(tensors: Tensor | tuple[Tensor, ...]) -> list[tuple]:
    """Shape, dtype and strides of each tensor; strides of dimensions of one element mean nothing and are left out."""
    listed = (tensors,) if isinstance(tensors, Tensor) else tensors
    return [(x.shape, x.dtype, [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]) for x in listed]


@pytest.mark.parametrize("name", operator_arguments(False))
def test_c17_fakes_do_not_copy_strides(name: str) -> None:
    """What a fake promises must be what the operator returns, and depend on shapes and dtypes of its inputs only."""
    operator, layouts = getattr(torch.ops.pma, name).default, []
    for strided in (False, True):
        arguments = operator_arguments(strided)[name]
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
            layouts += [layout(operator(*fakes))]
        layouts += [layout(operator(*arguments))]
    assert layouts == layouts[:1] * 4
    opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("name", operator_arguments(False))
def test_c19_reference_reads_no_value(name: str) -> None:
    """No operator may read a maximum or any other value on the host: on tensors without data it must run through."""
    implementation = getattr(operators, name)._init_fn
    arguments = operator_arguments(False)[name]
    with FakeTensorMode() as mode:
        result = implementation(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
    assert layout(result) == layout(implementation(*arguments))


# ---------------------------------------------------------------------------------------------------- widths


@pytest.mark.parametrize("num_heads", [1, 3, 32])
def test_c26_widths_are_served_or_refused_at_construction(num_heads: int) -> None:
    """A width that nothing serves must be refused by the constructor, with the widths that are served."""
    for head_dim in range(8, 257, 8):
        for num_seeds in (1, 3, 4, 16, 32, 33, 128, 129, 256):
            arguments = {"embed_dim": num_heads * head_dim, "num_heads": num_heads, "num_seeds": num_seeds}
            if head_dim % 32 == 0:
                assert pma.PMA(**arguments, device="meta").seed_embs.shape == (num_seeds, num_heads * head_dim)
                continue
            with pytest.raises(
                (ValueError, pma.UnsupportedError), match="32, 64, 96, 128.*head width " + str(head_dim)
            ):
                pma.PMA(**arguments, device="meta")


@pytest.mark.parametrize("num_seeds", [1, 3, 4, 16, 32, 33, 128, 129, 256])
def test_c26_any_number_of_seeds_runs(num_seeds: int) -> None:
    """What the constructor accepts must run: among equal seeds, each has the output and gradient that it has alone."""
    alone, module = small_pma(num_seeds=1), small_pma(num_seeds=num_seeds)
    module.load_state_dict(alone.state_dict() | {"seed_embs": alone.seed_embs.expand(num_seeds, E)})
    events, offsets = make_jagged((3, 0, 40), E)
    expected = run(alone, alone, events, offsets)
    result = run(module, module, events, offsets)
    assert torch.equal(result["out"], expected["out"].expand(3, num_seeds, E))
    assert relative_error(result["seed_embs"], expected["seed_embs"].expand(num_seeds, E)) <= ULPS_FP32
    assert expected["seed_embs"].any()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((64, 3, 4), ValueError, "embed_dim must be a multiple of num_heads, got 64 and 3"),
        ((64, 0, 4), ValueError, "num_heads must be at least 1, got 0"),
        ((64, 2, -1), ValueError, "num_seeds must be at least 1, got -1"),
        ((64.0, 2, 4), TypeError, "embed_dim must be an int, got float"),
        ((64, 2, True), TypeError, "num_seeds must be an int, got bool"),
    ],
)
def test_c26_sizes_of_the_wrong_kind(arguments: tuple, error: type[Exception], message: str) -> None:
    """A size of the wrong kind or value must be refused by name, with the value seen."""
    with pytest.raises(error, match=message):
        pma.PMA(*arguments)
