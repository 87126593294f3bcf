"""Changing tensor maps on the device: tensormap.replace and tensormap.cp_fenceproxy (PTX ISA 9.7.9.27–28)."""

from __future__ import annotations

import numpy as np

from ptxsim.machine.addresses import is_shared, offset_of, rank_of
from ptxsim.machine.cluster import Cluster
from ptxsim.machine.operands import Operands, first_lane
from ptxsim.machine.tensor_map import TensorMap
from ptxsim.machine.tma import global_view
from ptxsim.machine.warp import Warp
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Unsupported

MAP_BYTES = 128


def decode_tensor_map_update(instruction: Instruction, operands: Operands) -> Handler:
    words = instruction.words
    if words[1] == "replace" and words[2] == "tile":
        return _replace(instruction, operands)
    if words[1] == "cp_fenceproxy":
        return _publish(instruction, operands)
    raise Unsupported(instruction.opcode)


def _replace(instruction: Instruction, operands: Operands) -> Handler:
    """tensormap.replace.tile.field[.space].b1024.type [address], {ordinal,} value;"""
    texts, field = list(instruction.operands), instruction.words[3]
    address = operands.global_address(texts.pop(0))
    value = operands.wide(texts.pop())
    ordinal = int(texts[0], 0) if texts else None
    mask = (1 << int(instruction.words[-1][1:])) - 1

    def handler(warp: Warp, lanes: int) -> None:
        cluster, lane = warp.cta.cluster, first_lane(lanes)
        place = address(warp, lane)
        memory = _map_bytes(cluster, place)
        updated = TensorMap.decode(memory.tobytes()).replace(field, ordinal, value(warp, lane) & mask)
        memory[...] = bytearray(updated.encode())
        if is_shared(place):
            cluster.monitor.shared_write(warp, rank_of(place), offset_of(place), MAP_BYTES)

    return handler


def _publish(instruction: Instruction, operands: Operands) -> Handler:
    """tensormap.cp_fenceproxy [global], [shared], 128: a copy that tensor copies see behind an acquire fence."""
    target, source = operands.global_address(instruction.operands[0]), operands.shared_address(instruction.operands[1])

    def handler(warp: Warp, lanes: int) -> None:
        cluster, lane = warp.cta.cluster, first_lane(lanes)
        place = source(warp, lane)
        cluster.monitor.shared_read(warp, rank_of(place), offset_of(place), MAP_BYTES)
        global_view(target(warp, lane), MAP_BYTES)[...] = cluster.shared_bytes(place, MAP_BYTES)

    return handler


def _map_bytes(cluster: Cluster, address: int) -> np.ndarray:
    """uint8 [128], writable."""
    return cluster.shared_bytes(address, MAP_BYTES) if is_shared(address) else global_view(address, MAP_BYTES)
