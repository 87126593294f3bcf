"""Fixtures of every test."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

pytest_plugins = ["ptxsim.pytest_plugin"]


@pytest.fixture
def allocated(monkeypatch) -> Callable[[ModuleType], list[int]]:
    """`totals = allocated(sm100)`: bytes of shared memory that the module's kernels ask for, alignment included, as
    running totals of what is compiled from then on."""

    def record(kernels: ModuleType) -> list[int]:
        import cutlass.cute as cute

        totals = [0]

        class Recorder(kernels.SmemAllocator):
            def allocate_tensor(self, element_type, layout, byte_alignment, swizzle=None):
                begin = -(-totals[-1] // byte_alignment) * byte_alignment
                totals.append(begin + cute.cosize(layout) * element_type.width // 8)
                return super().allocate_tensor(element_type, layout, byte_alignment, swizzle)

            def allocate_array(self, element_type, num_elems):
                totals.append(totals[-1] + element_type.width // 8 * num_elems)
                return super().allocate_array(element_type, num_elems)

        monkeypatch.setattr(kernels, "SmemAllocator", Recorder)
        return totals

    return record


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Every new tensor starts as 0xFF bytes: NaN as fp32, bf16, E4M3 and E8M0."""
    original = torch.empty

    def poisoned(*size, **options):
        tensor = original(*size, **options)
        if type(tensor) is torch.Tensor and tensor.numel():  # not the fake tensors of a compilation
            tensor.view(torch.uint8).fill_(255)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
