"""Who works on what, the same on every architecture: pairs of a head and a seed tile, and their segments.

Workers go through the segments, the longest first, and each of them serves every pair with one CTA.
"""

from typing import NamedTuple

import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from pma.kernels.attention_forward.spec import TILE, AttentionForwardSpec
from pma.kernels.blocks.memory import row_tensor


class Work(NamedTuple):
    """A segment's part in a CTA's work."""

    segment: Int32  # −1: no more work; the steps are 0 then
    first_row: Int32
    num_rows: Int32
    steps: Int32  # KV tiles


class Share(NamedTuple):
    """What a CTA works on, whatever the segment."""

    head: Int32
    seed_tile: Int32


class SharesOfCtas:
    """What a kernel of the attention forward asks about its CTA."""

    spec: AttentionForwardSpec

    @cute.jit
    def share(self) -> Share:
        block, _, _ = cute.arch.block_idx()
        group = block % self.spec.groups
        return Share(group // self.spec.seed_tiles, group % self.spec.seed_tiles)

    @cute.jit
    def work(self, o, turn: Int32) -> Work:
        """This CTA's segment in a turn: one load, so that who reads a segment ahead does not wait for it.

        o: has `work`, see `work_by_length`. The order of workers alternates, so that each gets long segments and short.
        """
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        worker, workers = block // self.spec.groups, blocks // self.spec.groups
        place = turn * workers + (workers - 1 - worker if turn % 2 == 1 else worker)
        segment, first_row, num_rows, steps = Int32(-1), Int32(0), Int32(0), Int32(0)
        if place < o.work.shape[0]:
            words = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(row_tensor(o.work, Int64(place) * 4, cute.make_layout(4)), words)
            segment, first_row, num_rows, steps = words[0], words[1], words[2], words[3]
        return Work(segment, first_row, num_rows, steps)


def work_by_length(offsets: Tensor) -> Tensor:
    """`Work` of each segment, the longest first; on the device. → [B, 4] int32"""
    lengths, order = torch.sort(offsets.diff(), descending=True, stable=True)
    return torch.stack([order, offsets[order], lengths, (lengths + TILE - 1) // TILE], dim=1).int()


class Attended(NamedTuple):
    """What the kernel wrote."""

    out: Tensor  # [B, S, E] out_dtype
    lse: Tensor  # [B, H, S] float32, natural log
    row_sum_log2: Tensor  # [B, H, S] int32


def empty_results(spec: AttentionForwardSpec, num_segments: int, device: torch.device) -> Attended:
    state = (num_segments, spec.num_heads, spec.num_seeds)
    return Attended(
        torch.empty(num_segments, spec.num_seeds, spec.columns, dtype=spec.out_dtype, device=device),
        torch.empty(state, dtype=torch.float32, device=device),
        torch.empty(state, dtype=torch.int32, device=device),
    )
