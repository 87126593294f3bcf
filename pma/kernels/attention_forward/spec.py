"""What the attention forward is asked for, and how it is laid out on Blackwell. No kernel language here.

A CTA works on one head and on up to 256 seeds, two tiles of 128 ("stages"), against the events of many segments, one
KV tile of 128 events at a time. Tensor memory, 512 columns:

    [0, 128) S0 · [128, 256) S1 · [256, 256 + D) O0 · [384, 384 + D) O1

What a block of 128 columns S(i) holds beside the scores, once they are read:

    [0, 32) P(i) · [32, 36) scales of P(i) · [36, 40) scales of V · [40, 48) scales of Q(1−i) and K, for S(1−i)
"""

import functools
from dataclasses import dataclass

import torch

from pma.kernels.device_facts import DeviceFacts
from pma.layouts.scale_tiles import TILE_BYTES, TILE_ROWS
from pma.numerics import AttentionNumerics

TILE = TILE_ROWS  # seeds and events of a tile
STAGES = 2  # seed tiles of a CTA
TENSOR_COLUMNS = 512
SCORE_COLUMNS = TILE
P_COLUMNS = TILE // 4  # four bytes to a column
SCALE_COLUMNS = 4  # of one scale tile
OUT_COLUMN = STAGES * SCORE_COLUMNS
HEAD_DIMS = (64, 128)
BOOKKEEPING_BYTES = 8192  # barriers, row factors, the constant scales of P, alignment
SOFTMAX_WARPS, CORRECTION_WARPS = 4 * STAGES, 4
WARPS = 16  # softmax 0–7, correction 8–11, product 12, loads 13, two that make registers free


@dataclass(frozen=True)
class AttentionForwardSpec:
    """softmax(Q Kᵀ / sqrt(D)) V for each head and segment, all in MXFP8."""

    head_dim: int
    num_heads: int
    num_seeds: int
    is_shared: bool  # one Q for all segments
    numerics: AttentionNumerics
    out_dtype: torch.dtype
    offsets_dtype: torch.dtype

    @property
    def columns(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def seed_tiles(self) -> int:
        return -(-self.num_seeds // TILE)

    @property
    def groups(self) -> int:
        """Pairs of a head and a pair of seed tiles: each has CTAs of its own."""
        return self.num_heads * -(-self.seed_tiles // STAGES)

    def why_unsupported(self) -> str | None:
        """None if the kernel serves the spec, else the reason, naming what came and what is allowed."""
        if self.head_dim not in HEAD_DIMS:
            return f"the head width must be 64 or 128, got {self.head_dim}"
        if self.numerics.kv_tile != TILE:
            return f"kv_tile must be 128, got {self.numerics.kv_tile}"
        if self.numerics.repeated_max_guard:
            return "repeated_max_guard must be False, got True"
        if self.numerics.folds_v_scales:
            return "folds_v_scales must be False, got True: V's scales take part in the products"
        if self.out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"out_dtype must be bfloat16, float16 or float32, got {self.out_dtype}"
        if self.offsets_dtype not in (torch.int32, torch.int64):
            return f"offsets must be int32 or int64, got {self.offsets_dtype}"
        return None


@dataclass(frozen=True)
class AttentionForwardConfig:
    """kv_buffers: tiles of K and of V in flight, together · q_buffers: of the seeds, 2 where they change with the
    segment · emulated: of 16 pairs of exponentials those that the FMA pipes compute · finds_maxima_in_loads: loads from
    tensor memory give the maxima of 32 columns."""

    kv_buffers: int
    q_buffers: int
    emulated: int
    finds_maxima_in_loads: bool

    @property
    def threads(self) -> int:
        return 32 * WARPS

    def shared_bytes(self, spec: AttentionForwardSpec) -> int:
        """Upper bound of a CTA's shared memory."""
        tile = TILE * spec.head_dim + TILE_BYTES
        return (self.kv_buffers + STAGES * self.q_buffers) * tile + BOOKKEEPING_BYTES


@functools.cache
def choose_config(spec: AttentionForwardSpec, facts: DeviceFacts) -> AttentionForwardConfig:
    """As many KV buffers as fit, up to 12.

    A seed tile and KV step takes 16,384 exponentials, 1,024 clocks of B200's unit, but 512 of GB300's, where nothing
    is emulated; a polynomial costs about 7 FMA slots of 128 a clock: 6 of 16 balance the two.
    """
    q_buffers = 1 if spec.is_shared else 2
    tile = TILE * spec.head_dim + TILE_BYTES
    room = (facts.shared_bytes_per_block - BOOKKEEPING_BYTES) // tile - STAGES * q_buffers
    is_sm103 = facts.arch == "sm_103a"
    return AttentionForwardConfig(min(room, 12), q_buffers, 0 if is_sm103 else 6, is_sm103)
