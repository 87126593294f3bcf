"""The transposed payload of `pma/layouts/transposed.py`, from a row block's payload in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from pma.kernels.blocks.memory import store_words
from pma.layouts import BLOCK
from pma.layouts.transposed import GROUP, permuted_column


@cute.jit
def store_transposed(target: cute.Tensor, payload: cute.Tensor, block, threads: cutlass.Constexpr[int]):
    """Write one row block: a thread for each column of a group, 16 bytes, so that a warp writes 512 contiguous bytes.

    payload: [32, C / 4] words in shared memory; block: (first row, segment, block in the segment, rows).
    """
    first_row, segment, local, num_rows = block
    thread, _, _ = cute.arch.thread_idx()
    columns = cutlass.const_expr(4 * cute.size(payload, mode=[1]))
    first_group = (first_row - local * BLOCK) // GROUP + segment + local * (BLOCK // GROUP)
    groups = (num_rows + GROUP - 1) // GROUP
    for index in cutlass.range(thread, columns * groups, threads):
        group, place = index // columns, index % columns
        column = permuted_column(place)
        pair_of_bytes = (column % 4) * 0x11 + 0x40  # one byte of each of two words
        tokens = cute.make_rmem_tensor(4, Uint32)
        for q in cutlass.range_constexpr(4):
            rows = [payload[group * GROUP + row, column // 4] for row in (2 * q, 2 * q + 1, 2 * q + 8, 2 * q + 9)]
            first = permute_bytes(rows[0], rows[1], pair_of_bytes)
            second = permute_bytes(rows[2], rows[3], pair_of_bytes)
            tokens[q] = permute_bytes(first, second, Int32(0x5410))
        store_words(target, (Int64(first_group + group) * columns + place) * GROUP, tokens)


@cute.jit
def permute_bytes(a: Uint32, b: Uint32, selector: Int32) -> Uint32:
    """Four of the eight bytes of two words, one for each nibble of the selector (PTX `prmt`)."""
    return Uint32(cute.arch.prmt(a, b, selector))
