"""`quantize`, plain and with δ = rowsum(dO∘O), beside torch.compile of the formula and a device copy.

    python -m benchmarks.quantize [--rows 4000000 --columns 384]

bf16 rows in 1,024 segments cut at random rows; with δ, segments of 512 rows and heads of 128 columns.
Bytes that must move: 2 read and 1 written for each element, 1/1024 of scales; with δ 2 more read, and 4 for each head.
"""

import torch

from benchmarks import peers
from benchmarks.timing import compare, jagged_problem, parse_problems
from pma.kernels.quantize.any_arch import launch
from pma.kernels.quantize.spec import QuantizeSpec

SEEDS, HEAD_DIM = 512, 128


def main() -> None:
    for rows, columns in parse_problems(__doc__):
        values, offsets = jagged_problem(rows, columns)
        spec = QuantizeSpec(columns, values.dtype, offsets.dtype)
        variants = {
            "pma": lambda spec=spec, values=values, offsets=offsets: launch(spec, values, offsets),
            "torch.compile": lambda values=values: peers.compiled_quantize(values),
        }
        compare("quantize", f"{rows:,} x {columns}", variants, rows * columns * (3 + 1 / 1024))

        rows = rows // SEEDS * SEEDS
        dout, out, heads = values[:rows], torch.randn_like(values[:rows]), columns // HEAD_DIM
        offsets = torch.arange(rows // SEEDS + 1, device="cuda") * SEEDS
        spec = QuantizeSpec(columns, dout.dtype, offsets.dtype, delta_columns=HEAD_DIM, out_dtype=out.dtype)
        variants = {
            "pma": lambda spec=spec, dout=dout, offsets=offsets, out=out: launch(spec, dout, offsets, out=out),
            "torch.compile": lambda dout=dout, out=out, heads=heads: peers.compiled_quantize_with_delta(
                dout, out, heads
            ),
        }
        num_bytes = rows * columns * (5 + 1 / 1024) + 4 * rows * heads
        compare("quantize", f"{rows:,} x {columns} with delta", variants, num_bytes)


if __name__ == "__main__":
    main()
