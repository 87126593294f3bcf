"""Reaching global memory: 64-bit offsets, promised alignments, clearing."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32
from cutlass.experimental import primitives

WORDS = 4  # of 4 bytes in the widest store


@cute.jit
def element_pointer(tensor: cute.Tensor, offset: Int64, alignment: cutlass.Constexpr[int]) -> cute.Pointer:
    """Pointer `offset` elements behind the start of a tensor in global memory; 64-bit, with a promised alignment."""
    element_bytes = cutlass.const_expr(tensor.element_type.width // 8)
    address = tensor.iterator.toint() + offset * element_bytes
    return cute.make_ptr(tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=alignment)


@cute.jit
def row_tensor(tensor: cute.Tensor, offset: Int64, layout: cute.Layout) -> cute.Tensor:
    """A view with `layout` of what starts `offset` elements behind the start, at a multiple of 16 bytes."""
    return cute.make_tensor(element_pointer(tensor, offset, 16), layout)


@cute.jit
def value_at(tensor: cute.Tensor, place: Int64):
    """An element of 4 bytes."""
    return cute.make_tensor(element_pointer(tensor, place, 4), cute.make_layout(1))[0]


@cute.jit
def load_byte(tensor: cute.Tensor, offset: Int64) -> Int32:
    byte = cute.make_tensor(element_pointer(tensor, offset, 1), cute.make_layout(1))[0]
    return Int32(byte) & 0xFF  # the conversion extends the sign


@cute.jit
def store_byte(tensor: cute.Tensor, offset: Int64, byte: Int32):
    cute.make_tensor(element_pointer(tensor, offset, 1), cute.make_layout(1))[0] = Uint8(byte)


@cute.jit
def store_words(tensor: cute.Tensor, offset: Int64, words: cute.Tensor):
    """Store two or four words of 4 bytes at byte `offset`, a multiple of their size, whatever the tensor's elements."""
    size = cutlass.const_expr(cute.size(words))
    target = cute.make_ptr(Uint32, tensor.iterator.toint() + offset, cute.AddressSpace.gmem, assumed_align=4 * size)
    cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(size)))


@cute.jit
def clear_rows(tensor: cute.Tensor, begin: Int32, end: Int32, work):
    """Zero rows begin … end − 1. work: (bytes of a row, a multiple of 16; this worker; number of workers)."""
    row_bytes, worker, workers = work
    zeros = cute.make_rmem_tensor(WORDS, Uint32)
    for index in cutlass.range_constexpr(WORDS):
        zeros[index] = Uint32(0)
    index, last = Int64(begin) * (row_bytes // 16) + worker, Int64(end) * (row_bytes // 16)
    while index < last:
        store_words(tensor, index * 16, zeros)
        index += workers


@cute.jit
def clear_bytes(tensor: cute.Tensor, begin: Int64, end: Int64, worker: Int32, workers: Int32):
    """Zero bytes begin … end − 1."""
    index = begin + worker
    while index < end:
        store_byte(tensor, index, Int32(0))
        index += workers


@cute.jit
def add_vector(target: cute.Pointer, kind: cutlass.Constexpr[str], values: cute.Tensor):
    """Add 16 bytes to global memory, each element on its own."""
    primitives.red("add", kind, target.raw_ptr(), values.load(), mem_order="relaxed", mem_scope="gpu")
