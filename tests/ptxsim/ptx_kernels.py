"""Runs a kernel written as PTX text on numpy arrays, without any framework."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptxsim.machine.decode import decode_system
from ptxsim.machine.grid import Grid, Options
from ptxsim.ptx.parse import parse_kernel
from ptxsim.ptx.program import Program


@dataclass
class Launch:
    params: dict[str, bytes]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0


def kernel_text(
    body: str, arguments: Sequence[np.ndarray | int | bytes], target: str = "sm_100a", cluster: int = 1
) -> str:
    """An entry `kernel` with parameters p0, p1, … (64 bits, or 128 bytes for bytes) and plenty of registers."""
    kinds = [f".align 64 .b8 p{i}[{len(a)}]" if isinstance(a, bytes) else f".u64 p{i}" for i, a in enumerate(arguments)]
    parameters = ",\n".join(f".param {kind}" for kind in kinds)
    registers = ".reg .pred %p<64>; .reg .b16 %rs<64>; .reg .b32 %r<256>; .reg .f32 %f<64>; .reg .b64 %rd<64>;"
    version = "9.0" if target == "sm_100a" else "8.1"
    head = f".version {version}\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 dynamic[];\n"
    clusters = f".explicitcluster\n.reqnctapercluster {cluster}\n" if cluster > 1 else ""
    return f"{head}.visible .entry kernel(\n{parameters}\n)\n{clusters}{{\n{registers}\n{body}\n}}\n"


def run(body: str, *arguments: np.ndarray | int | bytes, options: Options | None = None, **launch) -> Grid:
    """Run a kernel body; arrays are passed as pointers, integers and bytes as they are."""

    def value(argument: np.ndarray | int | bytes) -> bytes:
        if isinstance(argument, bytes):
            return argument
        number = argument.ctypes.data if isinstance(argument, np.ndarray) else argument
        return int(number).to_bytes(8, "little", signed=number < 0)

    params = {f"p{index}": value(argument) for index, argument in enumerate(arguments)}
    program = Program(parse_kernel(kernel_text(body, arguments), "kernel"), decode_system)
    grid = Grid(program, Launch(params, **launch), options or Options(), num_sms=1)
    grid.run()
    return grid
