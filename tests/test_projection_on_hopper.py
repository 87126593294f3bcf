"""Hopper's projections on a Hopper GPU: the simulator's cases, and what only hardware can tell."""

import pytest
import torch
from hopper_gpu import NEEDS_HOPPER
from hopper_projection import CASES, I32, I64, check, launch, make_problem

from pma.kernels.projection.hopper_spec import HopperGemmQuantizeSpec, HopperGemmSpec

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), *NEEDS_HOPPER]
HEADS_OF_64 = {"in_columns_per_scale": 64}
LARGE = {
    "quantize 384, heads of 128, transposed": HopperGemmQuantizeSpec(384, 384, I64, writes_transposed=True),
    "quantize 512, heads of 64": HopperGemmQuantizeSpec(512, 512, I32, **HEADS_OF_64, columns_per_scale=64),
    "quantize 1024": HopperGemmQuantizeSpec(1024, 1024, I64),
    "quantize 2048, streamed": HopperGemmQuantizeSpec(2048, 2048, I64, in_columns_per_scale=2048),
    "gemm 384": HopperGemmSpec(384, 384, I64),
    "gemm 512, fp32": HopperGemmSpec(512, 512, I64, **HEADS_OF_64, out_dtype=torch.float32),
}


def uneven(rows: int, segments: int = 300) -> tuple[int, ...]:
    """Lengths of segments cut at random rows."""
    cuts = torch.randint(0, rows + 1, (segments - 1,), generator=torch.Generator().manual_seed(0)).sort().values
    return tuple(torch.diff(cuts, prepend=torch.zeros(1), append=torch.full((1,), rows)).long().tolist())


@pytest.mark.parametrize("name", CASES)
def test_right(name):
    spec, lengths, _ = CASES[name]
    p = make_problem(spec, lengths).to("cuda")
    check(spec, p, launch(spec, p))


@pytest.mark.parametrize("name", LARGE)
def test_many_rows(name):
    spec = LARGE[name]
    p = make_problem(spec, uneven(300_000 * 384 // spec.in_columns), device="cuda")
    first = launch(spec, p)
    check(spec, p, first)
    for _ in range(10):
        again = launch(spec, p)
        assert all(a is b or torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_million_rows_before_the_first_segment():
    """Offsets past 2^20: rows before are zeros, those behind right."""
    spec = HopperGemmQuantizeSpec(128, 128, I64, writes_transposed=True)
    p = make_problem(spec, (1_000_003, 700, 0, 129), device="cuda")
    p = p._replace(x=p.x._replace(scales=p.x.scales[1:].contiguous()), offsets=p.offsets[1:].contiguous())
    shift = int(p.offsets[0]) // 32 - (3 // 32)
    assert shift > 30_000
    check(spec, p, launch(spec, p))


def test_no_host_sync():
    spec = LARGE["gemm 384"]
    p = make_problem(spec, (700, 33), device="cuda")
    launch(spec, p)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch(spec, p)
    finally:
        torch.cuda.set_sync_debug_mode("default")
