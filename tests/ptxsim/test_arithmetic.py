"""Every register-to-register form against numpy, Python integers or exact rationals, on random and nasty values."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx_kernels import run

from ptxsim.ptx.arithmetic import expression

pytestmark = [pytest.mark.ptxsim]
NASTY_FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    3e38,
    -3e38,
    1e-45,
    -1e-40,
    math.inf,
    -math.inf,
    math.nan,
    448.0,
    449.0,
    0.001953125,
]
NASTY_INTEGERS = [0, 1, 2, 31, 32, 33, 63, 64, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00FF00FF, 0xDEADBEEF]
WIDTH = {"f32": 32, "f64": 64, "bf16": 16, "f16": 16}
REGISTER = {16: "%rs", 32: "%r", 64: "%rd"}


def samples(kind: str, count: int = 64) -> np.ndarray:
    """Bits of `count` values of a PTX type. → uint64"""
    generator = np.random.default_rng(len(kind))
    if kind in ("f32", "f32x2"):
        values = np.concatenate(
            [NASTY_FLOATS, generator.standard_normal(count) * 2.0 ** generator.integers(-20, 20, count)]
        )
        bits = values[:count].astype(np.float32).view(np.uint32).astype(np.uint64)
        return bits | np.roll(bits, 1) << np.uint64(32) if kind == "f32x2" else bits
    if kind in ("bf16", "f16"):
        dtype = torch.bfloat16 if kind == "bf16" else torch.float16
        values = torch.from_numpy(np.concatenate([NASTY_FLOATS, generator.standard_normal(count)])[:count]).to(dtype)
        return values.view(torch.int16).numpy().astype(np.uint16).astype(np.uint64)
    width = int(kind.lstrip("bus"))
    values = np.concatenate([NASTY_INTEGERS, generator.integers(0, 1 << 32, count)]).astype(np.uint64)[:count]
    high = np.roll(values, 7) << np.uint64(32) if width == 64 else np.uint64(0)
    return (values | high) & np.uint64((1 << width) - 1)


def evaluate(opcode: str, sources: list[np.ndarray], widths: list[int], result_width: int) -> np.ndarray:
    """Run `opcode d, a, b, …` on lanes; uint64 arrays in and out."""
    count = len(sources[0])
    out = np.zeros(count, np.uint64)
    names = [f"{REGISTER[width]}{40 + i}" for i, width in enumerate(widths)]
    loads = "\n".join(
        f"ld.param.u64 %rd1, [p{i}]; add.s64 %rd1, %rd1, %rd9; ld.global.b{width} {name}, [%rd1];"
        for i, (name, width) in enumerate(zip(names, widths, strict=True))
    )
    target = f"{REGISTER[result_width]}50"
    body = f"""
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd9, %r1, 8;
    {loads}
    {opcode} {target}, {", ".join(names)};
    ld.param.u64 %rd1, [p{len(sources)}]; add.s64 %rd1, %rd1, %rd9; st.global.b{result_width} [%rd1], {target}; ret;
    """
    run(body, *(np.ascontiguousarray(source) for source in sources), out, block=(count, 1, 1))
    return out


def f32(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def same_floats(actual: np.ndarray, expected: np.ndarray) -> bool:
    return bool(
        np.array_equal(actual, expected, equal_nan=True)
        and np.array_equal(np.signbit(actual[~np.isnan(actual)]), np.signbit(expected[~np.isnan(expected)]))
    )


FLOATS = {
    "add.f32": np.add, "sub.f32": np.subtract, "mul.f32": np.multiply, "div.rn.f32": np.divide,
    "max.f32": np.fmax, "min.f32": np.fmin, "max.NaN.f32": np.maximum, "min.NaN.f32": np.minimum,
}  # fmt: skip


@pytest.mark.parametrize("opcode", FLOATS)
def test_float_arithmetic(opcode):
    a, b = samples("f32"), np.roll(samples("f32"), 5)
    with np.errstate(all="ignore"):
        expected = FLOATS[opcode](f32(a), f32(b))
    actual = f32(evaluate(opcode, [a, b], [32, 32], 32))
    keep = ~((actual == 0) & (expected == 0)) if opcode[0] == "m" and opcode[1] in "ai" else np.ones(len(a), bool)
    assert same_floats(actual[keep], expected[keep])  # max(−0, +0) may be either


def exact_rounding(value: Fraction, mode: str) -> float:
    """The float32 that a finite rational rounds to; toward −∞, +∞ or zero."""
    nearest = np.float32(float(value))
    down, up = np.nextafter(nearest, np.float32(-np.inf)), np.nextafter(nearest, np.float32(np.inf))
    below = [x for x in (down, nearest, up) if np.isfinite(x) and Fraction(float(x)) <= value]
    above = [x for x in (down, nearest, up) if np.isfinite(x) and Fraction(float(x)) >= value]
    toward_zero = max(below) if value >= 0 else min(above)
    return float({"rm": max(below), "rp": min(above), "rz": toward_zero}[mode])


@pytest.mark.parametrize("mode", ["rm", "rp", "rz"])
@pytest.mark.parametrize("base", ["add", "mul", "fma"])
def test_directed_rounding_against_rationals(base, mode):
    generator = np.random.default_rng(3)
    sources = [
        generator.standard_normal(64).astype(np.float32) * np.float32(2.0) ** generator.integers(-8, 8, 64)
        for _ in range(3)
    ]
    sources = [each.astype(np.float32) for each in sources[: 3 if base == "fma" else 2]]
    bits = [each.view(np.uint32).astype(np.uint64) for each in sources]
    actual = f32(evaluate(f"{base}.{mode}.f32", bits, [32] * len(bits), 32))
    rationals = zip(*([Fraction(float(x)) for x in each] for each in sources), strict=True)
    formula = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c}[base]
    assert actual.tolist() == [exact_rounding(formula(*each), mode) for each in rationals]


INTEGERS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.lo": lambda a, b: a * b, "min": min, "max": max,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << (b & 0xFFFFFFFF) if (b & 0xFFFFFFFF) < 64 else 0,
    "shr": lambda a, b: a >> min(b & 0xFFFFFFFF, 100),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("base", INTEGERS)
def test_integer_arithmetic(base, kind):
    width, is_signed = int(kind[1:]), kind[0] == "s"
    logical = base in ("and", "or", "xor", "shl")
    a = samples(kind)
    b = np.roll(a, 3) if base not in ("shl", "shr") else samples("u32") % np.uint64(80)
    actual = evaluate(
        f"{base}.{f'b{width}' if logical else kind}", [a, b], [width, 32 if base in ("shl", "shr") else width], width
    )

    def value(bits: int) -> int:
        return bits - (1 << width) if is_signed and bits >> (width - 1) and not logical else bits

    second = (lambda bits: bits) if base in ("shl", "shr") else value
    expected = [
        INTEGERS[base](value(x), second(y)) & (1 << width) - 1 for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert actual.tolist() == expected


@pytest.mark.parametrize(
    "opcode, kind", [("mul.wide.s32", "s32"), ("mul.wide.u32", "u32"), ("mul.hi.s32", "s32"), ("mul.hi.u32", "u32")]
)
def test_wide_products(opcode, kind):
    a, b = samples(kind), np.roll(samples(kind), 3)

    def value(bits: int) -> int:
        return bits - (1 << 32) if kind[0] == "s" and bits >> 31 else bits

    result_width = 64 if "wide" in opcode else 32
    actual = evaluate(opcode, [a, b], [32, 32], result_width)
    shift = 0 if "wide" in opcode else 32
    products = [value(x) * value(y) >> shift for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert actual.tolist() == [product & (1 << result_width) - 1 for product in products]


TORCH_PAIRS = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


@pytest.mark.parametrize("to", TORCH_PAIRS)
def test_conversion_of_pairs_to_half(to):
    a, b = samples("f32"), np.roll(samples("f32"), 5)
    actual = evaluate(f"cvt.rn.{to}.f32", [a, b], [32, 32], 32)
    for shift, source in ((16, a), (0, b)):
        half = torch.from_numpy((actual >> np.uint64(shift)).astype(np.uint16).view(np.int16)).view(TORCH_PAIRS[to])
        expected = torch.from_numpy(f32(source)).to(TORCH_PAIRS[to])
        assert torch.equal(half.nan_to_num(7, 9, -9), expected.nan_to_num(7, 9, -9))


@pytest.mark.parametrize(
    "to, dtype, largest", [("e4m3x2", torch.float8_e4m3fn, 448.0), ("e5m2x2", torch.float8_e5m2, 57344.0)]
)
def test_conversion_to_eight_bits(to, dtype, largest):
    a, b = samples("f32", 512), np.roll(samples("f32", 512), 5)
    actual = evaluate(f"cvt.rn.satfinite.{to}.f32", [a, b], [32, 32], 16)
    for shift, source in ((8, a), (0, b)):
        bytes_ = torch.from_numpy((actual >> np.uint64(shift) & np.uint64(255)).astype(np.uint8))
        expected = torch.from_numpy(f32(source)).clamp(-largest, largest).to(dtype)
        is_nan = expected.float().isnan()
        assert torch.equal(bytes_[~is_nan], expected.view(torch.uint8)[~is_nan]) and (bytes_[is_nan] == 0x7F).all()


def test_pairs_of_half():
    """2^x of both halves, and their cast to E4M3; the second number is the high half."""
    numbers = torch.linspace(-20, 20, 512).to(torch.float16)
    pairs = numbers.view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
    actual = evaluate("ex2.approx.f16x2", [pairs], [32], 32).astype(np.uint32).view(np.float16)
    assert torch.equal(torch.from_numpy(actual), torch.exp2(numbers.float()).to(torch.float16))
    actual = evaluate("cvt.rn.satfinite.e4m3x2.f16x2", [pairs], [32], 16).astype(np.uint16).view(np.uint8)
    assert torch.equal(torch.from_numpy(actual), numbers.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("source, dtype", [("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)])
def test_conversion_from_eight_bits(source, dtype):
    codes = np.arange(256, dtype=np.uint64)
    actual = evaluate(f"cvt.rn.f16x2.{source}", [codes | (codes[::-1] << np.uint64(8))], [16], 32)
    half = torch.from_numpy((actual & np.uint64(0xFFFF)).astype(np.uint16).view(np.int16)).view(torch.float16)
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float16)
    assert torch.equal(half.nan_to_num(7, 9, -9), expected.nan_to_num(7, 9, -9))


def test_conversion_to_scale_bytes():
    """cvt.rp.ue8m0x2: the least power of two that is not below."""
    values = np.concatenate([2.0 ** np.arange(-126, 127), 1.5 * 2.0 ** np.arange(-126, 127)]).astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    actual = evaluate("cvt.rp.satfinite.ue8m0x2.f32", [bits, bits], [32, 32], 16) & np.uint64(255)
    assert actual.tolist() == [math.ceil(math.log2(value)) + 127 for value in values.astype(np.float64).tolist()]


@pytest.mark.parametrize("comparison", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "num", "nan"])
def test_float_comparisons_and_nan(comparison):
    a, b = samples("f32"), np.roll(samples("f32"), 1)
    out = np.zeros(64, np.uint64)
    run(
        f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd9, %r1, 8; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
        ld.param.u64 %rd3, [p2]; add.s64 %rd1, %rd1, %rd9; add.s64 %rd2, %rd2, %rd9; add.s64 %rd3, %rd3, %rd9;
        ld.global.f32 %f1, [%rd1]; ld.global.f32 %f2, [%rd2]; setp.{comparison}.f32 %p1, %f1, %f2;
        selp.b32 %r2, 1, 0, %p1; st.global.b32 [%rd3], %r2; ret;""",
        a, b, out, block=(64, 1, 1),
    )  # fmt: skip
    x, y = f32(a), f32(b)
    unordered = np.isnan(x) | np.isnan(y)
    base = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}
    if comparison in ("num", "nan"):
        expected = unordered if comparison == "nan" else ~unordered
    elif comparison.endswith("u"):
        expected = base[comparison[:-1]] | unordered
    else:
        expected = base[comparison] & ~unordered
    assert out.astype(bool).tolist() == expected.tolist()


def test_prmt_and_bit_fields():
    a, b = samples("b32"), np.roll(samples("b32"), 3)
    selector = np.array([0x5410, 0x7632, 0x0123, 0x9999] * 16, np.uint64)

    def permuted(x: int, y: int, picks: int) -> int:
        bytes_, result = (x | y << 32).to_bytes(8, "little"), 0
        for index in range(4):
            pick = picks >> 4 * index & 15
            byte = bytes_[pick & 7]
            result |= ((255 if byte & 128 else 0) if pick & 8 else byte) << 8 * index
        return result

    actual = evaluate("prmt.b32", [a, b, selector], [32, 32, 32], 32)
    assert actual.tolist() == [permuted(*each) for each in zip(a.tolist(), b.tolist(), selector.tolist(), strict=True)]
    position, length = np.arange(64, dtype=np.uint64) % 32, np.arange(64, dtype=np.uint64) % 9
    actual = evaluate("bfe.u32", [a, position, length], [32, 32, 32], 32)
    fields = [x >> p & (1 << n) - 1 for x, p, n in zip(a.tolist(), position.tolist(), length.tolist(), strict=True)]
    assert actual.tolist() == fields


def test_forms_that_are_not_known_have_no_expression():
    for opcode in ("frobnicate.b32", "add.f128", "cvt.rn.relu.bf16x2.f32", "mul.wide.u64", "setp.lt.pred"):
        assert expression(opcode.split("."), 2) is None
    known = itertools.product(("add", "sub", "mul", "fma"), ("rn", "rz", "rm", "rp"), ("f32", "f32x2"))
    assert all(expression(list(words), 3) for words in known)
