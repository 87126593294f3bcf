"""From the jagged types that users hold to (values [T, E], offsets [B+1])."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from pma.checks import ShapeError, UnsupportedError, check_same_device, check_size, check_tensor

if TYPE_CHECKING:
    from torchrec import JaggedTensor, KeyedTensor

JaggedInput = Union[Tensor, "JaggedTensor"]
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OFFSET_DTYPES = (torch.int32, torch.int64)


def to_values_and_offsets(
    events: Any, offsets: Tensor | None = None, *, embed_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (values [T, E], offsets [B+1]) of a jagged input, checked by shape, dtype and device only.

    Args:
        events: [T, E] float tensor together with `offsets`; or a TorchRec JaggedTensor; or a torch.nested tensor
            [B, j, E] of jagged layout without holes. A JaggedTensor's weights are never used.
        offsets: [B+1] int32 or int64 on the device of `events`; only with a plain tensor.
        embed_dim: E, which the values must have (None: any); an empty 1-D JaggedTensor takes it from here.
    Raises:
        TypeError: wrong type or dtype, or offsets given twice.    ValueError: rank, size or device.
        UnsupportedError: a nested tensor with holes, or jagged in another dimension.
    """
    if _is_jagged_tensor(events):
        _reject_offsets(offsets, "a TorchRec JaggedTensor")
        values, offsets = _from_jagged_tensor(events, embed_dim)
    elif isinstance(events, Tensor) and events.is_nested:
        _reject_offsets(offsets, "a nested tensor")
        values, offsets = _from_nested(events)
    else:
        if not isinstance(events, Tensor):
            raise TypeError(
                "events must be a torch.Tensor with offsets, a torchrec.JaggedTensor or a torch.nested tensor, "
                f"got {type(events).__name__}"
            )
        if offsets is None:
            raise TypeError("offsets must be given with a plain events tensor, got None")
        values = events
    check_tensor("events", values, ndim=2, dtypes=FLOAT_DTYPES)
    check_tensor("offsets", offsets, ndim=1, dtypes=OFFSET_DTYPES)
    check_same_device("offsets", offsets, "events", values)
    if embed_dim is not None:
        check_size("events", values, 1, embed_dim, "embed_dim")
    if guard_or_false(offsets.shape[0] == 0):
        raise ShapeError("offsets must have B + 1 >= 1 entries, got 0")
    return values, offsets


def to_keyed_tensor(keys: Sequence[str], pooled: Sequence[Tensor]) -> "KeyedTensor":
    """One [B, C_key] tensor for each key → a TorchRec KeyedTensor [B, Σ C_key] with the keys in this order."""
    from torchrec import KeyedTensor

    return KeyedTensor(
        keys=list(keys), length_per_key=[p.shape[1] for p in pooled], values=torch.cat(list(pooled), dim=1)
    )


def _is_jagged_tensor(events: object) -> bool:
    torchrec = sys.modules.get("torchrec")  # whoever passes one has imported it
    return torchrec is not None and isinstance(events, torchrec.JaggedTensor)


def _from_jagged_tensor(events: Any, embed_dim: int | None) -> tuple[Tensor, Tensor]:
    values, offsets = events.values(), events.offsets()
    if values.ndim == 1 and guard_or_false(values.shape[0] == 0):  # JaggedTensor.empty()
        values = values.reshape(0, embed_dim or 1)
    if guard_or_false(offsets.shape[0] == 0):  # no segments at all
        offsets = torch.zeros(1, dtype=torch.int64, device=values.device)
    return values, offsets


def _from_nested(events: Any) -> tuple[Tensor, Tensor]:
    if events.layout != torch.jagged:
        raise UnsupportedError(f"a nested events tensor must have layout torch.jagged, got {events.layout}")
    if events.dim() != 3 or events._ragged_idx != 1:
        raise UnsupportedError(
            f"a nested events tensor must be [B, j, E], jagged in dimension 1, got {events.dim()}-D, "
            f"jagged in dimension {events._ragged_idx}"
        )
    if events.lengths() is not None:
        raise UnsupportedError(
            "a nested events tensor must have no holes (its lengths must be None); make it contiguous first"
        )
    return events.values(), events.offsets()


def _reject_offsets(offsets: Tensor | None, kind: str) -> None:
    if offsets is not None:
        raise TypeError(f"offsets must be None when events is {kind}, which has its own, got a tensor")
