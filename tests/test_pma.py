"""The module: analytic cases, oracle, format floors, invariance, gradients, contract, bad input."""

import copy
import math
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pma
from pma.testing import (
    NASTY_LENGTHS,
    SQNR_FLOORS,
    ULPS_FP32,
    make_dout,
    make_jagged,
    make_pma,
    oracle,
    relative_error,
    run_with_gradients,
    sqnr_db,
)

SIZES = {"embed_dim": 128, "num_heads": 2, "num_seeds": 5}
PRECISIONS = ("mxfp8", "bf16", "fp32")
FORMAT_FLOOR = {"mxfp8": 18.0, "bf16": 40.0, "fp32": 120.0}  # dB at width 128, standard-normal input


# ---- analytic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_event_returns_its_value_for_every_seed(precision):
    module = make_pma(precision=precision, **SIZES)
    events, offsets = make_jagged([1, 1, 1], 128)
    out = module(events, offsets)
    assert torch.equal(out, out[:, :1].expand_as(out))
    normalised = torch.nn.functional.rms_norm(events, (128,), eps=1e-6)
    assert sqnr_db(out[:, 0], normalised) > {"mxfp8": 28.0, "bf16": 40.0, "fp32": 120.0}[precision]


def test_one_event_segments_send_no_gradient_to_seeds_and_keys():
    """δ is taken from the dequantised dO, so dS is exactly 0."""
    module = make_pma(**SIZES)
    grads = run_with_gradients(module, *make_jagged([1, 1, 1, 1], 128))
    for name in ("seed_embs.grad", "query_norm.weight.grad", "query_proj.weight.grad", "key_proj.weight.grad"):
        assert (grads[name] == 0).all(), name
    assert (grads["event_embs.grad"] != 0).any()


@pytest.mark.parametrize("denominator", ["fp32", "quantized"])
@pytest.mark.parametrize("length", [1, 7, 300])
def test_equal_events_return_that_event(denominator, length):
    """V = v for all events must give v: exactly with the quantised denominator, within 1 % with the fp32 one."""
    module = make_pma(numerics=pma.AttentionNumerics(denominator=denominator), **SIZES)
    event, one = make_jagged([1], 128)
    single = module(event, one)
    out = module(event.expand(length, -1), torch.tensor([0, length]))
    assert relative_error(out, single) <= (0.0 if denominator == "quantized" else 0.01)


# ---- oracle and format -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_projection", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_output_and_every_gradient_against_the_oracle(precision, value_projection):
    events, offsets = make_jagged([*NASTY_LENGTHS, 300], 128)
    module = make_pma(precision=precision, value_projection=value_projection, **SIZES)
    actual = run_with_gradients(module, events, offsets)
    module.zero_grad(set_to_none=True)
    leaf = events.clone().requires_grad_()
    out = oracle(module, leaf, offsets)
    out.backward(make_dout(out.float()).double())
    expected = {f"{name}.grad": p.grad for name, p in module.named_parameters()}
    expected |= {"forward_output": out.detach(), "event_embs.grad": leaf.grad}
    assert expected.keys() == actual.keys()
    measured = {name: sqnr_db(actual[name], expected[name]) for name in expected}
    assert min(measured.values()) > FORMAT_FLOOR[precision], measured


@pytest.mark.slow
def test_sqnr_floors_hold_on_the_benchmark_problem():
    from benchmarks.numerics import measure

    measured = measure()
    assert measured.keys() == SQNR_FLOORS.keys()
    for name, (fp32_dq, fp16_dq) in SQNR_FLOORS.items():
        assert measured[name]["fp32 dQ vs fp32"] > fp32_dq, (name, measured[name])
        assert measured[name]["fp16 dQ vs fp32"] > fp16_dq, (name, measured[name])


def test_gradients_of_the_unrounded_reference_pass_gradcheck():
    module = pma.PMA(64, 2, 3, precision="fp32", value_projection=True, dtype=torch.float64)
    offsets = torch.tensor([1, 4, 4, 11])
    parameters = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    events = torch.randn(12, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run(events, *values):
        return functional_call(module, dict(zip(parameters, values, strict=True)), (events, offsets))

    assert torch.autograd.gradcheck(run, (events, *parameters.values()), fast_mode=True)


def test_scaling_the_output_gradient_by_a_power_of_two_scales_gradients_by_exactly_that():
    module = make_pma(**SIZES)
    events, offsets = make_jagged([1, 33, 200], 128)
    gradients = {}
    for exponent in (0, 20, -20):
        module.zero_grad(set_to_none=True)
        leaf = events.clone().requires_grad_()
        out = module(leaf, offsets)
        out.backward(
            torch.ldexp(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)), torch.tensor(exponent))
        )
        gradients[exponent] = [leaf.grad, *(p.grad for p in module.parameters())]
    for exponent in (20, -20):
        for scaled, plain in zip(gradients[exponent], gradients[0], strict=True):
            assert torch.equal(scaled, torch.ldexp(plain, torch.tensor(exponent)))


# ---- invariance ------------------------------------------------------------------------------------------------------


def pooled_and_gradient(module, pieces, douts):
    """Run segments `pieces` as one batch → per segment (output, gradient of its events)."""
    leaves = torch.cat(pieces).requires_grad_()
    offsets = torch.tensor([0, *(len(p) for p in pieces)]).cumsum(0)
    out = module(leaves, offsets)
    out.backward(torch.stack(douts))
    return list(zip(out.detach(), leaves.grad.split([len(p) for p in pieces]), strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_permuting_dropping_and_adding_segments_changes_no_other_bit(precision):
    module = make_pma(precision=precision, value_projection=True, **SIZES)
    lengths = [*NASTY_LENGTHS, 700, 5]
    pieces = [make_jagged([n], 128, seed=i)[0] for i, n in enumerate(lengths)]
    douts = [torch.randn(5, 128, generator=torch.Generator().manual_seed(i)) for i in range(len(pieces))]
    base = pooled_and_gradient(module, pieces, douts)
    orders = {
        "permuted": torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist(),
        "dropped": list(range(0, len(pieces), 2)),
        "added": [8, *range(len(pieces)), 8, 4],
        "alone": [8],
    }
    for name, order in orders.items():
        for i, result in zip(
            order, pooled_and_gradient(module, [pieces[i] for i in order], [douts[i] for i in order]), strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(result, base[i], strict=True)), (name, lengths[i])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_outside_the_offsets_reach_nothing(precision):
    module = make_pma(precision=precision, **SIZES)
    inner, _ = make_jagged([40], 128)
    padded = torch.cat([torch.full((3, 128), float("nan")), inner, torch.full((9, 128), float("inf"))])
    plain = run_with_gradients(module, inner, torch.tensor([0, 7, 40]))
    actual = run_with_gradients(module, padded, torch.tensor([3, 10, 43]))
    gradient = actual.pop("event_embs.grad")
    assert torch.equal(gradient[3:43], plain.pop("event_embs.grad"))
    assert (gradient[:3] == 0).all() and (gradient[43:] == 0).all()
    assert all(torch.equal(actual[name], plain[name]) for name in plain)


# ---- contract --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_one_compilation_serves_every_batch_after_mark_dynamic(precision, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    module = make_pma(precision=precision, embed_dim=64, num_heads=2, num_seeds=4)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for total in (7, 300, 1, 0, 2, 4096):
        for num_segments in (5, 1, 3):
            bounds = torch.randint(0, total + 1, (num_segments,), generator=torch.Generator().manual_seed(total))
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), bounds.sort()[0]])
            events = torch.randn(total, 64, generator=torch.Generator().manual_seed(total))
            eager = run_with_gradients(module, events, offsets)
            leaf = events.clone().requires_grad_()
            pma.mark_dynamic(leaf, offsets)
            module.zero_grad(set_to_none=True)
            out = compiled(leaf, offsets)
            out.backward(make_dout(out))
            if precision == "mxfp8":
                assert torch.equal(out, eager["forward_output"]) and torch.equal(leaf.grad, eager["event_embs.grad"])
            elif total:
                assert sqnr_db(out, eager["forward_output"]) > FORMAT_FLOOR["bf16"]
    assert counter.frame_count == 1


def test_compilations_without_mark_dynamic():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(make_pma(embed_dim=64, num_heads=2, num_seeds=4), fullgraph=True, backend=counter)

    def run(total, num_segments):
        offsets = torch.cat([torch.zeros(num_segments, dtype=torch.long), torch.tensor([total])])
        compiled(torch.randn(total, 64).requires_grad_(), offsets).sum().backward()
        return counter.frame_count

    assert max(run(total, b) for total in (7, 300, 2, 4096) for b in (5, 3)) <= 3
    before = counter.frame_count
    assert run(1, 5) <= before + 1 and run(0, 5) <= before + 2 and run(300, 1) <= before + 3


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rmsnorm_quantize", lambda t: (t["events"], t["weight"], t["offsets"], 1e-6, 32)),
        ("quantize", lambda t: (t["events"], t["offsets"], 32)),
        ("quantize_dout", lambda t: (t["dout"], t["dout"], 2, 32, "mxfp8")),
        ("dequantize", lambda t: (*t["x"], t["offsets"])),
        ("scatter_scales", lambda t: (t["x"][1], t["offsets"], 70, "column")),
        ("gemm_quantize", lambda t: (*t["x"], *t["w"], t["offsets"], 64, 1, True)),
        ("gemm", lambda t: (*t["x"], *t["w"], t["offsets"], torch.bfloat16)),
        ("weight_grad", lambda t: (*t["x"], *t["x"], t["offsets"])),
        ("attention_forward", lambda t: (*t["q"], *t["x"], *t["x"], t["offsets"], 3, 2, "{}", torch.float32)),
        ("rmsnorm_backward", lambda t: (t["events"], *t["x"], t["events"], t["weight"], t["rstd"], t["offsets"])),
        ("plain_attention_forward", lambda t: (t["events"][:3], t["events"], t["events"], t["offsets"], 2)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_opcheck(name, arguments):
    events, offsets = make_jagged([5, 0, 65], 64)
    weight = torch.ones(64)
    x = torch.ops.pma.quantize(events, offsets, 32)
    w = torch.ops.pma.quantize(torch.randn(64, 64), torch.tensor([0, 64]), 32)
    q = torch.ops.pma.quantize(events[:3], torch.tensor([0, 3]), 32)
    tensors = {
        "events": events.t().contiguous().t(),
        "offsets": offsets,
        "weight": weight,
        "x": x,
        "w": w,
        "q": q,
        "dout": torch.randn(3, 4, 64).transpose(0, 1)[:3],
        "rstd": torch.ones(70),
    }
    torch.library.opcheck(getattr(torch.ops.pma, name).default, arguments(tensors))


def test_flop_counter_sees_attention_and_projections():
    module, (events, offsets) = make_pma(**SIZES), make_jagged([10, 90], 128)
    with FlopCounterMode(display=False) as counter:
        module(events, offsets)
    assert counter.get_total_flops() == 4 * 5 * 100 * 128 + 2 * (100 + 5) * 128 * 128


def test_double_backward_raises_and_names_the_module():
    events, offsets = make_jagged([9], 128)
    events.requires_grad_()
    for precision in PRECISIONS:
        (gradient,) = torch.autograd.grad(
            make_pma(precision=precision, **SIZES)(events, offsets).sum(), events, create_graph=True
        )
        with pytest.raises(RuntimeError, match=r"pma\.PMA"):
            gradient.sum().backward()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_dtype_is_that_of_events_or_autocast(dtype, precision):
    module, (events, offsets) = make_pma(precision=precision, **SIZES), make_jagged([9, 0, 3], 128, dtype=dtype)
    assert module(events, offsets).dtype == dtype
    leaf = events.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(leaf, offsets)
        assert out.dtype == torch.bfloat16 and out.is_contiguous()
        with torch.autocast("cpu", enabled=False):
            assert module(events, offsets).dtype == dtype
    out.sum().backward()
    assert leaf.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("value_projection", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_activation_checkpointing_changes_no_bit(precision, value_projection, is_compiled):
    torch._dynamo.reset()
    module = make_pma(precision=precision, value_projection=value_projection, **SIZES)
    events, offsets = make_jagged([5, 0, 65], 128)
    expected = run_with_gradients(module, events, offsets)
    if is_compiled:
        module.compile(fullgraph=True, backend="aot_eager")
    module.zero_grad()
    leaf = events.clone().requires_grad_()
    out = checkpoint(module, leaf, offsets, use_reentrant=False)
    out.backward(make_dout(out))
    actual = {"forward_output": out, "event_embs.grad": leaf.grad}
    actual |= {f"{name}.grad": p.grad for name, p in module.named_parameters()}
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[], [0, 0], [3, 0]])
def test_every_parameter_gets_a_gradient_of_its_dtype_even_without_events(lengths, dtype, precision):
    """Ranks of DDP reduce the same gradients whatever batch they have."""
    module = make_pma(precision=precision, value_projection=True, dtype=dtype, **SIZES)
    module(*make_jagged(lengths, 128)).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == dtype, name


def test_plain_state_survives_copy_pickle_half_and_strict_loading():
    module, (events, offsets) = make_pma(value_projection=True, **SIZES), make_jagged([9, 3], 128)
    out = module(events, offsets)
    other = pma.PMA(value_projection=True, **SIZES)
    other.load_state_dict(module.state_dict(), strict=True)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), other):
        assert torch.equal(twin(events, offsets), out)
    assert sorted(module.state_dict()) == [
        "key_norm.weight", "key_proj.weight", "query_norm.weight", "query_proj.weight", "seed_embs",
        "value_proj.weight",
    ]  # fmt: skip
    assert module.bfloat16()(events, offsets).isfinite().all()


def test_meta_construction_and_reset_parameters():
    module = pma.PMA(device="meta", **SIZES)
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    for child in module.modules():
        child.reset_parameters()
    assert (module.key_norm.weight == 1).all()
    assert abs(module.seed_embs.std().item() / 0.02 - 1) < 0.2
    assert abs(module.key_proj.weight.std().item() * math.sqrt(128) - 1) < 0.05
    assert not list(module.buffers())


def test_max_length_and_offsets_dtype_change_nothing():
    module, (events, offsets) = make_pma(**SIZES), make_jagged([0, 40, 0, 1], 128)
    out = module(events, offsets)
    for max_length in (1, 40, 10**6):
        assert torch.equal(module(events, offsets.int(), max_length=max_length), out)


def test_unquantised_weights_are_read_fresh_after_an_in_place_update():
    module, (events, offsets) = make_pma(**SIZES), make_jagged([40], 128)
    before = module(events, offsets)
    with torch.no_grad():
        module.key_proj.weight.mul_(2)
    assert not torch.equal(module(events, offsets), before)


# ---- jagged types ----------------------------------------------------------------------------------------------------


def test_torchrec_and_nested_inputs_equal_the_plain_one():
    torchrec = pytest.importorskip("torchrec")
    module, (events, offsets) = make_pma(**SIZES), make_jagged([3, 0, 40], 128)
    out = module(events, offsets)
    weights = torch.rand(43)
    for jagged in (
        torchrec.JaggedTensor(values=events, offsets=offsets),
        torchrec.JaggedTensor(values=events, lengths=offsets.diff()),
        torchrec.JaggedTensor(values=events, offsets=offsets, weights=weights),
        torch.nested.nested_tensor_from_jagged(events, offsets),
    ):
        assert torch.equal(module(jagged), out)
    assert module(torchrec.JaggedTensor.empty()).shape == (0, 5, 128)


def test_collection_returns_a_keyed_tensor_in_its_own_order():
    torchrec = pytest.importorskip("torchrec")
    first, second = make_pma(seed=1, **SIZES), make_pma(seed=2, embed_dim=64, num_heads=1, num_seeds=2)
    collection = pma.PMACollection({"watched": first, "bought": second})
    features = {
        "bought": torchrec.JaggedTensor(*_jagged_fields([2, 0], 64)),
        "other": torchrec.JaggedTensor(*_jagged_fields([1, 1], 64)),
        "watched": torchrec.JaggedTensor(*_jagged_fields([5, 9], 128)),
    }
    pooled = collection(features)
    assert pooled.keys() == ["watched", "bought"] and pooled.length_per_key() == [640, 128]
    assert torch.equal(pooled["bought"], second(features["bought"]).flatten(1))
    with pytest.raises(ValueError, match="watched"):
        collection({"bought": features["bought"]})
    with pytest.raises(ValueError, match="number of segments.*'watched'.*'bought'"):
        collection(features | {"bought": torchrec.JaggedTensor(*_jagged_fields([1], 64))})


def test_collection_takes_any_feature_name_and_names_what_it_refuses():
    collection = pma.PMACollection({name: pma.PMA(64, 1, 1) for name in ("items", "user.id", "keys", "")})
    assert collection.keys == ["items", "user.id", "keys", ""] and len(collection.state_dict()) == 20
    for pools, error in (({"a": torch.nn.Linear(1, 1)}, TypeError), ({}, ValueError), ([pma.PMA(64, 1, 1)], TypeError)):
        with pytest.raises(error, match="pools"):
            pma.PMACollection(pools)
    with pytest.raises(ValueError, match="keys of pools"):
        pma.PMACollection({"a.b": pma.PMA(64, 1, 1), "a_b": pma.PMA(64, 1, 1)})
    with pytest.raises(TypeError, match="features must map"):
        collection([])


def _jagged_fields(lengths, embed_dim):
    events, offsets = make_jagged(lengths, embed_dim)
    return events, None, None, offsets


# ---- bad input -------------------------------------------------------------------------------------------------------

EVENTS, OFFSETS = torch.randn(9, 128), torch.tensor([0, 4, 9])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((EVENTS.int(), OFFSETS), TypeError, r"events .*float32.*got torch.int32"),
        ((EVENTS, OFFSETS.float()), TypeError, r"offsets .*int32, torch.int64, got torch.float32"),
        ((EVENTS, OFFSETS.to(torch.uint8)), TypeError, "offsets .*uint8"),
        ((EVENTS[None], OFFSETS), ValueError, "events must be 2-D, got 3-D"),
        ((EVENTS, OFFSETS[None]), ValueError, "offsets must be 1-D, got 2-D"),
        ((EVENTS, OFFSETS[:0]), ValueError, "offsets must have B"),
        ((EVENTS[:, :64], OFFSETS), ValueError, "events must have size 128 .*got 64"),
        ((EVENTS, OFFSETS.to("meta")), ValueError, "offsets on meta"),
        ((EVENTS.to("meta"), OFFSETS.to("meta")), ValueError, "the parameters on cpu"),
        ((EVENTS,), TypeError, "offsets must be given"),
        (([1.0], OFFSETS), TypeError, "events must be .*got list"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_forward_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        pma.PMA(**SIZES)(*arguments)


def test_nested_tensors_that_cannot_serve_are_refused():
    module = pma.PMA(**SIZES)
    holes = torch.nested.narrow(
        torch.randn(2, 6, 128), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged
    )
    with pytest.raises(pma.UnsupportedError, match="holes"):
        module(holes)
    with pytest.raises(pma.UnsupportedError, match=r"torch\.jagged"):
        module(torch.nested.nested_tensor([torch.randn(3, 128)], layout=torch.strided))
    with pytest.raises(TypeError, match="offsets must be None"):
        module(torch.nested.nested_tensor_from_jagged(EVENTS, OFFSETS), OFFSETS)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"embed_dim": 120}, pma.UnsupportedError, "multiple of 32.*embed_dim=120"),
        ({"num_heads": 8}, pma.UnsupportedError, "head width 16"),
        ({"num_heads": 3}, ValueError, "multiple of num_heads"),
        ({"num_seeds": 0}, ValueError, "num_seeds must be at least 1, got 0"),
        ({"num_seeds": 2.0}, TypeError, "num_seeds must be an int, got float"),
        ({"precision": "fp8"}, ValueError, "precision must be one of 'mxfp8', 'bf16', 'fp32', got 'fp8'"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
        ({"backend": "sm100"}, pma.UnsupportedError, "sm100"),
        ({"backend": "sm90"}, pma.UnsupportedError, "sm90"),
        ({"norm_eps": -1.0}, ValueError, "norm_eps"),
        ({"norm_eps": math.nan}, ValueError, "norm_eps"),
        ({"norm_eps": "a"}, TypeError, "norm_eps"),
        ({"dtype": torch.int32}, ValueError, "dtype"),
        ({"numerics": "fast"}, TypeError, "numerics must be a pma.AttentionNumerics"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_construction_is_named(change, error, message):
    with pytest.raises(error, match=message):
        pma.PMA(**(SIZES | change))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([0, 5, 4], "decrease.*5 > .*4"), ([0, 10], "9 rows.*10"), ([-1, 3], "start"), ([], "B \\+ 1")],
)
def test_opt_in_validation_of_offsets(offsets, message):
    pma.validate_offsets(OFFSETS, 9)
    with pytest.raises(ValueError, match=message):
        pma.validate_offsets(torch.tensor(offsets, dtype=torch.int64), 9)


def test_validate_offsets_refuses_what_the_module_refuses():
    for offsets, error in ((OFFSETS.float(), TypeError), (OFFSETS[None], ValueError), ([0, 9], TypeError)):
        with pytest.raises(error, match="offsets"):
            pma.validate_offsets(offsets, 9)
    with pytest.raises(ValueError, match="total_rows"):
        pma.validate_offsets(OFFSETS, -1)


def test_choices_are_fixed_at_construction():
    module = pma.PMA(**SIZES)
    for name, value in (("numerics", pma.AttentionNumerics()), ("precision", "bf16"), ("backend", "auto")):
        with pytest.raises(AttributeError):
            setattr(module, name, value)


@pytest.mark.parametrize("max_length", [-1, 1.5, True])
def test_max_length_must_be_a_count(max_length):
    with pytest.raises((TypeError, ValueError), match="max_length"):
        pma.PMA(**SIZES)(EVENTS, OFFSETS, max_length=max_length)


def test_mark_dynamic_names_what_it_cannot_mark():
    with pytest.raises(pma.UnsupportedError, match=r"nested.*events\.values"):
        pma.mark_dynamic(torch.nested.nested_tensor_from_jagged(EVENTS, OFFSETS))
    with pytest.raises(TypeError, match="events"):
        pma.mark_dynamic([1.0], OFFSETS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_float16_autocast_does_not_overflow_large_events(precision):
    module, (events, offsets) = make_pma(precision=precision, **SIZES), make_jagged([9, 3], 128)
    with torch.autocast("cpu", dtype=torch.float16):
        out = module(events * 1e5, offsets)
    assert out.dtype == torch.float16 and out.isfinite().all()
    assert torch.equal(out, module(events * 1e5, offsets).half())


def test_meta_device_runs():
    assert pma.PMA(device="meta", **SIZES)(EVENTS.to("meta"), OFFSETS.to("meta")).shape == (2, 5, 128)


def test_backend_report_names_every_operator():
    report = pma.PMA(**SIZES).backend_report()
    assert report["attention_forward"].startswith("reference") and "AttentionNumerics" in report["numerics"]
    assert "without quantisation" in pma.PMA(precision="bf16", **SIZES).backend_report()["precision"]


def test_plain_float32_is_the_oracle_up_to_rounding():
    module, (events, offsets) = make_pma(precision="fp32", **SIZES), make_jagged([50, 3], 128)
    assert relative_error(module(events, offsets), oracle(module, events, offsets)) < ULPS_FP32


@pytest.mark.parametrize("kind", ["offsets", "lengths", "nested", "collection"])
def test_jagged_types_compile_whole(kind):
    torchrec = pytest.importorskip("torchrec")
    torch._dynamo.reset()
    module, (events, offsets) = make_pma(**SIZES), make_jagged([3, 0, 40], 128)
    features = {
        "offsets": torchrec.JaggedTensor(values=events, offsets=offsets),
        "lengths": torchrec.JaggedTensor(values=events, lengths=offsets.diff()),
        "nested": torch.nested.nested_tensor_from_jagged(events, offsets),
    }
    argument, function = features.get(kind), module
    if kind == "collection":
        argument, function = {"a": features["offsets"]}, pma.PMACollection({"a": module})
    out = torch.compile(function, fullgraph=True, backend="aot_eager")(argument)
    expected = module(events, offsets)
    assert torch.equal(out["a"].view_as(expected) if kind == "collection" else out, expected)
