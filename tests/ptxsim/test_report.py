"""The static report, loops, and the list of forms."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import ptx_kernels
import pytest

from ptxsim.__main__ import main
from ptxsim.forms import Form, spelled, supported_forms
from ptxsim.ptx.loops import natural_loops
from ptxsim.ptx.parse import parse_kernel
from ptxsim.report import Value, Values, report

pytestmark = pytest.mark.ptxsim

BODY = """
    ld.param.u64 %rd1, [p0];
    mov.u32 %r1, dynamic;
    add.s32 %r2, %r1, 64;
    mov.b32 %r9, 3;
    mbarrier.init.shared.b64 [%r2+8], %r9;
    mbarrier.init.shared.b64 [%r1], 1;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+128], 256;
    bar.sync 0;
    ld.shared.b32 %r3, [%r1+128];
    mov.u32 %r4, 0;
OUTER:
    mov.u32 %r5, 0;
INNER:
    add.s32 %r5, %r5, 1;
    setp.lt.s32 %p1, %r5, 4;
    @%p1 bra INNER;
SPIN:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
    @!%p2 bra SPIN;
    add.s32 %r6, %r3, 32;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r7}, [%r6];
    add.s32 %r4, %r4, 1;
    setp.lt.s32 %p3, %r4, 2;
    @%p3 bra OUTER;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1+256], 64;
    cp.async.bulk.wait_group 0;
    bar.arrive 3, 64;
    frobnicate.b32 %r8, %r7;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 256;
    ret;
"""
TEXT = ptx_kernels.kernel_text(BODY, [0])


def line_of(code: str) -> int:
    return next(number for number, line in enumerate(TEXT.splitlines(), 1) if code in line)


def test_loops() -> None:
    kernel = parse_kernel(TEXT, "kernel")
    outer, inner, spin = natural_loops(kernel)
    assert [kernel.labels[name] for name in ("OUTER", "INNER", "SPIN")] == [outer.header, inner.header, spin.header]
    assert (outer.depth, inner.depth, spin.depth) == (1, 2, 2)
    assert (outer.parent, inner.parent, spin.parent) == (None, outer.header, outer.header)
    assert [len(each.body) for each in (outer, inner, spin)] == [11, 3, 2]


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        ("ret;", []),
        ("A: bra A;", [1]),
        ("@%p1 bra B; A: mov.u32 %r1, 0; B: @%p2 bra A; ret;", []),  # entered in two places: not natural
        ("A: @%p1 bra B; @%p2 bra A; ret; B: bra A;", [3]),  # two back edges to one header
    ],
)
def test_shapes_of_loops(body: str, sizes: list[int]) -> None:
    assert [
        len(loop.body) for loop in natural_loops(parse_kernel(ptx_kernels.kernel_text(body, [0]), "kernel"))
    ] == sizes


def test_report() -> None:
    facts = report(TEXT)
    assert (facts.kernel, facts.target) == ("kernel", "sm_100a")
    assert facts.parameters == [{"name": "p0", "offset": 0, "bytes": 8}]
    assert facts.registers == {"pred": 64, "b16": 64, "b32": 256, "f32": 64, "b64": 64}
    assert facts.shared == [{"name": "dynamic", "align": 1024, "bytes": None}]
    assert facts.instructions["control flow"] == 4
    assert facts.instructions["bulk copy"] == facts.instructions["copy groups"] == 1
    assert sum(facts.instructions.values()) == len(parse_kernel(TEXT, "kernel").instructions)
    assert [loop.is_spin for loop in facts.loops] == [False, False, True]
    assert [str(use) for use in facts.mbarriers] == [
        f"[dynamic+0x48] (3 arrivals): PTX line {line_of('[%r2+8]')}",
        f"[dynamic] (1 arrivals): PTX line {line_of('init.shared.b64 [%r1]')}",
    ]
    assert [(use.what, use.detail) for use in facts.named_barriers] == [
        ("barrier 0 sync", "all threads"), ("barrier 3 arrive", "64 threads"),
    ]  # fmt: skip
    assert [(use.what, use.detail) for use in facts.tensor_memory] == [
        ("alloc of 256 columns", "address to [dynamic+0x80]"),
        ("ld at [dynamic+0x80]+0x20", "32x32b.x1"),
        ("dealloc of 256 columns", "at [dynamic+0x80]"),
    ]
    assert [(use.what, use.lines) for use in facts.unsupported] == [("frobnicate.b32", [line_of("frobnicate")])]
    assert "loops that only wait" in str(facts)


def test_values() -> None:
    values = Values(parse_kernel(TEXT, "kernel"))
    assert values.of("%r4") == Value("%r4")  # two definitions
    assert values.of("[%r2+-8]") == Value("dynamic", 56)
    assert str(Value("%r1", -4)) == "%r1-0x4"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernel.ptx"
    file.write_text(TEXT)
    assert main(["report", str(file)]) == 1  # a form is not supported
    assert "not supported\n  frobnicate.b32" in capsys.readouterr().out
    file.write_text(TEXT.replace("frobnicate.b32 %r8, %r7;", ""))
    assert main(["report", str(file), "--kernel", "kernel", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["unsupported"] == []
    assert record["mbarriers"][0]["what"] == "[dynamic+0x48]"


def test_spelled() -> None:
    assert list(spelled("add{,.rn}.{f32,f64}")) == ["add.f32", "add.f64", "add.rn.f32", "add.rn.f64"]


def test_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The vectors say what Python says; only a few forms, because each needs compiling."""
    monkeypatch.setenv("PTXSIM_CACHE", str(tmp_path))
    chosen = r"^(mul\.wide\.s32|shr\.s32|fma\.rn\.f32|prmt\.b32|cvt\.rn\.bf16x2\.f32|add\.rn\.bf16)$"
    forms = {form.opcode: form for form in supported_forms(chosen)}
    assert forms["mul.wide.s32"] == Form("mul.wide.s32", (2**32 - 100, 7), 2**64 - 700)
    assert forms["shr.s32"].result == (-100 >> 7) & 0xFFFFFFFF
    assert forms["prmt.b32"].result == 0x77553311
    a, b, c = (struct.unpack("<f", source.to_bytes(4, "little"))[0] for source in forms["fma.rn.f32"].sources)
    expected = np.float32(math.fsum([float(a) * float(b), float(c)]))
    assert forms["fma.rn.f32"].result == int(expected.view(np.uint32))
    assert len(forms) == 6
    assert main(["forms", "--match", r"^shr\.s32$"]) == 0
    assert capsys.readouterr().out.split()[:1] == ["shr.s32"]
