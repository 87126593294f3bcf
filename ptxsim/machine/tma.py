"""Boxes between global and shared memory, as the TMA unit copies them (PTX ISA: cp.async.bulk.tensor, tiled mode).

A box lies densely in shared memory, dimension 0 fastest. With a swizzle, the 16-byte chunk at address a goes to
a XOR ((a >> 7 & mask) << 4) with mask 1, 3 or 7 for 32, 64 or 128 bytes; a is the absolute shared address, so
`shared` must start where the shared window does, or at a multiple of 1024 from there (measured: prototype N).

Elements outside the tensor load as the map's fill and are not stored. Global memory is this process's own memory.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxsim.machine import formats
from ptxsim.machine.tensor_map import TensorMap

Bytes = NDArray[np.uint8]
Window = tuple[NDArray[np.uint8], tuple[slice, ...]]

CHUNK = 16
SHARED_ALIGNMENT = 128
_SWIZZLE_MASKS = {0: 0, 32: 1, 64: 3, 128: 7}

# One buffer over the whole user address space: a numpy view of any address is then a single cheap constructor call.
# It must not start at 0, which ctypes and numpy take for "no memory".
_FIRST_ADDRESS = 4096
_LAST_ADDRESS = 1 << 47
_ADDRESS_MASK = (1 << 64) - 1
_ADDRESS_SPACE = (ctypes.c_uint8 * (_LAST_ADDRESS - _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS)
_CHUNK_TYPE = np.dtype(f"V{CHUNK}")


def global_view(address: int, num_bytes: int) -> Bytes:
    """This process's memory at an address, writable, without a copy. → uint8 [num_bytes]"""
    return _strided_view(address, (num_bytes,), (1,))


def _strided_view(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    if not _FIRST_ADDRESS <= address < _LAST_ADDRESS:
        raise ValueError(f"global address {address:#x} is not in user memory")
    return np.ndarray(shape, np.uint8, buffer=_ADDRESS_SPACE, offset=address - _FIRST_ADDRESS, strides=strides)


# ------------------------------------------------------------------------------------------------ public copies


def load_box(tensor: TensorMap, coordinates: Sequence[int], shared: Bytes, offset: int) -> None:
    """Copies the box at the coordinates from global to shared memory.

    coordinates: element indices of the box's first element, dimension 0 first, any sign; that of dimension 0 names a
    multiple of 16 bytes.
    shared: uint8 [size], index = shared address. offset: where the box starts, a multiple of 128.
    """
    _check(tensor, coordinates, shared, offset)
    window = _window(tensor, coordinates)
    convert = _CONVERSIONS.get(tensor.element)
    if window is not None and convert is None and window[0].shape == tensor.byte_shape:
        box = window[0]
    else:
        box = _filled_box(tensor)
        if window is not None:
            source, place = window
            box[place] = source
        if convert is not None:
            box = convert(box)
    if not tensor.swizzle_bytes:
        shared[offset : offset + tensor.box_bytes].reshape(box.shape)[...] = box
        return
    chunks = np.ascontiguousarray(box).reshape(-1).view(_CHUNK_TYPE)
    shared.view(_CHUNK_TYPE)[_chunk_order(tensor.box_bytes, offset, tensor.swizzle_bytes)] = chunks


def store_box(
    tensor: TensorMap, coordinates: Sequence[int], shared: Bytes, offset: int, reduction: str | None = None
) -> None:
    """Copies the in-bounds part of a box from shared to global memory, or combines it with what is there.

    reduction: None or the .redOp of cp.reduce.async.bulk.tensor ("add", "min", "max", "and", "or", "xor", "inc",
    "dec"), applied with the map's element type. The rest as in `load_box`, but that no coordinate is negative.
    """
    _check(tensor, coordinates, shared, offset)
    if min(coordinates) < 0:
        raise ValueError(
            f"tensor store at {list(coordinates)}: a negative coordinate is an illegal instruction on an H200"
        )
    window = _window(tensor, coordinates)
    if reduction is not None:
        reduce = _reduction(tensor.element, reduction)
    if window is None:
        return
    if tensor.swizzle_bytes:
        order = _chunk_order(tensor.box_bytes, offset, tensor.swizzle_bytes)
        flat = shared.view(_CHUNK_TYPE).take(order).view(np.uint8)
    else:
        flat = shared[offset : offset + tensor.box_bytes]
    target, place = window
    box = flat.reshape(tensor.byte_shape)[place]
    if reduction is None:
        target[...] = box
    else:
        number = _NUMPY_TYPES[tensor.element]
        old, new = (np.ascontiguousarray(part).view(number) for part in (target, box))
        with np.errstate(over="ignore", invalid="ignore"):
            target[...] = np.ascontiguousarray(reduce(old, new)).view(np.uint8)


def box_offsets(tensor: TensorMap, offset: int = 0) -> NDArray[np.int64]:
    """Shared addresses of the 16-byte chunks that a box at `offset` occupies, ascending. → int64 [box_bytes / 16]

    Together they are exactly the box's `tensor.box_bytes` bytes, out-of-bounds elements included.
    """
    if tensor.box_bytes % CHUNK:
        raise NotImplementedError(f"tensor map: a box of {tensor.box_bytes} bytes; a multiple of {CHUNK} is needed")
    return np.sort(_chunk_order(tensor.box_bytes, offset, tensor.swizzle_bytes)) * CHUNK


# ------------------------------------------------------------------------------------------------------ layout


def _check(tensor: TensorMap, coordinates: Sequence[int], shared: Bytes, offset: int) -> None:
    if len(coordinates) != tensor.rank:
        raise ValueError(f"{len(coordinates)} coordinates for a tensor map of rank {tensor.rank}")
    if offset % SHARED_ALIGNMENT:
        raise ValueError(f"shared address {offset:#x} of a tensor copy is not a multiple of {SHARED_ALIGNMENT}")
    if coordinates[0] * tensor.element_bytes % CHUNK:
        raise ValueError(
            f"tensor copy at {list(coordinates)}: coordinate 0 is {coordinates[0] * tensor.element_bytes} bytes from "
            f"the tensor's start, not a multiple of {CHUNK}: an illegal instruction on an H200"
        )
    inner = tensor.box[0] * tensor.element_bytes
    if inner % CHUNK:
        raise ValueError(f"tensor map: the box's inner dimension has {inner} bytes, not a multiple of {CHUNK}")
    if tensor.swizzle_bytes and inner > tensor.swizzle_bytes:
        raise ValueError(
            f"tensor map: {inner} bytes in the box's inner dimension, swizzle {tensor.swizzle_bytes} bytes"
        )
    # A swizzled chunk stays inside its 128 bytes.
    end = offset + (-(-tensor.box_bytes // 128) * 128 if tensor.swizzle_bytes else tensor.box_bytes)
    if offset < 0 or end > shared.size:
        raise IndexError(
            f"a box of {tensor.box_bytes} bytes at {offset:#x} leaves shared memory of {shared.size} bytes"
        )


@lru_cache(maxsize=4096)
def _chunk_order(num_bytes: int, offset: int, swizzle_bytes: int) -> NDArray[np.int64]:
    """Index of the 16-byte chunk of shared memory where each chunk of a box lies. → int64 [num_bytes / 16]"""
    address = offset + np.arange(0, num_bytes, CHUNK)
    order = (address ^ ((address >> 7 & _SWIZZLE_MASKS[swizzle_bytes]) << 4)) // CHUNK
    order.flags.writeable = False
    return order


def _window(tensor: TensorMap, coordinates: Sequence[int]) -> Window | None:
    """The part of a box inside the tensor: a view of global memory, and its place in the box; None if empty.

    Both have the axes of `TensorMap.byte_shape`. Step i of a dimension with element stride e is at coordinate + i·e.
    """
    address, size = tensor.address, tensor.element_bytes
    shape: list[int] = []
    strides: list[int] = []
    place: list[slice] = []
    steps = (1, *tensor.element_strides[1:])
    for start, extent, stride, count, step in zip(
        coordinates, tensor.dims, tensor.strides, tensor.box_shape, steps, strict=True
    ):
        first = max(0, -(start // step))  # the first i with start + i·step ≥ 0
        last = min(count, -((start - extent) // step))  # one after the last i with start + i·step < extent
        if last <= first:
            return None
        address += (start + first * step) * stride
        shape.append(last - first)
        strides.append(step * stride)
        place.append(slice(first, last))
    inner = place[0]
    shape[0] *= size
    strides[0] = 1
    place[0] = slice(inner.start * size, inner.stop * size)
    # Addresses wrap at 64 bits: maps of ragged tensors reach a segment through an extent that overflows.
    view = _strided_view(address & _ADDRESS_MASK, tuple(reversed(shape)), tuple(reversed(strides)))
    return view, tuple(reversed(place))


def _filled_box(tensor: TensorMap) -> Bytes:
    box = np.zeros(tensor.byte_shape, np.uint8)
    if tensor.fill == "nan":
        if tensor.element not in _NAN_FILLS:
            raise ValueError(
                f"tensor map: fill nan with element type {tensor.element}; allowed: {', '.join(_NAN_FILLS)}"
            )
        nan = _NAN_FILLS[tensor.element]
        box.view(nan.dtype)[...] = nan
    return box


# The payload of the fill is not documented ("special NaN"): the canonical NaN of each type is assumed.
_NAN_FILLS = {
    **dict.fromkeys(("f16", "bf16"), np.uint16(0x7FFF)),
    **dict.fromkeys(("f32", "f32.ftz", "tf32", "tf32.ftz"), np.uint32(0x7FFFFFFF)),
    "f64": np.uint64(0x7FFFFFFFFFFFFFFF),
}


def _flushed(box: Bytes) -> Bytes:
    values = box.view(np.float32)
    tiny = np.abs(values) < np.finfo(np.float32).smallest_normal
    return np.where(tiny, np.copysign(np.float32(0), values), values).view(np.uint8)


def _tf32(box: Bytes) -> Bytes:
    return formats.tf32_of_float32(box.view(np.float32)).view(np.uint8)


# What loads do to elements on the way. That tf32 rounds to nearest even is assumed, not measured.
_CONVERSIONS: dict[str, Callable[[Bytes], Bytes]] = {
    "f32.ftz": _flushed,
    "tf32": _tf32,
    "tf32.ftz": lambda box: _tf32(_flushed(box)),
}


# -------------------------------------------------------------------------------------------------- reductions

_NUMPY_TYPES = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f32.ftz": np.float32, "f64": np.float64,
    "tf32": np.float32, "tf32.ftz": np.float32,
}  # fmt: skip

_WORDS = ("u32", "s32", "u64", "s64")
# PTX ISA, cp.reduce.async.bulk.tensor: the operation and the map's element type must fit as for red.
_REDUCED_ELEMENTS = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f32.ftz", "f64"),
    "min": (*_WORDS, "f16", "bf16"),
    "max": (*_WORDS, "f16", "bf16"),
    "and": _WORDS,
    "or": _WORDS,
    "xor": _WORDS,
    "inc": ("u32",),
    "dec": ("u32",),
}
_OPERATIONS: dict[str, Callable] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, new: np.where(old >= new, 0, old + np.uint32(1)).astype(np.uint32),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - np.uint32(1)).astype(np.uint32),
}


def _reduction(element: str, name: str) -> Callable:
    """The operation on arrays (old, new) of `_NUMPY_TYPES`; bf16 comes as codes."""
    if name not in _REDUCED_ELEMENTS:
        raise ValueError(f"reduction {name!r}; allowed: {', '.join(_REDUCED_ELEMENTS)}")
    if element not in _REDUCED_ELEMENTS[name]:
        raise NotImplementedError(f"reduction {name} of {element}; supported: {', '.join(_REDUCED_ELEMENTS[name])}")
    operation = _OPERATIONS[name]
    if element != "bf16":
        return operation
    return lambda old, new: formats.encode(
        "bf16", operation(formats.decode("bf16", old), formats.decode("bf16", new)).astype(np.float32)
    )
