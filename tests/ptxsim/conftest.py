"""What lets the launchers of `pma.kernels` run in the simulator."""

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pma.kernels.device_facts import DeviceFacts
from ptxsim.mutate import MBARRIER_WAIT, Mutant, Verdict, row, study

POISON = 0xFF  # a NaN in every format
Case = Callable[[dict[str, Any]], None]


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


@pytest.fixture
def waits_of_the_product() -> Callable[[Case], list[Verdict]]:
    """`waits_of_the_product(case)`: each wait of the warps that issue products is taken out of a case in turn.

    The warps' part of the text begins with the last line before the first product that has `opener`.
    Fails if a race or a deadlock does not tell; → the verdicts on those that the case executes.
    """

    def take_out(case: Case, opener: str = "tcgen05.mma") -> list[Verdict]:
        lines: list[int] = []  # of products; their warps' part of the text ends with the last

        def note(ptx: str, kernel: str) -> str:
            lines.extend(n for n, line in enumerate(ptx.splitlines(), 1) if "tcgen05.mma" in line)
            before = enumerate(ptx.splitlines()[: lines[0]], 1)
            lines.insert(0, max((n for n, line in before if opener in line), default=lines[0]))
            return ptx

        def is_asked(mutant: Mutant) -> bool:
            return mutant.kind == MBARRIER_WAIT and lines[0] < mutant.line < lines[-1]

        case({"patch": note})
        verdicts = [verdict for verdict in study(case, only=is_asked).verdicts if verdict.is_executed]
        for verdict in verdicts:
            assert verdict.signs.keys() & {"finding", "deadlock"}, row(verdict)
        return verdicts

    return take_out
