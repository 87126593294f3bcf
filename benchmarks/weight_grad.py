"""Hopper's weight gradient beside cuBLAS in bf16.

    python -m benchmarks.weight_grad [--rows 1580000 5860000 --columns 384 512]

dW = doutᵀ x over all tokens. cuBLAS's FP8 product wants both operands with tokens innermost and one scale, so the peers
are the bf16 product of operands that lie in bf16 anyway, and the same with torch.compile of what turns them from MXFP8
into bf16. Bytes that must move: one read for each element of both. TFLOP/s counts 2·T·E².
"""

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.hopper_problems import compare, jagged_matrix, jagged_offsets, parse_shapes
from pma.kernels.weight_grad import sm90
from pma.kernels.weight_grad.hopper_spec import HopperWeightGradSpec


def dequantized(payload: Tensor, scales: Tensor) -> Tensor:
    """To bf16; blocks counted from row 0, which is less work than ours."""
    return peers.dequantize(payload.view(torch.float8_e4m3fn), scales).bfloat16()


compiled_dequantize = torch.compile(dequantized, dynamic=False)


def main() -> None:
    for shape in parse_shapes(__doc__):
        offsets = jagged_offsets(shape.rows)
        (dout8, dout), (x8, x) = (jagged_matrix(shape, offsets, seed) for seed in (1, 2))
        blocks = shape.rows // 32
        spec = HopperWeightGradSpec(
            shape.columns, shape.columns, offsets.dtype,
            dout_columns_per_scale=shape.head_dim, x_columns_per_scale=shape.head_dim,
        )  # fmt: skip
        scales = [each.scales[:blocks].contiguous() for each in (dout8, x8)]
        variants = {
            "pma": lambda spec=spec, dout8=dout8, x8=x8, offsets=offsets: sm90.launch(spec, dout8, x8, offsets),
            "cuBLAS bf16": lambda dout=dout, x=x: dout.t() @ x,
            "compiled dequantise, cuBLAS bf16": lambda dout8=dout8, x8=x8, scales=scales: (
                compiled_dequantize(dout8.data, scales[0]).t() @ compiled_dequantize(x8.data, scales[1])
            ),
        }
        flops, num_bytes = 2 * shape.rows * shape.columns**2, 2 * shape.rows * shape.columns
        compare("weight_grad", str(shape), variants, flops=flops, num_bytes=num_bytes)


if __name__ == "__main__":
    main()
