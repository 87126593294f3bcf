"""The arithmetic forms that the simulator supports, each with a test vector computed by the SIMT core.

    python -m ptxsim forms [--match REGEX] [--json]

A core with all of them takes gcc the better part of a minute; it is kept, in a folder of its own, because a core that
kernels load should hold no more than they need.

`SPELLINGS` lists the forms of the PTX ISA (chapters 9.7.1–9.7.6 and 9.7.9) that kernels are compiled to; those that
`ptxsim.ptx.arithmetic` has no expression for are left out. Registers are shown as 64-bit words in hexadecimal, floats
as their bits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import numpy as np

from ptxsim.host.build import cache_folder
from ptxsim.machine.decode import decode_system
from ptxsim.machine.grid import Grid, Options
from ptxsim.ptx.arithmetic import expression
from ptxsim.ptx.parse import parse_kernel
from ptxsim.ptx.program import Program

_INTEGERS, _BITS = "{u16,s16,u32,s32,u64,s64}", "{b16,b32,b64}"
_ORDER, _FLOAT_ORDER = "{eq,ne,lt,le,gt,ge}", "{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}"
SPELLINGS = {  # number of sources → spellings; {a,b} stands for either
    1: (
        f"mov.{_BITS}", "mov.{u16,s16,u32,s32,u64,s64,f32,f64,pred}", "not.{b16,b32,b64,pred}", "neg.{s16,s32,s64}",
        "abs.{s16,s32,s64}", "popc.{b32,b64}", "clz.{b32,b64}", "brev.{b32,b64}", "bfind.u32",
        "{abs,neg}{,.ftz}.f32", "{abs,neg}.{f16,bf16,f16x2,bf16x2}", "neg.f64",
        "{ex2,lg2,sin,cos,tanh,rcp,rsqrt,sqrt}.approx{,.ftz}.f32", "{rcp,sqrt}.rn{,.ftz}.f32",
        "cvt.{u16,s16,u32,s32,u64,s64}.{u8,s8,u16,s16,u32,s32,u64,s64}", "cvt.{u8,s8}.{u16,s16,u32,s32}",
        "cvt.{rni,rzi,rmi,rpi}.{u32,s32,s64}.f32", "cvt.rn.{f32,f64}.{u16,s16,u32,s32,u64,s64}",
        "cvt.{rni,rzi,rmi,rpi}.f32.f32", "cvt.rn.{f16,bf16}.f32", "cvt.f32.{f16,bf16}", "cvt.rn.f32.f64",
        "cvt.f64.f32", "cvt.rn.f16x2.{e4m3x2,e5m2x2}", "cvt.rn.bf16x2.ue8m0x2",
    ),
    2: (
        f"{{add,sub}}.{_INTEGERS}", "mul.{lo,hi}.{u16,s16,u32,s32,u64,s64}", "mul.wide.{u16,s16,u32,s32}",
        "{div,rem,min,max}.{u16,s16,u32,s32,u64,s64}", "{min,max}.relu.s32", "{and,or,xor}.{b16,b32,b64,pred}",
        f"shl.{_BITS}", f"shr.{_INTEGERS}", f"shr.{_BITS}", "{add,sub,mul}{,.rn,.rm,.rp,.rz}{,.ftz}{,.sat}.f32",
        "{min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f32", "copysign.f32", "div.{rn,full,approx}{,.ftz}.f32",
        "{add,sub,mul}{,.rn,.rm,.rp,.rz}{,.ftz}.f32x2", "{add,sub,mul}{,.rn}.{f16,bf16,f16x2,bf16x2}",
        "{min,max}{,.NaN}.{f16,bf16,f16x2,bf16x2}", "{add,sub}{,.rn,.rm,.rp,.rz}.f32.{f16,bf16}",
        "{add,sub,mul,div}.rn.f64", f"setp.{_ORDER}.{{u16,s16,u32,s32,u64,s64}}", f"setp.{{eq,ne}}.{_BITS}",
        f"setp.{_FLOAT_ORDER}{{,.ftz}}.f32", f"setp.{_ORDER}.{{f16,bf16}}",
        "cvt.rn{,.satfinite}.{bf16x2,f16x2}.f32", "cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32",
        "cvt.{rp,rz}.satfinite.ue8m0x2.f32",
    ),
    3: (
        "mad.{lo,hi}.{u16,s16,u32,s32,u64,s64}", "mad.wide.{u16,s16,u32,s32}", "fma{.rn,.rm,.rp,.rz}{,.ftz}{,.sat}.f32",
        "fma{.rn,.rm,.rp,.rz}{,.ftz}.f32x2", "fma.rn.{f16,bf16,f16x2,bf16x2}", "fma.rn.f32.{f16,bf16}", "fma.rn.f64",
        "{min,max}{,.NaN}.f32", "selp.{b16,b32,b64,u16,s16,u32,s32,u64,s64,f32}", "bfe.{u32,s32}", "prmt.b32",
        "sad.{u32,s32}", "setp.{eq,ne,lt,le,gt,ge}.{and,or,xor}.{u32,s32,f32}",
    ),
}  # fmt: skip
_SOURCES = ("%rd1", "%rd2", "%rd3")


@dataclass(frozen=True)
class Form:
    """One opcode with the values of its sources and what the core makes of them, as 64-bit words."""

    opcode: str
    sources: tuple[int, ...]
    result: int

    def __str__(self) -> str:
        sources = " ".join(f"{source:#018x}" for source in self.sources)
        return f"{self.opcode:32} {sources} -> {self.result:#x}"


def spelled(pattern: str) -> Iterator[str]:
    """Every opcode that a spelling with alternatives in braces stands for."""
    parts = re.split(r"(\{[^}]*\})", pattern)
    choices = [part[1:-1].split(",") if part.startswith("{") else [part] for part in parts]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def supported_forms(match: str = "") -> list[Form]:
    """All forms whose opcode matches, with their test vectors, computed in one run of the core."""
    wanted = [
        (opcode, _vector(opcode, count))
        for count, patterns in SPELLINGS.items()
        for opcode in dict.fromkeys(opcode for pattern in patterns for opcode in spelled(pattern))
        if re.search(match, opcode) and _is_known(opcode, count)
    ]
    results = _compute(wanted)
    return [Form(opcode, sources, result) for (opcode, sources), result in zip(wanted, results, strict=True)]


def _is_known(opcode: str, num_sources: int) -> bool:
    return expression(opcode.split("."), num_sources) is not None


def _vector(opcode: str, num_sources: int) -> tuple[int, ...]:
    """Values for the sources: not special ones, but signs, carries and roundings differ."""
    words = opcode.split(".")
    kind, base = words[-1], words[0]
    if base == "prmt":
        return 0x33221100, 0x77665544, 0x7531
    if base == "bfe":
        return 0x89ABCDEF, 4, 12
    values: dict[str, list[int]] = {
        "pred": [1, 0, 1],
        "f32": [_bits("<f", number) for number in (1.37, -2.61, 0.83)],
        "f64": [_bits("<d", number) for number in (1.37, -2.61, 0.83)],
        "f16": [_bits("<e", number) for number in (1.37, -2.61, 0.83)],
        "bf16": [_bits("<f", number) >> 16 for number in (1.37, -2.61, 0.83)],
        "e4m3x2": [0x4DB7], "e5m2x2": [0x41C2], "ue8m0x2": [0x7E82],
    }  # fmt: skip
    for half, width in (("f16", 16), ("bf16", 16), ("f32", 32)):
        first = values[half]
        values[f"{half}x2"] = [value | first[(index + 1) % 3] << width for index, value in enumerate(first)]
    if kind not in values:
        width = int(kind[1:])
        numbers = (-100 if kind[0] == "s" else 0xFEDCBA9876543210, 7, 3)
        values[kind] = [number & ((1 << width) - 1) for number in numbers]
    chosen = list(values[kind])
    if base in ("add", "sub") and words[-2] == "f32":  # a half is added to a float
        chosen[1] = values["f32"][1]
    if base == "fma" and words[-2] == "f32":
        chosen[2] = values["f32"][2]
    if base == "selp" or (base == "setp" and num_sources == 3):
        chosen[2] = 1
    if base == "mad" and "wide" in words:
        chosen[2] = 5
    return tuple(chosen[:num_sources])


def _bits(form: str, number: float) -> int:
    return int.from_bytes(struct.pack(form, number), "little")


def _compute(wanted: list[tuple[str, tuple[int, ...]]]) -> list[int]:
    """Run all forms in one kernel; its registers hold 64 bits of anything, which the core allows."""
    body = ["ld.param.u64 %rd0, [out];"]
    for place, (opcode, sources) in enumerate(wanted):
        body += [f"mov.b64 {name}, {value};" for name, value in zip(_SOURCES, sources, strict=False)]
        body.append(f"{opcode} %rd4, {', '.join(_SOURCES[: len(sources)])};")
        body.append(f"st.global.b64 [%rd0+{8 * place}], %rd4;")
    text = ".visible .entry forms(\n.param .u64 out\n)\n{\n.reg .b64 %rd<5>;\n" + "\n".join(body) + "\nret;\n}\n"
    out = np.zeros(max(1, len(wanted)), np.uint64)
    parameters = {"out": out.ctypes.data.to_bytes(8, "little")}
    one = (1, 1, 1)
    launch = SimpleNamespace(params=parameters, grid=one, block=one, cluster=one, shared_bytes=0)
    with _own_cache():
        program = Program(parse_kernel(text, "forms"), decode_system)
    Grid(program, launch, Options(), num_sms=1).run()
    return [int(value) for value in out[: len(wanted)]]


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Cores that are built in the block are kept apart from those for kernels."""
    chosen, folder = os.environ.get("PTXSIM_CACHE"), cache_folder() / "forms"
    os.environ["PTXSIM_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("PTXSIM_CACHE")
        if chosen is not None:
            os.environ["PTXSIM_CACHE"] = chosen


# ------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--match", default="", metavar="REGEX", help="opcodes to show")
    parser.add_argument("--json", action="store_true", help="a JSON list")


def main(arguments: argparse.Namespace) -> int:
    forms = supported_forms(arguments.match)
    print(json.dumps([asdict(form) for form in forms]) if arguments.json else "\n".join(map(str, forms)))
    return 0
