"""Runs a kernel written as PTX text on numpy arrays, without any framework."""

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


def kernel_text(body: str, num_parameters: int) -> str:
    """An entry `kernel` with 64-bit parameters p0, p1, … and plenty of registers."""
    parameters = ",\n".join(f".param .u64 p{index}" for index in range(num_parameters))
    registers = ".reg .pred %p<64>; .reg .b16 %rs<64>; .reg .b32 %r<256>; .reg .f32 %f<64>; .reg .b64 %rd<64>;"
    head = ".version 9.0\n.target sm_100a\n.extern .shared .align 1024 .b8 dynamic[];\n"
    return f"{head}.visible .entry kernel(\n{parameters}\n)\n{{\n{registers}\n{body}\n}}\n"


def run(body: str, *arguments: np.ndarray | int, options: Options | None = None, **launch) -> Grid:
    """Run a kernel body; arrays are passed as pointers, integers as they are."""
    text = kernel_text(body, len(arguments))
    values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    params = {f"p{index}": int(value).to_bytes(8, "little", signed=value < 0) for index, value in enumerate(values)}
    program = Program(parse_kernel(text, "kernel"), decode_system)
    grid = Grid(program, Launch(params, **launch), options or Options(), num_sms=1)
    grid.run()
    return grid
