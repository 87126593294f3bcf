"""Argument checks and the library's exceptions: every message names the argument, what came and what is allowed."""

import math
import sys
from collections.abc import Collection

import torch
from torch import Tensor


class UnsupportedError(NotImplementedError):
    """A valid request that this build, device or backend cannot serve; the message says what can."""


class ShapeError(ValueError):
    """A tensor whose rank or size does not fit the others."""


def check_tensor(name: str, value: object, *, ndim: int, dtypes: Collection[torch.dtype]) -> Tensor:
    """Return `value` if it is a tensor of rank `ndim` and one of `dtypes`; raise TypeError or ShapeError if not."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {_listed(dtypes)}, got {value.dtype}")
    if value.ndim != ndim:
        raise ShapeError(f"{name} must be {ndim}-D, got {value.ndim}-D of shape {tuple(value.shape)}")
    return value


def check_size(name: str, value: Tensor, dim: int, size: int, meaning: str) -> None:
    """Raise ShapeError unless `value.shape[dim]` is `size`."""
    if value.shape[dim] != size:
        raise ShapeError(f"{name} must have size {size} ({meaning}) in dimension {dim}, got {value.shape[dim]}")


def check_same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors lie on one device."""
    if value.device != other.device:
        raise ValueError(
            f"{name} and {other_name} must be on one device, got {name} on {value.device}, "
            f"{other_name} on {other.device}"
        )


def check_unsharded(name: str, value: Tensor | None) -> None:
    """Raise UnsupportedError if `value` is a DTensor: FSDP2 gathers the parameters of the modules it is applied to."""
    tensor = sys.modules.get("torch.distributed.tensor")  # whoever shards has imported it
    if tensor is not None and isinstance(value, tensor.DTensor):
        raise UnsupportedError(
            f"{name} must be a whole tensor in forward, got a DTensor; apply fully_shard to the pma.PMA or to a module "
            "around it, not to the layers inside"
        )


def check_choice(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {_listed(allowed)}, got {value!r}")


def check_int(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Raise TypeError unless `value` is an int (bool is none), ValueError unless least <= value <= most."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def check_finite(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless `value` is a finite number of at least 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {value}")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def _listed(values: Collection[object]) -> str:
    return ", ".join(str(v) if isinstance(v, torch.dtype) else repr(v) for v in values)
