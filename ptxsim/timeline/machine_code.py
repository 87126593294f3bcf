"""Machine code of a kernel, as ptxas scheduled it.

The PTX of a trace is assembled with line information, which does not change the code (checked: the same instructions
with and without, for GEMM and attention kernels), so that the disassembler can say which PTX line each machine
instruction comes from. The upper 64 bits of the 128-bit encoding hold what ptxas decided (field positions: Jia et al.,
"Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018; they hold on sm_90 and sm_100):

    bits 41–44  stall: cycles until the warp may issue again     bit 45  yield (set: no)
    bits 46–48  scoreboard that the result sets, 7 none          bits 49–51  the same for operands that are read late
    bits 52–57  scoreboards that must be clear before the instruction issues
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ptxsim.host.build import cache_folder, write_atomically

NO_SCOREBOARD = 7
_LINE = re.compile(r'//## File "\.nv_debug_ptx_txt", line (\d+)')
_LABEL = re.compile(r"^(\.L_x_\d+|\$[\w$]+):")
_CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"^\s+/\* (0x[0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\((\.L_x_\d+|\$[\w$]+)\)")


class ToolMissing(RuntimeError):
    """ptxas or nvdisasm is not installed."""


class AssemblyFailed(RuntimeError):
    """ptxas or nvdisasm refused; the message holds what it said."""


@dataclass(frozen=True)
class MachineInstruction:
    """One instruction. line: of the PTX text, from 1; 0 unknown. targets: indices of where a branch may go."""

    text: str
    line: int
    guard: str  # "@!P0", or ""
    opcode: str
    stall: int
    write_scoreboard: int
    read_scoreboard: int
    wait_mask: int
    targets: tuple[int, ...] = ()

    @property
    def base(self) -> str:
        """UTCHMMA of UTCHMMA.2CTA"""
        return self.opcode.partition(".")[0]

    @property
    def is_branch(self) -> bool:
        return self.base in ("BRA", "BRX", "JMP", "CALL", "RET")

    @property
    def may_fall_through(self) -> bool:
        """Whether the next instruction may be the next in memory: a guard or a uniform predicate decides."""
        if self.base not in ("BRA", "BRX", "JMP", "RET", "EXIT"):
            return True
        return bool(self.guard) or re.match(r"\S+\s+!?U?P\d", self.text) is not None


@dataclass(frozen=True)
class MachineCode:
    """A kernel's instructions, the kernel's own code first."""

    instructions: tuple[MachineInstruction, ...]
    assembler: str  # its version


@functools.cache
def find_assembler() -> str:
    """Path of ptxas: $PTXAS, that of the package nvidia-cuda-nvcc, or the one on the PATH.

    Raises:
        ToolMissing: there is none.
    """
    files = [str(file.locate()) for file in _files("nvidia-cuda-nvcc") if file.name == "ptxas"]
    for candidate in (os.environ.get("PTXAS"), *files, shutil.which("ptxas")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ToolMissing("no ptxas: install the package nvidia-cuda-nvcc, or set PTXAS to its path")


def find_disassembler() -> str:
    """Path of nvdisasm: the package nvidia-cuda-nvdisasm, or the PATH."""
    for file in _files("nvidia-cuda-nvdisasm"):
        if file.stem == "nvdisasm":
            return str(file.locate())
    if found := shutil.which("nvdisasm"):
        return found
    raise ToolMissing("no nvdisasm: install the package nvidia-cuda-nvdisasm")


def _files(distribution: str) -> list[importlib.metadata.PackagePath]:
    try:
        return list(importlib.metadata.files(distribution) or ())
    except importlib.metadata.PackageNotFoundError:
        return []


def assemble(ptx: str, kernel: str) -> MachineCode:
    """The machine code of one kernel of a PTX module, for the module's own target.

    Raises:
        ToolMissing: no assembler or disassembler.    AssemblyFailed: one of them refused.
    """
    assembler, version = find_assembler(), _version(find_assembler())
    key = hashlib.sha256("\0".join((ptx, kernel, version)).encode()).hexdigest()
    path = cache_folder() / "sass" / f"{key}.txt.gz"
    if not path.exists():
        write_atomically(path, gzip.compress(_disassembled(ptx, kernel, assembler).encode(), mtime=0))
    return MachineCode(_parse(gzip.decompress(path.read_bytes()).decode()), version)


@functools.cache
def _version(assembler: str) -> str:
    done = subprocess.run([assembler, "--version"], capture_output=True, text=True)
    found = re.search(r"V\d+[\d.]+", done.stdout)
    return f"ptxas {found[0]}" if found else assembler


def _disassembled(ptx: str, kernel: str, assembler: str) -> str:
    found = re.search(r"^\s*\.target\s+(\w+)", ptx, re.M)
    if found is None:
        raise AssemblyFailed("the PTX names no target")
    with tempfile.TemporaryDirectory(prefix="ptxsim-assemble-") as scratch:
        source, cubin = Path(scratch, "kernel.ptx"), Path(scratch, "kernel.cubin")
        source.write_text(ptx)
        _run([assembler, f"-arch={found[1]}", f"--entry={kernel}", "-lineinfo", str(source), "-o", str(cubin)])
        return _run([find_disassembler(), "-c", "-gp", "-hex", str(cubin)])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssemblyFailed(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr.strip()[:2000]}")
    return done.stdout


def _parse(text: str) -> tuple[MachineInstruction, ...]:
    """Two lines for each instruction, the encoding's lower half on the first; labels and PTX lines between."""
    rows: list[tuple[str, int, int]] = []  # text, PTX line, upper half
    labels: dict[str, int] = {}
    line, pending = 0, None
    for row in text.splitlines():
        if pending is not None:
            upper = _UPPER.match(row)
            if upper is None:
                raise AssemblyFailed(f"unexpected disassembly behind {pending[0]!r}: {row!r}")
            rows.append((*pending, int(upper[1], 16)))
            pending = None
        elif found := _LINE.search(row):
            line = int(found[1])
        elif found := _LABEL.match(row):
            labels[found[1]] = len(rows)
        elif found := _CODE.match(row):
            pending = (found[1], line)
    if not rows:
        raise AssemblyFailed("no instructions in the disassembly")
    return tuple(_instruction(each, labels) for each in rows)


def _instruction(row: tuple[str, int, int], labels: dict[str, int]) -> MachineInstruction:
    text, line, upper = row
    guard, rest = re.fullmatch(r"(?:(@!?U?P\w+)\s+)?(.*)", text).groups()  # type: ignore[union-attr]
    branch_targets = rest.partition("BRANCH_TARGETS")[2]  # of BRX, in a comment
    names = re.findall(r"\.L_x_\d+", branch_targets) or _TARGET.findall(rest)[:1]
    opcode = rest.split()[0]
    is_call_back = opcode.startswith("RET")  # names the function it returns to, not the place
    targets = () if is_call_back else tuple(labels[name] for name in names if name in labels)
    return MachineInstruction(
        text=rest, line=line, guard=guard or "", opcode=opcode, stall=upper >> 41 & 15,
        write_scoreboard=upper >> 46 & 7, read_scoreboard=upper >> 49 & 7, wait_mask=upper >> 52 & 63, targets=targets,
    )  # fmt: skip
