"""mma.sync: products that one warp does at once on its registers (PTX ISA 9.7.14.5).

Shapes m16n8 with 16 or 32 bytes along K, of f16, bf16, tf32 and 8-bit floats. The fragments are those of wgmma, of one
warp: A has two registers for each 16 bytes along K, B one, D is a wgmma accumulator with N = 8. Sums are exact up to
one rounding at the end, as in `matrix.py`; no kernel that was run on hardware has confirmed the fragments of B.
"""

from __future__ import annotations

import re

import numpy as np

from ptxsim.machine import formats
from ptxsim.machine.cluster import MachineFault
from ptxsim.machine.operands import Operands
from ptxsim.machine.warp import ALL_LANES, Warp
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Unsupported

_NUMBERS = {"f32": np.float32, "f16": np.float16}


def decode_warp_product(instruction: Instruction, operands: Operands) -> Handler:
    """mma.sync.aligned.m16n8kK.row.col.d.a.b.c  d, a, b, c"""
    found = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.(?:kind::f8f6f4\.)?(f32|f16)\.(\w+)\.(\w+)\.(f32|f16)",
        instruction.opcode,
    )
    known = ("f16", "bf16", "tf32", "e4m3", "e5m2")
    if found is None or found[2] != found[5] or found[3] not in known or found[4] not in known:
        raise Unsupported(instruction.opcode)
    a_format, b_format, number = found[3], found[4], np.dtype(_NUMBERS[found[2]])
    size = formats.ELEMENT_BYTES[a_format]
    d, a, b, c = (np.array(operands.registers(text)) for text in instruction.operands)
    halves = int(found[1]) * size // 16  # of 16 bytes along K
    expected = (number.itemsize, 2 * halves, halves, number.itemsize)
    if size != formats.ELEMENT_BYTES[b_format] or tuple(len(each) for each in (d, a, b, c)) != expected:
        raise Unsupported(instruction.opcode)

    def handler(warp: Warp, lanes: int) -> None:
        if lanes != ALL_LANES:
            raise MachineFault(f"mma.sync needs all lanes of the warp, got {lanes:#x}")
        read = [warp.registers[registers].astype(np.uint32) for registers in (a, b, c)]
        rows = formats.decode(a_format, _operand(read[0], size, 2))
        columns = formats.decode(b_format, _operand(read[1], size, 1))
        with np.errstate(over="ignore", invalid="ignore"):
            result = (rows @ columns.T + _matrix(read[2], number)).astype(number)
        warp.registers[d] = _fragment(result)
        warp.mark_written(d, lanes)

    return handler


def _operand(registers: np.ndarray, element_bytes: int, row_groups: int) -> np.ndarray:
    """A (two groups of eight rows) or B (one), uint32 [K half × row group, 32]. → raw elements [8 row_groups, K]"""
    raw = np.ascontiguousarray(registers).view(formats.STORAGE[element_bytes])
    parts = raw.reshape(-1, row_groups, 8, 4, 4 // element_bytes)  # K half, row group, row, quarter of K, element
    return np.ascontiguousarray(parts.transpose(1, 2, 0, 3, 4)).reshape(8 * row_groups, -1)


def _matrix(registers: np.ndarray, number: np.dtype) -> np.ndarray:
    """C: registers uint32 [r, 32]. → number [16, 8]"""
    parts = np.ascontiguousarray(registers.T).view(number).reshape(8, 4, 2, 2)  # row, column pair, row half, column
    return parts.transpose(2, 0, 1, 3).reshape(16, 8)


def _fragment(matrix: np.ndarray) -> np.ndarray:
    """The inverse of `_matrix`."""
    parts = np.ascontiguousarray(matrix.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3))
    return parts.reshape(32, -1).view(np.uint32).T
