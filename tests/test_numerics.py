"""AttentionNumerics: the record, its rules, and what each option buys."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from pma import AttentionNumerics, underflow_fraction, underflow_threshold
from pma.layouts import MXFP8Tensor, dequantize, quantize
from pma.layouts.mxfp8 import round_e4m3
from pma.reference import operators as reference
from pma.reference.attention import (
    AttentionShape,
    BackwardInputs,
    Operands,
    attention_backward,
    attention_forward,
    running_maximum,
)
from pma.reference.rounding import MXFP8Rounding, PlainRounding
from pma.testing import make_jagged, make_pma, relative_error, run_with_gradients, sqnr_db

RECORDS = [
    AttentionNumerics(),
    AttentionNumerics(p_cast="static", kv_order="forward"),
    AttentionNumerics(p_cast="static"),
    AttentionNumerics(p_cast="block"),
    AttentionNumerics(p_cast_backward="block"),
    AttentionNumerics(p_cast="static", p_scale_log2=6, rescale_threshold_log2=2.0),
    AttentionNumerics(p_cast="static", denominator="fp32"),
    AttentionNumerics(lse_sum="fp32"),
    AttentionNumerics(dq_accumulation="fp16"),
    AttentionNumerics(dp_operands="bf16"),
    AttentionNumerics(k_smoothing=True),
    AttentionNumerics(repeated_max_guard=True),
    AttentionNumerics(uniform_scales=True, headroom_exponent=5),
    AttentionNumerics(p_cast="static", uniform_scales=True, folds_v_scales=True),
    AttentionNumerics(kv_tile=64),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.token())
def test_token_round_trip_and_hash(record):
    assert AttentionNumerics.from_token(record.token()) == record
    assert len({record, replace(record)}) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"kv_order": "up"},
        {"p_cast": "none"},
        {"kv_tile": 48},
        {"p_scale_log2": 9},
        {"p_scale_log2": 8, "rescale_threshold_log2": 1.0, "p_cast": "static"},
        {"rescale_threshold_log2": -1.0},
        {"rescale_threshold_log2": math.nan},
        {"kv_tile": 1 << 20},
        {"p_scale_log2": -1},
        {"dq_scale_log2": 100},
        {"headroom_exponent": -3},
        {"dq_accumulation": "bf16"},
        {"folds_v_scales": True},
    ],
    ids=str,
)
def test_the_record_refuses_and_names_the_argument(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AttentionNumerics(**bad)


@pytest.mark.parametrize("bad", [{"headroom_exponent": 1.0}, {"k_smoothing": "no"}, {"kv_tile": None}], ids=str)
def test_the_record_refuses_wrong_types(bad):
    with pytest.raises(TypeError, match=next(iter(bad))):
        AttentionNumerics(**bad)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.token())
def test_every_option_stays_within_the_format_tier(record):
    """18 dB is what two more roundings than the default could cost."""
    events, offsets = make_jagged([1, 0, 300, 129], 128)
    sizes = {"embed_dim": 128, "num_heads": 2, "num_seeds": 40}
    exact = run_with_gradients(make_pma(precision="fp32", **sizes), events, offsets)
    actual = run_with_gradients(make_pma(numerics=record, **sizes), events, offsets)
    assert min(sqnr_db(actual[name], exact[name]) for name in exact) > 18


@pytest.mark.parametrize("record", RECORDS[1:], ids=lambda r: r.token())
def test_every_option_takes_effect(record):
    """On sharp attention, where P spans more octaves than E4M3; the guard needs events that repeat."""
    events, offsets = make_jagged([1, 0, 300, 129], 128)
    events[2:300:2] = events[1:299:2]
    sizes = {"embed_dim": 128, "num_heads": 2, "num_seeds": 40, "projection_gain": 3.0}
    default = run_with_gradients(make_pma(**sizes), events, offsets)
    actual = run_with_gradients(make_pma(numerics=record, **sizes), events, offsets)
    assert any(not torch.equal(actual[name], default[name]) for name in default)


def sink_problem(num_keys: int = 512, sink_strength: float = 9.0) -> tuple[Operands, AttentionShape]:
    """One head of width 32 whose first four keys score `sink_strength` above unit-normal others."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(16, 32, generator=generator)
    k = torch.randn(num_keys, 32, generator=generator)
    direction = torch.zeros(32)
    direction[0] = 1.0
    q[:, 0], k[:, 0] = 4.0, 0.0
    k[:4] = direction * sink_strength * math.sqrt(32) / 4.0
    v = torch.randn(num_keys, 32, generator=generator)
    return Operands(q, k, v, torch.tensor([0, num_keys])), AttentionShape(16, 1)


def test_reverse_order_with_256_loses_nothing_that_forward_with_1_loses():
    operands, shape = sink_problem()
    exact = attention_forward(
        operands._replace(q=operands.q.double(), k=operands.k.double()), shape, PlainRounding(torch.float64)
    )
    errors = {}
    for order, log2 in (("forward", 0), ("reverse", 8)):
        rounding = MXFP8Rounding(AttentionNumerics(p_cast="static", kv_order=order, p_scale_log2=log2))
        errors[order] = relative_error(attention_forward(operands, shape, rounding).out, exact.out) ** 2
    assert errors["forward"] > 3 * errors["reverse"]


def test_casts_with_scales_of_their_own_keep_what_stands_behind_a_sink():
    """Whatever the order: P of every tile but the sink's is relative to that tile's own maximum."""
    operands, shape = sink_problem(sink_strength=25.0)
    exact = attention_forward(
        operands._replace(q=operands.q.double(), k=operands.k.double()), shape, PlainRounding(torch.float64)
    )
    errors = {}
    for cast, order in itertools.product(("static", "tile", "block"), ("forward", "reverse")):
        rounding = MXFP8Rounding(AttentionNumerics(p_cast=cast, kv_order=order))
        result = attention_forward(operands, shape, rounding)
        errors[cast, order] = relative_error(result.out, exact.out)
    for cast in ("tile", "block"):
        assert errors[cast, "forward"] == errors[cast, "reverse"] <= errors["static", "forward"]


@pytest.mark.parametrize("cast", ["tile", "block"])
def test_p_with_scales_of_its_own_fills_e4m3(cast):
    """The largest P of each tile, or block, lies in (224, 448] before the cast, where 2^8 puts 1."""
    seen = []

    class Recording(MXFP8Rounding):
        def p_forward(self, p):
            seen.append(p)
            return super().p_forward(p)

    operands, shape = sink_problem(num_keys=256)
    attention_forward(operands, shape, Recording(AttentionNumerics(p_cast=cast)))
    largest = torch.cat(seen).amax(-1)
    largest = largest[largest > 0]  # slots without a tile
    assert (largest > 0.875).all() and (largest <= 1.75).all()


def test_sums_after_the_cast_make_lse_that_of_the_cast_p():
    """Two events, the second 0.3 octaves lower: P is rounded, and so is their sum, in out and in lse alike."""
    q, k = torch.ones(1, 32), torch.zeros(2, 32)
    k[1] = -0.3 * math.log(2) / math.sqrt(32)
    operands, shape = Operands(q, k, torch.ones(2, 32), torch.tensor([0, 2])), AttentionShape(1, 1)
    result = attention_forward(operands, shape, MXFP8Rounding(AttentionNumerics()))
    rounded = round_e4m3(torch.tensor([256.0, 256.0 * 2**-0.3])).sum() / 256
    assert (result.out == 1).all() and math.isclose(result.lse.item(), math.log(rounded), rel_tol=1e-6)
    exact = attention_forward(operands, shape, MXFP8Rounding(AttentionNumerics(lse_sum="fp32")))
    assert math.isclose(exact.lse.item(), math.log(1 + 2**-0.3), rel_tol=1e-6)


def test_threshold_formula():
    assert underflow_threshold(1.0, 0.0) == 10 * math.log(2)
    assert math.isclose(underflow_threshold(256.0) - underflow_threshold(1.0), math.log(256))
    assert underflow_fraction(underflow_threshold(16.0), 16.0) == 0.5


def test_k_smoothing_rescues_keys_with_a_large_common_mean():
    events, offsets = make_jagged([400], 64)
    events[:, 0] = 100.0
    sizes = {"embed_dim": 64, "num_heads": 1, "num_seeds": 8}
    exact = run_with_gradients(make_pma(precision="fp32", **sizes), events, offsets)["forward_output"]
    plain, smooth = (
        sqnr_db(
            run_with_gradients(make_pma(numerics=n, **sizes), events, offsets)["forward_output"][..., 1:],
            exact[..., 1:],
        )
        for n in (AttentionNumerics(), AttentionNumerics(k_smoothing=True))
    )
    assert smooth > plain + 1


def test_bf16_dp_spares_the_seeds_the_rounding_of_dout():
    events, offsets = make_jagged([400, 300], 64)
    sizes = {"embed_dim": 64, "num_heads": 1, "num_seeds": 32, "projection_gain": 0.5}
    exact = run_with_gradients(make_pma(precision="fp32", **sizes), events, offsets)
    plain, bf16 = (
        run_with_gradients(make_pma(numerics=n, **sizes), events, offsets)
        for n in (AttentionNumerics(), AttentionNumerics(dp_operands="bf16"))
    )
    for name in ("seed_embs.grad", "query_proj.weight.grad", "key_proj.weight.grad"):
        assert sqnr_db(bf16[name], exact[name]) > sqnr_db(plain[name], exact[name]) + 0.3


def test_repeated_max_guard_keeps_p_below_one_where_maxima_repeat():
    seen = []

    class Recording(MXFP8Rounding):
        def p_forward(self, p):
            seen.append(p.max().item())
            return super().p_forward(p)

    q, k, v = torch.ones(1, 32), torch.ones(6, 32), torch.randn(6, 32)
    operands, shape = Operands(q, k, v, torch.tensor([0, 6])), AttentionShape(1, 1)
    for guard in (False, True):
        result = attention_forward(
            operands, shape, Recording(AttentionNumerics(p_cast="static", repeated_max_guard=guard))
        )
        assert relative_error(result.out[0, 0], v.mean(0)) < 2.0**-4
    assert seen[0] == 1.0 and abs(seen[1] - math.sqrt(0.5)) < 2.0**-20


def test_lazy_rescaling_moves_the_maximum_only_past_the_threshold():
    tile_max = torch.tensor([0.0, 1.0, 5.0, 5.5, 1.0, 2.0]).view(6, 1, 1)
    segment = torch.tensor([0, 0, 0, 0, 1, 1])
    lazy = AttentionNumerics(kv_order="forward", p_scale_log2=6, rescale_threshold_log2=2.0)
    assert running_maximum(tile_max, segment, lazy, 1.0).flatten().tolist() == [0, 0, 5, 5, 1, 1]
    exact = AttentionNumerics(kv_order="reverse")
    assert running_maximum(tile_max, segment, exact, 1.0).flatten().tolist() == [5.5, 5.5, 5.5, 5.5, 2, 2]


def test_backward_p_scale_follows_the_row_sum_on_long_uniform_segments():
    """A constant 2^8 loses small P: dV falls to about 17 dB at 64k near-uniform events; the row-sum rule does not."""
    num_keys, shape = 65536, AttentionShape(32, 1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 32, generator=generator) for n in (32, num_keys, num_keys))
    operands = Operands(q * 0.1, k, v, torch.tensor([0, num_keys]))
    dout = torch.randn(32, 32, generator=generator)
    forward = attention_forward(operands, shape, PlainRounding(torch.float32))
    delta = (dout * forward.out[0]).sum(-1, keepdim=True)

    class Constant(MXFP8Rounding):
        def p_backward(self, p, row_sum_log2):
            return super().p_backward(p, torch.zeros_like(row_sum_log2))

    def dv(rounding):
        inputs = BackwardInputs(dout, delta, forward.lse, forward.row_sum_log2, dout)
        return attention_backward(operands, inputs, shape, rounding).dv

    exact = dv(PlainRounding(torch.float32))
    ours, constant = (
        sqnr_db(dv(MXFP8Rounding(AttentionNumerics())), exact),
        sqnr_db(dv(Constant(AttentionNumerics())), exact),
    )
    assert ours > 27 and constant < ours - 3


def test_fp16_dq_overflow_stays_inf():
    events, offsets = make_jagged([64], 64)
    module = make_pma(embed_dim=64, num_heads=1, num_seeds=4, numerics=AttentionNumerics(dq_accumulation="fp16"))
    leaf = events.requires_grad_()
    (module(leaf, offsets) * 2.0**24).sum().backward()
    assert not module.query_proj.weight.grad.isfinite().all() and leaf.grad.isfinite().all()


def test_p_block_scale_equals_the_amax_of_the_p_computed():
    p = torch.rand(1, 1, 4, 128) * torch.tensor([1.0, 1e-3, 1e-6, 1.0]).view(1, 1, 4, 1)
    rounded = MXFP8Rounding(AttentionNumerics(p_cast="block")).p_forward(p)
    for block in range(4):
        columns = slice(32 * block, 32 * block + 32)
        rows = p[0, 0, :, columns]
        for row in range(4):
            data = MXFP8Tensor(*quantize(rows[row : row + 1], torch.tensor([0, 1])))
            assert torch.equal(dequantize(*data, torch.tensor([0, 1]))[0].double(), rounded[0, 0, row, columns])


def test_v_scales_folded_into_p_change_only_what_underflows():
    """A block of V 20 octaves below the rest keeps its large P; equal scales change no bit."""
    events, offsets = make_jagged([64, 40], 64)
    q = quantize(torch.randn(5, 64), torch.tensor([0, 5]), columns_per_scale=32)
    plain = AttentionNumerics(p_cast="static", denominator="fp32", uniform_scales=True)

    def out(v, record):
        shape = AttentionShape(5, 2)
        return reference.attention_forward(q, v, v, offsets, shape, record.token(), torch.float32)[0]

    folded = replace(plain, folds_v_scales=True)
    equal = quantize(events.sign(), offsets, columns_per_scale=32)
    assert torch.equal(out(equal, folded), out(equal, plain))
    events[:32] *= 2.0**-20
    small = quantize(events, offsets, columns_per_scale=32)
    difference = relative_error(out(small, folded), out(small, plain))
    assert 0 < difference < 2.0**-8, "the small block's least P round differently, and its values hardly count"
