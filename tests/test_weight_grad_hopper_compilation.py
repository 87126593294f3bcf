"""Hopper's weight gradient compiled without a GPU: machine code, registers, shared memory, refusals."""

import importlib
from dataclasses import replace

import pytest
import torch
from disassembly import compile_to

from pma.kernels.device_facts import SM90
from pma.kernels.weight_grad.hopper_spec import TOKENS, WARPGROUPS, HopperWeightGradSpec, choose_config
from pma.kernels.weight_grad.spec import MAX_COLUMNS, SLAB

BF16, FP32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
DEFAULT = HopperWeightGradSpec(384, 384, I64)
CASES = {
    "128-128": HopperWeightGradSpec(128, 128, I64),
    "384-384": DEFAULT,
    "512-512-bf16-heads-of-64": HopperWeightGradSpec(512, 512, I32, BF16, False, 64, 64),
    "640-128": HopperWeightGradSpec(640, 128, I32),
}


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, tmp_path, allocated, record_property):
    sm90, spec = importlib.import_module("pma.kernels.weight_grad.sm90"), CASES[name]
    totals = allocated(sm90)
    config = choose_config(spec, SM90)
    code = compile_to(tmp_path, sm90, "sm_90a", spec, config)
    record_property("registers", code.registers)
    record_property("shared_bytes", totals[-1])
    print(f"{name}: {code.registers} registers, {totals[-1]} bytes shared, {config}")
    assert not code.starting_with("LDL", "STL"), "accesses to local memory"
    pieces = 2 if config.tile_columns == 384 else 1
    assert len(code.starting_with("HGMMA")) == pieces * TOKENS // 16, "one copy of a stage's products"
    assert not code.starting_with("QGMMA", "IGMMA", "HMMA", "QMMA")
    assert len(code.starting_with("WARPGROUP.ARRIVE")) == 2, "one for each block: nothing is serialised"
    assert len(code.starting_with("LDSM")) == 2
    assert len(code.starting_with("UTMALDG")) == config.slabs
    assert code.registers * config.threads <= SM90.registers_per_sm
    divided = 128 * (config.registers["others"] + WARPGROUPS * config.registers["compute"])
    assert divided <= code.registers * config.threads, (
        "more than the launch has: those that compute would wait for ever"
    )
    assert config.stages * config.stage_bytes < totals[-1] <= config.shared_bytes() <= SM90.shared_bytes_per_block


def test_config_of_every_width():
    for columns in (*range(SLAB, 1025, SLAB), MAX_COLUMNS):
        spec = HopperWeightGradSpec(SLAB, columns, I32)
        assert spec.why_unsupported() is None
        config = choose_config(spec, SM90)
        assert config.shared_bytes() <= SM90.shared_bytes_per_block and config.stages >= 4
        assert columns % config.tile_columns == 0


def test_parts():
    config = choose_config(DEFAULT, SM90)
    assert (config.tile_columns, config.tiles(DEFAULT)) == (384, 3)
    assert config.parts(DEFAULT, 5_717_735, 768, 132) == 44
    assert config.parts(DEFAULT, 300, 2, 132) == 4, "no more than slots of 128 tokens"
    assert config.parts(DEFAULT, 300, 2, 1) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_columns": 96}, "the width of dout must be a multiple of 128 up to 8192, got 96"),
        ({"in_columns": 8320}, "the width of x must be a multiple of 128 up to 8192, got 8320"),
        ({"out_dtype": torch.float16}, "float32 or bfloat16, got torch.float16"),
        ({"offsets_dtype": torch.int16}, "offsets must be int32 or int64, got torch.int16"),
        ({"keeps_segments_apart": True}, "keeps_segments_apart must be False, got True"),
        ({"dout_columns_per_scale": 32}, "dout_columns_per_scale must be 64, 128 or 384, got 32"),
        ({"x_columns_per_scale": 96}, "x_columns_per_scale must be 64, 128 or 384, got 96"),
    ],
)
def test_refusals(changes, message):
    assert message in replace(DEFAULT, **changes).why_unsupported()
