"""Attention forward compiled for Blackwell without a GPU: machine code, shared and tensor memory, refusals."""

import importlib
import itertools

import pytest
import torch
from disassembly import Disassembly, compile_to

from pma.kernels.attention_forward.spec import (
    END_COLUMN,
    TENSOR_COLUMNS,
    TILE,
    AttentionForwardConfig,
    AttentionForwardSpec,
    choose_config,
)
from pma.kernels.device_facts import SM100, SM103
from pma.numerics import HOPPER_NUMERICS, AttentionNumerics

BF16, FP16, FP32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
FACTS = (SM100, SM103)
DEFAULT = AttentionNumerics()
BLOCK_SCALES = AttentionNumerics(p_cast="block")
FORWARD = AttentionNumerics(kv_order="forward")
CASES = {
    "heads-of-128": AttentionForwardSpec(128, 3, 512, True, DEFAULT, BF16, I64),
    "heads-of-64": AttentionForwardSpec(64, 6, 512, True, DEFAULT, BF16, I32),
    "seeds-of-each-segment": AttentionForwardSpec(128, 3, 200, False, DEFAULT, FP16, I64),
    "scales-of-P-by-block": AttentionForwardSpec(128, 1, 512, True, BLOCK_SCALES, BF16, I64),
    "forward-order-fp32": AttentionForwardSpec(128, 1, 512, True, FORWARD, FP32, I64),
}


# Every case is compiled for sm_100a; a few show that what they use exists on sm_103a.
COMPILATIONS = [(name, SM100) for name in CASES] + [("heads-of-128", SM103), ("scales-of-P-by-block", SM103)]


@pytest.mark.parametrize(("name", "facts"), COMPILATIONS, ids=[f"{f.arch}-{name}" for name, f in COMPILATIONS])
def test_machine_code(name, facts, tmp_path, allocated, record_property):
    sm100 = importlib.import_module("pma.kernels.attention_forward.sm100")
    totals, spec = allocated(sm100), CASES[name]
    assert spec.why_unsupported() is None
    config = choose_config(spec, facts)
    code = compile_to(tmp_path, sm100, facts.arch, spec, config)
    record_property("registers", code.registers)
    record_property("shared_bytes", totals[-1])
    print(f"{facts.arch} {name}: {code.registers} registers, {totals[-1]} bytes shared, {config}")
    check_products(code, spec)
    check_loads(code, config)
    check_registers(code, config.threads, facts.registers_per_sm)
    check_softmax(code, spec, config)
    assert totals[-1] <= config.shared_bytes(spec) <= facts.shared_bytes_per_block


def check_products(code: Disassembly, spec: AttentionForwardSpec) -> None:
    heads_of_a_tile, tile_blocks = TILE // spec.head_dim, TILE // 32
    scores = heads_of_a_tile * (spec.head_dim // 32)
    weights = 2 * 2 * tile_blocks  # with V and with ones, of a full tile and of a segment's last
    assert len(code.starting_with("UTCQMMA")) == scores + weights, "all products are block-scaled"
    assert not code.starting_with("UTCHMMA", "UTCIMMA")
    assert len(code.starting_with("UTCCP")) == 5, "scales of Q, K, V and P, and once those of ones"


def check_loads(code: Disassembly, config: AttentionForwardConfig) -> None:
    for loads in ("UTMALDG", "UBLKCP"):
        shared = [name for name in code.starting_with(loads) if "MULTICAST" in name]
        own = [name for name in code.starting_with(loads) if "MULTICAST" not in name]
        assert own and bool(shared) == (config.ctas > 1), "of Q, of K and V"
    assert len([name for name in code.starting_with("UTCBAR") if "MULTICAST" in name]) == 2 * (config.ctas - 1)


def check_registers(code: Disassembly, threads: int, available: int) -> None:
    spills = code.starting_with("LDL", "STL")
    assert not spills, f"{len(spills)} accesses to local memory"
    assert code.registers * threads <= available
    assert len(code.starting_with("USETMAXREG")) == 3, "softmax, correction and the others"


def check_softmax(code: Disassembly, spec: AttentionForwardSpec, config: AttentionForwardConfig) -> None:
    loads_with_maxima = TILE // 32 if config.finds_maxima_in_loads else 0
    assert len(code.starting_with("LDTM.STAT")) == loads_with_maxima
    assert len(code.starting_with("FMNMX3")) >= (0 if loads_with_maxima else 60), "maxima of three values"
    casts = [name for name in code.starting_with("F2FP") if "E4M3.F32" in name]
    assert len(casts) == TILE // 2 and all("SATFINITE" in name for name in casts)
    exponentials = TILE * (16 - config.emulated) // 16
    assert len(code.starting_with("MUFU.EX2")) == exponentials + 1, "and the factor of O where a row outgrows it"
    assert len(code.starting_with("FFMA2")) >= TILE // 2, "arithmetic in pairs"


# ------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: facts.arch)
def test_config_of_every_shape(facts):
    for head_dim, is_shared, num_seeds in itertools.product((64, 128), (True, False), (1, 128, 200, 512)):
        spec = AttentionForwardSpec(head_dim, 3, num_seeds, is_shared, DEFAULT, BF16, I64)
        config = choose_config(spec, facts)
        assert config.shared_bytes(spec) <= facts.shared_bytes_per_block
        assert config.k_buffers >= 4 and config.v_buffers >= 4, "two in use, two on their way"
        assert config.q_buffers == (1 if is_shared else 2)
        assert spec.seed_tiles % config.ctas == 0 and config.ctas == (1 if num_seeds <= 128 else 2)
        assert END_COLUMN <= TENSOR_COLUMNS == 512
        assert spec.groups == 3 * -(-num_seeds // 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "head width must be 64 or 128, got 96"),
        ({"numerics": AttentionNumerics(kv_tile=64)}, "kv_tile must be 128, got 64"),
        ({"numerics": AttentionNumerics(repeated_max_guard=True)}, "repeated_max_guard must be False, got True"),
        ({"numerics": AttentionNumerics(p_cast="static")}, "p_cast must be 'tile' or 'block', got 'static'"),
        ({"numerics": AttentionNumerics(denominator="fp32")}, "denominator must be 'quantized', got 'fp32'"),
        ({"numerics": AttentionNumerics(lse_sum="fp32")}, "lse_sum must be 'quantized', got 'fp32'"),
        ({"numerics": AttentionNumerics(rescale_threshold_log2=2.0)}, "rescale_threshold_log2 must be 0, got 2.0"),
        ({"numerics": HOPPER_NUMERICS}, "folds_v_scales must be False, got True"),
        ({"out_dtype": torch.float64}, "out_dtype must be bfloat16, float16 or float32, got torch.float64"),
        ({"offsets_dtype": torch.int16}, "offsets must be int32 or int64, got torch.int16"),
    ],
)
def test_refusals(changes, message):
    fields = vars(CASES["heads-of-128"]) | changes
    assert message in AttentionForwardSpec(**fields).why_unsupported()
