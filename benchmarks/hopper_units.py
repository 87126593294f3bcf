"""What a Hopper SM's units cost, for `ptxsim/timeline/chips/h200.toml`: rates, latencies, clock under load.

    python -m benchmarks.hopper_units              # on the GPU: prints medians, appends results/hopper_units.jsonl
    python -m benchmarks.hopper_units --assemble   # without a GPU: only that every kernel assembles for sm_90a

Each kernel is plain PTX: a loop between two reads of %clock64, unrolled, whose results are kept alive. Rates: as many
independent chains and warps as it takes to fill the unit; latencies: one dependent chain of one warp. Cycles are of the
slowest warp, divided by what it executed; the median over five launches counts. The last rows read %globaltimer too.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ptxsim.timeline.machine_code import find_assembler

TARGET = "sm_90a"
CHAINS, UNROLLED = 8, 32  # independent chains of a warp, instructions in a loop's body
PARTITIONS = 4
LAUNCHES = 5
STAGES, PIECE_BYTES = 8, 16384  # of the copy rings
DATA_BYTES = 64 << 20  # that copies read from: half of it stays in the L2 cache
ALL_SMS = -1


@dataclass(frozen=True)
class Kernel:
    """A measurement. per: what the cycles are divided by; parameter: of a chip's file that the result fills.

    setup, body and finish are PTX; body runs `iterations` times between the clock reads and executes `count` instances
    (or moves `count` bytes: then the result is bytes a cycle). Threads %warp 0 … of each block take part.
    """

    name: str
    body: str
    count: int
    threads: int = 32
    setup: str = ""
    finish: str = ""
    parameter: str = ""
    per: str = "warp instruction"
    iterations: int = 256
    grid: int = 1
    shared_bytes: int = 65536
    divides: int = 1  # warps that share the unit: the result is cycles / divides


def text(kernel: Kernel) -> str:
    """The PTX module: parameters are where the elapsed times go, memory to copy from, and the iterations."""
    return f"""
.version 8.0
.target {TARGET}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .u64 out, .param .u64 data, .param .u32 iterations)
{{
.reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b32 %x<64>; .reg .f32 %d<256>; .reg .b64 %a<32>;
.reg .b64 %t<4>; .reg .b64 %g<4>; .reg .b32 %i; .reg .b32 %n; .reg .b32 %me; .reg .b32 %warp; .reg .b32 %lane;
.reg .b32 %base; .reg .b64 %out; .reg .b64 %data; .reg .b32 %block;
ld.param.u64 %out, [out];
ld.param.u64 %data, [data];
ld.param.u32 %n, [iterations];
mov.u32 %me, %tid.x;
mov.u32 %block, %ctaid.x;
shr.u32 %warp, %me, 5;
and.b32 %lane, %me, 31;
mov.u32 %base, dynamic;
{kernel.setup}
mov.u32 %i, 0;
bar.sync 0;
mov.u64 %g0, %globaltimer;
mov.u64 %t0, %clock64;
LOOP:
.pragma "nounroll";
{kernel.body}
add.u32 %i, %i, 1;
setp.lt.u32 %p0, %i, %n;
@%p0 bra LOOP;
{kernel.finish}
mov.u64 %t1, %clock64;
mov.u64 %g1, %globaltimer;
sub.u64 %t2, %t1, %t0;
sub.u64 %g2, %g1, %g0;
mov.u32 %r60, %ntid.x;
mad.lo.u32 %r61, %block, %r60, %me;
mad.wide.u32 %a30, %r61, 16, %out;
st.global.v2.u64 [%a30], {{%t2, %g2}};
ret;
}}
"""


# --------------------------------------------------------------------------------------- arithmetic, shuffles

# name → (instruction on chain {x} with another register {y}, instances in it, parameter that the rate fills, latency's)
ARITHMETIC = {
    "MUFU.EX2": ("ex2.approx.ftz.f32 {x}, {x};", 1, "cycles_ex2", "latency_special"),
    "MUFU.LG2": ("lg2.approx.ftz.f32 {x}, {x};", 1, "cycles_special", ""),
    "FFMA": ("fma.rn.f32 {x}, {x}, {y}, {y};", 1, "cycles_fma", ""),
    "FMNMX": ("max.f32 {x}, {x}, {y};", 1, "cycles_alu", ""),
    "PRMT": ("prmt.b32 {x}, {x}, {y}, 0x2143;", 1, "cycles_alu", ""),
    "IMAD": ("mad.lo.s32 {x}, {x}, {y}, {y};", 1, "cycles_imad", ""),
    "F2FP.BF16": ("cvt.rn.bf16x2.f32 {x}, {x}, {y};", 1, "cycles_convert", ""),
    "F2FP.E4M3": (
        "cvt.rn.satfinite.e4m3x2.f32 %h0, {x}, {y}; cvt.rn.satfinite.e4m3x2.f32 %h1, {y}, {x}; "
        "mov.b32 {x}, {{%h0, %h1}};",
        2, "cycles_convert", "",
    ),
    "SHFL": ("shfl.sync.up.b32 {x}, {x}, 1, 0, -1;", 1, "cycles_shuffle", "latency_shuffle"),
    "REDUX": ("redux.sync.max.s32 {x}, {x}, -1;", 1, "cycles_redux", "latency_redux"),
}  # fmt: skip


def arithmetic() -> Iterator[Kernel]:
    """A rate with four warps in each partition, a latency with one warp."""
    loads = "\n".join(f"ld.global.b32 %x{i}, [%a0+{4 * i}];" for i in range(CHAINS + 1))
    load = f"mad.wide.u32 %a0, %lane, 64, %data;\n{loads}"  # other values in each lane: a uniform one needs no shuffle
    total = "\n".join(f"xor.b32 %x0, %x0, %x{i};" for i in range(1, CHAINS)) + _keep("%x0")
    for name, (form, instances, rate, latency) in ARITHMETIC.items():
        rows = [form.format(x=f"%x{i % CHAINS}", y=f"%x{(i + 1) % CHAINS}") for i in range(UNROLLED)]
        yield Kernel(
            f"{name} rate", "\n".join(rows), UNROLLED * instances, threads=512, setup=load, finish=total,
            parameter=rate, divides=4,
        )  # fmt: skip
        chain = "\n".join([form.format(x="%x0", y=f"%x{CHAINS}")] * UNROLLED)
        yield Kernel(f"{name} latency", chain, UNROLLED * instances, setup=load, finish=_keep("%x0"), parameter=latency)


def _keep(register: str) -> str:
    """Store a register under a condition that does not come true, so that nothing is optimised away."""
    return f"\nsetp.eq.u32 %p9, {register}, 0x7ffffff1;\n@%p9 st.global.u32 [%data], {register};"


# ------------------------------------------------------------------------------------------------ shared memory


def shared_memory() -> Iterator[Kernel]:
    address = "mad.lo.u32 %r0, %me, 16, %base;\nmov.u32 %x0, 0;" + "".join(
        f"\nst.volatile.shared.v4.b32 [%r0+{place}], {{%x0, %x0, %x0, %x0}};" for place in (0, 16384)
    )
    loads = "\n".join(
        f"ld.volatile.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r0+{i % 2 * 16384}];\nxor.b32 %x0, %x0, %r4;"
        for i in range(UNROLLED)
    )
    yield Kernel(
        "LDS.128 rate", loads, UNROLLED, 512, address, _keep("%x0"), "shared_rate",
        "bytes a cycle and SM: 8192 over the cycles", divides=1,
    )  # fmt: skip
    stores = "\n".join(
        f"st.volatile.shared.v4.b32 [%r0+{i % 2 * 16384}], {{%x0, %x0, %x0, %x0}};" for i in range(UNROLLED)
    )
    yield Kernel(
        "STS.128 rate", stores, UNROLLED, 512, address, "", "shared_rate", "bytes a cycle and SM: 8192 over the cycles"
    )
    own = "mad.lo.u32 %r0, %me, 4, %base;\nst.volatile.shared.u32 [%r0], %r0;"
    yield Kernel(
        "LDS latency", "ld.volatile.shared.u32 %r0, [%r0];\n" * UNROLLED, UNROLLED, 32, own, _keep("%r0"),
        "latency_shared",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ barriers

MBARRIERS = """
setp.eq.u32 %p1, %me, 0;
@%p1 mbarrier.init.shared::cta.b64 [%base], 1;
@%p1 mbarrier.init.shared::cta.b64 [%base+8], 1;
mov.u32 %r1, 0;
setp.eq.u32 %p2, %warp, 0;
setp.eq.u32 %p3, %lane, 0;
bar.sync 0;
"""


def _wait(address: str, parity: str, label: str) -> str:
    return f"{label}:\nmbarrier.try_wait.parity.shared::cta.b64 %p4, [{address}], {parity};\n@!%p4 bra {label};\n"


def barriers() -> Iterator[Kernel]:
    arrive = "@%p3 mbarrier.arrive.shared::cta.b64 _, [{}];\n"
    first = arrive.format("%base") + _wait("%base+8", "%r1", "W0")
    second = _wait("%base", "%r1", "W1") + arrive.format("%base+8")
    yield Kernel(
        "mbarrier arrival to wake", f"@!%p2 bra OTHER;\n{first}bra JOIN;\nOTHER:\n{second}JOIN:\nxor.b32 %r1, %r1, 1;",
        2, 64, MBARRIERS, parameter="arrive + wake", per="hand-over between two warps",
    )  # fmt: skip
    passed = MBARRIERS + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%base];\nbar.sync 0;\n"
    waits = "".join(_wait("%base", "0", f"W{i}") for i in range(8))
    yield Kernel("mbarrier wait for a phase that is over", waits, 8, 32, passed, parameter="latency_sync", per="wait")
    first, second = "bar.arrive 1, 64;\nbar.sync 2, 64;\n", "bar.sync 1, 64;\nbar.arrive 2, 64;\n"
    yield Kernel(
        "named barrier hand-over", f"@!%p2 bra OTHER;\n{first}bra JOIN;\nOTHER:\n{second}JOIN:", 2, 64, MBARRIERS,
        parameter="block", per="hand-over between two warps",
    )  # fmt: skip
    yield Kernel("bar.sync of four warps", "bar.sync 1, 128;\n" * 8, 8, 128, parameter="block", per="barrier")
    yield Kernel("fence.proxy.async", "fence.proxy.async.shared::cta;\n" * 8, 8, parameter="latency_fence", per="fence")


# -------------------------------------------------------------------------------------------------------- copies


def copies() -> Iterator[Kernel]:
    """Bulk copies into a ring of stages by one thread; blocks read their own megabyte, again and again."""
    for stages, grid, name, parameter in (
        (STAGES, 1, "TMA rate, one SM", "load_rate"),
        (STAGES, ALL_SMS, "TMA rate, all SMs", "load_rate"),
        (1, 1, "TMA latency of 16 KiB", "load_latency"),
    ):
        init = "\n".join(f"mbarrier.init.shared::cta.b64 [%base+{8 * stage}], 1;" for stage in range(stages))
        setup = f"""
and.b32 %r2, %block, 63;
mad.wide.u32 %a0, %r2, {1 << 20}, %data;
{init}
fence.mbarrier_init.release.cluster;
mov.u32 %r1, 0;
"""
        rows = []
        for stage in range(stages):
            barrier, place = f"%base+{8 * stage}", 1024 + stage * PIECE_BYTES
            rows.append(f"""
@%p5 bra FIRST{stage};
{_wait(barrier, "%r1", f"W{stage}")}
FIRST{stage}:
mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {PIECE_BYTES};
add.u32 %r3, %base, {place};
add.u32 %r4, %base, {8 * stage};
add.u64 %a1, %a0, {stage * PIECE_BYTES};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%a1], {PIECE_BYTES}, [%r4];
""")
        body = "setp.eq.u32 %p5, %i, 0;\n" + "".join(rows) + "@!%p5 xor.b32 %r1, %r1, 1;"
        last = "".join(_wait(f"%base+{8 * stage}", "%r1", f"E{stage}") for stage in range(stages))
        yield Kernel(
            name, body, stages * PIECE_BYTES, 1, setup, last, parameter, "byte (16 KiB pieces)", grid=grid,
            shared_bytes=1024 + stages * PIECE_BYTES,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- products


def _product(n: int, kind: str, in_registers: bool, scale_d: str = "1") -> str:
    registers = ", ".join(f"%d{i}" for i in range(n // 2))
    k, transposes = (16, ", 0" if in_registers else ", 0, 0") if kind == "bf16" else (32, "")
    a = "{%x0, %x1, %x2, %x3}" if in_registers else "%a1"
    form = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}"
    return f"{form} {{{registers}}}, {a}, %a2, {scale_d}, 1, 1{transposes};\n"


def _product_setup(n: int) -> str:
    """Zeroes in shared memory and accumulators; A and B K-major without swizzle, rows of eight 128 bytes apart."""
    zero = "\n".join(f"mov.f32 %d{i}, 0f00000000;" for i in range(n // 2))
    descriptor = (128 >> 4) << 16 | (256 >> 4) << 32  # distances of core matrices along K and along rows
    return f"""
mov.u32 %r2, %me;
mov.u32 %x0, 0; mov.u32 %x1, 0; mov.u32 %x2, 0; mov.u32 %x3, 0;
mov.u32 %r5, %ntid.x;
FILL:
mad.lo.u32 %r3, %r2, 4, %base;
st.shared.u32 [%r3], %x0;
add.u32 %r2, %r2, %r5;
setp.lt.u32 %p1, %r2, 8192;
@%p1 bra FILL;
fence.proxy.async.shared::cta;
shr.u32 %r4, %base, 4;
cvt.u64.u32 %a1, %r4;
or.b64 %a1, %a1, {descriptor};
add.u64 %a2, %a1, {8192 >> 4};
{zero}
"""


def products() -> Iterator[Kernel]:
    """One and two warpgroups at their rate; the latency of a single product with its wait."""
    keep = "\nwgmma.wait_group.sync.aligned 0;\nmov.b32 %r5, %d0;" + _keep("%r5")
    for kind in ("bf16", "e4m3"):
        for in_registers in (False, True):
            source, many = "RS" if in_registers else "SS", 16
            for n in (64, 128, 256):
                row = _product(n, kind, in_registers)
                body = "wgmma.fence.sync.aligned;\n" + row * many + "wgmma.commit_group.sync.aligned;\n"
                parameter = f"tensor_rate_{'16bit' if kind == 'bf16' else '8bit'}"
                yield Kernel(
                    f"wgmma {kind} {source} 64x{n} rate", body + "wgmma.wait_group.sync.aligned 1;\n", 2 * many, 256,
                    _product_setup(n), keep, parameter, "product (FLOP: 128 N K over the cycles)",
                )  # fmt: skip
            one = f"wgmma.fence.sync.aligned;\n{_product(128, kind, in_registers)}wgmma.commit_group.sync.aligned;\n"
            yield Kernel(
                f"wgmma {kind} {source} 64x128 latency", one + "wgmma.wait_group.sync.aligned 0;\n", 1, 128,
                _product_setup(128), keep, "tensor_start", "product and its wait",
            )  # fmt: skip


def contention() -> Iterator[Kernel]:
    """Sixteen products of one warpgroup, 1,024 cycles, beside arithmetic of another: does either wait for registers?"""
    keep = "".join(_keep(register) for register in ("%r5", *(f"%x{8 + i}" for i in range(CHAINS))))
    loads = "\n".join(f"ld.global.b32 %x{8 + i}, [%data+{4 * i}];" for i in range(CHAINS + 1))
    for name, cycles in (("FFMA", 1), ("FMNMX", 2), ("MUFU.EX2", 8)):
        form = ARITHMETIC[name][0]
        for total in (0, 896, 1536):
            rows = [form.format(x=f"%x{8 + i % CHAINS}", y=f"%x{9 + i % CHAINS}") for i in range(total // cycles)]
            for in_registers in (False, True):
                source = "RS" if in_registers else "SS"
                products = _product(128, "bf16", in_registers) * 16
                body = f"""
setp.lt.u32 %p6, %warp, 4;
@!%p6 bra OTHER;
wgmma.fence.sync.aligned;
{products}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bra JOIN;
OTHER:
{chr(10).join(rows)}
JOIN:
"""
                yield Kernel(
                    f"16 wgmma {source} beside {total} cycles of {name}", body, 1, 256, _product_setup(128) + loads,
                    "\nmov.b32 %r5, %d0;" + keep, "", "16 products",
                )  # fmt: skip


def clocks() -> Iterator[Kernel]:
    """Products on every SM for long enough that the power limit acts; cycles over nanoseconds is the clock."""
    for kind in ("bf16", "e4m3"):
        body = "wgmma.fence.sync.aligned;\n" + _product(256, kind, False) * 16 + "wgmma.commit_group.sync.aligned;\n"
        yield Kernel(
            f"clock under {kind} products", body + "wgmma.wait_group.sync.aligned 1;\n", 32, 256, _product_setup(256),
            "\nwgmma.wait_group.sync.aligned 0;\nmov.b32 %r5, %d0;" + _keep("%r5"), "clock_ghz", "product",
            iterations=400_000, grid=ALL_SMS,
        )  # fmt: skip


def kernels() -> list[Kernel]:
    return [*arithmetic(), *shared_memory(), *barriers(), *copies(), *products(), *contention(), *clocks()]


# --------------------------------------------------------------------------------------------------------- running


def assemble(kernel: Kernel) -> None:
    """Assemble, which needs no GPU.

    Raises:
        RuntimeError: ptxas refused; the message holds what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(text(kernel))
        command = [find_assembler(), f"-arch={TARGET}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{kernel.name}: {done.stderr.strip()}")


class Driver:
    """Loads and launches through the CUDA driver, in torch's context."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.data = torch.zeros(DATA_BYTES, dtype=torch.uint8, device="cuda")
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def run(self, kernel: Kernel) -> tuple[float, float]:
        """(cycles, nanoseconds) of the slowest thread, the median over the launches; the first one does not count."""
        function = self._load(kernel)
        blocks = self.num_sms if kernel.grid == ALL_SMS else kernel.grid
        out = self.torch.zeros(blocks * kernel.threads, 2, dtype=self.torch.int64, device="cuda")
        arguments = (ctypes.c_uint64(out.data_ptr()), ctypes.c_uint64(self.data.data_ptr()))
        values = (*arguments, ctypes.c_uint32(kernel.iterations))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shapes = (blocks, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes)
        times = []
        for _ in range(LAUNCHES + 1):
            self._check(self._cuda.cuLaunchKernel(function, *shapes, None, pointers, None), kernel.name)
            self.torch.cuda.synchronize()
            times.append(out.max(0).values.tolist())
        cycles, nanoseconds = zip(*times[1:], strict=True)
        return statistics.median(cycles), statistics.median(nanoseconds)

    def _load(self, kernel: Kernel) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._cuda.cuModuleLoadData(ctypes.byref(module), text(kernel).encode()), kernel.name)
        self._check(self._cuda.cuModuleGetFunction(ctypes.byref(function), module, b"kernel"), kernel.name)
        maximum_shared = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._check(self._cuda.cuFuncSetAttribute(function, maximum_shared, kernel.shared_bytes), kernel.name)
        return function

    def _check(self, code: int, name: str) -> None:
        if code:
            raise RuntimeError(f"{name}: the CUDA driver returned {code}")


def measure() -> None:
    from benchmarks import record

    driver, rows = Driver(), []
    for kernel in kernels():
        cycles, nanoseconds = driver.run(kernel)
        each = cycles / kernel.iterations / kernel.count / kernel.divides
        row = {
            "unit": kernel.name, "cycles": round(each, 4), "per": kernel.per, "parameter": kernel.parameter,
            "clock GHz": round(cycles / max(nanoseconds, 1), 3),
        }  # fmt: skip
        rows.append(row)
        print(f"{kernel.name:<42} {each:10.3f} cycles per {kernel.per:<45} {row['clock GHz']:.2f} GHz", flush=True)
    print(record.append("hopper_units", rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assemble", action="store_true", help="only check that every kernel assembles")
    if parser.parse_args().assemble:
        for kernel in kernels():
            assemble(kernel)
        print(f"{len(kernels())} kernels assemble for {TARGET}")
    else:
        measure()


if __name__ == "__main__":
    main()
