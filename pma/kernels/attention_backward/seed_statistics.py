"""What Hopper's attention backward wants to know of a segment's seeds before its tiles: shifts, δ, bounds.

One CTA for a segment and head. With o = log2 of dO's scale, t = ⌊log2 l⌋ (`pma/reference/folded.py`) it writes

    a summary    x · ⌊log2 max |δ|·2^-o⌋ =: d · max 2^-t·|dO| · max 2^-t·|δ|    two int32, two float32
    a record     for each step of 64 seeds: pairs of fp16 for the seeds 8j + 2c and 8j + 2c + 1 at the words 4c + j % 4
                 of four parts of 16 words: shift (j < 4, j ≥ 4), −δ·2^(−o−d) (likewise); the float32 scale of Q of each
                 32 seeds, in octaves of a unit of score

    shift = x + o − lse·log2(e), so that P·2^(x + o) = 2^(score + shift); −inf for seeds that don't exist.

The norm is that of the payload, read once more: 64 KiB of dO for a segment and head with 512 seeds, where its backward
goes through them once for each 128 events.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator
from quack.reduce import warp_reduce
from torch import Tensor

from pma.kernels.attention_backward.hopper_spec import RECORD_WORDS, STEP, SUMMARY_WORDS, HopperBackwardSpec
from pma.kernels.blocks.block_scales import block_scale, floor_log2, log2_of_scale, power_of_two
from pma.kernels.blocks.half_pairs import pair_of_two, square_sum_of_e4m3
from pma.kernels.blocks.memory import element_pointer, load_byte, value_at
from pma.kernels.compile import aligned, cached, compile_for, fake_tensor
from pma.kernels.device_facts import device_facts
from pma.layouts import BLOCK
from pma.layouts.mxfp8 import SCALE_NAN, SCALE_ONE
from pma.numerics import P_ROOM

THREADS = 128
WARPS = THREADS // 32
PAIRS = STEP // 2  # of seeds in a step
MOST = 1 << 20  # an exponent that no minimum takes
FIRST_SCALE = 64  # word of a record


class StatisticsOperands(NamedTuple):
    """Tensors in global memory, see `HopperBackwardOperands`."""

    dout: cute.Tensor
    dout_scales: cute.Tensor  # [B·S // 32 + B, E / 32] bytes
    q_scales: cute.Tensor
    delta: cute.Tensor  # [B·S, H] float32
    lse: cute.Tensor  # [B, H, S] float32
    row_sum_log2: cute.Tensor  # [B, H, S] int32
    records: cute.Tensor
    summaries: cute.Tensor


class Seed(NamedTuple):
    """What is read of a seed."""

    exists: cutlass.Boolean
    lse: Float32
    delta: Float32  # 0 where it is NaN
    row_sum_log2: Int32
    byte: Int32  # of dO's scale


class SeedStatistics:
    """The kernel of one spec."""

    def __init__(self, spec: HopperBackwardSpec):
        self.spec = spec
        self.scale_log2 = math.log2(math.e) / math.sqrt(spec.head_dim)

    @cute.jit
    def __call__(self, o: StatisticsOperands, stream):
        grid = [self.spec.num_heads, cute.size(o.summaries, mode=[0]), 1]
        self.kernel(o).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, o: StatisticsOperands):
        thread, _, _ = cute.arch.thread_idx()
        head, segment, _ = cute.arch.block_idx()
        spec = self.spec
        least, largest = Int32(MOST), cute.make_rmem_tensor(3, Float32)
        largest.fill(0.0)
        for index in cutlass.range(thread, spec.steps * STEP, THREADS):
            seed = self.seed(o, (segment, head), index)
            if seed.exists:
                exponent = log2_of_scale(seed.byte)
                norm = self.norm(o, (segment, head), index) * block_scale(exponent + SCALE_ONE)
                of_row = scaled(Float32(1.0), -seed.row_sum_log2)
                least = cutlass.min(least, P_ROOM + seed.row_sum_log2 - exponent)
                size = cute.math.absf(seed.delta)
                largest[0] = cute.arch.fmax(largest[0], norm * of_row)
                largest[1] = cute.arch.fmax(largest[1], size * of_row)
                largest[2] = cute.arch.fmax(largest[2], scaled(size, -exponent))
        least, largest = self.over_all(least, largest)
        unit = floor_log2(largest[2])
        if thread == 0:
            place = (Int64(segment) * spec.num_heads + head) * SUMMARY_WORDS
            words = cute.make_rmem_tensor(SUMMARY_WORDS, Uint32)
            words[0], words[1] = Uint32(least), Uint32(unit)
            words[2], words[3] = largest[0].bitcast(Uint32), largest[1].bitcast(Uint32)
            target = cute.make_tensor(element_pointer(o.summaries, place, 16), cute.make_layout(SUMMARY_WORDS))
            cute.autovec_copy(words, target)
        for pair in cutlass.range(thread, spec.steps * PAIRS, THREADS):
            self.write_pair(o, (segment, head), pair, (least, unit))
        for block in cutlass.range(thread, spec.steps * STEP // BLOCK, THREADS):
            self.write_scale(o, (segment, head), block)

    @cute.jit
    def seed(self, o: StatisticsOperands, place, index: Int32) -> Seed:
        """place: (segment, head)."""
        (segment, head), spec = place, self.spec
        exists = index < spec.num_seeds
        lse, delta, row_sum_log2, byte = Float32(0.0), Float32(0.0), Int32(0), Int32(0)
        if exists:
            state = (Int64(segment) * spec.num_heads + head) * spec.num_seeds + index
            row = Int64(segment) * spec.num_seeds + index
            lse = value_at(o.lse, state)
            row_sum_log2 = value_at(o.row_sum_log2, state)
            delta = value_at(o.delta, row * spec.num_heads + head)
            delta = delta if delta == delta else Float32(0.0)
            slot = Int64(segment) * spec.num_seeds // BLOCK + segment + index // BLOCK
            byte = self.byte_at(o.dout_scales, slot, head)
        return Seed(exists, lse, delta, row_sum_log2, byte)

    @cute.jit
    def byte_at(self, scales: cute.Tensor, slot: Int64, head: Int32) -> Int32:
        place = slot * (self.spec.columns // BLOCK) + head * (self.spec.head_dim // BLOCK)
        return load_byte(scales, place)

    @cute.jit
    def norm(self, o: StatisticsOperands, place, index: Int32) -> Float32:
        """|dO| of a seed with a scale of 1, 0 where it is NaN."""
        (segment, head), spec = place, self.spec
        start = (Int64(segment) * spec.num_seeds + index) * spec.columns + head * spec.head_dim
        words = cute.make_rmem_tensor((4, spec.head_dim // 16), Uint32)
        pointer = cute.recast_ptr(element_pointer(o.dout, start, 16), dtype=Uint32)
        cute.autovec_copy(cute.make_tensor(pointer, words.layout), words)
        total = Float32(0.0)
        for word in cutlass.range_constexpr(spec.head_dim // 4):
            total = square_sum_of_e4m3(words[word], total)
        total = total if total == total else Float32(0.0)
        return cute.math.sqrt(total)

    @cute.jit
    def over_all(self, least: Int32, largest: cute.Tensor):
        """The CTA's minimum and maxima, in every thread."""
        smem, (thread, _, _) = SmemAllocator(), cute.arch.thread_idx()
        minima = smem.allocate_tensor(Int32, cute.make_layout(WARPS))
        maxima = smem.allocate_tensor(Float32, cute.make_layout((WARPS, 3)))
        least = warp_reduce(least, cutlass.min)
        for which in cutlass.range_constexpr(3):
            largest[which] = warp_reduce(largest[which], cute.arch.fmax)
        if thread % 32 == 0:
            minima[thread // 32] = least
            for which in cutlass.range_constexpr(3):
                maxima[thread // 32, which] = largest[which]
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            least = cutlass.min(least, minima[warp])
            for which in cutlass.range_constexpr(3):
                largest[which] = cute.arch.fmax(largest[which], maxima[warp, which])
        return least, largest

    @cute.jit
    def write_pair(self, o: StatisticsOperands, place, pair: Int32, known):
        """The shifts and δ of two neighbouring seeds. known: (x, unit of δ)."""
        (x, unit), step, local = known, pair // PAIRS, pair % PAIRS
        shifts, deltas = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        for e in cutlass.range_constexpr(2):
            seed = self.seed(o, place, 2 * pair + e)
            exponent = log2_of_scale(seed.byte)
            shifts[e] = Float32(x + exponent) - seed.lse * math.log2(math.e)
            if seed.byte == SCALE_NAN:
                shifts[e] = Float32(float("nan"))
            deltas[e] = scaled(-seed.delta, -exponent - unit)
            if not seed.exists:
                shifts[e], deltas[e] = -Float32.inf, Float32(0.0)
        j, c = local // 4, local % 4
        word = self.record(place, step) + j // 4 * 16 + 4 * c + j % 4
        store_word(o.records, word, pair_of_two(shifts[0], shifts[1]))
        store_word(o.records, word + 32, pair_of_two(deltas[0], deltas[1]))

    @cute.jit
    def write_scale(self, o: StatisticsOperands, place, block: Int32):
        """Octaves of a unit of score for the scale of 32 seeds; 1 for seeds that don't exist."""
        segment, head = place
        own = Int64(0) if const_expr(self.spec.is_shared) else Int64(segment)
        byte = Int32(SCALE_ONE)
        if block * BLOCK < self.spec.num_seeds:
            byte = self.byte_at(o.q_scales, own * self.spec.num_seeds // BLOCK + own + block, head)
        word = self.record(place, block // 2) + FIRST_SCALE + block % 2
        store_word(o.records, word, (block_scale(byte) * self.scale_log2).bitcast(Uint32))

    @cute.jit
    def record(self, place, step: Int32) -> Int64:
        segment, head = place
        return ((Int64(segment) * self.spec.num_heads + head) * self.spec.steps + step) * RECORD_WORDS


@cute.jit
def scaled(value: Float32, exponent: Int32) -> Float32:
    """value·2^exponent, for exponents that are sums of two of fp32."""
    half = exponent // 2
    return value * power_of_two(half) * power_of_two(exponent - half)


@cute.jit
def store_word(tensor: cute.Tensor, place: Int64, word: Uint32):
    cute.make_tensor(element_pointer(tensor, place, 4), cute.make_layout(1))[0] = Int32(word)


def build(arch: str, spec: HopperBackwardSpec, options: str = ""):
    """Compile the kernel; see `pma.kernels.compile.compile_for`."""
    u8, i32, fp32, blocks = torch.uint8, torch.int32, torch.float32, spec.columns // BLOCK
    state = (None, spec.num_heads, spec.num_seeds)
    operands = StatisticsOperands(
        dout=fake_tensor(u8, None, spec.columns),
        dout_scales=fake_tensor(u8, None, blocks, alignment=1),
        q_scales=fake_tensor(u8, None, blocks, alignment=1),
        delta=fake_tensor(fp32, None, spec.num_heads, alignment=4),
        lse=fake_tensor(fp32, *state, alignment=4),
        row_sum_log2=fake_tensor(i32, *state, alignment=4),
        records=fake_tensor(i32, None, spec.num_heads, spec.steps, RECORD_WORDS),
        summaries=fake_tensor(i32, None, spec.num_heads, SUMMARY_WORDS),
    )
    return compile_for(arch, SeedStatistics(spec), operands, options=options)


compiled = cached(build)


def launch(
    spec: HopperBackwardSpec, dout: tuple[Tensor, Tensor], q_scales: Tensor, saved: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Start the kernel on the current stream; returns (records, summaries), int32.

    Args:
        dout: payload [B·S, E] and compact scales, uint8.    q_scales: compact.
        saved: δ [B·S, H] float32, lse [B, H, S] float32, ⌊log2 l⌋ [B, H, S] int32.
    """
    delta, lse, row_sum_log2 = (each.contiguous() for each in saved)
    num_segments, device = lse.shape[0], lse.device
    shape = (num_segments, spec.num_heads)
    records = torch.empty(*shape, spec.steps, RECORD_WORDS, dtype=torch.int32, device=device)
    summaries = torch.empty(*shape, SUMMARY_WORDS, dtype=torch.int32, device=device)
    if num_segments:
        data, scales = dout
        operands = StatisticsOperands(
            aligned(data), scales.contiguous(), q_scales.contiguous(), delta, lse, row_sum_log2, records, summaries
        )
        with torch.cuda.device(device):
            compiled(device_facts(device).arch, spec)(operands)
    return records, summaries
