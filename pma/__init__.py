"""Jagged cross-attention (Pooling by Multihead Attention) for recommender models, in MXFP8."""

from pma.checks import ShapeError, UnsupportedError
from pma.functional import mark_dynamic
from pma.jagged import validate_offsets
from pma.modules import PMA, PMACollection
from pma.numerics import AttentionNumerics, underflow_fraction, underflow_threshold

__version__ = "0.1.0"

__all__ = [
    "PMA",
    "AttentionNumerics",
    "PMACollection",
    "ShapeError",
    "UnsupportedError",
    "mark_dynamic",
    "underflow_fraction",
    "underflow_threshold",
    "validate_offsets",
]
