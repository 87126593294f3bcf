"""System instructions by the first word of their opcode."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ptxsim.machine import atomics, cluster_control, copies, matrix_moves, synchronisation
from ptxsim.machine.operands import Operands
from ptxsim.machine.tensor_core import decode_tensor_core
from ptxsim.machine.tensor_map_updates import decode_tensor_map_update
from ptxsim.machine.warp import Warp
from ptxsim.machine.warp_product import decode_warp_product
from ptxsim.machine.warpgroup import decode_warpgroup
from ptxsim.ptx.parse import Instruction
from ptxsim.ptx.program import Handler, Program, Unsupported


def decode_system(program: Program, instruction: Instruction) -> Handler:
    """The handler of an instruction that needs the machine.

    Raises:
        Unsupported: a form that is not modelled.
    """
    decoder = _DECODERS.get(instruction.words[0])
    if decoder is None:
        raise Unsupported(instruction.opcode)
    return decoder(instruction, Operands(program))


def _trap(instruction: Instruction, operands: Operands) -> Handler:
    def handler(warp: Warp, lanes: int) -> NoReturn:
        raise RuntimeError("the kernel executed trap")

    return handler


_DECODERS: dict[str, Callable[[Instruction, Operands], Handler]] = {
    "mbarrier": synchronisation.decode_mbarrier,
    "bar": synchronisation.decode_barrier,
    "barrier": synchronisation.decode_barrier,
    "fence": synchronisation.decode_fence,
    "membar": synchronisation.decode_fence,
    "cp": copies.decode_copy,
    "st": cluster_control.decode_store_async,
    "mapa": cluster_control.decode_map_address,
    "getctarank": cluster_control.decode_rank,
    "clusterlaunchcontrol": cluster_control.decode_launch_control,
    "atom": atomics.decode_atomic,
    "red": atomics.decode_atomic,
    "tcgen05": decode_tensor_core,
    "tensormap": decode_tensor_map_update,
    "wgmma": decode_warpgroup,
    "ldmatrix": matrix_moves.decode_load,
    "stmatrix": matrix_moves.decode_store,
    "movmatrix": matrix_moves.decode_transpose,
    "mma": decode_warp_product,
    "trap": _trap,
}
