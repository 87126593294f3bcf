"""What the attention forward is asked for, and how it is laid out on Blackwell. No kernel language here.

A CTA works on one head and on 128 seeds, against the events of many segments, one KV tile of 128 events at a time.
Tensor memory, 492 of 512 columns:

    [0, D) O · [128, 256) [256, 384) S(j) · [384, 416) [416, 448) P(j) · then scale tiles, four columns each:
    [448, 456) [456, 464) of Q and K(j) · [464, 468) [468, 472) of P(j) · [472, 476) [476, 480) of V(j) ·
    [480, 488) l · [488, 492) the scales of the ones that sum P

j takes the buffers in turn.
"""

import functools
from dataclasses import dataclass

import torch

from pma.kernels.device_facts import DeviceFacts
from pma.layouts.scale_tiles import TILE_BYTES, TILE_ROWS
from pma.numerics import AttentionNumerics

TILE = TILE_ROWS  # seeds and events of a tile
BUFFERS = 2  # of scores, of weights and of their scales: KV tiles take them in turn
TENSOR_COLUMNS = 512
P_COLUMNS = TILE // 4  # four bytes to a column
SCALE_COLUMNS = 4  # of one scale tile
SCORE_COLUMN = TILE
P_COLUMN = SCORE_COLUMN + BUFFERS * TILE
QK_SCALE_COLUMN = P_COLUMN + BUFFERS * P_COLUMNS
P_SCALE_COLUMN = QK_SCALE_COLUMN + BUFFERS * 2 * SCALE_COLUMNS
V_SCALE_COLUMN = P_SCALE_COLUMN + BUFFERS * SCALE_COLUMNS
SUM_COLUMN = V_SCALE_COLUMN + BUFFERS * SCALE_COLUMNS
SUM_COLUMNS = 8  # the least that a product has
ONE_SCALE_COLUMN = SUM_COLUMN + SUM_COLUMNS
END_COLUMN = ONE_SCALE_COLUMN + SCALE_COLUMNS
HEAD_DIMS = (64, 128)
BOOKKEEPING_BYTES = 8192  # barriers, exponents of rows, the scales of P, ones, alignment
SOFTMAX_WARPS, CORRECTION_WARPS = 4 * BUFFERS, 4
WARPS = 16  # products 0 and 1, loads 2, one that makes registers free, correction 4–7, softmax 8–15


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
        """Pairs of a head and a seed tile: each has CTAs of its own."""
        return self.num_heads * self.seed_tiles

    def why_unsupported(self) -> str | None:
        """None if the kernel serves the spec, else the reason, naming what came and what is allowed."""
        if self.head_dim not in HEAD_DIMS:
            return f"the head width must be 64 or 128, got {self.head_dim}"
        if self.numerics.kv_tile != TILE:
            return f"kv_tile must be 128, got {self.numerics.kv_tile}"
        if self.numerics.repeated_max_guard:
            return "repeated_max_guard must be False, got True"
        if (reason := self._why_numerics_unsupported()) is not None:
            return reason
        if self.out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"out_dtype must be bfloat16, float16 or float32, got {self.out_dtype}"
        if self.offsets_dtype not in (torch.int32, torch.int64):
            return f"offsets must be int32 or int64, got {self.offsets_dtype}"
        return None

    def _why_numerics_unsupported(self) -> str | None:
        numerics = self.numerics
        if numerics.folds_v_scales:
            return "folds_v_scales must be False, got True: V's scales take part in the products"
        if numerics.p_cast == "static":
            return "p_cast must be 'tile' or 'block', got 'static': P has scales of its own"
        for name in ("denominator", "lse_sum"):
            if (summed := getattr(numerics, name)) != "quantized":
                return f"{name} must be 'quantized', got {summed!r}: a product sums P"
        if numerics.rescale_threshold_log2 != 0:
            return f"rescale_threshold_log2 must be 0, got {numerics.rescale_threshold_log2}: P's scales move instead"
        return None


@dataclass(frozen=True)
class AttentionForwardConfig:
    """k_buffers, v_buffers: tiles in flight · q_buffers: of the seeds, 2 where they change with the segment · emulated:
    of 16 pairs of exponentials those that the FMA pipes compute · finds_maxima_in_loads: loads from tensor memory give
    the maxima of 32 columns · ctas: of a cluster, with neighbouring seed tiles of a head, each of which loads its part
    of K and V for all."""

    k_buffers: int
    v_buffers: int
    q_buffers: int
    emulated: int
    finds_maxima_in_loads: bool
    ctas: int

    @property
    def threads(self) -> int:
        return 32 * WARPS

    def shared_bytes(self, spec: AttentionForwardSpec) -> int:
        """Upper bound of a CTA's shared memory."""
        tile = TILE * spec.head_dim + TILE_BYTES
        return (self.k_buffers + self.v_buffers + self.q_buffers) * tile + BOOKKEEPING_BYTES


@functools.cache
def choose_config(spec: AttentionForwardSpec, facts: DeviceFacts) -> AttentionForwardConfig:
    """As many KV buffers as fit, up to 12, more of V, which is loaded with K and needed later.

    A seed tile and KV step takes 16,384 exponentials, 1,024 clocks of B200's unit, but 512 of GB300's, where nothing
    is emulated; a polynomial costs about 7 FMA slots of 128 a clock: 6 of 16 balance the two. Clusters need an even
    number of seed tiles.
    """
    q_buffers = 1 if spec.is_shared else 2
    tile = TILE * spec.head_dim + TILE_BYTES
    room = min((facts.shared_bytes_per_block - BOOKKEEPING_BYTES) // tile - q_buffers, 12)
    is_sm103 = facts.arch == "sm_103a"
    k_buffers = (room - 1) // 2
    ctas = 2 if spec.seed_tiles % 2 == 0 else 1
    return AttentionForwardConfig(k_buffers, room - k_buffers, q_buffers, 0 if is_sm103 else 6, is_sm103, ctas)
