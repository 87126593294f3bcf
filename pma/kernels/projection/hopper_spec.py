"""What the projections are asked for on Hopper, and how they are laid out there. No kernel language here.

Both kernels are out = X · Wᵀ with X [T, in_columns] jagged and W [out_columns, in_columns], contraction innermost in
both, as FP8 products want it; the input gradient takes the transposed weight, quantised as such. Tiles are
128 × 128 × 128. A CTA keeps `weight_tiles` column tiles of the weight and walks over the row tiles of all segments.

Products have no block scales, so those of X and W are uniform along the contraction over a head: `chunk` columns are
summed by the tensor core and then added to fp32 sums with one factor for 32 rows and 32 columns.
"""

import functools
from dataclasses import dataclass

import torch

from pma.kernels.device_facts import DeviceFacts
from pma.kernels.projection.spec import PAYLOAD_BYTES, TILE, ProjectionSpec
from pma.layouts import BLOCK

CHUNKS = (64, 128)  # widths of a head
MAX_COLUMNS = 2048
WARPGROUPS = 2  # that compute
GROUP_ROWS = TILE // WARPGROUPS
ROW_BLOCKS = TILE // BLOCK  # of a tile
MAX_WEIGHT_TILES = 4  # of a CTA; its code grows with them
RECORDS = 2  # row tiles whose scales are in shared memory
STORE_BYTES = 16  # of a lane
BOARD_BYTES = 2048  # of row tiles that are announced
BOOKKEEPING_BYTES = 512  # barriers, maxima, alignment


@dataclass(frozen=True)
class HopperProjectionSpec(ProjectionSpec):
    """A product of a jagged MXFP8 matrix [T, in_columns] with an MXFP8 weight [out_columns, in_columns].

    in_columns_per_scale: columns of X and of the weight under one scale: 64, 128, or all of them.
    """

    in_columns_per_scale: int = TILE

    @property
    def chunk(self) -> int:
        """Columns of the contraction that the tensor core sums alone."""
        return TILE if self.in_columns_per_scale % TILE == 0 else CHUNKS[0]

    @property
    def chunks(self) -> int:
        return self.in_columns // self.chunk

    @property
    def run_columns(self) -> int:
        """Neighbouring columns of the result that a lane holds: those of one store."""
        raise NotImplementedError

    def why_unsupported(self) -> str | None:
        if self.in_columns_per_scale not in (*CHUNKS, self.in_columns):
            return f"in_columns_per_scale must be 64, 128 or {self.in_columns}, got {self.in_columns_per_scale}"
        for name, step, least in (("in_columns", self.chunk, self.chunk), ("out_columns", CHUNKS[0], TILE)):
            columns = getattr(self, name)
            if columns % step or not least <= columns <= MAX_COLUMNS:
                return f"{name} must be a multiple of {step} from {least} to {MAX_COLUMNS}, got {columns}"
        return super().why_unsupported()


@dataclass(frozen=True)
class HopperGemmQuantizeSpec(HopperProjectionSpec):
    """X Wᵀ quantised to MXFP8 in registers, one scale for 32 rows and a head; also transposed, as attention takes V."""

    columns_per_scale: int = TILE
    headroom_exponent: int = 0
    writes_transposed: bool = False
    k_smoothing: bool = False

    @property
    def run_columns(self) -> int:
        return STORE_BYTES

    def why_unsupported(self) -> str | None:
        if self.k_smoothing:
            return "k_smoothing must be False, got True"
        if self.columns_per_scale not in CHUNKS or self.out_columns % self.columns_per_scale:
            return f"columns_per_scale must be 64 or 128 and divide {self.out_columns}, got {self.columns_per_scale}"
        if not 0 <= self.headroom_exponent < 128:
            return f"headroom_exponent must be from 0 to 127, got {self.headroom_exponent}"
        return super().why_unsupported()


@dataclass(frozen=True)
class HopperGemmSpec(HopperProjectionSpec):
    """X Wᵀ in a float dtype."""

    out_dtype: torch.dtype = torch.bfloat16

    @property
    def run_columns(self) -> int:
        return STORE_BYTES // self.out_dtype.itemsize

    def why_unsupported(self) -> str | None:
        if self.out_dtype not in (torch.bfloat16, torch.float32):
            return f"out_dtype must be bfloat16 or float32, got {self.out_dtype}"
        return super().why_unsupported()


@dataclass(frozen=True)
class HopperProjectionConfig:
    """How a CTA is laid out.

    `stages` tiles of X are in flight. The `weight_tiles` column tiles of a CTA stay in shared memory for its whole life
    or, where even one is too deep for that, travel with X through the stages.
    """

    stages: int
    weight_tiles: int
    is_resident: bool

    @property
    def threads(self) -> int:
        return 128 * (1 + WARPGROUPS)

    def groups(self, spec: HopperProjectionSpec) -> int:
        """CTAs that share a row tile."""
        return spec.column_tiles // self.weight_tiles

    def weight_buffers(self, spec: HopperProjectionSpec) -> int:
        """Tiles of the weight in shared memory."""
        return self.weight_tiles * spec.depth_tiles if self.is_resident else self.stages

    def shared_bytes(self, spec: HopperProjectionSpec) -> int:
        """Upper bound of a CTA's shared memory."""
        return (self.stages + self.weight_buffers(spec)) * PAYLOAD_BYTES + other_bytes(spec, self.weight_tiles)


def other_bytes(spec: HopperProjectionSpec, weight_tiles: int) -> int:
    """Shared memory beside the tiles: scales are fp32 there."""
    return BOOKKEEPING_BYTES + BOARD_BYTES + 4 * ROW_BLOCKS * spec.chunks * (RECORDS + weight_tiles)


@functools.cache
def choose_config(spec: HopperProjectionSpec, facts: DeviceFacts) -> HopperProjectionConfig:
    """As much of the weight as fits beside two tiles of X, or a row tile and one more where that is read repeatedly."""
    for weight_tiles in range(min(spec.column_tiles, MAX_WEIGHT_TILES), 0, -1):
        buffers = (facts.shared_bytes_per_block - other_bytes(spec, weight_tiles)) // PAYLOAD_BYTES
        stages = buffers - weight_tiles * spec.depth_tiles
        is_deep_enough = stages >= (spec.depth_tiles + 1 if weight_tiles > 1 else 2)
        if spec.column_tiles % weight_tiles == 0 and is_deep_enough:
            return HopperProjectionConfig(min(stages, 2 * spec.depth_tiles + 2), weight_tiles, is_resident=True)
    return HopperProjectionConfig(buffers // 2, 1, is_resident=False)
