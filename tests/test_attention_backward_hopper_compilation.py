"""Attention backward compiled for Hopper without a GPU: machine code, registers, shared memory, refusals."""

import importlib
from dataclasses import replace

import pytest
import torch
from disassembly import compile_to

from pma.kernels.attention_backward.hopper_spec import STEP, HopperBackwardSpec, choose_config
from pma.kernels.attention_backward.spec import TILE
from pma.kernels.device_facts import SM90
from pma.numerics import HOPPER_NUMERICS, AttentionNumerics

FP16_DQ = replace(HOPPER_NUMERICS, dq_accumulation="fp16")
I32, I64 = torch.int32, torch.int64
DEFAULT = HopperBackwardSpec(128, 3, 512, True, HOPPER_NUMERICS, I64)
CASES = {
    "heads-of-128": (DEFAULT, {}),
    "heads-of-64": (HopperBackwardSpec(64, 6, 512, True, HOPPER_NUMERICS, I32), {}),
    "fp16-dq": (replace(DEFAULT, numerics=FP16_DQ), {}),
    "640-seeds": (replace(DEFAULT, num_seeds=640), {}),
    "seeds-of-each-segment": (HopperBackwardSpec(128, 3, 200, False, HOPPER_NUMERICS, I64), {}),
    "cluster": (DEFAULT, {"ctas": 2}),
    "cluster-fp16-dq": (replace(DEFAULT, numerics=FP16_DQ), {"ctas": 2}),
    "cluster-640-seeds": (replace(DEFAULT, num_seeds=640), {"ctas": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, tmp_path, allocated, record_property):
    sm90 = importlib.import_module("pma.kernels.attention_backward.sm90")
    (spec, choices), totals = CASES[name], allocated(sm90)
    assert spec.why_unsupported() is None
    config = choose_config(spec, SM90, **choices)
    code = compile_to(tmp_path, sm90, "sm_90a", spec, config)
    record_property("registers", code.registers)
    record_property("shared_bytes", totals[-1])
    print(f"{name}: {code.registers} registers, {totals[-1]} bytes shared, {config}")
    scores, halves = 2 * spec.head_dim // 32, spec.head_dim // STEP // config.ctas  # that a CTA multiplies
    assert len(code.starting_with("QGMMA")) == scores + 2 * STEP // 32 + halves * config.ctas * TILE // 32
    assert not code.starting_with("HGMMA", "IGMMA", "HMMA", "QMMA")
    waits = 4 + halves  # those of the source: S, dP, a step's end, a tile's end; each half of dQ
    assert len(code.starting_with("WARPGROUP.DEPBAR")) == waits, "nothing is serialised"
    reductions = 32 * halves // (8 if spec.dq_dtype == torch.float16 else 4)  # 32 values of a thread, 16 bytes each
    assert len(code.starting_with("REDG")) == reductions
    assert not code.starting_with("LDL", "STL"), "accesses to local memory"
    assert code.registers * config.threads <= SM90.registers_per_sm
    assert len(code.starting_with("USETMAXREG")) == 3, "those that compute, reduce, and the others"
    assert totals[-1] <= config.shared_bytes(spec) <= SM90.shared_bytes_per_block


def test_statistics_compile(tmp_path):
    statistics = importlib.import_module("pma.kernels.attention_backward.seed_statistics")
    code = compile_to(tmp_path, statistics, "sm_90a", DEFAULT)
    assert not code.starting_with("LDL", "STL")


def test_config_of_every_shape():
    for head_dim in (64, 128):
        for num_seeds in (1, 64, 200, 512, 513, 640, 2000):
            for is_shared in (True, False):
                spec = HopperBackwardSpec(head_dim, 3, num_seeds, is_shared, HOPPER_NUMERICS, I64)
                config = choose_config(spec, SM90)
                assert config.shared_bytes(spec) <= SM90.shared_bytes_per_block
                assert config.stages >= 2 and (is_shared or not config.q_is_resident)
    assert choose_config(DEFAULT, SM90).q_is_resident
    assert choose_config(DEFAULT, SM90, is_deterministic=True).slabs == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "head width must be 64 or 128, got 96"),
        ({"numerics": AttentionNumerics()}, "uniform_scales and folds_v_scales must be True"),
        ({"numerics": replace(HOPPER_NUMERICS, headroom_exponent=4)}, "2·headroom_exponent must keep sums"),
        ({"numerics": replace(HOPPER_NUMERICS, dp_headroom_exponent=0)}, "2·dp_headroom_exponent must keep sums"),
        ({"numerics": replace(HOPPER_NUMERICS, dp_operands="bf16")}, "dp_operands must be mxfp8, got bf16"),
        ({"offsets_dtype": torch.int16}, "offsets must be int32 or int64, got torch.int16"),
    ],
)
def test_refusals(changes, message):
    assert message in replace(DEFAULT, **changes).why_unsupported()


def test_clusters_need_shared_seeds_and_two_halves_of_columns():
    for changes in ({"head_dim": 64}, {"is_shared": False}):
        with pytest.raises(ValueError, match="ctas must be 1 but for shared seeds and heads of 128, got 2"):
            choose_config(replace(DEFAULT, **changes), SM90, ctas=2)
