"""The module on a Hopper GPU, every operator a kernel: right, one graph, no host sync, capturable."""

import pytest
import torch
from hopper_gpu import NEEDS_HOPPER

import pma
from pma.numerics import HOPPER_NUMERICS
from pma.testing import KERNEL_BUDGET, relative_error

pytestmark = NEEDS_HOPPER
CASES = {
    "values are events": {},
    "projected values": {"value_projection": True},
    "heads of 64": {"num_heads": 6, "num_seeds": 200},
    "512 columns": {"embed_dim": 512, "num_heads": 4, "num_seeds": 640},
}


def make(backend: str = "sm90", **options) -> pma.PMA:
    torch.manual_seed(0)
    sizes = {"embed_dim": 384, "num_heads": 3, "num_seeds": 512} | options
    return pma.PMA(backend=backend, device="cuda", **sizes)


def make_inputs(module: pma.PMA, longest: int = 700, segments: int = 60):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, longest, (segments,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    events = torch.randn(int(offsets[-1]), module.embed_dim, generator=generator).bfloat16()
    dout = torch.randn(segments, module.num_seeds, module.embed_dim, generator=generator).bfloat16()
    return events.cuda(), offsets.cuda(), dout.cuda()


def run(module, events, offsets, dout) -> dict[str, torch.Tensor]:
    events = events.clone().requires_grad_()
    module.zero_grad()
    out = module(events, offsets)
    out.backward(dout)
    return {"out": out.detach(), "events": events.grad} | {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", CASES)
def test_right(name):
    module = make(**CASES[name])
    reference = make("reference", numerics=HOPPER_NUMERICS, **CASES[name])
    exact = make("reference", precision="fp32", **CASES[name])
    inputs = make_inputs(module)
    assert set(module.backend_report().values()) >= {"kernel (sm_90a)"}
    actual, expected, true = (run(each, *inputs) for each in (module, reference, exact))
    for key, value in actual.items():
        budget = KERNEL_BUDGET * relative_error(expected[key].float(), true[key].float())
        assert relative_error(value.float(), true[key].float()) <= budget, key


def test_auto_takes_the_kernels():
    module = make("auto")
    assert module.numerics == HOPPER_NUMERICS
    assert module.backend_report()["attention_backward"] == "kernel (sm_90a)"


def test_compiles_as_one_graph():
    module = make()
    inputs = make_inputs(module)
    eager = run(module, *inputs)
    module.compile(fullgraph=True)
    compiled = run(module, *inputs)
    for key, value in eager.items():
        assert relative_error(compiled[key].float(), value.float()) < 1e-3, key


def test_no_host_sync():
    module = make()
    inputs = make_inputs(module)
    run(module, *inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(module, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_takes_new_offsets():
    module = make()
    events, offsets, dout = make_inputs(module)
    events.requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            module(events, offsets).backward(dout)
    torch.cuda.current_stream().wait_stream(stream)
    module.zero_grad(), events.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(events, offsets)
        out.backward(dout)
    others = offsets.clone()
    others[1:-1] = others[1:-1].flip(0).cummin(0).values.flip(0) // 2  # shorter segments, the last one longer
    offsets.copy_(others)
    events.grad.zero_()
    graph.replay()
    replayed, gradient = out.clone(), events.grad.clone()
    expected = run(module, events.detach(), offsets, dout)
    assert torch.equal(replayed, expected["out"])
    assert torch.equal(gradient, expected["events"])


def test_deterministic_mode_repeats_bit_for_bit():
    module = make()
    inputs = make_inputs(module)
    torch.use_deterministic_algorithms(True)
    try:
        first = run(module, *inputs)
        for _ in range(100):
            assert all(torch.equal(value, first[key]) for key, value in run(module, *inputs).items())
    finally:
        torch.use_deterministic_algorithms(False)
