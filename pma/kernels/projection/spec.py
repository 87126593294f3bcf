"""What the projections are asked for, and how they are laid out on Blackwell. No kernel language here.

Both kernels are one product, out = X · operand, tiled 128 × 128 × 128: X [T, in_columns] is jagged and streams through;
the weight, [N, C] in memory, is small and stays in shared memory. A CTA keeps `weight_tiles` column tiles of the weight
and walks over the row tiles of all segments, so that a row tile is read from memory once for each group of CTAs.

    gemm_quantize    out = X Wᵀ     in_columns C, out_columns N     the weight contracts along its rows:    row tiles
    gemm             out = X W      in_columns N, out_columns C     the weight contracts along its columns: column tiles
"""

import functools
from dataclasses import dataclass

import torch

from pma.kernels.device_facts import DeviceFacts
from pma.layouts import BLOCK
from pma.layouts.scale_tiles import TILE_BYTES, TILE_ROWS

TILE = TILE_ROWS  # rows, columns and depth of one tile of the product
PAYLOAD_BYTES = TILE * TILE  # of a tile of X or of the weight
OPERAND_BYTES = PAYLOAD_BYTES + TILE_BYTES  # with its scales
TENSOR_COLUMNS = 512  # of an SM
SCALE_COLUMNS = 4  # tensor-memory columns of one tile's scales
MAX_COLUMNS = 8192
WARPS = 7
BOOKKEEPING_BYTES = 4096  # barriers, the row tiles announced, scale bytes on their way, alignment


@dataclass(frozen=True)
class ProjectionSpec:
    """A product of a jagged MXFP8 matrix [T, in_columns] with an MXFP8 weight."""

    in_columns: int
    out_columns: int
    offsets_dtype: torch.dtype

    @property
    def weight_is_transposed(self) -> bool:
        """The weight lies as [in_columns, out_columns], not as [out_columns, in_columns]."""
        return False

    @property
    def depth_tiles(self) -> int:
        """Tiles along the contraction."""
        return -(-self.in_columns // TILE)

    @property
    def column_tiles(self) -> int:
        return -(-self.out_columns // TILE)

    @property
    def has_whole_tiles(self) -> bool:
        """Every column tile of the result is full."""
        return self.out_columns % TILE == 0

    def why_unsupported(self) -> str | None:
        """None if the kernel serves the spec, else the reason, naming what came and what is allowed."""
        for name in ("in_columns", "out_columns"):
            columns = getattr(self, name)
            if columns % BLOCK or not 0 < columns <= MAX_COLUMNS:
                return f"{name} must be a multiple of {BLOCK} up to {MAX_COLUMNS}, got {columns}"
        if self.offsets_dtype not in (torch.int32, torch.int64):
            return f"offsets must be int32 or int64, got {self.offsets_dtype}"
        return None


@dataclass(frozen=True)
class GemmQuantizeSpec(ProjectionSpec):
    """X Wᵀ quantised to MXFP8 in registers; W [out_columns, in_columns]."""

    columns_per_scale: int = BLOCK
    headroom_exponent: int = 0
    writes_scales: bool = True  # compact
    writes_tiles: bool = True  # in both directions
    k_smoothing: bool = False

    def why_unsupported(self) -> str | None:
        if self.k_smoothing:
            return "k_smoothing must be False, got True"
        columns = self.columns_per_scale
        if columns not in (BLOCK, 2 * BLOCK, TILE) or self.out_columns % columns:
            return f"columns_per_scale must be 32, 64 or 128 and divide {self.out_columns}, got {columns}"
        if not 0 <= self.headroom_exponent < 128:
            return f"headroom_exponent must be from 0 to 127, got {self.headroom_exponent}"
        return super().why_unsupported()


@dataclass(frozen=True)
class GemmSpec(ProjectionSpec):
    """X W in a float dtype; W [in_columns, out_columns] is read as it lies."""

    out_dtype: torch.dtype = torch.bfloat16

    @property
    def weight_is_transposed(self) -> bool:
        return True

    def why_unsupported(self) -> str | None:
        if self.out_dtype not in (torch.bfloat16, torch.float32):
            return f"out_dtype must be bfloat16 or float32, got {self.out_dtype}"
        return super().why_unsupported()


@dataclass(frozen=True)
class ProjectionConfig:
    """How a CTA is laid out.

    `stages` tiles of X are in flight. The `weight_tiles` column tiles of a CTA stay in shared memory for its whole life
    or, where even one is too deep for that, travel with X through the stages.
    """

    stages: int
    weight_tiles: int
    is_resident: bool
    accumulators: int = 3

    @property
    def threads(self) -> int:
        return 32 * WARPS

    def groups(self, spec: ProjectionSpec) -> int:
        """CTAs that share a row tile."""
        return spec.column_tiles // self.weight_tiles

    def weight_buffers(self, spec: ProjectionSpec) -> int:
        """Tiles of the weight in shared memory, and of its scales in tensor memory."""
        return self.weight_tiles * spec.depth_tiles if self.is_resident else self.stages

    def shared_bytes(self, spec: ProjectionSpec) -> int:
        """Upper bound of a CTA's shared memory."""
        return (self.stages + self.weight_buffers(spec)) * OPERAND_BYTES + BOOKKEEPING_BYTES

    @property
    def x_scales_column(self) -> int:
        """Column of tensor memory where the scales of X begin, behind the accumulators."""
        return self.accumulators * TILE

    @property
    def weight_scales_column(self) -> int:
        """Column of tensor memory where the scales of the weight begin, behind those of X."""
        return self.x_scales_column + SCALE_COLUMNS * self.stages

    def tensor_columns(self, spec: ProjectionSpec) -> int:
        """Columns of tensor memory in use."""
        return self.weight_scales_column + SCALE_COLUMNS * self.weight_buffers(spec)


@functools.cache
def choose_config(spec: ProjectionSpec, facts: DeviceFacts) -> ProjectionConfig:
    """As much of the weight as fits beside two tiles of X, or a row tile and one more where that is read repeatedly."""
    buffers = (facts.shared_bytes_per_block - BOOKKEEPING_BYTES) // OPERAND_BYTES
    for weight_tiles in range(spec.column_tiles, 0, -1):
        stages = buffers - weight_tiles * spec.depth_tiles
        is_deep_enough = stages >= (spec.depth_tiles + 1 if weight_tiles > 1 else 2)
        if spec.column_tiles % weight_tiles == 0 and is_deep_enough:
            return ProjectionConfig(min(stages, 2 * spec.depth_tiles + 2), weight_tiles, is_resident=True)
    return ProjectionConfig(buffers // 2, 1, is_resident=False)
