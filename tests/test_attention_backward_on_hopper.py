"""Hopper's attention backward on a Hopper GPU: the simulator's cases, and what only hardware can tell."""

import pytest
import torch
from hopper_backward import CASES, FP16_DQ, call, check, gradients, make
from hopper_gpu import NEEDS_HOPPER
from jagged_attention import LENGTHS

from pma.numerics import HOPPER_NUMERICS

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), *NEEDS_HOPPER]
MANY = tuple(torch.randint(0, 700, (300,), generator=torch.Generator().manual_seed(0)).tolist())


@pytest.mark.parametrize("name", CASES)
def test_right(name):
    p = CASES[name].to("cuda")
    check(p, gradients(p))


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("numerics", [HOPPER_NUMERICS, FP16_DQ], ids=["fp32", "fp16"])
def test_long_segments(numerics, ctas):
    p = make((*LENGTHS, 16384, 2000, 8500, 4100), 128, 1, 256, numerics=numerics, ctas=ctas).to("cuda")
    check(p, gradients(p))


SHAPES = [(512, True, 1), (512, True, 2), (640, True, 1), (640, True, 2), (96, False, 1)]


@pytest.mark.parametrize(("num_seeds", "is_shared", "ctas"), SHAPES)
def test_many_segments(num_seeds, is_shared, ctas):
    p = make(MANY, 128, 3, num_seeds, is_shared=is_shared, ctas=ctas).to("cuda")
    check(p, gradients(p))


@pytest.mark.parametrize(("num_seeds", "is_shared", "ctas"), SHAPES)
def test_repeats_bit_for_bit_when_asked(num_seeds, is_shared, ctas):
    choices = {"ctas": ctas} | ({"slabs": 0} if is_shared else {})
    p = make(MANY[:60], 128, 3, num_seeds, is_shared=is_shared, **choices).to("cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(p)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(first, gradients(p), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_host_sync():
    launch = call(CASES["three heads, resident"].to("cuda"))
    launch()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
