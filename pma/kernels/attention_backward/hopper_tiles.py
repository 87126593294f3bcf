"""Which tiles of events a CTA takes on Hopper, and what is known of one before it is read.

A cluster of CTAs keeps one head. One warp of each CTA goes through all tile slots of the cluster and hands those that
have events to its CTAs in turn, so that all of them have as many; at the end one may get a tile without events. The
CTAs of a cluster need not work on one segment: what they add to dQ, shared by all segments, has one place.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from quack.reduce import warp_reduce
from quack.utils import elem_pointer, store_shared_remote

from pma.jagged import num_row_blocks
from pma.kernels.attention_backward.hopper_operands import HopperBackwardOperands, Shared, TileFacts
from pma.kernels.attention_backward.hopper_spec import (
    DS_LOG2,
    NORM_WARPS,
    PEER_UNIT,
    SUMMARY_WORDS,
    TILES,
    HopperBackwardConfig,
    HopperBackwardSpec,
)
from pma.kernels.attention_backward.spec import TILE
from pma.kernels.blocks import half_pairs as half
from pma.kernels.blocks.block_scales import floor_log2, log2_of_scale, power_of_two
from pma.kernels.blocks.memory import element_pointer, load_byte, row_tensor
from pma.kernels.blocks.ring import arrive, next_stage
from pma.kernels.blocks.row_tiles import RowTile, find_row_tile
from pma.layouts import BLOCK
from pma.layouts.mxfp8 import SCALE_ONE
from pma.numerics import DELTA_ROOM, E4M3_MAX

FIRST_NORM_WARP = 2
NORM_BARRIER = 4  # named
WORD = 4
NUM_ROWS, SPARE_SLOTS = (RowTile._fields.index(name) for name in ("num_rows", "spare_slots"))


class HopperTiles:
    """A CTA's share of the work, the warps that search for its tiles and those that measure them."""

    spec: HopperBackwardSpec
    config: HopperBackwardConfig
    head_dim: int

    @cute.jit
    def head(self) -> Int32:
        block, _, _ = cute.arch.block_idx()
        return block // self.config.ctas % self.spec.num_heads

    @cute.jit
    def rank(self) -> Int32:
        """Of the CTA in its cluster."""
        block, _, _ = cute.arch.block_idx()
        return block % self.config.ctas

    @cute.jit
    def worker(self) -> Int32:
        """Of a head, the cluster."""
        block, _, _ = cute.arch.block_idx()
        return block // (self.config.ctas * self.spec.num_heads)

    @cute.jit
    def workers(self) -> Int32:
        blocks, _, _ = cute.arch.grid_dim()
        return blocks // (self.config.ctas * self.spec.num_heads)

    @cute.jit
    def segment_of_seeds(self, segment: Int32) -> Int32:
        return Int32(0) if const_expr(self.spec.is_shared) else segment

    # ------------------------------------------------------------------------------------------------- searching

    @cute.jit
    def search(self, o: HopperBackwardOperands, shared: Shared):
        """Find the cluster's tiles, 32 at a time, a lane for each; announce this CTA's one after the other, then −1.

        A tile of another CTA of the cluster is written too: without events it stands in if there is no more.
        """
        ctas, rank, lane = self.config.ctas, self.rank(), cute.arch.lane_idx()
        num_tiles = num_row_blocks(cute.size(o.k, mode=[0]), cute.size(o.offsets, mode=[0]) - 1, TILE)
        first, taker, slot, parity = self.worker() * ctas, Int32(0), Int32(0), Int32(1)
        while first < num_tiles:
            words = self.find_tile(o, num_tiles, first + lane // ctas * (self.workers() * ctas) + lane % ctas)
            with_events = cute.arch.vote_ballot_sync(words[NUM_ROWS] > 0)
            for index in cutlass.range(32, unroll=1):
                if (with_events >> index) & 1:
                    if taker == 0:
                        cute.arch.mbarrier_wait(shared.tiles.empty + slot, parity)
                    if taker <= rank:
                        if lane == index:
                            for word in cutlass.range_constexpr(DS_LOG2):
                                shared.facts[word, slot] = words[word]
                        cute.arch.sync_warp()
                    if taker == rank:
                        arrive(shared.tiles.full + slot)
                    taker += 1
                    if taker == ctas:
                        taker = Int32(0)
                        slot, parity = next_stage(slot, parity, TILES)
            first += 32 * self.workers()
        if const_expr(ctas > 1):
            if taker > 0:
                if taker <= rank:
                    if lane == 0:
                        for word in (NUM_ROWS, SPARE_SLOTS):
                            shared.facts[word, slot] = Uint32(0)
                    arrive(shared.tiles.full + slot)
                slot, parity = next_stage(slot, parity, TILES)
        cute.arch.mbarrier_wait(shared.tiles.empty + slot, parity)
        if lane < DS_LOG2:
            shared.facts[lane, slot] = Uint32(0xFFFFFFFF)
        arrive(shared.tiles.full + slot)

    @cute.jit
    def find_tile(self, o: HopperBackwardOperands, num_tiles: Int32, tile: Int32) -> cute.Tensor:
        """`TileFacts` of a lane's tile, as words."""
        rows = find_row_tile(o.offsets, num_tiles, tile)
        words = cute.make_rmem_tensor(DS_LOG2, Uint32)
        words.fill(0)
        for index in cutlass.range_constexpr(len(RowTile._fields)):
            words[index] = Uint32(rows[index])
        if rows.num_rows > 0:
            first = rows.begin // BLOCK + rows.segment + (rows.first_row - rows.begin) // BLOCK
            for block in cutlass.range_constexpr(TILE // BLOCK):
                slot = Int64(first + cutlass.min(block, (rows.num_rows - 1) // BLOCK))
                for index, scales in ((6, o.k_scales), (7, o.v_scales)):
                    words[index] |= Uint32(self.scale_byte(scales, slot) << 8 * block)
            place = (Int64(rows.segment) * self.spec.num_heads + self.head()) * SUMMARY_WORDS
            summary = cute.make_tensor(element_pointer(o.summaries, place, 16), cute.make_layout(SUMMARY_WORDS))
            four = cute.make_rmem_tensor(SUMMARY_WORDS, Int32)
            cute.autovec_copy(summary, four)
            for index in cutlass.range_constexpr(SUMMARY_WORDS):
                words[8 + index] = Uint32(four[index])
        return words

    @cute.jit
    def scale_byte(self, scales: cute.Tensor, slot: Int64) -> Int32:
        place = slot * (self.spec.columns // BLOCK) + self.head() * (self.head_dim // BLOCK)
        return load_byte(scales, place)

    @cute.jit
    def tile_facts(self, shared: Shared, turn: Int32) -> TileFacts:
        """This CTA's tile number `turn`; every other warp asks for 0, 1, 2 … until its slot is −1."""
        slot = turn % TILES
        cute.arch.mbarrier_wait(shared.tiles.full + slot, turn // TILES % 2)
        words = shared.facts[None, slot]
        return TileFacts(
            row_tile(words), words[6], words[7], Int32(words[8]), Int32(words[9]), words[10], words[11]
        )  # fmt: skip

    @cute.jit
    def release_facts(self, shared: Shared, turn: Int32):
        arrive(shared.tiles.empty + turn % TILES)

    @cute.jit
    def largest_q(self, o: HopperBackwardOperands, segment: Int32) -> Int32:
        """log2 of the largest scale of Q in the segment and head, the same in every lane."""
        own, blocks = Int64(self.segment_of_seeds(segment)), (self.spec.num_seeds + BLOCK - 1) // BLOCK
        slot, largest = own * self.spec.num_seeds // BLOCK + own, Int32(-SCALE_ONE)
        for block in cutlass.range(cute.arch.lane_idx(), blocks, 32, unroll=1):
            largest = cutlass.max(largest, log2_of_scale(self.scale_byte(o.q_scales, slot + block)))
        return warp_reduce(largest, cutlass.max)

    # ---------------------------------------------------------------------------------------------- scale of dS

    @cute.jit
    def measure(self, o: HopperBackwardOperands, shared: Shared):
        """Publish dS's scale for each tile, while others work on the one before: V is read from memory."""
        turn, is_busy = Int32(0), True
        while is_busy:
            facts = self.tile_facts(shared, turn)
            is_busy = facts.rows.tile >= 0
            if is_busy:
                self.publish_scale(o, shared, facts, turn)
            self.release_facts(shared, turn)
            turn += 1

    @cute.jit
    def wait_for_scale(self, shared: Shared, turn: Int32):
        cute.arch.mbarrier_wait(shared.scale_full + turn % TILES, turn // TILES % 2)

    @cute.jit
    def ds_log2(self, shared: Shared, turn: Int32) -> Int32:
        """log2 of dS's scale for this CTA's tile number `turn`, once it is published."""
        return Int32(shared.facts[DS_LOG2, turn % TILES])

    @cute.jit
    def dq_unit(self, shared: Shared, facts: TileFacts, turn: Int32) -> Int32:
        """log2 of what a product of payloads of dS and Kᵀ is worth: the greatest of the cluster's tiles."""
        unit = largest_of_bytes(facts.k_scales) - self.ds_log2(shared, turn)
        if const_expr(self.config.ctas > 1):
            unit = cutlass.max(unit, Int32(shared.facts[PEER_UNIT, turn % TILES]))
        return unit

    @cute.jit
    def publish_scale(self, o: HopperBackwardOperands, shared: Shared, facts: TileFacts, turn: Int32):
        """log2 of dS's scale for a tile, from the norms of its V; to the cluster's other CTA its unit of dQ."""
        warp, lane, largest = cute.arch.warp_idx() - FIRST_NORM_WARP, cute.arch.lane_idx(), Float32(0.0)
        words, slot = cute.make_rmem_tensor(WORD, Uint32), turn % TILES
        for block in cutlass.range(warp, TILE // BLOCK, NORM_WARPS, unroll=1):
            row, total = block * BLOCK + lane, Float32(0.0)
            if row < facts.rows.num_rows:
                start = Int64(facts.rows.first_row + row) * self.spec.columns + self.head() * self.head_dim
                values = row_tensor(o.v, start, cute.make_layout((16, self.head_dim // 16)))
                values = cute.recast_tensor(values, Uint32)
                for chunk in cutlass.range(self.head_dim // 16, unroll=2):  # more would not fit the registers
                    cute.autovec_copy(values[None, chunk], words)
                    for word in cutlass.range_constexpr(WORD):
                        total = half.square_sum_of_e4m3(words[word], total)
            norm = cute.math.sqrt(total if total == total else Float32(0.0))
            largest = cute.arch.fmax(largest, norm * power_of_two(log2_of_scale(byte_of(facts.v_scales, block))))
        largest = warp_reduce(largest, cute.arch.fmax)
        if lane == 0:
            shared.norms[warp, slot] = largest
        cute.arch.barrier(barrier_id=NORM_BARRIER, number_of_threads=32 * NORM_WARPS)
        if warp == 0:
            largest = cute.arch.fmax(largest, shared.norms[1, slot])
            bound = largest * facts.dout_norm.bitcast(Float32) + facts.delta.bitcast(Float32)
            ds_log2 = floor_log2(Float32(E4M3_MAX) / bound)
            ds_log2 = cutlass.min(ds_log2, facts.x - largest_of_bytes(facts.v_scales))
            ds_log2 = cutlass.min(ds_log2, DELTA_ROOM - 1 + facts.x - facts.delta_log2)
            if lane == 0:
                shared.facts[DS_LOG2, slot] = Uint32(ds_log2)
                if const_expr(self.config.ctas > 1):
                    full, unit = shared.scale_full + slot, largest_of_bytes(facts.k_scales) - ds_log2
                    cute.arch.mbarrier_arrive_and_expect_tx(full, WORD)
                    store_shared_remote(unit, elem_pointer(shared.facts, (PEER_UNIT, slot)), full, self.rank() ^ 1)
                else:
                    cute.arch.mbarrier_arrive(shared.scale_full + slot)


@cute.jit
def row_tile(words: cute.Tensor) -> RowTile:
    return RowTile(*(Int32(words[index]) for index in range(len(RowTile._fields))))


@cute.jit
def byte_of(word: Uint32, index: Int32) -> Int32:
    return Int32(word >> Uint32(8 * index)) & 0xFF


@cute.jit
def largest_of_bytes(word: Uint32) -> Int32:
    """log2 of the largest scale of a tile; a block that isn't there repeats another's."""
    largest = Int32(-SCALE_ONE)
    for block in cutlass.range_constexpr(TILE // BLOCK):
        largest = cutlass.max(largest, log2_of_scale(byte_of(word, Int32(block))))
    return largest
