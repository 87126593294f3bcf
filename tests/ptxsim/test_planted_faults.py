"""Faults planted in kernels are caught, and the message names the PTX line where it shows.

Kernels of quack and FlashAttention-4 get one edit each through `simulate(patch=…)`; small hand-written ones show each
rule on its own. What a message names is where the fault shows: the access that is not ordered, the wait that does not
end. That line is checked by what the PTX has there.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import attention_cases as attention
import numpy as np
import ptx_kernels
import pytest
import quack_cases as quack

from ptxsim.checks.monitor import Monitor
from ptxsim.machine.grid import Deadlock, Options
from ptxsim.mutate import Case, Outcome, observe

pytestmark = pytest.mark.ptxsim
SEEDS = (0, 1, 2)
OUTSIDE = 1 << 20  # bytes: beyond any shared window, and beyond the tensors of these cases


def gemm(options: dict) -> None:
    """Three tiles of 12 steps on one multiprocessor: every pipeline wraps."""
    quack.mxfp8_gemm(384, 128, 1536, num_sms=1, **options)


def gemm_of_pairs(options: dict) -> None:
    quack.mxfp8_gemm(512, 512, 256, (256, 256), (2, 1), num_sms=2, **options)


def rmsnorm(options: dict) -> None:
    quack.rmsnorm(8, 1024, num_sms=2, check_bounds=True, **options)


def flash(options: dict) -> None:
    attention.flash_forward([384], 1, 1, is_causal=True, num_sms=148, **options)


# ------------------------------------------------------------------------------------------------ planting


@dataclass
class Plant:
    """An edit of a PTX text: one match of a pattern, between the first matches of two others, is replaced."""

    pattern: str
    replacement: str = ""
    which: int = 0
    after: str = ""
    before: str = ""
    ptx: str = ""  # afterwards
    line: int = 0

    def __call__(self, ptx: str, kernel: str) -> str:
        first = re.search(self.after, ptx).end() if self.after else 0
        end = re.compile(self.before).search(ptx, first).start() if self.before else len(ptx)
        matches = list(re.compile(self.pattern).finditer(ptx, first, end))
        if not matches:
            return ptx  # another kernel of the case
        match = matches[self.which]
        self.line = ptx.count("\n", 0, match.start()) + 1
        self.ptx = ptx[: match.start()] + match.expand(self.replacement) + ptx[match.end() :]
        return self.ptx

    def code_named(self, message: str) -> list[str]:
        """What the PTX has at the lines that a message names."""
        lines = self.ptx.splitlines()
        return [lines[int(number) - 1] for number in re.findall(r"PTX line (\d+)", message)]


def noticed(case: Case, plant: Plant) -> Outcome:
    """The run under the first seed that notices."""
    for seed in SEEDS:
        outcome = observe(case, seed, plant, limit=60)
        assert plant.line, f"nothing to edit: {plant.pattern}"
        if outcome.signs:
            return outcome
    pytest.fail(f"not noticed under seeds {SEEDS}: {plant.pattern} at PTX line {plant.line}")


def check(case: Case, plant: Plant, sign: str, message: str, *code: str) -> None:
    """The fault shows by `sign`, with a text that matches, and names PTX lines that hold each of `code`."""
    outcome = noticed(case, plant)
    assert sign in outcome.signs, outcome.signs
    said = outcome.signs[sign]
    assert re.search(message, said), said
    named = plant.code_named(said)
    for pattern in code:
        assert any(re.search(pattern, line) for line in named), f"{pattern} is at none of the lines named in:\n{said}"


@pytest.fixture(scope="module", autouse=True)
def unmodified() -> None:
    """The kernels compile once, and are right and silent before anything is planted."""
    for case in (gemm, gemm_of_pairs, flash):
        assert observe(case).signs == {}


TENSOR_STORE = r"cp\.async\.bulk\.tensor[\w.]*\.global\.shared"
TENSOR_LOAD = r"cp\.async\.bulk\.tensor[\w.]*\.shared::\w+\.global"
WAIT = r"mbarrier\.try_wait[^;]*"
GEMM_FAULTS = {
    # The async proxy reads what generic stores wrote.
    "proxy fence": (Plant(r"fence\.proxy\.async[^;]*"), "finding", "missing proxy fence", TENSOR_STORE, r"st\.shared"),
    # The tensor core copies scale factors that the tensor load may still be writing.
    "mbarrier wait": (
        Plant(WAIT.replace("[^;]*", r"\S* (P1), [^;]*"), r"setp.eq.u32 \1, 0, 0", which=-1, before=r"tcgen05\.cp"),
        "finding", "race: a read is not ordered behind a write of shared memory", r"tcgen05\.cp", TENSOR_LOAD,
    ),
    "wait for tensor loads": (
        Plant(r"tcgen05\.wait::ld[^;]*"),
        "finding", "race: a write is not ordered behind a read of tensor memory", r"tcgen05\.mma",
    ),
    "named barrier": (
        Plant(r"bar\.sync\s+1, 128"),
        "finding", "race: a write is not ordered behind a read of shared memory.*bulk stores", r"st\.shared",
    ),
    "wrong column": (
        Plant(r"(tcgen05\.ld[^\[\n]*)\[(%r\d+)\]", r"\1[\2+512]"),
        "fault", r"columns 512 … 543 are outside the allocations \[\(0, 512\)\]", r"tcgen05\.ld",
    ),
    # Copies of scale factors overwrite an accumulator that the epilogue may still read.
    "scale factors over accumulators": (
        Plant(r"add\.s32(\s+%r\d+, %r\d+), 256;", r"add.s32\1, 64;"),
        "finding", "race: a write is not ordered behind a read of tensor memory", r"tcgen05\.cp",
    ),
    "scale factor id": (
        Plant(r"or\.b32(\s+%r\d+, %r\d+), %r\d+;(?=\s*tcgen05\.mma)", r"or.b32\1, 0;", which=1),
        "fault", "scale factors of A have id 1 in their address and 0 in the instruction descriptor", r"tcgen05\.mma",
    ),
    "too many bytes": (
        Plant(r", 33792;", ", 34816;"),
        "deadlock", r"mbarrier at shared 0x430 \(phase 0, 0 of 1 arrivals and 1024 bytes missing", WAIT,
    ),
    "too few bytes": (Plant(r", 33792;", ", 32768;"), "deadlock", r"mbarrier at shared 0x4\w+ .*-\d+ bytes", WAIT),
    # The consumer's phase does not flip when its pipeline wraps.
    "frozen phase": (
        Plant(r"xor\.b32(\s+(%r\d+)), \2, %r\d+;", r"mov.b32\1, \2;", after=r"tcgen05\.commit"),
        "finding", "race: a read is not ordered behind a write of shared memory", r"tcgen05\.mma", TENSOR_LOAD,
    ),
    # The producer waits for a phase that nobody completes.
    "wrong first phase": (
        Plant(r"mov\.b32(\s+%r\d+), 1;", r"mov.b32\1, 0;", which=-1, before=WAIT),
        "deadlock", "parity 0 of mbarrier", WAIT,
    ),
    "commit of a stage": (Plant(r"tcgen05\.commit[^;]*"), "deadlock", "parity . of mbarrier at shared 0x46", WAIT),
    "commit of an accumulator": (
        Plant(r"tcgen05\.commit[^;]*", which=1), "deadlock", "parity 0 of mbarrier at shared 0x490", WAIT
    ),
    "exit with stores in flight": (
        Plant(r"cp\.async\.bulk\.wait_group\.read\s+0"),
        "finding", r"in flight at exit: CTA \(0, 0, 0\) exits while \d operations are under way, the first: tensor",
        TENSOR_STORE,
    ),
    "tensor memory not freed": (
        Plant(r"tcgen05\.dealloc[^;]*"),
        "finding", r"leak: CTA \(0, 0, 0\) exits with 512 columns of tensor memory allocated", r"tcgen05\.alloc",
    ),
    "store outside shared memory": (
        Plant(r"(st\.shared\.v4\.b32\s+)\[(%r\d+)\]", rf"\1[\2+{OUTSIDE}]", which=1),
        "fault", "shared address outside the CTA's window", rf"\+{OUTSIDE}\]",
    ),
    # %r0 is declared and never written: compilers number from 1. What is computed from it may be stored nowhere.
    "unwritten register": (
        Plant(r"(cvt\.rn\.bf16x2\.f32\s+%r\d+, %r\d+), %r\d+", r"\1, %r0"),
        "fault", "read of a register that was never written", r"st\.shared|cvt.*%r0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMM_FAULTS)
def test_gemm(name: str) -> None:
    plant, sign, message, *code = GEMM_FAULTS[name]
    check(gemm, plant, sign, message, *code)


def test_both_ctas_of_a_pair_lead() -> None:
    """Only the even CTA may issue the products of its pair."""
    is_not_leader = r"setp\.ne\.b32(\s+%p\d+, (%r\d+)), 0;(?=\s*@%p\d+ bra)"
    plant = Plant(is_not_leader, r"setp.ne.b32\1, \2;", which=-1, before=r"tcgen05\.cp")
    check(
        gemm_of_pairs, plant, "finding", "race: a read is not ordered behind a write of shared memory", r"tcgen05\.cp"
    )


def test_barrier_of_the_wrong_cta_of_a_pair() -> None:
    """Loads of both CTAs report to the barrier of the even one: its address has bit 24 cleared."""
    plant = Plant(r"(and\.b32\s+%r\d+, %r\d+), -16777224;", r"\1, -8;")
    check(gemm_of_pairs, plant, "deadlock", r"mbarrier at shared 0x\w+ \(phase 0, .* bytes missing\)", WAIT)


def test_global_store_outside_every_tensor() -> None:
    plant = Plant(r"(st\.global[\w.]*\s+)\[(%rd\d+)\]", rf"\1[\2+{OUTSIDE}]")
    check(rmsnorm, plant, "fault", "global address outside every known tensor", rf"st\.global.*\+{OUTSIDE}\]")


FLASH_FAULTS = {
    "wait for stores of P": (
        Plant(r"tcgen05\.wait::st[^;]*"),
        "finding", "race: a read is not ordered behind a write of tensor memory", r"tcgen05\.mma", r"tcgen05\.st",
    ),
    "proxy fence": (Plant(r"fence\.proxy\.async[^;]*"), "finding", "missing proxy fence", TENSOR_STORE, r"st\.shared"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLASH_FAULTS)
def test_flash_attention(name: str) -> None:
    plant, sign, message, *code = FLASH_FAULTS[name]
    check(flash, plant, sign, message, *code)


# -------------------------------------------------------------------------------------------- hand-written


def run(body: str, *arguments: np.ndarray, seed: int = 0, **launch) -> list[str]:
    """The findings of a kernel body under every checker."""
    options = Options(delay=3000, seed=seed, poison=True, check_registers=True, monitor=Monitor)
    return [str(finding) for finding in ptx_kernels.run(body, *arguments, options=options, **launch).findings]


def line_of(body: str, code: str, num_arguments: int = 2) -> int:
    """The line of the kernel's PTX that holds `code`."""
    return next(
        number
        for number, line in enumerate(ptx_kernels.kernel_text(body, [0] * num_arguments).splitlines(), 1)
        if code in line
    )


def bulk_copy(expected: int = 1024, parity: int = 0, first: str = "bar.sync 0;") -> str:
    """Two bulk loads of 512 bytes behind one mbarrier; each of 256 threads passes one word on."""
    return f"""
        ld.param.u64 %rd1, [p0];
        ld.param.u64 %rd2, [p1];
        mov.u32 %r1, dynamic;
        mov.u32 %r2, %tid.x;
        setp.ne.s32 %p1, %r2, 0;
        @%p1 bra JOIN;
        mbarrier.init.shared.b64 [%r1], 1;
        mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r1], {expected};
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd1], 512, [%r1];
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1536], [%rd1+512], 512, [%r1];
    JOIN:
        {first}
    AGAIN:
        shl.b32 %r3, %r2, 2;
        mbarrier.try_wait.parity.shared.b64 %p2, [%r1], {parity};
        @!%p2 bra AGAIN;
        add.s32 %r4, %r1, %r3;
        ld.shared.b32 %r5, [%r4+1024];
        cvt.u64.u32 %rd4, %r3;
        add.s64 %rd5, %rd2, %rd4;
        st.global.b32 [%rd5], %r5;
        ret;
    """


def copy(body: str, seed: int = 0) -> list[str]:
    source, target = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    findings = run(body, source, target, seed=seed, block=(256, 1, 1), shared_bytes=4096)
    assert findings or (target == source).all()
    return findings


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_copy_is_silent(seed: int) -> None:
    assert copy(bulk_copy(), seed) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", [{"expected": 512}, {"parity": 1}], ids=str)
def test_wait_ends_too_soon(fault: dict, seed: int) -> None:
    """Too few bytes, or the parity of the phase before the first, which counts as completed."""
    body = bulk_copy(**fault)
    said = "\n".join(copy(body, seed))
    assert f"at PTX line {line_of(body, 'ld.shared.b32 %r5')}" in said
    assert "race: a write is not ordered behind a read of shared memory" in said
    assert any(
        f"bulk copy into shared memory at PTX line {line_of(body, text)}" in said for text in ("[%rd1]", "[%rd1+512]")
    )


def test_wait_never_ends() -> None:
    body = bulk_copy(expected=1536)
    with pytest.raises(Deadlock) as raised:
        copy(body)
    assert "mbarrier at shared 0x400 (phase 0, 0 of 1 arrivals and 512 bytes missing)" in str(raised.value)
    assert f"behind PTX line {line_of(body, 'try_wait')}: mbarrier.try_wait" in str(raised.value)


def test_barrier_that_guards_initialisation_is_missing() -> None:
    body = bulk_copy(first="")
    with pytest.raises(RuntimeError, match="no mbarrier was initialised at shared 0x400") as raised:
        for seed in SEEDS:
            copy(body, seed)
    assert f"PTX line {line_of(body, 'try_wait')}" in "".join(raised.value.__notes__)


def test_barrier_that_is_there_in_time_by_chance() -> None:
    """In a fixed order of warps the initialisation comes first; that nothing orders it is a finding all the same."""
    body, source, target = bulk_copy(first=""), np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    options = Options(monitor=Monitor)
    grid = ptx_kernels.run(body, source, target, options=options, block=(256, 1, 1), shared_bytes=4096)
    said = [str(finding) for finding in grid.findings]
    assert any("an mbarrier is used without order behind its initialisation" in text for text in said)
    assert any(f"at PTX line {line_of(body, 'try_wait')} against warp 0" in text for text in said)


def through_tensor_memory(
    wait_for_store: str = "tcgen05.wait::st.sync.aligned;", wait_for_load: str = "tcgen05.wait::ld.sync.aligned;",
    before_free: str = "",
) -> str:  # fmt: skip
    """Every lane stores its number, loads it back, and stores something else in its place."""
    return f"""
        mov.u32 %r1, dynamic;
        mov.u32 %r2, %tid.x;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
        ld.shared.b32 %r3, [%r1];
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {{%r2}};
        {wait_for_store}
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r4}}, [%r3];
        {wait_for_load}
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {{%r1}}; // again
        tcgen05.wait::st.sync.aligned;
        ld.param.u64 %rd1, [p0];
        mul.wide.u32 %rd2, %r2, 4;
        add.s64 %rd3, %rd1, %rd2;
        st.global.b32 [%rd3], %r4;
        {before_free}
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
        ret;
    """


def test_tensor_memory_is_silent() -> None:
    out = np.zeros(32, np.uint32)
    assert run(through_tensor_memory(), out, shared_bytes=1024) == []
    assert out.tolist() == list(range(32))


def test_wait_for_a_tensor_store_is_missing() -> None:
    body, out = through_tensor_memory(""), np.zeros(32, np.uint32)
    for seed in SEEDS:
        said = "\n".join(run(body, out, seed=seed, shared_bytes=1024))
        assert "race: a read is not ordered behind a write of tensor memory" in said
        for code in ("tcgen05.ld", "tcgen05.st"):
            assert f"PTX line {line_of(body, code, 1)}" in said


def test_wait_for_a_tensor_load_is_missing() -> None:
    """The second store may overtake the load, whose registers nobody has used yet."""
    body, out = through_tensor_memory(wait_for_load=""), np.zeros(32, np.uint32)
    for seed in SEEDS:
        said = "\n".join(run(body, out, seed=seed, shared_bytes=1024))
        assert "race: a write is not ordered behind a read of tensor memory" in said
        assert f"PTX line {line_of(body, '// again', 1)}" in said


def test_columns_are_freed_while_a_load_reads_them() -> None:
    body = through_tensor_memory(before_free="tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3];")
    for seed in SEEDS:
        said = "\n".join(run(body, np.zeros(32, np.uint32), seed=seed, shared_bytes=1024))
        assert "race: a write is not ordered behind a read of tensor memory" in said
        assert f"PTX line {line_of(body, 'tcgen05.dealloc', 1)}" in said


def test_a_move_does_not_wait_for_a_load() -> None:
    """ptxas makes moves other names of the registers that a load fills; arithmetic waits."""
    move, add = "mov.b64 %rd5, {%r4, %r4};", "add.s32 %r5, %r4, %r4;"
    for use, is_silent in ((move, False), (add, True), (move + "add.s64 %rd6, %rd5, %rd5;", True)):
        body = through_tensor_memory(wait_for_load=use)
        assert (run(body, np.zeros(32, np.uint32), seed=0, shared_bytes=1024) == []) == is_silent


def exchange(barrier: str) -> Callable[[int], list[str]]:
    """Two warps; each thread stores a word in shared memory and reads that of the thread 32 further on."""
    body = f"""
        mov.u32 %r1, dynamic;
        mov.u32 %r2, %tid.x;
        shl.b32 %r3, %r2, 2;
        add.s32 %r4, %r1, %r3;
        st.shared.b32 [%r4], %r2;
        {barrier}
        xor.b32 %r5, %r3, 128;
        add.s32 %r6, %r1, %r5;
        ld.shared.b32 %r7, [%r6];
        ret;
    """
    return lambda seed: [body, *run(body, seed=seed, block=(64, 1, 1), shared_bytes=1024)]


@pytest.mark.parametrize("seed", SEEDS)
def test_barrier_between_warps(seed: int) -> None:
    assert exchange("bar.sync 0;")(seed)[1:] == []
    body, *findings = exchange("")(seed)
    said = "\n".join(findings)
    assert "race" in said or "uninitialised read" in said
    assert f"PTX line {line_of(body, 'ld.shared', 0)}" in said


def test_register_that_was_never_written() -> None:
    body = "mov.u32 %r1, dynamic;\nst.shared.b32 [%r1], %r2;\nret;"
    with pytest.raises(RuntimeError, match=r"never written \(%r2\)") as raised:
        run(body, shared_bytes=1024)
    assert f"PTX line {line_of(body, 'st.shared', 0)}" in str(raised.value)


@pytest.mark.parametrize("between", ["HERE:\n", "HERE:\n  THERE: // both\n\n", "HERE: /* of\ntwo lines; */\n"])
def test_line_behind_a_label(between: str) -> None:
    """An instruction behind labels has its own line, not theirs."""
    body = f"mov.u32 %r1, dynamic;\n{between}st.shared.b32 [%r1], %r2;\nret;"
    with pytest.raises(RuntimeError) as raised:
        run(body, shared_bytes=1024)
    assert f"PTX line {line_of(body, 'st.shared', 0)}" in str(raised.value)


@pytest.mark.parametrize("delay", [None, 3000])
def test_fault_of_an_asynchronous_operation_names_its_instruction(delay: int | None) -> None:
    """Whether a copy fails where it is issued or later, when it completes: here beyond the shared window."""
    body = bulk_copy().replace("[%r1+1536]", f"[%r1+{OUTSIDE}]")
    source, target = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    with pytest.raises(RuntimeError, match="end outside the window") as raised:
        options = Options(delay=delay)
        ptx_kernels.run(body, source, target, options=options, block=(256, 1, 1), shared_bytes=4096)
    assert f"PTX line {line_of(body, '[%rd1+512]')}" in "".join(getattr(raised.value, "__notes__", []))


@pytest.mark.parametrize(("waits", "is_noticed"), [("", True), ("bra WAIT;", False)])
def test_arrival_at_a_cta_that_has_exited(waits: str, is_noticed: bool) -> None:
    """CTA 0's commit arrives at both CTAs of a cluster; CTA 1 must not leave before."""
    body = f"""mov.u32 %r1, dynamic; mov.u32 %r2, %cluster_ctarank; mov.b16 %rs1, 3; mbarrier.init.shared.b64 [%r1], 1;
        fence.mbarrier_init.release.cluster; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        setp.ne.u32 %p1, %r2, 0; @!%p1 bra COMMIT; {waits} ret;
        COMMIT: elect.sync %r3|%p3, -1; @!%p3 bra WAIT;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %rs1;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT; ret;"""
    said = [
        text for seed in SEEDS for text in run(body, cluster=(2, 1, 1), grid=(2, 1, 1), shared_bytes=1024, seed=seed)
    ]
    assert any("an arrival reaches CTA (1, 0, 0), which has exited" in text for text in said) == is_noticed, said
