"""wgmma: Hopper's tensor cores, driven by a warpgroup (PTX ISA 9.7.15). The numbers are in `matrix.py`.

A warpgroup is four warps of a CTA, the first one's index a multiple of four. How they meet in this model: each warp
issues on its own and goes on; its k-th wgmma.mma_async is its part of the warpgroup's k-th product, which is submitted
to the engine when the fourth warp has issued it and completes in order with the warpgroup's other products. Nobody
waits before wgmma.wait_group, and that waits for the warp's own parts only: what one warp knows to be complete may, for
all it knows, be under way for the others. So does the race monitor see it: each warp reads its own 16 rows of A and all
of B, ordered behind what that warp knows.

Registers. With a delay, accumulators are out of reach from wgmma.mma_async to the wgmma.wait_group that covers it: the
registers hold a NaN, their values are kept aside. An instruction that names them before is reported, and so is one that
writes a register of A. Registers that changed behind the last wgmma.fence are reported when a product uses them (only
changes of the value are seen). Without a delay a product is computed at once and none of this is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxsim.machine.barriers import Wait
from ptxsim.machine.cluster import MachineFault
from ptxsim.machine.descriptors import SharedDescriptor, chunk_offsets
from ptxsim.machine.matrix import K_BYTES, SharedAccess, WarpgroupProduct, wgmma
from ptxsim.machine.operands import Operands, first_lane
from ptxsim.machine.warp import ALL_LANES, LANES, UNWRITTEN, Warp
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Unsupported

WARPS = 4  # of a warpgroup
ROWS = 16  # of A and D that a warp holds
IS_RESULT, IS_OPERAND = 1, 2  # bits of a register's reservation, see `Warp.reserved` in simt.c
EARLY_USE = "wgmma registers used before wait"
NO_FENCE = "wgmma registers changed without fence"


def decode_warpgroup(instruction: Instruction, operands: Operands) -> Handler:
    kind = instruction.words[1]
    if kind == "fence":
        return _fence
    if kind == "commit_group":
        return _commit
    if kind == "wait_group":
        return _wait(int(instruction.operands[0], 0))
    if kind == "mma_async" and "sp" not in instruction.words:
        return Multiply(instruction, operands)
    raise Unsupported(instruction.opcode)


def _fence(warp: Warp, lanes: int) -> None:
    if warp.cta.cluster.monitor.is_watching:
        member_of(warp).remember_registers()


def _commit(warp: Warp, lanes: int) -> None:
    member = member_of(warp)
    member.groups.append(member.uncommitted)
    member.uncommitted = []


def _wait(allowed: int) -> Handler:
    return lambda warp, lanes: member_of(warp).wait(allowed, lanes)


# ------------------------------------------------------------------------------------------------ the instruction


class Multiply:
    """wgmma.mma_async: its operands decoded; called for a warp it issues that warp's part of a product.

    d, a, B's descriptor, scale-d, imm-scale-a, imm-scale-b [, imm-trans-a] [, imm-trans-b]: a descriptor or four
    registers; imm-trans only for 16-bit elements, and not for A in registers.
    """

    def __init__(self, instruction: Instruction, operands: Operands):
        *_, shape, d_format, a_format, b_format = instruction.words
        found = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
        if found is None or "satfinite" in instruction.words:
            raise Unsupported(instruction.opcode)
        d, a, b, scale_d, *immediates = instruction.operands
        self.d = np.array(operands.registers(d))
        self.a_registers = np.array(operands.registers(a) if a.startswith("{") else [], np.int64)
        self.a_descriptor = None if a.startswith("{") else operands.wide(a)
        self.b_descriptor, self.scale_d = operands.wide(b), operands.value(scale_d)
        scale_a, scale_b, *transposed = (int(text, 0) for text in immediates)
        transpose_a, transpose_b = ([0] if a.startswith("{") else []) + transposed if transposed else (0, 0)
        fields = {
            "n": int(found[1]), "a_format": a_format, "b_format": b_format, "d_format": d_format,
            "negate_a": scale_a == -1, "negate_b": scale_b == -1, "mn_major_a": bool(transpose_a),
            "mn_major_b": bool(transpose_b),
        }  # fmt: skip
        try:
            self.products = [WarpgroupProduct(accumulate=accumulate, **fields) for accumulate in (False, True)]
        except NotImplementedError as error:
            raise Unsupported(str(error)) from None
        if int(found[2]) * self.products[0].element_bytes != K_BYTES or len(self.d) != self.products[0].d_registers:
            raise Unsupported(f"{instruction.opcode} with {len(self.d)} registers of D")
        self.name = f"wgmma {shape} {a_format}"

    def __call__(self, warp: Warp, lanes: int) -> None:
        member = member_of(warp)
        if lanes != ALL_LANES:
            raise MachineFault(f"wgmma needs all lanes of the warp, got {lanes:#x}")
        watched = [operand for operand in (self.a_descriptor, self.b_descriptor, self.scale_d) if operand is not None]
        if warp.cta.cluster.monitor.is_watching:
            if not all((values := warp.registers[operand.register]).min() == values.max() for operand in watched):
                raise MachineFault("wgmma: descriptors and scale-d must be the same in all lanes")
            member.check_registers(self)
        values = tuple(operand(warp, first_lane(lanes)) for operand in watched)
        member.group.issue(member, self, values)


# --------------------------------------------------------------------------------------- a warp of the warpgroup


@dataclass(eq=False)
class _Product:
    """A product of a warpgroup. values: descriptors and scale-d · parts: the monitor's records, by member."""

    multiply: Multiply
    values: tuple[int, ...]
    parts: dict[int, Any] = field(default_factory=dict)
    is_done: bool = False


class Member:
    """What a warp has under way with its warpgroup."""

    def __init__(self, group: Warpgroup, warp: Warp, position: int):
        self.group, self.warp, self.position = group, warp, position
        self.uncommitted: list[_Product] = []
        self.groups: list[list[_Product]] = []  # committed, oldest first
        self._waited: list[_Product] = []
        self._wait: Wait | None = None
        self._hides = warp.cta.cluster.engine.delay is not None
        size = warp.program.num_registers
        self._values = np.zeros((size, LANES), np.uint32)  # of accumulators that are out of reach
        self._results, self._operands = np.zeros(size, np.int32), np.zeros(size, np.int32)  # products under way
        self._reserved = np.zeros(size, np.uint8)
        self._fenced: np.ndarray | None = None  # all registers at the last wgmma.fence

    # ------------------------------------------------------------------------------------------ registers

    def accumulators(self, registers: np.ndarray) -> np.ndarray:
        """→ uint32 [registers, 32]"""
        return self._values[registers] if self._hides else self.warp.registers[registers].astype(np.uint32)

    def set_accumulators(self, registers: np.ndarray, words: np.ndarray) -> None:
        (self._values if self._hides else self.warp.registers)[registers] = words

    def reserve(self, multiply: Multiply) -> None:
        """From now on the registers of a product are out of reach."""
        self.warp.mark_written(multiply.d, ALL_LANES)
        if not self._hides:
            return
        d, a = multiply.d, multiply.a_registers
        fresh = d[self._results[d] == 0]
        self._values[fresh] = self.warp.registers[fresh]
        self.warp.registers[fresh] = UNWRITTEN
        self._results[d] += 1
        np.add.at(self._operands, a, 1)
        self._publish(np.concatenate([d, a]))

    def _release(self, multiply: Multiply) -> None:
        if not self._hides:
            return
        d, a = multiply.d, multiply.a_registers
        self._results[d] -= 1
        np.subtract.at(self._operands, a, 1)
        ready = d[self._results[d] == 0]
        self.warp.registers[ready] = self._values[ready]
        if self._fenced is not None:
            self._fenced[ready] = self._values[ready]
        self._publish(np.concatenate([d, a]))

    def _publish(self, changed: np.ndarray) -> None:
        """Tell the SIMT core which registers are reserved."""
        is_result, is_operand = self._results[changed] > 0, self._operands[changed] > 0
        self._reserved[changed] = is_result * IS_RESULT + is_operand * IS_OPERAND
        self.warp.state.reserved = self._reserved.ctypes.data if self._reserved.any() else None

    def remember_registers(self) -> None:
        if self._fenced is None:
            self._fenced = self.warp.registers.copy()
        else:
            np.copyto(self._fenced, self.warp.registers)

    def check_registers(self, multiply: Multiply) -> None:
        """Report registers that a product may not use now."""
        warp, d, a = self.warp, multiply.d, multiply.a_registers
        under_way = [product.multiply.d for product in (*sum(self.groups, []), *self.uncommitted)]
        others = [registers for registers in under_way if not np.array_equal(registers, d)]
        early = [*a[self._results[a] > 0], *(np.intersect1d(d, np.concatenate(others)) if others else [])]
        if early and self._hides:
            self.report_use(int(early[0]))
        read = np.concatenate([d, a]) if multiply.scale_d(warp, 0) else a
        if warp.state.written and (warp.written[read] != ALL_LANES).any():
            raise MachineFault("wgmma reads registers that were never written")
        used = np.concatenate([d[self._results[d] == 0], a])
        if self._fenced is None or (self._fenced[used] != warp.registers[used]).any():
            message = "a wgmma uses registers that changed behind the last wgmma.fence"
            warp.cta.cluster.grid.note(NO_FENCE, message, str(warp), warp.instruction().line)

    def check_use(self, registers: Sequence[int]) -> None:
        """Report if an instruction, which is no wgmma, names accumulators that are out of reach."""
        for register in registers:
            if self._reserved[register] & IS_RESULT:
                self.report_use(register)

    def report_use(self, register: int) -> None:
        """A register was used too early; it is reported once for each product."""
        names = {number: name for name, number in self.warp.program.registers.items()}
        use = "named accumulator" if self._results[register] else "written operand"
        message = f"{use} {names.get(register, register)} of a wgmma that no wgmma.wait_group has completed"
        self._reserved[register] = 0
        self.warp.cta.cluster.grid.note(EARLY_USE, message, str(self.warp), self.warp.instruction().line)

    # --------------------------------------------------------------------------------------------- waiting

    def wait(self, allowed: int, lanes: int) -> list[tuple[int, Wait]] | None:
        """wgmma.wait_group: all but the newest `allowed` groups are complete."""
        count = max(len(self.groups) - allowed, 0)
        self._waited = [product for group in self.groups[:count] for product in group]
        self.groups = self.groups[count:]
        self._wait = Wait(f"wgmma.wait_group {allowed}")
        self.progress()
        if self._wait is None:
            return None
        return [(lanes, self._wait)]

    def progress(self) -> None:
        """End the wait if what it waits for is complete."""
        if self._wait is None or not all(product.is_done for product in self._waited):
            return
        for product in self._waited:
            self._release(product.multiply)
        if self._waited:
            clock = self._waited[-1].parts[self.position].clock
            self.warp.cta.cluster.monitor.acquire(self.warp, clock)
        self._wait.finish(None)
        self._waited, self._wait = [], None


# -------------------------------------------------------------------------------------------------- the warpgroup


class Warpgroup:
    """Four warps, and the products that not all of them have issued."""

    def __init__(self, warps: Sequence[Warp]):
        if len(warps) < WARPS or any(warp.state.live != ALL_LANES for warp in warps):
            whole = sum(warp.state.live == ALL_LANES for warp in warps)
            raise MachineFault(f"wgmma needs four whole warps, of which none has exited; with {warps[0]} are {whole}")
        self.cta = warps[0].cta
        self.members = [Member(self, warp, position) for position, warp in enumerate(warps)]
        self._incomplete: list[_Product] = []

    def issue(self, member: Member, multiply: Multiply, values: tuple[int, ...]) -> None:
        """A warp's part of its next product."""
        product = next((each for each in self._incomplete if member.position not in each.parts), None)
        if product is None:
            product = _Product(multiply, values)
            self._incomplete.append(product)
        elif (product.multiply, product.values) != (multiply, values):
            raise MachineFault(
                f"the warps of a warpgroup issue different products: {member.warp} {multiply.name}, operands "
                f"{[hex(v) for v in values]}, others {product.multiply.name}, {[hex(v) for v in product.values]}"
            )
        product.parts[member.position] = self.cta.cluster.monitor.start_product(member.warp, multiply.name)
        member.reserve(multiply)
        member.uncommitted.append(product)
        if len(product.parts) == WARPS:
            self._incomplete.remove(product)
            parts = [product.parts[position] for position in range(WARPS)]
            self.cta.cluster.engine.submit_product(
                member.warp, multiply.name, lambda operation: self._complete(product), parts[0]
            )

    def _complete(self, product: _Product) -> None:
        multiply, (*a, b, scale_d) = product.multiply, product.values
        if a:
            source = SharedDescriptor.decode_wgmma(a[0])
        else:
            registers = [member.warp.registers[multiply.a_registers] for member in self.members]
            source = np.stack(registers).astype(np.uint32)
        result, footprint = wgmma(
            multiply.products[bool(scale_d)],
            source,
            SharedDescriptor.decode_wgmma(b),
            np.stack([member.accumulators(multiply.d) for member in self.members]),
            self.cta.shared,
        )
        cluster = self.cta.cluster
        cluster.grid.num_mma += 1
        if cluster.monitor.is_watching:
            *a_reads, b_read = footprint.shared_reads
            for position, part in product.parts.items():
                chunks = [b_read.offsets, *(_chunks_of_warp(read, position) for read in a_reads)]
                part.shared_read_at(self.cta.rank, np.concatenate(chunks))
        product.is_done = True
        for member, words in zip(self.members, result, strict=True):
            member.set_accumulators(multiply.d, words)
            member.progress()


def _chunks_of_warp(read: SharedAccess, position: int) -> np.ndarray:
    """Shared addresses of the 16-byte chunks of a warp's 16 rows of A."""
    k = K_BYTES // read.element_bytes
    chunks = chunk_offsets(read.descriptor, read.rows, k, read.element_bytes, read.mn_major)
    axis = 1 if read.mn_major else 0  # [k, rows / T] or [rows, k / T]
    return np.split(chunks, WARPS, axis)[position].ravel()


def member_of(warp: Warp) -> Member:
    """The warp as a member of its warpgroup."""
    if warp.member is None:
        first = warp.index // WARPS * WARPS
        group = Warpgroup(warp.cta.warps[first : first + WARPS])
        for member in group.members:
            member.warp.member = member
    return warp.member
