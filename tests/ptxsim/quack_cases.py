"""quack's GEMMs and RMSNorm in the simulator: each case runs an unmodified kernel and compares with float64.

A case takes options of `ptxsim.simulate`, returns the simulation, and raises AssertionError where the result is wrong.
GEMM results must be the float64 product of the given operands rounded once, except where the float64 sum lies so near
a rounding boundary that the hardware's own order of addition decides: at most one output in a thousand.
"""

import importlib

import torch
from torch import Tensor

import ptxsim

AT_BOUNDARY = 1e-3
CUT = 1e-2  # with sums that are cut instead of rounded, as Hopper's are


def gemm(*arguments, **options) -> None:
    module = importlib.import_module("quack.gemm")  # the package's attribute of this name is a function
    formats = {"bs_format_a": "mxfp8_e4m3", "bs_format_b": "mxfp8_e4m3"} if options.get("SFA") is not None else {}
    module.gemm(*arguments, **formats, **options)


def to_mx(values: Tensor) -> tuple[Tensor, Tensor]:
    from quack.blockscaled.quantize import to_mx

    return to_mx(values, 32)


def packed(scales: Tensor) -> Tensor:
    from quack.blockscaled.quantize import pack_scale_2d_to_blocked_contig

    return pack_scale_2d_to_blocked_contig(scales if scales.dim() == 3 else scales[None])


def dequantized(data: Tensor, scales: Tensor) -> Tensor:
    blocks = data.double().view(*data.shape[:-1], -1, 32)
    return (blocks * torch.exp2(scales.view(torch.uint8).double() - 127)[..., None]).reshape(data.shape)


def assert_rounded_once(actual: Tensor, exact: Tensor, limit: float = AT_BOUNDARY) -> None:
    wrong = (actual != exact.to(actual.dtype)).double().mean().item()
    assert wrong < limit, f"{wrong:.2%} of the outputs differ"


def mxfp8_gemm(
    m: int, n: int, k: int, tile: tuple[int, int] = (128, 128), cluster: tuple[int, int] = (1, 1), *,
    gemm_options: dict | None = None, **options,
) -> ptxsim.simulate:  # fmt: skip
    """D = A Bᵀ, both with non-uniform block scales, bf16 out."""
    torch.manual_seed(m + n + k)
    (a, a_scales), (b, b_scales) = to_mx(torch.randn(m, k) * torch.exp(torch.randn(m, 1))), to_mx(torch.randn(n, k))
    out = torch.full((1, m, n), float("nan"), dtype=torch.bfloat16)
    scales = {"SFA": packed(a_scales), "SFB": packed(b_scales)}
    with ptxsim.simulate(**options) as simulation:
        gemm(a[None], b[None], out, None, None, *tile, *cluster, **scales, **(gemm_options or {}))
    assert_rounded_once(out[0], dequantized(a, a_scales) @ dequantized(b, b_scales).T)
    return simulation


def mxfp8_gemm_quantized(
    m: int, n: int, k: int, tile: tuple[int, int] = (128, 128), cluster: tuple[int, int] = (1, 1), **options
) -> ptxsim.simulate:
    """The same with MXFP8 output: every scale byte equal, payloads but for boundary cases."""
    from quack.blockscaled.quantize import unpack_scale_blocked_to_2d

    torch.manual_seed(1)
    (a, a_scales), (b, b_scales) = to_mx(torch.randn(m, k) * torch.exp(torch.randn(m, 1))), to_mx(torch.randn(n, k))
    out = torch.zeros(1, m, n, dtype=torch.float8_e4m3fn)
    tiles = torch.zeros(1, -(-m // 128), -(-n // 128), 32, 4, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    scales = {"SFA": packed(a_scales), "SFB": packed(b_scales), "SFD": tiles}
    with ptxsim.simulate(**options) as simulation:
        gemm(a[None], b[None], out, None, None, *tile, *cluster, **scales)
    exact = (dequantized(a, a_scales) @ dequantized(b, b_scales).T).float().view(m, -1, 32)
    bits = (exact.abs().amax(-1) * torch.tensor(1 / 448)).view(torch.int32)
    expected = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).int()
    payload = (exact * torch.exp2(127 - expected.float())[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    actual = unpack_scale_blocked_to_2d(tiles, m, n // 32)[0].view(torch.uint8)
    assert torch.equal(actual, expected.to(torch.uint8))
    assert_rounded_once(out[0].float(), payload.reshape(m, n).double())
    return simulation


def mxfp8_gemm_varlen_m(lengths: list[int], n: int, k: int, **options) -> ptxsim.simulate:
    """Rows in segments of any length, each with its own B; scales at 128-aligned tiles."""
    torch.manual_seed(2)
    total, count = sum(lengths), len(lengths)
    a, a_scales = to_mx(torch.randn(total, k))
    weights = [to_mx(torch.randn(n, k)) for _ in lengths]
    b = torch.stack([data.view(torch.uint8) for data, _ in weights]).view(torch.float8_e4m3fn)
    b_scales = torch.stack([each.view(torch.uint8) for _, each in weights]).view(torch.float8_e8m0fnu)
    padded = torch.zeros((-(-total // 128) + count - 1) * 128, k // 32, dtype=torch.uint8)
    exact, first = [], 0
    for index, length in enumerate(lengths):
        place = (first // 128 + index) * 128
        padded[place : place + length] = a_scales.view(torch.uint8)[first : first + length]
        rows = slice(first, first + length)
        exact.append(dequantized(a[rows], a_scales[rows]) @ dequantized(*weights[index]).T)
        first += length
    out = torch.full((total, n), float("nan"), dtype=torch.bfloat16)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    scales = {"SFA": packed(padded.view(torch.float8_e8m0fnu)), "SFB": packed(b_scales)}
    with ptxsim.simulate(**options) as simulation:
        gemm(a, b, out, None, None, 128, 128, 1, 1, cu_seqlens_m=offsets, **scales)
    assert_rounded_once(out, torch.cat(exact))
    return simulation


def mxfp8_gemm_varlen_k(lengths: list[int], m: int, n: int, **options) -> ptxsim.simulate:
    """A product for each segment, contracted over its rows, however many: payload unpadded, scales in 128-row tiles."""
    from pma.layouts import dequantize, quantize, scatter_scales

    torch.manual_seed(6)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = int(offsets[-1])
    operands = [torch.randn(total, width) * torch.exp(torch.randn(1, width)) for width in (m, n)]
    (a, a_scales), (b, b_scales) = (quantize(each, offsets) for each in operands)
    tiles = [scatter_scales(each, offsets, total, "column") for each in (a_scales, b_scales)]
    shaped = [each.view(1, *each.shape[:2], 32, 4, 4).view(torch.float8_e8m0fnu) for each in tiles]
    out = torch.full((len(lengths), m, n), float("nan"), dtype=torch.bfloat16)
    data = [each.view(torch.float8_e4m3fn).t() for each in (a, b)]
    with ptxsim.simulate(**options) as simulation:
        gemm(*data, out, None, None, 128, 128, 1, 1, SFA=shaped[0], SFB=shaped[1], cu_seqlens_k=offsets.int())
    exact = [dequantize(*each, offsets, torch.float64) for each in ((a, a_scales), (b, b_scales))]
    for index, (first, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        assert_rounded_once(out[index], exact[0][first:end].T @ exact[1][first:end])
    return simulation


def bf16_gemm(
    m: int, n: int, k: int, tile: tuple[int, int], cluster: tuple[int, int], *, is_transposed: bool = False,
    is_out_transposed: bool = False, **options,
) -> ptxsim.simulate:  # fmt: skip
    """D = A Bᵀ in bf16; is_transposed: A m-major, B n-major; is_out_transposed: D m-major."""
    torch.manual_seed(0)
    if is_transposed:
        a, b = (torch.randn(1, k, rows).bfloat16().transpose(1, 2) for rows in (m, n))
    else:
        a, b = (torch.randn(1, rows, k).bfloat16() for rows in (m, n))
    out = torch.full((1, m, n), float("nan"), dtype=torch.bfloat16)
    if is_out_transposed:
        out = out.mT.contiguous().mT
    with ptxsim.simulate(**options) as simulation:
        gemm(a, b, out, None, None, *tile, *cluster)
    limit = CUT if options.get("arch") == "sm_90a" else AT_BOUNDARY
    assert_rounded_once(out[0], a[0].double() @ b[0].double().T, limit)
    return simulation


def rmsnorm(rows: int, columns: int, **options) -> tuple[ptxsim.simulate, dict[str, tuple[Tensor, Tensor]]]:
    """Forward and backward: (actual, exact) of out, rstd, dx and dw."""
    module = importlib.import_module("quack.rmsnorm")
    torch.manual_seed(3)
    x, dout = (torch.randn(rows, columns).bfloat16() for _ in range(2))
    weight = torch.randn(columns).bfloat16()
    out, rstd = torch.zeros_like(x), torch.zeros(rows)
    with ptxsim.simulate(**options) as simulation:
        module._rmsnorm_fwd(x, weight, out, rstd=rstd)
        dx, dw = torch.zeros_like(x), torch.zeros(2, columns)
        module._rmsnorm_bwd(x, weight, dout, rstd, dx, dw, None, None, None, 2)
    exact_rstd = (x.double().square().mean(-1) + 1e-6).rsqrt()
    x_hat = x.double() * exact_rstd[:, None]
    g = dout.double() * weight.double()
    exact_dx = exact_rstd[:, None] * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    return simulation, {
        "out": (out, x_hat * weight.double()),
        "rstd": (rstd, exact_rstd),
        "dx": (dx, exact_dx),
        "dw": (dw.sum(0), (dout.double() * x_hat).sum(0)),
    }
