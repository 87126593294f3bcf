"""Exact tier: quantiser bits, decoded scales, segment-local blocks, scale tiles."""

import importlib.util
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from pma.jagged import num_row_blocks, row_blocks, rows_to_blocks
from pma.layouts import decode_scales, dequantize, gather_scales, quantize, scatter_scales, transpose_payload
from pma.layouts.mxfp8 import amax_bits, from_payload, inverse_scales, round_e4m3, scale_from_amax_bits
from pma.testing import NASTY_LENGTHS, make_jagged

ONE_SEGMENT = torch.tensor([0, 32])
E4M3 = sorted({Fraction(v.item()) for v in from_payload(torch.arange(256, dtype=torch.uint8)) if v == v and v >= 0})


def oracle_scale(amax: float) -> int:
    """Least byte whose 2^(byte−127)·448 holds amax, in exact rational arithmetic."""
    return next(b for b in range(255) if Fraction(amax) <= 448 * Fraction(2) ** (b - 127) or b == 254)


def oracle_payload(value: float, byte: int) -> Fraction:
    """value·2^(127−byte) rounded to nearest even E4M3, saturating, as a signed rational."""
    scaled = abs(Fraction(value)) / Fraction(2) ** (byte - 127)
    scaled = min(scaled, Fraction(448))
    distance = [abs(v - scaled) for v in E4M3]
    best = min(distance)
    ties = [i for i, d in enumerate(distance) if d == best]
    chosen = E4M3[next(i for i in ties if len(ties) == 1 or i % 2 == 0)]  # index parity is mantissa parity
    return -chosen if value < 0 else chosen


def boundary_amaxes() -> list[float]:
    edges = [0.0, 1e-45, 9e-40, 6e-39, 1e-38, 2.0**-126, 2.0**-120, 448 * 2.0**-127, 3.4e38]
    for k in (-126, -119, -20, -1, 0, 1, 60, 119):
        edge = torch.tensor(448 * 2.0**k)
        edges += [float(torch.nextafter(edge, torch.tensor(d))) for d in (0.0, float("inf"))] + [float(edge)]
        edges += [2.0**k * (1 + m / 128) for m in range(128)]
    return [e for e in edges if e < 3.5e38]


def test_scale_bytes_equal_the_rational_oracle_on_all_boundaries():
    amaxes = boundary_amaxes()
    bits = amax_bits(torch.tensor(amaxes))
    assert scale_from_amax_bits(bits).tolist() == [oracle_scale(a) for a in amaxes]


@pytest.mark.parametrize("amax", [0.0, 1e-45, 6e-39, 2.0**-126, 447.0, 448.0, 448.00003, 465.0, 1e4, 3.4e38])
def test_payload_equals_the_rational_oracle(amax):
    generator = torch.Generator().manual_seed(1)
    block = (torch.rand(32, 32, generator=generator) * 2 - 1) * amax
    block[0, 0] = amax
    data, scales = quantize(block, ONE_SEGMENT)
    byte = oracle_scale(amax)
    assert scales.tolist() == [[byte], [0]]
    expected = [oracle_payload(v, byte) for v in block.flatten().tolist()]
    assert [Fraction(v) for v in from_payload(data).flatten().tolist()] == expected


def test_payload_ties_go_to_even():
    halfway = torch.tensor([1.0625, 1.1875, 2.125, 432.0, 2.0**-10, 3 * 2.0**-10])
    assert round_e4m3(halfway).tolist() == [1.0, 1.25, 2.0, 448.0, 0.0, 2 * 2.0**-9]


def test_payload_saturates_on_both_sides():
    assert round_e4m3(torch.tensor([464.0, 465.0, 1e4, -465.0])).tolist() == [448.0, 448.0, 448.0, -448.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_makes_its_block_nan_and_leaves_payload_zero(bad):
    values, offsets = make_jagged([40], 64)
    values[5, 7] = bad
    data, scales = quantize(values, offsets)
    clean, clean_scales = quantize(torch.where(values == values, values, 0.0).clamp(-9, 9), offsets)
    assert scales[0, 0] == 255 and (data[:32, :32] == 0).all()
    assert dequantize(data, scales, offsets)[:32, :32].isnan().all()
    assert torch.equal(data[32:], clean[32:]) and torch.equal(data[:, 32:], clean[:, 32:])
    assert torch.equal(scales[1:], clean_scales[1:])


def test_all_256_scale_bytes_decode_and_invert():
    decoded = decode_scales(torch.arange(256, dtype=torch.uint8), torch.float64)
    inverse = inverse_scales(torch.arange(256, dtype=torch.uint8)).double()
    assert [Fraction(v) for v in decoded[:255].tolist()] == [Fraction(2) ** (b - 127) for b in range(255)]
    assert decoded[255].isnan() and inverse[255] == 0
    assert (decoded[:255] * inverse[:255] == 1).all()


def test_amax_survives_bf16_and_fp16_inputs_exactly():
    values, offsets = make_jagged([33, 64], 64)
    for dtype in (torch.bfloat16, torch.float16):
        low = values.to(dtype)
        assert all(
            torch.equal(a, b) for a, b in zip(quantize(low, offsets), quantize(low.float(), offsets), strict=True)
        )


def test_uniform_scales_are_one_byte_for_a_head_and_headroom_raises_it():
    values, offsets = make_jagged([50, 3], 128)
    data, scales = quantize(values, offsets, columns_per_scale=64)
    assert torch.equal(scales[:, 0], scales[:, 1]) and torch.equal(scales[:, 2], scales[:, 3])
    _, plain = quantize(values, offsets)
    assert torch.equal(scales[:, 0], plain[:, :2].amax(1)) and not torch.equal(plain[:, 0], plain[:, 1])
    _, raised = quantize(values, offsets, headroom_exponent=5)
    used = plain != 0
    assert torch.equal(raised[used], plain[used] + 5) and (raised[~used] == 0).all()


def torchao_quantise(amaxes):
    """torchao's MXFP8 of one 32-wide row for each amax → (rows, scale bytes, payload as float)."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    rows = torch.tensor(amaxes)[:, None] * torch.linspace(-1, 1, 32)
    rows[:, 0] = torch.tensor(amaxes)
    scales, data = mx.to_mx(rows, torch.float8_e4m3fn, 32, config.ScaleCalculationMode.RCEIL)
    return rows, scales.view(torch.uint8).flatten(), data.float()


def just_above_edge(amax):
    """One ulp above 448·2^k, where amax / 448 rounds to 2^k in float32."""
    mantissa = int(amax_bits(torch.tensor([amax]))) & 0x7FFFFF
    return mantissa == 0x600001


def test_torchao_rceil_agrees_bit_for_bit():
    amaxes = [a for a in boundary_amaxes() if a >= 448 * 2.0**-126 and not just_above_edge(a)]
    rows, scales, data = torchao_quantise(amaxes)
    ours = scale_from_amax_bits(amax_bits(rows).amax(1))
    assert torch.equal(scales, ours)
    assert torch.equal(data, round_e4m3(rows * inverse_scales(ours)[:, None]))


def test_torchao_rceil_differs_where_its_logarithm_rounds():
    """Named difference: torchao takes ceil(log2(amax / 448)) in float32. One ulp above 448·2^k, for large |k|, the
    logarithm rounds to k and its amax saturates; ours is the least power of two that holds amax."""
    amaxes = [a for a in boundary_amaxes() if a >= 448 * 2.0**-120 and just_above_edge(a)]
    _, scales, _ = torchao_quantise(amaxes)
    ours = scale_from_amax_bits(amax_bits(torch.tensor(amaxes)))
    assert ours.tolist() == [oracle_scale(a) for a in amaxes]
    difference = (ours.int() - scales.int()).tolist()
    assert set(difference) == {0, 1}


def quack_quantiser():
    """quack's PyTorch quantiser, loaded by file: importing the package would need a GPU compiler."""
    spec = importlib.util.find_spec("quack")
    if spec is None or spec.origin is None:
        pytest.skip("quack-kernels is not installed")
    path = Path(spec.origin).parent / "blockscaled" / "quantize.py"
    file_spec = importlib.util.spec_from_file_location("quack_quantize", path)
    module = importlib.util.module_from_spec(file_spec)
    file_spec.loader.exec_module(module)
    return module


def test_quack_agrees_bit_for_bit_from_its_least_scale_on():
    """Named difference: below 448·2^−127 quack's scale is byte 1, the least power of two is byte 0."""
    amaxes = boundary_amaxes()
    rows = torch.tensor(amaxes)[:, None] * torch.linspace(-1, 1, 32)
    rows[:, 0] = torch.tensor(amaxes)
    data, scales = quack_quantiser().to_mx(rows)
    theirs = scales.view(torch.uint8).flatten()
    ours = scale_from_amax_bits(amax_bits(torch.tensor(amaxes)))
    tiny = (torch.tensor(amaxes) > 0) & (torch.tensor(amaxes) <= 448 * 2.0**-127)
    assert torch.equal(ours[~tiny], theirs[~tiny])
    assert (ours[tiny] == 0).all() and (theirs[tiny][1:] == 1).all()  # 1e-45 / 448 is zero
    assert torch.equal(round_e4m3(rows * inverse_scales(ours)[:, None])[~tiny], data.float()[~tiny])


@pytest.mark.parametrize("first", [0, 1, 37])
def test_row_blocks_equal_brute_force_and_never_collide(first):
    lengths = [*NASTY_LENGTHS, 0, 0, 300]
    offsets = torch.tensor([first, *lengths]).cumsum(0)
    total_rows = int(offsets[-1]) + 5
    for size in (32, 128):
        blocks = row_blocks(offsets, total_rows, size)
        found = {(s, f, n) for s, f, n in zip(*(t.tolist() for t in blocks), strict=True) if n}
        bounds = offsets.tolist()
        expected = {
            (b, row, min(size, high - row))
            for b, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False))
            for row in range(low, high, size)
        }
        assert found == expected and len(blocks.segment) == num_row_blocks(total_rows, len(lengths), size)
        slot = rows_to_blocks(offsets, total_rows, size)
        for index, (_, row, count) in enumerate(zip(*(t.tolist() for t in blocks), strict=True)):
            assert (slot[row : row + count] == index).all()


def test_row_blocks_of_nothing():
    assert row_blocks(torch.tensor([0]), 0, 32).segment.numel() == 0
    assert rows_to_blocks(torch.tensor([0]), 3, 32).tolist() == [0, 0, 0]
    assert row_blocks(torch.tensor([0, 0, 0]), 0, 32).num_rows.tolist() == [0, 0]


def test_quantised_bits_do_not_depend_on_neighbours():
    values, offsets = make_jagged([5, 33, 0, 129], 64)
    data, scales = quantize(values, offsets)
    alone = values[38:]
    own_data, own_scales = quantize(alone, torch.tensor([0, 129]))
    assert torch.equal(data[38:], own_data)
    first = 38 // 32 + 3
    assert torch.equal(scales[first : first + 5], own_scales[:5])


@pytest.mark.parametrize("direction", ["row", "column"])
@pytest.mark.parametrize("columns", [32, 128, 160, 384])
def test_scale_tiles_place_every_byte_by_the_formula_and_come_back(direction, columns):
    _, offsets = make_jagged([3, *NASTY_LENGTHS], 32)
    offsets[0] = 2  # the buffer's first rows are unused
    total_rows = int(offsets[-1]) + 3
    num_slots = num_row_blocks(total_rows, len(offsets) - 1, 32)
    scales = torch.randint(1, 255, (num_slots, columns // 32), dtype=torch.uint8)
    used = torch.unique(rows_to_blocks(offsets, total_rows, 32))
    used = used[used < num_slots]
    scales[[i for i in range(num_slots) if i not in used]] = 0
    tiles = scatter_scales(scales, offsets, total_rows, direction)
    bounds, expected = offsets.tolist(), torch.full_like(tiles, 127)
    for b, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        for block in range((high - low + 31) // 32):
            slot, tile, local = low // 32 + b + block, low // 128 + b + block // 4, block % 4
            for column in range(columns // 32):
                for lane in range(32):
                    if direction == "row":
                        row, position = local * 32 + lane, column % 4
                        index = (tile, column // 4)
                    else:
                        row, position = (column % 4) * 32 + lane, local
                        index = (column // 4, tile)
                    expected[(*index, (row % 32) * 16 + (row // 32) * 4 + position)] = scales[slot, column]
    assert torch.equal(tiles, expected)
    assert torch.equal(gather_scales(tiles, offsets, total_rows, columns, direction), scales)


@pytest.mark.parametrize("lengths", [NASTY_LENGTHS, (0, 0), (), (3,) * 40], ids=["nasty", "empty", "none", "short"])
def test_transposed_payload_equals_a_loop_over_tokens(lengths):
    offsets = torch.tensor([5, *lengths]).cumsum(0)
    total_rows = int(offsets[-1]) + 9
    data = torch.randint(1, 256, (total_rows, 64), dtype=torch.uint8)
    expected = torch.zeros(total_rows // 16 + len(lengths), 64, 16, dtype=torch.uint8)
    for b, length in enumerate(lengths):
        first = int(offsets[b])
        for token in range(length):
            t, q, e = token % 16 // 8, token % 8 // 2, token % 2
            for column in range(64):
                h, of_column, j, last = column // 32, column % 32 // 8, column % 8 // 2, column % 2
                place = 32 * h + 8 * j + 2 * of_column + last
                expected[first // 16 + b + token // 16, place, 4 * q + 2 * t + e] = data[first + token, column]
    assert torch.equal(transpose_payload(data, offsets), expected)
    assert transpose_payload(data[:0], torch.zeros(3, dtype=torch.int64)).shape == (2, 64, 16)
