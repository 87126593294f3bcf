"""What the weight gradient is asked for on Hopper, and how it is laid out there. No kernel language here.

dW is cut into tiles of 128 rows and `tile_columns` columns, the tokens into parts. A work item is one part of one
tile: its products are summed in registers and written as one partial sum; a second kernel adds the parts in order.
"""

import functools
from dataclasses import dataclass

from pma.jagged import num_row_blocks
from pma.kernels.device_facts import KIB, DeviceFacts
from pma.kernels.weight_grad.spec import SLAB, WeightGradSpec
from pma.layouts import BLOCK

WARPGROUPS = 2  # that compute
GROUP_ROWS = SLAB // WARPGROUPS
TOKENS = 64  # of a stage
BLOCKS = TOKENS // BLOCK
SCALE_COLUMNS = 64  # the narrowest head: all scales are read for so many columns
RECORD_WORDS = 32  # of a stage's scales in shared memory
CONVERTERS = 3  # warps
HALF_BLOCKS = 4  # blocks of 32 tokens of x in fp16
MAX_STAGES = 8
OVERHEAD_BYTES = 2 * KIB  # barriers, records, alignment


@dataclass(frozen=True)
class HopperWeightGradSpec(WeightGradSpec):
    """The same with one scale for a head of 64 or 128 columns, or for all, and 32 tokens, of dout and of x."""

    dout_columns_per_scale: int = SLAB
    x_columns_per_scale: int = SLAB

    def why_unsupported(self) -> str | None:
        if self.keeps_segments_apart:
            return "keeps_segments_apart must be False, got True"
        widths = (
            ("dout", self.dout_columns_per_scale, self.out_columns),
            ("x", self.x_columns_per_scale, self.in_columns),
        )
        for name, width, columns in widths:
            if width not in (SCALE_COLUMNS, SLAB, columns):
                return f"{name}_columns_per_scale must be 64, 128 or {columns}, got {width}"
        return super().why_unsupported()


@dataclass(frozen=True)
class HopperWeightGradConfig:
    """Tile width, and stages of FP8 operands in shared memory."""

    tile_columns: int
    stages: int

    @property
    def threads(self) -> int:
        return 128 * (1 + WARPGROUPS)

    @property
    def slabs(self) -> int:
        """Slabs of 128 columns of a stage: one of dout, the others of x."""
        return 1 + self.tile_columns // SLAB

    @property
    def stage_bytes(self) -> int:
        return self.slabs * SLAB * TOKENS

    @property
    def half_bytes(self) -> int:
        """Of a block of x in fp16."""
        return 2 * BLOCK * self.tile_columns

    @property
    def registers(self) -> dict[str, int]:
        """Of a thread that multiplies, and of one that loads or converts, which is faster with more."""
        return {"compute": 240, "others": 24} if self.tile_columns == 384 else {"compute": 208, "others": 88}

    def shared_bytes(self) -> int:
        """Upper bound of a CTA's shared memory."""
        return self.stages * self.stage_bytes + HALF_BLOCKS * self.half_bytes + OVERHEAD_BYTES

    def tiles(self, spec: WeightGradSpec) -> int:
        return (spec.out_columns // SLAB) * (spec.in_columns // self.tile_columns)

    def parts(self, spec: WeightGradSpec, num_rows: int, num_segments: int, num_ctas: int) -> int:
        """Partial sums of each tile: no more than there are slots of 128 tokens, and than CTAs that run at once."""
        return max(1, min(num_row_blocks(num_rows, num_segments, SLAB), num_ctas // self.tiles(spec)))


@functools.cache
def choose_config(spec: HopperWeightGradSpec, facts: DeviceFacts) -> HopperWeightGradConfig:
    """The widest tile that divides x, 192 accumulators to a thread at most; as many stages as fit, up to 8."""
    tile_columns = next(n for n in (384, 256, 128) if spec.in_columns % n == 0)
    config = HopperWeightGradConfig(tile_columns, 1)
    room = facts.shared_bytes_per_block - OVERHEAD_BYTES - HALF_BLOCKS * config.half_bytes
    return HopperWeightGradConfig(tile_columns, min(room // config.stage_bytes, MAX_STAGES))
