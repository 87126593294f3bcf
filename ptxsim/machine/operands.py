"""How handlers read the operands of an instruction: decoded once, then asked for a warp and a lane."""

from __future__ import annotations

import re
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


@dataclass(frozen=True)
class Operand:
    """A register, with an offset and a width."""

    register: int
    offset: int = 0
    mask: int = MASK32

    def __call__(self, warp: Warp, lane: int) -> int:
        return (warp.words[self.register * LANES + lane] + self.offset) & self.mask

    def is_uniform(self, warp: Warp, lanes: list[int]) -> bool:
        first = self.register * LANES
        values = warp.words[first : first + LANES].tolist()
        if len(lanes) < LANES:
            values = [values[lane] for lane in lanes]
        return values.count(values[0]) == len(values)


@dataclass(frozen=True)
class TensorCoordinates:
    """The address of a tensor map, and signed coordinates."""

    tensor_map: Operand
    coordinates: tuple[Operand, ...]

    def __call__(self, warp: Warp, lane: int) -> tuple[int, list[int]]:
        return self.tensor_map(warp, lane), [signed32(each(warp, lane)) for each in self.coordinates]

    def is_uniform(self, warp: Warp, lanes: list[int]) -> bool:
        return all(each.is_uniform(warp, lanes) for each in (self.tensor_map, *self.coordinates))


def issuing_lanes(warp: Warp, lanes: int, *operands: Operand | TensorCoordinates) -> list[int]:
    """Lanes that issue a tensor copy: one for each distinct set of operands.

    PTX speaks of threads, but tensor copies run on the uniform datapath: for a convergent warp with equal operands
    ptxas emits one instruction (seen in the machine code of kernels that elect no lane around their output store).
    """
    members = lanes_in(lanes)
    if len(members) == 1 or all(each.is_uniform(warp, members) for each in operands):
        return members[:1]
    return list({str([each(warp, lane) for each in operands]): lane for lane in reversed(members)}.values())


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

    def tensor_coordinates(self, text: str) -> TensorCoordinates:
        """`[map, {c0, c1, …}]`"""
        found = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*\{(.*)\}\s*\]", text)
        if found is None:
            raise Unsupported(f"tensor coordinates {text}")
        return TensorCoordinates(self.wide(found[1]), tuple(self.value(part) for part in found[2].split(",")))
