"""atom and red on global and shared memory (PTX ISA 9.7.13.8 and .9): lane after lane."""

from __future__ import annotations

import numpy as np

from ptxsim.machine.addresses import is_shared, offset_of, rank_of
from ptxsim.machine.cluster import MachineFault
from ptxsim.machine.operands import Operands, lanes_in
from ptxsim.machine.tma import global_view
from ptxsim.machine.warp import Warp
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Unsupported

TYPES = {
    "s32": np.int32, "u32": np.uint32, "b32": np.uint32, "f32": np.float32, "s64": np.int64, "u64": np.uint64,
    "b64": np.uint64, "f64": np.float64,
}  # fmt: skip
HALVES = {"f16x2": np.float16}


def decode_atomic(instruction: Instruction, operands: Operands) -> Handler:
    words = instruction.words
    if words[0] == "red" and (words[-1] in HALVES or instruction.operands[1].startswith("{")):
        return _decode_vector_add(instruction, operands)
    operation = next((word for word in words if word in _OPERATIONS), None)
    if operation is None or words[-1] not in TYPES:
        raise Unsupported(instruction.opcode)
    texts = list(instruction.operands)
    target = operands.register(texts.pop(0)) if words[0] == "atom" else None
    address, value = operands.global_address(texts[0]), operands.wide(texts[1])
    swap = operands.wide(texts[2]) if operation == "cas" else None
    kind = np.dtype(TYPES[words[-1]])
    names_shared, names_global = any(word.startswith("shared") for word in words), "global" in words
    bits, compute = np.dtype(f"u{kind.itemsize}"), _OPERATIONS[operation]

    def typed(raw: int) -> np.generic:
        return np.array([raw & (1 << 8 * kind.itemsize) - 1], bits).view(kind)[0]

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        cluster.activity += 1
        for lane in lanes_in(lanes):
            place = address(warp, lane)
            in_shared = names_shared or (not names_global and is_shared(place))
            cell = (cluster.shared_bytes if in_shared else global_view)(place, kind.itemsize).view(kind)
            old = cell[0].copy()
            with np.errstate(over="ignore", invalid="ignore"):
                cell[0] = compute(old, typed(value(warp, lane)), typed(swap(warp, lane)) if swap else None)
            if in_shared:
                cluster.monitor.shared_atomic(warp, rank_of(place), offset_of(place), kind.itemsize)
            if target is not None:
                warp.registers[target, lane] = int(np.array([old]).view(bits)[0])
                warp.mark_written(target, 1 << lane)

    return handler


def _decode_vector_add(instruction: Instruction, operands: Operands) -> Handler:
    """red.global.add of several elements, each on its own atomic: a vector of f32, or pairs of halves."""
    words, (place_text, values_text) = instruction.words, instruction.operands
    kind = HALVES.get(words[-1], np.float32)
    if "add" not in words or "shared" in words or words[-1] not in (*HALVES, "f32"):
        raise Unsupported(instruction.opcode)
    address = operands.global_address(place_text)
    registers = operands.registers(values_text) if values_text.startswith("{") else [operands.register(values_text)]
    size = 4 * len(registers)

    def handler(warp: Warp, lanes: int) -> None:
        warp.cta.cluster.activity += 1
        values = np.ascontiguousarray(warp.registers[registers].astype(np.uint32).T).view(kind)
        with np.errstate(over="ignore", invalid="ignore"):
            for lane in lanes_in(lanes):
                place = address(warp, lane)
                if place % size:
                    raise MachineFault(f"red of {size} bytes at {place:#x}, which is no multiple of that")
                cells = global_view(place, size).view(kind)
                cells += values[lane]

    return handler


_OPERATIONS = {
    "add": lambda old, value, swap: old + value,
    "max": lambda old, value, swap: max(old, value),
    "min": lambda old, value, swap: min(old, value),
    "and": lambda old, value, swap: old & value,
    "or": lambda old, value, swap: old | value,
    "xor": lambda old, value, swap: old ^ value,
    "exch": lambda old, value, swap: value,
    "inc": lambda old, value, swap: old - old if old >= value else old + type(old)(1),
    "dec": lambda old, value, swap: value if old == 0 or old > value else old - type(old)(1),
    "cas": lambda old, value, swap: swap if old == value else old,
}
