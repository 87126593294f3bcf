"""What the quantising kernels are asked for, and how they are laid out. No kernel language here.

One block of threads works through tiles of 128 rows, 32 rows (one row block) at a time. A row is shared by
`lanes_per_row` lanes; each lane takes `CHUNK` neighbouring columns, then the next `CHUNK` after its neighbours.
"""

import functools
from dataclasses import dataclass

import torch

from pma.kernels.device_facts import DeviceFacts
from pma.layouts import BLOCK

CHUNK = 8  # columns that a lane loads at once: 16 bytes of bf16
MAX_COLUMNS = 8192
MAX_TRANSPOSED_COLUMNS = 4096  # a row block of payload lies in shared memory
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantizeSpec:
    """A quantisation of a jagged matrix [T, columns]."""

    columns: int
    dtype: torch.dtype
    offsets_dtype: torch.dtype
    columns_per_scale: int = BLOCK
    writes_tiles: bool = False  # scales in row and column tiles beside the compact ones
    writes_transposed: bool = False  # payload [columns, tokens] beside [tokens, columns]
    weight_dtype: torch.dtype | None = None  # RMSNorm before quantising, with a weight of this dtype
    delta_columns: int = 0  # δ = rowsum(dO∘O) over this many columns each; 0 for none
    delta_from_input: bool = False  # δ from bf16(dO) rather than from the quantised dO
    out_dtype: torch.dtype | None = None  # of O, for δ
    headroom_exponent: int = 0  # added to every scale exponent

    @property
    def chunks(self) -> int:
        return self.columns // CHUNK

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that a block of threads keeps in shared memory."""
        return self.columns * (self.dtype.itemsize + (self.out_dtype.itemsize if self.out_dtype else 0))

    def why_unsupported(self) -> str | None:
        """None if the kernel serves the spec, else the reason, naming what came and what is allowed."""
        if self.columns % BLOCK or not 0 < self.columns <= MAX_COLUMNS:
            return f"the width must be a multiple of {BLOCK} up to {MAX_COLUMNS}, got {self.columns}"
        if self.dtype not in FLOAT_DTYPES:
            return f"values must be bfloat16, float16 or float32, got {self.dtype}"
        if self.writes_transposed and self.columns > MAX_TRANSPOSED_COLUMNS:
            return f"a transposed payload has up to {MAX_TRANSPOSED_COLUMNS} columns, got {self.columns}"
        if self.weight_dtype not in (None, *FLOAT_DTYPES):
            return f"the weight must be bfloat16, float16 or float32, got {self.weight_dtype}"
        if self.out_dtype not in (None, *FLOAT_DTYPES):
            return f"out must be bfloat16, float16 or float32, got {self.out_dtype}"
        if not 0 <= self.headroom_exponent < 128:
            return f"headroom_exponent must be from 0 to 127, got {self.headroom_exponent}"
        if self.delta_columns:
            lanes = self.delta_columns // CHUNK
            if self.delta_columns % BLOCK or self.columns % self.delta_columns or lanes & (lanes - 1) or lanes > 32:
                return f"the head width must be 32, 64, 128 or 256 and divide {self.columns}, got {self.delta_columns}"
        return None


@dataclass(frozen=True)
class QuantizeConfig:
    """Threads and stages. `stages` row blocks are in flight; with `is_resident` False they stay in global memory."""

    lanes_per_row: int
    warps: int
    stages: int
    blocks_per_sm: int
    is_resident: bool

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)  # one more warp that loads

    @property
    def rows_at_once(self) -> int:
        return self.warps * 32 // self.lanes_per_row

    @property
    def rows_per_lane(self) -> int:
        return BLOCK // self.rows_at_once

    def shared_bytes(self, spec: QuantizeSpec) -> int:
        """Upper bound of a block's shared memory."""
        rows = self.stages * BLOCK * spec.row_bytes if self.is_resident else 0
        weight = 4 * spec.columns if spec.weight_dtype else 0
        maxima = 3 * 4 * (spec.columns // spec.columns_per_scale)
        tile_scales = 4 * -(-spec.columns // 128) * 4
        transposed = BLOCK * spec.columns if spec.writes_transposed else 0
        return rows + weight + maxima + tile_scales + transposed + 64 * self.stages + 1024


@functools.cache
def choose_config(spec: QuantizeSpec, facts: DeviceFacts) -> QuantizeConfig:
    """Lanes for whole rows without idle ones; as many stages as fit in two or more blocks of threads on one SM."""
    lanes = next(n for n in (32, 16, 8, 4) if spec.chunks % n == 0)
    for blocks_per_sm, stages in ((2, 4), (2, 2), (1, 4), (1, 3), (1, 2)):  # measured: DESIGN.md, memory-bound kernels
        warps = min(8 if blocks_per_sm > 1 else 16, lanes)
        config = QuantizeConfig(lanes, warps, stages, blocks_per_sm, is_resident=True)
        if _fits(config, spec, facts):
            return config
    for blocks_per_sm in (2, 1) if spec.dtype == torch.float32 else (3, 2, 1):  # one more spills registers
        config = QuantizeConfig(lanes, min(8, lanes), 2, blocks_per_sm, is_resident=False)
        if _fits(config, spec, facts):
            return config
    raise ValueError(f"no configuration of the quantising kernel for {spec}")


def _fits(config: QuantizeConfig, spec: QuantizeSpec, facts: DeviceFacts) -> bool:
    shared = config.shared_bytes(spec)
    in_sm = config.blocks_per_sm * (shared + facts.shared_bytes_reserved) <= facts.shared_bytes_per_sm
    return shared <= facts.shared_bytes_per_block and in_sm
