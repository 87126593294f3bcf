"""mbarrier, bar and barrier, fences (PTX ISA 9.7.13)."""

from __future__ import annotations

from typing import Any

from ptxsim.machine.barriers import Wait
from ptxsim.machine.operands import Operand, Operands, first_lane, lanes_in
from ptxsim.machine.warp import LANES, Warp
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Unsupported

GIVE_UP = 0.3  # how often a try_wait returns false although it might have waited


def decode_mbarrier(instruction: Instruction, operands: Operands) -> Handler:
    words = instruction.words
    decoders = {
        "init": _init, "inval": _invalidate, "expect_tx": _expect_bytes, "arrive": _arrive, "try_wait": _wait,
        "test_wait": _wait, "complete_tx": _complete_bytes,
    }  # fmt: skip
    if words[1] not in decoders:
        raise Unsupported(instruction.opcode)
    return decoders[words[1]](instruction, operands)


def _init(instruction: Instruction, operands: Operands) -> Handler:
    address, count = operands.shared_address(instruction.operands[0]), operands.value(instruction.operands[1])

    def handler(warp: Warp, lanes: int) -> None:
        for lane in lanes_in(lanes):
            warp.cta.cluster.init_mbarrier(warp, address(warp, lane), count(warp, lane))

    return handler


def _invalidate(instruction: Instruction, operands: Operands) -> Handler:
    address = operands.shared_address(instruction.operands[0])

    def handler(warp: Warp, lanes: int) -> None:
        for lane in lanes_in(lanes):
            warp.cta.cluster.mbarriers.pop(address(warp, lane), None)

    return handler


def _expect_bytes(instruction: Instruction, operands: Operands) -> Handler:
    address, count = operands.shared_address(instruction.operands[0]), operands.value(instruction.operands[1])

    def handler(warp: Warp, lanes: int) -> None:
        for lane in lanes_in(lanes):
            warp.cta.cluster.mbarrier(address(warp, lane), warp).expect_bytes(count(warp, lane))

    return handler


def _complete_bytes(instruction: Instruction, operands: Operands) -> Handler:
    address, count = operands.shared_address(instruction.operands[0]), operands.value(instruction.operands[1])

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        clock = cluster.monitor.release(warp)
        for lane in lanes_in(lanes):
            cluster.mbarrier(address(warp, lane), warp).complete_bytes(count(warp, lane), clock)

    return handler


def _arrive(instruction: Instruction, operands: Operands) -> Handler:
    """mbarrier.arrive[.expect_tx][.shared::cluster] [state,] [address] [, count or bytes]"""
    texts = list(instruction.operands)
    if "noComplete" in instruction.words or "drop" in instruction.opcode:
        raise Unsupported(instruction.opcode)
    if not texts[0].startswith("["):
        texts.pop(0)  # the state token; waiting on tokens is not modelled
    address = operands.shared_address(texts[0])
    number = operands.value(texts[1]) if len(texts) > 1 else None
    expects_bytes = "expect_tx" in instruction.words

    def handler(warp: Warp, lanes: int) -> None:
        cluster, members = warp.cta.cluster, lanes_in(lanes)
        clock = cluster.monitor.release(warp)
        cluster.activity += 1
        if number is None and len(members) > 1 and address.is_uniform(warp, members):
            cluster.mbarrier(address(warp, members[0]), warp).arrive(len(members), clock)
            return
        for lane in members:
            barrier = cluster.mbarrier(address(warp, lane), warp)
            if expects_bytes:
                barrier.expect_bytes(number(warp, lane))
            barrier.arrive(number(warp, lane) if number and not expects_bytes else 1, clock)

    return handler


def _wait(instruction: Instruction, operands: Operands) -> Handler:
    """mbarrier.{try,test}_wait.parity; try_wait sleeps, and under a delay sometimes gives up as it may on hardware.

    A test that fails ends the warp's turn, so that others get theirs while it polls. It counts as no activity: a grid
    where all that happens are such tests is stuck.
    """
    if "parity" not in instruction.words:
        raise Unsupported("waiting on a state token")
    result = operands.register(instruction.operands[0])
    address, parity = operands.shared_address(instruction.operands[1]), operands.value(instruction.operands[2])
    is_test = instruction.words[1] == "test_wait"

    def handler(warp: Warp, lanes: int) -> Any:
        cluster = warp.cta.cluster
        waits = []
        for group, (place, phase) in _grouped(warp, lanes, address, parity).items():
            barrier, group_lanes = cluster.mbarrier(place, warp), lanes_in(group)
            completed = barrier.has_completed(phase)
            delayed = cluster.engine.delay is not None and cluster.engine.rng.random() < GIVE_UP
            warp.mark_written(result, group)
            if not completed and (is_test or delayed):
                warp.registers[result, group_lanes] = 0
                if is_test:
                    waits.append((group, Wait(_Phase(barrier, phase), is_done=True)))
                continue
            warp.registers[result, group_lanes] = 1
            if completed:
                cluster.monitor.acquire(warp, barrier.done_clock)
            else:
                wait = Wait(_Phase(barrier, phase))
                barrier.waiters.append((phase, wait))
                waits.append((group, wait))
        return waits

    return handler


class _Phase:
    """Says what a wait waits for at the time of asking."""

    def __init__(self, barrier: Any, parity: int):
        self.barrier, self.parity = barrier, parity

    def __str__(self) -> str:
        return f"parity {self.parity} of {self.barrier}"


def _grouped(warp: Warp, lanes: int, address: Operand, parity: Operand) -> dict[int, tuple[int, int]]:
    """Lanes by the barrier and parity they wait for: nearly always one group."""
    members = lanes_in(lanes)
    if address.is_uniform(warp, members) and parity.is_uniform(warp, members):
        return {lanes: (address(warp, members[0]), parity(warp, members[0]) & 1)}
    groups: dict[tuple[int, int], int] = {}
    for lane in members:
        key = (address(warp, lane), parity(warp, lane) & 1)
        groups[key] = groups.get(key, 0) | 1 << lane
    return {group: key for key, group in groups.items()}


def decode_barrier(instruction: Instruction, operands: Operands) -> Handler:
    words = instruction.words
    if words[1] == "cluster":
        return _cluster_barrier(instruction)
    kind = words[2] if words[1] == "cta" else words[1]
    if kind not in ("sync", "arrive"):
        raise Unsupported(instruction.opcode)
    index = operands.value(instruction.operands[0])
    count = operands.value(instruction.operands[1]) if len(instruction.operands) > 1 else None

    def handler(warp: Warp, lanes: int) -> Any:
        cta, monitor, lane = warp.cta, warp.cta.cluster.monitor, first_lane(lanes)
        cta.cluster.activity += 1
        threads = count(warp, lane) if count else cta.num_live_threads()
        expected = -(-threads // LANES) * LANES  # threads are counted in whole warps
        barrier = cta.barrier(index(warp, lane))
        wait = Wait(barrier) if kind == "sync" else None
        barrier.arrive(LANES, expected, wait, monitor.release(warp))
        if wait is None:
            return None
        if wait.is_done:
            monitor.acquire(warp, wait.clock)
            return None
        return [(lanes, wait)]

    return handler


def _cluster_barrier(instruction: Instruction) -> Handler:
    is_arrive = instruction.words[2] == "arrive"

    def handler(warp: Warp, lanes: int) -> Any:
        cluster = warp.cta.cluster
        cluster.activity += 1
        if is_arrive:
            warp.cluster_phase = cluster.barrier.phase
            cluster.barrier.arrive(lanes.bit_count(), cluster.monitor.release(warp))
            return None
        if cluster.barrier.phase > warp.cluster_phase:
            cluster.monitor.acquire(warp, cluster.barrier.done_clock)
            return None
        wait = Wait(cluster.barrier)
        cluster.barrier.waiters.append(wait)
        return [(lanes, wait)]

    return handler


def decode_fence(instruction: Instruction, operands: Operands) -> Handler:
    """Only fences of the async proxy order anything that is not ordered by execution here."""
    is_proxy_fence = "proxy" in instruction.words and "async" in instruction.opcode

    def handler(warp: Warp, lanes: int) -> None:
        if is_proxy_fence:
            warp.cta.cluster.monitor.proxy_fence(warp)

    return handler
