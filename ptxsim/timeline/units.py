"""Which unit a machine instruction keeps busy, and how long: opcodes → rows that `replay.c` reads.

Numbers are names of a chip's parameters (`ptxsim/timeline/chips/`), so that nothing here depends on the chip.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np

from ptxsim.timeline.machine_code import MachineCode, MachineInstruction
from ptxsim.timeline.parameters import Chip

PIPES = ("fma", "alu", "special", "memory", "uniform", "async", "branch", "none")
PLAIN, SHARED_READ, SHARED_WRITE, TMEM_READ, TMEM_WRITE, BRANCH = range(6)
ROW = np.dtype(
    [
        (name, "i4")
        for name in (
            "kind", "pipe", "occupancy", "latency", "read_latency", "stall", "wait_mask", "write_scoreboard",
            "read_scoreboard", "bytes",
        )
    ]
)  # fmt: skip
LANES = 32
SLOTS = {"128": 4, "64": 2}  # 32-bit words of a lane
TMEM_WORDS = {"16dp256bit": 4, "16dp128bit": 2}  # words of a lane in one repetition


@dataclass(frozen=True)
class Unit:
    """What an opcode uses. occupancy, latency: names of parameters; latency is that of a result under a scoreboard."""

    pipe: str
    occupancy: str
    latency: str = "latency_fixed"
    kind: int = PLAIN


_FMA2 = Unit("fma", "cycles_fma2")
_MEMORY = Unit("memory", "cycles_memory", "latency_memory")
_ASYNC = Unit("async", "cycles_async", "latency_uniform")
UNITS: list[tuple[str, Unit]] = [
    (r"(FFMA2|FMUL2|FADD2)", _FMA2),
    (r"(FFMA|FMUL|FADD|HFMA2|HADD2|HMUL2)", Unit("fma", "cycles_fma")),
    (r"(IMAD|IDP)", Unit("fma", "cycles_imad")),
    (r"MUFU\.EX2", Unit("special", "cycles_ex2", "latency_special")),
    (r"(MUFU|I2F|F2I|F2F|FRND|POPC|FLO|BREV)(\.|$)", Unit("special", "cycles_special", "latency_special")),
    (r"F2FP", Unit("alu", "cycles_convert")),
    (r"(LDS|LDSM)(\.|$)", Unit("memory", "cycles_memory", "latency_shared", SHARED_READ)),
    (r"(STS|STSM|STAS|ATOMS)(\.|$)", Unit("memory", "cycles_memory", "latency_shared", SHARED_WRITE)),
    (r"LDTM", Unit("memory", "cycles_memory", "latency_tmem_read", TMEM_READ)),
    (r"STTM", Unit("memory", "cycles_memory", "latency_tmem_write", TMEM_WRITE)),
    (r"(LDG|LDL|LD|ATOMG|ATOM|RED|REDG|LDGSTS)(\.|$)", Unit("memory", "cycles_memory", "latency_global")),
    (r"(STG|STL|ST|CCTL|MEMBAR|ERRBAR)(\.|$)", _MEMORY),
    (r"SHFL", Unit("memory", "cycles_shuffle", "latency_shuffle")),
    (r"(REDUX|CREDUX|MATCH)", Unit("memory", "cycles_redux", "latency_redux")),
    (r"(LDC|LDCU|S2R|S2UR|CS2R|S2RZ)", Unit("uniform", "cycles_uniform", "latency_constant")),
    (r"(SYNCS|BAR|UCGABAR)", Unit("async", "cycles_async", "latency_sync")),
    (r"FENCE", Unit("async", "cycles_async", "latency_fence")),
    (r"(UTC|UTMA|UBLK|UGET|HGMMA|QGMMA|IGMMA|WARPGROUP|USETMAXREG|UVIRT|ACQBULK|PREEXIT)", _ASYNC),
    (r"(R2UR|VOTE|U[A-Z])", Unit("uniform", "cycles_uniform", "latency_uniform")),
    (r"(BRA|BRX|JMP|CALL|RET|EXIT)", Unit("branch", "cycles_branch", "latency_fixed", BRANCH)),
    (r"(BSSY|BSYNC|WARPSYNC|NOP|DEPBAR|YIELD|NANOSLEEP|ELECT)", Unit("none", "cycles_branch")),
    (r".*", Unit("alu", "cycles_alu")),
]


@functools.lru_cache(maxsize=4096)
def unit_of(opcode: str) -> Unit:
    """The unit of a machine instruction's opcode."""
    return next(unit for pattern, unit in UNITS if re.match(pattern, opcode))


def rows(code: MachineCode, chip: Chip) -> np.ndarray:
    """Each instruction as replay.c wants it. → `ROW` [instructions]"""
    return np.array([_row(instruction, chip) for instruction in code.instructions], ROW)


def _row(instruction: MachineInstruction, chip: Chip) -> tuple[int, ...]:
    unit = unit_of(instruction.opcode)
    return (
        unit.kind, PIPES.index(unit.pipe), round(chip[unit.occupancy]), round(chip[unit.latency]),
        round(chip["latency_read"]), instruction.stall, instruction.wait_mask, instruction.write_scoreboard,
        instruction.read_scoreboard, _bytes(instruction),
    )  # fmt: skip


def _bytes(instruction: MachineInstruction) -> int:
    """That a warp moves in shared or tensor memory."""
    words = instruction.opcode.split(".")
    if instruction.base in ("LDTM", "STTM"):
        repetitions = next((int(word[1:]) for word in words if re.fullmatch(r"x\d+", word)), 1)
        return repetitions * LANES * 4 * max((TMEM_WORDS.get(word, 1) for word in words), default=1)
    if instruction.base in ("LDSM", "STSM"):
        return LANES * 4 * int(words[-1])
    return LANES * 4 * next((SLOTS[word] for word in words if word in SLOTS), 1)
