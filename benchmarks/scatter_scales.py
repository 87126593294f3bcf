"""Scales between the compact layout and tiles, beside `rmsnorm_quantize` of the same tokens.

    python -m benchmarks.scatter_scales [--rows 4000000 --columns 384]

Once with 1,024 segments and once with segments of about 40 rows. Bytes that must move: the compact bytes read, and the
512 bytes of each tile written (or read by the inverse; it needs only a part of them).
"""

import torch

from benchmarks.timing import compare, jagged_problem, parse_problems
from pma.kernels.quantize.any_arch import launch
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.scatter_scales.any_arch import gather_scales, scatter_scales


def main() -> None:
    for rows, columns in parse_problems(__doc__):
        for segments in (1024, rows // 40):
            values, offsets = jagged_problem(rows, columns, segments)
            spec = QuantizeSpec(columns, values.dtype, offsets.dtype, weight_dtype=torch.float32)
            weight = torch.randn(columns, device="cuda")
            scales = launch(spec, values, offsets, weight=weight, eps=1e-6).scales
            variants = {}
            for direction in ("row", "column"):
                tiles = scatter_scales(scales, offsets, rows, direction)
                variants[f"pma, compact to {direction} tiles"] = lambda a=(scales, offsets, rows, direction): (
                    scatter_scales(*a)
                )
                variants[f"pma, {direction} tiles to compact"] = lambda a=(tiles, offsets, rows, columns, direction): (
                    gather_scales(*a)
                )
            variants["rmsnorm_quantize of the same tokens"] = lambda a=(spec, values, offsets), w=weight: launch(
                *a, weight=w, eps=1e-6
            )
            num_bytes = scales.numel() + tiles.numel()
            compare("scatter_scales", f"{rows:,} x {columns}, {segments:,} segments", variants, num_bytes, calls=20)


if __name__ == "__main__":
    main()
