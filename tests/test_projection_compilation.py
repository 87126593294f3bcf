"""Hopper's projections compiled without a GPU: machine code, registers, shared memory, refusals."""

import importlib
import itertools
from dataclasses import replace

import pytest
import torch
from disassembly import compile_to

from pma.kernels.device_facts import SM90
from pma.kernels.projection.hopper_spec import (
    WARPGROUPS,
    HopperGemmQuantizeSpec,
    HopperGemmSpec,
    choose_config,
)
from pma.layouts import BLOCK

I32, I64, FP32 = torch.int32, torch.int64, torch.float32
HEADS_OF_64 = {"in_columns_per_scale": 64, "columns_per_scale": 64}
QUANTIZE = HopperGemmQuantizeSpec(384, 384, I64)
CASES = {
    "quantize-384": QUANTIZE,
    "quantize-384-transposed": replace(QUANTIZE, writes_transposed=True, headroom_exponent=5),
    "quantize-512-heads-of-64": HopperGemmQuantizeSpec(512, 512, I32, **HEADS_OF_64),
    "quantize-1024-whole-rows": HopperGemmQuantizeSpec(1024, 1024, I64, in_columns_per_scale=1024),
    "quantize-2048-streamed": HopperGemmQuantizeSpec(2048, 2048, I64),
    "gemm-384": HopperGemmSpec(384, 384, I64),
    "gemm-512-fp32": HopperGemmSpec(512, 512, I64, in_columns_per_scale=64, out_dtype=FP32),
}


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, tmp_path, allocated, record_property):
    sm90, spec = importlib.import_module("pma.kernels.projection.sm90"), CASES[name]
    totals = allocated(sm90)
    assert spec.why_unsupported() is None
    config = choose_config(spec, SM90)
    code = compile_to(tmp_path, sm90, "sm_90a", spec, config)
    record_property("registers", code.registers)
    record_property("shared_bytes", totals[-1])
    print(f"{name}: {code.registers} registers, {totals[-1]} bytes shared, {config}")
    tiles = config.weight_tiles if isinstance(spec, HopperGemmQuantizeSpec) else 1  # that are unrolled
    assert len(code.starting_with("QGMMA")) == tiles * spec.in_columns // BLOCK, "one copy of each product"
    assert not code.starting_with("HGMMA", "IGMMA", "HMMA", "QMMA")
    assert len(code.starting_with("WARPGROUP.DEPBAR")) == tiles * spec.chunks, "nothing is serialised"
    assert not code.starting_with("LDL", "STL"), "accesses to local memory"
    assert code.registers * config.threads <= SM90.registers_per_sm
    divided = 128 * (sm90.REGISTERS["others"] + WARPGROUPS * sm90.REGISTERS["compute"])
    assert divided <= code.registers * config.threads, (
        "more than the launch has: those that compute would wait for ever"
    )
    assert len(code.starting_with("USETMAXREG")) == 2, "those that compute and the others"
    assert totals[-1] <= config.shared_bytes(spec) <= SM90.shared_bytes_per_block
    wide = [name for name in code.starting_with("STG") if "128" in name]
    assert len(wide) >= 4, "results leave 16 bytes at a time"


def test_config_of_every_shape():
    for columns, chunk, quantises in itertools.product((128, 192, 384, 512, 1024, 2048), (64, 128), (False, True)):
        spec_of = HopperGemmQuantizeSpec if quantises else HopperGemmSpec
        options = {"columns_per_scale": 64} if quantises else {}
        spec = spec_of(columns, columns, I64, in_columns_per_scale=chunk, **options)
        if columns % chunk:
            assert "in_columns must be a multiple of 128" in spec.why_unsupported()
            continue
        assert spec.why_unsupported() is None
        config = choose_config(spec, SM90)
        assert config.shared_bytes(spec) <= SM90.shared_bytes_per_block
        assert config.stages >= 2 and spec.column_tiles % config.weight_tiles == 0
        assert config.is_resident == (columns < 2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_columns": 200}, "in_columns must be a multiple of 128 from 128 to 2048, got 200"),
        ({"out_columns": 64, "columns_per_scale": 64}, "out_columns must be a multiple of 64 from 128 to 2048, got 64"),
        ({"in_columns": 4096}, "in_columns must be a multiple of 128 from 128 to 2048, got 4096"),
        ({"in_columns_per_scale": 32}, "in_columns_per_scale must be 64, 128 or 384, got 32"),
        ({"columns_per_scale": 32}, "columns_per_scale must be 64 or 128 and divide 384, got 32"),
        ({"headroom_exponent": 128}, "headroom_exponent must be from 0 to 127, got 128"),
        ({"k_smoothing": True}, "k_smoothing must be False, got True"),
        ({"offsets_dtype": torch.int16}, "offsets must be int32 or int64, got torch.int16"),
    ],
)
def test_refusals(changes, message):
    assert message in replace(QUANTIZE, **changes).why_unsupported()


def test_refusal_of_a_result_type():
    spec = HopperGemmSpec(384, 384, I64, out_dtype=torch.float16)
    assert "out_dtype must be bfloat16 or float32, got torch.float16" in spec.why_unsupported()
