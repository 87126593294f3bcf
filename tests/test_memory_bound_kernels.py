"""The memory-bound kernels on a GPU, against the reference: bits for the quantiser, the kernel budget for the norm."""

import importlib.util

import pytest
import torch

import pma
from pma.jagged import segment_of_rows
from pma.kernels.device_facts import device_facts
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec
from pma.layouts import dequantize, gather_scales, quantize, scatter_scales, transpose_payload
from pma.reference import norm
from pma.testing import KERNEL_BUDGET, NASTY_LENGTHS, ULPS_FP32, make_dout, make_pma, relative_error, sqnr_db

HAS_GPU = torch.cuda.is_available() and device_facts(torch.device("cuda", 0)) is not None
HAS_KERNELS = importlib.util.find_spec("cutlass") is not None and importlib.util.find_spec("quack") is not None
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.sm90,
    pytest.mark.sm100,
    pytest.mark.skipif(not HAS_GPU, reason="needs a Hopper or Blackwell GPU"),
    pytest.mark.skipif(not HAS_KERNELS, reason="needs nvidia-cutlass-dsl and quack-kernels"),
]
LENGTHS = (*NASTY_LENGTHS, 5, 16, 17, 1000, 0)
EPS = 1e-6


def kernel(spec, values, offsets, **arguments):
    from pma.kernels.quantize.any_arch import launch

    return launch(spec, values, offsets, **arguments)


def jagged(columns, dtype=torch.bfloat16, lengths=LENGTHS, *, head=7, tail=45, offsets_dtype=torch.int64):
    """Rows over many octaves on the GPU, NaN outside the offsets."""
    generator = torch.Generator().manual_seed(columns + len(lengths))
    offsets = (torch.tensor([0, *lengths]).cumsum(0) + head).to(offsets_dtype)
    rows = int(offsets[-1]) + tail
    exponents = torch.randint(-12, 13, (rows, 1), generator=generator).float()
    values = (torch.randn(rows, columns, generator=generator) * torch.exp2(exponents)).to(dtype)
    outside = segment_of_rows(offsets, rows) < 0
    values[outside] = float("nan")
    return values.cuda(), offsets.cuda()


def spec_of(values, offsets, **options):
    return QuantizeSpec(values.shape[1], values.dtype, offsets.dtype, **options)


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "columns, columns_per_scale", [(384, 32), (384, 128), (384, 384), (512, 32), (32, 32), (96, 32), (160, 160),
                                   (416, 32), (1024, 64), (2048, 32), (4096, 4096)],
)  # fmt: skip
def test_quantize_gives_the_references_bits(columns, columns_per_scale, dtype, offsets_dtype):
    values, offsets = jagged(columns, dtype, offsets_dtype=offsets_dtype)
    actual = kernel(spec_of(values, offsets, columns_per_scale=columns_per_scale), values, offsets)
    expected = quantize(values, offsets, columns_per_scale=columns_per_scale)
    assert torch.equal(actual.data, expected.data)
    assert torch.equal(actual.scales, expected.scales)


@pytest.mark.parametrize("head, tail", [(0, 0), (128, 0), (7, 400), (300, 1)])
@pytest.mark.parametrize("lengths", [LENGTHS, (0,) * 9, (3,) * 700, (1, 0, 2) * 300, (5000,), ()], ids=str)
def test_scales_in_tiles_and_transposed_payload(lengths, head, tail):
    values, offsets = jagged(160, lengths=lengths, head=head, tail=tail)
    spec = spec_of(values, offsets, writes_tiles=True, writes_transposed=True)
    actual = kernel(spec, values, offsets)
    data, scales = quantize(values, offsets)
    assert torch.equal(actual.data, data) and torch.equal(actual.scales, scales)
    assert torch.equal(actual.row_tiles, scatter_scales(scales, offsets, values.shape[0], "row"))
    assert torch.equal(actual.column_tiles, scatter_scales(scales, offsets, values.shape[0], "column"))
    assert torch.equal(actual.transposed, transpose_payload(data, offsets))


def test_quantize_boundaries():
    """Zeros, subnormals, the edges of 448·2^k at every exponent, NaN and Inf: one block of 32 columns for each."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    edges = torch.tensor([1.0, 1.25, 1.75, 1.75 * (1 + 2**-23), 1.875, 1.9999999], dtype=torch.float64)
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 448.0, 449.0], dtype=torch.float64)
    amax = torch.cat([(torch.exp2(exponents)[:, None] * edges).flatten(), special]).float()
    amax = torch.cat([amax, -amax])[: (2 * amax.numel()) // 8 * 8]
    generator = torch.Generator().manual_seed(0)
    fractions = torch.rand(amax.numel() // 8, 32, 8, 32, generator=generator) * 2 - 1
    blocks = torch.nan_to_num(amax, 1.0, 1.0, -1.0).view(-1, 1, 8, 1) * fractions
    blocks[:, 5, :, 7] = amax.view(-1, 8)
    values = blocks.reshape(-1, 256).cuda()
    offsets = torch.arange(0, values.shape[0] + 1, 32, device="cuda")
    actual, expected = kernel(spec_of(values, offsets), values, offsets), quantize(values, offsets)
    assert torch.equal(actual.scales, expected.scales)
    assert torch.equal(actual.data, expected.data)
    assert (actual.scales == 255).any() and (actual.scales == 0).any()


@pytest.mark.parametrize("heads", [1, 3, 6])
@pytest.mark.parametrize("dp_operands", ["mxfp8", "bf16"])
def test_delta(heads, dp_operands):
    dout, out = make_dout(torch.empty(5, 37, 384)).cuda().bfloat16(), torch.randn(5, 37, 384).cuda().bfloat16()
    dout[3, 4, 5] = float("inf")  # its block and its δ are NaN in both
    actual = torch.ops.pma.quantize_dout(dout, out, heads, 32, dp_operands)
    expected = torch.ops.pma.quantize_dout(dout, out, heads, 32, dp_operands, "reference")
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    exact = torch.isfinite(expected[2])
    assert torch.equal(exact, torch.isfinite(actual[2])) and not exact.all()
    assert relative_error(actual[2][exact], expected[2][exact]) < ULPS_FP32


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["w32", "w16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("columns, columns_per_scale", [(384, 32), (384, 384), (512, 32), (96, 32), (4096, 32)])
def test_rmsnorm_quantize(columns, columns_per_scale, dtype, weight_dtype):
    values, offsets = jagged(columns, dtype)
    weight = torch.randn(columns, generator=torch.Generator().manual_seed(1)).to(weight_dtype).cuda()
    spec = spec_of(values, offsets, columns_per_scale=columns_per_scale, weight_dtype=weight_dtype)
    actual = kernel(spec, values, offsets, weight=weight, eps=EPS)
    expected = torch.ops.pma.rmsnorm_quantize(values, weight, offsets, EPS, columns_per_scale, "reference")
    inside = segment_of_rows(offsets, values.shape[0]) >= 0
    assert relative_error(actual.rstd[inside], expected[2][inside]) < ULPS_FP32
    assert (actual.rstd[~inside] == 0).all() and (actual.data[~inside] == 0).all()

    exact = torch.where(inside[:, None], values.double(), 0.0)
    exact = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    errors = [relative_error(dequantize(*pair, offsets), exact) for pair in (actual[:2], expected[:2])]
    assert errors[0] <= KERNEL_BUDGET * errors[1]

    given_rstd = values.float() * actual.rstd[:, None] * weight.float()  # given its rstd, the kernel's bits are exact
    bits = quantize(given_rstd, offsets, columns_per_scale=columns_per_scale)
    assert torch.equal(actual.data, bits.data) and torch.equal(actual.scales, bits.scales)


@pytest.mark.parametrize("direction", ["row", "column"])
@pytest.mark.parametrize(
    "lengths", [LENGTHS, (2,) * 5000, (100_000, 3), (0, 0), ()], ids=["nasty", "short", "long", "empty", "none"]
)
@pytest.mark.parametrize("columns", [32, 160, 384])
def test_scales_between_layouts(columns, lengths, direction):
    from pma.kernels.scatter_scales import any_arch

    offsets = (torch.tensor([0, *lengths]).cumsum(0) + 33).cuda()
    rows = int(offsets[-1]) + 77
    slots = rows // 32 + len(lengths)
    scales = torch.randint(0, 256, (slots, columns // 32), dtype=torch.uint8, device="cuda")
    tiles = any_arch.scatter_scales(scales, offsets, rows, direction)
    assert torch.equal(tiles, scatter_scales(scales, offsets, rows, direction))
    assert torch.equal(torch.ops.pma.scatter_scales(scales, offsets, rows, direction), tiles)
    back = any_arch.gather_scales(tiles, offsets, rows, columns, direction)
    assert torch.equal(back, gather_scales(tiles, offsets, rows, columns, direction))


def norm_backward(spec, *arguments):
    from pma.kernels.rmsnorm_backward.any_arch import launch

    return launch(spec, *arguments)


@pytest.mark.parametrize("adds_dv", [True, False], ids=["dv", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("columns", [32, 96, 384, 416, 512, 1024, 4096])
def test_rmsnorm_backward(columns, dtype, adds_dv):
    values, offsets = jagged(columns, dtype)
    generator = torch.Generator().manual_seed(2)
    dy, gradient = (torch.randn(values.shape, generator=generator).cuda() for _ in range(2))
    outside = segment_of_rows(offsets, values.shape[0]) < 0
    dy[outside] = float("nan")
    dy, weight = dy.to(dtype), torch.randn(columns, generator=generator).cuda()
    dv = quantize(gradient, offsets) if adds_dv else None
    rstd = norm.rmsnorm(values, weight, EPS)[1]
    spec = RMSNormBackwardSpec(columns, dtype, dtype, weight.dtype, offsets.dtype, adds_dv, writes_normalised=True)
    actual = norm_backward(spec, dy, values, weight, rstd, offsets, dv)
    again = norm_backward(spec, dy, values, weight, rstd, offsets, dv)
    assert torch.equal(actual.dvalues, again.dvalues) and torch.equal(actual.dweight, again.dweight)

    total = dy.float() + dequantize(*dv, offsets) if adds_dv else dy.float()
    eager_dx, eager_dw = eager_rmsnorm_backward(total, values, weight, rstd, ~outside)
    exact = exact_rmsnorm_backward(total, values, weight, rstd, ~outside)
    assert relative_error(actual.dvalues, exact[0]) <= KERNEL_BUDGET * relative_error(eager_dx.to(dtype), exact[0])
    assert relative_error(actual.dweight, exact[1]) <= KERNEL_BUDGET * relative_error(eager_dw, exact[1]) + ULPS_FP32
    assert (actual.dvalues[outside] == 0).all()
    normalised = torch.where(outside[:, None], 0.0, values.float() * rstd[:, None] * weight).bfloat16()
    assert torch.equal(actual.normalised, normalised)


def eager_rmsnorm_backward(total, values, weight, rstd, inside):
    """In float32 throughout."""
    total, x = (torch.where(inside[:, None], part.float(), 0.0) for part in (total, values))
    x_hat = x * torch.where(inside, rstd, 0.0)[:, None]
    g = total * weight
    dx = torch.where(inside, rstd, 0.0)[:, None] * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    return dx, (total * x_hat).sum(0)


def exact_rmsnorm_backward(total, values, weight, rstd, inside):
    double = (total.double(), values.double(), weight.double(), rstd.double(), inside)
    total, x = (torch.where(inside[:, None], part, 0.0) for part in double[:2])
    x_hat = x * torch.where(inside, double[3], 0.0)[:, None]
    g = total * double[2]
    dx = torch.where(inside, double[3], 0.0)[:, None] * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    return dx, (total * x_hat).sum(0)


@pytest.mark.parametrize("name", ["odd storage offset", "every other row", "every other column", "expanded"])
def test_views(name):
    """Rows that a bulk copy cannot read are copied first."""
    wide = torch.randn(400, 768, device="cuda").bfloat16()
    values = {
        "odd storage offset": wide.flatten()[1 : 1 + 300 * 384].view(300, 384),
        "every other row": wide[::2, :384],
        "every other column": wide[:, ::2],
        "expanded": wide[:1, :384].expand(300, 384),
    }[name]
    offsets = torch.tensor([0, 50, 90, values.shape[0]], device="cuda")
    actual, expected = kernel(spec_of(values, offsets), values, offsets), quantize(values, offsets)
    assert torch.equal(actual.data, expected.data) and torch.equal(actual.scales, expected.scales)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    values = torch.randn(1 << 16, 384, device="cuda").bfloat16().repeat(90, 1)
    offsets = torch.tensor([0, 3, 5_000_001, values.shape[0] - 5], device="cuda")
    assert values.numel() > 1 << 31
    weight = torch.randn(384, device="cuda")
    spec = spec_of(values, offsets, weight_dtype=weight.dtype)
    actual = kernel(spec, values, offsets, weight=weight, eps=EPS)
    last = slice(values.shape[0] - 4096 - 5, values.shape[0] - 5)
    begin = (int(last.start) - 5_000_001) // 32 * 32 + 5_000_001
    rows = slice(begin, values.shape[0] - 5)
    own = torch.tensor([0, rows.stop - rows.start], device="cuda")
    alone = kernel(spec, values[rows], own, weight=weight, eps=EPS)
    assert torch.equal(actual.data[rows], alone.data) and torch.equal(actual.rstd[rows], alone.rstd)
    slot = 5_000_001 // 32 + 2 + (begin - 5_000_001) // 32
    assert torch.equal(actual.scales[slot : slot + alone.scales.shape[0] - 1], alone.scales[:-1])


def test_streams_graphs_and_no_sync():
    values, offsets = jagged(384)
    spec = spec_of(values, offsets)
    expected = kernel(spec, values, offsets)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            late = values * 2  # finished only after the sleep: a kernel on another stream would read the old memory
            beside = kernel(spec, late, offsets)
        with torch.cuda.graph(graph):
            captured = kernel(spec, values, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    captured.data.fill_(255)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.data, expected.data)
    assert torch.equal(beside.data, kernel(spec, values * 2, offsets).data)


def test_an_unsupported_width_falls_to_the_reference_and_is_reported():
    values, offsets = jagged(8224, lengths=(3, 40))
    assert torch.equal(torch.ops.pma.quantize(values, offsets, 32)[0], quantize(values, offsets).data)
    module = pma.PMA(8224, 257, 2, device="cuda")
    assert "got 8224" in module.backend_report()["quantize"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value_projection", [False, True])
def test_the_module_on_kernels_and_on_the_reference(dtype, value_projection):
    arguments = {"embed_dim": 256, "num_heads": 2, "num_seeds": 40, "value_projection": value_projection}
    values, offsets = jagged(256, dtype, tail=0, head=0)
    results = {}
    for backend in ("auto", "reference"):
        module = make_pma(**arguments, backend=backend).cuda()
        events = values.detach().clone().requires_grad_()
        out = module(events, offsets)
        out.backward(make_dout(out))
        results[backend] = [out, events.grad, *(p.grad for p in module.parameters())]
    assert "kernel" in make_pma(**arguments).cuda().backend_report()["rmsnorm_quantize"]
    for actual, expected in zip(*results.values(), strict=True):
        assert sqnr_db(actual, expected) > 35  # a last bit of rstd moves a payload here and there


def test_the_compiled_module(monkeypatch):
    monkeypatch.undo()  # the compiler would trace the poisoning
    module = make_pma(embed_dim=256, num_heads=2, num_seeds=40).cuda()
    values, offsets = jagged(256, torch.float32, tail=0, head=0)
    pma.mark_dynamic(values, offsets)
    compiled = torch.compile(module, fullgraph=True)
    out = compiled(values.requires_grad_(), offsets)
    assert torch.equal(out, module(values, offsets))
    out.sum().backward()
    assert torch.isfinite(values.grad).all()
