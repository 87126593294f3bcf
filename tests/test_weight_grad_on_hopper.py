"""Hopper's weight gradient on a Hopper GPU: many tokens, and what only hardware can tell."""

import pytest
import torch
from hopper_gpu import NEEDS_HOPPER
from hopper_weight_grad import budget, exact, integers, normal, offsets_of, weight_grad

from pma.kernels.weight_grad.hopper_spec import HopperWeightGradSpec
from pma.layouts import MXFP8Tensor
from pma.testing import relative_error

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), *NEEDS_HOPPER]
I32, I64, BF16, FP32 = torch.int32, torch.int64, torch.bfloat16, torch.float32
LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 700)
SPECS = {
    "384": HopperWeightGradSpec(384, 384, I64),
    "512, heads of 64": HopperWeightGradSpec(512, 512, I32, FP32, False, 64, 64),
    "128 by 1024, all columns of x": HopperWeightGradSpec(128, 1024, I64, FP32, False, 128, 1024),
    "bf16": HopperWeightGradSpec(256, 128, I64, BF16),
}


def on_gpu(*matrices: MXFP8Tensor) -> list[MXFP8Tensor]:
    return [MXFP8Tensor(*(each.cuda() for each in matrix)) for matrix in matrices]


@pytest.mark.parametrize("lengths", [LENGTHS, (0, 0), (1,) * 40, (3000, 5, 0, 7)])
@pytest.mark.parametrize("name", SPECS)
def test_integers_are_exact(name, lengths):
    spec = SPECS[name]
    offsets = offsets_of(lengths, dtype=spec.offsets_dtype)
    dout = integers(spec.out_columns, offsets, 0, width=spec.dout_columns_per_scale)
    x = integers(spec.in_columns, offsets, 1, width=spec.x_columns_per_scale)
    actual = weight_grad(spec, *on_gpu(dout, x), offsets.cuda())
    assert torch.equal(actual.cpu(), exact(dout, x, offsets).to(spec.out_dtype))


@pytest.mark.parametrize("name", [name for name in SPECS if name != "bf16"])
def test_many_tokens(name):
    """Within the rounding of sums of 300,000 tokens, the same bits in every run."""
    spec = SPECS[name]
    lengths = torch.randint(0, 2000, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    offsets = offsets_of(lengths, dtype=spec.offsets_dtype).cuda()
    dout = normal(spec.out_columns, offsets, 0, width=spec.dout_columns_per_scale)
    x = normal(spec.in_columns, offsets, 1, width=spec.x_columns_per_scale)
    actual = weight_grad(spec, dout, x, offsets)
    assert relative_error(actual, exact(dout, x, offsets)) < budget(int(offsets[-1]) // 16)
    for _ in range(10):
        assert torch.equal(actual, weight_grad(spec, dout, x, offsets))


def test_segments_behind_a_million_rows():
    spec = SPECS["384"]
    offsets = offsets_of((700, 0, 129), head=1_000_003).cuda()
    dout, x = normal(384, offsets, 0), normal(384, offsets, 1)
    actual = weight_grad(spec, dout, x, offsets)
    assert relative_error(actual, exact(dout, x, offsets)) < budget(1000)


def test_no_host_sync():
    spec = SPECS["384"]
    offsets = offsets_of(LENGTHS).cuda()
    dout, x = normal(384, offsets, 0), normal(384, offsets, 1)
    weight_grad(spec, dout, x, offsets)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        weight_grad(spec, dout, x, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
