"""CuTe DSL kernels that move a numbered matrix through tensor memory, in one shape there and in another back."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

import ptxsim

ROWS, COLUMNS = 128, 32


@cute.kernel
def _through_tensor_memory(
    out: cute.Tensor, store: cutlass.Constexpr, load: cutlass.Constexpr, columns_apart: cutlass.Constexpr
):
    """out[i, j] = i · COLUMNS + j: each thread stores the numbers of its part, then loads those of another."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    holder = SmemAllocator().allocate(4)
    holder = cute.recast_ptr(holder, dtype=cutlass.Int32)
    if warp == 0:
        cute.arch.alloc_tmem(columns_apart * COLUMNS, holder)
    cute.arch.sync_threads()
    kind = out.element_type
    pointer = cute.arch.retrieve_tmem_ptr(kind, 16, holder)
    numbers = cute.make_identity_tensor((ROWS, COLUMNS))
    layout = cute.make_layout((ROWS, COLUMNS), stride=(65536 * columns_apart, columns_apart))
    memory = cute.make_tensor(pointer, layout)

    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(store, kind), memory).get_slice(thread)
    places = copy.partition_S(numbers)
    values = cute.make_rmem_tensor(places.shape, cutlass.Int16 if columns_apart == 2 else cutlass.Int32)
    for index in cutlass.range_constexpr(cute.size(values)):
        number = places[index][0] * COLUMNS + places[index][1]
        values[index] = values.element_type(number)
    cute.copy(copy, cute.recast_tensor(values, kind), copy.partition_D(memory))
    cute.arch.fence_view_async_tmem_store()
    cute.arch.sync_threads()

    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(load, kind), memory).get_slice(thread)
    places = copy.partition_D(numbers)
    loaded = cute.make_rmem_tensor(places.shape, kind)
    cute.copy(copy, copy.partition_S(memory), loaded)
    cute.arch.fence_view_async_tmem_load()
    for index in cutlass.range_constexpr(cute.size(loaded)):
        out[places[index]] = loaded[index]
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.dealloc_tmem(pointer, columns_apart * COLUMNS)


@cute.jit
def _launch(out: cute.Tensor, store: cutlass.Constexpr, load: cutlass.Constexpr, columns_apart: cutlass.Constexpr):
    _through_tensor_memory(out, store, load, columns_apart).launch(grid=[1, 1, 1], block=[ROWS, 1, 1])


def through_tensor_memory(store: str, load: str, *, is_packed: bool) -> tuple[torch.Tensor, set[str]]:
    """(what came back, int [128, 32]; the opcodes that moved it). store, load: shapes, e.g. "16x64b"."""
    kind = torch.float16 if is_packed else torch.float32
    out = torch.full((ROWS, COLUMNS), float("nan"), dtype=kind)
    with ptxsim.simulate("sm_100a", num_sms=1, seed=1) as simulation:
        repeat = tcgen05.Repetition.x2
        unpack = tcgen05.Unpack.UNPACK_32b_IN_16b if is_packed else tcgen05.Unpack.NONE
        pack = tcgen05.Pack.PACK_16b_IN_32b if is_packed else tcgen05.Pack.NONE
        there = getattr(tcgen05, f"St{store}Op")(repeat, unpack)
        back = getattr(tcgen05, f"Ld{load}Op")(repeat, pack)
        argument = from_dlpack(out)
        cute.compile(_launch, argument, there, back, 2 if is_packed else 1)(argument)
    instructions = simulation.launches[0].program.kernel.instructions
    opcodes = {each.opcode for each in instructions if each.words[:2] in (["tcgen05", "ld"], ["tcgen05", "st"])}
    return out.view(torch.int16 if is_packed else torch.int32), opcodes
