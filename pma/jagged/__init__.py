"""Jagged data: offsets arithmetic on the device, conversions, opt-in validation of values."""

from pma.jagged.conversions import FLOAT_DTYPES, JaggedInput, to_keyed_tensor, to_values_and_offsets
from pma.jagged.row_blocks import (
    RowBlocks,
    equal_offsets,
    num_row_blocks,
    row_block_starts,
    row_blocks,
    rows_to_blocks,
    segment_of_rows,
)
from pma.jagged.validation import validate_offsets

__all__ = [
    "FLOAT_DTYPES",
    "JaggedInput",
    "RowBlocks",
    "equal_offsets",
    "num_row_blocks",
    "row_block_starts",
    "row_blocks",
    "rows_to_blocks",
    "segment_of_rows",
    "to_keyed_tensor",
    "to_values_and_offsets",
    "validate_offsets",
]
