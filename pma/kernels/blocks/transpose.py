"""The transposed payload: [columns, tokens], for FP8 products that contract over tokens on Hopper.

Segment b starts at token (offsets[b] // 16 + b) · 16 and token 8t + 2q + e of each 16 lies at 4q + 2t + e
(pma/layouts/transposed.py).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint32

from pma.kernels.blocks.segments import element_pointer

GROUP = 16


@cute.jit
def store_transposed(target: cute.Tensor, payload: cute.Tensor, block, threads: cutlass.Constexpr[int]):
    """Write one row block. payload: [32, C/4] words in shared memory; block: (first row, segment, block, rows)."""
    first_row, segment, local, num_rows = block
    thread, _, _ = cute.arch.thread_idx()
    first_group = (first_row - local * 32) // GROUP + segment + local * 2
    groups = (num_rows + GROUP - 1) // GROUP
    quads = cute.size(payload, mode=[1])
    tokens = cute.size(target, mode=[1])
    for patch in cutlass.range(thread, quads * groups, threads):
        group, quad = patch // quads, patch % quads
        columns = [cute.make_rmem_tensor(4, Uint32) for _ in range(4)]
        for q in cutlass.range_constexpr(4):
            rows = [payload[group * GROUP + row, quad] for row in (2 * q, 2 * q + 1, 2 * q + 8, 2 * q + 9)]
            for column, word in enumerate(transpose_bytes(*rows)):
                columns[column][q] = word
        for column in cutlass.range_constexpr(4):
            offset = Int64(quad * 4 + column) * tokens + (first_group + group) * GROUP
            place = cute.recast_ptr(element_pointer(target, offset, GROUP), dtype=Uint32)
            cute.autovec_copy(columns[column], cute.make_tensor(place, cute.make_layout(4)))


@cute.jit
def transpose_bytes(a: Uint32, b: Uint32, c: Uint32, d: Uint32):
    """Four words of four bytes each, transposed."""
    low_ab, high_ab = Uint32(cute.arch.prmt(a, b, 0x5140)), Uint32(cute.arch.prmt(a, b, 0x7362))
    low_cd, high_cd = Uint32(cute.arch.prmt(c, d, 0x5140)), Uint32(cute.arch.prmt(c, d, 0x7362))
    return (
        Uint32(cute.arch.prmt(low_ab, low_cd, 0x5410)),
        Uint32(cute.arch.prmt(low_ab, low_cd, 0x7632)),
        Uint32(cute.arch.prmt(high_ab, high_cd, 0x5410)),
        Uint32(cute.arch.prmt(high_ab, high_cd, 0x7632)),
    )
