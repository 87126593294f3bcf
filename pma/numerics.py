"""AttentionNumerics: every numerical choice of MXFP8 attention in one record, read by reference, kernels and tests.

Sources: the MXFP8 FlashAttention-4 report (block scales of P and dS, fp16 dQ) and the P-cast paper (static scale
2^8, reverse key order, closed-form underflow threshold). DESIGN.md gives the evidence behind each default.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Literal

from pma.checks import check_bool, check_choice, check_finite, check_int

E4M3_MAX_MANTISSA, E4M3_MAX_EXPONENT = 1.75, 8
E4M3_MAX = E4M3_MAX_MANTISSA * 2.0**E4M3_MAX_EXPONENT  # 448
E4M3_MIN_ROUNDED_UP = 2.0**-10  # half of the least subnormal 2^-9: what is not larger rounds to zero
MAX_FOLD_LOG2 = (
    12  # octaves that a fold of V's scales lowers P at most: 2^6, where the static scale puts 1, stays normal
)

P_ROOM, DELTA_ROOM = 8, 15  # log2 of what P and δ may become in a folded backward (`pma/reference/folded.py`)


@dataclass(frozen=True)
class AttentionNumerics:
    """Rounding choices of one attention; frozen and hashable. Exponents are powers of two ("log2").

    Attributes:
        kv_tile: events of one softmax step, a multiple of 32 up to 1,024; bits depend on it, since P is cast relative
            to the running maximum.
        kv_order: "reverse" takes a segment's last tile first, so that P of later tiles cannot underflow behind a
            sink in the first events (those in the sink's own tile still can). It matters with p_cast="static".
        p_cast: "static" multiplies P, relative to the running maximum, by 2^p_scale_log2. "tile" and "block" take for
            each row of a tile, or 32 events of it, the least power of two that keeps P within E4M3: products with
            block scales need no common maximum.
        p_scale_log2: exponent of the static P scale, forward (p_cast="static") and (plus t) backward.
        p_cast_backward: "row_sum" casts P·2^(p_scale_log2 + t), t = min over 32 seeds of ⌊log2 l⌋; "block" takes
            the amax of each [32, 32] block.
        rescale_threshold_log2: the running maximum moves only when exceeded by more than this (0: always exact).
        denominator: "fp32" sums P before the cast, "quantized" after it (weights then sum to one exactly).
        lse_sum: the same for lse and ⌊log2 l⌋.
        dq_accumulation: "fp32", or "fp16" with the static scale 2^dq_scale_log2.
        dp_operands: "mxfp8", or "bf16": dP from the unquantised bf16 dO and the dequantised V.
        k_smoothing: subtract each segment's mean key before quantising (softmax does not change).
        repeated_max_guard: raise the running maximum by half an octave when it occurs more than once in a tile.
        uniform_scales: one scale for all of a head's columns in 32 rows (the Hopper contract), else [32, 32] blocks.
        headroom_exponent: added to the scale exponents of Q and K (their amax lands 2^this lower).
        dp_headroom_exponent: the same of V and dO, and of the values that are projected to V.
        folds_v_scales: multiply P by V's scales before its cast, relative to the largest of a segment and head (the
            Hopper contract: its products have no block scales); needs uniform_scales. The backward then casts P and
            dS under scales of a whole segment and tile (`pma/reference/folded.py`).
    """

    kv_tile: int = 128
    kv_order: Literal["reverse", "forward"] = "reverse"
    p_cast: Literal["static", "tile", "block"] = "tile"
    p_scale_log2: int = 8
    p_cast_backward: Literal["row_sum", "block"] = "row_sum"
    rescale_threshold_log2: float = 0.0
    denominator: Literal["fp32", "quantized"] = "quantized"
    lse_sum: Literal["fp32", "quantized"] = "quantized"
    dq_accumulation: Literal["fp32", "fp16"] = "fp32"
    dq_scale_log2: int = 9
    dp_operands: Literal["mxfp8", "bf16"] = "mxfp8"
    k_smoothing: bool = False
    repeated_max_guard: bool = False
    uniform_scales: bool = False
    headroom_exponent: int = 0
    dp_headroom_exponent: int = 0
    folds_v_scales: bool = False

    def __post_init__(self) -> None:
        check_choice("kv_order", self.kv_order, ("reverse", "forward"))
        check_choice("p_cast", self.p_cast, ("static", "tile", "block"))
        check_choice("p_cast_backward", self.p_cast_backward, ("row_sum", "block"))
        check_choice("denominator", self.denominator, ("fp32", "quantized"))
        check_choice("lse_sum", self.lse_sum, ("fp32", "quantized"))
        check_choice("dq_accumulation", self.dq_accumulation, ("fp32", "fp16"))
        check_choice("dp_operands", self.dp_operands, ("mxfp8", "bf16"))
        check_int("kv_tile", self.kv_tile, least=32, most=1024)
        if self.kv_tile % 32:
            raise ValueError(f"kv_tile must be a multiple of 32, got {self.kv_tile}")
        check_int("p_scale_log2", self.p_scale_log2, least=0)
        check_int("dq_scale_log2", self.dq_scale_log2, least=0, most=24)
        check_int("headroom_exponent", self.headroom_exponent, least=0, most=16)
        check_int("dp_headroom_exponent", self.dp_headroom_exponent, least=0, most=16)
        check_bool("k_smoothing", self.k_smoothing)
        check_bool("repeated_max_guard", self.repeated_max_guard)
        check_bool("uniform_scales", self.uniform_scales)
        check_bool("folds_v_scales", self.folds_v_scales)
        if self.folds_v_scales and not (self.uniform_scales and self.p_cast == "static"):
            raise ValueError(
                "folds_v_scales needs uniform_scales=True and p_cast='static', got "
                f"uniform_scales={self.uniform_scales} and p_cast={self.p_cast!r}"
            )
        check_finite("rescale_threshold_log2", self.rescale_threshold_log2)
        threshold = self.rescale_threshold_log2 if self.p_cast == "static" else 0.0  # the scale adapts
        if self.p_scale_log2 + threshold > math.log2(E4M3_MAX):
            raise ValueError(
                "p_scale_log2 + rescale_threshold_log2 must be at most log2(448) = 8.807, so that P fits E4M3, got "
                f"{self.p_scale_log2} + {self.rescale_threshold_log2}"
            )

    def token(self) -> str:
        """The record as one string, for operator schemas; only what differs from the defaults is written."""
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        return json.dumps(changed, sort_keys=True)

    @classmethod
    def from_token(cls, token: str) -> "AttentionNumerics":
        """The record that `token()` wrote."""
        return cls(**json.loads(token))

    def columns_per_scale(self, head_dim: int) -> int:
        """Columns of Q, K, V that share one scale: 32, or a whole head with uniform scales."""
        return head_dim if self.uniform_scales else 32


# What suits Hopper: scores and dP fit fp16, P keeps 2.8 octaves of headroom for maxima that move late.
HOPPER_NUMERICS = AttentionNumerics(
    p_cast="static", p_scale_log2=6, rescale_threshold_log2=2.8, lse_sum="fp32", uniform_scales=True,
    headroom_exponent=5, dp_headroom_exponent=5, folds_v_scales=True,
)  # fmt: skip


def underflow_threshold(p_scale: float, sink_block_shift: float = 1.0) -> float:
    """Sink strength Δ_c = 6.93 + ln S − δ_k, above which the typical non-sink P underflows in forward key order.

    A P at distance x below the running maximum becomes zero when S·exp(−x) <= 2^-10, so x = 10 ln 2 + ln S.

    Args:
        p_scale: S, the factor on P before the cast.    sink_block_shift: δ_k, natural-log units: the expected
            maximum of the scores that share the sink's tile (about 1 for four sink events).
    Returns:
        Δ_c in natural-log score units.
    """
    return -math.log(E4M3_MIN_ROUNDED_UP) + math.log(p_scale) - sink_block_shift


def underflow_fraction(sink_strength: float, p_scale: float, sink_block_shift: float = 1.0) -> float:
    """Fraction Φ(Δ − Δ_c) of non-sink P that becomes zero in forward key order, for unit-normal scores.

    Args:
        sink_strength: Δ, how far the sink's mean score lies above the others', natural-log units.
        p_scale, sink_block_shift: as in `underflow_threshold`.
    """
    distance = sink_strength - underflow_threshold(p_scale, sink_block_shift)
    return 0.5 * (1.0 + math.erf(distance / math.sqrt(2.0)))
