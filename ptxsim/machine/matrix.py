"""Products of the tensor cores on numpy arrays: tcgen05.mma and wgmma.mma_async.

tcgen05.mma is numerically right, not bit-exact: elements and scale factors are exact in float64, products are summed in
float64, and the result is rounded once to the accumulator's type; what Blackwell does is not documented. wgmma gives an
H200's bits (`aligned_products.py`).

Tensor memory of a CTA is uint32 [128 lanes, 512 columns]; an address is lane << 16 | column. Where the rows of D (and
of an A in tensor memory) lie, for the M of the instruction (PTX ISA: "Data path layout organization"; N = measured by
prototype N, C = read from CUTLASS' allocation of tensor memory, not measured):

    M 128, 1 CTA      row r in lane r (N)
    M 256, 2 CTAs     rows 0–127 in the even CTA, 128–255 in the odd one, row r in lane r % 128 (N)
    M 64, 1 CTA       row r in lane 32 (r / 16) + r % 16, plus 16 if the address says so (C)
    M 128, 2 CTAs     64 rows for each CTA: lanes 0–63 hold them for the first N / 2 columns, lanes 64–127 the same rows
                      for the second half (N); an A in tensor memory lies twice, once for each half (C)

With two CTAs, B's first N / 2 rows come from the even CTA's shared memory, the others from the odd one's (N).
A float32 element of D takes a column, a float16 one as well, in the low half (PTX ISA: .pack::16b; not measured).
An A in tensor memory takes 8 columns, its elements packed, lowest K in the low bits (N for 1 and 2 bytes).

Scale factors of blocks of 32 along K, one byte each, byte `id` of a cell (N):

    128 lanes of rows   A: row r in lane r % 128, column a + (r % 128) / 32 · B: row n in lane n % 32,
                        column b + n / 32, repeated in all four lane quarters
    M 128, 2 CTAs       half h of N: A: row r in lane 64 h + r, column a + r / 32 · B: row n of the half in lane
                        64 h + n % 32, column b + n / 32
    Each CTA holds the factors of its own rows of A and of all rows of B. The id is that of the instruction descriptor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxsim.machine import formats
from ptxsim.machine.aligned_products import aligned_product
from ptxsim.machine.descriptors import (
    InstructionDescriptor,
    Offsets,
    SharedDescriptor,
    chunk_offsets,
    gather,
)

FloatArray = NDArray[np.float64]
Words = NDArray[np.uint32]

LANES, COLUMNS, QUARTERS, QUARTER_LANES = 128, 512, 4, 32
BAND = 16  # lanes whose accesses are told apart
BANDS = LANES // BAND
K_BYTES = 32  # one tensor-core instruction multiplies 32 bytes along K
A_COLUMNS = K_BYTES // 4

_SUPPORTED_KINDS = ("f16", "tf32", "f8f6f4", "mxf8f6f4")
_SUPPORTED_FORMATS = ("f16", "bf16", "tf32", "e4m3", "e5m2")

# Bytes of tensor memory that hold the scale factors of rows of A and of B, from lane 0 of their first column.
_LANE_BYTES = 4 * COLUMNS
_A_SCALES = np.arange(LANES) * _LANE_BYTES + np.arange(LANES) // QUARTER_LANES * 4
_B_SCALES = np.arange(256) % QUARTER_LANES * _LANE_BYTES + np.arange(256) // QUARTER_LANES * 4


class CtaMemory(NamedTuple):
    """Memory of one CTA. shared: uint8 [size], index = shared address. tensor: uint32 [128, 512]."""

    shared: NDArray[np.uint8]
    tensor: Words


# --------------------------------------------------------------------------------------------------- footprints


@dataclass(frozen=True)
class SharedAccess:
    """An operand that was read from shared memory of CTA `cta` (its position in the sequence of CTAs)."""

    cta: int
    descriptor: SharedDescriptor
    rows: int
    element_bytes: int
    mn_major: bool

    @property
    def offsets(self) -> Offsets:
        """Shared addresses of the 16-byte chunks that were read, in no order. → int64 [chunks]"""
        k = K_BYTES // self.element_bytes
        return chunk_offsets(self.descriptor, self.rows, k, self.element_bytes, self.mn_major).ravel()


class TensorAccess(NamedTuple):
    """Cells of tensor memory of a CTA: bands of 16 lanes, columns `column` … + `columns`.

    Lanes whose output is disabled count as accessed.
    """

    cta: int
    bands: range
    column: int
    columns: int


class Footprint(NamedTuple):
    """What one product read and wrote."""

    shared_reads: tuple[SharedAccess, ...]
    tensor_reads: tuple[TensorAccess, ...]
    tensor_writes: tuple[TensorAccess, ...]


# -------------------------------------------------------------------------------------------------- tcgen05.mma


@dataclass(frozen=True)
class MatrixProduct:
    """One tcgen05.mma: D = A B (+ D · 2^−scale_input_d), its operands in PTX order.

    accumulator: tensor-memory address of D · a: descriptor, or tensor-memory address · scale_a, scale_b: tensor-memory
    addresses of scale factors; bits 30–31 may repeat the instruction descriptor's ids · accumulate: enable-input-d ·
    disabled_lanes: disable-output-lane as one number, bit 128 c + l for lane l of the c-th CTA (PTX ISA; not measured).
    """

    instruction: InstructionDescriptor
    accumulator: int
    a: SharedDescriptor | int
    b: SharedDescriptor
    scale_a: int = 0
    scale_b: int = 0
    accumulate: bool = True
    disabled_lanes: int = 0
    scale_input_d: int = 0


class _Layout(NamedTuple):
    """How one CTA's lanes split into groups that share a column range of D.

    The lanes of group g are lanes g·128/groups + first … + size; D has `columns` columns for each group.
    """

    groups: int
    first: int
    size: int
    columns: int
    rows: int
    is_split: bool

    def view(self, tensor: NDArray, column: int, columns: int) -> NDArray:
        """The cells of the layout's lanes. → view [groups, size, columns]"""
        lanes = tensor.reshape(self.groups, LANES // self.groups, -1)
        return lanes[:, self.first : self.first + self.size, column : column + columns]


def mma(product: MatrixProduct, ctas: Sequence[CtaMemory]) -> Footprint:
    """Executes a product on the memories of one CTA, or of a pair with the even CTA first."""
    instruction = product.instruction
    _check(product, len(ctas))
    column, lane = product.accumulator & 0xFFFF, product.accumulator >> 16
    layout = _layout(instruction, len(ctas), lane)
    _check_columns("D", column, layout.columns)
    halves = [_b_rows(product, cta, len(ctas)) for cta in ctas]
    b = halves[0] if len(ctas) == 1 else np.concatenate(halves)
    with np.errstate(over="ignore", invalid="ignore"):
        for index, cta in enumerate(ctas):
            a = _a_rows(product, cta, layout)
            result = _scratch(layout.rows * (1 + layout.is_split), instruction.n // (1 + layout.is_split))
            if layout.is_split:
                _split_product(product, cta, a, b, result.reshape(2, 64, -1))
            elif instruction.is_scaled:
                scales_a, scales_b = _full_scales(product, cta)
                np.matmul(a * scales_a[:, None], (b * scales_b[:, None]).T, out=result)
            else:
                np.matmul(a, b.T, out=result)
            cells = layout.view(cta.tensor, column, layout.columns)
            _accumulate(product, result.reshape(cells.shape), cells, _enabled(product, layout, index))
    return _footprint(product, len(ctas), lane)


@lru_cache(maxsize=64)
def _scratch(rows: int, columns: int) -> FloatArray:
    """Room for one result, used again by each product of this shape: fresh pages cost more than the product."""
    return np.empty((rows, columns))


def _check(product: MatrixProduct, num_ctas: int) -> None:
    instruction = product.instruction
    if instruction.kind not in _SUPPORTED_KINDS:
        raise NotImplementedError(f"tcgen05.mma of kind {instruction.kind}; supported: {', '.join(_SUPPORTED_KINDS)}")
    for name in ("a_format", "b_format"):
        # 4- and 6-bit elements lie packed with gaps in shared memory; how exactly is not established.
        if getattr(instruction, name) not in _SUPPORTED_FORMATS:
            raise NotImplementedError(
                f"tcgen05.mma: {name} {getattr(instruction, name)}; supported: {_SUPPORTED_FORMATS}"
            )
    shapes = {1: (64, 128), 2: (128, 256)}
    if num_ctas not in shapes or instruction.m not in shapes[num_ctas]:
        raise ValueError(f"tcgen05.mma: M {instruction.m} with {num_ctas} CTAs; allowed (CTAs: M): {shapes}")
    if instruction.is_scaled and instruction.m == 64:
        raise ValueError("tcgen05.mma: block-scaled with M 64; allowed: 128, and 256 with two CTAs")
    if num_ctas == 2 and instruction.n % 16:
        raise ValueError(f"tcgen05.mma: N {instruction.n} with 2 CTAs; allowed: multiples of 16")
    if instruction.is_scaled:
        operands = (("A", product.scale_a, instruction.scale_id_a), ("B", product.scale_b, instruction.scale_id_b))
        for name, address, scale_id in operands:
            if address >> 30 not in (0, scale_id):
                raise ValueError(
                    f"tcgen05.mma: scale factors of {name} have id {address >> 30} in their address and "
                    f"{scale_id} in the instruction descriptor"
                )
            if address >> 16 & 0x3FFF:
                raise NotImplementedError(f"tcgen05.mma: scale factors of {name} at lane {address >> 16 & 0x3FFF}")


def _layout(instruction: InstructionDescriptor, num_ctas: int, lane: int) -> _Layout:
    is_narrow = instruction.m == 64
    if lane not in ((0, 16) if is_narrow else (0,)):
        raise NotImplementedError(f"tcgen05.mma: D at lane {lane} with M {instruction.m}")
    if is_narrow:
        return _Layout(QUARTERS, lane, 16, instruction.n, 64, False)
    if instruction.m == 128 and num_ctas == 2:
        return _Layout(2, 0, 64, instruction.n // 2, 64, True)
    return _Layout(1, 0, LANES, instruction.n, LANES, False)


def _check_columns(name: str, column: int, columns: int) -> None:
    if column + columns > COLUMNS:
        raise IndexError(f"tcgen05.mma: {name} in columns {column} to {column + columns - 1}; there are {COLUMNS}")


def _from_shared(
    name: str, shared: NDArray[np.uint8], descriptor: SharedDescriptor, rows: int, mn_major: bool
) -> FloatArray:
    """An operand's numbers. → float64 [rows, K], a transposed view when MN-major"""
    size = formats.ELEMENT_BYTES[name]
    values = formats.decode(name, gather(descriptor, shared, rows, K_BYTES // size, size, mn_major))
    return values.T if mn_major else values


def _b_rows(product: MatrixProduct, cta: CtaMemory, num_ctas: int) -> FloatArray:
    instruction = product.instruction
    rows = instruction.n // num_ctas
    values = _from_shared(instruction.b_format, cta.shared, product.b, rows, instruction.mn_major_b)
    return -values if instruction.negate_b else values


def _a_rows(product: MatrixProduct, cta: CtaMemory, layout: _Layout) -> FloatArray:
    """A of one CTA. → float64 [rows, K], or [128, K] when it lies twice in tensor memory"""
    instruction = product.instruction
    if isinstance(product.a, SharedDescriptor):
        values = _from_shared(instruction.a_format, cta.shared, product.a, layout.rows, instruction.mn_major_a)
    else:
        lane, column = product.a >> 16, product.a & 0xFFFF
        if lane != layout.first:
            raise NotImplementedError(f"tcgen05.mma: A at lane {lane}, D at lane {layout.first}")
        if instruction.mn_major_a:
            raise ValueError("tcgen05.mma: A in tensor memory is MN-major in the instruction descriptor (bit 15)")
        _check_columns("A", column, A_COLUMNS)
        cells = np.ascontiguousarray(layout.view(cta.tensor, column, A_COLUMNS)).reshape(-1, A_COLUMNS)
        name = instruction.a_format
        values = formats.decode(name, cells.view(formats.STORAGE[formats.ELEMENT_BYTES[name]]))
    return -values if instruction.negate_a else values


def _split_product(product: MatrixProduct, cta: CtaMemory, a: FloatArray, b: FloatArray, result: FloatArray) -> None:
    """M 128 on two CTAs: the product of each half of N is for its own 64 lanes. result: float64 [2, 64, N / 2]"""
    half = product.instruction.n // 2
    for h in range(2):
        rows = a[64 * h : 64 * (h + 1)] if len(a) == LANES else a
        columns = b[half * h : half * (h + 1)]
        if product.instruction.is_scaled:
            scales_a, scales_b = _half_scales(product, cta, h)
            rows, columns = rows * scales_a[:, None], columns * scales_b[:, None]
        np.matmul(rows, columns.T, out=result[h])


# --------------------------------------------------------------------------------------------- scale factors


def _scale_columns(product: MatrixProduct) -> tuple[int, int]:
    return product.scale_a & 0xFFFF, product.scale_b & 0xFFFF


def _num_scale_columns(product: MatrixProduct, layout: _Layout) -> tuple[int, int]:
    """Columns that the scale factors of A and of B take in each of the lanes that read them."""
    return layout.rows // QUARTER_LANES, -(-layout.columns // QUARTER_LANES)


def _full_scales(product: MatrixProduct, cta: CtaMemory) -> tuple[FloatArray, FloatArray]:
    """Scale factors of a CTA with 128 lanes of rows. → float64 [128], [N]"""
    instruction = product.instruction
    column_a, column_b = _scale_columns(product)
    a = _scales(cta, _A_SCALES, column_a, instruction.scale_id_a)
    return a, _scales(cta, _B_SCALES[: instruction.n], column_b, instruction.scale_id_b)


def _half_scales(product: MatrixProduct, cta: CtaMemory, half: int) -> tuple[FloatArray, FloatArray]:
    """Scale factors for lanes 64 · half … + 64 when M is 128 on two CTAs. → float64 [64], [N / 2]"""
    instruction = product.instruction
    column_a, column_b = _scale_columns(product)
    lane = 64 * half * _LANE_BYTES
    a = _scales(cta, _A_SCALES[:64] + lane, column_a, instruction.scale_id_a)
    return a, _scales(cta, _B_SCALES[: instruction.n // 2] + lane, column_b, instruction.scale_id_b)


def _scales(cta: CtaMemory, places: Offsets, column: int, scale_id: int) -> FloatArray:
    """Factors at bytes `places` of tensor memory, counted from byte `scale_id` of lane 0 in a column. → float64"""
    _check_columns("scale factors", column, int(places[-1]) % _LANE_BYTES // 4 + 1)
    return formats.decode("e8m0", cta.tensor.view(np.uint8).reshape(-1).take(places + (4 * column + scale_id)))


# ------------------------------------------------------------------------------------------------ accumulator


def _enabled(product: MatrixProduct, layout: _Layout, cta: int) -> NDArray[np.bool_] | None:
    """Which lanes of a CTA are written. → bool [groups, size, 1], None for all"""
    disabled = product.disabled_lanes >> LANES * cta & ((1 << LANES) - 1)
    if not disabled:
        return None
    lanes = np.array([not disabled >> lane & 1 for lane in range(LANES)])
    return layout.view(lanes[:, None], 0, 1)


def _accumulate(
    product: MatrixProduct, result: FloatArray, cells: Words, enabled: NDArray[np.bool_] | None = None
) -> None:
    """Adds `result` to D or replaces D, in place. result: float64, cells: uint32, the same shape"""
    is_half = product.instruction.d_format == "f16"
    old = cells.astype(np.uint16).view(np.float16) if is_half else cells.view(np.float32)
    if product.accumulate:
        scale = 2.0**-product.scale_input_d
        result = np.add(result, np.multiply(old, scale, dtype=np.float64) if product.scale_input_d else old, out=result)
    if is_half:
        target, result = cells, result.astype(np.float16).view(np.uint16)
    else:
        target = old
    if enabled is None:
        target[...] = result
    else:
        np.copyto(target, result, where=enabled, casting="same_kind")


@lru_cache(maxsize=4096)
def _footprint(product: MatrixProduct, num_ctas: int, lane: int) -> Footprint:
    instruction = product.instruction
    layout = _layout(instruction, num_ctas, lane)
    shared, reads, writes = [], [], []
    size_a = formats.ELEMENT_BYTES[instruction.a_format]
    size_b = formats.ELEMENT_BYTES[instruction.b_format]
    bands = range(layout.first // BAND, BANDS, 2) if layout.rows < LANES and not layout.is_split else range(BANDS)
    for cta in range(num_ctas):
        if isinstance(product.a, SharedDescriptor):
            shared.append(SharedAccess(cta, product.a, layout.rows, size_a, instruction.mn_major_a))
        else:
            reads.append(TensorAccess(cta, bands, product.a & 0xFFFF, A_COLUMNS))
        shared.append(SharedAccess(cta, product.b, instruction.n // num_ctas, size_b, instruction.mn_major_b))
        if instruction.is_scaled:
            scales = zip(_scale_columns(product), _num_scale_columns(product, layout), strict=True)
            reads += [TensorAccess(cta, range(BANDS), column, columns) for column, columns in scales]
        accumulator = TensorAccess(cta, bands, product.accumulator & 0xFFFF, layout.columns)
        writes.append(accumulator)
        if product.accumulate:
            reads.append(accumulator)
    return Footprint(tuple(shared), tuple(reads), tuple(writes))


# ----------------------------------------------------------------------------------------------------- wgmma


@dataclass(frozen=True)
class WarpgroupProduct:
    """One wgmma.mma_async.m64nNk of 32 bytes along K: D = A B (+ D).

    a_format, b_format: "f16", "bf16", "tf32", "e4m3", "e5m2"; of equal size · d_format: "f32" or "f16" ·
    accumulate: scale-d · negate_a, negate_b: imm-scale −1 · mn_major_a, mn_major_b: imm-trans, for 2-byte types.
    """

    n: int
    a_format: str
    b_format: str
    d_format: str = "f32"
    accumulate: bool = True
    negate_a: bool = False
    negate_b: bool = False
    mn_major_a: bool = False
    mn_major_b: bool = False

    def __post_init__(self) -> None:
        for name in ("a_format", "b_format"):
            if getattr(self, name) not in _SUPPORTED_FORMATS:
                raise NotImplementedError(f"wgmma: {name} {getattr(self, name)}; supported: {_SUPPORTED_FORMATS}")
        if self.d_format not in ("f32", "f16"):
            raise NotImplementedError(f"wgmma: d_format {self.d_format}; supported: f32, f16")
        size = formats.ELEMENT_BYTES[self.a_format]
        if size != formats.ELEMENT_BYTES[self.b_format] or (size != 1 and self.a_format != self.b_format):
            raise ValueError(f"wgmma: a_format {self.a_format} with b_format {self.b_format}")
        if self.n % 8 or not 8 <= self.n <= 256:
            raise ValueError(f"wgmma: N {self.n}; allowed: 8 to 256 by 8")
        if size != 2 and (self.mn_major_a or self.mn_major_b):
            raise ValueError(f"wgmma: MN-major operand of {self.a_format}; only f16 and bf16 may be MN-major")

    @property
    def element_bytes(self) -> int:
        return formats.ELEMENT_BYTES[self.a_format]

    @property
    def d_registers(self) -> int:
        """32-bit registers of D in each thread."""
        return self.n // 2 if self.d_format == "f32" else self.n // 4


class Fragment(NamedTuple):
    """Where the elements of a register fragment belong: int arrays [128 threads of the warpgroup, elements].

    Element i is the i-th from the low bits of the first register up.
    """

    row: NDArray[np.int64]
    column: NDArray[np.int64]


def wgmma_accumulator_layout(n: int) -> Fragment:
    """D of .m64nN (PTX ISA: register fragments of wgmma, accumulator D). → [128, n / 2]"""
    thread, i = np.arange(128)[:, None], np.arange(n // 2)
    lane, warp = thread % 32, thread // 32
    return Fragment(16 * warp + lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2)


def wgmma_operand_layout(element_bytes: int) -> Fragment:
    """A in registers, four 32-bit ones (PTX ISA: register fragments of wgmma, A). → [128, 16 / element_bytes]"""
    per_register = 4 // element_bytes
    thread, i = np.arange(128)[:, None], np.arange(4 * per_register)
    lane, warp, register = thread % 32, thread // 32, i // per_register
    row = 16 * warp + lane // 4 + 8 * (register % 2)
    return Fragment(row, register // 2 * 4 * per_register + lane % 4 * per_register + i % per_register)


def wgmma(
    product: WarpgroupProduct,
    a: SharedDescriptor | Words,
    b: SharedDescriptor,
    d: Words,
    shared: NDArray[np.uint8],
) -> tuple[Words, Footprint]:
    """Executes one wgmma.mma_async of a warpgroup.

    a: descriptor, or registers uint32 [4 warps, 4 registers, 32 lanes]. d: registers uint32 [4, d_registers, 32], not
    changed. shared: as in `CtaMemory`. → new registers of D, what was read from shared memory
    """
    size = product.element_bytes
    if d.shape != (4, product.d_registers, 32):
        raise ValueError(f"wgmma: D registers of shape {d.shape}; expected {(4, product.d_registers, 32)}")
    reads = [SharedAccess(0, b, product.n, size, product.mn_major_b)]
    if isinstance(a, SharedDescriptor):
        reads.insert(0, SharedAccess(0, a, 64, size, product.mn_major_a))
        rows = _from_shared(product.a_format, shared, a, 64, product.mn_major_a)
    else:
        rows = formats.decode(product.a_format, _operand_from_registers(a, size))
    columns = _from_shared(product.b_format, shared, b, product.n, product.mn_major_b)
    number = np.dtype(np.float32 if product.d_format == "f32" else np.float16)
    if product.negate_a != product.negate_b:
        rows = -rows
    accumulator = accumulator_from_registers(d, number) if product.accumulate else np.zeros((64, product.n), number)
    result = aligned_product(rows, columns, accumulator, (product.a_format, product.b_format, product.d_format))
    return accumulator_to_registers(result), Footprint(tuple(reads), (), ())


# Rows 16 w + 8 h + g and, for D, columns 8 c + 2 t + p belong to lane 4 g + t of warp w: the fragments are the matrix
# with its axes w, h, g, c, t, p in another order.


def accumulator_from_registers(registers: Words, number: np.dtype) -> NDArray:
    """Registers uint32 [4, r, 32] of D, as `number`, float32 or float16. → [64, N]"""
    parts = np.ascontiguousarray(registers.transpose(0, 2, 1)).view(number)  # w, (g t), (c h p)
    return parts.reshape(4, 8, 4, -1, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, -1)


def accumulator_to_registers(matrix: NDArray) -> Words:
    """The inverse of `accumulator_from_registers`. matrix: float32 or float16 [64, N]"""
    parts = matrix.reshape(4, 2, 8, -1, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    words = np.ascontiguousarray(parts).reshape(4, 32, -1).view(np.uint32)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


def _operand_from_registers(registers: Words, element_bytes: int) -> NDArray:
    """A from registers uint32 [4, 4, 32]. → raw elements [64, K]"""
    if registers.shape != (4, 4, 32):
        raise ValueError(f"wgmma: A registers of shape {registers.shape}; expected (4, 4, 32)")
    raw = np.ascontiguousarray(registers.transpose(0, 2, 1)).view(formats.STORAGE[element_bytes])  # w, (g t), (c h p)
    parts = raw.reshape(4, 8, 4, 2, 2, -1).transpose(0, 4, 1, 3, 2, 5)
    return np.ascontiguousarray(parts).reshape(64, -1)
