"""Arithmetic on pairs of fp16 numbers in one register (PTX `f16x2`): half the instructions of fp32.

A pair is a Uint32, its first number in the low half. Instructions have no side effects, so the compiler may order
them; those of `cute.arch` keep their place.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

MINUS_INFINITY = 0xFC00
LEAST, MOST = 2.0**-24, 65504.0  # positive numbers of fp16


@dsl_user_op
def _assembly(text: str, result: type, *operands, loc=None, ip=None):
    """Result $0 of instructions on $1, $2, …: words or fp32 numbers."""
    letters = ["f" if isinstance(operand, Float32) else "r" for operand in operands]
    is_float = result is Float32
    value = llvm.inline_asm(
        T.f32() if is_float else T.i32(), [operand.ir_value(loc=loc, ip=ip) for operand in operands], text,
        ",".join(["=f" if is_float else "=r", *letters]), has_side_effects=False, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return result(value)


def _on_pairs(text: str, *pairs) -> Uint32:
    return _assembly(text, Uint32, *(Uint32(pair) for pair in pairs))


def max_of_pairs(a: Uint32, b: Uint32) -> Uint32:
    """The other number where one is NaN."""
    return _on_pairs("max.f16x2 $0, $1, $2;", a, b)


def add_pairs(a: Uint32, b: Uint32) -> Uint32:
    return _on_pairs("add.rn.f16x2 $0, $1, $2;", a, b)


def mul_pairs(a: Uint32, b: Uint32) -> Uint32:
    return _on_pairs("mul.rn.f16x2 $0, $1, $2;", a, b)


def fma_pairs(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    return _on_pairs("fma.rn.f16x2 $0, $1, $2, $3;", a, b, c)


def exp2_of_pair(a: Uint32) -> Uint32:
    return _on_pairs("ex2.approx.f16x2 $0, $1;", a)


def e4m3_of_pairs(a: Uint32, b: Uint32) -> Uint32:
    """Four numbers as E4M3 bytes, saturating."""
    text = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f16x2 low, $1; cvt.rn.satfinite.e4m3x2.f16x2 high, $2; "
        "mov.b32 $0, {low, high}; }"
    )
    return _on_pairs(text, a, b)


def pair_of_e4m3(word: Uint32, which: int) -> Uint32:
    """The two E4M3 numbers in the low half of a word (0) or the high half (1), exact."""
    name = ("low", "high")[which]
    text = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.rn.f16x2.e4m3x2 $0, {name}; }}"
    return _on_pairs(text, word)


def pair_of(value: Float32) -> Uint32:
    """The number twice, rounded."""
    return _assembly("cvt.rn.f16x2.f32 $0, $1, $1;", Uint32, Float32(value))


@cute.jit
def pair_of_factor(value: Float32) -> Uint32:
    """A positive number twice, within what fp16 holds, so that it makes neither 0 nor infinity; NaN stays."""
    value = cute.arch.fmin(cute.arch.fmax(value, LEAST, nan=True), MOST, nan=True)
    return pair_of(value)


def pair_of_two(low: Float32, high: Float32) -> Uint32:
    return _assembly("cvt.rn.f16x2.f32 $0, $2, $1;", Uint32, Float32(low), Float32(high))


def largest_of(pair: Uint32) -> Float32:
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; max.f16 low, low, high; cvt.f32.f16 $0, low; }"
    return _assembly(text, Float32, Uint32(pair))


def sum_of_pair(pair: Uint32) -> Float32:
    text = (
        "{ .reg .b16 low, high; .reg .f32 x, y; mov.b32 {low, high}, $1; cvt.f32.f16 x, low; cvt.f32.f16 y, high; "
        "add.f32 $0, x, y; }"
    )
    return _assembly(text, Float32, Uint32(pair))


def floats_of_pair(pair: Uint32) -> tuple[Float32, Float32]:
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, %s; }"
    return tuple(_assembly(text % which, Float32, Uint32(pair)) for which in ("low", "high"))


@cute.jit
def rounded_to_half(value: Float32) -> Float32:
    return value.to(Float16).to(Float32)


@cute.jit
def square_sum_of_e4m3(word: Uint32, total: Float32) -> Float32:
    """The total and the squares of four E4M3 bytes, in fp32."""
    for which in cutlass.range_constexpr(2):
        low, high = floats_of_pair(pair_of_e4m3(word, which))
        total = total + low * low + high * high
    return total
