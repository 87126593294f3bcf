"""How handlers read the operands of an instruction: decoded once, then asked for a warp and a lane."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptxsim.machine.warp import ALL_LANES, LANES, Warp
from ptxsim.ptx.program import Unsupported

if TYPE_CHECKING:
    from ptxsim.ptx.program import Program

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
_EVERY_LANE = list(range(LANES))


def lanes_in(lanes: int) -> list[int]:
    return _EVERY_LANE if lanes == ALL_LANES else [lane for lane in _EVERY_LANE if lanes >> lane & 1]


def first_lane(lanes: int) -> int:
    return (lanes & -lanes).bit_length() - 1


def signed32(value: int) -> int:
    value &= MASK32
    return value - (1 << 32) if value >> 31 else value


def issuing_lanes(lanes: int, key: Callable[[int], Hashable]) -> list[int]:
    """Lanes that issue a tensor copy: one for each distinct set of operands.

    PTX speaks of threads, but tensor copies run on the uniform datapath: for a convergent warp with equal operands
    ptxas emits one instruction (seen in the machine code of kernels that elect no lane around their output store).
    """
    if lanes & (lanes - 1) == 0:
        return [first_lane(lanes)]
    return list({key(lane): lane for lane in reversed(lanes_in(lanes))}.values())


@dataclass(frozen=True)
class Operand:
    """A register, with an offset and a width."""

    register: int
    offset: int = 0
    mask: int = MASK32

    def __call__(self, warp: Warp, lane: int) -> int:
        return (int(warp.registers[self.register, lane]) + self.offset) & self.mask

    def is_uniform(self, warp: Warp, lanes: list[int]) -> bool:
        values = warp.registers[self.register]
        return all(values[lane] == values[lanes[0]] for lane in lanes)


class Operands:
    """Makes operands of an instruction's texts."""

    def __init__(self, program: Program):
        self.program = program

    def value(self, text: str) -> Operand:
        return Operand(self.program.register(text))

    def wide(self, text: str) -> Operand:
        return Operand(self.program.register(text), mask=MASK64)

    def shared_address(self, text: str) -> Operand:
        register, offset = self.program.address(text)
        return Operand(register, offset)

    def global_address(self, text: str) -> Operand:
        register, offset = self.program.address(text)
        return Operand(register, offset, MASK64)

    def registers(self, text: str) -> list[int]:
        return self.program.vector(text)

    def register(self, text: str) -> int:
        return self.program.register(text)

    def tensor_coordinates(self, text: str) -> Callable[[Warp, int], tuple[int, list[int]]]:
        """`[map, {c0, c1, …}]` → (address of the tensor map, signed coordinates)."""
        found = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*\{(.*)\}\s*\]", text)
        if found is None:
            raise Unsupported(f"tensor coordinates {text}")
        tensor_map = self.wide(found[1])
        coordinates = [self.value(part) for part in found[2].split(",")]
        return lambda warp, lane: (tensor_map(warp, lane), [signed32(each(warp, lane)) for each in coordinates])
