"""What a compiled kernel consists of, from NVIDIA's disassembler; needs no GPU."""

import importlib.metadata
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

DISTRIBUTION = "nvidia-cuda-nvdisasm"
# "        /*0c80*/              @!P2 IMAD.MOV R13, RZ, RZ, R2 ;"; data has a directive like .byte after the offset
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
# A header, directives and a label, then two words: the index of the kernel's symbol and the number
REGISTERS = re.compile(r"EIATTR_REGCOUNT\n(?:.*\n){1,6}?.*\.word\s+index@.*\n.*\.word\s+(0x[0-9a-f]+)")


@dataclass(frozen=True)
class Disassembly:
    """Mnemonics in program order, without predicates ("STL.64"), and the registers of a thread, None if not said."""

    instructions: tuple[str, ...]
    registers: int | None

    def starting_with(self, *prefixes: str) -> list[str]:
        return [name for name in self.instructions if name.startswith(prefixes)]


@cache
def disassembler() -> Path:
    """Path of nvdisasm, wherever its package puts it."""
    for file in importlib.metadata.files(DISTRIBUTION) or ():
        if file.stem == "nvdisasm":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{DISTRIBUTION} has no file named nvdisasm")


def disassemble(cubin: Path) -> Disassembly:
    result = subprocess.run([disassembler(), cubin], capture_output=True, text=True, check=True)
    instructions = tuple(INSTRUCTION.findall(result.stdout))
    if not instructions:
        raise ValueError(f"no instructions in what nvdisasm says of {cubin}")
    registers = REGISTERS.search(result.stdout)
    return Disassembly(instructions, int(registers[1], 16) if registers else None)


def compile_to(folder: Path, kernels: ModuleType, arch: str, *static: object) -> Disassembly:
    """Compile in this process, past the cache, and take the result apart. static: the spec, and its configuration."""
    kernels.build(arch, *static, options=f"--keep-cubin --dump-dir {folder}")
    (cubin,) = folder.glob("*.cubin")
    return disassemble(cubin)
