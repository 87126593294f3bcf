"""Attention forward compiled for Hopper without a GPU: machine code, registers, shared memory, refusals."""

import importlib
import itertools
from dataclasses import replace

import pytest
import torch
from disassembly import Disassembly, compile_to

from pma.kernels.attention_forward.hopper_spec import (
    TILE,
    HopperForwardConfig,
    HopperForwardSpec,
    choose_config,
    fits_fp16,
)
from pma.kernels.device_facts import SM90
from pma.numerics import HOPPER_NUMERICS, AttentionNumerics

BF16, FP16, FP32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
FP32_SUM = replace(HOPPER_NUMERICS, denominator="fp32")
FORWARD = replace(HOPPER_NUMERICS, kv_order="forward")
DEFAULT = HopperForwardSpec(128, 3, 512, True, HOPPER_NUMERICS, BF16, I64)
CASES = {
    "heads-of-128": (DEFAULT, {}),
    "heads-of-64": (HopperForwardSpec(64, 6, 512, True, HOPPER_NUMERICS, BF16, I32), {}),
    "one-seed-tile": (HopperForwardSpec(128, 3, 128, True, HOPPER_NUMERICS, BF16, I64), {}),
    "seeds-of-each-segment": (HopperForwardSpec(128, 3, 200, False, HOPPER_NUMERICS, FP16, I64), {}),
    "fp32-sum": (HopperForwardSpec(128, 1, 512, True, FP32_SUM, BF16, I64), {}),
    "forward-order-fp32": (HopperForwardSpec(128, 1, 512, True, FORWARD, FP32, I64), {}),
    "no-promotion": (DEFAULT, {"promotion": 0}),
    "lse-of-product": (DEFAULT, {"exact_lse": False}),
    "cluster": (DEFAULT, {"ctas": 2}),
    "fp32-scores": (DEFAULT, {"scores": "fp32"}),
    "optimistic": (DEFAULT, {"optimistic": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, tmp_path, allocated, record_property):
    sm90 = importlib.import_module("pma.kernels.attention_forward.sm90")
    spec, choices = CASES[name]
    totals = allocated(sm90)
    assert spec.why_unsupported() is None
    config = choose_config(spec, SM90, **choices)
    code = compile_to(tmp_path, sm90, "sm_90a", spec, config)
    record_property("registers", code.registers)
    record_property("shared_bytes", totals[-1])
    print(f"{name}: {code.registers} registers, {totals[-1]} bytes shared, {config}")
    check_products(code, spec)
    check_softmax(code, config)
    assert not code.starting_with("LDL", "STL"), "accesses to local memory"
    assert code.registers * config.threads <= SM90.registers_per_sm
    assert len(code.starting_with("USETMAXREG")) == 2, "those that compute and the others"
    assert totals[-1] <= config.shared_bytes(spec) <= SM90.shared_bytes_per_block


def check_products(code: Disassembly, spec: HopperForwardSpec) -> None:
    scores, values = spec.head_dim // 32, TILE // 32
    assert len(code.starting_with("QGMMA")) == 2 * (scores + values), "of the first tile, of a step, of the last tile"
    assert not code.starting_with("HGMMA", "IGMMA", "HMMA", "QMMA")
    assert len(code.starting_with("WARPGROUP.DEPBAR")) == 4, "one for each wait of the source: nothing is serialised"


def check_softmax(code: Disassembly, config: HopperForwardConfig) -> None:
    """Exponentials of the first tile and of a step; twice where they may be taken again."""
    count = TILE * TILE // 128  # of a thread: two tiles of 64 seeds and 128 events
    times = 2 if config.optimistic else 1
    halves = [name for name in code.starting_with("MUFU.EX2") if "F16" in name]
    scores = halves if config.scores == "fp16" else [n for n in code.starting_with("MUFU.EX2") if "F16" not in n]
    assert times * count <= len(scores) <= times * (count + 6)  # factors of moved maxima, sums below the largest score
    casts = [name for name in code.starting_with("F2FP") if "E4M3" in name]
    assert len(casts) == count // 2


# ------------------------------------------------------------------------------------------ arithmetic


def test_config_of_every_shape():
    for head_dim, is_shared, num_seeds, record in itertools.product(
        (64, 128), (True, False), (1, 128, 200, 512), (HOPPER_NUMERICS, FP32_SUM)
    ):
        spec = HopperForwardSpec(head_dim, 3, num_seeds, is_shared, record, BF16, I64)
        config = choose_config(spec, SM90)
        assert config.shared_bytes(spec) <= SM90.shared_bytes_per_block
        assert 4 <= config.stages <= 6
        assert spec.groups % config.ctas == 0, "a cluster's CTAs have one head and the same segments"
        assert spec.groups == 3 * -(-num_seeds // TILE)


def test_scores_in_fp16_need_headroom():
    assert fits_fp16(DEFAULT) and choose_config(DEFAULT, SM90).scores == "fp16"
    for head_dim, headroom, fits in ((128, 4, False), (64, 4, True), (64, 0, False)):
        spec = replace(DEFAULT, head_dim=head_dim, numerics=replace(HOPPER_NUMERICS, headroom_exponent=headroom))
        assert fits_fp16(spec) == fits
        assert choose_config(spec, SM90).scores == ("fp16" if fits else "fp32")


def test_choices_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="ctas must divide the 1 seed tiles, got 2"):
        choose_config(replace(DEFAULT, num_seeds=100), SM90, ctas=2)
    with pytest.raises(ValueError, match="headroom_exponent of 5"):
        choose_config(replace(DEFAULT, numerics=replace(HOPPER_NUMERICS, headroom_exponent=0)), SM90, scores="fp16")
    with pytest.raises(ValueError, match="optimistic=True needs scores='fp16'"):
        choose_config(DEFAULT, SM90, scores="fp32", optimistic=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "head width must be 64 or 128, got 96"),
        ({"numerics": replace(HOPPER_NUMERICS, kv_tile=64)}, "kv_tile must be 128, got 64"),
        ({"numerics": replace(HOPPER_NUMERICS, repeated_max_guard=True)}, "repeated_max_guard must be False, got True"),
        ({"numerics": AttentionNumerics(p_cast="block")}, "p_cast must be 'static', got 'block'"),
        ({"numerics": replace(HOPPER_NUMERICS, lse_sum="quantized")}, "lse_sum must be 'fp32', got 'quantized'"),
        ({"numerics": AttentionNumerics(p_cast="static")}, "uniform_scales and folds_v_scales must be True"),
        ({"out_dtype": torch.float64}, "out_dtype must be bfloat16, float16 or float32, got torch.float64"),
        ({"offsets_dtype": torch.int16}, "offsets must be int32 or int64, got torch.int16"),
    ],
)
def test_refusals(changes, message):
    assert message in replace(DEFAULT, **changes).why_unsupported()
