"""MXFP8 quantisation of a jagged matrix, with δ = rowsum(dO∘O) on request, for Hopper and Blackwell.

The machine is `pma/kernels/blocks/block_quantizer.py`; here are its compilation and its launch.
"""

from typing import NamedTuple

import torch
from cutlass import Float32, Int32
from torch import Tensor

from pma.jagged import num_row_blocks
from pma.kernels.blocks.block_quantizer import GROUP, BlockQuantizer, QuantizeOperands
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.kernels.quantize.spec import QuantizeConfig, QuantizeSpec, choose_config
from pma.layouts import BLOCK, tile_shape
from pma.layouts.mxfp8 import SCALE_ONE
from pma.layouts.scale_tiles import TILE_ROWS


def build(arch: str, spec: QuantizeSpec, config: QuantizeConfig, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    columns, u8, f32 = spec.columns, torch.uint8, torch.float32
    column_tiles = -(-columns // 128)
    tiles = (fake_tensor(u8, None, column_tiles, 512), fake_tensor(u8, column_tiles, None, 512))
    operands = QuantizeOperands(
        values=fake_tensor(spec.dtype, None, columns),
        offsets=fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize),
        data=fake_tensor(u8, None, columns),
        scales=fake_tensor(u8, None, columns // 32),
        row_tiles=tiles[0] if spec.writes_tiles else None,
        column_tiles=tiles[1] if spec.writes_tiles else None,
        transposed=fake_tensor(u8, columns, None) if spec.writes_transposed else None,
        weight=fake_tensor(spec.weight_dtype, columns, alignment=4) if spec.weight_dtype else None,
        rstd=fake_tensor(f32, None, alignment=4) if spec.weight_dtype else None,
        out=fake_tensor(spec.out_dtype, None, columns) if spec.out_dtype else None,
        delta=fake_tensor(f32, None, columns // spec.delta_columns, alignment=4) if spec.delta_columns else None,
    )
    return compile_for(arch, BlockQuantizer(spec, config), operands, Float32(0), Int32(0), options=options)


compiled = cached(build)


class QuantizedRows(NamedTuple):
    """What the kernel wrote; None for what the spec doesn't ask for. Shapes: `QuantizeOperands`."""

    data: Tensor
    scales: Tensor
    row_tiles: Tensor | None
    column_tiles: Tensor | None
    transposed: Tensor | None
    rstd: Tensor | None
    delta: Tensor | None


def launch(
    spec: QuantizeSpec, values: Tensor, offsets: Tensor, *, weight: Tensor | None = None, eps: float = 0.0,
    out: Tensor | None = None,
) -> QuantizedRows:  # fmt: skip
    """Allocate the results and start the kernel on the current stream. Rows that aren't contiguous and 16-byte aligned
    are copied first."""
    values, offsets = aligned(values), offsets.contiguous()
    result = _allocate(spec, values, offsets.shape[0] - 1)
    if values.shape[0] == 0:
        return _without_rows(result)
    facts = device_facts(values.device)
    config = choose_config(spec, facts)
    num_tiles = num_row_blocks(values.shape[0], offsets.shape[0] - 1, TILE_ROWS)
    num_blocks = max(1, min(num_tiles, num_multiprocessors(values.device) * config.blocks_per_sm))
    operands = QuantizeOperands(
        values, offsets, result.data, result.scales, result.row_tiles, result.column_tiles, result.transposed,
        None if weight is None else weight.contiguous(), result.rstd, None if out is None else aligned(out),
        result.delta,
    )  # fmt: skip
    with torch.cuda.device(values.device):
        compiled(facts.arch, spec, config)(operands, eps, num_blocks)
    return result


def _allocate(spec: QuantizeSpec, values: Tensor, num_segments: int) -> QuantizedRows:
    (rows, columns), device = values.shape, values.device

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def tiles(direction: str) -> Tensor | None:
        return empty(*tile_shape(rows, num_segments, columns, direction)) if spec.writes_tiles else None

    tokens = num_row_blocks(rows, num_segments, GROUP) * GROUP
    return QuantizedRows(
        data=empty(rows, columns),
        scales=empty(num_row_blocks(rows, num_segments, BLOCK), columns // BLOCK),
        row_tiles=tiles("row"),
        column_tiles=tiles("column"),
        transposed=empty(columns, tokens) if spec.writes_transposed else None,
        rstd=empty(rows, dtype=torch.float32) if spec.weight_dtype else None,
        delta=empty(rows, columns // spec.delta_columns, dtype=torch.float32) if spec.delta_columns else None,
    )


def _without_rows(result: QuantizedRows) -> QuantizedRows:
    for tensor in (result.scales, result.transposed):
        if tensor is not None:
            tensor.zero_()
    for tiles in (result.row_tiles, result.column_tiles):
        if tiles is not None:
            tiles.fill_(SCALE_ONE)
    return result
