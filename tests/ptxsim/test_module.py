"""The whole module through kernels for Blackwell, forward and backward, in the simulator."""

import importlib

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import pma
import ptxsim
from pma.kernels.device_facts import SM100
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
KERNELS = (
    "quantize.any_arch",
    "rmsnorm_backward.any_arch",
    "projection.sm100",
    "attention_forward.sm100",
    "attention_backward.sm100",
    "weight_grad.sm100",
)
LENGTHS = (0, 1, 33, 130)


@pytest.fixture
def on(simulated, gpu_stand_in, monkeypatch):
    """`with on(seed):` modules run in the simulator, on four multiprocessors of a B200."""
    gpu_stand_in(SM100, 4, *(importlib.import_module(f"pma.kernels.{name}") for name in KERNELS))
    monkeypatch.setattr(backends, "device_facts", lambda device: SM100)
    monkeypatch.setattr(backends, "_why_no_kernels", lambda device: None)
    monkeypatch.setattr(backends, "check_backend", lambda backend: None)
    return lambda seed=0: simulated(arch="sm_100a", num_sms=4, seed=seed, check_bounds=True)


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
    "fp16 dQ, block scales": {
        "numerics": pma.AttentionNumerics(dq_accumulation="fp16", p_cast="block", p_cast_backward="block"),
    },
    "wide": {"embed_dim": 384, "num_heads": 3, "num_seeds": 200, "value_projection": True},
}
SLOW = ("fp16 dQ, block scales", "wide")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in CASES])
def test_right_and_silent(on, name):
    """As near to the module without quantisation as the reference is, for the output and every gradient."""
    module, reference = make_modules(("sm100", "reference"), **CASES[name])
    exact = pma.PMA(precision="fp32", **{"embed_dim": 128, "num_heads": 1, "num_seeds": 40} | CASES[name])
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
def test_sqnr_floors_hold(on, accumulation, floor):
    """Those of the reference, on the problem of `benchmarks.numerics`: 1,015 events, E = 384, 512 seeds."""
    events, offsets = make_jagged(uneven_lengths(4, 2048), 384, dtype=torch.bfloat16)
    sizes = {"projection_gain": 1.0, "embed_dim": 384, "num_heads": 3, "num_seeds": 512}
    exact = run_with_gradients(make_pma(precision="fp32", **sizes), events.float(), offsets)
    numerics = pma.AttentionNumerics(dq_accumulation=accumulation)
    with ptxsim.simulate(arch="sm_100a", num_sms=4, checks=False):
        actual = run_with_gradients(make_pma(backend="sm100", numerics=numerics, **sizes), events, offsets)
    for name, floors in SQNR_FLOORS.items():
        assert sqnr_db(actual[name], exact[name]) > floors[floor], name


def test_bf16_and_int32_offsets(on):
    module, reference = make_modules(("auto", "reference"), dtype=torch.bfloat16)
    events, offsets, dout = make_inputs(module, torch.bfloat16)
    assert module.backend_report()["attention_backward"] == "kernel (sm_100a)"
    with on():
        actual = run(module, events, offsets.int(), dout)
    expected = run(reference, events, offsets, dout)
    assert {value.dtype for value in actual.values()} == {torch.bfloat16}
    for key, value in actual.items():
        assert relative_error(value.float(), expected[key].float()) < 0.02, key


def test_the_same_bits_whatever_the_order_of_completion(on):
    (module,) = make_modules(("sm100",))
    inputs, results = make_inputs(module), []
    for seed in (1, 2):
        module.zero_grad()
        with on(seed):
            results.append(run(module, *inputs))
    assert all(torch.equal(value, results[1][key]) for key, value in results[0].items())


def test_compiles_as_one_graph(on):
    """The same bits as in eager mode. Inductor would ask the GPU, which isn't there, for its properties."""
    (module,) = make_modules(("sm100",))
    inputs = make_inputs(module)
    with on():
        eager = run(module, *inputs)
        module.zero_grad()
        module.compile(backend="aot_eager", fullgraph=True)
        compiled = run(module, *inputs)
    assert all(torch.equal(value, compiled[key]) for key, value in eager.items())


@pytest.mark.parametrize("value_projection", [False, True])
def test_opcheck(on, value_projection):
    (module,) = make_modules(("sm100",), value_projection=value_projection)
    events, offsets, dout = make_inputs(module)
    weights = (module.seed_embs, module.query_norm.weight, module.query_proj.weight, module.key_norm.weight)
    values = module.value_proj.weight.detach() if value_projection else None
    arguments = (*(w.detach() for w in weights), module.key_proj.weight.detach(), values, 1, 1e-6, "{}", torch.float32)
    utils = ("test_schema", "test_faketensor")
    with on():
        opcheck(torch.ops.pma.pool_sm100.default, (events, offsets, *arguments), test_utils=utils)
        pooled = torch.ops.pma.pool_sm100(events, offsets, *arguments)
        gradients = (dout, events, offsets, module.key_norm.weight.detach(), pooled, 1, "{}")
        opcheck(torch.ops.pma.pool_backward_sm100.default, gradients, test_utils=utils)


@pytest.mark.parametrize("value_projection", [False, True])
def test_flops(value_projection):
    (module,) = make_modules(("reference",), value_projection=value_projection)
    inputs = make_inputs(module)
    with FakeTensorMode() as mode:
        events, offsets, dout = (mode.from_tensor(each) for each in inputs)
        square, vector, seeds = torch.empty(128, 128), torch.empty(128), torch.empty(40, 128)
        values = square if value_projection else None
        with FlopCounterMode(display=False) as counter:
            pooled = torch.ops.pma.pool_sm100(
                events, offsets, seeds, vector, square, vector, square, values, 1, 1e-6, "{}", torch.float32
            )
            torch.ops.pma.pool_backward_sm100(dout, events, offsets, vector, pooled, 1, "{}")
    num_events, projections = sum(LENGTHS), 1 + value_projection
    attention = (4 + 10) * 40 * num_events * 128
    assert counter.get_total_flops() == attention + 2 * 128 * 128 * (40 + 3 * projections * num_events)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 4}, "attention_forward: the head width must be 64 or 128, got 32"),
        ({"embed_dim": 192, "num_heads": 3}, "weight_grad: the width of dout must be a multiple of 128.*got 192"),
        ({"numerics": pma.AttentionNumerics(k_smoothing=True)}, "k: k_smoothing must be False, got True"),
        ({"numerics": pma.AttentionNumerics(kv_tile=64)}, "attention_forward: kv_tile must be 128, got 64"),
    ],
)
def test_refusals(on, options, message):
    """The named backend refuses, "auto" takes the reference and says why."""
    named, auto = make_modules(("sm100", "auto"), **options)
    events, offsets, _ = make_inputs(named)
    with pytest.raises(pma.UnsupportedError, match=message):
        named(events, offsets)
    assert auto.backend_report()["attention_forward"].startswith("reference (")
