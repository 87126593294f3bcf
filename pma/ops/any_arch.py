"""The memory-bound operators on their kernels, which run on Hopper and Blackwell alike.

`specs` say what an operator's arguments ask for; `pma.ops.backends` decides with them who serves the call.
"""

from typing import cast

from torch import Tensor

from pma.kernels.quantize.spec import QuantizeSpec
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardSpec
from pma.kernels.scatter_scales.spec import ScatterScalesSpec
from pma.layouts import BLOCK, MXFP8Tensor


def quantize_spec(
    values: Tensor, offsets: Tensor, columns_per_scale: int, weight: Tensor | None = None, headroom_exponent: int = 0
) -> QuantizeSpec:
    """Of `quantize` and, with a weight, of `rmsnorm_quantize`."""
    return QuantizeSpec(
        columns=values.shape[1],
        dtype=values.dtype,
        offsets_dtype=offsets.dtype,
        columns_per_scale=columns_per_scale,
        weight_dtype=None if weight is None else weight.dtype,
        headroom_exponent=headroom_exponent,
    )


def quantize_dout_spec(
    dout: Tensor, out: Tensor, offsets: Tensor, num_heads: int, columns_per_scale: int, dp_operands: str,
    headroom_exponent: int,
) -> QuantizeSpec:  # fmt: skip
    return QuantizeSpec(
        columns=dout.shape[2],
        dtype=dout.dtype,
        offsets_dtype=offsets.dtype,
        columns_per_scale=columns_per_scale,
        delta_columns=dout.shape[2] // num_heads,
        delta_from_input=dp_operands == "bf16",
        out_dtype=out.dtype,
        headroom_exponent=headroom_exponent,
    )


def scatter_scales_spec(scales: Tensor, offsets: Tensor, direction: str) -> ScatterScalesSpec:
    return ScatterScalesSpec(scales.shape[1] * BLOCK, offsets.dtype, direction)


def rmsnorm_backward_spec(
    dy: Tensor, dv: MXFP8Tensor | None, values: Tensor, weight: Tensor, offsets: Tensor
) -> RMSNormBackwardSpec:
    return RMSNormBackwardSpec(
        columns=values.shape[1],
        dtype=values.dtype,
        dy_dtype=dy.dtype,
        weight_dtype=weight.dtype,
        offsets_dtype=offsets.dtype,
        adds_dv=dv is not None,
    )


def rmsnorm_quantize(
    spec: QuantizeSpec, values: Tensor, weight: Tensor, offsets: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    from pma.kernels.quantize import any_arch

    result = any_arch.launch(spec, values, offsets, weight=weight, eps=eps)
    return result.data, result.scales, cast(Tensor, result.rstd)


def quantize(spec: QuantizeSpec, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    from pma.kernels.quantize import any_arch

    result = any_arch.launch(spec, values, offsets)
    return result.data, result.scales


def quantize_dout(spec: QuantizeSpec, dout: Tensor, out: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from pma.kernels.quantize import any_arch

    rows = dout.reshape(-1, dout.shape[2])
    result = any_arch.launch(spec, rows, offsets, out=out.reshape(rows.shape))
    return result.data, result.scales, cast(Tensor, result.delta)


def scatter_scales(scales: Tensor, offsets: Tensor, total_rows: int, direction: str) -> Tensor:
    from pma.kernels.scatter_scales import any_arch

    return any_arch.scatter_scales(scales, offsets, total_rows, direction)


def rmsnorm_backward(
    spec: RMSNormBackwardSpec, dy: Tensor, dv: MXFP8Tensor | None, values: Tensor, weight: Tensor, rstd: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from pma.kernels.rmsnorm_backward import any_arch

    result = any_arch.launch(spec, dy, values, weight, rstd, offsets, dv)
    return result.dvalues, result.dweight
