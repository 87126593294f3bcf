"""The projections compiled for Blackwell without a GPU: what the machine code holds, what it takes, what is refused."""

import importlib
import itertools
import re
from pathlib import Path

import pytest
import torch
from disassembly import Disassembly, compile_to

from pma.kernels.device_facts import KIB, SM100, SM103, DeviceFacts
from pma.kernels.projection.spec import (
    GemmQuantizeSpec,
    GemmSpec,
    ProjectionConfig,
    ProjectionSpec,
    choose_config,
)

I32, I64, BF16, FP32 = torch.int32, torch.int64, torch.bfloat16, torch.float32
FACTS = (SM100, SM103)
TENSOR_MEMORY_COLUMNS = 512
SHARED_MEMORY = 227 * KIB
CASES: dict[str, ProjectionSpec] = {
    **{f"gemm_quantize-{columns}": GemmQuantizeSpec(columns, columns, I64) for columns in (128, 384, 512, 1024)},
    "gemm_quantize-256-heads-of-64": GemmQuantizeSpec(256, 256, I32, columns_per_scale=64, headroom_exponent=5),
    "gemm_quantize-384-heads-of-128": GemmQuantizeSpec(384, 384, I32, columns_per_scale=128),
    "gemm_quantize-160-96": GemmQuantizeSpec(160, 96, I32, writes_scales=False),
    "gemm_quantize-2048-streamed": GemmQuantizeSpec(2048, 2048, I64, writes_tiles=False),
    **{f"gemm-{columns}": GemmSpec(columns, columns, I64) for columns in (128, 384, 512, 1024)},
    "gemm-384-fp32": GemmSpec(384, 384, I32, FP32),
    "gemm-96-160": GemmSpec(96, 160, I32),
}
# Every case is compiled for sm_100a; a few show that what they use exists on sm_103a.
SM103_CASES = (
    "gemm_quantize-384",
    "gemm_quantize-256-heads-of-64",
    "gemm_quantize-2048-streamed",
    "gemm-384",
    "gemm-96-160",
)
COMPILATIONS = [
    pytest.param(name, facts, id=f"{facts.arch}-{name}")
    for facts in FACTS
    for name in (CASES if facts is SM100 else SM103_CASES)
]


def compile_projection(folder: Path, spec: ProjectionSpec, facts: DeviceFacts, config: ProjectionConfig) -> Disassembly:
    return compile_to(folder, importlib.import_module("pma.kernels.projection.sm100"), facts.arch, spec, config)


@pytest.mark.parametrize("name, facts", COMPILATIONS)
def test_machine_code(name, facts, tmp_path, allocated, record_property):
    totals, spec = allocated(importlib.import_module("pma.kernels.projection.sm100")), CASES[name]
    assert spec.why_unsupported() is None
    config = choose_config(spec, facts)
    code = compile_projection(tmp_path, spec, facts, config)
    record_property("registers", code.registers)
    record_property("shared_bytes", totals[-1])
    print(f"{facts.arch} {name}: {code.registers} registers, {totals[-1]} bytes shared, {config}")
    assert code.starting_with("UTCQMMA"), "block-scaled products of 8-bit operands"
    assert code.starting_with("UTCCP"), "scales reach tensor memory by copies from shared memory"
    assert not code.starting_with("LDL", "STL"), f"spills with {code.registers} registers"
    assert code.registers is None or code.registers * config.threads <= facts.registers_per_sm
    assert totals[-1] <= config.shared_bytes(spec) <= SHARED_MEMORY
    assert config.tensor_columns(spec) <= TENSOR_MEMORY_COLUMNS
    assert [mnemonic for mnemonic in code.starting_with("STG") if "256" in mnemonic], "rows are stored in 32 bytes"
    if isinstance(spec, GemmQuantizeSpec):
        check_quantises(code)


def check_quantises(code: Disassembly) -> None:
    maxima = code.starting_with("CREDUX.MAXABS.F32")
    assert maxima and all("NAN" in mnemonic for mnemonic in maxima), "a NaN survives the maximum of a block"
    casts = [mnemonic for mnemonic in code.starting_with("F2FP") if "E4M3.F32" in mnemonic]
    assert casts and all("SATFINITE" in mnemonic for mnemonic in casts)
    assert code.starting_with("FMUL2"), "values are scaled in pairs"


# ------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: facts.arch)
@pytest.mark.parametrize("spec_type", [GemmQuantizeSpec, GemmSpec])
def test_config_of_every_width(spec_type, facts):
    for in_columns, out_columns in itertools.product(range(32, 4097, 32), (32, 128, 384, 512, 1024, 4096)):
        spec = spec_type(in_columns, out_columns, I64)
        assert spec.why_unsupported() is None
        config = choose_config(spec, facts)
        assert config.shared_bytes(spec) <= facts.shared_bytes_per_block
        assert config.tensor_columns(spec) <= TENSOR_MEMORY_COLUMNS
        assert config.groups(spec) * config.weight_tiles == spec.column_tiles, "every column belongs to one CTA"
        assert config.stages >= (spec.depth_tiles + 1 if config.weight_tiles > 1 else 2), (
            "a row tile stays while in use"
        )


def test_weights_of_the_usual_widths_are_resident():
    for columns in (128, 256, 384, 512, 768, 1024):
        assert choose_config(GemmQuantizeSpec(columns, columns, I64), SM100).is_resident
    assert not choose_config(GemmQuantizeSpec(2048, 2048, I64), SM100).is_resident


WIDTHS = "a multiple of 32 up to 8192"
UNSUPPORTED = {
    **{
        f"in_columns-{c}": (GemmQuantizeSpec(c, 64, I32), str(c), f"in_columns must be {WIDTHS}") for c in (0, 48, 8224)
    },
    **{f"out_columns-{c}": (GemmSpec(64, c, I32), str(c), f"out_columns must be {WIDTHS}") for c in (0, 48, 8224)},
    "offsets": (GemmSpec(64, 64, FP32), "float32", "offsets must be int32 or int64"),
    "out_dtype": (GemmSpec(64, 64, I32, torch.float16), "float16", "out_dtype must be bfloat16 or float32"),
    "columns_per_scale-96": (GemmQuantizeSpec(64, 192, I32, 96), "96", "must be 32, 64 or 128 and divide 192"),
    "columns_per_scale-128": (GemmQuantizeSpec(64, 192, I32, 128), "128", "must be 32, 64 or 128 and divide 192"),
    "headroom_exponent": (GemmQuantizeSpec(64, 64, I32, headroom_exponent=-1), "-1", "must be from 0 to 127"),
    "k_smoothing": (GemmQuantizeSpec(64, 64, I32, k_smoothing=True), "True", "k_smoothing must be False"),
}


@pytest.mark.parametrize("spec, came, allowed", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_reasons_name_what_came_and_what_is_allowed(spec, came, allowed):
    reason = spec.why_unsupported()
    assert allowed in reason
    assert re.search(rf"got (torch\.)?{came}$", reason)
