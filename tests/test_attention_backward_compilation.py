"""Attention backward compiled for Blackwell without a GPU: machine code, shared memory, refusals."""

import importlib
import itertools

import pytest
import torch
from disassembly import Disassembly, compile_to

from pma.kernels.attention_backward.spec import (
    COMPUTE_WARPS,
    DK,
    REDUCE_WARPS,
    SCALES,
    TENSOR_COLUMNS,
    TILE,
    WARPS,
    AttentionBackwardConfig,
    AttentionBackwardSpec,
    choose_config,
)
from pma.kernels.device_facts import SM100, SM103
from pma.numerics import AttentionNumerics

I32, I64 = torch.int32, torch.int64
FACTS = (SM100, SM103)
DEFAULT = AttentionNumerics()
HALF_DQ = AttentionNumerics(dq_accumulation="fp16")
BY_BLOCK_HALF_DQ = AttentionNumerics(p_cast_backward="block", dq_accumulation="fp16")
CASES = {
    "heads-of-128": AttentionBackwardSpec(128, 3, 512, True, DEFAULT, I64),
    "heads-of-64": AttentionBackwardSpec(64, 3, 512, True, DEFAULT, I64),
    "fp16-dq": AttentionBackwardSpec(128, 3, 640, True, HALF_DQ, I32),
    "seeds-of-each-segment": AttentionBackwardSpec(128, 3, 200, False, DEFAULT, I64),
    "seeds-of-each-segment-heads-of-64-fp16-dq": AttentionBackwardSpec(64, 3, 200, False, HALF_DQ, I32),
    "scales-of-P-by-block": AttentionBackwardSpec(128, 3, 200, True, BY_BLOCK_HALF_DQ, I64),
}


# Every case is compiled for sm_100a; those that need most registers show that sm_103a has room for them too.
COMPILATIONS = [(name, SM100) for name in CASES] + [("heads-of-128", SM103), ("scales-of-P-by-block", SM103)]


@pytest.mark.parametrize(("name", "facts"), COMPILATIONS, ids=[f"{f.arch}-{name}" for name, f in COMPILATIONS])
def test_machine_code(name, facts, tmp_path, allocated, record_property):
    sm100 = importlib.import_module("pma.kernels.attention_backward.sm100")
    totals, spec = allocated(sm100), CASES[name]
    assert spec.why_unsupported() is None
    config = choose_config(spec, facts)
    code = compile_to(tmp_path, sm100, facts.arch, spec, config)
    record_property("registers", code.registers)
    record_property("shared_bytes", totals[-1])
    print(f"{facts.arch} {name}: {code.registers} registers, {totals[-1]} bytes shared, {config}")
    check_products(code, spec)
    check_registers(code, config, facts.registers_per_sm)
    check_gradients(code, spec)
    assert totals[-1] <= config.shared_bytes(spec) <= facts.shared_bytes_per_block


def check_products(code: Disassembly, spec: AttentionBackwardSpec) -> None:
    """In the code: the first S, dP and dV, and the five of a step."""
    heads_of_a_tile, blocks = TILE // spec.head_dim, TILE // 32
    over_features = 2 * 2 * heads_of_a_tile * (spec.head_dim // 32)
    over_seeds_or_events = (2 + 1 + 1) * blocks
    products = code.starting_with("UTCQMMA")
    assert len(products) >= over_features + over_seeds_or_events, "all products are block-scaled"
    assert not code.starting_with("UTCHMMA", "UTCIMMA", "UTCOMMA", "UTCMXQMMA"), "and there are no others"
    assert len(code.starting_with("UTCCP")) >= 2 * (2 + 2 + 2 + 1 + 1), "scales of both operands"


def check_registers(code: Disassembly, config: AttentionBackwardConfig, available: int) -> None:
    spills = code.starting_with("LDL", "STL")
    assert not spills, f"{len(spills)} accesses to local memory"
    assert code.registers * config.threads <= available
    assert len(code.starting_with("USETMAXREG")) == 3, "compute, reduce and the others"


def check_gradients(code: Disassembly, spec: AttentionBackwardSpec) -> None:
    assert len(code.starting_with("MUFU.EX2")) == TILE // 2, "a row of P in each thread, for half of the seeds"
    maxima = 2 * (spec.head_dim // 32) + TILE // 64 * (2 if spec.numerics.p_cast_backward == "block" else 1)
    assert len(code.starting_with("CREDUX.MAXABS")) == maxima, "blocks of dV, dK and dS, and of P where asked for"
    casts = [name for name in code.starting_with("F2FP") if "E4M3.F32" in name]
    assert len(casts) == 2 * TILE // 2 // 2 + 2 * spec.head_dim // 2
    assert all("SATFINITE" in name for name in casts)
    width, kind = (8, "F16x8") if spec.dq_dtype == torch.float16 else (4, "F32x4")
    sums = [name for name in code.starting_with("REDG") if kind in name]
    assert len(sums) == spec.head_dim // width, "16 bytes of dQ at once"
    payload = [name for name in code.starting_with("STG") if name.endswith((".256", ".128"))]
    assert len(payload) >= 2 * spec.head_dim // 32, "payload of dK and dV 32 or 16 bytes at a time"


# ------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: facts.arch)
def test_config_of_every_shape(facts):
    for head_dim, is_shared, num_seeds in itertools.product((64, 128), (True, False), (1, 128, 200, 512, 640)):
        spec = AttentionBackwardSpec(head_dim, 3, num_seeds, is_shared, DEFAULT, I64)
        config = choose_config(spec, facts)
        assert config.shared_bytes(spec) <= facts.shared_bytes_per_block
        assert config.kv_buffers == 2 and 2 <= config.dout_buffers <= 4
        assert config.q_is_resident(spec) == (is_shared and num_seeds <= 512) or spec.steps == 2


def test_registers_of_the_roles_fill_the_register_file():
    """What some warps take others must have given: less would idle, more would never be granted."""
    sm100 = importlib.import_module("pma.kernels.attention_backward.sm100")
    for split in sm100.REGISTERS.values():
        assert all(registers % 8 == 0 for registers in split.values())
        others = WARPS - COMPUTE_WARPS - REDUCE_WARPS
        used = COMPUTE_WARPS * split["compute"] + REDUCE_WARPS * split["reduce"] + others * split["others"]
        assert 32 * used == SM100.registers_per_sm == SM103.registers_per_sm


def test_scale_factors_lie_in_the_tensor_memory_that_the_table_names():
    """Eight columns for a product, none of them among P's or dS's, none past the end."""
    for where, (a, b) in SCALES.items():
        assert b == a + 4
        if where.startswith("first"):
            assert a >= DK and b + 4 <= TENSOR_COLUMNS
        else:
            assert a % TILE >= 16 and b % TILE + 4 <= 64 and a < 2 * TILE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "head width must be 64 or 128, got 96"),
        ({"numerics": AttentionNumerics(dp_operands="bf16")}, "dp_operands must be mxfp8, got bf16"),
        ({"numerics": AttentionNumerics(uniform_scales=True)}, "uniform_scales must be False, got True"),
        ({"offsets_dtype": torch.int16}, "offsets must be int32 or int64, got torch.int16"),
    ],
)
def test_refusals(changes, message):
    fields = vars(CASES["heads-of-128"]) | changes
    assert message in AttentionBackwardSpec(**fields).why_unsupported()
