"""Which cells of tensor memory tcgen05.ld and .st move (PTX ISA 9.7.16.2.3, data movement shapes).

Register r of lane l holds the cell

    shape      row from the address   column from the address                       registers of .xN
    32x32b     l                      r                                             N
    16x64b     l // 4 + 8 (l % 2)     2 r + l // 2 % 2                              N
    16x128b    l // 4 + 8 (r % 2)     4 (r // 2) + l % 4                            2 N
    16x256b    l // 4 + 8 (r // 2 % 2)    8 (r // 4) + 2 (l % 4) + r % 2            4 N
    16x32bx2   l % 16                 r, lanes from 16 on: + immHalfSplitoff        N

With .pack::16b and .unpack::16b a register holds the low halves of two cells, columns 2 c and 2 c + 1 in place of c.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptxsim.machine.cluster import TMEM_COLUMNS
from ptxsim.machine.warp import LANES
from ptxsim.ptx.program import Unsupported

HALF = 0xFFFF
_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # of .x1


@dataclass(frozen=True, eq=False)
class Fragment:
    """What one instruction moves.

    cells: where they are, in cells of 128 × 512 behind that of the address: [registers, 32], or [registers, 32, 2] if
    a register holds two halves · columns: behind that of the address · num_rows: 16 or 32.
    """

    cells: np.ndarray
    columns: tuple[range, ...]
    num_rows: int

    def read(self, memory: np.ndarray, first: int) -> np.ndarray:
        """Registers [registers, 32] from flat tensor memory; `first`: the cell of the address."""
        values = memory[self.cells + first]
        return values if values.ndim == 2 else values[..., 0] & HALF | values[..., 1] << 16

    def write(self, memory: np.ndarray, first: int, values: np.ndarray) -> None:
        """What is unpacked leaves zero in the upper halves of its cells."""
        memory[self.cells + first] = values if self.cells.ndim == 2 else np.stack([values & HALF, values >> 16], -1)


def fragment(words: Sequence[str], num_registers: int, half_split: int) -> Fragment:
    """The fragment of an opcode's words, e.g. tcgen05, ld, …, "16x64b", "x8", "pack::16b", "b32".

    half_split: immHalfSplitoff, in columns, of 16x32bx2; 0 for other shapes.

    Raises:
        Unsupported: an unknown shape, another number of registers than it has, a reduction of one register.
    """
    shape = next((word for word in words if word in _REGISTERS), None)
    repetitions = next((int(word[1:]) for word in words if re.fullmatch(r"x\d+", word)), 1)
    if shape is None:
        raise Unsupported(f"its shape is none of {', '.join(_REGISTERS)}")
    if repetitions == 1 and "red" in words:
        raise Unsupported("a reduction of one register; .x2 is the least")
    if num_registers != (expected := repetitions * _REGISTERS[shape]):
        raise Unsupported(f"{num_registers} registers; {shape}.x{repetitions} has {expected}")
    return _fragment(shape, num_registers, any(word.endswith("pack::16b") for word in words), half_split)


@functools.cache
def _fragment(shape: str, num_registers: int, is_packed: bool, half_split: int) -> Fragment:
    register, lane = np.arange(num_registers)[:, None], np.arange(LANES)
    if shape == "32x32b":
        row, column = lane, register
    elif shape == "16x64b":
        row, column = lane // 4 + 8 * (lane % 2), 2 * register + lane // 2 % 2
    elif shape == "16x128b":
        row, column = lane // 4 + 8 * (register % 2), 4 * (register // 2) + lane % 4
    elif shape == "16x256b":
        row, column = lane // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * (lane % 4) + register % 2
    else:
        row, column = lane % 16, register
    row, column = np.broadcast_arrays(row, column)
    if is_packed:
        row, column = row[..., None], 2 * column[..., None] + np.arange(2)
    width = int(column.max()) + 1
    columns: tuple[range, ...] = (range(width),)
    if shape == "16x32bx2":
        upper = (lane >= 16)[:, None] if is_packed else lane >= 16
        column, columns = column + half_split * upper, (range(width), range(half_split, half_split + width))
    return Fragment(row * TMEM_COLUMNS + column, columns, 32 if shape == "32x32b" else 16)


def reduction(words: Sequence[str], values: np.ndarray) -> np.ndarray:
    """What tcgen05.ld.red gives each lane: the least or greatest of its registers [registers, 32]. → uint32 [32]

    Floats as in min and max: +0 is greater than −0, and NaN does not count unless .NaN is said; a result of NaN is
    0x7fffffff.
    """
    reduce = np.max if "max" in words else np.min
    if "f32" not in words:
        return reduce(values.view(np.int32 if "s32" in words else np.uint32), 0).view(np.uint32)
    bits = values & 0x7FFFFFFF if "abs" in words else values
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    order = bits.view(np.int32) ^ (bits.view(np.int32) >> 31 & 0x7FFFFFFF)  # ordered as the floats are
    ignored = np.iinfo(np.int32).min if "max" in words else np.iinfo(np.int32).max
    result = reduce(np.where(is_nan, ignored, order), 0).astype(np.int32)
    result ^= result >> 31 & 0x7FFFFFFF
    is_canonical = is_nan.any(0) if "NaN" in words else is_nan.all(0)
    return np.where(is_canonical, 0x7FFFFFFF, result.view(np.uint32)).astype(np.uint32)
