"""tcgen05: tensor memory and the fifth-generation tensor core (PTX ISA 9.7.16). The numbers are in `matrix.py`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ptxsim.machine.addresses import in_cta, offset_of, rank_of
from ptxsim.machine.cluster import CTA, TMEM_COLUMNS, MachineFault
from ptxsim.machine.descriptors import InstructionDescriptor, SharedDescriptor, chunk_offsets, gather
from ptxsim.machine.fragments import Fragment, fragment, reduction
from ptxsim.machine.matrix import BAND, CtaMemory, Footprint, MatrixProduct, mma
from ptxsim.machine.operands import MASK32, Operands, first_lane, lanes_in
from ptxsim.machine.warp import ALL_LANES, UNWRITTEN, PendingLoad, Warp
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Unsupported

QUARTER = 32  # lanes of tensor memory that a warp reaches
CELL_MASK = 0x3FFFFFFF  # bits 30–31 of a scale factor's address repeat its id
EARLY = 0.5  # how often, under a delay, a load samples or a store lands at once rather than at its wait


def decode_tensor_core(instruction: Instruction, operands: Operands) -> Handler:
    kind = instruction.words[1]
    if kind.startswith("fence") or kind == "relinquish_alloc_permit":
        return _nothing
    decoders = {
        "alloc": _allocate, "dealloc": _free, "wait::ld": _wait_loads, "wait::st": _wait_stores, "ld": _load,
        "st": _store, "commit": _commit, "cp": _copy, "mma": _multiply,
    }  # fmt: skip
    if kind not in decoders:
        raise Unsupported(instruction.opcode)
    return decoders[kind](instruction, operands)


def _nothing(warp: Warp, lanes: int) -> None:
    return None


def _ctas(warp: Warp, instruction: Instruction) -> list[CTA]:
    """The CTAs that an instruction works on: its own, or with cta_group::2 the pair, even one first."""
    if "cta_group::2" not in instruction.opcode:
        return [warp.cta]
    even = warp.cta.rank & ~1
    if even + 1 >= len(warp.cta.cluster.ctas):
        raise MachineFault("cta_group::2 in a cluster without a pair of CTAs")
    return warp.cta.cluster.ctas[even : even + 2]


# ------------------------------------------------------------------------------------------------- allocation


def _allocate(instruction: Instruction, operands: Operands) -> Handler:
    """tcgen05.alloc [address], columns. With cta_group::2 one warp of each CTA executes it."""
    address, columns = operands.shared_address(instruction.operands[0]), operands.value(instruction.operands[1])

    def handler(warp: Warp, lanes: int) -> None:
        lane, cluster = first_lane(lanes), warp.cta.cluster
        base, place = warp.cta.allocate_tmem(columns(warp, lane), instruction.line), address(warp, lane)
        cluster.shared_bytes(place, 4).view(np.uint32)[0] = base
        cluster.monitor.shared_write(warp, rank_of(place), offset_of(place), 4)

    return handler


def _free(instruction: Instruction, operands: Operands) -> Handler:
    address, columns = (operands.value(text) for text in instruction.operands)

    def handler(warp: Warp, lanes: int) -> None:
        lane = first_lane(lanes)
        base, count = address(warp, lane) & 0xFFFF, columns(warp, lane)
        warp.cta.free_tmem(base, count)
        warp.cta.cluster.monitor.tmem_freed(warp, range(base, base + count))

    return handler


# ------------------------------------------------------------------------------------------ loads and stores


def _wait_loads(instruction: Instruction, operands: Operands) -> Handler:
    return lambda warp, lanes: warp.end_loads()


def _wait_stores(instruction: Instruction, operands: Operands) -> Handler:
    def handler(warp: Warp, lanes: int) -> None:
        while warp.pending_stores:
            warp.pending_stores.pop(0)()

    return handler


class _Window:
    """Where a tcgen05.ld or .st finds its fragment: in the quarter of the lanes that its warp reaches."""

    def __init__(self, warp: Warp, lanes: int, address: int, fragment: Fragment):
        if lanes != ALL_LANES:
            raise MachineFault("tcgen05.ld and .st need all lanes of the warp")
        column, lane, quarter = address & 0xFFFF, address >> 16, warp.index % 4
        first_rows = range(0, QUARTER, fragment.num_rows)
        if lane // QUARTER not in (0, quarter) or lane % QUARTER not in first_rows:  # 0: the quarter is implied
            raise MachineFault(
                f"{warp} reaches lanes {QUARTER * quarter} … {QUARTER * quarter + 31} of tensor memory, "
                f"{fragment.num_rows} at a time; the address names lane {lane}"
            )
        self.warp, self.fragment, self.line = warp, fragment, warp.instruction().line
        self.memory = warp.cta.tmem.reshape(-1)
        top = QUARTER * quarter + lane % QUARTER
        self.first = top * TMEM_COLUMNS + column
        self.bands = range(top // BAND, (top + fragment.num_rows) // BAND)
        self.columns = [range(column + each.start, column + each.stop) for each in fragment.columns]
        for columns in self.columns:
            warp.cta.check_tmem(columns.start, len(columns))

    def read(self) -> np.ndarray:
        return self.fragment.read(self.memory, self.first)

    def write(self, values: np.ndarray) -> None:
        self.fragment.write(self.memory, self.first, values)

    def note(self, *, is_write: bool, state: str = "done") -> None:
        monitor = self.warp.cta.cluster.monitor
        for columns in self.columns:
            monitor.tmem_access(self.warp, self.bands, columns, line=self.line, is_write=is_write, state=state)


def _half_split(instruction: Instruction, place: int) -> int:
    """immHalfSplitoff of shape 16x32bx2, in columns."""
    return int(instruction.operands[place], 0) if "16x32bx2" in instruction.words else 0


def _load(instruction: Instruction, operands: Operands) -> Handler:
    """tcgen05.ld: values are there at tcgen05.wait::ld, or when an instruction names one of the registers.

    Kernels do not follow every load with a wait, because the compiler makes those who use the registers wait. Until the
    load has landed its columns count as being read.
    """
    words, is_reduction = instruction.words, "red" in instruction.words
    values = operands.registers(instruction.operands[0])
    moved = fragment(words, len(values), _half_split(instruction, -1))
    registers = np.array([*values, *([operands.register(instruction.operands[1])] if is_reduction else [])])
    address = operands.shared_address(instruction.operands[1 + is_reduction])

    def read(window: _Window) -> np.ndarray:
        cells = window.read()
        return np.concatenate([cells, reduction(words, cells)[None]]) if is_reduction else cells

    def handler(warp: Warp, lanes: int) -> None:
        engine = warp.cta.cluster.engine
        window = _Window(warp, lanes, address(warp, first_lane(lanes)), moved)
        warp.mark_written(registers, lanes)
        if engine.delay is None:
            warp.registers[registers] = read(window)
            window.note(is_write=False)
            return
        sampled = read(window) if engine.rng.random() < EARLY else None
        warp.registers[registers] = UNWRITTEN
        window.note(is_write=False, state="pending")

        def deliver() -> None:
            warp.registers[registers] = read(window) if sampled is None else sampled

        warp.start_load(PendingLoad(registers, deliver, lambda: window.note(is_write=False, state="landing")))

    return handler


def _store(instruction: Instruction, operands: Operands) -> Handler:
    """tcgen05.st: cells are written at tcgen05.wait::st at the latest."""
    address = operands.shared_address(instruction.operands[0])
    registers = np.array(operands.registers(instruction.operands[-1]))
    moved = fragment(instruction.words, len(registers), _half_split(instruction, 1))

    def handler(warp: Warp, lanes: int) -> None:
        engine = warp.cta.cluster.engine
        window = _Window(warp, lanes, address(warp, first_lane(lanes)), moved)
        values = warp.registers[registers].astype(np.uint32)
        if engine.delay is None:
            window.write(values)
            window.note(is_write=True)
            return
        is_early = engine.rng.random() < EARLY
        if is_early:
            window.write(values)
        window.note(is_write=True, state="pending")

        def land() -> None:
            if not is_early:
                window.write(values)
            window.note(is_write=True, state="landing")

        warp.pending_stores.append(land)

    return handler


# ------------------------------------------------------------------------------------- commit, copies, products


def _commit(instruction: Instruction, operands: Operands) -> Handler:
    """tcgen05.commit: arrives at an mbarrier (of several CTAs: multicast) after all earlier tcgen05 work."""
    address = operands.shared_address(instruction.operands[0])
    multicast = operands.value(instruction.operands[1]) if "multicast::cluster" in instruction.words else None

    def handler(warp: Warp, lanes: int) -> None:
        cluster = warp.cta.cluster
        cluster.activity += 1
        for lane in lanes_in(lanes):
            place = address(warp, lane)
            mask = multicast(warp, lane) & 0xFFFF if multicast else 1 << rank_of(place)
            targets = [in_cta(place, rank) for rank in range(16) if mask >> rank & 1]
            cluster.mbarrier(place, warp)

            def arrive(operation: Any, targets: list[int] = targets) -> None:
                for target in targets:
                    cta = cluster.ctas[rank_of(target)]
                    if not any(other.is_live for other in cta.warps):
                        message = f"an arrival reaches CTA {cta.index}, which has exited"
                        cluster.grid.note("arrival after exit", message, "tcgen05.commit", instruction.line)
                    cluster.mbarrier(target).arrive(1, operation.clock)

            cluster.engine.submit_tensor(warp, "tcgen05.commit", arrive, is_commit=True)

    return handler


# Destination (first lane, lanes, first source row) of tcgen05.cp. The digits of warpx2 name the quarters that share.
_COPIES = {
    "32x128b.warpx4": [(quarter * 32, 32, 0) for quarter in range(4)],
    "64x128b.warpx2::01_23": [(0, 32, 0), (32, 32, 0), (64, 32, 32), (96, 32, 32)],
    "64x128b.warpx2::02_13": [(0, 32, 0), (64, 32, 0), (32, 32, 32), (96, 32, 32)],
    "128x128b": [(0, 128, 0)],
    "128x256b": [(0, 128, 0)],
}


def _copy(instruction: Instruction, operands: Operands) -> Handler:
    """tcgen05.cp: rows of shared memory, 16 or 32 bytes each, into columns of tensor memory."""
    shape = ".".join(instruction.words[3:]) if instruction.words[2].startswith("cta_group") else ""
    if shape not in _COPIES:
        raise Unsupported(instruction.opcode)
    address, descriptor = operands.shared_address(instruction.operands[0]), operands.wide(instruction.operands[1])
    rows, row_bytes = int(shape.split("x")[0]), 16 if "128b" in shape else 32
    num_columns = row_bytes // 4

    def handler(warp: Warp, lanes: int) -> None:
        lane, cluster = first_lane(lanes), warp.cta.cluster
        column, ctas = address(warp, lane) & 0xFFFF, _ctas(warp, instruction)
        source = SharedDescriptor.decode_tcgen05(descriptor(warp, lane))
        for cta in ctas:
            cta.check_tmem(column, num_columns)

        def copy(operation: Any) -> None:
            for cta in ctas:
                data = gather(source, cta.shared, rows, row_bytes, 1, False)
                words = np.ascontiguousarray(data).view(np.uint32)
                chunks = chunk_offsets(source, rows, row_bytes, 1, False).ravel()
                operation.shared_read_at(cta.rank, chunks)
                for first, count, row in _COPIES[shape]:
                    cta.tmem[first : first + count, column : column + num_columns] = words[row : row + count]
                    bands = range(first // BAND, (first + count) // BAND)
                    operation.tmem_write(cta.rank, bands, range(column, column + num_columns))

        cluster.engine.submit_tensor(warp, f"tcgen05.cp {shape} to column {column}", copy)

    return handler


def _multiply(instruction: Instruction, operands: Operands) -> Handler:
    return _Multiply(instruction, operands)


_MISSING_FORMS = {
    "sp": "sparse products", "ws": "weight-stationary products", "block16": "scale factors of 16 elements",
    "scale_vec::4X": "scale factors of 16 elements",
}  # fmt: skip


class _Multiply:
    """tcgen05.mma: its operands decoded; called for a warp it submits one product."""

    def __init__(self, instruction: Instruction, operands: Operands):
        opcode, texts = instruction.opcode, list(instruction.operands)
        kind = re.search(r"kind::(\w+)", opcode)
        if kind is None:
            raise Unsupported("a product without .kind")
        if missing := [what for form, what in _MISSING_FORMS.items() if form in instruction.words]:
            raise Unsupported(f"no {' and no '.join(missing)}")
        self.instruction, self.kind = instruction, kind[1]
        self.d = operands.shared_address(texts.pop(0))
        a = texts.pop(0)
        self.a_in_tmem = a.startswith("[")
        self.a = operands.shared_address(a) if self.a_in_tmem else operands.wide(a)
        self.b, self.descriptor = operands.wide(texts.pop(0)), operands.value(texts.pop(0))
        self.scales = None
        if "block_scale" in opcode:
            self.scales = (operands.shared_address(texts.pop(0)), operands.shared_address(texts.pop(0)))
        self.mask = operands.registers(texts.pop(0)) if texts and texts[0].startswith("{") else []
        self.enable = operands.value(texts.pop(0)) if texts else None
        self.scale_d = int(texts.pop(0), 0) if texts else 0

    def __call__(self, warp: Warp, lanes: int) -> None:
        lane, cluster = first_lane(lanes), warp.cta.cluster
        ctas, product = _ctas(warp, self.instruction), self.product(warp, lane)

        def multiply(operation: Any) -> None:
            footprint = mma(product, [CtaMemory(cta.shared, cta.tmem) for cta in ctas])
            if cluster.monitor.is_watching:
                _record(operation, footprint, ctas)

        d, shape = product.accumulator & 0xFFFF, product.instruction
        cluster.engine.submit_tensor(warp, f"tcgen05.mma {self.kind} {shape.m}x{shape.n} at column {d}", multiply)
        cluster.monitor.note_product(warp, self.kind, shape.m, shape.n, d)
        cluster.grid.num_mma += 1

    def product(self, warp: Warp, lane: int) -> MatrixProduct:
        a = self.a(warp, lane)
        scale_a, scale_b = (each(warp, lane) for each in self.scales) if self.scales else (0, 0)
        mask = sum((int(warp.registers[register, lane]) & MASK32) << 32 * i for i, register in enumerate(self.mask))
        return MatrixProduct(
            instruction=InstructionDescriptor.decode(self.descriptor(warp, lane), self.kind),
            accumulator=self.d(warp, lane) & CELL_MASK,
            a=a if self.a_in_tmem else SharedDescriptor.decode_tcgen05(a),
            b=SharedDescriptor.decode_tcgen05(self.b(warp, lane)),
            scale_a=scale_a,
            scale_b=scale_b,
            accumulate=self.enable is None or bool(self.enable(warp, lane)),
            disabled_lanes=mask,
            scale_input_d=self.scale_d,
        )


def _record(operation: Any, footprint: Footprint, ctas: list[CTA]) -> None:
    for read in footprint.shared_reads:
        operation.shared_read_at(ctas[read.cta].rank, read.offsets)
    for accesses, note in (
        (footprint.tensor_reads, operation.tmem_read),
        (footprint.tensor_writes, operation.tmem_write),
    ):
        for access in accesses:
            note(ctas[access.cta].rank, access.bands, range(access.column, access.column + access.columns))
