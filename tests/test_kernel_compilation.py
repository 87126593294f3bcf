"""Kernels are compiled for Hopper and Blackwell without a GPU: what the machine code holds, layouts, the disk cache."""

import functools
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from disassembly import Disassembly, compile_to

from pma.kernels.device_facts import SM90, SM100, SM103, DeviceFacts
from pma.kernels.quantize.spec import QuantizeConfig, QuantizeSpec
from pma.kernels.quantize.spec import choose_config as choose_quantize_config
from pma.kernels.rmsnorm_backward.spec import RMSNormBackwardConfig, RMSNormBackwardSpec
from pma.kernels.rmsnorm_backward.spec import choose_config as choose_backward_config
from pma.kernels.scatter_scales.spec import ScatterScalesSpec

Config = QuantizeConfig | RMSNormBackwardConfig
Spec = QuantizeSpec | RMSNormBackwardSpec | ScatterScalesSpec
BF16, FP16, FP32, FP64, I32, I64 = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64,
)  # fmt: skip
FACTS = (SM90, SM100, SM103)
WIDTHS = range(32, 4097, 32)
CHOOSE = {QuantizeSpec: choose_quantize_config, RMSNormBackwardSpec: choose_backward_config}
KERNELS = {QuantizeSpec: "quantize", RMSNormBackwardSpec: "rmsnorm_backward", ScatterScalesSpec: "scatter_scales"}


def norm(columns: int, dtype: torch.dtype = BF16, weight_dtype: torch.dtype = FP32, **options) -> QuantizeSpec:
    return QuantizeSpec(columns, dtype, I32, weight_dtype=weight_dtype, **options)


def delta(columns: int, delta_columns: int, dtype: torch.dtype = BF16, **options) -> QuantizeSpec:
    return QuantizeSpec(columns, dtype, I32, delta_columns=delta_columns, out_dtype=dtype, **options)


def backward(columns: int, dtype: torch.dtype = BF16, adds_dv: bool = True, **options) -> RMSNormBackwardSpec:
    return RMSNormBackwardSpec(columns, dtype, dtype, FP32, I32, adds_dv, **options)


QUANTIZE = {
    "bf16-384": QuantizeSpec(384, BF16, I32),
    "bf16-32": QuantizeSpec(32, BF16, I32),
    "bf16-160": QuantizeSpec(160, BF16, I64),
    "fp16-512": QuantizeSpec(512, FP16, I32),
    "fp32-8192": QuantizeSpec(8192, FP32, I32),
    "norm-bf16-384-tiles": norm(384, writes_tiles=True),
    "norm-bf16-512-tiles-transposed-uniform": norm(
        512, weight_dtype=BF16, columns_per_scale=512, writes_tiles=True, writes_transposed=True
    ),
    "norm-fp16-160-tiles-transposed": norm(160, FP16, FP16, writes_tiles=True, writes_transposed=True),
    "norm-fp32-1024": norm(1024, FP32),
    "norm-bf16-4096": norm(4096),
    "delta-bf16-512": delta(512, 128),
    "delta-bf16-512-from-input": delta(512, 128, delta_from_input=True),
    "delta-fp32-768-heads-of-256": delta(768, 256, FP32),
    "delta-bf16-2048-streamed": delta(2048, 64, delta_from_input=True),
}
SCATTER_SCALES = {
    f"{'gather' if gathers else 'scatter'}-{direction}-{columns}": ScatterScalesSpec(columns, I32, direction, gathers)
    for gathers, direction, columns in itertools.product((False, True), ("row", "column"), (160, 512))
}
RMSNORM_BACKWARD = {
    **{f"bf16-{columns}-dv": backward(columns) for columns in (32, 384, 512, 1024, 4096)},
    "bf16-416-ragged-normalised": backward(416, writes_normalised=True),
    "bf16-384-fp32-dy": RMSNormBackwardSpec(384, BF16, FP32, BF16, I64, adds_dv=True),
    "fp16-512-dv": backward(512, FP16),
    "fp32-512": backward(512, FP32, adds_dv=False),
    "fp32-8192": backward(8192, FP32, adds_dv=False),
}
CASES: dict[str, Spec] = {
    f"{KERNELS[type(spec)]}-{name}": spec
    for cases in (QUANTIZE, SCATTER_SCALES, RMSNORM_BACKWARD)
    for name, spec in cases.items()
}
# Every case is compiled for sm_90a. The sources don't ask for the architecture, so that for the two others a few cases
# show that what they use exists there: conversions, bulk copies, tiles, transposed payload, δ, sums over several warps.
BLACKWELL_CASES = (
    "quantize-bf16-384", "quantize-norm-bf16-512-tiles-transposed-uniform", "quantize-norm-bf16-4096",
    "quantize-delta-bf16-512", "scatter_scales-scatter-row-512", "scatter_scales-gather-column-160",
    "rmsnorm_backward-bf16-512-dv", "rmsnorm_backward-bf16-4096-dv", "rmsnorm_backward-bf16-416-ragged-normalised",
)  # fmt: skip
COMPILATIONS = [
    pytest.param(name, facts, id=f"{facts.arch}-{name}")
    for facts in FACTS
    for name in (CASES if facts is SM90 else BLACKWELL_CASES)
]


# ----------------------------------------------------------------------------------------- machine code


@functools.cache
def kernel_module(spec_type: type[Spec]) -> ModuleType:
    return importlib.import_module(f"pma.kernels.{KERNELS[spec_type]}.any_arch")


def compile_spec(folder: Path, spec: Spec, facts: DeviceFacts, config: Config | None = None) -> Disassembly:
    static = (spec,) if config is None else (spec, config)
    return compile_to(folder, kernel_module(type(spec)), facts.arch, *static)


@pytest.fixture
def allocated(monkeypatch) -> list[int]:
    """Bytes of shared memory that the kernels compiled in a test ask for, alignment included, as running totals."""
    cute, totals = importlib.import_module("cutlass.cute"), [0]
    for spec_type in CHOOSE:
        module = kernel_module(spec_type)

        class Recorder(module.SmemAllocator):
            def allocate_tensor(self, element_type, layout, byte_alignment):
                begin = -(-totals[-1] // byte_alignment) * byte_alignment
                totals.append(begin + cute.cosize(layout) * element_type.width // 8)
                return super().allocate_tensor(element_type, layout, byte_alignment)

            def allocate_array(self, element_type, num_elems):
                totals.append(totals[-1] + element_type.width // 8 * num_elems)
                return super().allocate_array(element_type, num_elems)

        monkeypatch.setattr(module, "SmemAllocator", Recorder)
    return totals


@pytest.mark.parametrize("name, facts", COMPILATIONS)
def test_machine_code(name, facts, tmp_path, allocated):
    spec = CASES[name]
    assert spec.why_unsupported() is None
    choose_config = CHOOSE.get(type(spec))
    config = choose_config(spec, facts) if choose_config else None
    code = compile_spec(tmp_path, spec, facts, config)
    spills = code.starting_with("LDL", "STL")
    assert not spills, f"{len(spills)} accesses to local memory with {code.registers} registers"
    if config is None:
        check_scatter_scales(spec, code)
        return
    check_resources(spec, config, facts, code)
    assert 0 < allocated[-1] <= config.shared_bytes(spec)
    if isinstance(spec, QuantizeSpec):
        check_quantize(spec, config, code)
    else:
        check_backward(spec, code)


def check_resources(spec: Spec, config: Config, facts: DeviceFacts, code: Disassembly) -> None:
    check_fits(spec, config, facts)
    if code.registers is not None:
        of_warp = -(-32 * code.registers // 256) * 256  # a warp gets registers in lots of 256
        assert config.threads // 32 * of_warp * config.blocks_per_sm <= facts.registers_per_sm


def check_scatter_scales(spec: ScatterScalesSpec, code: Disassembly) -> None:
    assert not code.starting_with("UBLKCP", "F2F", "FMUL", "FADD", "FFMA"), "scale bytes are moved, not computed"
    assert bool(code.starting_with("STG.E.128")) != spec.gathers, "tiles are written in 16 bytes"


def check_quantize(spec: QuantizeSpec, config: QuantizeConfig, code: Disassembly) -> None:
    assert bool(code.starting_with("UBLKCP")) == config.is_resident, "bulk copies, unless rows are streamed"
    assert code.starting_with("LDS.128" if config.is_resident else "LDG.E.128"), "rows are read in 16 bytes"
    casts = [name for name in code.starting_with("F2FP") if "E4M3.F32" in name]
    assert casts and all("SATFINITE" in name for name in casts)
    assert code.starting_with("STG.E.64"), "the payload is written in 8 bytes"
    assert bool(code.starting_with("MUFU.RSQ")) == (spec.weight_dtype is not None)
    reads_payload = bool(spec.delta_columns) and not spec.delta_from_input
    assert any("E4M3.UNPACK" in name for name in code.instructions) == reads_payload


def check_backward(spec: RMSNormBackwardSpec, code: Disassembly) -> None:
    assert code.starting_with("UBLKCP"), "rows arrive by bulk copies"
    assert code.starting_with("LDS.128"), "rows are read in 16 bytes"
    assert code.starting_with("STG.E.128"), "gradients are written in 16 bytes"
    assert any("E4M3.UNPACK" in name for name in code.instructions) == spec.adds_dv
    assert not [name for name in code.instructions if "E4M3.F32" in name], "nothing is quantised"


def test_both_ways_of_reading_are_compiled():
    resident = {choose_quantize_config(spec, SM90).is_resident for spec in QUANTIZE.values()}
    assert resident == {True, False}
    assert not choose_quantize_config(QUANTIZE["norm-bf16-4096"], SM90).is_resident


def test_disassembly_sees_spills(tmp_path):
    """The check above can fail: six blocks of threads on an SM leave the backward kernel too few registers."""
    spec = backward(512)
    config = replace(choose_backward_config(spec, SM90), blocks_per_sm=6)
    assert compile_spec(tmp_path, spec, SM90, config).starting_with("LDL", "STL")


# ------------------------------------------------------------------------------------------ arithmetic


def quantize_specs(dtype: torch.dtype, normalises: bool, writes_tiles: bool, writes_transposed: bool):
    for columns in WIDTHS:
        weight_dtype = FP32 if normalises else None
        for columns_per_scale in (32, columns):
            yield QuantizeSpec(columns, dtype, I32, columns_per_scale, writes_tiles, writes_transposed, weight_dtype)


def delta_specs(dtype: torch.dtype, delta_columns: int):
    for columns in range(delta_columns, WIDTHS[-1] + 1, delta_columns):
        yield delta(columns, delta_columns, dtype)


def check_fits(spec: Spec, config: Config, facts: DeviceFacts) -> None:
    shared = config.shared_bytes(spec)
    assert shared <= facts.shared_bytes_per_block
    assert config.blocks_per_sm * (shared + facts.shared_bytes_reserved) <= facts.shared_bytes_per_sm
    assert config.blocks_per_sm * config.threads <= facts.threads_per_sm
    assert config.stages >= 2


def check_quantize_config(spec: QuantizeSpec, facts: DeviceFacts) -> None:
    assert spec.why_unsupported() is None
    config = choose_quantize_config(spec, facts)
    check_fits(spec, config, facts)
    assert 1 <= config.rows_at_once <= 32
    assert config.rows_at_once * config.rows_per_lane == 32
    assert spec.chunks % config.lanes_per_row == 0
    assert config.lanes_per_row % 4 == 0, "the four lanes of a block's columns are neighbours"
    assert config.lanes_per_row * 8 >= spec.delta_columns, "one chunk of each lane of a row covers whole heads"


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: facts.arch)
@pytest.mark.parametrize("writes_transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("writes_tiles", [False, True], ids=["compact", "tiles"])
@pytest.mark.parametrize("normalises", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_quantize_config_of_every_width(dtype, normalises, writes_tiles, writes_transposed, facts):
    for spec in quantize_specs(dtype, normalises, writes_tiles, writes_transposed):
        check_quantize_config(spec, facts)


@pytest.mark.parametrize("delta_columns", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_quantize_config_with_delta_of_every_width(dtype, delta_columns):
    for spec in delta_specs(dtype, delta_columns):
        check_quantize_config(spec, SM90)


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: facts.arch)
@pytest.mark.parametrize("adds_dv", [False, True], ids=["alone", "dv"])
@pytest.mark.parametrize("dy_dtype", [BF16, FP32], ids=["bf16-dy", "fp32-dy"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_backward_config_of_every_width(dtype, dy_dtype, adds_dv, facts):
    for columns in WIDTHS:
        spec = RMSNormBackwardSpec(columns, dtype, dy_dtype, FP32, I32, adds_dv)
        assert spec.why_unsupported() is None
        config = choose_backward_config(spec, facts)
        check_fits(spec, config, facts)
        assert 1 <= config.rows_at_once <= config.rows_per_stage <= 32
        assert config.rows_at_once * config.lanes_per_row == 32 * config.warps
        assert config.lanes_per_row * 3 >= spec.chunks, "a thread's columns of dw stay in registers"
        assert config.lanes_per_row == 4 or config.lanes_per_row // 2 * 3 < spec.chunks, "no more lanes than that needs"


WIDTH_LIMITS = "multiple of 32 up to 8192"
DTYPES = "bfloat16, float16 or float32"
UNSUPPORTED = {
    **{f"quantize-width-{c}": (QuantizeSpec(c, BF16, I32), str(c), WIDTH_LIMITS) for c in (0, 48, 8224)},
    **{f"backward-width-{c}": (backward(c), str(c), WIDTH_LIMITS) for c in (0, 48, 8224)},
    **{f"scatter-width-{c}": (ScatterScalesSpec(c, I32, "row"), str(c), WIDTH_LIMITS) for c in (0, 48, 8224)},
    "quantize-values-float64": (QuantizeSpec(64, FP64, I32), "float64", f"values must be {DTYPES}"),
    "quantize-weight-float64": (norm(64, weight_dtype=FP64), "float64", f"the weight must be {DTYPES}"),
    "quantize-out-float64": (replace(delta(64, 32), out_dtype=FP64), "float64", f"out must be {DTYPES}"),
    "quantize-head-width-96": (delta(384, 96), "96", "32, 64, 128 or 256 and divide 384"),
    "quantize-head-width-512": (delta(512, 512), "512", "32, 64, 128 or 256 and divide 512"),
    "quantize-head-width-64-of-160": (delta(160, 64), "64", "32, 64, 128 or 256 and divide 160"),
    "backward-values-float64": (RMSNormBackwardSpec(64, FP64, BF16, FP32, I32), "float64", f"dtype must be {DTYPES}"),
    "backward-dy-float64": (RMSNormBackwardSpec(64, BF16, FP64, FP32, I32), "float64", f"dy_dtype must be {DTYPES}"),
    "backward-weight-float64": (
        RMSNormBackwardSpec(64, BF16, BF16, FP64, I32), "float64", f"weight_dtype must be {DTYPES}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("spec, came, allowed", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_reasons_name_what_came_and_what_is_allowed(spec, came, allowed):
    reason = spec.why_unsupported()
    assert allowed in reason
    assert re.search(rf"got (torch\.)?{came}$", reason)


# ------------------------------------------------------------------------------------------- the cache

RACER = """
import json, sys
import torch
from pma.kernels.device_facts import SM90
from pma.kernels.quantize.any_arch import compiled
from pma.kernels.quantize.spec import QuantizeSpec, choose_config

spec = QuantizeSpec(64, torch.bfloat16, torch.int32)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(2):
    compiled(SM90.arch, spec, choose_config(spec, SM90))
print(json.dumps(compiled.cache_info()._asdict()))
"""


def test_two_processes_compile_once(tmp_path):
    """Loading a kernel's object needs no GPU, so that the second process shows a load and no compilation."""
    environment = {**os.environ, "QUACK_CACHE_DIR": str(tmp_path), "QUACK_CACHE_ENABLED": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([sys.executable, "-c", RACER], env=environment, **pipes) for _ in range(2)]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    counts = [json.loads(racer.communicate(timeout=120)[0]) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert sorted(count["misses"] for count in counts) == [0, 1], "misses are compilations"
    assert sorted(count["hits"] for count in counts) == [1, 2], "from memory, and once from disk"
    assert len(list(tmp_path.rglob("*.o"))) == 1


def edit(folder: Path) -> None:
    path = folder / "quantize" / "spec.py"
    path.write_text(path.read_text() + "\n")


def move(folder: Path) -> None:
    (folder / "quantize" / "spec.py").rename(folder / "quantize" / "moved.py")


def add(folder: Path) -> None:
    (folder / "blocks" / "added.py").touch()


@pytest.mark.parametrize("change", [edit, move, add], ids=lambda change: change.__name__)
def test_fingerprint_follows_the_sources(change, tmp_path, monkeypatch):
    compile_module = importlib.import_module("pma.kernels.compile")
    fingerprint = compile_module.source_fingerprint.__wrapped__  # without the memory of the first answer
    original, folder, package = fingerprint(), tmp_path / "kernels", Path(compile_module.__file__).parent.parent
    for name in ("kernels", "layouts"):
        shutil.copytree(package / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compile_module, "__file__", str(folder / "compile.py"))
    assert fingerprint() == original
    change(folder)
    assert fingerprint() != original
