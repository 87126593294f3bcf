"""What the weight gradient is asked for, and how it is laid out on Blackwell. No kernel language here.

dW is cut into tiles of 128 rows and `tile_columns` columns, the tokens into parts. A work item is one part of one
tile: its products are summed in tensor memory and written as one partial sum; a second kernel adds the parts in order.
"""

import functools
from dataclasses import dataclass, replace

import torch

from pma.jagged import num_row_blocks
from pma.kernels.device_facts import KIB, DeviceFacts
from pma.layouts.scale_tiles import TILE_BYTES, TILE_ROWS

SLAB = TILE_ROWS  # tokens of a K tile, rows of a tile of dW, columns that one load brings
SLAB_BYTES = SLAB * SLAB
SCALE_COLUMNS = 4  # of tensor memory, for the scales of one slab
TENSOR_COLUMNS = 512
MAX_COLUMNS = 8192
OVERHEAD_BYTES = 2 * KIB  # barriers, the address of tensor memory, alignment
MAX_CLUSTER = 4
MIN_SEGMENTS_PER_PART, MAX_SEGMENT_PARTS = 16, 64
OUT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class WeightGradSpec:
    """dW [out_columns, in_columns] = doutᵀ x, dout [T, out_columns] and x [T, in_columns] jagged MXFP8.

    keeps_segments_apart=False: products run on through segments; the order of the sum follows from T, B, offsets and
    the number of multiprocessors, the same in every run.
    keeps_segments_apart=True: every segment is summed alone, P_b, as in a batch of its own. Over runs of
    `segments_per_part` segments ((0 + P_0) + P_1) + …, then over the runs likewise, all in fp32: the order follows
    from B alone, whatever lies in front of a segment or behind it.
    """

    out_columns: int
    in_columns: int
    offsets_dtype: torch.dtype
    out_dtype: torch.dtype = torch.float32
    keeps_segments_apart: bool = False

    def why_unsupported(self) -> str | None:
        """None if the kernel serves the spec, else the reason, naming what came and what is allowed."""
        for name, columns in (("dout", self.out_columns), ("x", self.in_columns)):
            if columns % SLAB or not 0 < columns <= MAX_COLUMNS:
                return f"the width of {name} must be a multiple of {SLAB} up to {MAX_COLUMNS}, got {columns}"
        if self.out_dtype not in OUT_DTYPES:
            return f"out_dtype must be float32 or bfloat16, got {self.out_dtype}"
        if self.offsets_dtype not in (torch.int32, torch.int64):
            return f"offsets must be int32 or int64, got {self.offsets_dtype}"
        return None


@dataclass(frozen=True)
class WeightGradConfig:
    """Tile width, CTAs of a cluster, stages of operands in shared memory, accumulators in tensor memory.

    The CTAs of a cluster have tiles of the same columns of dW, below each other; each slab of x is read by one of them
    for all.
    """

    tile_columns: int
    cluster: int
    stages: int
    accumulators: int

    @property
    def slabs(self) -> int:
        """Slabs of a stage: one of dout, the others of x."""
        return 1 + self.tile_columns // SLAB

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(first column, columns) of the products that make up a tile: 256 columns where they can be, else 128.

        A product of 128 columns reads as many bytes of shared memory in each cycle as there are: 8 KiB in 64 cycles.
        """
        return tuple((first, min(256, self.tile_columns - first)) for first in range(0, self.tile_columns, 256))

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: payload and scale tiles."""
        return self.slabs * (SLAB_BYTES + TILE_BYTES)

    def shared_bytes(self) -> int:
        """Upper bound of a CTA's shared memory."""
        return self.stages * self.stage_bytes + OVERHEAD_BYTES

    @property
    def scales_column(self) -> int:
        """Column of tensor memory where the scales of the stages begin, behind the accumulators."""
        return self.accumulators * self.tile_columns

    def tensor_columns(self) -> int:
        """Columns of tensor memory that are used."""
        return self.scales_column + self.stages * self.slabs * SCALE_COLUMNS

    def tiles(self, spec: WeightGradSpec) -> int:
        return (spec.out_columns // SLAB) * (spec.in_columns // self.tile_columns)

    def parts(self, spec: WeightGradSpec, num_rows: int, num_segments: int, num_ctas: int) -> int:
        """Partial sums of each tile: no more than there are K tiles, and than CTAs that run at the same time."""
        if spec.keeps_segments_apart:
            return -(-num_segments // segments_per_part(num_segments))
        return max(1, min(num_row_blocks(num_rows, num_segments, SLAB), num_ctas // self.tiles(spec)))


def segments_per_part(num_segments: int) -> int:
    """Segments that are added up one after the other with `keeps_segments_apart`; a function of their number alone."""
    return max(MIN_SEGMENTS_PER_PART, -(-num_segments // MAX_SEGMENT_PARTS))


@functools.cache
def choose_config(spec: WeightGradSpec, facts: DeviceFacts) -> WeightGradConfig:
    """The widest tile that divides x and leaves room for scales; as many CTAs in a cluster and stages as fit.

    Segments kept apart: sums of a tile stay in the epilogue's registers, 128 to a thread, and two accumulators overlap
    a segment's product with reading the one before.
    """
    if spec.keeps_segments_apart:
        tile_columns, accumulators = SLAB, 2
    else:
        tile_columns, accumulators = next(n for n in (384, 256, 128) if spec.in_columns % n == 0), 1
    tiles_down = spec.out_columns // SLAB
    cluster = next(n for n in range(MAX_CLUSTER, 0, -1) if tiles_down % n == 0)
    config = WeightGradConfig(tile_columns, cluster, 1, accumulators)
    return replace(config, stages=(facts.shared_bytes_per_block - OVERHEAD_BYTES) // config.stage_bytes)
