"""What a kernel consists of, read from its PTX without running it.

    python -m ptxsim report kernel.ptx [--kernel NAME] [--json]

Parameters, registers, shared memory, the mix of instructions overall and in each loop, barriers, tensor memory,
products, tensor copies, and the instruction forms that the simulator does not know. Addresses are followed back
through moves and additions of constants to where they come from; what is not found that way stays a register.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ptxsim.machine.decode import decode_system
from ptxsim.ptx.loops import Loop, natural_loops
from ptxsim.ptx.parse import Instruction, Kernel, entry_names, parse_kernel
from ptxsim.ptx.program import NOTHING, Program, Unsupported

FLOAT_TYPES = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")
SPECIAL_FUNCTIONS = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
FAMILIES = {  # first word of the opcode → family
    "bra": "control flow", "ret": "control flow", "exit": "control flow", "trap": "control flow", "setp": "predicates",
    "shfl": "warp communication", "vote": "warp communication", "elect": "warp communication",
    "redux": "warp communication", "match": "warp communication", "activemask": "warp communication",
    "bar": "barrier", "barrier": "barrier", "fence": "fence", "membar": "fence", "atom": "atomic", "red": "atomic",
    "mov": "move", "cvta": "move", "selp": "move", "mapa": "move", "cvt": "conversion",
}  # fmt: skip
DEPTH = 8  # of definitions that an address is followed through
NO_TARGET = ("st", "bra", "bar", "barrier", "tcgen05", "red", "setmaxnreg", "nanosleep", "wgmma")
COLUMN_BITS, ID_SHIFT = 0x3FFFFFFF, 30  # of a tensor-memory address; compilers repeat a scale factor's id above them


def family(instruction: Instruction) -> str:
    """The family that an instruction is counted in."""
    words, opcode = instruction.words, instruction.opcode
    base = words[0]
    if base in ("tcgen05", "wgmma", "mbarrier"):
        return f"{base}.{words[1].split('::')[0]}"
    if base == "cp":
        if re.search(r"(commit|wait)_(group|all)", opcode):
            return "copy groups"
        return "tensor copy" if "tensor" in words else "bulk copy" if "bulk" in words else "cp.async"
    if base in ("ld", "st"):
        spaces = [word.split("::")[0] for word in words[1:]]
        return f"{base}.{next((s for s in ('global', 'shared', 'param', 'local', 'const') if s in spaces), 'generic')}"
    if base in NOTHING or words[:2] == ["bar", "warp"]:
        return "hint"
    if base in FAMILIES:
        return FAMILIES[base]
    if words[-1] == "pred":
        return "predicates"
    if base in SPECIAL_FUNCTIONS:
        return "special function"
    return "floating point" if words[-1] in FLOAT_TYPES else "integer"


def mix(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by family, the most frequent first."""
    return dict(Counter(family(instruction) for instruction in instructions).most_common())


# ---------------------------------------------------------------------------------------------- addresses


@dataclass(frozen=True)
class Value:
    """base + offset, as far as it is known statically; base "": a literal."""

    base: str
    offset: int = 0

    def __str__(self) -> str:
        if not self.base:
            return str(self.offset)
        return self.base + (f"{'+' if self.offset > 0 else '-'}{abs(self.offset):#x}" if self.offset else "")

    def plus(self, other: Value) -> Value:
        """The sum."""
        bases = [base for base in (self.base, other.base) if base]
        return Value("+".join(bases), self.offset + other.offset)


class Values:
    """Where the registers of a kernel come from."""

    def __init__(self, kernel: Kernel):
        self.definitions: dict[str, list[Instruction]] = {}
        for instruction in kernel.instructions:
            target = instruction.operands[0].partition("|")[0].strip() if instruction.operands else ""
            if re.fullmatch(r"%?\w+(@\d+)?", target) and instruction.words[0] not in NO_TARGET:
                self.definitions.setdefault(target, []).append(instruction)

    def of(self, operand: str, depth: int = DEPTH) -> Value:
        """The value of a register, a literal, or what is in the brackets of an address."""
        operand = operand.strip()
        if address := re.fullmatch(r"\[\s*(.*?)\s*(?:\+\s*(-?\w+))?\s*\]", operand):
            value = self.of(address[1], depth)
            return Value(value.base, value.offset + int(address[2] or "0", 0))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return Value("", int(operand.rstrip("U"), 0))
        definitions = self.definitions.get(operand, [])
        if len(definitions) != 1 or depth == 0:
            return Value(operand)
        return self._defined_by(definitions[0], depth - 1) or Value(operand)

    def _defined_by(self, instruction: Instruction, depth: int) -> Value | None:
        words, sources = instruction.words, instruction.operands[1:]
        if words[0] in ("mov", "cvta", "cvt") and not sources[0].startswith("{"):
            return self.of(sources[0], depth)
        if words[0] == "shfl":  # a broadcast, by which compilers make a value uniform
            return self.of(sources[0], depth) if sources[1] == "0" else None
        if words[0] == "add":
            return self.of(sources[0], depth).plus(self.of(sources[1], depth))
        if words[0] == "sub" and not (other := self.of(sources[1], depth)).base:
            return self.of(sources[0], depth).plus(Value("", -other.offset))
        if words[0] == "ld" and "shared" in words and not sources[0].startswith("{"):
            return Value(f"[{self.of(sources[0], depth)}]")
        return None


# ------------------------------------------------------------------------------------------------- survey


class _Survey(Program):
    """A program that remembers what it could not decode."""

    def __init__(self, kernel: Kernel):
        self.unsupported: list[tuple[Instruction, str]] = []
        super().__init__(kernel, decode_system)

    def _decode(self, row: np.void, index: int, instruction: Instruction) -> None:
        try:
            super()._decode(row, index, instruction)
        except Unsupported as error:
            self.unsupported.append((instruction, str(error)))
            raise
        except (KeyError, ValueError, IndexError) as error:  # a form that a decoder does not expect
            self.unsupported.append((instruction, f"{type(error).__name__}: {error}"))
            raise Unsupported(str(error)) from error


@dataclass(frozen=True)
class Use:
    """Something that occurs at some PTX lines."""

    what: str
    lines: list[int]
    detail: str = ""

    def __str__(self) -> str:
        lines = ", ".join(map(str, self.lines[:6])) + (", …" if len(self.lines) > 6 else "")
        times = f"{len(self.lines)} times, " if len(self.lines) > 1 else ""
        return f"{self.what}" + (f" ({self.detail})" if self.detail else "") + f": {times}PTX line {lines}"


@dataclass(frozen=True)
class LoopReport:
    """A loop by PTX lines. is_spin: it does nothing but wait."""

    first_line: int
    last_line: int
    depth: int
    parent_line: int | None
    instructions: dict[str, int]
    is_spin: bool


@dataclass
class Report:
    """The facts about a kernel; `str` is the plain text."""

    kernel: str
    target: str
    parameters: list[dict[str, Any]]
    registers: dict[str, int]
    shared: list[dict[str, Any]]
    instructions: dict[str, int]
    loops: list[LoopReport]
    mbarriers: list[Use]
    named_barriers: list[Use]
    cluster_barriers: list[Use]
    tensor_memory: list[Use]
    products: list[Use]
    copies: list[Use]
    unsupported: list[Use] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(_text(self))


def report(ptx: str, name: str | None = None) -> Report:
    """The report on one kernel of a PTX text, the first if none is named."""
    name = name or entry_names(ptx)[0]
    kernel = parse_kernel(ptx, name)
    survey, values, all_of = _Survey(kernel), Values(kernel), kernel.instructions
    loops = natural_loops(kernel)
    return Report(
        kernel=name,
        target=" ".join(re.findall(r"^\.target\s+(.*?)\s*$", ptx, re.M)),
        parameters=[{"name": p.name, "offset": p.offset, "bytes": p.size} for p in kernel.parameters],
        registers=_registers(ptx, name),
        shared=[{"name": n, "align": s.align, "bytes": s.size} for n, s in kernel.shared.items()],
        instructions=mix(all_of),
        loops=[_loop(kernel, loop) for loop in loops],
        mbarriers=_uses(_mbarriers(kernel, values)),
        named_barriers=_uses(_named_barriers(kernel, values)),
        cluster_barriers=_uses((i.opcode, "", i.line) for i in all_of if i.opcode.startswith("barrier.cluster")),
        tensor_memory=_uses(_tensor_memory(kernel, values)),
        products=_uses((i.opcode, "", i.line) for i in all_of if _is_product(i)),
        copies=_uses((i.opcode, "", i.line) for i in all_of if family(i) in ("tensor copy", "bulk copy", "cp.async")),
        unsupported=_uses((i.opcode, reason, i.line) for i, reason in survey.unsupported),
    )


def _uses(occurrences: Iterable[tuple[str, str, int]]) -> list[Use]:
    """(what, detail, line) gathered by what and detail, in order of first occurrence."""
    gathered: dict[tuple[str, str], list[int]] = {}
    for what, detail, line in occurrences:
        gathered.setdefault((what, detail), []).append(line)
    return [Use(what, lines, detail) for (what, detail), lines in gathered.items()]


def _registers(ptx: str, name: str) -> dict[str, int]:
    """Registers that a kernel declares, by type; those that inline assembly declares in its braces count too."""
    begin = re.search(rf"\.entry\s+{re.escape(name)}\s*\(", ptx)
    following = re.search(r"\.entry\s", ptx[begin.end() :]) if begin else None
    body = ptx[begin.end() : begin.end() + following.start()] if begin and following else ptx[begin.end() :]
    found: Counter[str] = Counter()
    for vector, kind, names in re.findall(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+([^;]+);", body):
        for one in names.split(","):
            count = re.search(r"<(\d+)>", one)
            found[kind] += int(vector or 1) * (int(count[1]) if count else 1)
    return dict(found)


def _loop(kernel: Kernel, loop: Loop) -> LoopReport:
    body = [kernel.instructions[index] for index in sorted(loop.body) if index < len(kernel.instructions)]
    families = mix(body)
    lines = [instruction.line for instruction in body]
    parent = kernel.instructions[loop.parent].line if loop.parent is not None else None
    is_spin = not set(families) - {"mbarrier.try_wait", "mbarrier.test_wait", "control flow", "hint"}
    return LoopReport(min(lines), max(lines), loop.depth, parent, families, is_spin)


def _mbarriers(kernel: Kernel, values: Values) -> Iterator[tuple[str, str, int]]:
    for instruction in kernel.instructions:
        if instruction.opcode.startswith("mbarrier.init"):
            address, count = (values.of(operand) for operand in instruction.operands)
            yield f"[{address}]", f"{count} arrivals", instruction.line


def _named_barriers(kernel: Kernel, values: Values) -> Iterator[tuple[str, str, int]]:
    for instruction in kernel.instructions:
        words = [word for word in instruction.words if word != "cta"]
        if words[0] in ("bar", "barrier") and words[1] in ("sync", "arrive", "red"):
            index, *count = (str(values.of(operand)) for operand in instruction.operands)
            yield f"barrier {index} {words[1]}", f"{count[0] if count else 'all'} threads", instruction.line


def _is_product(instruction: Instruction) -> bool:
    return instruction.words[0] == "mma" or instruction.opcode.startswith(("tcgen05.mma", "wgmma.mma_async"))


def _tensor_memory(kernel: Kernel, values: Values) -> Iterator[tuple[str, str, int]]:
    """Allocations, and the addresses that instructions name."""
    for instruction in kernel.instructions:
        words, operands = instruction.words, instruction.operands
        if words[0] != "tcgen05":
            continue
        if words[1] == "alloc":
            yield (
                f"alloc of {values.of(operands[1])} columns",
                f"address to [{values.of(operands[0])}]",
                instruction.line,
            )
        elif words[1] == "dealloc":
            yield f"dealloc of {values.of(operands[1])} columns", f"at {values.of(operands[0])}", instruction.line
        elif words[1] in ("ld", "st", "cp", "mma"):
            target = operands[1] if words[1] == "ld" else operands[0]
            yield f"{words[1]} at {values.of(target)}", _extent(instruction), instruction.line
            brackets = [operand for operand in operands[1:] if operand.startswith("[")] if words[1] == "mma" else []
            for operand in brackets:
                value = values.of(operand)
                column = Value(value.base, value.offset & COLUMN_BITS)
                yield f"mma reads {column}", f"bits 30–31: {value.offset >> ID_SHIFT & 3}", instruction.line


def _extent(instruction: Instruction) -> str:
    """Shape and repetition of a tensor-memory access."""
    return ".".join(word for word in instruction.words[2:] if re.match(r"\d+x\d|x\d+$|kind::|warpx", word))


# --------------------------------------------------------------------------------------------------- text


def _text(facts: Report) -> Iterator[str]:
    yield f"kernel {facts.kernel}"
    yield f"target {facts.target}"
    yield from _section("parameters", [_parameter(facts, p) for p in facts.parameters])
    yield from _section("registers declared", [_counts(facts.registers)])
    yield from _section(
        "shared memory",
        [
            f"{s['name']}: {s['bytes'] or 'dynamic'}{' bytes' * bool(s['bytes'])}, align {s['align']}"
            for s in facts.shared
        ],
    )
    total = sum(facts.instructions.values())
    yield from _section(f"instructions: {total}", [_counts(facts.instructions)])
    yield from _section("loops", list(_loops(facts.loops)))
    for title, uses in (
        ("mbarriers initialised", facts.mbarriers),
        ("named barriers", facts.named_barriers),
        ("cluster barriers", facts.cluster_barriers),
        ("tensor memory", facts.tensor_memory),
        ("matrix products", facts.products),
        ("copies", facts.copies),
        ("not supported", facts.unsupported),
    ):
        yield from _section(title, [str(use) for use in uses])


def _section(title: str, lines: list[str]) -> Iterator[str]:
    filled = [line for line in lines if line]
    yield f"{title}" + ("" if filled else ": none")
    yield from (f"  {line}" for line in filled)


def _parameter(facts: Report, parameter: dict[str, Any]) -> str:
    name = parameter["name"].removeprefix(facts.kernel).lstrip("_")  # compilers repeat the kernel's name
    return f"{name}: {parameter['bytes']} bytes at {parameter['offset']}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _loops(loops: list[LoopReport]) -> Iterator[str]:
    for loop in loops:
        if not loop.is_spin:
            indent = "  " * (loop.depth - 1)
            total = sum(loop.instructions.values())
            where = f"PTX lines {loop.first_line} … {loop.last_line}"
            yield f"{indent}{where}, {total} instructions: {_counts(loop.instructions)}"
    if spins := [loop.first_line for loop in loops if loop.is_spin]:
        yield f"{len(spins)} loops that only wait, at PTX lines {', '.join(map(str, spins))}"


# ------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ptx", type=Path, help="file of PTX text")
    parser.add_argument("--kernel", metavar="NAME", help="one entry; without it all of them")
    parser.add_argument("--json", action="store_true", help="a JSON list of reports")


def main(arguments: argparse.Namespace) -> int:
    """0: every form is supported. 1: some are not."""
    ptx = arguments.ptx.read_text()
    reports = [report(ptx, name) for name in ([arguments.kernel] if arguments.kernel else entry_names(ptx))]
    if arguments.json:
        print(json.dumps([each.record() for each in reports], indent=1))
    else:
        print("\n\n".join(map(str, reports)))
    return 1 if any(each.unsupported for each in reports) else 0
