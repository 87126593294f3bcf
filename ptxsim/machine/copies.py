"""cp.async, bulk copies and tensor copies (PTX ISA 9.7.9.25–27)."""

from __future__ import annotations

import re
from typing import Any

from ptxsim.machine.addresses import in_cta, offset_of, rank_of
from ptxsim.machine.atomics import TYPES
from ptxsim.machine.barriers import Wait
from ptxsim.machine.operands import Operand, Operands, issuing_lanes, lanes_in
from ptxsim.machine.tma import global_view, load_box, store_box
from ptxsim.machine.warp import Warp
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Unsupported

REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def decode_copy(instruction: Instruction, operands: Operands) -> Handler:
    opcode = instruction.opcode
    if opcode.startswith("cp.async.bulk.commit_group"):
        return _commit_group
    if opcode.startswith("cp.async.bulk.wait_group"):
        return _wait_group(int(instruction.operands[0], 0))
    if opcode.startswith("cp.async.bulk.prefetch"):
        return _nothing
    if "tensor" in instruction.words:
        if any(mode in opcode for mode in ("im2col", "gather4", "scatter4")):
            raise Unsupported(opcode)
        is_store = "{" in instruction.operands[0]
        return (_tensor_store if is_store else _tensor_load)(instruction, operands)
    if "bulk" in instruction.words:
        into_shared = opcode.startswith("cp.async.bulk.shared")
        return (_bulk_load if into_shared else _bulk_store)(instruction, operands)
    if opcode.startswith(("cp.async.ca", "cp.async.cg")):
        return _async_copy(instruction, operands)
    if opcode.startswith(("cp.async.commit_group", "cp.async.wait")):
        return _nothing  # cp.async completes at once here
    if opcode.startswith("cp.async.mbarrier.arrive"):
        return _arrive_after_copies(instruction, operands)
    raise Unsupported(opcode)


def _nothing(warp: Warp, lanes: int) -> None:
    return None


def _commit_group(warp: Warp, lanes: int) -> None:
    for lane in lanes_in(lanes):
        warp.copy_groups.setdefault(lane, []).append(warp.open_copies.pop(lane, []))


def _wait_group(allowed: int) -> Handler:
    def handler(warp: Warp, lanes: int) -> list[tuple[int, Wait]]:
        waits = []
        for lane in lanes_in(lanes):
            groups = warp.copy_groups.get(lane, [])
            kept = groups[max(len(groups) - allowed, 0) :] if allowed else []
            for wait in (wait for group in groups[: len(groups) - len(kept)] for wait in group):
                if wait.is_done:
                    warp.cta.cluster.monitor.acquire(warp, wait.clock)
                else:
                    waits.append((1 << lane, wait))
            warp.copy_groups[lane] = kept
        return waits

    return handler


def _async_copy(instruction: Instruction, operands: Operands) -> Handler:
    """cp.async [shared], [global], bytes [, source bytes]: what the source lacks is zero."""
    texts = instruction.operands
    target, source, size = operands.shared_address(texts[0]), operands.global_address(texts[1]), int(texts[2], 0)
    given = operands.value(texts[3]) if len(texts) > 3 and re.match(r"%r\d|\d", texts[3]) else None

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        for lane in lanes_in(lanes):
            place, count = target(warp, lane), size if given is None else min(size, given(warp, lane))
            window = cluster.shared_bytes(place, size)
            window[count:] = 0
            if count:
                window[:count] = global_view(source(warp, lane), count)
            cluster.monitor.shared_write(warp, rank_of(place), offset_of(place), size)

    return handler


def _arrive_after_copies(instruction: Instruction, operands: Operands) -> Handler:
    address = operands.shared_address(instruction.operands[0])
    counts = "noinc" in instruction.words

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        clock = cluster.monitor.release(warp)
        for lane in lanes_in(lanes):
            barrier = cluster.mbarrier(address(warp, lane), warp)
            if not counts:
                barrier.pending += 1
            barrier.arrive(1, clock)

    return handler


# ------------------------------------------------------------------------------------------------ bulk copies


def _bulk_load(instruction: Instruction, operands: Operands) -> Handler:
    """cp.async.bulk.shared::{cta,cluster}.{global,shared::cta}: bytes in a row, reported to an mbarrier.

    From global memory also into several CTAs (multicast).
    """
    texts = instruction.operands
    multicast = operands.value(texts[4]) if "multicast::cluster" in instruction.opcode else None
    target, size, barrier = (
        operands.shared_address(texts[0]),
        operands.value(texts[2]),
        operands.shared_address(texts[3]),
    )
    from_shared = instruction.opcode.startswith("cp.async.bulk.shared::cluster.shared::cta")
    source = operands.shared_address(texts[1]) if from_shared else operands.global_address(texts[1])

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        for lane in lanes_in(lanes):
            place, origin, count, signal = (each(warp, lane) for each in (target, source, size, barrier))
            _check_bulk(place, origin, count)

            for rank in _destinations(multicast, warp, lane, place):
                signalled = in_cta(signal, _signalled_rank(rank, signal, multicast, False))
                load = _BulkLoad(cluster, (origin, from_shared), in_cta(place, rank), count, signalled)
                cluster.engine.submit(warp, "bulk copy into shared memory", load)

    return handler


class _BulkLoad:
    """A bulk copy into shared memory, when it completes. origin: (address, whether it is in shared memory)."""

    def __init__(self, cluster: Any, origin: tuple[int, bool], place: int, count: int, signal: int):
        self.cluster, self.origin, self.place, self.count, self.signal = cluster, origin, place, count, signal

    def __call__(self, operation: Any) -> None:
        cluster, (origin, from_shared), count = self.cluster, self.origin, self.count
        if from_shared:
            data = cluster.shared_bytes(origin, count).copy()
            operation.shared_read(rank_of(origin), offset_of(origin), count)
        else:
            data = global_view(origin, count)
        cluster.shared_bytes(self.place, count)[...] = data
        operation.shared_write(rank_of(self.place), offset_of(self.place), count)
        cluster.mbarrier(self.signal).complete_bytes(count, operation.clock)


def _bulk_store(instruction: Instruction, operands: Operands) -> Handler:
    """cp[.reduce].async.bulk.global.shared::cta: bytes in a row, in a bulk group."""
    texts, words = instruction.operands, instruction.words
    if "shared::cta" not in words or "global" not in words:
        raise Unsupported(instruction.opcode)
    target, source, size = (
        operands.global_address(texts[0]),
        operands.shared_address(texts[1]),
        operands.value(texts[2]),
    )
    is_reduction = words[1] == "reduce"
    if is_reduction and (words[-2] != "add" or words[-1] not in TYPES):
        raise Unsupported(instruction.opcode)
    number = TYPES[words[-1]] if is_reduction else None

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        for lane in lanes_in(lanes):
            place, origin, count = (each(warp, lane) for each in (target, source, size))
            _check_bulk(place, origin, count)

            def copy(operation: Any, place=place, origin=origin, count=count) -> None:
                data, memory = cluster.shared_bytes(origin, count), global_view(place, count)
                operation.shared_read(rank_of(origin), offset_of(origin), count)
                if number is not None:
                    memory.view(number)[...] += data.view(number)
                else:
                    memory[...] = data

            wait = cluster.engine.submit_store(warp, "bulk store", copy)
            warp.open_copies.setdefault(lane, []).append(wait)

    return handler


def _check_bulk(*numbers: int) -> None:
    if any(number % 16 for number in numbers):
        raise ValueError(
            f"bulk copies take addresses and sizes that are multiples of 16, got {[hex(n) for n in numbers]}"
        )


# ---------------------------------------------------------------------------------------------- tensor copies


def _tensor_load(instruction: Instruction, operands: Operands) -> Handler:
    """cp.async.bulk.tensor into shared memory, of one CTA or of several (multicast)."""
    texts, opcode = instruction.operands, instruction.opcode
    target, barrier = operands.shared_address(texts[0]), operands.shared_address(texts[2])
    coordinates = operands.tensor_coordinates(texts[1])
    multicast = operands.value(texts[3]) if "multicast::cluster" in opcode else None
    is_pair = "cta_group::2" in opcode

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        cluster.activity += 1
        for lane in issuing_lanes(warp, lanes, target, coordinates, barrier):
            place, (address, position), signal = target(warp, lane), coordinates(warp, lane), barrier(warp, lane)
            tensor_map = cluster.grid.tensor_map(address)
            for rank in _destinations(multicast, warp, lane, place):
                signalled = in_cta(signal, _signalled_rank(rank, signal, multicast, is_pair))
                load = _TensorLoad(cluster, tensor_map, position, in_cta(place, rank), signalled)
                cluster.engine.submit(warp, f"tensor load at {position}", load)

    return handler


def _destinations(multicast: Operand | None, warp: Warp, lane: int, place: int) -> list[int]:
    if multicast is None:
        return [rank_of(place)]
    mask = multicast(warp, lane) & 0xFFFF
    return [rank for rank in range(16) if mask >> rank & 1]


def _signalled_rank(rank: int, signal: int, multicast: Operand | None, is_pair: bool) -> int:
    """The CTA whose mbarrier hears of a load into CTA `rank`.

    Without multicast the one the address names; with it the destination, or with cta_group::2 the CTA of that pair
    whose parity the address names.
    """
    if multicast is None:
        return rank_of(signal)
    return rank & ~1 | rank_of(signal) & 1 if is_pair else rank


class _TensorLoad:
    """The load of one box, when it completes."""

    def __init__(self, cluster: Any, tensor_map: Any, position: list[int], place: int, signal: int):
        self.cluster, self.tensor_map, self.position, self.place, self.signal = (
            cluster,
            tensor_map,
            position,
            place,
            signal,
        )

    def __call__(self, operation: Any) -> None:
        offset, rank = offset_of(self.place), rank_of(self.place)
        load_box(self.tensor_map, self.position, self.cluster.shared_of(self.place), offset)
        operation.shared_write(rank, offset, self.tensor_map.box_bytes)
        self.cluster.mbarrier(self.signal).complete_bytes(self.tensor_map.box_bytes, operation.clock)


def _tensor_store(instruction: Instruction, operands: Operands) -> Handler:
    """cp[.reduce].async.bulk.tensor from shared memory, in a bulk group."""
    coordinates = operands.tensor_coordinates(instruction.operands[0])
    source = operands.shared_address(instruction.operands[1])
    is_reduction = instruction.words[1] == "reduce"
    reduction = next((word for word in instruction.words if word in REDUCTIONS), None) if is_reduction else None

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        cluster.activity += 1
        for lane in issuing_lanes(warp, lanes, coordinates, source):
            (address, position), origin = coordinates(warp, lane), source(warp, lane)
            tensor_map = cluster.grid.tensor_map(address)

            def copy(operation: Any, tensor_map=tensor_map, position=position, origin=origin) -> None:
                operation.shared_read(rank_of(origin), offset_of(origin), tensor_map.box_bytes)
                store_box(tensor_map, position, cluster.shared_of(origin), offset_of(origin), reduction)

            wait = cluster.engine.submit_store(warp, f"tensor store at {position}", copy)
            warp.open_copies.setdefault(lane, []).append(wait)

    return handler
