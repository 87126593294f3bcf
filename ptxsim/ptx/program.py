"""Kernel → `Program`: instructions for the SIMT core, and handlers for those that need the machine.

Every operand becomes a register: immediates are registers that hold a constant, special registers and symbols are
registers that are filled in for each warp. A 128-bit register takes two consecutive ones, low half first.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ptxsim.core import binding
from ptxsim.core.binding import INSTRUCTION, OPCODE
from ptxsim.ptx.arithmetic import expression
from ptxsim.ptx.parse import TYPE_BITS, Instruction, Kernel

NOTHING = ("prefetch", "prefetchu", "setmaxnreg", "griddepcontrol", "nanosleep", "discard", "applypriority", "pmevent")
SYSTEM = (
    "mbarrier", "tcgen05", "wgmma", "cp", "bar", "barrier", "fence", "membar", "mapa", "getctarank", "tensormap",
    "clusterlaunchcontrol", "atom", "red", "trap", "stmatrix", "ldmatrix", "movmatrix", "createpolicy", "mma",
)  # fmt: skip
WARP_WIDE = ("bar", "barrier", "elect", "shfl", "vote", "redux", "match", "stmatrix", "ldmatrix", "movmatrix", "wgmma")
SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|laneid|warpid|nwarpid|cluster_\w+|clusterid|nclusterid|is_explicit_cluster|smid|nsmid|"
    r"dynamic_smem_size|total_smem_size|clock|clock64|globaltimer|lanemask_\w+)(\.[xyz])?"
)
REDUX = ("add", "and", "or", "xor", "min_s32", "max_s32", "min_u32", "max_u32", "min_f32", "max_f32")
D, A, B, C = (1 << slot for slot in range(4))

COMMON_FORMS = Path(__file__).parent / "common_forms.txt"

Handler = Callable[[Any, int], Any]  # (warp, lanes) → what the lanes wait for


@functools.cache
def common_expressions() -> tuple[str, ...]:
    """Of forms that kernels use: in every core from the start, so that few programs need a new one."""
    forms = COMMON_FORMS.read_text().split()
    return tuple(text for form in forms if (text := expression(form.split("."), 2)))


class Unsupported(NotImplementedError):
    """An instruction form that the simulator does not know."""


class Program:
    """A kernel ready to run."""

    def __init__(self, kernel: Kernel, decode_system: Callable[["Program", Instruction], Handler]):
        self.kernel = kernel
        self.registers: dict[str, int] = {}
        self.constants: dict[int, int] = {}  # value → register
        self.specials: dict[str, int] = {}  # special register or symbol → register
        self.num_registers = 1
        self.handlers: dict[int, Handler] = {}
        self.system_registers: dict[int, list[int]] = {}  # registers that a handler reads or writes
        self._decode_system = decode_system
        self._named: list[int] = []
        self._expressions: dict[int, str] = {}
        table = np.zeros(len(kernel.instructions) + 1, INSTRUCTION)
        table["guard"] = -1
        for index, instruction in enumerate(kernel.instructions):
            try:
                self._decode(table[index], index, instruction)
            except Unsupported as error:
                table[index]["op"] = OPCODE["SYSTEM"]
                self.handlers[index] = _raise(f"{instruction.where()}: {instruction}: {error}")
        table[-1]["op"] = OPCODE["RETURN"]
        self.core = binding.load_core([*common_expressions(), *self._expressions.values()])
        for index, text in self._expressions.items():
            table[index]["op"] = self.core.opcodes[text]
        self.table = table

    # ------------------------------------------------------------------------------------------- operands

    def register(self, operand: str) -> int:
        """The register of any operand: a register, an immediate, a special register, a symbol."""
        operand = operand.strip()
        if operand in self.registers:
            return self._name(self.registers[operand])
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", operand):
            return self.constant(int(operand[2:], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return self.constant(int(operand.rstrip("U"), 0))
        self.registers[operand] = self._new(2 if operand in self.kernel.wide_registers else 1)
        is_symbol = (
            operand in self.kernel.shared
            or operand in self.kernel.local
            or any(p.name == operand for p in self.kernel.parameters)
        )
        if is_symbol or SPECIAL.fullmatch(operand):
            self.specials[operand] = self.registers[operand]
        return self._name(self.registers[operand])

    def constant(self, value: int) -> int:
        value &= (1 << 64) - 1
        if value not in self.constants:
            self.constants[value] = self._new()
        return self.constants[value]

    def address(self, operand: str) -> tuple[int, int]:
        """`[register+offset]` → (register, offset in bytes)."""
        found = re.fullmatch(r"\[\s*([^\]+]+?)\s*(?:\+\s*(-?(?:0x[0-9a-fA-F]+|\d+))\s*)?\]", operand)
        if found is None:
            raise Unsupported(f"address {operand}")
        return self.register(found[1]), int(found[2] or "0", 0)

    def vector(self, operand: str) -> list[int]:
        """The registers of `{a, b, …}`, of a vector register, or of one register."""
        operand = operand.strip()
        if operand in self.kernel.vector_registers:
            return [self.register(f"{operand}.{axis}") for axis in "xyzw"[: self.kernel.vector_registers[operand]]]
        return [self.register(part) for part in operand.strip("{}").split(",")]

    def _new(self, count: int = 1) -> int:
        first = self.num_registers
        self.num_registers += count
        return first

    def _name(self, register: int) -> int:
        self._named.append(register)
        return register

    # --------------------------------------------------------------------------------------- instructions

    def _decode(self, row: np.void, index: int, instruction: Instruction) -> None:
        words = instruction.words
        if instruction.predicate is not None:
            row["guard"], row["is_negated"] = self.register(instruction.predicate), instruction.is_negated
        row["needs_warp"] = _needs_warp(words)
        base = words[0]
        if base in NOTHING or words[:2] == ["bar", "warp"]:
            row["op"] = OPCODE["NOTHING"]
        elif base == "bra":
            row["op"], row["target"] = OPCODE["BRANCH"], self.kernel.labels[instruction.operands[0]]
        elif base in ("ret", "exit"):
            row["op"] = OPCODE["RETURN"]
        elif base in SYSTEM or (base == "st" and "async" in words):
            self._named = []
            row["op"], self.handlers[index] = OPCODE["SYSTEM"], self._decode_system(self, instruction)
            self.system_registers[index] = [register for register in self._named if register > 0]
        elif base in ("ld", "st"):
            self._memory(row, instruction)
        elif base in _WARP_FORMS:
            _WARP_FORMS[base](self, row, instruction)
        elif base == "mov" and (instruction.operands[0][0] == "{" or instruction.operands[1][0] == "{"):
            self._pack(row, instruction)
        elif instruction.opcode == "mov.b128":
            self._move128(row, instruction)
        else:
            self._arithmetic(row, index, instruction)

    def _arithmetic(self, row: np.void, index: int, instruction: Instruction) -> None:
        target, *sources = instruction.operands
        text = expression(instruction.words, len(sources))
        if text is None or "|" in target or any(source.startswith("!") for source in sources) or len(sources) > 3:
            raise Unsupported("no semantics for this form")
        self._expressions[index] = text
        row["d"], row["writes"] = self.register(target), D
        row["is_selection"], row["is_move"] = instruction.words[0] == "selp", instruction.words[0] == "mov"
        for slot, (name, source) in enumerate(zip("abc", sources, strict=False), 1):
            row[name] = self.register(source)
            row["reads"] |= 1 << slot

    def _memory(self, row: np.void, instruction: Instruction) -> None:
        words, is_load = instruction.words, instruction.words[0] == "ld"
        value, address = instruction.operands if is_load else reversed(instruction.operands)
        spaces = [word.split("::")[0] for word in words[1:-1]]
        if "const" in spaces:
            raise Unsupported("constant memory")
        registers, element_bytes = self.vector(value), TYPE_BITS[words[-1]] // 8
        if element_bytes > 8 or len(registers) > 8:
            raise Unsupported("elements of 128 bits, or more than eight")
        row["op"] = OPCODE["LOAD" if is_load else "STORE"]
        row["a"], row["immediate"] = self.address(address)
        row["count"], row["element_bytes"], row["is_signed"] = len(registers), element_bytes, words[-1][0] == "s"
        named = ("global" if space == "param" else space for space in spaces)
        row["space"] = binding.SPACES.index(next((space for space in named if space in binding.SPACES), "generic"))
        row["vector"][: len(registers)] = registers
        slots = ((1 << len(registers)) - 1) << 4
        row["reads"], row["writes"] = (A, slots) if is_load else (A | slots, 0)

    def _pack(self, row: np.void, instruction: Instruction) -> None:
        """mov.bN d, {a, b} and mov.bN {a, b}, d; `_` drops a part."""
        target, source = instruction.operands
        is_unpack = target.startswith("{")
        parts = (target if is_unpack else source).strip("{}").split(",")
        registers = [0 if part.strip() == "_" else self.register(part) for part in parts]
        width = TYPE_BITS[instruction.words[-1]]
        if width == 128:
            self._move128(row, instruction)
            return
        row["op"], row["count"], row["is_move"] = OPCODE["UNPACK" if is_unpack else "PACK"], len(registers), True
        row["immediate"] = width // len(registers)
        row["vector"][: len(registers)] = registers
        slots = ((1 << len(registers)) - 1) << 4
        if is_unpack:
            row["a"], row["reads"], row["writes"] = self.register(source), A, slots
        else:
            row["d"], row["reads"], row["writes"] = self.register(target), slots, D

    def _move128(self, row: np.void, instruction: Instruction) -> None:
        def halves(operand: str) -> list[int]:
            if operand.startswith("{"):
                return self.vector(operand)
            return [self.register(operand), self.register(operand) + 1]

        target, source = instruction.operands
        row["op"], row["count"], row["is_move"] = OPCODE["MOVE128"], 4, True
        row["vector"][:4] = halves(source) + halves(target)
        row["reads"], row["writes"] = 0b11 << 4, 0b11 << 6

    def _shuffle(self, row: np.void, instruction: Instruction) -> None:
        target, _, predicate = instruction.operands[0].partition("|")
        row["op"], row["d"], row["writes"] = OPCODE["SHUFFLE"], self.register(target), D
        row["immediate"] = ("up", "down", "bfly", "idx").index(instruction.words[2])
        row["a"], row["b"], row["c"] = (self.register(operand) for operand in instruction.operands[1:4])
        row["reads"] = A | B | C
        if predicate:
            row["vector"][0] = self.register(predicate)
            row["writes"] |= 1 << 4

    def _vote(self, row: np.void, instruction: Instruction) -> None:
        source = instruction.operands[1]
        row["op"] = OPCODE[instruction.words[2].upper()]
        row["d"], row["a"] = self.register(instruction.operands[0]), self.register(source.lstrip("!"))
        row["immediate"], row["reads"], row["writes"] = source.startswith("!"), A, D

    def _redux(self, row: np.void, instruction: Instruction) -> None:
        words = instruction.words
        kind = f"{words[2]}_{words[-1]}" if words[2] in ("min", "max") else words[2]
        row["op"], row["reads"], row["writes"] = OPCODE["REDUX"], A, D
        row["d"], row["a"] = (self.register(operand) for operand in instruction.operands[:2])
        row["immediate"] = REDUX.index(kind) + (2 if "NaN" in words else 0) + (16 if "abs" in words else 0)

    def _elect(self, row: np.void, instruction: Instruction) -> None:
        leader, predicate = (part.strip() for part in instruction.operands[0].split("|"))
        row["op"], row["vector"][0], row["writes"] = OPCODE["ELECT"], self.register(predicate), 1 << 4
        if leader != "_":
            row["d"] = self.register(leader)
            row["writes"] |= D

    def _match(self, row: np.void, instruction: Instruction) -> None:
        if instruction.words[1] != "any" or instruction.words[-1] != "b32":
            raise Unsupported("match other than any of b32")
        row["op"], row["reads"], row["writes"] = OPCODE["MATCH_ANY"], A, D
        row["d"], row["a"] = (self.register(operand) for operand in instruction.operands[:2])

    def _three_sources(self, row: np.void, instruction: Instruction) -> None:
        """lop3.b32 d, a, b, c, table and shf.{l,r}.{wrap,clamp}.b32 d, a, b, c."""
        words = instruction.words
        row["d"], row["a"], row["b"], row["c"] = (self.register(operand) for operand in instruction.operands[:4])
        row["reads"], row["writes"] = A | B | C, D
        if words[0] == "lop3":
            row["op"], row["immediate"] = OPCODE["LOP3"], int(instruction.operands[4], 0)
        else:
            row["op"], row["immediate"] = OPCODE["FUNNEL"], (words[1] == "r") | (2 if words[2] == "clamp" else 0)

    def _active_mask(self, row: np.void, instruction: Instruction) -> None:
        row["op"], row["d"], row["writes"] = OPCODE["ACTIVE_MASK"], self.register(instruction.operands[0]), D


_WARP_FORMS = {
    "shfl": Program._shuffle, "vote": Program._vote, "redux": Program._redux, "elect": Program._elect,
    "match": Program._match, "lop3": Program._three_sources, "shf": Program._three_sources,
    "activemask": Program._active_mask,
}  # fmt: skip


def _needs_warp(words: list[str]) -> bool:
    """Whether lanes of a diverged warp must meet here: `.sync`, `.aligned`, and bar, which is aligned."""
    if words[0] == "barrier":
        return "aligned" in words or "cluster" not in words
    return words[0] in WARP_WIDE or "aligned" in words


def _raise(message: str) -> Handler:
    def handler(warp: Any, lanes: int) -> None:
        raise Unsupported(message)

    return handler
