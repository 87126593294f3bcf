"""A producer and a warpgroup around a ring of stages, as PTX: the smallest kernel with a pipeline to see."""

from dataclasses import dataclass

import numpy as np
from ptx_kernels import Launch

from ptxsim.machine.decode import decode_system
from ptxsim.machine.grid import Grid, Options
from ptxsim.ptx.parse import parse_kernel
from ptxsim.ptx.program import Program
from ptxsim.timeline.capture import Capture
from ptxsim.timeline.trace import Trace

PRODUCTS = 4  # of a tile
RING = 1024  # where the stages begin; full barriers are at 0, 8 …, empty ones at 512, 520 …


@dataclass(frozen=True)
class Ring:
    """tile_bytes arrive for each tile; then come `PRODUCTS` wgmmas of 64 × n. waits_each: each is waited for alone."""

    stages: int
    tile_bytes: int
    n: int
    waits_each: bool = False
    tiles: int = 40

    def text(self) -> str:
        accumulators = ", ".join(f"%d{i}" for i in range(self.n // 2))
        form = f"wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.bf16.bf16"
        product = f"{form} {{{accumulators}}}, %a1, %a2, 1, 1, 1, 0, 0;"
        end = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned {};\n"
        rows = [product + ("\n" + end.format(0) if self.waits_each else "") for _ in range(PRODUCTS)]
        products = "wgmma.fence.sync.aligned;\n" + "\n".join(rows) + ("" if self.waits_each else "\n" + end.format(0))
        zeros = "\n".join(f"mov.f32 %d{i}, 0f00000000;" for i in range(self.n // 2))
        keep = "\n".join(f"st.global.f32 [%a0+{512 * i}], %d{i};" for i in range(self.n // 2))
        full, empty = "[%base+{}], 1", "[%base+{}], 4"
        barriers = [form.format(8 * s + o) for s in range(self.stages) for o, form in ((0, full), (512, empty))]
        init = "\n".join(f"@%p1 mbarrier.init.shared::cta.b64 {each};" for each in barriers)
        return f"""
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .u64 data)
{{
.reg .pred %p<16>; .reg .b32 %r<32>; .reg .f32 %d<128>; .reg .b64 %a<16>; .reg .b32 %base; .reg .b32 %lane;
ld.param.u64 %a0, [data];
mov.u32 %r0, %tid.x;
and.b32 %lane, %r0, 31;
mov.u32 %base, dynamic;
setp.eq.u32 %p1, %r0, 0;
{init}
bar.sync 0;
mov.u32 %r1, 0;
mov.u32 %r2, 0;
mov.u32 %r3, 0;
setp.ge.u32 %p2, %r0, 128;
@%p2 bra PRODUCER;
{zeros}
shr.u32 %r8, %base, 4;
add.u32 %r8, %r8, {RING // 16};
cvt.u64.u32 %a1, %r8;
or.b64 %a1, %a1, {(128 >> 4) << 16 | (256 >> 4) << 32};
mov.u64 %a2, %a1;
setp.eq.u32 %p5, %lane, 0;
CONSUME:
mad.lo.u32 %r4, %r2, 8, %base;
FULL:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r4], %r3;
@!%p3 bra FULL;
{products}
@%p5 mbarrier.arrive.shared::cta.b64 _, [%r4+512];
{_advance("CONSUME", self)}
mad.wide.u32 %a0, %r0, 4, %a0;
{keep}
bra END;
PRODUCER:
setp.ne.u32 %p6, %lane, 0;
@%p6 bra END;
mov.u32 %r3, 1;
PRODUCE:
mad.lo.u32 %r4, %r2, 8, %base;
EMPTY:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r4+512], %r3;
@!%p3 bra EMPTY;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], {self.tile_bytes};
mad.lo.u32 %r5, %r2, {self.tile_bytes}, %base;
add.u32 %r5, %r5, {RING};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%a0], {self.tile_bytes}, [%r4];
{_advance("PRODUCE", self)}
END:
ret;
}}
"""

    def trace(self) -> Trace:
        """Run it once, and see."""
        text, capture = self.text(), Capture()
        data = np.zeros(max(self.tile_bytes, 256 * self.n), np.uint8)
        parameters = {"data": int(data.ctypes.data).to_bytes(8, "little")}
        shared = RING + max(self.stages * self.tile_bytes, 8192)
        launch = Launch(parameters, block=(160, 1, 1), shared_bytes=shared)
        Grid(Program(parse_kernel(text, "kernel"), decode_system), launch, Options(monitor=capture), num_sms=1).run()
        return capture.take("kernel", text)


def _advance(label: str, ring: Ring) -> str:
    """The next stage, the other parity behind the last one, the next tile."""
    return f"""add.u32 %r2, %r2, 1;
setp.eq.u32 %p4, %r2, {ring.stages};
@%p4 mov.u32 %r2, 0;
@%p4 xor.b32 %r3, %r3, 1;
add.u32 %r1, %r1, 1;
setp.lt.u32 %p4, %r1, {ring.tiles};
@%p4 bra {label};"""
