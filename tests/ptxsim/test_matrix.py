"""Formats, descriptors and products of the tensor cores.

Operands, scale factors and accumulators are placed and read here by loops over the documented rules, independent of the
gathers under test. Values are chosen so that float64 sums are exact in any order: results are compared exactly.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from ptxsim.machine import formats
from ptxsim.machine.aligned_products import LEAST_EXPONENT
from ptxsim.machine.descriptors import InstructionDescriptor, SharedDescriptor, chunk_offsets, element_offsets
from ptxsim.machine.matrix import (
    CtaMemory,
    Footprint,
    Fragment,
    MatrixProduct,
    WarpgroupProduct,
    accumulator_from_registers,
    accumulator_to_registers,
    mma,
    wgmma,
    wgmma_accumulator_layout,
    wgmma_operand_layout,
)

pytestmark = pytest.mark.ptxsim

SHARED_BYTES = 98304
TORCH_TYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


# ------------------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize("name", TORCH_TYPES)
def test_all_codes_decode_as_in_torch(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8) if formats.ELEMENT_BYTES[name] == 1 else np.arange(65536, dtype=np.uint16)
    expected = torch.from_numpy(codes).view(TORCH_TYPES[name]).to(torch.float32).double().numpy()
    np.testing.assert_array_equal(formats.decode(name, codes), expected)


@pytest.mark.parametrize(("name", "exponent_bits", "mantissa_bits"), [("e2m3", 2, 3), ("e3m2", 3, 2), ("e2m1", 2, 1)])
def test_small_formats(name: str, exponent_bits: int, mantissa_bits: int) -> None:
    """Every code, from sign, exponent and mantissa; bits above the format are ignored."""
    bias = 2 ** (exponent_bits - 1) - 1
    for code in range(256):
        mantissa, rest = code % 2**mantissa_bits, code >> mantissa_bits
        exponent, sign = rest % 2**exponent_bits, rest >> exponent_bits & 1
        value = math.ldexp(mantissa + 2**mantissa_bits * (exponent > 0), max(exponent, 1) - bias - mantissa_bits)
        assert formats.table(name)[code] == (-value if sign else value)
    largest = {"e2m3": 7.5, "e3m2": 28.0, "e2m1": 6.0}[name]
    assert formats.table(name).max() == largest


def test_tf32_ignores_the_low_bits() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    decoded = formats.decode("tf32", values.view(np.uint32))
    assert (decoded.astype(np.float32).view(np.uint32) & 0x1FFF == 0).all()
    assert (np.abs(values - decoded) < np.abs(values) * 2.0**-10).all()
    assert (np.abs(decoded) <= np.abs(values)).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "f16"])
def test_encoding_agrees_with_torch(name: str) -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([
        rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32),
        rng.standard_normal(100_000).astype(np.float32) * np.exp2(rng.integers(-20, 12, 100_000)).astype(np.float32),
    ])  # fmt: skip
    expected = torch.from_numpy(values).to(TORCH_TYPES[name]).float().numpy()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = values.astype(np.float64)
    # bf16 has a path of its own for float32. Torch saturates e4m3 only.
    for given in (values, wide):
        decoded = formats.decode(name, formats.encode(name, given, saturate=name == "e4m3"))
        np.testing.assert_array_equal(decoded, expected)
        np.testing.assert_array_equal(np.signbit(decoded[expected == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "f16", "e2m3", "e3m2", "e2m1"])
def test_float64_is_rounded_once(name: str) -> None:
    """Between neighbours: the middle goes to the even code, anything off the middle to the nearer one."""
    known = formats.FORMATS[name]
    codes = np.arange(known.max_code, dtype=np.uint16 if known.bits == 16 else np.uint8)
    low, high = formats.decode(name, codes), formats.decode(name, codes + codes.dtype.type(1))
    middle = (low + high) / 2
    even = codes + codes % 2
    np.testing.assert_array_equal(formats.encode(name, middle), even)
    np.testing.assert_array_equal(formats.encode(name, np.nextafter(middle, 0)), codes)
    np.testing.assert_array_equal(formats.encode(name, np.nextafter(middle, np.inf)), codes + 1)
    np.testing.assert_array_equal(formats.encode(name, low), codes)
    np.testing.assert_array_equal(formats.encode(name, -high), codes + 1 + (1 << (known.bits - 1)))


@pytest.mark.parametrize(("name", "largest"), [("e4m3", 448), ("e5m2", 57344), ("f16", 65504), ("e2m1", 6)])
def test_saturation(name: str, largest: float) -> None:
    values = np.array([1e30, -1e30, np.inf, -np.inf, largest * 1.03, np.nextafter(largest, np.inf)])
    saturated = formats.decode(name, formats.encode(name, values, saturate=True))
    np.testing.assert_array_equal(saturated, largest * np.array([1, -1, 1, -1, 1, 1]))
    if name != "e2m1":
        overflow = formats.decode(name, formats.encode(name, values[:4]))
        np.testing.assert_array_equal(overflow, values[[2, 3, 2, 3]] if name != "e4m3" else [np.nan] * 4)
        nan = formats.encode(name, np.array([np.nan]), saturate=True)
        assert nan[0] == (0x7F if formats.ELEMENT_BYTES[name] == 1 else 0x7FFF)


# -------------------------------------------------------------------------------------------------- descriptors


def slow_offset(descriptor: SharedDescriptor, row: int, k: int, size: int, mn_major: bool) -> int:
    """The canonical layouts of the PTX ISA, written for one element, in units of 16-byte chunks."""
    per_chunk, width = 16 // size, max(descriptor.swizzle // 16, 1)
    leading, stride = descriptor.leading // 16, descriptor.stride // 16
    if mn_major:
        chunk, inside = divmod(row, per_chunk)
        if descriptor.swizzle:  # ((T, W, m), (8, k)) : ((1, T, LBO), (W T, SBO))
            chunks = chunk % width + chunk // width * leading + k % 8 * width + k // 8 * stride
        else:  # ((T, 1, m), (8, k)) : ((1, T, SBO), (T, LBO))
            chunks = chunk * stride + k % 8 + k // 8 * leading
    else:
        chunk, inside = divmod(k, per_chunk)  # ((8, m), (T, 2)) : ((W T, SBO), (1, T or LBO))
        chunks = row % 8 * width + row // 8 * stride + chunk * (1 if descriptor.swizzle else leading)
    address = descriptor.start + 16 * chunks + inside * size
    for bit in range({0: 0, 32: 1, 64: 2, 128: 3}[descriptor.swizzle]):
        address ^= (address >> (7 + bit) & 1) << (4 + bit)
    return address


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("size", "mn_major"), [(1, False), (2, False), (4, False), (1, True), (2, True)])
def test_element_offsets(swizzle: int, size: int, mn_major: bool) -> None:
    rows, k = 24, 32 // size
    for start, leading, stride in ((1024, 2048, 1024), (1024 + 32, 128, 256), (5120 + 64 + 128, 4096, 16)):
        descriptor = SharedDescriptor(start, leading, stride, swizzle)
        offsets = element_offsets(descriptor, rows, k, size, mn_major)
        expected = [[slow_offset(descriptor, r, j, size, mn_major) for j in range(k)] for r in range(rows)]
        np.testing.assert_array_equal(offsets, expected)
        chunks = chunk_offsets(descriptor, rows, k, size, mn_major)
        assert set(chunks.ravel().tolist()) == {offset & ~15 for offset in offsets.ravel().tolist()}


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_shared_descriptors(swizzle: int) -> None:
    descriptor = SharedDescriptor(0x3FFF0, 16, 1024, swizzle)
    tcgen05, wgmma_value = descriptor.encode_tcgen05(), descriptor.encode_wgmma()
    assert tcgen05 & (1 << 46) - 1 == 0x3FFF | 1 << 16 | 64 << 32
    assert tcgen05 >> 61 == {0: 0, 32: 6, 64: 4, 128: 2}[swizzle]
    assert wgmma_value >> 62 == {0: 0, 32: 3, 64: 2, 128: 1}[swizzle]
    assert SharedDescriptor.decode_tcgen05(tcgen05) == descriptor
    assert SharedDescriptor.decode_wgmma(wgmma_value) == descriptor


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (1 << 61, "swizzle 1 in bits 61–63"),
        (3 << 61, "swizzle 3 in bits 61–63"),
        (1 << 50, "base offset 2"),
        (1 << 52, "bit 52"),
        (1 << 55, "bits 53–60"),
    ],
)
def test_shared_descriptors_refuse(value: int, error: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=error):
        SharedDescriptor.decode_tcgen05(value)


def test_instruction_descriptor_bits() -> None:
    value = 1 << 4 | 1 << 7 | 1 << 13 | 1 << 16 | 32 << 17 | 8 << 24
    expected = InstructionDescriptor("f16", 128, 256, "bf16", "f16", negate_a=True, mn_major_b=True)
    assert InstructionDescriptor.decode(value, "f16") == expected
    assert expected.encode() == value
    value = 3 << 4 | 1 << 10 | 12 << 17 | 1 << 23 | 2 << 27 | 2 << 29
    expected = InstructionDescriptor("mxf8f6f4", 256, 96, "e4m3", "e5m2", scale_id_a=2, scale_id_b=3)
    assert InstructionDescriptor.decode(value, "mxf8f6f4") == expected
    assert expected.encode() == value


@pytest.mark.parametrize("kind", ["f16", "tf32", "f8f6f4", "i8", "mxf8f6f4"])
def test_instruction_descriptors_invert(kind: str) -> None:
    a, d = {"tf32": ("tf32", "f32"), "i8": ("s8", "s32"), "f16": ("f16", "f16")}.get(kind, ("e2m1", "f32"))
    for flags in itertools.product((False, True), repeat=4):
        descriptor = InstructionDescriptor(kind, 256, 248, a, a, d, *flags)
        assert InstructionDescriptor.decode(descriptor.encode(), kind) == descriptor


@pytest.mark.parametrize(
    ("value", "kind", "error"),
    [
        (1 << 2, "f16", "sparsity"),
        (1 << 30, "f16", "shift 1 of .ws"),
        (2 << 7, "f16", "A format 2"),
        (2 << 10 | 1 << 4, "f8f6f4", "B format 2"),
        (3 << 4, "f16", "accumulator format 3"),
        (1 << 3, "f16", "saturate"),
        (0, "mxf8f6f4", "scale format ue4m3"),
        (1 << 31 | 1 << 23, "mxf8f6f4", "K size 1"),
        (0, "mxf4", "kind 'mxf4'"),
    ],
)
def test_instruction_descriptors_refuse(value: int, kind: str, error: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=error):
        InstructionDescriptor.decode(value | 8 << 17 | 8 << 24, kind)


@pytest.mark.parametrize(("m", "n", "error"), [(96, 64, "M 96"), (128, 0, "N 0"), (128, 264, "N 264")])
def test_shapes_refused(m: int, n: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        InstructionDescriptor.decode(n // 8 << 17 | m // 16 << 24, "f16")


# --------------------------------------------------------------------------------------------- tcgen05: the stage


def random_codes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Finite codes whose products sum exactly in float64."""
    if name in ("e4m3", "e5m2"):
        codes = rng.integers(0, 0x78, shape, dtype=np.uint8)
        return codes | rng.integers(0, 2, shape, dtype=np.uint8) << np.uint8(7)
    values = (rng.integers(-127, 128, shape) / 16).astype(np.float32)
    if name == "tf32":
        return values.view(np.uint32)
    return values.astype(np.float16).view(np.uint16) if name == "f16" else formats.encode("bf16", values)


def place(shared: np.ndarray, descriptor: SharedDescriptor, codes: np.ndarray, mn_major: bool) -> set[int]:
    """Writes an operand element by element. → addresses of the 16-byte chunks that it occupies"""
    size, chunks = codes.itemsize, set()
    for (row, k), code in np.ndenumerate(codes):
        address = slow_offset(descriptor, row, k, size, mn_major)
        shared[address : address + size].view(codes.dtype)[0] = code
        chunks.add(address & ~15)
    return chunks


def lane_of_row(m: int, num_ctas: int, row: int, half: int, first_lane: int) -> tuple[int, int]:
    """Where a row of the product lies. → CTA, lane; `half` of N matters only where it decides the lane"""
    if m == 64:
        return 0, 32 * (row // 16) + row % 16 + first_lane
    if m == 128 and num_ctas == 2:
        return row // 64, row % 64 + 64 * half
    return row // 128, row % 128


class Stage:
    """Memories of one or two CTAs with random operands for one instruction, and the product they should give."""

    A = SharedDescriptor(2048, 8192, 1024, 128)
    B = SharedDescriptor(32768, 8192, 1024, 128)

    def __init__(self, instruction: InstructionDescriptor, num_ctas: int, seed: int = 0, a_column: int | None = None):
        self.instruction, self.num_ctas, self.a_column = instruction, num_ctas, a_column
        self.rng = rng = np.random.default_rng(seed)
        self.ctas = [
            CtaMemory(rng.integers(0, 256, SHARED_BYTES, np.uint8), rng.integers(0, 1 << 32, (128, 512), np.uint32))
            for _ in range(num_ctas)
        ]
        k = 32 // formats.ELEMENT_BYTES[instruction.a_format]
        self.a = random_codes(rng, instruction.a_format, (instruction.m, k))
        self.b = random_codes(rng, instruction.b_format, (instruction.n, k))
        self.chunks = [self._place(cta, index) for index, cta in enumerate(self.ctas)]
        self.scales_a, self.scales_b = (rng.integers(107, 147, count) for count in (instruction.m, instruction.n))

    def _place(self, cta: CtaMemory, index: int) -> set[int]:
        rows, columns = self.instruction.m // self.num_ctas, self.instruction.n // self.num_ctas
        b = self.b[index * columns : (index + 1) * columns]
        chunks = place(cta.shared, self.B, b, self.instruction.mn_major_b)
        a = self.a[index * rows : (index + 1) * rows]
        if self.a_column is None:
            return chunks | place(cta.shared, self.A, a, self.instruction.mn_major_a)
        for row, half in itertools.product(range(rows), range(2)):
            _, lane = lane_of_row(self.instruction.m, self.num_ctas, row, half, 0)
            words = np.ascontiguousarray(a[row]).view(np.uint32)
            cta.tensor[lane, self.a_column : self.a_column + 8] = words
        return chunks

    def place_scales(self, column_a: int, column_b: int) -> None:
        """The layout that the prototype's rules describe, a byte at a time, everything else left random."""
        instruction, rows = self.instruction, self.instruction.m // self.num_ctas
        for index, cta in enumerate(self.ctas):
            scales = cta.tensor.view(np.uint8)  # byte `id` of column c at 4 c + id
            for row in range(rows):
                code = self.scales_a[index * rows + row]
                lanes = [row] if rows == 128 else [row, row + 64]
                for lane in lanes:
                    scales[lane, 4 * (column_a + row // 32) + instruction.scale_id_a] = code
            for n in range(instruction.n):
                half, inside = divmod(n, instruction.n // 2) if rows == 64 else (0, n)
                for quarter in (2 * half, 2 * half + 1) if rows == 64 else range(4):
                    lane, column = 32 * quarter + inside % 32, column_b + inside // 32
                    scales[lane, 4 * column + instruction.scale_id_b] = self.scales_b[n]

    def product(self) -> np.ndarray:
        """A B with signs and scale factors. → float64 [M, N]"""
        instruction = self.instruction
        a, b = formats.decode(instruction.a_format, self.a), formats.decode(instruction.b_format, self.b)
        if instruction.is_scaled:
            a, b = a * np.exp2(self.scales_a - 127.0)[:, None], b * np.exp2(self.scales_b - 127.0)[:, None]
        return (a @ b.T) * (-1.0) ** (instruction.negate_a + instruction.negate_b)

    def cells(self, column: int, first_lane: int = 0) -> np.ndarray:
        """D read back row by row. → uint32 [M, N]"""
        m, n = self.instruction.m, self.instruction.n
        result = np.empty((m, n), np.uint32)
        per_range = n // 2 if m == 128 and self.num_ctas == 2 else n
        for row, half in itertools.product(range(m), range(n // per_range)):
            cta, lane = lane_of_row(m, self.num_ctas, row, half, first_lane)
            cells = self.ctas[cta].tensor[lane, column : column + per_range]
            result[row, half * per_range : (half + 1) * per_range] = cells
        return result

    def set_cells(self, column: int, number: np.dtype) -> None:
        """Fills every lane's D with small numbers."""
        for cta in self.ctas:
            values = (self.rng.integers(-99, 99, (128, self.instruction.n)) / 4).astype(number)
            cta.tensor[:, column : column + self.instruction.n] = values.view(f"u{values.itemsize}")


def equal_numbers(cells: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(cells.view(np.float32), expected.astype(np.float32))


SHAPES = [(64, 1, 72), (128, 1, 128), (128, 1, 256), (128, 2, 64), (128, 2, 160), (256, 2, 256)]
KINDS = [("f16", "bf16", "bf16"), ("f16", "f16", "bf16"), ("tf32", "tf32", "tf32"), ("f8f6f4", "e4m3", "e5m2")]


@pytest.mark.parametrize(("kind", "a_format", "b_format"), KINDS)
@pytest.mark.parametrize(("m", "num_ctas", "n"), SHAPES)
def test_products(kind: str, a_format: str, b_format: str, m: int, num_ctas: int, n: int) -> None:
    stage = Stage(InstructionDescriptor(kind, m, n, a_format, b_format, negate_b=n == 72), num_ctas, seed=n)
    before = [cta.tensor.copy() for cta in stage.ctas]
    mma(MatrixProduct(stage.instruction, 200, stage.A, stage.B, accumulate=False), stage.ctas)
    equal_numbers(stage.cells(200), stage.product())
    columns = n // 2 if (m, num_ctas) == (128, 2) else n
    for old, cta in zip(before, stage.ctas, strict=True):
        np.testing.assert_array_equal(cta.tensor[:, :200], old[:, :200])
        np.testing.assert_array_equal(cta.tensor[:, 200 + columns :], old[:, 200 + columns :])
        if m == 64:
            np.testing.assert_array_equal(cta.tensor.reshape(4, 32, 512)[:, 16:], old.reshape(4, 32, 512)[:, 16:])


@pytest.mark.parametrize(("m", "num_ctas", "n"), [s for s in SHAPES if s[0] > 64])
@pytest.mark.parametrize("a_column", [None, 480])
def test_block_scaled_products(m: int, num_ctas: int, n: int, a_column: int | None) -> None:
    """Every row and column has its own factor, at random byte ids, twice in a row into the same accumulator."""
    rng = np.random.default_rng(n)
    ids = {"scale_id_a": int(rng.integers(4)), "scale_id_b": int(rng.integers(4))}
    instruction = InstructionDescriptor("mxf8f6f4", m, n, "e4m3", "e5m2" if n == 64 else "e4m3", **ids)
    stage = Stage(instruction, num_ctas, seed=m, a_column=a_column)
    stage.place_scales(300, 310)
    a = stage.A if a_column is None else a_column
    accumulated = np.zeros((m, n))
    for repeat in (1, 2):
        addresses = {"scale_a": 300 | (ids["scale_id_a"] << 30) * (repeat - 1), "scale_b": 310}
        mma(MatrixProduct(instruction, 8, a, stage.B, **addresses, accumulate=repeat > 1), stage.ctas)
        accumulated = (accumulated + stage.product()).astype(np.float32)
        equal_numbers(stage.cells(8), accumulated)


@pytest.mark.parametrize(("kind", "a_format", "b_format"), KINDS)
@pytest.mark.parametrize(("m", "num_ctas"), [(64, 1), (128, 1), (128, 2), (256, 2)])
def test_a_in_tensor_memory(kind: str, a_format: str, b_format: str, m: int, num_ctas: int) -> None:
    stage = Stage(InstructionDescriptor(kind, m, 64, a_format, b_format, negate_a=True), num_ctas, a_column=100)
    mma(MatrixProduct(stage.instruction, 0, 100, stage.B, accumulate=False), stage.ctas)
    equal_numbers(stage.cells(0), stage.product())


@pytest.mark.parametrize(("kind", "a_format", "b_format"), [KINDS[0], KINDS[3]])
@pytest.mark.parametrize(("m", "num_ctas"), [(64, 1), (128, 1), (256, 2)])
def test_mn_major_operands(kind: str, a_format: str, b_format: str, m: int, num_ctas: int) -> None:
    flags = {"mn_major_a": True, "mn_major_b": True}
    stage = Stage(InstructionDescriptor(kind, m, 80, a_format, b_format, **flags), num_ctas)
    mma(MatrixProduct(stage.instruction, 0, stage.A, stage.B, accumulate=False), stage.ctas)
    equal_numbers(stage.cells(0), stage.product())


@pytest.mark.parametrize("d_format", ["f32", "f16"])
@pytest.mark.parametrize("scale", [0, 3])
def test_accumulation(d_format: str, scale: int) -> None:
    number = np.dtype(np.float32 if d_format == "f32" else np.float16)
    stage = Stage(InstructionDescriptor("f16", 64, 32, "f16", "f16", d_format), 1)
    stage.set_cells(40, number)
    unsigned = np.dtype(f"u{number.itemsize}")
    old = stage.cells(40, 16).astype(unsigned).view(number).astype(np.float64)
    mma(MatrixProduct(stage.instruction, 16 << 16 | 40, stage.A, stage.B, scale_input_d=scale), stage.ctas)
    expected = (stage.product() + old * 2.0**-scale).astype(number)
    np.testing.assert_array_equal(stage.cells(40, 16), expected.view(unsigned))


@pytest.mark.parametrize(("m", "num_ctas"), [(64, 1), (128, 1), (128, 2), (256, 2)])
def test_disabled_lanes(m: int, num_ctas: int) -> None:
    stage = Stage(InstructionDescriptor("f16", m, 32, "bf16", "bf16"), num_ctas)
    before = [cta.tensor.copy() for cta in stage.ctas]
    reference = Stage(stage.instruction, num_ctas)
    disabled = int.from_bytes(stage.rng.bytes(16 * num_ctas), "little")
    mma(MatrixProduct(stage.instruction, 0, stage.A, stage.B, accumulate=False), reference.ctas)
    mma(MatrixProduct(stage.instruction, 0, stage.A, stage.B, accumulate=False, disabled_lanes=disabled), stage.ctas)
    for cta, lane in itertools.product(range(num_ctas), range(128)):
        is_disabled = disabled >> (128 * cta + lane) & 1
        expected = before[cta] if is_disabled else reference.ctas[cta].tensor
        np.testing.assert_array_equal(stage.ctas[cta].tensor[lane], expected[lane])


def test_infinities_and_nan() -> None:
    stage = Stage(InstructionDescriptor("f8f6f4", 128, 16, "e5m2", "e4m3"), 1)
    stage.a[0], stage.b[3] = 0x7C, 0x7F
    stage.b[0], stage.b[1] = 0x38, 0xB8
    stage._place(stage.ctas[0], 0)
    mma(MatrixProduct(stage.instruction, 0, stage.A, stage.B, accumulate=False), stage.ctas)
    row = stage.cells(0)[0].view(np.float32)
    assert (row[0], row[1]) == (np.inf, -np.inf)
    assert np.isnan(row[3])


# ----------------------------------------------------------------------------------------- tcgen05: its footprint


def cells_of(accesses: tuple, num_ctas: int) -> np.ndarray:
    """→ how often each cell occurs, int [CTAs, 8 bands of lanes, 512 columns]"""
    counts = np.zeros((num_ctas, 8, 512), int)
    for cta, bands, column, columns in accesses:
        counts[cta, list(bands), column : column + columns] += 1
    return counts


@pytest.mark.parametrize(("m", "num_ctas", "columns"), [(128, 1, 64), (256, 2, 64), (128, 2, 32)])
@pytest.mark.parametrize("a_column", [None, 100])
def test_footprint(m: int, num_ctas: int, columns: int, a_column: int | None) -> None:
    instruction = InstructionDescriptor("mxf8f6f4", m, 64, "e4m3", "e4m3")
    stage = Stage(instruction, num_ctas, a_column=a_column)
    stage.place_scales(300, 310)
    a = stage.A if a_column is None else a_column
    found = mma(MatrixProduct(instruction, 8, a, stage.B, 300, 310), stage.ctas)
    assert isinstance(found, Footprint)
    for index in range(num_ctas):
        offsets = np.concatenate([access.offsets for access in found.shared_reads if access.cta == index])
        assert sorted(offsets.tolist()) == sorted(stage.chunks[index])
    rows = m // num_ctas
    written, read = (np.zeros((num_ctas, 8, 512), int) for _ in range(2))
    written[:, :, 8 : 8 + columns] = 1
    read[:, :, 300 : 300 + rows // 32] += 1
    read[:, :, 310 : 310 + columns // 32] += 1
    if a_column is not None:
        read[:, :, 100:108] += 1
    np.testing.assert_array_equal(cells_of(found.tensor_writes, num_ctas), written)
    np.testing.assert_array_equal(cells_of(found.tensor_reads, num_ctas), read + written)
    overwriting = mma(MatrixProduct(instruction, 8, a, stage.B, 300, 310, accumulate=False), stage.ctas)
    np.testing.assert_array_equal(cells_of(overwriting.tensor_reads, num_ctas), read)


@pytest.mark.parametrize(
    ("fields", "operands", "num_ctas", "error"),
    [
        ({"m": 256}, {}, 1, "M 256 with 1 CTAs"),
        ({"m": 64}, {}, 2, "M 64 with 2 CTAs"),
        ({"n": 72}, {}, 2, "N 72 with 2 CTAs"),
        ({}, {"accumulator": 32 << 16}, 1, "D at lane 32"),
        ({}, {"accumulator": 480}, 1, "D in columns 480 to 543"),
        ({}, {"a": 16 << 16}, 1, "A at lane 16"),
        ({}, {"a": 508}, 1, "A in columns 508 to 515"),
        ({}, {"b": SharedDescriptor(SHARED_BYTES - 1024, 16, 1024, 128)}, 1, "bytes of shared memory"),
        ({"a_format": "e2m1"}, {}, 1, "a_format e2m1"),
        ({"kind": "mxf8f6f4", "m": 64}, {}, 1, "block-scaled with M 64"),
        ({"kind": "mxf8f6f4", "scale_id_a": 1}, {"scale_a": 2 << 30}, 1, "id 2 in their address and 1"),
        ({"kind": "mxf8f6f4"}, {"scale_b": 511}, 1, "scale factors in columns 511"),
        ({"kind": "i8", "a_format": "s8", "b_format": "s8", "d_format": "s32"}, {}, 1, "kind i8"),
    ],
)
def test_products_refuse(fields: dict, operands: dict, num_ctas: int, error: str) -> None:
    defaults = {"kind": "f8f6f4", "m": 128, "n": 64, "a_format": "e4m3", "b_format": "e4m3"}
    instruction = InstructionDescriptor(**{**defaults, **fields})
    ctas = [CtaMemory(np.zeros(SHARED_BYTES, np.uint8), np.zeros((128, 512), np.uint32)) for _ in range(num_ctas)]
    product = MatrixProduct(**{"instruction": instruction, "accumulator": 0, "a": Stage.A, "b": Stage.B, **operands})
    with pytest.raises((ValueError, NotImplementedError, IndexError), match=error):
        mma(product, ctas)


# -------------------------------------------------------------------------------------------------------- wgmma


def test_accumulator_fragment() -> None:
    """The formulas of the PTX ISA for one thread and register at a time."""
    layout = wgmma_accumulator_layout(40)
    for thread, i in itertools.product(range(128), range(20)):
        warp, lane = divmod(thread, 32)
        assert layout.row[thread, i] == lane // 4 + 8 * ((i // 2) % 2) + 16 * warp
        assert layout.column[thread, i] == (i // 4) * 8 + (lane % 4) * 2 + i % 2
    assert len({*zip(layout.row.ravel().tolist(), layout.column.ravel().tolist(), strict=True)}) == 64 * 40


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_operand_fragment(element_bytes: int) -> None:
    """As mma.sync's m16n8 fragments of A: 8 × 16-byte quarters, registers down first, then along K."""
    layout = wgmma_operand_layout(element_bytes)
    per_register = 4 // element_bytes
    for thread, register, j in itertools.product(range(128), range(4), range(per_register)):
        warp, lane = divmod(thread, 32)
        i = register * per_register + j
        row = 16 * warp + lane // 4 + (8 if register in (1, 3) else 0)
        column = lane % 4 * per_register + j + (16 // element_bytes if register >= 2 else 0)
        assert (layout.row[thread, i], layout.column[thread, i]) == (row, column)


def registers_of(matrix: np.ndarray, layout: Fragment) -> np.ndarray:
    """The fragments of a matrix, by the maps. → uint32 [4, registers, 32]"""
    words = np.ascontiguousarray(matrix[layout.row, layout.column]).view(np.uint32)
    return np.stack([words[32 * warp : 32 * warp + 32].T for warp in range(4)])


@pytest.mark.parametrize("number", [np.float32, np.float16])
@pytest.mark.parametrize("n", [8, 64, 256])
def test_accumulator_registers(number: type, n: int) -> None:
    matrix = np.arange(64 * n).reshape(64, n).astype(number)
    registers = registers_of(matrix, wgmma_accumulator_layout(n))
    np.testing.assert_array_equal(accumulator_to_registers(matrix), registers)
    np.testing.assert_array_equal(accumulator_from_registers(registers, np.dtype(number)), matrix)


WGMMA_CASES = [
    ("bf16", "bf16", "f32", False, False),
    ("bf16", "bf16", "f32", True, True),
    ("f16", "f16", "f16", False, True),
    ("f16", "f16", "f32", False, False),
    ("tf32", "tf32", "f32", False, False),
    ("e4m3", "e5m2", "f32", False, False),
]


def exponents(values: np.ndarray, least: int) -> np.ndarray:
    return np.where(values == 0, -9999, np.maximum(np.frexp(values)[1] - 1, least))


def cut_sum(a: np.ndarray, b: np.ndarray, d: np.ndarray, names: tuple[str, str]) -> np.ndarray:
    """A Bᵀ + D with each term cut behind the largest exponent, and the sum behind its own."""
    fraction, kept = (13, 13) if names[0] in ("e4m3", "e5m2") else (25, 23)
    of_a, of_b = (exponents(x, LEAST_EXPONENT[name]) for x, name in zip((a, b), names, strict=True))
    terms = np.concatenate([a[:, None] * b[None], d[..., None].astype(float)], axis=-1)
    each = np.concatenate([of_a[:, None] + of_b[None], exponents(d, -126)[..., None]], axis=-1)
    unit = np.exp2(each.max(-1) - fraction)
    total = np.trunc(terms / unit[..., None]).sum(-1) * unit
    step = np.exp2(np.maximum(exponents(total, -1000), -999.0) - kept)
    return (np.trunc(total / step) * step if d.dtype == np.float32 else total).astype(d.dtype)


@pytest.mark.parametrize("case", WGMMA_CASES)
@pytest.mark.parametrize("n", [8, 96, 256])
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_wgmma(case: tuple[str, str, str, bool, bool], n: int, a_in_registers: bool) -> None:
    a_format, b_format, d_format, mn_major_a, mn_major_b = case
    rng = np.random.default_rng(n)
    size = formats.ELEMENT_BYTES[a_format]
    flags = {"negate_a": n == 96, "mn_major_a": mn_major_a, "mn_major_b": mn_major_b}
    product = WarpgroupProduct(n, a_format, b_format, d_format, **flags)
    a_codes = random_codes(rng, a_format, (64, 32 // size))
    b_codes = random_codes(rng, b_format, (n, 32 // size))
    shared = rng.integers(0, 256, SHARED_BYTES, np.uint8)
    chunks = place(shared, Stage.B, b_codes, mn_major_b)
    if a_in_registers:
        a = registers_of(a_codes, wgmma_operand_layout(size))
    else:
        a = Stage.A
        chunks |= place(shared, Stage.A, a_codes, mn_major_a)
    number = np.dtype(np.float32 if d_format == "f32" else np.float16)
    old = (rng.integers(-99, 99, (64, n)) / 4).astype(number)
    d = registers_of(old, wgmma_accumulator_layout(n))
    kept = d.copy()
    result, footprint = wgmma(product, a, Stage.B, d, shared)
    rows, columns = formats.decode(a_format, a_codes), formats.decode(b_format, b_codes)
    expected = cut_sum(-rows if n == 96 else rows, columns, old, (a_format, b_format))
    np.testing.assert_array_equal(result, registers_of(expected, wgmma_accumulator_layout(n)))
    np.testing.assert_array_equal(d, kept)
    offsets = np.concatenate([access.offsets for access in footprint.shared_reads])
    assert sorted(offsets.tolist()) == sorted(chunks)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"n": 12}, "N 12"),
        ({"a_format": "s8"}, "a_format s8"),
        ({"a_format": "f16"}, "a_format f16 with b_format bf16"),
        ({"a_format": "e4m3", "b_format": "e4m3", "mn_major_b": True}, "MN-major operand of e4m3"),
        ({"d_format": "s32"}, "d_format s32"),
    ],
)
def test_wgmma_refuses(fields: dict, error: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=error):
        WarpgroupProduct(**{"n": 64, "a_format": "bf16", "b_format": "bf16", **fields})
