"""Builds the SIMT core with the arithmetic that programs need, and binds it.

`simt.c` has the control flow; one `case` for each arithmetic expression is generated. Cores are kept in the cache
folder, so that the next process builds nothing.
"""

import ctypes
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ptxsim.host.build import build_shared_object, cache_folder, write_atomically

HERE = Path(__file__).parent
FLAGS = (
    "-O2", "-ftree-vectorize", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fwrapv", "-fno-strict-aliasing",
)  # fmt: skip
FIRST_ARITHMETIC = 32
OPERATIONS = (
    "SYSTEM", "BRANCH", "RETURN", "LOAD", "STORE", "PACK", "UNPACK", "SHUFFLE", "BALLOT", "ALL", "ANY", "ELECT",
    "REDUX", "MOVE128", "MATCH_ANY", "NOTHING", "LOP3", "FUNNEL", "ACTIVE_MASK",
)  # fmt: skip
OPCODE = {name: index for index, name in enumerate(OPERATIONS)}
SLOTS = 12  # operands of an instruction: d, a, b, c, vector[0] … vector[7]

INSTRUCTION = np.dtype(
    [
        ("op", "u2"), ("is_negated", "u1"), ("count", "u1"), ("guard", "i4"), ("d", "i4"), ("a", "i4"), ("b", "i4"),
        ("c", "i4"), ("immediate", "i8"), ("vector", "i4", 8), ("target", "i4"), ("space", "u1"),
        ("element_bytes", "u1"), ("is_signed", "u1"), ("needs_warp", "u1"), ("is_selection", "u1"), ("is_move", "u1"),
        ("reads", "u2"), ("writes", "u2"),
    ],
    align=True,
)  # fmt: skip
ACCESS = np.dtype([("instruction", "u4"), ("address", "u4"), ("bytes", "u4"), ("lane", "u4")])
STORE_BIT = 0x80000000

OUT_OF_BUDGET, SYSTEM, EXITED, BLOCKED, FAULT, TOUCHED, RESERVED = range(7)
FAULTS = (
    "no fault", "shared address outside the CTA's window", "null address", "global address outside every known tensor",
    "read of a register that was never written", "misaligned address", "bad opcode",
    "local address outside the variables declared",
)  # fmt: skip
UNWRITTEN_REGISTER = 4
MAX_PENDING = 127  # tcgen05.ld of a warp under way
HAS_ARRIVED = 128  # beside the number of a load whose values are there
SPACES = ("generic", "shared", "local", "global")  # that an instruction names
LOCAL_BASE = 1 << 28  # generic address of local memory: each lane sees its own there


class WarpState(ctypes.Structure):
    """`Warp` of simt.c."""

    _fields_ = [
        ("pc", ctypes.c_uint32 * 32), ("live", ctypes.c_uint32), ("blocked", ctypes.c_uint32),
        ("parked", ctypes.c_uint32), ("active", ctypes.c_uint32), ("executing", ctypes.c_uint32),
        ("at", ctypes.c_uint32), ("is_diverged", ctypes.c_uint32), ("may_pass", ctypes.c_uint32),
        ("executed", ctypes.c_uint64), ("fault", ctypes.c_uint32), ("touched", ctypes.c_uint32),
        ("fault_address", ctypes.c_uint64), ("num_pending", ctypes.c_uint32),
        ("pending", ctypes.c_void_p), ("written", ctypes.c_void_p), ("reserved", ctypes.c_void_p),
        ("local", ctypes.c_void_p), ("local_size", ctypes.c_uint64),
        ("trace", ctypes.c_void_p), ("trace_count", ctypes.c_uint64), ("trace_capacity", ctypes.c_uint64),
    ]  # fmt: skip


class Context(ctypes.Structure):
    """`Context` of simt.c."""

    _fields_ = [
        ("shared", ctypes.c_void_p * 16), ("shared_size", ctypes.c_uint64), ("log", ctypes.c_void_p),
        ("log_count", ctypes.c_uint64), ("log_capacity", ctypes.c_uint64), ("num_ranges", ctypes.c_uint64),
        ("ranges", ctypes.c_void_p),
    ]  # fmt: skip


class Core:
    """The loaded core and the opcode of each arithmetic expression it has."""

    def __init__(self, path: Path, expressions: list[str]):
        self.opcodes = {text: FIRST_ARITHMETIC + index for index, text in enumerate(expressions)}
        library = ctypes.CDLL(str(path))
        self.run, self.advance, self.diverge = library.warp_run, library.warp_advance, library.warp_diverge
        pointer = ctypes.c_void_p
        self.run.argtypes = [pointer, pointer, pointer, pointer, ctypes.c_int64]
        self.run.restype = ctypes.c_int
        self.advance.argtypes = self.diverge.argtypes = [pointer]
        self.advance.restype = self.diverge.restype = None


_loaded: list[Core] = []


def load_core(expressions: Iterable[str]) -> Core:
    """A core that has at least these expressions: a loaded one, else one from the cache folder, else a new one.

    What the cache folder holds stands in files of its own, one for each core, which are written once it is built and
    never changed: processes do not disturb each other, and an expression that does not compile leaves no trace. A new
    core has what the largest one has, too, so that few programs need another.
    """
    wanted = dict.fromkeys(expressions)
    for core in _loaded:
        if wanted.keys() <= core.opcodes.keys():
            return core
    template = _template()
    folder = cache_folder() / f"cores-{_digest(template, *FLAGS)}"
    built = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    sufficient = [each for each in built if wanted.keys() <= set(each)]
    extended = list(dict.fromkeys([*max(built, key=len, default=[]), *wanted]))
    chosen = min(sufficient, key=len, default=extended)
    cases = "\n".join(_case(FIRST_ARITHMETIC + index, text) for index, text in enumerate(chosen))
    core = Core(build_shared_object(template.replace("//@ARITHMETIC@", cases), "simt", FLAGS), chosen)
    if not sufficient:
        write_atomically(folder / f"{_digest(*chosen)}.json", json.dumps(chosen).encode())
    _loaded.append(core)
    return core


def _template() -> str:
    """The core's source, without arithmetic."""
    return (HERE / "simt.c").read_text().replace('#include "numerics.h"', (HERE / "numerics.h").read_text())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _case(opcode: int, expression: str) -> str:
    sources = [name for name in "abc" if re.search(rf"\b{name}\b", expression)]
    pointers = "".join(f"const uint64_t* {name}_ = REGISTER(i->{name}); " for name in sources)
    values = "".join(f"uint64_t {name} = {name}_[l]; " for name in sources)
    loop = f"FOR_LANES({values}d_[l] = {expression};)"
    return f"      case {opcode}: {{ {pointers}uint64_t* d_ = REGISTER(i->d); {loop} break; }}"
