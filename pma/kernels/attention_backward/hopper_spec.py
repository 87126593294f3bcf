"""What the attention backward is asked for on Hopper, and how it is laid out there. No kernel language here.

A CTA works on one head and goes through tiles of 128 events, 64 for each of two warpgroups; for each tile it takes the
seeds 64 at a time ("steps"). Registers of a thread that computes, D = 128: dV 64 · dK 64 · S 16 · dP 16 · P 8 · dS 8.
"""

import functools
from dataclasses import dataclass

import torch

from pma.kernels.attention_backward.spec import TILE, AttentionBackwardSpec
from pma.kernels.device_facts import DeviceFacts
from pma.numerics import E4M3_MAX

STEP = 64  # seeds
WARPGROUPS = 2  # that compute
GROUP_ROWS = TILE // WARPGROUPS
COMPUTE_WARPS, REDUCE_WARPS, NORM_WARPS = 4 * WARPGROUPS, 4, 2
RECORD_WORDS = 68  # of a step's seeds: pairs of fp16 for shift and δ, two scales of Q, two words that fill up
SUMMARY_WORDS = 4  # of a segment and head, see `seed_statistics.py`
TILES = 2  # of a CTA announced at once
FACT_WORDS = 16  # of a tile
DS_LOG2, PEER_UNIT = 12, 13  # behind its facts: log2 of dS's scale; of the unit of dQ of the cluster's other CTA
MAX_SLABS = 4  # of dQ for each head
BOOKKEEPING_BYTES = 1024  # barriers, found tiles, maxima, beside rounding up
FP16_MAX = 65504.0


@dataclass(frozen=True)
class HopperBackwardSpec(AttentionBackwardSpec):
    """The same with one scale for a head and 32 rows."""

    @property
    def steps(self) -> int:
        return -(-self.num_seeds // STEP)

    def why_unsupported(self) -> str | None:
        numerics = self.numerics
        if not numerics.folds_v_scales:
            return "uniform_scales and folds_v_scales must be True: Hopper's products have no block scales"
        for name, headroom in (
            ("2·headroom_exponent", 2 * numerics.headroom_exponent),
            ("headroom_exponent of V and dO: 2·dp_headroom_exponent", 2 * numerics.dp_headroom_exponent),
        ):
            if self.head_dim * E4M3_MAX**2 / 2.0**headroom > FP16_MAX:
                return f"{name} must keep sums over a head within fp16, got {headroom} for heads of {self.head_dim}"
        return super().why_unsupported()

    def _why_scales_unsupported(self) -> str | None:
        return None


@dataclass(frozen=True)
class HopperBackwardConfig:
    """How the kernel is laid out.

    Attributes:
        stages: steps in flight.
        q_is_resident: all seeds stay in shared memory, else they travel with the steps.
        slabs: fp32 or fp16 sums of dQ for each head that clusters share, 0 for one of each (deterministic).
        ctas: of a cluster; two share dQ, which each adds for half of the columns.
    """

    stages: int
    q_is_resident: bool
    slabs: int
    ctas: int

    @property
    def ds_buffers(self) -> int:
        return 2 // self.ctas  # as many bytes for one CTA as for a cluster, whose dS is twice as large

    @property
    def threads(self) -> int:
        return 128 * (2 + WARPGROUPS)

    def q_buffers(self, spec: HopperBackwardSpec) -> int:
        return spec.steps if self.q_is_resident else self.stages

    def shared_bytes(self, spec: HopperBackwardSpec) -> int:
        """Upper bound of a CTA's shared memory."""
        steps = 2 * STEP * spec.head_dim * (self.stages + self.q_buffers(spec)) + 4 * RECORD_WORDS * self.stages
        return steps + 3 * TILE * spec.head_dim + 2 * STEP * TILE + BOOKKEEPING_BYTES


@functools.cache
def choose_config(
    spec: HopperBackwardSpec, facts: DeviceFacts, is_deterministic: bool = False, **choices: object
) -> HopperBackwardConfig:
    """The seeds stay if they fit beside two steps; up to 4 steps in flight. `choices` are fields that are given."""
    for resident, least in ((True, 2), (False, 2)):
        for stages in (4, 3, 2):
            config = HopperBackwardConfig(stages, resident, 0 if is_deterministic else MAX_SLABS, ctas=1)
            config = HopperBackwardConfig(**vars(config) | choices)  # type: ignore[arg-type]
            if config.ctas > 1 and not (spec.is_shared and spec.head_dim == 2 * STEP):
                raise ValueError(f"ctas must be 1 but for shared seeds and heads of {2 * STEP}, got {config.ctas}")
            fits = config.shared_bytes(spec) <= facts.shared_bytes_per_block
            if fits and stages >= least and (spec.is_shared or not config.q_is_resident):
                return config
    raise ValueError(f"no configuration of the attention backward for {spec} with {choices}")


def slab_shape(spec: HopperBackwardSpec, count: int) -> tuple[int, ...]:
    """Sums of dQ as threads hold them: slab, step, half of 64 columns, what a thread adds at once, thread, element."""
    width = 8 if spec.dq_dtype == torch.float16 else 4
    return (count, spec.steps, spec.head_dim // STEP, STEP * STEP // 128 // width, 128, width)
