"""Scale bytes between the compact layout and 128-aligned tiles (`pma/layouts/scale_tiles.py`), both ways.

One warp moves the bytes of one tile slot of 128 rows; slots are dealt out evenly, so thousands of short segments cost
what as many rows of a long one cost. The warp finds the slot's segment itself: nothing is read on the host.
Bytes that no block has are 127 in tiles and 0 in the compact layout. Bound: latency, then the 512 bytes of each tile.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.memory import SmemAllocator
from torch import Tensor

from pma.jagged import num_row_blocks
from pma.kernels.blocks.memory import clear_bytes, element_pointer, store_byte
from pma.kernels.blocks.scale_tiles import reset_scales, store_tile
from pma.kernels.blocks.segments import first_slot, spare_slots, tile_rows
from pma.kernels.compile import cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts, num_multiprocessors
from pma.kernels.scatter_scales.spec import BLOCKS_PER_SM, WARPS, ScatterScalesSpec
from pma.layouts import BLOCK, tile_shape
from pma.layouts.mxfp8 import SCALE_ONE
from pma.layouts.scale_tiles import TILE_BYTES, TILE_ROWS


class ScatterScales:
    """The kernel of one spec."""

    def __init__(self, spec: ScatterScalesSpec):
        self.spec = spec
        self.blocks_in_row = spec.columns // BLOCK

    @cute.jit
    def __call__(self, compact: cute.Tensor, tiles: cute.Tensor, offsets: cute.Tensor, num_blocks: Int32, stream):
        self.kernel(compact, tiles, offsets).launch(grid=[num_blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, compact: cute.Tensor, tiles: cute.Tensor, offsets: cute.Tensor):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        columns = 4 * self.spec.column_tiles
        layout = cute.make_layout((4, columns, WARPS), stride=(columns, 1, 4 * columns))
        staged = SmemAllocator().allocate_tensor(Uint8, layout, 16)[None, None, warp]
        num_segments = cute.size(offsets, mode=[0]) - 1
        num_tiles = cute.size(tiles, mode=[0 if self.spec.direction == "row" else 1])
        tile = block * WARPS + warp
        while tile < num_tiles:
            if const_expr(self.spec.gathers):
                self.gather(compact, tiles, offsets, (num_segments, tile))
            else:
                self.scatter(compact, tiles, offsets, (num_segments, tile, staged))
            tile += blocks * WARPS
        if const_expr(self.spec.gathers):
            worker = block * WARPS * 32 + warp * 32 + cute.arch.lane_idx()
            head, tail = Int32(offsets[0]) // BLOCK, first_slot(offsets, num_segments, BLOCK)
            for begin, end in ((Int32(0), head), (tail, cute.size(compact, mode=[0]))):
                span = (Int64(begin) * self.blocks_in_row, Int64(end) * self.blocks_in_row)
                clear_bytes(compact, *span, worker, blocks * WARPS * 32)

    @cute.jit
    def scatter(self, compact: cute.Tensor, tiles: cute.Tensor, offsets: cute.Tensor, work):
        """work: (number of segments, tile slot, [4, 4·⌈C/128⌉] bytes of this warp in shared memory)."""
        num_segments, tile, staged = work
        lane = cute.arch.lane_idx()
        rows = tile_rows(offsets, num_segments, tile)
        reset_scales(staged, lane, 32)
        cute.arch.sync_warp()
        source = element_pointer(compact, self.compact_offset(rows), 1)
        blocks = (rows.num_rows + BLOCK - 1) // BLOCK
        bytes_ = cute.make_tensor(source, cute.make_layout((4, self.blocks_in_row), stride=(self.blocks_in_row, 1)))
        for index in cutlass.range(lane, blocks * self.blocks_in_row, 32):
            row, column = index // self.blocks_in_row, index % self.blocks_in_row
            staged[row, column] = bytes_[row, column]
        cute.arch.sync_warp()
        by_row, by_column = (tiles, None) if const_expr(self.spec.direction == "row") else (None, tiles)
        store_tile(by_row, by_column, staged, tile)
        cute.arch.sync_warp()

    @cute.jit
    def gather(self, compact: cute.Tensor, tiles: cute.Tensor, offsets: cute.Tensor, work):
        """work: (number of segments, tile slot). Reads the first of the 32 copies of each byte."""
        num_segments, tile = work
        lane = cute.arch.lane_idx()
        rows = tile_rows(offsets, num_segments, tile)
        first = self.compact_offset(rows)
        blocks = (rows.num_rows + BLOCK - 1) // BLOCK
        for index in cutlass.range(lane, blocks * self.blocks_in_row, 32):
            row, column = index // self.blocks_in_row, index % self.blocks_in_row
            if const_expr(self.spec.direction == "row"):
                slot = Int64(tile) * self.spec.column_tiles + column // 4
                place = row * 4 + column % 4
            else:
                slot = Int64(column // 4) * cute.size(tiles, mode=[1]) + tile
                place = column % 4 * 4 + row
            byte = cute.make_tensor(element_pointer(tiles, slot * TILE_BYTES + place, 1), cute.make_layout(1))[0]
            store_byte(compact, first + index, Int32(byte))
        spare = spare_slots(offsets, rows, BLOCK)
        begin = first + Int64(blocks) * self.blocks_in_row
        clear_bytes(compact, begin, begin + spare * self.blocks_in_row, lane, Int32(32))

    @cute.jit
    def compact_offset(self, rows) -> Int64:
        """First byte of a tile's scales in the compact layout."""
        slot = rows.begin // BLOCK + rows.segment + (rows.first_row - rows.begin) // BLOCK
        return Int64(slot) * self.blocks_in_row


def build(arch: str, spec: ScatterScalesSpec, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    u8 = torch.uint8
    shape = (None, spec.column_tiles, 512) if spec.direction == "row" else (spec.column_tiles, None, 512)
    compact, tiles = fake_tensor(u8, None, spec.columns // BLOCK, alignment=1), fake_tensor(u8, *shape)
    offsets = fake_tensor(spec.offsets_dtype, None, alignment=spec.offsets_dtype.itemsize)
    return compile_for(arch, ScatterScales(spec), compact, tiles, offsets, Int32(0), options=options)


compiled = cached(build)


def scatter_scales(scales: Tensor, offsets: Tensor, total_rows: int, direction: str) -> Tensor:
    """Compact scales [T // 32 + B, C / 32] → tiles, on the current stream; `pma.layouts.scatter_scales` says which."""
    num_segments, columns = offsets.shape[0] - 1, scales.shape[1] * BLOCK
    tiles = scales.new_empty(tile_shape(total_rows, num_segments, columns, direction))
    if scales.shape[0] == 0:
        return tiles.fill_(SCALE_ONE)
    _launch(ScatterScalesSpec(columns, offsets.dtype, direction), scales.contiguous(), tiles, offsets, total_rows)
    return tiles


def gather_scales(tiles: Tensor, offsets: Tensor, total_rows: int, num_columns: int, direction: str) -> Tensor:
    """Tiles → compact scales, on the current stream; `pma.layouts.gather_scales` says which."""
    slots = num_row_blocks(total_rows, offsets.shape[0] - 1, BLOCK)
    compact = tiles.new_empty(slots, num_columns // BLOCK)
    if slots:
        spec = ScatterScalesSpec(num_columns, offsets.dtype, direction, gathers=True)
        _launch(spec, compact, tiles.contiguous(), offsets, total_rows)
    return compact


def _launch(spec: ScatterScalesSpec, compact: Tensor, tiles: Tensor, offsets: Tensor, total_rows: int) -> None:
    num_tiles = num_row_blocks(total_rows, offsets.shape[0] - 1, TILE_ROWS)
    limit = num_multiprocessors(tiles.device) * BLOCKS_PER_SM
    num_blocks = max(1, min(-(-num_tiles // WARPS), limit))
    with torch.cuda.device(tiles.device):
        compiled(device_facts(tiles.device).arch, spec)(compact, tiles, offsets.contiguous(), num_blocks)
