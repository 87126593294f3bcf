"""`rmsnorm_quantize` beside quack's RMSNorm with a compiled quantise, torch.compile of both, and a device copy.

    python -m benchmarks.norm_quantize [--rows 4000000 --columns 384]

bf16 events in 1,024 segments cut at random rows. Bytes that must move: 2 read and 1 written for each
element, 1/1024 of scales, 4 of rstd for each row.
"""

import torch
from quack.rmsnorm import rmsnorm_fwd

from benchmarks import peers
from benchmarks.timing import compare, jagged_problem, parse_problems
from pma.kernels.quantize.any_arch import launch
from pma.kernels.quantize.spec import QuantizeSpec

EPS = 1e-6


def main() -> None:
    for rows, columns in parse_problems(__doc__):
        values, offsets = jagged_problem(rows, columns)
        weight = torch.randn(columns, device="cuda")
        spec = QuantizeSpec(columns, values.dtype, offsets.dtype, weight_dtype=weight.dtype)
        with_tiles = QuantizeSpec(columns, values.dtype, offsets.dtype, weight_dtype=weight.dtype, writes_tiles=True)
        with_transposed = QuantizeSpec(
            columns, values.dtype, offsets.dtype, columns_per_scale=columns, weight_dtype=weight.dtype,
            writes_transposed=True,
        )  # fmt: skip

        def ours(spec, values=values, offsets=offsets, weight=weight):
            return lambda: launch(spec, values, offsets, weight=weight, eps=EPS)

        def separate(values=values, weight=weight):
            normalised, _, rstd = rmsnorm_fwd(values, weight, eps=EPS, store_rstd=True)
            return peers.compiled_quantize(normalised), rstd

        num_bytes = rows * columns * (3 + 1 / 1024) + 4 * rows
        variants = {
            "pma": ours(spec),
            "pma, scales also in row and column tiles": ours(with_tiles),
            "pma, K-uniform scales, payload also transposed": ours(with_transposed),
            "quack RMSNorm, then compiled quantise": separate,
            "torch.compile of both": lambda values=values, weight=weight: peers.compiled_rmsnorm_quantize(
                values, weight, EPS
            ),
        }
        compare("norm_quantize", f"{rows:,} x {columns}", variants, num_bytes)


if __name__ == "__main__":
    main()
