"""The whole module, forward and backward, on Hopper: FP8 kernels beside a bf16 module of the best parts at hand.

    python -m benchmarks.module [--max-length 4096 8192 16384] [--trace]

768 segments with lengths drawn from 1 … max-length, 512 shared seeds, 3 heads of 128, events and gradients in bf16,
parameters in fp32. The peer is FlashAttention-4's varlen kernel on queries repeated for each segment, quack's RMSNorm,
and torch's linear layers in bf16; values are the normalised events in both. All are compiled by torch.compile. Each
runs alone for most of a second (`sustained.py`); memory is the peak that torch's allocator saw beside the inputs.
Ours runs under Hopper's record of numerics, and once more with dQ in fp16.

--trace lists the kernels of one step of ours by time.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

import pma
from benchmarks import record
from benchmarks.sustained import measure
from pma.jagged import equal_offsets
from pma.numerics import HOPPER_NUMERICS

DEVICE = "cuda"
SEGMENTS, SEEDS, HEADS, COLUMNS = 768, 512, 3, 384
FP16_DQ = replace(HOPPER_NUMERICS, dq_accumulation="fp16")


class PeerPMA(nn.Module):
    """Pooling by multihead attention in bf16, from well-kept parts."""

    def __init__(self, embed_dim: int, num_heads: int, num_seeds: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.seed_embs = nn.Parameter(torch.randn(num_seeds, embed_dim) * 0.02)
        self.query_norm, self.key_norm = (nn.Parameter(torch.ones(embed_dim)) for _ in range(2))
        self.query_proj, self.key_proj = (nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(2))

    def forward(self, events: Tensor, offsets: Tensor, longest: int) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func
        from quack import rmsnorm

        segments, (num_seeds, columns) = offsets.shape[0] - 1, self.seed_embs.shape
        with torch.autocast(DEVICE, torch.bfloat16):
            q = self.query_proj(rmsnorm(self.seed_embs.bfloat16(), self.query_norm))
            x = rmsnorm(events, self.key_norm)
            k = self.key_proj(x)

        def heads(rows: Tensor) -> Tensor:
            return rows.view(-1, self.num_heads, columns // self.num_heads)

        q_offsets = equal_offsets(segments, num_seeds, events.device).int()
        result = flash_attn_varlen_func(
            heads(q.repeat(segments, 1)), heads(k), heads(x), cu_seqlens_q=q_offsets, cu_seqlens_k=offsets.int(),
            max_seqlen_q=num_seeds, max_seqlen_k=longest,
        )  # fmt: skip
        out = result[0] if isinstance(result, tuple) else result
        return out.view(segments, num_seeds, columns)


def make_inputs(max_length: int) -> tuple[Tensor, Tensor, Tensor, int]:
    host, generator = torch.Generator().manual_seed(1), torch.Generator(device=DEVICE).manual_seed(1)
    lengths = torch.randint(1, max_length + 1, (SEGMENTS,), generator=host)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(DEVICE)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)

    events = normal(int(lengths.sum()), COLUMNS).requires_grad_()
    return events, offsets, normal(SEGMENTS, SEEDS, COLUMNS), int(lengths.max())


def training_step(module: Callable[..., Tensor], parameters: list[Tensor], inputs: tuple) -> Callable[[], None]:
    events, *others, dout = inputs

    def step() -> None:
        for tensor in (events, *parameters):
            tensor.grad = None
        module(events, *others).backward(dout)

    return step


def make_steps(max_length: int) -> tuple[dict[str, Callable[[], None]], int]:
    events, offsets, dout, longest = make_inputs(max_length)
    sizes = {"embed_dim": COLUMNS, "num_heads": HEADS, "num_seeds": SEEDS}
    peer, steps = PeerPMA(COLUMNS, HEADS, SEEDS).to(DEVICE), {}
    for name, numerics in (("pma", HOPPER_NUMERICS), ("pma, dQ in fp16", FP16_DQ)):
        ours = pma.PMA(**sizes, numerics=numerics, backend="sm90", device=DEVICE)
        compiled = torch.compile(ours, fullgraph=True)
        steps[name] = training_step(compiled, list(ours.parameters()), (events, offsets, dout))
    steps["bf16: FlashAttention-4, quack, cuBLAS"] = training_step(
        torch.compile(peer), list(peer.parameters()), (events, offsets, longest, dout)
    )
    return steps, events.shape[0]


def compare(max_length: int) -> None:
    steps, num_events = make_steps(max_length)
    problem = f"{SEGMENTS} segments, {num_events:,} events, up to {max_length:,}"
    print(problem, flush=True)
    rows = []
    for name, step in steps.items():
        step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        memory = (torch.cuda.max_memory_allocated() - before) / 2**30
        rows.append({"problem": problem, "variant": name, **measure(step), "peak GiB": round(memory, 2)})
    for row in rows:
        ratio = rows[-1]["ms"] / row["ms"]
        row |= {"times peer": round(ratio, 4), "protocol": "each alone for 0.8 s, median of the second half"}
        print(f"    {row['variant']:40}{row['ms']:9.3f} ms{ratio:7.3f}x{row['peak GiB']:8.2f} GiB", flush=True)
    record.append("module", rows)


def trace(max_length: int) -> None:
    """Print what one step of ours spends, kernel by kernel."""
    steps, _ = make_steps(max_length)
    step = steps["pma"]
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    averages = sorted(profile.key_averages(), key=lambda each: -each.device_time_total)
    for each in averages[:24]:
        print(f"    {each.device_time_total / 5e3:9.3f} ms  {each.count / 5:5.1f}x  {each.key[:110]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-length", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--trace", action="store_true", help="the kernels of one step instead of times")
    arguments = parser.parse_args()
    for max_length in arguments.max_length:
        (trace if arguments.trace else compare)(max_length)


if __name__ == "__main__":
    main()
