"""PTX texts of wgmma kernels for one warpgroup, and the matrices in the layouts that they want."""

from dataclasses import dataclass

import numpy as np
import torch

K, N, M = 128, 64, 64  # bytes of a row of A and B in shared memory; columns and rows of D
STEP = 32  # bytes along K that one wgmma takes
A_PLACE, B_PLACE = 0, 8192  # bytes behind `dynamic`
STAGE_BYTES = 16384
TORCH_TYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}  # fmt: skip
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}


def integers(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Small integers: exact in every format, products and sums too."""
    return rng.integers(-4, 5, (rows, columns)).astype(np.float32)


def encoded(matrix: np.ndarray, kind: str) -> np.ndarray:
    """Rows of 128 bytes, what is missing being zero. → uint8 [rows, 128]"""
    matrix = np.pad(matrix, ((0, 0), (0, K // ELEMENT_BYTES[kind] - matrix.shape[1])))
    return (
        torch.from_numpy(np.ascontiguousarray(matrix))
        .to(TORCH_TYPES[kind])
        .view(torch.uint8)
        .numpy()
        .reshape(len(matrix), -1)
    )


def swizzled(rows: np.ndarray) -> np.ndarray:
    """128-byte swizzle: chunk c of row r lies at chunk c XOR r % 8. rows: uint8 [rows, 128] → the same"""
    chunks = rows.reshape(len(rows), 8, 16)
    return np.stack([row[np.arange(8) ^ number % 8] for number, row in enumerate(chunks)]).reshape(len(rows), -1)


def stage(a: np.ndarray, b: np.ndarray, kind: str, *, is_b_transposed: bool = False) -> np.ndarray:
    """Shared memory with A [64, k] and B [64, k], or B as [k, 64] when it is MN-major. → uint8 [16384]"""
    b_rows = b.T if is_b_transposed else b
    return np.concatenate([swizzled(encoded(each, kind)).ravel() for each in (a, np.ascontiguousarray(b_rows))])


def operand_fragments(a: np.ndarray, kind: str) -> np.ndarray:
    """A as registers (PTX ISA 9.7.15.5: register j of a step holds row 16 w + l / 4 + 8 (j % 2), and along K four bytes
    from 4 (l % 4) + 16 (j / 2)). → uint32 [128 threads, 4 steps, 4 registers]"""
    words = np.ascontiguousarray(encoded(a, kind)).view(np.uint32)  # [64, 32]
    thread, step, j = np.ogrid[:128, :4, :4]
    lane = thread % 32
    return words[16 * (thread // 32) + lane // 4 + 8 * (j % 2), 8 * step + lane % 4 + 4 * (j // 2)]


def result_matrix(registers: np.ndarray, number: type) -> np.ndarray:
    """D from what the threads stored (PTX ISA 9.7.15.5: element i of a thread is in row 16 w + l / 4 + 8 (i / 2 % 2),
    column 8 (i / 4) + 2 (l % 4) + i % 2). registers: uint32 [128, r] → number [64, N]"""
    values = registers.view(number)
    thread, i = np.ogrid[:128, : values.shape[1]]
    lane = thread % 32
    matrix = np.zeros((M, values.shape[1] * 2), number)
    matrix[16 * (thread // 32) + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2] = values
    return matrix


@dataclass(frozen=True)
class Form:
    """A form of wgmma.mma_async. k_steps: how many are chained, each 32 bytes further along K."""

    kind: str = "bf16"
    number: str = "f32"
    a_in_registers: bool = False
    is_b_transposed: bool = False
    scale_a: int = 1
    scale_b: int = 1
    k_steps: int = 4

    @property
    def d_registers(self) -> int:
        return N // 2 if self.number == "f32" else N // 4


def setup(form: Form) -> str:
    """p0: bytes for shared memory, p1: A's fragments, p2: where D goes. Leaves descriptors in %rd10 (A), %rd11 (B)."""
    lines = [
        "ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2];",
        "mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; shl.b32 %r3, %r1, 4; add.s32 %r3, %r3, %r2;",
        "mul.wide.u32 %rd4, %r1, 16; add.s64 %rd4, %rd1, %rd4;",
    ]
    for offset in range(0, STAGE_BYTES, 2048):
        lines.append(f"ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd4+{offset}];")
        lines.append(f"st.shared.v4.b32 [%r3+{offset}], {{%r4, %r5, %r6, %r7}};")
    fields = 64 << 32 | 1 << 62  # stride of 1024 bytes between eights of rows, swizzle of 128 bytes
    lines += [
        "cvt.u64.u32 %rd5, %r2; shr.u64 %rd5, %rd5, 4;",
        f"or.b64 %rd10, %rd5, {fields}; add.s64 %rd11, %rd10, {B_PLACE // 16};",
    ]
    if form.a_in_registers:
        lines.append("mul.wide.u32 %rd6, %r1, 64; add.s64 %rd6, %rd2, %rd6;")
        lines += [f"ld.global.b32 %r{16 + i}, [%rd6+{4 * i}];" for i in range(16)]
    return "\n".join(lines)


def multiply(form: Form, step: int, accumulate: bool) -> str:
    """One wgmma; D is in %r100 …, A in registers is in %r16 …"""
    d = ", ".join(f"%r{100 + i}" for i in range(form.d_registers))
    k = STEP // ELEMENT_BYTES[form.kind]
    kinds = f"{form.number}.{form.kind}.{form.kind}"
    b_step = 128 if form.is_b_transposed else 2  # in units of 16 bytes: 16 rows of 128 bytes, or 32 bytes
    a = f"{{{', '.join(f'%r{16 + 4 * step + j}' for j in range(4))}}}" if form.a_in_registers else "%rd12"
    transposed = ""
    if ELEMENT_BYTES[form.kind] == 2:
        transposed = ("" if form.a_in_registers else ", 0") + f", {int(form.is_b_transposed)}"
    return (
        f"add.s64 %rd12, %rd10, {2 * step}; add.s64 %rd13, %rd11, {b_step * step};\n"
        f"{{ .reg .pred p; setp.ne.b32 p, {int(accumulate)}, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n{N}k{k}.{kinds} "
        f"{{{d}}}, {a}, %rd13, p, {form.scale_a}, {form.scale_b}{transposed}; }}"
    )


def finish(form: Form) -> str:
    """Every thread stores its registers of D."""
    row = 4 * form.d_registers
    stores = [f"st.global.b32 [%rd7+{4 * i}], %r{100 + i};" for i in range(form.d_registers)]
    return "\n".join([f"mul.wide.u32 %rd7, %r1, {row}; add.s64 %rd7, %rd3, %rd7;", *stores, "ret;"])


def kernel(form: Form, *, accumulate: bool = False) -> str:
    """A complete, correct kernel. accumulate: D starts as 1.0 (f32) in every element instead of being replaced."""
    start = [f"mov.b32 %r{100 + i}, 0f3F800000;" for i in range(form.d_registers)] if accumulate else []
    return "\n".join(
        [
            setup(form), *start, "fence.proxy.async.shared::cta;", "bar.sync 0;", "wgmma.fence.sync.aligned;",
            *(multiply(form, step, accumulate or step > 0) for step in range(form.k_steps)),
            "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", finish(form),
        ]
    )  # fmt: skip
