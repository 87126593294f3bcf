"""Who works on what, the same on every architecture: pairs of a head and a seed tile, and their segments.

Workers go through the segments, the longest first, and each of them serves every pair with one CTA.
"""

from typing import NamedTuple

import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from pma.kernels.attention_forward.spec import TILE, AttentionForwardSpec
from pma.kernels.blocks.memory import WORDS, element_pointer


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
        """This CTA's segment in a turn.

        o: has `work`, see `work_by_length`. The order of workers alternates, so that each gets long segments and short.
        """
        return shared_out(self.word_of_work(o, turn))

    @cute.jit
    def word_of_work(self, o, turn: Int32) -> Int32:
        """`work` as one load of a warp, for `shared_out`: who reads a segment ahead does not wait for it.

        Each lane has one of the four words. What the compiler finds equal in all lanes it moves to uniform registers as
        soon as it is loaded, for which the warp waits.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        worker, workers = block // self.spec.groups, blocks // self.spec.groups
        place = turn * workers + (workers - 1 - worker if turn % 2 == 1 else worker)
        part = thread % WORDS
        word = Int32(-1) if part == 0 else Int32(0)
        if place < o.work.shape[0]:
            word = cute.make_tensor(element_pointer(o.work, Int64(place) * WORDS + part, 4), cute.make_layout(1))[0]
        return word


@cute.jit
def shared_out(word: Int32) -> Work:
    """What the lanes of a warp have of a segment, to all of them."""
    return Work(*(cute.arch.shuffle_sync(word, part) for part in range(WORDS)))


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
