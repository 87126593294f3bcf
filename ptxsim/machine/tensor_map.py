"""Tensor maps in the 128-byte hardware format.

CuTe's host code builds this format inline and passes it by value; `cuTensorMapEncodeTiled` writes it. The layout was
found by varying one argument of CuTe's encoder at a time (measured: prototype N; the upper stride bits are inferred).
64-bit words, bit ranges inclusive, extents and ranks stored minus one, strides in units of 16 bytes:

    0   0–63 global address
    1   1 always 1 · 4–6 rank · 7–10 element type · 13–14 swizzle · 15 fill · 16 tf32 · 17–18 L2 promotion ·
        21 "128 KiB or more" hint · 32–63 stride 1
    2   0–31 stride 2 · 32–63 stride 3
    3   0–31 stride 4 · 32+4i…35+4i bits 32–35 of stride i+1
    4   0–31 extent 0 · 32–63 extent 1          5   extents 2, 3
    6   0–31 extent 4 · 32+3i…34+3i element stride i · 56–63 box 0
    7   0–31 boxes 1 to 4, eight bits each
    8–15 unused; left uninitialised by CuTe

Two things are not established on hardware: bit 15 of word 1 as the fill mode (chosen for this simulator, whose
`cuTensorMapEncodeTiled` writes it too) and the names of element types 3, 5 and 8. Interleaved layouts, im2col maps,
other swizzle atoms and 4- or 6-bit elements have unknown bits; a map that sets one is refused.
"""

import struct
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

Choice = TypeVar("Choice")

WORDS = struct.Struct("<8Q")
MAP_BYTES = 128
MAX_RANK = 5

# Hardware codes of element types, and bytes of one element. "tf32" is f32 with bit 16 of word 1.
_ELEMENT_CODES = {
    "u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f32.ftz": 8, "f64": 9, "bf16": 10,
}  # fmt: skip
_ELEMENT_NAMES = {code: name for name, code in _ELEMENT_CODES.items()}
_TF32_OF = {"f32": "tf32", "f32.ftz": "tf32.ftz"}
_F32_OF = {tf32: f32 for f32, tf32 in _TF32_OF.items()}
_ELEMENT_BYTES = {
    "u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u32": 4, "s32": 4, "f32": 4, "f32.ftz": 4, "tf32": 4, "tf32.ftz": 4,
    "u64": 8, "s64": 8, "f64": 8,
}  # fmt: skip
_SWIZZLE_BYTES = (0, 32, 64, 128)
_FILLS = ("zero", "nan")

# PTX ISA, tensormap.replace, table "new_val validity": numbers of .elemtype (equal to the hardware's up to 10).
_REPLACED_ELEMENTS = (*_ELEMENT_CODES, "tf32", "tf32.ftz")

_LOW = 0xFFFFFFFF
_KNOWN_BITS = (
    (1 << 64) - 1,
    _LOW << 32 | 0b10_0111_1110_0111_1111_0010,
    (1 << 64) - 1,
    _LOW | 0xFFFF << 32,
    (1 << 64) - 1,
    (1 << 64) - 1,
    _LOW | 0x7FFF << 32 | 0xFF << 56,
    _LOW,
)


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map. Sequences have one entry per dimension, dimension 0 (contiguous) first.

    address: of element (0, …), bytes · dims: extents, elements · strides: bytes, the first is the element's size ·
    box: extents of a tile, elements of the tensor · element_strides: step inside the box (dimension 0 has none:
    cuTensorMapEncodeTiled ignores it) · swizzle_bytes: 0, 32, 64 or 128 · fill: "zero" or "nan" ·
    l2_promotion, size_hint: performance hints, kept for `encode`.
    """

    address: int
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle_bytes: int = 0
    fill: str = "zero"
    l2_promotion: int = 0
    size_hint: bool = False

    def __post_init__(self) -> None:
        rank = len(self.dims)
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"tensor map of rank {rank}; allowed: 1 to {MAX_RANK}")
        for name in ("strides", "box", "element_strides"):
            if len(getattr(self, name)) != rank:
                raise ValueError(f"tensor map: {len(getattr(self, name))} {name} for rank {rank}")
        if self.element not in _ELEMENT_BYTES:
            raise ValueError(f"tensor map: element {self.element!r}; allowed: {', '.join(_ELEMENT_BYTES)}")
        if self.swizzle_bytes not in _SWIZZLE_BYTES:
            raise ValueError(f"tensor map: swizzle {self.swizzle_bytes} bytes; allowed: {_SWIZZLE_BYTES}")
        if self.fill not in _FILLS:
            raise ValueError(f"tensor map: fill {self.fill!r}; allowed: {_FILLS}")

    @property
    def rank(self) -> int:
        return len(self.dims)

    @cached_property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.element]

    @cached_property
    def box_shape(self) -> tuple[int, ...]:
        """Elements of a box that arrive in shared memory, dimension 0 first: every `element_strides`-th counts."""
        return (self.box[0], *(-(-b // e) for b, e in zip(self.box[1:], self.element_strides[1:], strict=True)))

    @cached_property
    def box_bytes(self) -> int:
        """Bytes that a box takes in shared memory, also where it is out of bounds (what complete_tx counts)."""
        count = self.element_bytes
        for extent in self.box_shape:
            count *= extent
        return count

    @cached_property
    def byte_shape(self) -> tuple[int, ...]:
        """Shape of a box as bytes in shared memory: slowest dimension first, dimension 0 counted in bytes."""
        return (*reversed(self.box_shape[1:]), self.box_shape[0] * self.element_bytes)

    @staticmethod
    def decode(raw: bytes | bytearray | memoryview) -> "TensorMap":
        """The map held by at least the first 64 of its 128 bytes. Unknown bits raise, named by word and bit."""
        if len(raw) < WORDS.size:
            raise ValueError(f"tensor map of {len(raw)} bytes; at least {WORDS.size} are needed")
        return _decoded(bytes(raw[: WORDS.size]))

    def encode(self) -> bytes:
        """The 128-byte hardware format; words 8 to 15 are zero."""
        words = [0] * 8
        rank, element = self.rank, _F32_OF.get(self.element, self.element)
        if self.address < 0 or self.address % 16:
            raise ValueError(f"tensor map: address {self.address:#x} is not a multiple of 16")
        if self.strides[0] != self.element_bytes:
            raise ValueError(f"tensor map: stride 0 is {self.strides[0]}, the element has {self.element_bytes} bytes")
        words[0] = self.address
        words[1] = 1 << 1 | (rank - 1) << 4 | _ELEMENT_CODES[element] << 7
        words[1] |= _SWIZZLE_BYTES.index(self.swizzle_bytes) << 13 | _FILLS.index(self.fill) << 15
        words[1] |= (self.element in _F32_OF) << 16 | self.l2_promotion << 17 | self.size_hint << 21
        for i, stride in enumerate(self.strides[1:]):
            units = _field("stride", i + 1, stride, 1 << 40, multiple=16) >> 4
            word, shift = ((1, 32), (2, 0), (2, 32), (3, 0))[i]
            words[word] |= (units & _LOW) << shift
            words[3] |= units >> 32 << (32 + 4 * i)
        for i in range(rank):
            words[4 + i // 2] |= _field("extent", i, self.dims[i] - 1, 1 << 32) << 32 * (i % 2)
            words[6] |= _field("element stride", i, self.element_strides[i] - 1, 8) << (32 + 3 * i)
            box = _field("box", i, self.box[i] - 1, 256)
            words[6 if i == 0 else 7] |= box << (56 if i == 0 else 8 * (i - 1))
        return WORDS.pack(*words) + bytes(MAP_BYTES - WORDS.size)

    def replace(self, field: str, index: int | None, value: int) -> "TensorMap":
        """What tensormap.replace does (PTX ISA): `field` is the PTX qualifier, `index` its ordinal, if it has one.

        `value` is the operand as PTX encodes it: rank minus one, strides in bytes, element types, swizzle and fill
        modes by their numbers. A larger rank repeats the last dimension's entries until they are replaced too.
        """
        if field in _PER_DIMENSION:
            return self._replace_entry(field, index, value)
        if field == "global_address":
            return replace(self, address=value)
        if field == "rank":
            return self._with_rank(value + 1)
        if field == "elemtype":
            element = _numbered(field, _REPLACED_ELEMENTS, value)
            return replace(self, element=element, strides=(_ELEMENT_BYTES[element], *self.strides[1:]))
        if field == "swizzle_mode":
            return replace(self, swizzle_bytes=_numbered(field, _SWIZZLE_BYTES, value))
        if field == "fill_mode":
            return replace(self, fill=_numbered(field, _FILLS, value))
        if field in ("interleave_layout", "swizzle_atomicity") and value == 0:
            return self
        raise NotImplementedError(f"tensormap.replace.{field} with value {value}")

    def _replace_entry(self, field: str, index: int | None, value: int) -> "TensorMap":
        """Replaces one dimension's entry. Ordinal i of .global_stride is the stride of dimension i + 1."""
        name, first = _PER_DIMENSION[field]
        entries = list(getattr(self, name))
        if index is None or not 0 <= index < self.rank - first:
            raise ValueError(f"tensormap.replace.{field}: ordinal {index} in a map of rank {self.rank}")
        entries[index + first] = value
        return replace(self, **{name: tuple(entries)})

    def _with_rank(self, rank: int) -> "TensorMap":
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"tensormap.replace.rank: rank {rank}; allowed: 1 to {MAX_RANK}")
        names = ("dims", "strides", "box", "element_strides")
        entries = {name: getattr(self, name) for name in names}
        return replace(self, **{name: (*e, *[e[-1]] * (rank - len(e)))[:rank] for name, e in entries.items()})


# Qualifier of tensormap.replace → attribute, and the dimension that ordinal 0 means.
_PER_DIMENSION = {
    "box_dim": ("box", 0),
    "global_dim": ("dims", 0),
    "element_stride": ("element_strides", 0),
    "global_stride": ("strides", 1),
}


def _field(name: str, index: int, value: int, limit: int, multiple: int = 1) -> int:
    if not 0 <= value < limit or value % multiple:
        raise ValueError(
            f"tensor map: {name} {index} is stored as {value}; allowed: 0 to {limit - multiple} by {multiple}"
        )
    return value


def _numbered(field: str, choices: tuple[Choice, ...], value: int) -> Choice:
    if not 0 <= value < len(choices):
        raise NotImplementedError(f"tensormap.replace.{field} with value {value}; known: 0 to {len(choices) - 1}")
    return choices[value]


def _check_known(words: tuple[int, ...]) -> None:
    for i, (word, known) in enumerate(zip(words, _KNOWN_BITS, strict=True)):
        if unknown := word & ~known:
            bits = ", ".join(str(bit) for bit in range(64) if unknown >> bit & 1)
            raise NotImplementedError(f"tensor map: unknown bits {bits} are set in qword {i} ({word:#018x})")
    if not words[1] >> 1 & 1:
        raise ValueError(f"tensor map: bit 1 of qword 1 is clear ({words[1]:#018x}); is this a tensor map?")


@lru_cache(maxsize=4096)
def _decoded(raw: bytes) -> TensorMap:
    words = WORDS.unpack(raw)
    _check_known(words)
    rank = (words[1] >> 4 & 7) + 1
    code = words[1] >> 7 & 15
    if rank > MAX_RANK:
        raise ValueError(f"tensor map: rank {rank} in qword 1, bits 4–6; allowed: 1 to {MAX_RANK}")
    if code not in _ELEMENT_NAMES:
        raise NotImplementedError(f"tensor map: element type {code} in qword 1, bits 7–10; known: 0 to 10")
    element = _ELEMENT_NAMES[code]
    if words[1] >> 16 & 1:
        if element not in _TF32_OF:
            raise ValueError(f"tensor map: bit 16 of qword 1 (tf32) with element type {element}")
        element = _TF32_OF[element]
    low_strides = (words[1] >> 32, words[2] & _LOW, words[2] >> 32, words[3] & _LOW)
    strides = ((low | (words[3] >> (32 + 4 * i) & 15) << 32) << 4 for i, low in enumerate(low_strides))
    dims = (words[4], words[4] >> 32, words[5], words[5] >> 32, words[6])
    boxes = (words[6] >> 56, *(words[7] >> 8 * i & 255 for i in range(4)))
    return TensorMap(
        address=words[0],
        element=element,
        dims=tuple((d & _LOW) + 1 for d in dims)[:rank],
        strides=(_ELEMENT_BYTES[element], *strides)[:rank],
        box=tuple(b + 1 for b in boxes)[:rank],
        element_strides=tuple((words[6] >> (32 + 3 * i) & 7) + 1 for i in range(rank)),
        swizzle_bytes=_SWIZZLE_BYTES[words[1] >> 13 & 3],
        fill=_FILLS[words[1] >> 15 & 1],
        l2_promotion=words[1] >> 17 & 3,
        size_hint=bool(words[1] >> 21 & 1),
    )
