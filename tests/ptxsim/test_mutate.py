"""The mutation study: what is a mutant, what counts as noticed, and the command line."""

import json
from pathlib import Path

import numpy as np
import ptx_kernels
import pytest

from ptxsim import mutate
from ptxsim.__main__ import main
from ptxsim.checks.findings import Suppression
from ptxsim.machine.grid import Grid, Options
from ptxsim.simulate import load_program

pytestmark = pytest.mark.ptxsim
SEEDS = range(6)

# Thread 0 loads 256 bytes, everyone waits and passes a word on; the last barrier is not needed.
BODY = """
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd2, [p1];
    mov.u32 %r1, dynamic;
    mov.u32 %r2, %tid.x;
    setp.ne.s32 %p1, %r2, 0;
    @%p1 bra JOIN;
    mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r1], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+256], [%rd1], 256, [%r1];
JOIN: bar.sync 0;
AGAIN: // mbarrier.try_wait.parity in a comment is none
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
    @!%p2 bra AGAIN;
    shl.b32 %r3, %r2, 2;
    add.s32 %r4, %r1, %r3;
    ld.shared.b32 %r5, [%r4+256];
    cvt.u64.u32 %rd4, %r3;
    add.s64 %rd5, %rd2, %rd4;
    st.global.b32 [%rd5], %r5;
    bar.sync 0;
    ret;
"""


def copy(options: dict, body: str = BODY) -> str | None:
    """The case; as `simulate` does it, but for a kernel that is PTX text from the start."""
    source, target = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    text = options["patch"](ptx_kernels.kernel_text(body, [0, 0]), "kernel")
    params = {f"p{index}": each.ctypes.data.to_bytes(8, "little") for index, each in enumerate((source, target))}
    launch = ptx_kernels.Launch(params, block=(64, 1, 1), shared_bytes=1024)
    checks = Options(delay=3000, seed=options["seed"], poison=True, monitor=options["monitor"])
    Grid(load_program(text, "kernel"), launch, checks, num_sms=1).run()
    return None if (target == source).all() else "the words differ"


def test_mutants() -> None:
    text = ptx_kernels.kernel_text(BODY, [0, 0])
    found = mutate.mutants(text, "kernel")
    assert [(each.kind, each.text) for each in found] == [
        ("mbarrier wait", "mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0"),
        ("bar.sync", "bar.sync 0"),
        ("bar.sync", "bar.sync 0"),
    ]
    for each in found:
        assert each.text in text.splitlines()[each.line - 1]
        changed = each.apply(text)
        assert changed.count("\n") == text.count("\n")
        assert changed.replace(each.replacement, each.text, 1) == text or each.replacement == ""
    assert found[0].replacement == "setp.eq.u32 %p2, 0, 0"
    assert mutate.mutants(text) == found
    with pytest.raises(ValueError, match="holds no"):
        found[0].apply(text.replace("%p2", "%p9"))
    with pytest.raises(KeyError, match="no entry other"):
        mutate.mutants(text, "other")


@pytest.mark.parametrize(
    ("kind", "statement"),
    [
        ("mbarrier wait", "@%p1 mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r1+8], %r2"),
        ("fence.proxy.async", "fence.proxy.async.shared::cta"),
        ("tcgen05.wait::ld", "tcgen05.wait::ld.sync.aligned"),
        ("tcgen05.wait::st", "@!%p7 tcgen05.wait::st.sync.aligned"),
        ("bulk wait_group", "cp.async.bulk.wait_group.read 2"),
        ("cp.async wait", "cp.async.wait_all"),
        ("cp.async wait", "cp.async.wait_group 1"),
        ("bar.sync", "barrier.cta.sync.aligned 1, 128"),
        ("barrier.cluster.wait", "barrier.cluster.wait.acquire.aligned"),
        ("wgmma.wait_group", "wgmma.wait_group.sync.aligned 0"),
        ("tcgen05.commit", "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1]"),
    ],
)
def test_kinds(kind: str, statement: str) -> None:
    (found,) = mutate.mutants(f"\n\tLABEL: {statement};\n")
    assert (found.kind, found.line, found.text) == (kind, 2, statement)
    expected = "@%p1 setp.eq.u32 %p2, 0, 0" if kind == mutate.MBARRIER_WAIT else ""
    assert found.replacement == expected


@pytest.mark.parametrize(
    "statement",
    [
        "bar.arrive 1, 64",
        "bar.warp.sync -1",
        "mbarrier.arrive.shared.b64 _, [%r1]",
        "fence.acq_rel.cta",
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned",
        "barrier.cluster.arrive",
        "shfl.sync.idx",
    ],
)
def test_no_mutant(statement: str) -> None:
    assert mutate.mutants(f"{statement};") == []


def test_study() -> None:
    told = []
    result = mutate.study(copy, "^kern", SEEDS, progress=told.append)
    assert told == result.verdicts
    assert [verdict.is_noticed for verdict in result.verdicts] == [True, True, False]
    wait, barrier, _ = result.verdicts
    assert "finding" in wait.signs
    assert "fault" in barrier.signs or "finding" in barrier.signs
    assert result.counts() == {"mbarrier wait": (1, 1), "bar.sync": (1, 2)}
    assert result.unnoticed() == result.verdicts[2:]
    assert "noticed: mbarrier wait 1/1, bar.sync 1/2" in str(result)
    assert "NOT NOTICED" in str(result)
    records = [json.loads(line) for line in result.json_lines().splitlines()]
    assert [record["noticed"] for record in records] == [True, True, False]
    assert records[2] | {"seconds": 0, "line": 0} == {
        "kernel": "kernel", "kind": "bar.sync", "line": 0, "text": "bar.sync 0", "replacement": "", "noticed": False,
        "how": [], "executed": True, "detail": {}, "seed": SEEDS[-1], "seconds": 0,
    }  # fmt: skip


def test_mutant_that_is_never_executed() -> None:
    body = BODY.replace("JOIN: bar.sync 0;", "JOIN: bar.sync 0; setp.gt.s32 %p3, %r2, 99; @%p3 bar.sync 1;")
    *_, verdict, last = mutate.study(lambda options: copy(options, body), seeds=SEEDS).verdicts
    assert (verdict.mutant.text, verdict.is_noticed, verdict.is_executed) == ("@%p3 bar.sync 1", False, False)
    assert "never executed" in mutate.row(verdict)
    assert (last.is_noticed, last.is_executed) == (False, True)


def test_study_is_refused() -> None:
    with pytest.raises(mutate.StudyRefused, match="matches 'other'"):
        mutate.study(copy, "other")
    with pytest.raises(mutate.StudyRefused, match="wrong result: the words differ"):
        mutate.study(lambda options: copy(options, BODY.replace("cvt.u64", "add.s32 %r5, %r5, 1; cvt.u64")))
    racy = BODY.replace("JOIN: bar.sync 0;", "JOIN: bar.sync 0; mov.u32 %r6, 5; st.shared.b32 [%r1+512], %r6;")
    with pytest.raises(mutate.StudyRefused, match="finding: race"):
        mutate.study(lambda options: copy(options, racy))
    known = Suppression("kernel", "race", "a write", "every warp stores the same")
    assert mutate.study(lambda options: copy(options, racy), suppressions=[known], limit=1).verdicts[0].is_noticed


@pytest.mark.parametrize(
    ("error", "sign"), [(AssertionError("3 != 4"), "wrong result"), (ValueError("odd"), "fault")], ids=str
)
def test_signs(error: Exception, sign: str) -> None:
    def case(options: dict) -> None:
        raise error

    assert list(mutate.observe(case).signs) == [sign]


def test_no_end() -> None:
    def case(options: dict) -> None:
        while True:
            pass

    assert mutate.observe(case, limit=0.1).signs == {"no end": "still running after 0 s"}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, lines = tmp_path / "case_of_copies.py", tmp_path / "verdicts.jsonl"
    case.write_text("from test_mutate import copy as run\n")
    assert main(["mutate", f"{case}:run", "--seeds", "0,1,2,3,4,5", "--limit", "2", "--json", str(lines)]) == 0
    assert "bar.sync 1/1" in capsys.readouterr().out
    assert len(lines.read_text().splitlines()) == 2
    assert main(["mutate", f"{case}:run", "--seeds", "0"]) == 1
    assert main(["mutate", f"{case}:run", "--kernel", "other"]) == 2
    with pytest.raises(AttributeError, match="defines no function case"):
        main(["mutate", str(case)])
