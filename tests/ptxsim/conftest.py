"""What lets the launchers of `pma.kernels` run in the simulator."""

import contextlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pma.kernels.device_facts import DeviceFacts

POISON = 0xFF  # a NaN in every format


@pytest.fixture
def gpu_stand_in(monkeypatch) -> Callable[..., None]:
    """`gpu_stand_in(facts, num_sms, *modules)`: launchers of these modules take CPU tensors for those of such a GPU.

    What they allocate is full of 0xFF, so that nothing they leave unwritten passes for a result.
    """
    original = torch.empty

    def poisoned(*size: object, **options: object) -> Tensor:
        tensor = original(*size, **options)
        return tensor.view(torch.uint8).fill_(POISON).view(tensor.dtype) if tensor.numel() else tensor

    def stand_in(facts: DeviceFacts, num_sms: int, *modules: ModuleType) -> None:
        for module in modules:
            monkeypatch.setattr(module, "device_facts", lambda device: facts)
            monkeypatch.setattr(module, "num_multiprocessors", lambda device: num_sms, raising=False)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch, "empty", poisoned)

    return stand_in
