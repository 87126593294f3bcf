"""Tensor maps and the copies they describe, against a model that moves one byte at a time."""

import itertools
import struct

import numpy as np
import pytest

from ptxsim.machine import formats
from ptxsim.machine.tensor_map import TensorMap
from ptxsim.machine.tma import box_offsets, global_view, load_box, store_box

pytestmark = pytest.mark.ptxsim

SHARED_BYTES = 32768
SIZES = {"u8": 1, "bf16": 2, "f16": 2, "u32": 4, "f32": 4, "s64": 8}


class Tensor:
    """Random bytes in memory, 16-byte aligned and with guard bytes on both sides, and the map of a part of them."""

    GUARD = 4096

    def __init__(self, rng: np.random.Generator, dims: tuple[int, ...], element: str, **fields: object) -> None:
        size = SIZES[element]
        strides = [size]
        for i, extent in enumerate(dims[:-1]):
            strides.append(-(-strides[-1] * extent // 16) * 16 + 16 * (i % 2))
        span = strides[-1] * dims[-1]
        self.memory = rng.integers(0, 256, span + 2 * self.GUARD, np.uint8)
        address = (self.memory.ctypes.data + self.GUARD + 15) // 16 * 16
        self.first = address - self.memory.ctypes.data
        fields.setdefault("element_strides", (1,) * len(dims))
        self.map = TensorMap(address=address, element=element, dims=dims, strides=tuple(strides), **fields)


def positions(tensor: Tensor, coordinates: tuple[int, ...], offset: int):
    """For each byte of a box: its shared address, and its place in `tensor.memory` or None when out of bounds."""
    the_map, linear = tensor.map, 0
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[the_map.swizzle_bytes]
    steps = (1, *the_map.element_strides[1:])
    extents = [-(-b // s) for b, s in zip(the_map.box, steps, strict=True)]
    for reversed_index in itertools.product(*map(range, reversed(extents))):
        index = [c + i * s for c, i, s in zip(coordinates, reversed(reversed_index), steps, strict=True)]
        inside = all(0 <= i < d for i, d in zip(index, the_map.dims, strict=True))
        place = tensor.first + sum(i * s for i, s in zip(index, the_map.strides, strict=True))
        for byte in range(the_map.element_bytes):
            address = offset + linear
            linear += 1
            yield address ^ ((address // 128 & mask) << 4), place + byte if inside else None


def random_case(seed: int) -> tuple[Tensor, tuple[int, ...], int, np.ndarray]:
    """A map of rank 1 to 5, coordinates around its border, a shared address and shared memory."""
    rng = np.random.default_rng(seed)
    rank = seed % 5 + 1
    element = list(SIZES)[seed // 5 % len(SIZES)]
    swizzle = (0, 32, 64, 128)[seed // 3 % 4]
    inner = swizzle or int(rng.integers(1, 9)) * 16
    if swizzle and rng.random() < 0.3:
        inner = swizzle // 2 if swizzle > 32 else 16
    box = (inner // SIZES[element], *(int(b) for b in rng.integers(1, 5, rank - 1)))
    dims = tuple(int(d) for d in rng.integers(1, 8, rank) + (np.arange(rank) == 0) * rng.integers(0, 64))
    element_strides = tuple(int(e) for e in rng.integers(1, 4, rank)) if seed % 7 == 0 else (1,) * rank
    tensor = Tensor(rng, dims, element, box=box, element_strides=element_strides, swizzle_bytes=swizzle)
    coordinates = tuple(int(rng.integers(-b, d + 1)) for b, d in zip(box, dims, strict=True))
    chunk = 16 // SIZES[element]
    coordinates = (coordinates[0] // chunk * chunk, *coordinates[1:])
    if seed % 4 == 0:
        coordinates = (0,) * rank
    return tensor, coordinates, 1024 + 128 * int(rng.integers(0, 20)), rng.integers(0, 256, SHARED_BYTES, np.uint8)


@pytest.mark.parametrize("seed", range(120))
def test_load_moves_what_the_slow_model_moves(seed: int) -> None:
    tensor, coordinates, offset, shared = random_case(seed)
    expected = shared.copy()
    for address, place in positions(tensor, coordinates, offset):
        expected[address] = 0 if place is None else tensor.memory[place]
    load_box(tensor.map, coordinates, shared, offset)
    np.testing.assert_array_equal(shared, expected)


@pytest.mark.parametrize("seed", range(120))
def test_store_moves_what_the_slow_model_moves(seed: int) -> None:
    tensor, coordinates, offset, shared = random_case(seed)
    coordinates = tuple(abs(coordinate) for coordinate in coordinates)
    expected = tensor.memory.copy()
    for address, place in positions(tensor, coordinates, offset):
        if place is not None:
            expected[place] = shared[address]
    store_box(tensor.map, coordinates, shared, offset)
    np.testing.assert_array_equal(tensor.memory, expected)


@pytest.mark.parametrize("seed", range(0, 60))
def test_box_offsets_cover_the_box(seed: int) -> None:
    tensor, coordinates, offset, _ = random_case(seed)
    touched = sorted(address for address, _ in positions(tensor, coordinates, offset))
    chunks = box_offsets(tensor.map, offset)
    assert [start + byte for start in chunks.tolist() for byte in range(16)] == touched
    assert tensor.map.box_bytes == len(touched)


def test_boxes_tile_a_tensor() -> None:
    """Loading all boxes of a ragged tensor and storing them to another one copies exactly the tensor."""
    rng = np.random.default_rng(0)
    fields = {"box": (64, 8), "swizzle_bytes": 128}
    source, target = (Tensor(rng, (200, 27), "bf16", **fields) for _ in range(2))
    expected = target.memory.copy()
    for _, place in positions(Tensor(rng, (200, 27), "bf16", box=(200, 27)), (0, 0), 0):
        expected[place - source.first + target.first] = source.memory[place]
    shared = np.zeros(SHARED_BYTES, np.uint8)
    for x, y in itertools.product(range(0, 256, 64), range(0, 40, 8)):
        load_box(source.map, (x, y), shared, 2048)
        store_box(target.map, (x, y), shared, 2048)
    np.testing.assert_array_equal(target.memory, expected)


def test_what_an_h200_refuses() -> None:
    """With an illegal instruction: a first element that is not at 16 bytes, and stores at negative coordinates."""
    tensor, shared = Tensor(np.random.default_rng(1), (64, 8), "u32", box=(16, 2)), np.zeros(SHARED_BYTES, np.uint8)
    load_box(tensor.map, (-4, -1), shared, 0)
    for copy in (load_box, store_box):
        with pytest.raises(ValueError, match="coordinate 0 is 12 bytes from the tensor's start, not a multiple of 16"):
            copy(tensor.map, (3, 0), shared, 0)
    for coordinates in ((-4, 0), (0, -1)):
        with pytest.raises(ValueError, match="tensor store at .*: a negative coordinate is an illegal instruction"):
            store_box(tensor.map, coordinates, shared, 0)


# ------------------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize(("element", "nan"), [("bf16", 0x7FFF), ("f16", 0x7FFF), ("f32", 0x7FFFFFFF)])
def test_nan_fill(element: str, nan: int) -> None:
    tensor = Tensor(np.random.default_rng(1), (16, 3), element, box=(16, 2), fill="nan")
    shared = np.zeros(SHARED_BYTES, np.uint8)
    load_box(tensor.map, (8, 2), shared, 0)
    box = shared[: tensor.map.box_bytes].view(f"u{SIZES[element]}").reshape(2, 16)
    assert (box[:, 8:] == nan).all()
    assert (box[1] == nan).all()
    source = tensor.memory[tensor.first + 2 * tensor.map.strides[1] :].view(f"u{SIZES[element]}")
    np.testing.assert_array_equal(box[0, :8], source[8:16])


def test_integers_have_no_nan_fill() -> None:
    tensor = Tensor(np.random.default_rng(1), (8,), "u32", box=(8,), fill="nan")
    with pytest.raises(ValueError, match="fill nan with element type u32"):
        load_box(tensor.map, (4,), np.zeros(SHARED_BYTES, np.uint8), 0)


@pytest.mark.parametrize("element", ["f32.ftz", "tf32", "tf32.ftz"])
def test_loads_flush_and_round(element: str) -> None:
    values = np.array([1e-40, -1e-40, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-12, np.inf, 3, 0], np.float32)
    flushed = np.where(np.arange(8) < 2, np.float32([0, -0.0] * 4), values)
    rounded = {"tf32": values, "tf32.ftz": flushed}.get(element)
    expected = flushed if rounded is None else rounded.copy()
    if rounded is not None:
        expected[2:5] = [1, 1 + 2**-9, -1]
        expected[:2] = formats.tf32_of_float32(expected[:2])
    tensor = TensorMap(values.ctypes.data, element, (8,), (4,), (8,), (1,))
    shared = np.zeros(SHARED_BYTES, np.uint8)
    load_box(tensor, (0,), shared, 0)
    assert shared[:32].tobytes() == expected.tobytes()


# -------------------------------------------------------------------------------------------------- reductions


# One element, as PTX describes red, in Python numbers.
SLOW_REDUCTIONS = {
    "add": lambda old, new: old + new,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "inc": lambda old, new: 0 if old >= new else old + 1,
    "dec": lambda old, new: new if old == 0 or old > new else old - 1,
}


@pytest.mark.parametrize("name", SLOW_REDUCTIONS)
def test_reductions_of_integers(name: str) -> None:
    rng = np.random.default_rng(2)
    tensor = Tensor(rng, (21, 5), "u32", box=(8, 4), swizzle_bytes=32)
    shared = rng.integers(0, 256, SHARED_BYTES, np.uint8)
    numbers = tensor.memory[tensor.first :][: 4 * (len(tensor.memory[tensor.first :]) // 4)].view(np.uint32)
    numbers[:40:3] = 0
    shared.view(np.uint32)[256:288:2] = numbers[10:26]
    expected = tensor.memory.copy()
    places = [(a, p) for a, p in positions(tensor, (16, 3), 1024) if p is not None]
    for address, place in places[::4]:
        old, new = (int(b[i : i + 4].view(np.uint32)[0]) for b, i in ((tensor.memory, place), (shared, address)))
        result = SLOW_REDUCTIONS[name](old, new) & 0xFFFFFFFF
        expected[place : place + 4] = np.frombuffer(struct.pack("<I", result), np.uint8)
    store_box(tensor.map, (16, 3), shared, 1024, name)
    np.testing.assert_array_equal(tensor.memory, expected)


FLOAT_REDUCTIONS = [*itertools.product(("add", "min", "max"), ("f16", "bf16")), ("add", "f32")]


@pytest.mark.parametrize(("name", "element"), FLOAT_REDUCTIONS)
def test_reductions_of_floats(name: str, element: str) -> None:
    rng = np.random.default_rng(3)
    old, new = (rng.standard_normal(32).astype(np.float32) for _ in range(2))
    raw = {"f32": lambda x: x, "f16": lambda x: x.astype(np.float16)}.get(element, lambda x: formats.encode("bf16", x))
    old, new = raw(old), raw(new)
    numbers = [formats.decode(element, x.view(f"u{x.itemsize}")) for x in (old, new)]
    result = {"add": np.add, "min": np.minimum, "max": np.maximum}[name](*numbers)
    expected = result.astype(np.float32) if element == "f32" else formats.encode(element, result)
    size = old.itemsize
    tensor = TensorMap(old.ctypes.data, element, (32,), (size,), (32,), (1,))
    shared = np.zeros(SHARED_BYTES, np.uint8)
    shared[128 : 128 + 32 * size] = new.view(np.uint8)
    store_box(tensor, (0,), shared, 128, name)
    assert old.tobytes() == expected.tobytes()


def test_signed_minimum() -> None:
    old = np.array([-5, 5], np.int64)
    shared = np.zeros(SHARED_BYTES, np.uint8)
    shared[:16] = np.array([3, -3], np.int64).view(np.uint8)
    store_box(TensorMap(old.ctypes.data, "s64", (2,), (8,), (2,), (1,)), (0,), shared, 0, "min")
    assert old.tolist() == [-5, -3]


@pytest.mark.parametrize(("element", "name"), [("f32", "and"), ("u8", "add"), ("s32", "inc"), ("f32", "min")])
def test_reductions_that_do_not_exist(element: str, name: str) -> None:
    tensor = TensorMap(4096, element, (64,), (1 if element == "u8" else 4,), (64,), (1,))
    with pytest.raises(NotImplementedError, match=f"reduction {name} of {element}"):
        store_box(tensor, (0,), np.zeros(SHARED_BYTES, np.uint8), 0, name)
    with pytest.raises(ValueError, match="reduction 'mul'"):
        store_box(tensor, (0,), np.zeros(SHARED_BYTES, np.uint8), 0, "mul")


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("coordinates", "offset", "fields", "error"),
    [
        ((0,), 0, {}, "1 coordinates for a tensor map of rank 2"),
        ((0, 0), 64, {}, "not a multiple of 128"),
        ((0, 0), SHARED_BYTES - 128, {}, "leaves shared memory"),
        ((0, 0), 0, {"box": (4, 2)}, "8 bytes, not a multiple of 16"),
        ((0, 0), 0, {"box": (64, 2), "swizzle_bytes": 64}, "128 bytes in the box's inner dimension, swizzle 64"),
    ],
)
def test_copies_refuse(coordinates: tuple[int, ...], offset: int, fields: dict, error: str) -> None:
    tensor = Tensor(np.random.default_rng(4), (64, 8), "bf16", **{"box": (64, 2), **fields})
    for copy in (load_box, store_box):
        with pytest.raises((ValueError, IndexError), match=error):
            copy(tensor.map, coordinates, np.zeros(SHARED_BYTES, np.uint8), offset)


def test_global_view_is_memory_itself() -> None:
    array = np.arange(10, dtype=np.uint32)
    view = global_view(array.ctypes.data + 4, 8)
    assert view.tobytes() == array[1:3].tobytes()
    view[0] = 77
    assert array[1] == 77
    with pytest.raises(ValueError, match="0x10 is not in user memory"):
        global_view(16, 4)


# ------------------------------------------------------------------------------------------------------ encoding

EXAMPLE = TensorMap(
    address=0x7F00_1234_5670,
    element="bf16",
    dims=(4096, 77, 3, 2, 9),
    strides=(2, 8192, 1 << 37, 48, 64),
    box=(64, 256, 1, 2, 3),
    element_strides=(1, 2, 1, 8, 1),
    swizzle_bytes=128,
    l2_promotion=2,
    size_hint=True,
)


def bits(*fields: tuple[int, int]) -> int:
    return sum(value << shift for value, shift in fields)


def test_encoding_of_an_example() -> None:
    """The words written out by hand from the documented bit positions."""
    words = struct.unpack("<16Q", EXAMPLE.encode())
    assert words == (
        0x7F00_1234_5670,
        bits((1, 1), (4, 4), (10, 7), (3, 13), (2, 17), (1, 21), (8192 >> 4, 32)),
        bits(((1 << 33) & 0xFFFFFFFF, 0), (48 >> 4, 32)),
        bits((64 >> 4, 0), (2, 36)),
        bits((4095, 0), (76, 32)),
        bits((2, 0), (1, 32)),
        bits((8, 0), (0, 32), (1, 35), (0, 38), (7, 41), (0, 44), (63, 56)),
        bits((255, 0), (0, 8), (1, 16), (2, 24)),
        *(0,) * 8,
    )


@pytest.mark.parametrize("seed", range(50))
def test_decoding_inverts_encoding(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = seed % 5 + 1
    element = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz")
    name = element[seed % len(element)]
    size = TensorMap(0, name, (1,), (1,), (1,), (1,)).element_bytes
    tensor = TensorMap(
        address=int(rng.integers(0, 1 << 43)) * 16,
        element=name,
        dims=tuple(int(d) for d in rng.integers(1, 1 << 32, rank)),
        strides=(size, *(int(s) * 16 for s in rng.integers(1, 1 << 36, rank - 1))),
        box=tuple(int(b) for b in rng.integers(1, 257, rank)),
        element_strides=tuple(int(e) for e in rng.integers(1, 9, rank)),
        swizzle_bytes=(0, 32, 64, 128)[seed % 4],
        fill=("zero", "nan")[seed // 3 % 2],
        l2_promotion=seed % 4,
        size_hint=seed % 3 == 0,
    )
    raw = tensor.encode()
    assert len(raw) == 128
    assert TensorMap.decode(raw) == tensor
    assert TensorMap.decode(raw[:64] + rng.bytes(64)) == tensor


@pytest.mark.parametrize(("word", "bit"), [(1, 0), (1, 12), (1, 19), (3, 48), (6, 47), (6, 55), (7, 32)])
def test_unknown_bits_are_named(word: int, bit: int) -> None:
    words = list(struct.unpack("<16Q", EXAMPLE.encode()))
    words[word] |= 1 << bit
    with pytest.raises(NotImplementedError, match=rf"unknown bits {bit} are set in qword {word} "):
        TensorMap.decode(struct.pack("<16Q", *words))


def test_what_is_not_a_map() -> None:
    with pytest.raises(ValueError, match="bit 1 of qword 1 is clear"):
        TensorMap.decode(bytes(128))
    with pytest.raises(ValueError, match="of 32 bytes"):
        TensorMap.decode(bytes(32))
    words = list(struct.unpack("<16Q", EXAMPLE.encode()))
    words[1] |= 0xF << 7
    with pytest.raises(NotImplementedError, match="element type 15"):
        TensorMap.decode(struct.pack("<16Q", *words))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"address": 8}, "address 0x8"),
        ({"strides": (2, 8, 16, 16, 16)}, "stride 1 is stored as 8"),
        ({"box": (257, 1, 1, 1, 1)}, "box 0 is stored as 256"),
        ({"element_strides": (1, 1, 9, 1, 1)}, "element stride 2 is stored as 8"),
        ({"strides": (4, 16, 16, 16, 16)}, "stride 0 is 4, the element has 2 bytes"),
    ],
)
def test_encoding_refuses(fields: dict, error: str) -> None:
    values = {name: getattr(EXAMPLE, name) for name in EXAMPLE.__dataclass_fields__}
    with pytest.raises(ValueError, match=error):
        TensorMap(**{**values, **fields}).encode()


def test_replace() -> None:
    replaced = EXAMPLE.replace("global_address", None, 0x4000).replace("global_dim", 1, 99).replace("box_dim", 0, 32)
    replaced = (
        replaced.replace("global_stride", 0, 4096).replace("element_stride", 2, 4).replace("swizzle_mode", None, 1)
    )
    replaced = replaced.replace("elemtype", None, 7).replace("fill_mode", None, 1).replace("interleave_layout", None, 0)
    assert (replaced.address, replaced.dims[1], replaced.box[0], replaced.strides[:2]) == (0x4000, 99, 32, (4, 4096))
    assert (replaced.element_strides[2], replaced.swizzle_bytes, replaced.element) == (4, 32, "f32")
    assert replaced.fill == "nan"
    assert EXAMPLE.replace("rank", None, 1).dims == EXAMPLE.dims[:2]
    assert EXAMPLE.replace("elemtype", None, 11).element == "tf32"


@pytest.mark.parametrize(
    ("field", "index", "value", "error"),
    [
        ("global_dim", 5, 1, "ordinal 5"),
        ("global_stride", 4, 16, "ordinal 4"),
        ("elemtype", None, 15, "elemtype with value 15"),
        ("swizzle_mode", None, 4, "swizzle_mode with value 4"),
        ("interleave_layout", None, 1, "interleave_layout with value 1"),
        ("rank", None, 5, "rank 6"),
    ],
)
def test_replace_refuses(field: str, index: int | None, value: int, error: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=error):
        EXAMPLE.replace(field, index, value)
