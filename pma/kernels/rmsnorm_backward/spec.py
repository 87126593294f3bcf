"""What the RMSNorm backward kernel is asked for, and how it is laid out. No kernel language here.

A row is shared by `lanes_per_row` threads, within a warp or over several; each thread takes `CHUNK` neighbouring
columns, then the next `CHUNK` after its neighbours, and keeps its columns of the weight gradient for the whole launch.
"""

import functools
from dataclasses import dataclass

import torch

from pma.kernels.device_facts import DeviceFacts
from pma.kernels.quantize.spec import CHUNK, FLOAT_DTYPES
from pma.layouts import BLOCK

MAX_COLUMNS = 8192
CHUNKS_PER_LANE = 3  # four spill registers with two blocks of threads on an SM
WARPS = 8


@dataclass(frozen=True)
class RMSNormBackwardSpec:
    """Gradients of RMSNorm over [T, columns]; `adds_dv`: dV in MXFP8 joins the incoming gradient."""

    columns: int
    dtype: torch.dtype  # of the values and of their gradient
    dy_dtype: torch.dtype
    weight_dtype: torch.dtype
    offsets_dtype: torch.dtype
    adds_dv: bool = False
    writes_normalised: bool = False  # x·rstd·w in bf16, for a consumer that wants it unquantised

    @property
    def chunks(self) -> int:
        return self.columns // CHUNK

    @property
    def row_bytes(self) -> int:
        return self.columns * (self.dtype.itemsize + self.dy_dtype.itemsize + self.adds_dv)

    def why_unsupported(self) -> str | None:
        """None if the kernel serves the spec, else the reason, naming what came and what is allowed."""
        if self.columns % BLOCK or not 0 < self.columns <= MAX_COLUMNS:
            return f"the width must be a multiple of {BLOCK} up to {MAX_COLUMNS}, got {self.columns}"
        for name in ("dtype", "dy_dtype", "weight_dtype"):
            if getattr(self, name) not in FLOAT_DTYPES:
                return f"{name} must be bfloat16, float16 or float32, got {getattr(self, name)}"
        return None


@dataclass(frozen=True)
class RMSNormBackwardConfig:
    """`rows_per_stage` rows are loaded at once, `stages` times."""

    lanes_per_row: int
    rows_per_stage: int
    stages: int
    blocks_per_sm: int
    warps: int = WARPS

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)  # one more warp that loads

    @property
    def rows_at_once(self) -> int:
        return 32 * self.warps // self.lanes_per_row

    @property
    def warps_per_row(self) -> int:
        return max(1, self.lanes_per_row // 32)

    def shared_bytes(self, spec: RMSNormBackwardSpec) -> int:
        """Upper bound of a block's shared memory."""
        stage = self.rows_per_stage * (spec.row_bytes + 4) + 4 * (spec.columns // BLOCK) + 64
        return self.stages * stage + 2 * 4 * spec.columns + 8 * self.warps * 4 + 2048


@functools.cache
def choose_config(spec: RMSNormBackwardSpec, facts: DeviceFacts) -> RMSNormBackwardConfig:
    """As few threads for a row as hold its columns in registers, then the most rows that fit two blocks on an SM."""
    lanes = 4
    while lanes < 32 * WARPS and spec.chunks > lanes * CHUNKS_PER_LANE:
        lanes *= 2
    for blocks_per_sm, stages in ((2, 3), (2, 2), (1, 3), (1, 2)):
        for rows in (32, 16, 8, 4, 2, 1):
            config = RMSNormBackwardConfig(lanes, rows, stages, blocks_per_sm, min(WARPS, lanes))
            shared = config.shared_bytes(spec)
            in_sm = blocks_per_sm * (shared + facts.shared_bytes_reserved) <= facts.shared_bytes_per_sm
            if config.rows_at_once <= rows and shared <= facts.shared_bytes_per_block and in_sm:
                return config
    raise ValueError(f"no configuration of the RMSNorm backward kernel for {spec}")
