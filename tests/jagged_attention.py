"""What tests of the attention forward share on every architecture: lengths, a segment alone, spoiled payloads."""

from typing import Any

import torch

from pma.layouts import MXFP8Tensor

LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 300)
SHORT = (129, 0, 300, 33)
STEPS_OF_ONE_TILE = (1, 127, 33, 64, 0, 96, 31, 1, 2, 100)
HEAD, TAIL = 3, 70  # rows before the first segment and behind the last, all NaN
NAN_PAYLOAD = 0x7F


def part(p: Any, segment: int) -> Any:
    """One segment of a problem (k, v, offsets) alone."""
    begin, end = p.offsets[segment].item(), p.offsets[segment + 1].item()
    slots = slice(begin // 32 + segment, begin // 32 + segment + (end - begin) // 32 + 1)

    def cut(matrix: MXFP8Tensor) -> MXFP8Tensor:
        return MXFP8Tensor(matrix.data[begin:end].clone(), matrix.scales[slots].clone())

    return p._replace(k=cut(p.k), v=cut(p.v), offsets=torch.tensor([0, end - begin]))


def spoil(matrix: MXFP8Tensor, *elements: tuple[int, int]) -> MXFP8Tensor:
    """With NaN payloads at (row, column)."""
    data = matrix.data.clone()
    for element in elements:
        data[element] = NAN_PAYLOAD
    return matrix._replace(data=data)
