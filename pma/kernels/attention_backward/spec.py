"""What the attention backward is asked for, and how it is laid out on Blackwell. No kernel language here.

A CTA works on one head and goes through tiles of 128 events; for each it takes the seeds in tiles of 128 ("steps").
Tensor memory, 512 columns, the allocation of source 2.2.1:

    [0, 128) S · [128, 256) dP, then dQ · [256, 256 + D) dV · [384, 384 + D) dK

Beside the scores that have been read the block of S holds P, and scale factors; that of dP holds dS in the same places:

    [0, 16) and [64, 80) P (dS) of seeds 0–63 and 64–127 · [16, 40) scales, see `SCALES`
"""

import functools
from dataclasses import dataclass

import torch

from pma.kernels.device_facts import DeviceFacts
from pma.layouts.scale_tiles import TILE_BYTES, TILE_ROWS
from pma.numerics import AttentionNumerics

TILE = TILE_ROWS  # events of a tile, seeds of a step
HALF = TILE // 2  # seeds of a step that one of the two groups of computing warps works on
TENSOR_COLUMNS = 512
SCORES, DP, DV, DK = 0, TILE, 2 * TILE, 3 * TILE  # first columns
HEAD_DIMS = (64, 128)
COMPUTE_WARPS, REDUCE_WARPS = 8, 4
WARPS = 16  # compute 0–7, reduce 8–11, product 12, loads 13, search 14, row statistics 15
MAX_RESIDENT_STEPS = 4  # of seeds that stay in shared memory
BOOKKEEPING_BYTES = 8192  # barriers, found tiles, statistics of seeds, scales of P and dS, alignment

# Columns for the scale factors of a product's operands, four each, in the block of S or of dP.
SCALES = {
    "first scores": (DK, DK + 4),  # nothing has been added to dK yet
    "first dP": (DK + 8, DK + 12),
    "scores": (DP + 16, DP + 20),
    "dP": (SCORES + 16, SCORES + 20),
    "dV": (SCORES + 24, SCORES + 28),
    "dK": (DP + 24, DP + 28),
    "dQ": (SCORES + 32, SCORES + 36),
}


@dataclass(frozen=True)
class AttentionBackwardSpec:
    """Gradients of softmax(Q Kᵀ / sqrt(D)) V for each head and segment, all five products in MXFP8."""

    head_dim: int
    num_heads: int
    num_seeds: int
    is_shared: bool  # one Q for all segments
    numerics: AttentionNumerics
    offsets_dtype: torch.dtype

    @property
    def columns(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def steps(self) -> int:
        """Tiles of seeds."""
        return -(-self.num_seeds // TILE)

    @property
    def dq_dtype(self) -> torch.dtype:
        return torch.float16 if self.numerics.dq_accumulation == "fp16" else torch.float32

    def why_unsupported(self) -> str | None:
        """None if the kernel serves the spec, else the reason, naming what came and what is allowed."""
        if self.head_dim not in HEAD_DIMS:
            return f"the head width must be 64 or 128, got {self.head_dim}"
        if self.numerics.dp_operands != "mxfp8":
            return f"dp_operands must be mxfp8, got {self.numerics.dp_operands}"
        if reason := self._why_scales_unsupported():
            return reason
        if self.offsets_dtype not in (torch.int32, torch.int64):
            return f"offsets must be int32 or int64, got {self.offsets_dtype}"
        return None

    def _why_scales_unsupported(self) -> str | None:
        return "uniform_scales must be False, got True" if self.numerics.uniform_scales else None


@dataclass(frozen=True)
class AttentionBackwardConfig:
    """q_buffers, dout_buffers: tiles of seeds and of their gradients in flight; the seeds may all stay ·
    kv_buffers: pairs of tiles of K and V."""

    q_buffers: int
    dout_buffers: int
    kv_buffers: int

    @property
    def threads(self) -> int:
        return 32 * WARPS

    def q_is_resident(self, spec: AttentionBackwardSpec) -> bool:
        return spec.is_shared and self.q_buffers == spec.steps

    def shared_bytes(self, spec: AttentionBackwardSpec) -> int:
        """Upper bound of a CTA's shared memory."""
        payload = TILE * spec.head_dim
        both_directions = payload + 2 * TILE_BYTES
        pairs = self.kv_buffers * (2 * payload + 3 * TILE_BYTES)
        return (self.q_buffers + self.dout_buffers) * both_directions + pairs + TILE * TILE + BOOKKEEPING_BYTES


@functools.cache
def choose_config(spec: AttentionBackwardSpec, facts: DeviceFacts) -> AttentionBackwardConfig:
    """Two pairs of K and V; the seeds stay if they fit; what is left goes to the gradients, up to four tiles."""
    stays = spec.is_shared and spec.steps <= MAX_RESIDENT_STEPS
    q_buffers = spec.steps if stays else 2
    least = AttentionBackwardConfig(q_buffers, 0, 2)
    room = (facts.shared_bytes_per_block - least.shared_bytes(spec)) // (TILE * spec.head_dim + 2 * TILE_BYTES)
    return AttentionBackwardConfig(q_buffers, min(room, 4), 2)
