"""Fixtures of every test."""

from collections.abc import Callable
from types import ModuleType

import pytest

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
