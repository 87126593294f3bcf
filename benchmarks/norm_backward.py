"""`rmsnorm_backward` with dV, beside a compiled dequantise-add and quack's backward, torch.compile of all, and a copy.

    python -m benchmarks.norm_backward [--rows 4000000 --columns 384]

bf16 events and gradient in 1,024 segments cut at random rows. Bytes that must move: 6 for dy, x and dx and 1
for dV for each element, 1/1024 of scales, 4 of rstd for each row.
"""

import torch
from quack.rmsnorm import rmsnorm_bwd

from benchmarks import peers
from benchmarks.timing import compare, jagged_problem, parse_problems
from pma.kernels.quantize.any_arch import launch as quantize
from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.any_arch import launch
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec


def main() -> None:
    for rows, columns in parse_problems(__doc__):
        values, offsets = jagged_problem(rows, columns)
        dy, weight = torch.randn_like(values), torch.randn(columns, device="cuda")
        _, rstd = peers.rmsnorm(values, weight, 1e-6)
        gradient = torch.randn_like(values)
        dv = quantize(QuantizeSpec(columns, gradient.dtype, offsets.dtype), gradient, offsets)
        flat = peers.compiled_quantize(gradient)
        spec = RMSNormBackwardSpec(columns, values.dtype, dy.dtype, weight.dtype, offsets.dtype, adds_dv=True)
        arguments = (dy, values, weight, rstd, offsets)

        def separate(dy=dy, values=values, weight=weight, rstd=rstd, flat=flat):
            return rmsnorm_bwd(values, weight, peers.compiled_dequantize_add(dy, *flat), rstd)

        variants = {
            "pma": lambda spec=spec, a=arguments, dv=dv: launch(spec, *a, (dv.data, dv.scales)),
            "compiled dequantise-add, then quack's backward": separate,
            "torch.compile of all": lambda a=arguments[:4], flat=flat: peers.compiled_rmsnorm_backward(*a, *flat),
        }
        compare("norm_backward", f"{rows:,} x {columns}", variants, rows * columns * (7 + 1 / 1024) + 4 * rows)


if __name__ == "__main__":
    main()
