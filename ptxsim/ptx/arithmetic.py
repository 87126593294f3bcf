"""Register-to-register instructions (PTX ISA, chapter 9.7.1–9.7.6 and 9.7.9), each as one C expression.

The expression works on lanes: `a`, `b`, `c` are the source operands as uint64_t, its value is what the destination
lane becomes. Helpers such as F (bits → float) and UF (float → bits) are in `ptxsim/core/numerics.h`. The table is at
once the list of what is supported: a form it does not know has no expression. Arithmetic in f16 and bf16 is done in
float and rounded once more, so fma of halves may differ from hardware in the last bit.
"""

import re

COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">"} | {
    "hs": ">="
}
BITWISE = {"and": "&", "or": "|", "xor": "^"}
HALF_TYPES = ("bf16", "f16")
ROUNDING = ("rn", "rm", "rp", "rz")
INTEGER = re.compile(r"[bus](8|16|32|64)")
TO_INTEGER = {"rni": "rintf", "rzi": "truncf", "rmi": "floorf", "rpi": "ceilf"}
APPROXIMATE = {
    "ex2": "exp2f({x})", "lg2": "log2f({x})", "rcp": "(1.0f/{x})", "rsqrt": "(1.0f/sqrtf({x}))",
    "sqrt": "sqrtf({x})", "sin": "sinf({x})", "cos": "cosf({x})", "tanh": "tanhf({x})",
}  # fmt: skip
HALF_ARITHMETIC = {
    "add": "({0}+{1})", "sub": "({0}-{1})", "mul": "({0}*{1})", "fma": "fmaf({0},{1},{2})", "max": "fmax_({0},{1})",
    "min": "fmin_({0},{1})", "neg": "(-{0})", "abs": "fabsf({0})", "ex2": "exp2f({0})",
}  # fmt: skip


def expression(words: list[str], num_sources: int) -> str | None:
    """The C expression of an opcode's words, None if the form is not known."""
    base, kind = words[0], words[-1]
    if base == "setp":
        return _compare(words, num_sources)
    if base == "selp":
        return "((c&1)?a:b)"
    if base == "cvt":
        return _convert(words)
    if base == "cvta" or (base == "mov" and kind in ("b64", "u64", "s64", "f64")):
        return "a"
    if base == "mov" and kind in ("b8", "b16", "u16", "s16", "b32", "u32", "s32", "f32"):
        return f"(a&{(1 << int(kind[1:])) - 1:#x}ull)"
    if kind == "pred":
        return _predicate(base)
    if kind in ("f32x2", "bf16x2", "f16x2"):
        return _packed(words)
    if kind in HALF_TYPES:
        return _half(words)
    if kind == "f32":
        return _float(words, num_sources)
    if kind == "f64":
        return _double(base)
    return _integer(words) if INTEGER.fullmatch(kind) else None


def read(kind: str, lane: str) -> str:
    """C value of a lane as a PTX type."""
    helper = {"f32": "F", "f64": "D", "bf16": "BF", "f16": "HF"}.get(kind)
    if helper:
        return f"{helper}({lane})"
    if kind == "pred":
        return f"({lane})"
    return f"((int{kind[1:]}_t)({lane}))" if kind[0] == "s" else f"((uint{kind[1:]}_t)({lane}))"


def store(kind: str, value: str) -> str:
    """Lane bits of a C value of a PTX type."""
    helper = {"f32": "UF", "f64": "UD", "bf16": "F2BF", "f16": "F2HF"}.get(kind)
    return f"{helper}({value})" if helper else f"(uint64_t)(uint{kind[1:]}_t)({value})"


def _predicate(base: str) -> str | None:
    if base in BITWISE:
        return f"((a!=0){BITWISE[base]}(b!=0))"
    return {"mov": "(uint64_t)(a!=0)", "not": "(uint64_t)(a==0)"}.get(base)


def _compare(words: list[str], num_sources: int) -> str | None:
    """setp.cmp[.boolop][.ftz].type; float comparisons with `u` are true for NaN."""
    comparison, kind = words[1], words[-1]
    if kind == "pred":
        return None
    if kind[0] == "f" or kind in HALF_TYPES:
        x, y = (_source(words, kind, lane) for lane in "ab")
        result = {
            "nan": f"({x}!={x}||{y}!={y})",
            "num": f"({x}=={x}&&{y}=={y})",
            "ne": f"({x}<{y}||{x}>{y})",
        }.get(comparison)
        if result is None and comparison in COMPARE:
            result = f"({x}{COMPARE[comparison]}{y})"
        elif result is None:
            result = f"(!({x}=={x}&&{y}=={y})||{x}{COMPARE[comparison[:-1]]}{y})"
    else:
        unsigned = kind.replace("b", "u")
        result = f"({read(unsigned, 'a')}{COMPARE[comparison]}{read(unsigned, 'b')})"
    operator = next((word for word in words[2:-1] if word in BITWISE), None)
    if operator is not None:
        result = f"({result}{BITWISE[operator]}(c!=0))"
    return f"(uint64_t){result}"


def _source(words: list[str], kind: str, lane: str) -> str:
    value = read(kind, lane)
    return f"FTZ({value})" if kind == "f32" and "ftz" in words else value


def _result(words: list[str], value: str) -> str:
    return f"UF(FTZ({value}))" if "ftz" in words else f"UF({value})"


def _rounding(words: list[str]) -> str:
    return next((word for word in words if word in ROUNDING), "rn")


def _rounded(words: list[str], sources: list[str]) -> str:
    """add, sub, mul or fma of floats with the opcode's rounding."""
    count = 3 if words[0] == "fma" else 2
    value = f"{words[0]}_{_rounding(words)}({','.join(sources[:count])})"
    return f"saturate({value})" if "sat" in words else value


def _float(words: list[str], num_sources: int) -> str | None:
    base = words[0]
    sources = [_source(words, "f32", lane) for lane in "abc"]
    if base in ("add", "sub", "mul", "fma"):
        return _result(words, _rounded(words, sources))
    if base in ("max", "min"):
        name = f"f{base}n_" if "NaN" in words else f"f{base}_"
        if "xorsign" in words:
            return f"xorsign(a,b,{name}(fabsf({sources[0]}),fabsf({sources[1]})))"
        if "abs" in words:
            sources = [f"fabsf({source})" for source in sources]
        value = f"{name}({sources[0]},{sources[1]})"
        return f"UF({name}({value},{sources[2]}))" if num_sources == 3 else f"UF({value})"
    if base in ("abs", "neg") and "ftz" in words:
        return f"UF({'fabsf(' if base == 'abs' else '(-'}{sources[0]}))"
    if base == "abs":
        return "(a&0x7fffffffull)"
    if base == "neg":
        return "((a^0x80000000ull)&0xffffffffull)"
    if base == "copysign":
        return "((a&0x80000000ull)|(b&0x7fffffffull))"
    if base == "div":
        return _result(words, f"{sources[0]}/{sources[1]}")
    if base in APPROXIMATE:
        return _result(words, APPROXIMATE[base].format(x=sources[0]))
    return None


def _double(base: str) -> str | None:
    if base in ("add", "sub", "mul", "div"):
        return f"UD(D(a){dict(add='+', sub='-', mul='*', div='/')[base]}D(b))"
    return {"fma": "UD(fma(D(a),D(b),D(c)))", "neg": "(a^0x8000000000000000ull)"}.get(base)


def _packed(words: list[str]) -> str | None:
    """Two values in one register."""
    kind = words[-1][:-2]
    width = 32 if kind == "f32" else 16
    halves = []
    for shift in (0, width):
        sources = [_source(words, kind, f"({lane}>>{shift})") for lane in "abc"]
        if kind == "f32" and words[0] in ("add", "sub", "mul", "fma"):
            halves.append(f"(uint64_t)(uint32_t){_result(words, _rounded(words, sources))}")
        elif kind in HALF_TYPES and words[0] in HALF_ARITHMETIC:
            name = words[0]
            formula = HALF_ARITHMETIC[name]
            if name in ("max", "min") and "NaN" in words:
                formula = formula.replace("_(", "n_(")
            halves.append(store(kind, formula.format(*sources)))
        else:
            return None
    return f"({halves[0]}|({halves[1]}<<{width}))"


def _half(words: list[str]) -> str | None:
    base, kind = words[0], words[-1]
    if len(words) >= 3 and words[-2] == "f32" and base in ("add", "sub", "fma"):  # mixed: sources half, f32 sum
        sources = [read(kind, "a"), read(kind, "b") if base == "fma" else "F(b)", "F(c)"]
        return f"UF({_rounded(words, sources)})"
    if base not in HALF_ARITHMETIC:
        return None
    formula = HALF_ARITHMETIC[base]
    if base in ("max", "min") and "NaN" in words:
        formula = formula.replace("_(", "n_(")
    return store(kind, formula.format(*(read(kind, lane) for lane in "abc")))


def _integer(words: list[str]) -> str | None:
    base, kind = words[0], words[-1]
    width, signed, unsigned = int(kind[1:]), f"int{kind[1:]}_t", f"uint{kind[1:]}_t"
    typed = signed if kind[0] == "s" else unsigned
    zero, minus_one = f"({unsigned})b==0", f"({signed})b==-1" if kind[0] == "s" else "0"  # quotients that C leaves open
    if base in ("add", "sub"):
        return f"(uint64_t)({unsigned})(a{'+' if base == 'add' else '-'}b)"
    if base in BITWISE:
        return f"(a{BITWISE[base]}b)"
    if base in ("mul", "mad"):
        return _multiply(words)
    if base in ("min", "max"):
        value = f"(({typed})a{'<' if base == 'min' else '>'}({typed})b?({typed})a:({typed})b)"
        return f"(uint64_t)({unsigned}){f'({value}<0?0:{value})' if 'relu' in words else value}"
    if base in ("shl", "shr"):
        return _shift(base, kind)
    return {
        "not": f"(uint64_t)({unsigned})(~a)",
        "neg": f"(uint64_t)({unsigned})(0-a)",
        "abs": f"(uint64_t)({unsigned})(({signed})a<0?0-a:a)",
        "div": f"(uint64_t)({unsigned})({zero}?-1:{minus_one}?0-a:({typed})a/({typed})b)",
        "rem": f"(uint64_t)({unsigned})({zero}?a:{minus_one}?0:({typed})a%({typed})b)",
        "popc": f"(uint64_t)__builtin_popcountll(({unsigned})a)",
        "clz": f"(uint64_t)(({unsigned})a==0?{width}:__builtin_clzll(({unsigned})a)-{64 - width})",
        "bfind": f"(uint64_t)(uint32_t)(({unsigned})a==0?-1:63-__builtin_clzll(({unsigned})a))"
        if kind[0] == "u"
        else "",
        "brev": f"brev{width}(a)",
        "bfe": f"bfe_{kind}(a,b,c)" if kind in ("u32", "s32") else "",
        "prmt": "prmt(a,b,c)" if len(words) == 2 else "",
        "sad": f"(uint64_t)({unsigned})(c+(({typed})a<({typed})b?b-a:a-b))",
    }.get(base) or None


def _multiply(words: list[str]) -> str | None:
    kind = words[-1]
    width, added = int(kind[1:]), "+c" if words[0] == "mad" else ""
    sign = "" if kind[0] == "s" else "u"
    narrow, wide = f"{sign}int{width}_t", f"{sign}int{2 * width}_t"
    if "lo" in words:
        return f"(uint64_t)(uint{width}_t)(a*b{added})"
    if "wide" in words and width < 64:
        product = f"({wide})({narrow})a*({wide})({narrow})b"
        return f"(uint64_t)(uint{2 * width}_t)((uint{2 * width}_t)({product}){added})"
    if "hi" in words:
        wide = wide if width < 64 else ("__int128" if kind[0] == "s" else "unsigned __int128")
        return f"(uint64_t)(uint{width}_t)((({wide})({narrow})a*({wide})({narrow})b>>{width}){added})"
    return None


def _shift(base: str, kind: str) -> str:
    """Amounts are 32 bits and clamp at the width."""
    width = int(kind[1:])
    if base == "shl":
        return f"((uint32_t)b>={width}?0ull:(uint64_t)(uint{width}_t)(a<<((uint32_t)b&63)))"
    if kind[0] == "s":
        return f"(uint64_t)(uint{width}_t)((int{width}_t)a>>((uint32_t)b>={width}?{width - 1}:(uint32_t)b))"
    return f"((uint32_t)b>={width}?0ull:(uint64_t)((uint{width}_t)a>>((uint32_t)b&63)))"


def _convert(words: list[str]) -> str | None:
    """cvt[.rounding][.ftz][.satfinite][.relu].to.from"""
    to, source, modifiers = words[-2], words[-1], set(words[1:-2])
    if modifiers & {"relu", "sat"}:
        return None
    if INTEGER.fullmatch(to) and INTEGER.fullmatch(source):
        narrow = f"({'int' if to[0] == 's' else 'uint'}{to[1:]}_t)({read(source, 'a')})"
        return f"(uint64_t)(uint{max(16, int(to[1:]))}_t){narrow}"  # 8-bit results live in 16-bit registers
    if source == "f32" and to in ("bf16x2", "f16x2", "e4m3x2", "e5m2x2", "ue8m0x2"):
        return _convert_pair(to, modifiers)
    if source == "f16x2" and to in ("e4m3x2", "e5m2x2"):
        helper = f"F2{to[:4].upper()}"
        return f"((uint64_t){helper}(HF(a>>16))<<8|{helper}(HF(a)))"
    if source in ("e4m3x2", "e5m2x2") and to == "f16x2":
        helper = f"{source[:4].upper()}2HF"
        return f"({helper}(a&255)|({helper}((a>>8)&255)<<16))"
    if (to, source) == ("bf16x2", "ue8m0x2"):
        return "(E82BF(a&255)|(E82BF((a>>8)&255)<<16))"
    rounding = next((word for word in words[1:-2] if word in TO_INTEGER), None)
    if INTEGER.fullmatch(to) and source in ("f32", *HALF_TYPES):
        known = rounding is not None and to[1:] in ("32", "64")
        return f"f2{to[0]}{to[1:]}({TO_INTEGER[rounding]}({read(source, 'a')}))" if known else None
    if source == "f32" and to == "f32":
        return _result(words, f"{TO_INTEGER[rounding]}(F(a))" if rounding else _source(words, "f32", "a"))
    if {to, source} <= {"f32", "f64", *HALF_TYPES} or INTEGER.fullmatch(source):
        return store(to, f"({'double' if to == 'f64' else 'float'})({read(source, 'a')})")
    return None


def _convert_pair(to: str, modifiers: set[str]) -> str | None:
    """Two floats into one register; the first source goes to the high half."""
    if to in ("bf16x2", "f16x2"):
        helper = "F2BF" if to == "bf16x2" else "F2HF"
        if "satfinite" in modifiers:
            greatest = {"bf16x2": "3.38953139e38f", "f16x2": "65504.0f"}[to]
            return f"(({helper}(within(F(a),{greatest}))<<16)|{helper}(within(F(b),{greatest})))"
        return f"(({helper}(F(a))<<16)|{helper}(F(b)))"
    helpers = {"ue8m0x2": "F2E8_UP" if "rp" in modifiers else "F2E8_DOWN"}
    helper = helpers.get(to, f"F2{to[:4].upper()}")
    return f"((uint64_t){helper}(F(a))<<8|{helper}(F(b)))"
