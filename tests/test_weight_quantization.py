"""Weights are quantised in every forward, once, for it and for its backward: nothing of them is kept any longer."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pma
from pma.testing import make_dout, make_jagged, make_pma

PROJECTIONS = ("query_proj", "key_proj", "value_proj")
LENGTHS = (40, 0, 1, 33)


def make_module(seed: int = 0) -> pma.PMA:
    return make_pma(seed, embed_dim=128, num_heads=2, num_seeds=4, value_projection=True)


def run(module: nn.Module) -> list[Tensor]:
    """Output, gradient of the events, gradients of the parameters."""
    events, offsets = make_jagged(LENGTHS, 128)
    module.zero_grad()
    out = module(events.requires_grad_(), offsets)
    out.backward(make_dout(out))
    return [out.detach(), events.grad, *(parameter.grad.clone() for parameter in module.parameters())]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def through_data(weight: nn.Parameter, values: Tensor) -> None:
    weight.data.copy_(values)  # leaves no trace in the version counter


def through_no_grad(weight: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(values)


def through_a_view(weight: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        weight.view(-1).copy_(values.view(-1))


@pytest.mark.parametrize("update", [through_data, through_no_grad, through_a_view])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_an_in_place_update_is_seen(name: str, update: Callable[[nn.Parameter, Tensor], None]) -> None:
    """Output and every gradient are then those of a module that never had other weights."""
    module, fresh = make_module(), make_module()
    before, values = run(module), getattr(make_module(seed=1), name).weight.detach()
    update(getattr(module, name).weight, values)
    getattr(fresh, name).weight = nn.Parameter(values.clone())
    actual = run(module)
    assert_equal(actual, run(fresh))
    assert not torch.equal(actual[0], before[0])


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_steps_of_an_optimiser_are_seen(options: dict[str, bool]) -> None:
    module = make_module()
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
    for _ in range(3):
        run(module)
        optimiser.step()
    fresh = make_module()
    fresh.load_state_dict(module.state_dict())
    assert_equal(run(module), run(fresh))


def test_backward_takes_the_weights_of_its_forward() -> None:
    """An update between the two changes no gradient: backward has what its forward was computed with."""
    module, (events, offsets) = make_module(), make_jagged(LENGTHS, 128)
    expected = run(module)
    module.zero_grad()
    out = module(events.requires_grad_(), offsets)
    for name in PROJECTIONS:
        through_no_grad(getattr(module, name).weight, getattr(make_module(seed=1), name).weight.detach())
    out.backward(make_dout(out))
    assert_equal([out.detach(), events.grad, *(parameter.grad for parameter in module.parameters())], expected)


class CallCounter(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_a_weight_is_quantised_once_for_forward_and_backward() -> None:
    module, (events, offsets) = make_module(), make_jagged(LENGTHS, 128)
    with CallCounter() as forward:
        out = module(events.requires_grad_(), offsets)
    with CallCounter() as backward:
        out.backward(make_dout(out))
    assert forward.calls["pma::quantize"] == len(PROJECTIONS)
    assert backward.calls["pma::quantize"] == 0
    assert backward.calls["pma::gemm"] == 2, "the input gradients of keys and values take what forward has quantised"
