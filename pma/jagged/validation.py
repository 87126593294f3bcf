"""Opt-in checks of offsets' values. They read the device, so nothing in the library calls them by itself."""

from torch import Tensor

from pma.checks import check_int, check_tensor
from pma.jagged.conversions import OFFSET_DTYPES


def validate_offsets(offsets: Tensor, total_rows: int) -> None:
    """Raise ValueError unless 0 <= offsets[0], offsets never decrease and offsets[-1] <= total_rows.

    Args:
        offsets: [B+1] integer, on any device; copied to the host (a sync).
        total_rows: rows of the buffer that the offsets index.
    """
    check_tensor("offsets", offsets, ndim=1, dtypes=OFFSET_DTYPES)
    check_int("total_rows", total_rows, least=0)
    host = offsets.tolist()
    if not host:
        raise ValueError("offsets must have B + 1 >= 1 entries, got 0")
    if host[0] < 0:
        raise ValueError(f"offsets must start at 0 or later, got offsets[0] = {host[0]}")
    for index, (low, high) in enumerate(zip(host, host[1:], strict=False)):
        if high < low:
            raise ValueError(f"offsets must not decrease, got offsets[{index}] = {low} > offsets[{index + 1}] = {high}")
    if host[-1] > total_rows:
        raise ValueError(f"offsets must end within the {total_rows} rows of values, got offsets[-1] = {host[-1]}")
