"""Weight gradients with Hopper's contract, and what its kernels are held to; in the simulator and on a GPU."""

import importlib

import torch
from torch import Tensor

from pma.jagged import num_row_blocks, rows_to_blocks, segment_of_rows
from pma.kernels.weight_grad.hopper_spec import HopperWeightGradSpec
from pma.layouts import BLOCK, MXFP8Tensor, dequantize, quantize
from pma.layouts.mxfp8 import SCALE_ONE, to_payload
from pma.testing import ULPS_FP32

TOKENS_OF_PRODUCT = 16
NAN_PAYLOADS = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)


def offsets_of(lengths, *, head: int = 3, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([head, *lengths]).cumsum(0).to(dtype)


def integers(columns: int, offsets: Tensor, seed: int, *, tail: int = 5, width: int = 128) -> MXFP8Tensor:
    """Compact MXFP8: integers up to 3 with scales 1/2 … 4 of a head; NaN payloads outside the offsets."""
    generator = torch.Generator().manual_seed(seed)
    rows = int(offsets[-1]) + tail
    data = to_payload(torch.randint(-3, 4, (rows, columns), generator=generator).float())
    data[segment_of_rows(offsets, rows) < 0] = NAN_PAYLOADS.repeat(columns // 2)
    slots = num_row_blocks(rows, offsets.shape[0] - 1, BLOCK)
    scales = torch.randint(SCALE_ONE - 1, SCALE_ONE + 3, (slots, columns // width), generator=generator)
    is_used = torch.zeros(slots + 1, dtype=torch.bool)
    is_used[rows_to_blocks(offsets, rows, BLOCK)] = True
    scales[~is_used[:-1]] = 0
    return MXFP8Tensor(data, scales.to(torch.uint8).repeat_interleave(width // BLOCK, -1))


def normal(columns: int, offsets: Tensor, seed: int, *, width: int = 128, spread: float = 1.0) -> MXFP8Tensor:
    """Rows with magnitudes of their own, e^(spread · normal)."""
    generator = torch.Generator(offsets.device).manual_seed(seed)
    rows = int(offsets[-1])
    magnitudes = torch.exp(torch.randn(rows, 1, generator=generator, device=offsets.device) * spread)
    values = torch.randn(rows, columns, generator=generator, device=offsets.device) * magnitudes
    return quantize(values, offsets, columns_per_scale=width)


def weight_grad(spec: HopperWeightGradSpec, dout: MXFP8Tensor, x: MXFP8Tensor, offsets: Tensor) -> Tensor:
    assert spec.why_unsupported() is None
    return importlib.import_module("pma.kernels.weight_grad.sm90").launch(spec, dout, x, offsets)


def exact(dout: MXFP8Tensor, x: MXFP8Tensor, offsets: Tensor) -> Tensor:
    inside = segment_of_rows(offsets, x.data.shape[0]) >= 0
    dense = [dequantize(*each, offsets, torch.float64)[inside] for each in (dout, x)]
    return dense[0].T @ dense[1]


def budget(tokens: int) -> float:
    """Of the relative error: fp32's, and half a bit for each product of a part, whose sum is cut."""
    return ULPS_FP32 + tokens / TOKENS_OF_PRODUCT * torch.finfo(torch.float32).eps / 2
