"""What the kernel that moves scale bytes between layouts is asked for. No kernel language here."""

from dataclasses import dataclass

import torch

from pma.kernels.quantize.spec import MAX_COLUMNS
from pma.layouts import BLOCK

WARPS = 4
BLOCKS_PER_SM = 12


@dataclass(frozen=True)
class ScatterScalesSpec:
    """compact → tiles in one direction, or (`gathers`) tiles → compact, of a matrix with `columns` columns."""

    columns: int
    offsets_dtype: torch.dtype
    direction: str  # "row" or "column"
    gathers: bool = False

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // 128)

    def why_unsupported(self) -> str | None:
        """None if the kernel serves the spec, else the reason, naming what came and what is allowed."""
        if self.columns % BLOCK or not 0 < self.columns <= MAX_COLUMNS:
            return f"the width must be a multiple of {BLOCK} up to {MAX_COLUMNS}, got {self.columns}"
        return None
