"""The whole module through kernels for Blackwell and for Hopper, forward and backward, in the simulator."""

import importlib
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import pma
import ptxsim
from pma.kernels.device_facts import SM90, SM100, DeviceFacts
from pma.numerics import HOPPER_NUMERICS
from pma.ops import backends
from pma.testing import (
    KERNEL_BUDGET,
    SQNR_FLOORS,
    make_jagged,
    make_pma,
    relative_error,
    run_with_gradients,
    sqnr_db,
    uneven_lengths,
)

pytestmark = [pytest.mark.ptxsim]
LENGTHS = (0, 1, 33, 130)


class Family(NamedTuple):
    """A family of kernels, and the record of numerics that it takes."""

    name: str
    facts: DeviceFacts
    arch: str
    kernels: tuple[str, ...]
    numerics: pma.AttentionNumerics


ANY = ("quantize.any_arch", "rmsnorm_backward.any_arch")
OWN = ("projection", "attention_forward", "attention_backward", "weight_grad")
STATISTICS = "attention_backward.seed_statistics"
FAMILIES = (
    Family("sm100", SM100, "sm_100a", (*ANY, *(f"{each}.sm100" for each in OWN)), pma.AttentionNumerics()),
    Family("sm90", SM90, "sm_90a", (*ANY, STATISTICS, *(f"{each}.sm90" for each in OWN)), HOPPER_NUMERICS),
)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request) -> Family:
    return request.param


@pytest.fixture
def on(simulated, gpu_stand_in, monkeypatch, family):
    """`with on(seed):` modules run in the simulator, on four multiprocessors of the family's GPU."""
    gpu_stand_in(family.facts, 4, *(importlib.import_module(f"pma.kernels.{name}") for name in family.kernels))
    monkeypatch.setattr(backends, "device_facts", lambda device: family.facts)
    monkeypatch.setattr(backends, "_why_no_kernels", lambda device: None)
    monkeypatch.setattr(backends, "check_backend", lambda backend: None)
    return lambda seed=0: simulated(arch=family.arch, num_sms=4, seed=seed, check_bounds=True)


def make_modules(backends: tuple[str, ...], **options) -> list[pma.PMA]:
    """Modules with the same parameters."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 128, "num_heads": 1, "num_seeds": 40} | options
    modules = [pma.PMA(backend=backend, **sizes) for backend in backends]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    return modules


def run(module: pma.PMA, events: Tensor, offsets: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Output and every named gradient."""
    events = events.clone().requires_grad_()
    out = module(events, offsets)
    out.backward(dout.to(out.dtype))
    return {"out": out.detach(), "events": events.grad} | {n: p.grad for n, p in module.named_parameters()}


def make_inputs(module: pma.PMA, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    events = torch.randn(int(offsets[-1]), module.embed_dim, generator=generator, dtype=dtype)
    dout = torch.randn(len(LENGTHS), module.num_seeds, module.embed_dim, generator=generator, dtype=dtype)
    return events, offsets, dout


CASES = {
    "values are events": {},
    "projected values, heads of 64": {"num_heads": 2, "value_projection": True},
    "fp16 dQ": {"dq_accumulation": "fp16"},
    "block scales": {"p_cast": "block", "p_cast_backward": "block"},
    "wide": {"embed_dim": 384, "num_heads": 3, "num_seeds": 200, "value_projection": True},
}
SLOW = ("fp16 dQ", "block scales", "wide")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in CASES])
def test_right_and_silent(on, family, name):
    """As near to the module without quantisation as the reference is, for the output and every gradient."""
    choices = {key: value for key, value in CASES[name].items() if key in vars(family.numerics)}
    sizes = {key: value for key, value in CASES[name].items() if key not in choices}
    if family.name == "sm90" and "p_cast" in choices:
        pytest.skip("Hopper's products have no block scales")
    numerics = replace(family.numerics, **choices)
    module, reference = make_modules((family.name, "reference"), numerics=numerics, **sizes)
    exact = pma.PMA(precision="fp32", **{"embed_dim": 128, "num_heads": 1, "num_seeds": 40} | sizes)
    exact.load_state_dict(module.state_dict())
    inputs = make_inputs(module)
    with on():
        actual = run(module, *inputs)
    expected, true = run(reference, *inputs), run(exact, *inputs)
    for key, value in actual.items():
        assert relative_error(value, true[key]) <= KERNEL_BUDGET * relative_error(expected[key], true[key]), key
        assert relative_error(value, expected[key]) <= relative_error(expected[key], true[key]), key


@pytest.mark.full
@pytest.mark.parametrize(("accumulation", "floor"), [("fp32", 0), ("fp16", 1)])
def test_sqnr_floors_hold(on, family, accumulation, floor):
    """Those of the reference, on the problem of `benchmarks.numerics`: 1,015 events, E = 384, 512 seeds."""
    events, offsets = make_jagged(uneven_lengths(4, 2048), 384, dtype=torch.bfloat16)
    sizes = {"projection_gain": 1.0, "embed_dim": 384, "num_heads": 3, "num_seeds": 512}
    exact = run_with_gradients(make_pma(precision="fp32", **sizes), events.float(), offsets)
    numerics = replace(family.numerics, dq_accumulation=accumulation)
    with ptxsim.simulate(arch=family.arch, num_sms=4, checks=False):
        actual = run_with_gradients(make_pma(backend=family.name, numerics=numerics, **sizes), events, offsets)
    for name, floors in SQNR_FLOORS.items():
        assert sqnr_db(actual[name], exact[name]) > floors[floor], name


def test_bf16_and_int32_offsets(on, family):
    (module,) = make_modules(("auto",), dtype=torch.bfloat16)
    (reference,) = make_modules(("reference",), dtype=torch.bfloat16, numerics=family.numerics)
    events, offsets, dout = make_inputs(module, torch.bfloat16)
    report = module.backend_report()
    assert report["attention_backward"] == f"kernel ({family.arch})"
    assert module.numerics == family.numerics and repr(family.numerics) == report["numerics"]
    with on():
        actual = run(module, events, offsets.int(), dout)
    expected = run(reference, events, offsets, dout)
    assert {value.dtype for value in actual.values()} == {torch.bfloat16}
    for key, value in actual.items():
        assert relative_error(value.float(), expected[key].float()) < 0.02, key


def test_the_same_bits_whatever_the_order_of_completion(on, family, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    (module,) = make_modules((family.name,))
    inputs, results = make_inputs(module), []
    for seed in (1, 2):
        module.zero_grad()
        with on(seed):
            results.append(run(module, *inputs))
    assert all(torch.equal(value, results[1][key]) for key, value in results[0].items())


def test_compiles_as_one_graph(on, family):
    """The same bits as in eager mode. Inductor would ask the GPU, which isn't there, for its properties."""
    (module,) = make_modules((family.name,))
    inputs = make_inputs(module)
    with on():
        eager = run(module, *inputs)
        module.zero_grad()
        module.compile(backend="aot_eager", fullgraph=True)
        compiled = run(module, *inputs)
    assert all(torch.equal(value, compiled[key]) for key, value in eager.items())


def operators(family: Family) -> tuple:
    return getattr(torch.ops.pma, f"pool_{family.name}"), getattr(torch.ops.pma, f"pool_backward_{family.name}")


@pytest.mark.parametrize("value_projection", [False, True])
def test_opcheck(on, family, value_projection):
    (module,), (pool, pool_backward) = (
        make_modules((family.name,), value_projection=value_projection),
        operators(family),
    )
    events, offsets, dout = make_inputs(module)
    weights = (module.seed_embs, module.query_norm.weight, module.query_proj.weight, module.key_norm.weight)
    values = module.value_proj.weight.detach() if value_projection else None
    token = family.numerics.token()
    arguments = (*(w.detach() for w in weights), module.key_proj.weight.detach(), values, 1, 1e-6, token, torch.float32)
    utils = ("test_schema", "test_faketensor")
    with on():
        opcheck(pool.default, (events, offsets, *arguments), test_utils=utils)
        pooled = pool(events, offsets, *arguments)
        gradients = (dout, events, offsets, module.key_norm.weight.detach(), pooled, 1, token)
        opcheck(pool_backward.default, gradients, test_utils=utils)


@pytest.mark.parametrize("value_projection", [False, True])
def test_flops(family, value_projection):
    (module,), (pool, pool_backward) = (
        make_modules(("reference",), value_projection=value_projection),
        operators(family),
    )
    inputs = make_inputs(module)
    with FakeTensorMode() as mode:
        events, offsets, dout = (mode.from_tensor(each) for each in inputs)
        square, vector, seeds = torch.empty(128, 128), torch.empty(128), torch.empty(40, 128)
        values = square if value_projection else None
        with FlopCounterMode(display=False) as counter:
            weights = (seeds, vector, square, vector, square, values)
            pooled = pool(events, offsets, *weights, 1, 1e-6, "{}", torch.float32)
            pool_backward(dout, events, offsets, vector, pooled, 1, "{}")
    num_events, projections = sum(LENGTHS), 1 + value_projection
    attention = (4 + 10) * 40 * num_events * 128
    assert counter.get_total_flops() == attention + 2 * 128 * 128 * (40 + 3 * projections * num_events)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 4}, "attention_forward: the head width must be 64 or 128, got 32"),
        ({"embed_dim": 192, "num_heads": 3}, "weight_grad: the width of dout must be a multiple of 128.*got 192"),
        ({"k_smoothing": True}, "k: k_smoothing must be False, got True"),
        ({"kv_tile": 64}, "attention_forward: kv_tile must be 128, got 64"),
    ],
)
def test_refusals(on, family, options, message):
    """The named backend refuses, "auto" takes the reference and says why."""
    if options.keys() <= vars(family.numerics).keys():
        options = {"numerics": replace(family.numerics, **options)}
    named, auto = make_modules((family.name, "auto"), **options)
    events, offsets, _ = make_inputs(named)
    with pytest.raises(pma.UnsupportedError, match=message):
        named(events, offsets)
    assert auto.backend_report()["attention_forward"].startswith("reference (")
