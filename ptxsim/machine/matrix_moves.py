"""ldmatrix, stmatrix, movmatrix: 8 × 8 matrices of 16-bit elements in shared memory and in a warp (PTX ISA 9.7.14.5).

A matrix has eight rows of 16 bytes; lanes 8 i … 8 i + 7 give the addresses of the rows of the i-th. In registers, one
for each matrix, lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; with .trans rows and columns of the
matrix in memory are exchanged. The forms for elements of 8 bits and less (.m16n8, .m16n16, .m8n16) are not supported.
"""

from __future__ import annotations

import numpy as np

from ptxsim.machine.addresses import offset_of, rank_of
from ptxsim.machine.cluster import CTA, MachineFault
from ptxsim.machine.operands import Operand, Operands
from ptxsim.machine.warp import ALL_LANES, Warp
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Unsupported

ROW_BYTES, ROWS = 16, 8


def decode_load(instruction: Instruction, operands: Operands) -> Handler:
    """ldmatrix.sync.aligned.m8n8.num[.trans][.shared].b16 registers, [address]"""
    count, transposed = _form(instruction)
    registers = np.array(operands.registers(instruction.operands[0]))
    address = operands.shared_address(instruction.operands[1])

    def handler(warp: Warp, lanes: int) -> None:
        cta, offsets = _rows(warp, lanes, address, count * ROWS)
        rows = cta.shared.view(f"V{ROW_BYTES}")[offsets // ROW_BYTES]
        cta.cluster.monitor.shared_read_at(warp, cta.rank, offsets)
        warp.registers[registers] = _exchange(rows.view(np.uint16).reshape(count, ROWS, ROWS), transposed)
        warp.mark_written(registers, lanes)

    return handler


def decode_store(instruction: Instruction, operands: Operands) -> Handler:
    """stmatrix.sync.aligned.m8n8.num[.trans][.shared].b16 [address], registers"""
    count, transposed = _form(instruction)
    address = operands.shared_address(instruction.operands[0])
    registers = np.array(operands.registers(instruction.operands[1]))

    def handler(warp: Warp, lanes: int) -> None:
        cta, offsets = _rows(warp, lanes, address, count * ROWS)
        words = warp.registers[registers].astype(np.uint32)
        rows = _exchange(words.view(np.uint16).reshape(count, ROWS, ROWS), transposed)
        cta.shared.reshape(-1, ROW_BYTES)[offsets // ROW_BYTES] = rows.view(np.uint8).reshape(-1, ROW_BYTES)
        cta.cluster.monitor.shared_write_at(warp, cta.rank, offsets)

    return handler


def decode_transpose(instruction: Instruction, operands: Operands) -> Handler:
    """movmatrix.sync.aligned.m8n8.trans.b16 d, a"""
    target, source = (operands.register(text) for text in instruction.operands)

    def handler(warp: Warp, lanes: int) -> None:
        _check_lanes(lanes)
        words = warp.registers[source].astype(np.uint32)
        warp.registers[target] = _exchange(words.view(np.uint16).reshape(1, ROWS, ROWS), True)[0]
        warp.mark_written(target, lanes)

    return handler


def _form(instruction: Instruction) -> tuple[int, bool]:
    """(number of matrices, transposed) of an opcode."""
    words = instruction.words
    if words[3] != "m8n8" or words[-1] != "b16" or words[4] not in ("x1", "x2", "x4"):
        raise Unsupported(instruction.opcode)
    return int(words[4][1:]), "trans" in words


def _exchange(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """uint16 [matrices, 8, 8] → uint32 [matrices, 32 lanes]; rows follow each other in both."""
    parts = matrices.transpose(0, 2, 1) if transposed else matrices
    return np.ascontiguousarray(parts).reshape(len(matrices), -1).view(np.uint32)


def _check_lanes(lanes: int) -> None:
    if lanes != ALL_LANES:
        raise MachineFault(f"matrix moves need all lanes of the warp, got {lanes:#x}")


def _rows(warp: Warp, lanes: int, address: Operand, count: int) -> tuple[CTA, np.ndarray]:
    """The CTA whose shared memory the first `count` lanes address, and the offsets there. → int64 [count]"""
    _check_lanes(lanes)
    places = warp.registers[address.register, :count].astype(np.int64) + address.offset & address.mask
    offsets, ranks, cluster = offset_of(places), rank_of(places), warp.cta.cluster
    is_wrong = (places % ROW_BYTES != 0) | (offsets + ROW_BYTES > cluster.shared_size) | (ranks >= len(cluster.ctas))
    if is_wrong.any() or (ranks != ranks[0]).any():
        raise MachineFault(
            f"rows of matrices at {[hex(place) for place in places.tolist()]}; allowed are multiples of {ROW_BYTES} in "
            f"the {cluster.shared_size} bytes of one CTA's shared memory"
        )
    return cluster.ctas[ranks[0]], offsets
