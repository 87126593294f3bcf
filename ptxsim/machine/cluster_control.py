"""What CTAs of a cluster do to each other, and cluster launch control (PTX ISA 9.7.13.17, 9.7.9.22–23)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim.machine.addresses import in_cta, offset_of, rank_of
from ptxsim.machine.operands import MASK32, Operands, first_lane, lanes_in
from ptxsim.machine.warp import Warp
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Unsupported

RESPONSE_BYTES = 16


def decode_map_address(instruction: Instruction, operands: Operands) -> Handler:
    """mapa d, address, rank: the address in another CTA of the cluster."""
    target = operands.register(instruction.operands[0])
    address, rank = operands.value(instruction.operands[1]), operands.value(instruction.operands[2])

    def handler(warp: Warp, lanes: int) -> None:
        warp.mark_written(target, lanes)
        for lane in lanes_in(lanes):
            warp.registers[target, lane] = in_cta(address(warp, lane), rank(warp, lane))

    return handler


def decode_rank(instruction: Instruction, operands: Operands) -> Handler:
    """getctarank d, address."""
    target, address = operands.register(instruction.operands[0]), operands.value(instruction.operands[1])

    def handler(warp: Warp, lanes: int) -> None:
        warp.mark_written(target, lanes)
        for lane in lanes_in(lanes):
            warp.registers[target, lane] = rank_of(address(warp, lane))

    return handler


def decode_store_async(instruction: Instruction, operands: Operands) -> Handler:
    """st.async: a store into another CTA that reports its bytes to an mbarrier there."""
    address, barrier = (operands.shared_address(instruction.operands[index]) for index in (0, 2))
    registers = operands.registers(instruction.operands[1])
    element_bytes = int(instruction.words[-1][1:]) // 8

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        for lane in lanes_in(lanes):
            place, signal = address(warp, lane), barrier(warp, lane)
            values = warp.registers[registers, lane].astype(f"u{element_bytes}").view(np.uint8)

            def store(operation: Any, place: int = place, signal: int = signal, values: np.ndarray = values) -> None:
                cluster.shared_bytes(place, len(values))[...] = values
                operation.shared_write(rank_of(place), offset_of(place), len(values))
                cluster.mbarrier(signal).complete_bytes(len(values), operation.clock)

            cluster.engine.submit(warp, "st.async", store)

    return handler


def decode_launch_control(instruction: Instruction, operands: Operands) -> Handler:
    """clusterlaunchcontrol: take over a cluster that has not started.

    The response's words, as kernels decode them by hand: x, y | z << 16, and whether a cluster was obtained.
    """
    words = instruction.words
    if words[1] == "try_cancel":
        return _try_cancel(instruction, operands)
    target, response = (operands.register(text) for text in instruction.operands[:2])
    axis = instruction.opcode.partition("get_first_ctaid::")[2][:1]

    def handler(warp: Warp, lanes: int) -> None:
        low, high = warp.registers[response], warp.registers[response + 1]
        warp.mark_written(target, lanes)
        for lane in lanes_in(lanes):
            if words[2] == "is_canceled":
                value = int(high[lane]) & 1
            elif axis in ("x", "y", "z"):
                shift, mask = {"x": (0, MASK32), "y": (32, 0xFFFF), "z": (48, 0xFFFF)}[axis]
                value = int(low[lane]) >> shift & mask
            else:
                raise Unsupported(instruction.opcode)
            warp.registers[target, lane] = value

    return handler


def _try_cancel(instruction: Instruction, operands: Operands) -> Handler:
    address, barrier = (operands.shared_address(text) for text in instruction.operands[:2])
    is_multicast = "multicast::cluster::all" in instruction.opcode

    def handler(warp: Warp, lanes: int) -> None:
        cluster, lane = warp.cta.cluster, first_lane(lanes)
        index = cluster.grid.next_cluster()
        x, y, z = (i * n for i, n in zip(index or (0, 0, 0), cluster.grid.cluster_dimensions, strict=True))
        response = np.array([x, y | z << 16, index is not None, 0], np.uint32).view(np.uint8)
        place, signal = address(warp, lane), barrier(warp, lane)
        ranks = range(len(cluster.ctas)) if is_multicast else [rank_of(place)]

        def answer(operation: Any) -> None:
            for rank in ranks:
                cluster.shared_bytes(in_cta(place, rank), RESPONSE_BYTES)[...] = response
                operation.shared_write(rank, offset_of(place), RESPONSE_BYTES)
                cluster.mbarrier(in_cta(signal, rank)).complete_bytes(RESPONSE_BYTES, operation.clock)

        cluster.engine.submit(warp, "clusterlaunchcontrol.try_cancel", answer)

    return handler
