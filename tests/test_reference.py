"""Reference operators beyond what the module uses: own queries, memory chunks, scale tiles by the operator."""

import sys

import pytest
import torch

from pma.layouts import scatter_scales
from pma.ops import operators as ops
from pma.reference import attention
from pma.testing import ULPS_FP32, make_jagged, make_pma, relative_error, run_with_gradients

SHAPE = (5, 2)  # seeds, heads


def quantised(rows, segment_rows):
    return ops.quantize(rows, torch.arange(rows.shape[0] // segment_rows + 1) * segment_rows, 32)


def run(q_rows, events, offsets, numerics="{}"):
    """Forward and backward of the attention operators with `q_rows` [S, E] or [B·S, E]."""
    q, kv = quantised(q_rows, 5), ops.quantize(events, offsets, 32)
    out, lse, row_sum_log2 = ops.attention_forward(*q, *kv, *kv, offsets, *SHAPE, numerics, torch.float32)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    do, do_scales, delta = ops.quantize_dout(dout, out, SHAPE[1], 32, "mxfp8")
    grads = ops.attention_backward(
        *q, *kv, *kv, offsets, do, do_scales, dout, delta, lse, row_sum_log2, *SHAPE, numerics
    )
    return out, lse, *grads


@pytest.mark.parametrize("numerics", ["{}", '{"dq_accumulation": "fp16"}'])
def test_own_queries_equal_shared_ones_and_their_dq_adds_up(numerics):
    events, offsets = make_jagged([7, 0, 130, 33], 64)
    seeds = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    shared = run(seeds, events, offsets, numerics)
    own = run(seeds.repeat(4, 1), events, offsets, numerics)
    for index in (0, 1, 3, 4, 5, 6):  # out, lse, dk and dv with their scales
        assert torch.equal(shared[index], own[index])
    summed = own[2].view(4, 5, 64).double().sum(0)
    budget = ULPS_FP32 if numerics == "{}" else 2.0**-9
    assert own[2].shape == (20, 64) and relative_error(summed, shared[2]) < budget


def test_empty_segments_have_lse_minus_infinity_and_zero_output():
    events, offsets = make_jagged([0, 3, 0], 64)
    out, lse, *_ = run(torch.randn(5, 64), events, offsets)
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == -torch.inf).all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_lse_is_that_of_the_dequantised_operands():
    events, offsets = make_jagged([300], 64)
    q_rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    _, lse, *_ = run(q_rows, events, offsets, '{"lse_sum": "fp32"}')
    q = ops.dequantize(*quantised(q_rows, 5), torch.tensor([0, 5])).double().view(5, 2, 32).transpose(0, 1)
    k = ops.dequantize(*ops.quantize(events, offsets, 32), offsets).double().view(300, 2, 32).transpose(0, 1)
    expected = torch.logsumexp(q @ k.transpose(1, 2) / 32**0.5, -1)
    assert relative_error(lse[0], expected) < ULPS_FP32


def test_chunks_bound_memory_without_changing_a_bit(monkeypatch):
    events, offsets = make_jagged([300, 1, 0, 700], 64)
    module = make_pma(embed_dim=64, num_heads=2, num_seeds=5)
    whole = run_with_gradients(module, events, offsets)
    monkeypatch.setitem(attention.SCORES_AT_ONCE, "cpu", 1)  # one tile at a time
    for module_name in ("pma.layouts.quantize", "pma.reference.norm", "pma.reference.projection"):
        monkeypatch.setattr(sys.modules[module_name], "ROWS_AT_ONCE", 100)
    chunked = run_with_gradients(module, events, offsets)
    for name in ("forward_output", "event_embs.grad"):
        assert torch.equal(whole[name], chunked[name])
    for name in whole:  # sums over segments: one fp64 order or another
        assert relative_error(chunked[name], whole[name]) < ULPS_FP32


def test_scatter_operator_is_the_layout_function():
    events, offsets = make_jagged([7, 0, 130], 64)
    _, scales = ops.quantize(events, offsets, 32)
    for direction in ("row", "column"):
        tiles = ops.scatter_scales(scales, offsets, events.shape[0], direction)
        assert torch.equal(tiles, scatter_scales(scales, offsets, events.shape[0], direction))


def test_weight_grad_is_the_sum_over_segments_and_no_neighbour_reaches_it():
    events, offsets = make_jagged([33, 0, 129], 64)
    gradient, _ = make_jagged([33, 0, 129], 64, seed=1)
    dk, x = (ops.quantize(values, offsets, 32) for values in (gradient, events))
    whole = ops.weight_grad(*dk, *x, offsets)
    alone = torch.zeros(64, 64, dtype=torch.float64)
    for low, high in ((0, 33), (33, 162)):
        own = torch.tensor([0, high - low])
        pair = [ops.quantize(values[low:high], own, 32) for values in (gradient, events)]
        alone += ops.weight_grad(*pair[0], *pair[1], own).double()
    assert relative_error(whole, alone) < ULPS_FP32


def test_opcheck_of_the_backward_operator():
    events, offsets = make_jagged([5, 0, 65], 64)
    q, kv = quantised(torch.randn(5, 64), 5), ops.quantize(events, offsets, 32)
    out, lse, row_sum_log2 = ops.attention_forward(*q, *kv, *kv, offsets, *SHAPE, "{}", torch.float32)
    do, do_scales, delta = ops.quantize_dout(out, out, 2, 32, "mxfp8")
    arguments = (*q, *kv, *kv, offsets, do, do_scales, out, delta, lse, row_sum_log2, *SHAPE, "{}")
    torch.library.opcheck(torch.ops.pma.attention_backward.default, arguments)


def test_rstd_is_zero_outside_the_offsets():
    """What lies outside reaches no output, rstd included."""
    events = torch.randn(9, 32)
    events[[0, 8]] = float("nan")
    _, _, rstd = ops.rmsnorm_quantize(events, torch.ones(32), torch.tensor([1, 4, 8]), 1e-6, 32)
    assert rstd[[0, 8]].tolist() == [0, 0] and (rstd[1:8] > 0).all()
