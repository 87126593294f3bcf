"""The library's own kernels on a CPU: bits of the reference, and nothing for the checkers to find."""

import importlib

import pytest
import torch

from pma.jagged import equal_offsets, segment_of_rows
from pma.kernels.device_facts import SM90, SM100
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec
from pma.layouts import dequantize, gather_scales, quantize, scatter_scales, transpose_payload
from pma.reference import norm
from pma.testing import ULPS_FP32, relative_error

pytestmark = [pytest.mark.ptxsim]
ARCHITECTURES = {"sm_90a": SM90, "sm_100a": SM100}
LENGTHS = (0, 1, 31, 33, 130, 0, 5)
EPS = 1e-6


@pytest.fixture(params=ARCHITECTURES)
def on(request, simulated, gpu_stand_in):
    """`with on(seed):` the launchers of `pma.kernels` run in the simulator, on one multiprocessor."""
    names = ("quantize", "rmsnorm_backward", "scatter_scales")
    modules = [importlib.import_module(f"pma.kernels.{name}.any_arch") for name in names]
    gpu_stand_in(ARCHITECTURES[request.param], 1, *modules)
    return lambda seed=1: simulated(arch=request.param, num_sms=1, seed=seed, check_bounds=True)


def jagged(columns, dtype=torch.bfloat16, *, head=3, tail=5):
    generator = torch.Generator().manual_seed(columns)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0) + head
    values = torch.randn(int(offsets[-1]) + tail, columns, generator=generator) * 8
    values[segment_of_rows(offsets, values.shape[0]) < 0] = float("nan")
    return values.to(dtype), offsets


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "columns, options",
    [
        (128, {}),
        (160, {"writes_transposed": True}),
        (384, {"columns_per_scale": 128, "writes_tiles": True}),
        (256, {"columns_per_scale": 128, "headroom_exponent": 5, "writes_transposed": True}),
    ],
    ids=str,
)
def test_quantize(on, columns, options, seed):
    from pma.kernels.quantize.any_arch import launch

    values, offsets = jagged(columns)
    spec = QuantizeSpec(columns, values.dtype, offsets.dtype, **options)
    with on(seed):
        actual = launch(spec, values, offsets)
    choices = {"columns_per_scale": spec.columns_per_scale, "headroom_exponent": spec.headroom_exponent}
    data, scales = quantize(values, offsets, **choices)
    assert torch.equal(actual.data, data) and torch.equal(actual.scales, scales)
    if spec.writes_tiles:
        assert torch.equal(actual.row_tiles, scatter_scales(scales, offsets, values.shape[0], "row"))
        assert torch.equal(actual.column_tiles, scatter_scales(scales, offsets, values.shape[0], "column"))
    if spec.writes_transposed:
        assert torch.equal(actual.transposed, transpose_payload(data, offsets))


@pytest.mark.parametrize("columns, dtype", [(128, torch.bfloat16), (96, torch.float32)], ids=str)
def test_rmsnorm_quantize(on, columns, dtype):
    from pma.kernels.quantize.any_arch import launch

    values, offsets = jagged(columns, dtype)
    weight = torch.randn(columns, generator=torch.Generator().manual_seed(1))
    spec = QuantizeSpec(columns, dtype, offsets.dtype, weight_dtype=weight.dtype, writes_tiles=True)
    with on():
        actual = launch(spec, values, offsets, weight=weight, eps=EPS)
    inside = segment_of_rows(offsets, values.shape[0]) >= 0
    assert relative_error(actual.rstd[inside], norm.rmsnorm(values, weight, EPS)[1][inside]) < ULPS_FP32
    expected = quantize(values.float() * actual.rstd[:, None] * weight, offsets)
    assert torch.equal(actual.data, expected.data) and torch.equal(actual.scales, expected.scales)


def test_delta(on):
    from pma.kernels.quantize.any_arch import launch

    dout, out = (torch.randn(3 * 37, 128).bfloat16() for _ in range(2))
    offsets = equal_offsets(3, 37, dout.device)
    spec = QuantizeSpec(128, dout.dtype, offsets.dtype, delta_columns=64, out_dtype=out.dtype)
    with on():
        actual = launch(spec, dout, offsets, out=out)
    expected = quantize(dout, offsets)
    exact = (dequantize(*expected, offsets).double() * out.double()).view(-1, 2, 64).sum(-1)
    assert torch.equal(actual.data, expected.data) and relative_error(actual.delta, exact) < ULPS_FP32


@pytest.mark.parametrize("direction", ["row", "column"])
def test_scales_between_layouts(on, direction):
    from pma.kernels.scatter_scales import any_arch

    values, offsets = jagged(160)
    rows = values.shape[0]
    scales = torch.randint(0, 256, (rows // 32 + len(LENGTHS), 5), dtype=torch.uint8)
    with on():
        tiles = any_arch.scatter_scales(scales, offsets, rows, direction)
        back = any_arch.gather_scales(tiles, offsets, rows, 160, direction)
    assert torch.equal(tiles, scatter_scales(scales, offsets, rows, direction))
    assert torch.equal(back, gather_scales(tiles, offsets, rows, 160, direction))


@pytest.mark.parametrize("columns, adds_dv", [(128, True), (416, True), (96, False)])
def test_rmsnorm_backward(on, columns, adds_dv):
    from pma.kernels.rmsnorm_backward.any_arch import launch

    values, offsets = jagged(columns)
    generator = torch.Generator().manual_seed(2)
    dy, gradient = (torch.randn(values.shape, generator=generator).bfloat16() for _ in range(2))
    weight, dv = torch.randn(columns, generator=generator), quantize(gradient, offsets) if adds_dv else None
    rstd = norm.rmsnorm(values, weight, EPS)[1]
    spec = RMSNormBackwardSpec(columns, values.dtype, dy.dtype, weight.dtype, offsets.dtype, adds_dv)
    with on():
        actual = launch(spec, dy, values, weight, rstd, offsets, dv)
    total = dy.float() + (dequantize(*dv, offsets) if adds_dv else 0)
    expected = norm.rmsnorm_backward(total, values, weight, rstd, offsets)
    assert relative_error(actual.dvalues, expected[0]) < torch.finfo(torch.bfloat16).eps
    assert relative_error(actual.dweight, expected[1]) < ULPS_FP32
