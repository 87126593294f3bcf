"""The transposed payload: bytes of 16 tokens side by side, for products that contract over tokens on Hopper.

FP8 wgmma wants both operands with the contraction innermost, and the accumulator of P becomes the A operand of P·V
without a shuffle if the tokens of V are permuted within each 16. Columns are permuted within each 32, so that a lane's
accumulators of the product are eight neighbouring columns of the result. Segment b's groups of 16 tokens start at group
offsets[b] // 16 + b (`pma.jagged.row_blocks`), so a group never spans two segments.

    groups [T // 16 + B, C, 16]     byte of (token 8t + 2q + e of a group, column 32h + 8q' + 2j + e') at
                                    [group, 32h + 8j + 2q' + e', 4q + 2t + e]

Tokens past a segment's end and groups that no segment uses are 0. The scales are those of the plain payload.
"""

import torch
from torch import Tensor

from pma.jagged import num_row_blocks, row_blocks

GROUP = 16
_TOKEN_AT = [8 * (position % 4 // 2) + 2 * (position // 4) + position % 2 for position in range(GROUP)]


def permuted_column(column):
    """Where a column stands, and which stands there: the exchange is its own inverse. Numbers of host or device."""
    return column // 32 * 32 + column // 2 % 4 * 8 + column // 8 % 4 * 2 + column % 2


def transpose_payload(data: Tensor, offsets: Tensor) -> Tensor:
    """Payload [T, C] uint8 → [T // 16 + B, C, 16] uint8; C a multiple of 32."""
    total_rows, num_columns = data.shape
    num_groups = num_row_blocks(total_rows, offsets.shape[0] - 1, GROUP)
    if total_rows == 0:
        return data.new_zeros(num_groups, num_columns, GROUP)
    groups = row_blocks(offsets, total_rows, GROUP)
    token = torch.tensor(_TOKEN_AT, device=data.device)
    row = (groups.first_row[:, None] + token).clamp(0, total_rows - 1)
    is_inside = token < groups.num_rows[:, None]
    data = data[:, permuted_column(torch.arange(num_columns, device=data.device))]
    return torch.where(is_inside[:, None], data[row].transpose(1, 2), 0).contiguous()
