"""What the modules on kernels (`sm90.py`, `sm100.py`) share."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pma.jagged import equal_offsets

SEED_OFFSETS = torch.int64  # of `equal_offsets`


class PoolShape(NamedTuple):
    """Static facts of a module and of the tensors it is called with."""

    embed_dim: int
    num_heads: int
    num_seeds: int
    has_value_proj: bool
    events: torch.dtype
    parameters: torch.dtype
    offsets: torch.dtype
    out: torch.dtype


def dx_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the gradient that reaches the norm, for events of a dtype."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def one_segment(rows: Tensor) -> Tensor:
    return equal_offsets(1, rows.shape[0], rows.device)


def empty_gradients(
    all_fields: int, dout: Tensor, events: Tensor, offsets: Tensor, key_norm: Tensor, pooled: list[Tensor], *_: Any
) -> list[Tensor]:
    """Shapes of what `pool_backward` returns; all_fields: of `Pooled` with a value projection."""
    columns, num_projections = events.shape[1], 2 if len(pooled) == all_fields else 1

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=events.device)

    gradients = [empty(dout.shape[1], columns), empty(*events.shape, dtype=events.dtype), empty(columns)]
    return gradients + [empty(columns, columns) for _ in range(num_projections)]


def forward_flops(events: Any, offsets: Any, seeds: Any, *others: Any, **_: Any) -> int:
    """Of `pool`, from the shapes of its arguments."""
    value_proj = others[4]
    num_projected = (1 if value_proj is None else 2) * events[0] + seeds[0]
    return 4 * seeds[0] * events[0] * events[1] + 2 * num_projected * events[1] ** 2


def backward_flops(
    all_fields: int, dout: Any, events: Any, offsets: Any, key_norm: Any, pooled: Any, *_: Any, **__: Any
) -> int:
    """Of `pool_backward`; all_fields: of `Pooled` with a value projection."""
    num_projections = 2 if len(pooled) == all_fields else 1
    return 10 * dout[1] * events[0] * events[1] + 4 * num_projections * events[0] * events[1] ** 2
