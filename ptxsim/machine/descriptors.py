"""Descriptors of matrix operands in shared memory, and the instruction descriptor of tcgen05.mma.

Shared-memory descriptor, 64 bits (PTX ISA: "Shared memory descriptor" of tcgen05, "Matrix descriptor" of wgmma):
0–13 start address, 16–29 leading byte offset (LBO), 32–45 stride byte offset (SBO), all in units of 16 bytes;
49–51 base offset; tcgen05: 52 LBO mode, 61–63 swizzle; wgmma: 62–63 swizzle.

An operand consists of 16-byte chunks. With T elements per chunk and W = 1, 2, 4, 8 chunks per swizzle span (none, 32,
64, 128 bytes), element (row, k) of the operand, `row` being an index of M or N, lies at

    K-major    start + (row / 8) SBO + (row % 8) 16 W + 16 chunk + byte       with 16 chunk + byte = k · element bytes;
               without swizzle the chunk advances by LBO instead of 16
    MN-major   start + (row / TW) LBO + (row % TW) · element bytes + (k % 8) 16 W + (k / 8) SBO;
               without swizzle the roles of LBO and SBO are exchanged

and then bits 4–6 of that absolute address are XORed with bits 7–9 (64 bytes: two bits, 32 bytes: one bit). Measured:
prototype N for K-major with 128 and 64 bytes, MN-major with 128 bytes (2-byte elements) and 64 bytes (1-byte elements).
Without swizzle and with 32 bytes the formulas are those of the PTX ISA's canonical layouts, not measured.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]

CHUNK = 16
_PATTERN = 1024  # bytes after which the widest swizzle repeats
_ADDRESS_MASK = 0x3FFF
_CHUNK_TYPE = np.dtype(f"V{CHUNK}")
_RAW_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SWIZZLE_MASKS = {0: 0, 32: 1, 64: 3, 128: 7}
_TCGEN05_SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}
_WGMMA_SWIZZLES = (0, 128, 64, 32)


@dataclass(frozen=True)
class SharedDescriptor:
    """A decoded shared-memory descriptor. All in bytes; swizzle is 0, 32, 64 or 128."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @staticmethod
    def decode_tcgen05(value: int) -> "SharedDescriptor":
        """The descriptor of a tcgen05.mma or tcgen05.cp operand."""
        return _decoded_tcgen05(value)

    @staticmethod
    def decode_wgmma(value: int) -> "SharedDescriptor":
        """The descriptor of a wgmma.mma_async operand."""
        return _decoded_wgmma(value)

    def encode_tcgen05(self) -> int:
        mode = next(code for code, swizzle in _TCGEN05_SWIZZLES.items() if swizzle == self.swizzle)
        return self._encoded_addresses() | 1 << 46 | mode << 61

    def encode_wgmma(self) -> int:
        return self._encoded_addresses() | _WGMMA_SWIZZLES.index(self.swizzle) << 62

    def _encoded_addresses(self) -> int:
        fields = (self.start, self.leading, self.stride)
        return sum((value >> 4 & _ADDRESS_MASK) << shift for value, shift in zip(fields, (0, 16, 32), strict=True))


@lru_cache(maxsize=16384)
def _decoded_tcgen05(value: int) -> SharedDescriptor:
    if value >> 52 & 1:
        raise NotImplementedError("shared descriptor: leading dimension as an absolute address (bit 52)")
    if value >> 53 & 0xFF:
        raise ValueError(f"shared descriptor {value:#018x}: bits 53–60 must be zero")
    mode = value >> 61
    if mode == 1:
        raise NotImplementedError("shared descriptor: swizzle 1 in bits 61–63 (128 bytes with 32-byte atoms)")
    if mode not in _TCGEN05_SWIZZLES:
        raise ValueError(f"shared descriptor: swizzle {mode} in bits 61–63; allowed: {sorted(_TCGEN05_SWIZZLES)}")
    return _decoded_addresses(value, _TCGEN05_SWIZZLES[mode])


@lru_cache(maxsize=16384)
def _decoded_wgmma(value: int) -> SharedDescriptor:
    return _decoded_addresses(value, _WGMMA_SWIZZLES[value >> 62])


def _decoded_addresses(value: int, swizzle: int) -> SharedDescriptor:
    if base_offset := value >> 49 & 7:
        raise NotImplementedError(f"shared descriptor: base offset {base_offset} in bits 49–51; supported: 0")
    start, leading, stride = ((value >> shift & _ADDRESS_MASK) << 4 for shift in (0, 16, 32))
    return SharedDescriptor(start, leading, stride, swizzle)


# --------------------------------------------------------------------------------------------- element addresses


def element_offsets(
    descriptor: SharedDescriptor, rows: int, k: int, element_bytes: int, mn_major: bool
) -> NDArray[np.int64]:
    """Shared address of the first byte of every element. → int64 [rows, k]"""
    chunks = chunk_offsets(descriptor, rows, k, element_bytes, mn_major)
    inside = np.arange(0, CHUNK, element_bytes)
    elements = (chunks[:, :, None] + inside).reshape(len(chunks), -1)
    return elements.T[:rows] if mn_major else elements[:, :k]


def chunk_offsets(descriptor: SharedDescriptor, rows: int, k: int, element_bytes: int, mn_major: bool) -> Offsets:
    """Shared addresses of the operand's 16-byte chunks. → int64 [rows, k / T], or [k, rows / T] when MN-major

    T = 16 / element_bytes. Rows that do not fill the last chunk of an MN-major operand still count it whole.
    """
    base, layout = _split(descriptor)
    return _relative_chunks(layout, rows, k, element_bytes, mn_major) * CHUNK + base


def gather(
    descriptor: SharedDescriptor, shared: NDArray[np.uint8], rows: int, k: int, element_bytes: int, mn_major: bool
) -> NDArray[np.generic]:
    """The operand's elements as they lie: raw unsigned integers, [rows, k], or [k, rows] when MN-major.

    shared: uint8 [size], a multiple of 16 bytes, index = shared address.
    """
    base, layout = _split(descriptor)
    index = _relative_chunks(layout, rows, k, element_bytes, mn_major)
    try:
        chunks = shared.view(_CHUNK_TYPE)[base // CHUNK :].take(index)
    except IndexError:
        end = int(index.max()) * CHUNK + base + CHUNK
        raise IndexError(f"{descriptor} reaches byte {end:#x} of {shared.size:#x} bytes of shared memory") from None
    raw = chunks.view(_RAW_TYPES[element_bytes])
    return raw[:, :rows] if mn_major else raw


def _split(descriptor: SharedDescriptor) -> tuple[int, tuple[int, int, int, int]]:
    """A multiple of the swizzle's pattern, and the layout that is left when it is taken off the start."""
    base = descriptor.start & -_PATTERN
    return base, (descriptor.start - base, descriptor.leading, descriptor.stride, descriptor.swizzle)


@lru_cache(maxsize=4096)
def _relative_chunks(
    layout: tuple[int, int, int, int], rows: int, k: int, element_bytes: int, mn_major: bool
) -> Offsets:
    """`chunk_offsets` / 16 for a start below 1024: adding a multiple of 1024 bytes does not change the swizzle."""
    start, leading, stride, swizzle = layout
    per_chunk = CHUNK // element_bytes
    span = max(swizzle, CHUNK)
    per_span = span // CHUNK
    if mn_major:
        if element_bytes == 4:
            raise NotImplementedError("an MN-major operand of 4-byte elements (32-byte swizzle atoms)")
        along_mn, along_k = (leading, stride) if swizzle else (stride, leading)
        i, chunk = np.arange(k)[:, None], np.arange(-(-rows // per_chunk))
        address = start + i // 8 * along_k + i % 8 * span + chunk // per_span * along_mn + chunk % per_span * CHUNK
    else:
        if k % per_chunk:
            raise ValueError(f"a K-major operand with {k} elements of {element_bytes} bytes along K; not whole chunks")
        i, chunk = np.arange(rows)[:, None], np.arange(k // per_chunk)
        address = start + i // 8 * stride + i % 8 * span + chunk * (CHUNK if swizzle else leading)
    index = (address ^ ((address >> 7 & _SWIZZLE_MASKS[swizzle]) << 4)) // CHUNK
    index.flags.writeable = False
    return index


# ------------------------------------------------------------------------------------------ instruction descriptor

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
OPERAND_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
}
ACCUMULATOR_FORMATS = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
SCALED_KINDS = ("mxf8f6f4",)
_SCALE_E8M0 = 1


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32-bit instruction descriptor of tcgen05.mma (PTX ISA: "Instruction descriptor").

    0–1 sparsity selector · 2 sparse · 3 saturate · 7–9, 10–12 formats of A, B · 13, 14 negate A, B · 15, 16 A, B are
    MN-major · 17–22 N / 8 · 24–28 M / 16. Not block-scaled: 4–5 accumulator format, 30–31 shift of .ws.
    Block-scaled: 4–5 scale-factor id of B, 23 scale factors are e8m0, 29–30 scale-factor id of A.
    """

    kind: str
    m: int
    n: int
    a_format: str
    b_format: str
    d_format: str = "f32"
    negate_a: bool = False
    negate_b: bool = False
    mn_major_a: bool = False
    mn_major_b: bool = False
    scale_id_a: int = 0
    scale_id_b: int = 0
    saturate: bool = False

    @property
    def is_scaled(self) -> bool:
        return self.kind in SCALED_KINDS

    @staticmethod
    def decode(value: int, kind: str) -> "InstructionDescriptor":
        """Reads the descriptor for a .kind, written without "kind::". What is not supported raises by field."""
        return _decoded_instruction(value & 0xFFFFFFFF, kind)

    def encode(self) -> int:
        value = _code("A format", OPERAND_FORMATS[self.kind], self.a_format) << 7
        value |= _code("B format", OPERAND_FORMATS[self.kind], self.b_format) << 10
        value |= self.negate_a << 13 | self.negate_b << 14 | self.mn_major_a << 15 | self.mn_major_b << 16
        value |= self.n // 8 << 17 | self.m // 16 << 24 | self.saturate << 3
        if self.is_scaled:
            return value | self.scale_id_b << 4 | _SCALE_E8M0 << 23 | self.scale_id_a << 29
        return value | _code("accumulator format", ACCUMULATOR_FORMATS[self.kind], self.d_format) << 4


def _code(field: str, names: dict[int, str], name: str) -> int:
    for code, known in names.items():
        if known == name:
            return code
    raise ValueError(f"instruction descriptor: {field} {name!r}; allowed: {', '.join(names.values())}")


def _named(field: str, names: dict[int, str], code: int) -> str:
    if code not in names:
        raise ValueError(f"instruction descriptor: {field} {code}; allowed: {names}")
    return names[code]


@lru_cache(maxsize=4096)
def _decoded_instruction(value: int, kind: str) -> InstructionDescriptor:
    if kind not in OPERAND_FORMATS:
        raise NotImplementedError(f"tcgen05.mma of kind {kind!r}; supported: {', '.join(OPERAND_FORMATS)}")
    if value & 0b111:
        raise NotImplementedError(f"instruction descriptor {value:#010x}: sparsity (bits 0–2)")
    is_scaled = kind in SCALED_KINDS
    if not is_scaled and value >> 30:
        raise NotImplementedError(f"instruction descriptor: shift {value >> 30} of .ws (bits 30–31)")
    if is_scaled and value >> 31:
        raise NotImplementedError("instruction descriptor: K size 1 (bit 31)")
    if is_scaled and value >> 23 & 1 != _SCALE_E8M0:
        raise NotImplementedError("instruction descriptor: scale format ue4m3 (bit 23); supported: ue8m0")
    if value >> 3 & 1 and kind != "i8":
        raise ValueError(f"instruction descriptor: saturate (bit 3) with kind {kind}")
    m, n = (value >> 24 & 31) * 16, (value >> 17 & 63) * 8
    if m not in (64, 128, 256):
        raise ValueError(f"instruction descriptor: M {m}; allowed: 64, 128, 256")
    if not 8 <= n <= 256:
        raise ValueError(f"instruction descriptor: N {n}; allowed: 8 to 256")
    return InstructionDescriptor(
        kind=kind,
        m=m,
        n=n,
        a_format=_named("A format", OPERAND_FORMATS[kind], value >> 7 & 7),
        b_format=_named("B format", OPERAND_FORMATS[kind], value >> 10 & 7),
        d_format="f32" if is_scaled else _named("accumulator format", ACCUMULATOR_FORMATS[kind], value >> 4 & 3),
        negate_a=bool(value >> 13 & 1),
        negate_b=bool(value >> 14 & 1),
        mn_major_a=bool(value >> 15 & 1),
        mn_major_b=bool(value >> 16 & 1),
        scale_id_a=value >> 29 & 3 if is_scaled else 0,
        scale_id_b=value >> 4 & 3 if is_scaled else 0,
        saturate=bool(value >> 3 & 1),
    )
