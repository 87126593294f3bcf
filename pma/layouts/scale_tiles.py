"""Scale tiles: E8M0 bytes where Blackwell's block-scaled MMA wants them, 128 rows × 4 block columns = 512 bytes.

    byte of (row r, block column c) of a tile at  (r % 32)·16 + (r // 32)·4 + c          (PTX ISA, tcgen05 scale layout)

Tiles are counted from each segment's first row: segment b's tiles start at slot  offsets[b] // 128 + b.
Row tiles contract over features: [T // 128 + B, ⌈C/128⌉, 512], a tile's row is a token, its four columns are 32
features each; a block's byte is written 32 times. Column tiles contract over tokens: [⌈C/128⌉, T // 128 + B, 512],
a tile's row is a feature, its four columns are 32 tokens each. Bytes without a block are 127 (the scale 1.0).
"""

from typing import Literal

import torch
from torch import Tensor

from pma.checks import check_choice
from pma.jagged import num_row_blocks, row_block_starts, row_blocks
from pma.layouts.mxfp8 import BLOCK, SCALE_ONE

TILE_ROWS = 128
TILE_COLUMNS = 4
TILE_BYTES = 512

Direction = Literal["row", "column"]


def tile_shape(total_rows: int, num_segments: int, num_columns: int, direction: Direction) -> tuple[int, int, int]:
    """Shape of the tile tensor of a jagged matrix [total_rows, num_columns]."""
    check_choice("direction", direction, ("row", "column"))
    tiles = num_row_blocks(total_rows, num_segments, TILE_ROWS)
    column_tiles = (num_columns + TILE_ROWS - 1) // TILE_ROWS
    return (tiles, column_tiles, TILE_BYTES) if direction == "row" else (column_tiles, tiles, TILE_BYTES)


def scatter_scales(scales: Tensor, offsets: Tensor, total_rows: int, direction: Direction) -> Tensor:
    """Compact scales [T // 32 + B, C // 32] → row or column tiles (see the module); bytes are moved, never changed."""
    num_columns = scales.shape[1] * BLOCK
    shape = tile_shape(total_rows, offsets.shape[0] - 1, num_columns, direction)
    column_tiles = (num_columns + TILE_ROWS - 1) // TILE_ROWS
    present, source = _sources(offsets, total_rows)
    picked = torch.full(
        (*source.shape, column_tiles * TILE_COLUMNS), SCALE_ONE, dtype=torch.uint8, device=scales.device
    )
    if scales.shape[0]:
        bytes_ = scales[source.clamp(max=scales.shape[0] - 1)]
        picked[..., : scales.shape[1]] = torch.where(present[..., None], bytes_, SCALE_ONE)
    picked = picked.view(-1, TILE_COLUMNS, column_tiles, TILE_COLUMNS)  # [tile, row block, column tile, block column]
    if direction == "row":  # tile row r = 32·block + lane: byte lane·16 + block·4 + column
        tiles = picked.permute(0, 2, 1, 3)[:, :, None].expand(-1, -1, BLOCK, -1, -1)
    else:  # tile row is the feature 32·(block column) + lane, tile column the row block
        tiles = picked.permute(2, 0, 3, 1)[:, :, None].expand(-1, -1, BLOCK, -1, -1)
    return tiles.reshape(shape)


def gather_scales(tiles: Tensor, offsets: Tensor, total_rows: int, num_columns: int, direction: Direction) -> Tensor:
    """Row or column tiles → compact scales [T // 32 + B, C // 32]; unused slots are 0, as `quantize` leaves them."""
    check_choice("direction", direction, ("row", "column"))
    lane0 = tiles.reshape(*tiles.shape[:2], BLOCK, TILE_COLUMNS, TILE_COLUMNS)[:, :, 0]
    order = (0, 2, 1, 3) if direction == "row" else (1, 3, 0, 2)
    blocks = lane0.permute(order).reshape(-1, TILE_COLUMNS, lane0.shape[1 - (direction == "column")] * TILE_COLUMNS)
    blocks = blocks[..., : num_columns // BLOCK]  # [tile, row block, block column]
    present, source = _sources(offsets, total_rows)
    num_slots = num_row_blocks(total_rows, offsets.shape[0] - 1, BLOCK)
    compact = torch.zeros(num_slots + 1, blocks.shape[-1], dtype=torch.uint8, device=tiles.device)
    compact[torch.where(present, source, num_slots).flatten()] = blocks.flatten(0, 1)
    return compact[:num_slots].clone()


def _sources(offsets: Tensor, total_rows: int) -> tuple[Tensor, Tensor]:
    """For each tile slot and each of its four row blocks: does it exist, and its compact slot. → two [N, 4]."""
    tiles = row_blocks(offsets, total_rows, TILE_ROWS)
    local = torch.arange(TILE_COLUMNS, device=offsets.device)
    present = local * BLOCK < tiles.num_rows[:, None]
    if offsets.shape[0] == 1:
        return present, torch.zeros_like(present, dtype=torch.int64)
    first_slot = row_block_starts(offsets, BLOCK)[tiles.segment]
    block = (tiles.first_row - offsets.long()[tiles.segment]) // BLOCK
    return present, ((first_slot + block)[:, None] + local).clamp(min=0)
