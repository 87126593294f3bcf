"""Marks of tests that need a Hopper GPU, and why they skip without one."""

import importlib.util

import pytest
import torch

from pma.kernels.device_facts import SM90, device_facts

HAS_HOPPER = torch.cuda.is_available() and device_facts(torch.device("cuda", 0)) == SM90
HAS_KERNELS = importlib.util.find_spec("cutlass") is not None and importlib.util.find_spec("quack") is not None
NEEDS_HOPPER = [
    pytest.mark.sm90,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(not HAS_KERNELS, reason="needs nvidia-cutlass-dsl and quack-kernels"),
]
