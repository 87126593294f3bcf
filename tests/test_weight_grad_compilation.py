"""The weight gradient compiled for Blackwell without a GPU: machine code, shared and tensor memory, refusals."""

import importlib

import pytest
import torch
from disassembly import compile_to

from pma.kernels.device_facts import KIB, SM100, SM103
from pma.kernels.weight_grad.spec import (
    MAX_COLUMNS,
    MAX_SEGMENT_PARTS,
    SLAB,
    TENSOR_COLUMNS,
    WeightGradSpec,
    choose_config,
    segments_per_part,
)

BF16, FP32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
FACTS = (SM100, SM103)
CASES = {
    "128-128": WeightGradSpec(128, 128, I64),
    "384-384": WeightGradSpec(384, 384, I32),
    "512-512-bf16": WeightGradSpec(512, 512, I32, BF16),
    "640-128": WeightGradSpec(640, 128, I32),
    "384-384-apart": WeightGradSpec(384, 384, I32, keeps_segments_apart=True),
}


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: facts.arch)
@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, facts, tmp_path, allocated, record_property):
    sm100 = importlib.import_module("pma.kernels.weight_grad.sm100")
    totals, spec = allocated(sm100), CASES[name]
    config = choose_config(spec, facts)
    code = compile_to(tmp_path, sm100, facts.arch, spec, config)
    record_property("registers", code.registers)
    record_property("shared_bytes", totals[-1])
    print(f"{facts.arch} {name}: {code.registers} registers, {totals[-1]} bytes shared, {config}")
    spills = code.starting_with("LDL", "STL")
    assert not spills, f"{len(spills)} accesses to local memory"
    assert len(code.starting_with("UTCQMMA")) == 4 * len(config.pieces), "a product for each block and piece"
    assert len(code.starting_with("UTMALDG")) == config.slabs
    assert bool([name for name in code.starting_with("UTMALDG") if "MULTICAST" in name]) == (config.cluster > 1)
    assert code.starting_with("UTCCP"), "scales are copied to tensor memory"
    assert code.starting_with("LDTM.x32"), "32 columns of an accumulator are read at once"
    assert code.starting_with("STG.E.128"), "partial sums are written in 16 bytes"
    assert config.stages * config.stage_bytes < totals[-1] <= config.shared_bytes() <= 227 * KIB
    assert config.tensor_columns() <= TENSOR_COLUMNS


@pytest.mark.parametrize("apart", [False, True], ids=["run on", "apart"])
@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: facts.arch)
def test_config_of_every_width(facts, apart):
    for rows in range(SLAB, MAX_COLUMNS + 1, SLAB):
        for columns in (*range(SLAB, 1025, SLAB), MAX_COLUMNS):
            spec = WeightGradSpec(rows, columns, I32, keeps_segments_apart=apart)
            assert spec.why_unsupported() is None
            config = choose_config(spec, facts)
            assert config.shared_bytes() <= facts.shared_bytes_per_block and config.stages >= 3
            assert config.tensor_columns() <= TENSOR_COLUMNS
            assert columns % config.tile_columns == 0 and rows // SLAB % config.cluster == 0
            assert sum(size for _, size in config.pieces) == config.tile_columns


def test_parts():
    spec = WeightGradSpec(384, 384, I32)
    config = choose_config(spec, SM100)
    assert (config.tile_columns, config.cluster, config.tiles(spec)) == (384, 3, 3)
    assert config.parts(spec, 5_717_735, 768, 144) == 48
    assert config.parts(spec, 300, 2, 144) == 4, "no more than K tiles"
    assert config.parts(spec, 300, 2, 1) == 1


def test_parts_of_segments_kept_apart_follow_from_their_number():
    spec = WeightGradSpec(128, 128, I32, keeps_segments_apart=True)
    config = choose_config(spec, SM100)
    for num_segments in (1, 15, 16, 17, 768, 1024, 1025, 100_000):
        parts = config.parts(spec, 10**6, num_segments, 144)
        assert (parts - 1) * segments_per_part(num_segments) < num_segments <= parts * segments_per_part(num_segments)
        assert parts <= MAX_SEGMENT_PARTS


UNSUPPORTED = {
    "dout": (WeightGradSpec(96, 128, I32), "the width of dout must be a multiple of 128 up to 8192, got 96"),
    "x": (WeightGradSpec(128, 8320, I32), "the width of x must be a multiple of 128 up to 8192, got 8320"),
    "out": (WeightGradSpec(128, 128, I32, torch.float16), "float32 or bfloat16, got torch.float16"),
    "offsets": (WeightGradSpec(128, 128, torch.int16), "offsets must be int32 or int64, got torch.int16"),
}


@pytest.mark.parametrize("spec, reason", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_reasons_name_what_came_and_what_is_allowed(spec, reason):
    assert reason in spec.why_unsupported()
