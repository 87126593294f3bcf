"""Hopper's projections beside cuBLAS in FP8 and bf16, each with what a user would run behind it.

    python -m benchmarks.projection [--rows 1580000 5860000 --columns 384 512]

`gemm_quantize`, plain and with the transposed payload, against `torch._scaled_mm` (one scale for all of X: cuBLAS has
no block scales on Hopper) or a bf16 product, and torch.compile of the quantiser behind it. `gemm` (input gradient)
against the products alone. Bytes that must move: 1 read for each element of X and 1 written, or 2 in bf16; 1 more for
the transposed payload. TFLOP/s counts 2·T·E².
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.hopper_problems import Shape, compare, jagged_matrix, jagged_offsets, parse_shapes
from pma.jagged import equal_offsets
from pma.kernels.projection import sm90
from pma.kernels.projection.hopper_spec import HopperGemmQuantizeSpec, HopperGemmSpec
from pma.layouts import MXFP8Tensor, quantize


def scaled_mm(x: Tensor, weight: Tensor) -> Tensor:
    """X Wᵀ of FP8 payloads with one scale each, in bf16."""
    one = torch.ones((), device=x.device)
    fp8 = torch.float8_e4m3fn
    return torch._scaled_mm(x.view(fp8), weight.view(fp8).t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def variants_of(shape: Shape, offsets: Tensor, x8: MXFP8Tensor, x: Tensor) -> tuple[dict, dict]:
    """Calls that quantise, and calls that don't."""
    columns, head_dim = shape.columns, shape.head_dim
    weight = torch.randn(columns, columns, dtype=torch.bfloat16, device="cuda") / columns**0.5
    weight8 = quantize(weight, equal_offsets(1, columns, weight.device), columns_per_scale=head_dim)
    operands = sm90.HopperOperand(*x8), sm90.HopperOperand(*weight8)
    quantizing = HopperGemmQuantizeSpec(columns, columns, offsets.dtype, head_dim, head_dim)
    transposing = HopperGemmQuantizeSpec(columns, columns, offsets.dtype, head_dim, head_dim, writes_transposed=True)
    plain = HopperGemmSpec(columns, columns, offsets.dtype, head_dim)

    def ours(spec) -> Callable[[], object]:
        return lambda: sm90.launch(spec, *operands, offsets)

    quantize_all = {
        "pma": ours(quantizing),
        "pma, and transposed": ours(transposing),
        "cuBLAS FP8, compiled quantise": lambda: peers.compiled_quantize(scaled_mm(x8.data, weight8.data)),
        "cuBLAS bf16, compiled quantise": lambda: peers.compiled_quantize(x @ weight.t()),
    }
    store = {
        "pma": ours(plain),
        "cuBLAS FP8": lambda: scaled_mm(x8.data, weight8.data),
        "cuBLAS bf16": lambda: x @ weight.t(),
    }
    return quantize_all, store


def main() -> None:
    for shape in parse_shapes(__doc__):
        offsets = jagged_offsets(shape.rows)
        x8, x = jagged_matrix(shape, offsets, seed=1)
        flops, elements = 2 * shape.rows * shape.columns**2, shape.rows * shape.columns
        quantizing, plain = variants_of(shape, offsets, x8, x)
        compare("projection", f"gemm_quantize, {shape}", quantizing, flops=flops, num_bytes=2 * elements)
        compare("projection", f"gemm, {shape}", plain, flops=flops, num_bytes=3 * elements)


if __name__ == "__main__":
    main()
