"""What the attention forward is asked for on Hopper, and how it is laid out there. No kernel language here.

A CTA works on one head and 128 seeds, 64 for each of two warpgroups, against the events of many segments, one KV tile
of 128 events at a time. Registers of a thread of them, at D = 128: O 68 · scores 64, as fp16 32 · P 16 · Q 16.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from pma.kernels.attention_forward.spec import TILE, AttentionForwardSpec
from pma.kernels.device_facts import DeviceFacts
from pma.numerics import E4M3_MAX

WARPGROUPS = 2  # that compute
GROUP_SEEDS = TILE // WARPGROUPS
WEIGHT_ROWS = 8  # of a tile of V, for the row sum; a product takes rows in eights
RECORD_WORDS = 16  # of a tile's scales in shared memory
BOOKKEEPING_BYTES = 2048  # barriers, scales, alignment
FP16_MAX = 65504.0


@dataclass(frozen=True)
class HopperForwardSpec(AttentionForwardSpec):
    """The same with one scale for a head and 32 rows."""

    @property
    def v_rows(self) -> int:
        """Rows of a tile of Vᵀ in shared memory: those that sum P come behind the head's."""
        return self.head_dim + (WEIGHT_ROWS if self.numerics.denominator == "quantized" else 0)

    def _why_numerics_unsupported(self) -> str | None:
        if self.numerics.p_cast != "static":
            return f"p_cast must be 'static', got {self.numerics.p_cast!r}"
        if not self.numerics.folds_v_scales:
            return "uniform_scales and folds_v_scales must be True: Hopper's products have no block scales"
        if self.numerics.lse_sum != "fp32":
            return f"lse_sum must be 'fp32', got {self.numerics.lse_sum!r}"
        return None


@dataclass(frozen=True)
class HopperForwardConfig:
    """How the kernel is laid out.

    Attributes:
        stages: tiles of K and of V in flight, each.
        ctas: of a cluster, which share loads of K and V.
        promotion: KV tiles after which O moves to fp32 sums in shared memory, 0 for never.
        scores: type of the accumulators of Q Kᵀ.
        exact_lse: lse is that of P before its cast, not of the sum that O is divided by.
        optimistic: exponentials do not wait for the tile's maximum; P is lowered where it moves. Only with fp16 scores.
    """

    stages: int
    ctas: int
    promotion: int
    scores: Literal["fp16", "fp32"]
    exact_lse: bool
    optimistic: bool

    @property
    def threads(self) -> int:
        return 128 * (1 + WARPGROUPS)

    def stage_bytes(self, spec: HopperForwardSpec) -> int:
        return TILE * (spec.head_dim + spec.v_rows) + 4 * RECORD_WORDS

    def sum_bytes(self, spec: HopperForwardSpec) -> int:
        """Of the fp32 sums of O."""
        return 4 * TILE * spec.v_rows if self.promotion else 0

    def shared_bytes(self, spec: HopperForwardSpec) -> int:
        """Upper bound of a CTA's shared memory."""
        return self.stages * self.stage_bytes(spec) + self.sum_bytes(spec) + BOOKKEEPING_BYTES


def fits_fp16(spec: HopperForwardSpec) -> bool:
    """Whether no sum of Q Kᵀ can leave fp16, given the headroom of their scales."""
    return spec.head_dim * (E4M3_MAX / 2.0**spec.numerics.headroom_exponent) ** 2 <= FP16_MAX


@functools.cache
def choose_config(spec: HopperForwardSpec, facts: DeviceFacts, **choices: object) -> HopperForwardConfig:
    """As many stages as fit, up to 6; `choices` are fields of the configuration that are given.

    Sums of FP8 products keep about 13 bits on Hopper, so that those with a sign drift low with length: O moves to fp32
    every 8 tiles (1,024 events).
    """
    scores = choices.get("scores", "fp16" if fits_fp16(spec) else "fp32")
    defaults = {
        "stages": 0, "ctas": 1, "promotion": 8, "scores": scores,
        "exact_lse": True, "optimistic": False,
    }  # fmt: skip
    config = HopperForwardConfig(**defaults | choices)  # type: ignore[arg-type]
    if spec.seed_tiles % config.ctas:
        raise ValueError(f"ctas must divide the {spec.seed_tiles} seed tiles, got {config.ctas}")
    if config.scores == "fp16" and not fits_fp16(spec):
        raise ValueError("scores='fp16' needs a headroom_exponent of 5 for heads of 128, 4 for 64")
    if config.optimistic and config.scores == "fp32":
        raise ValueError("optimistic=True needs scores='fp16': registers hold the scores and their exponentials")
    if config.stages:
        return config
    room = facts.shared_bytes_per_block - BOOKKEEPING_BYTES - config.sum_bytes(spec)
    return HopperForwardConfig(**vars(config) | {"stages": min(room // config.stage_bytes(spec), 6)})
