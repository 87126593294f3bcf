"""On paper: a training step on 1 to 1,000 GPUs from what one H200 was measured to do, and what binds first.

    python -m benchmarks.scale_plan

Per GPU the source's batch: 768 segments of up to 4,096 events (1,576,858), E = 384, 3 heads, 512 seeds. Times of
kernels on one H200 are read from `benchmarks/results/`; everything else is an assumption with a name below, to be
replaced by what `benchmarks.distributed` measures. Times are sums: nothing here was run on more than one GPU.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from benchmarks.record import RESULTS

EVENTS, SEGMENTS, EMBED_DIM, NUM_SEEDS = 1_576_858, 768, 384, 512
PROBLEM = "768 segments, 1,576,858 events, up to 4,096"

# Specified by the vendor.
MEMORY = 141e9  # bytes of an H200
NVLINK = 450e9  # bytes a second and direction of a GPU, 8 GPUs in a machine
GPUS_PER_MACHINE = 8
# Assumed.
NETWORK = 50e9  # bytes a second and direction of a GPU: one 400 Gb/s port each
REACHED = 0.8  # share of a link that collectives reach
PEER_LATENCY = 2e-6  # seconds an all-to-all spends on each peer
HOP_LATENCY = 10e-6  # seconds of an all-reduce for each level of its tree, each way
DENSE_PARAMETERS = 50e6  # of the whole ranking model, fp32 gradients; PMA has 0.5e6 of them
TABLE_ROWS = 4e9  # of E fp32 columns with one fp32 moment, as row-wise Adagrad has
FREE_FOR_TABLES = 0.6  # of a GPU's memory
UNIQUE_ROWS = 0.5  # of a rank's events; the others repeat a row of the same batch
LENGTH_VARIATION = 1 / math.sqrt(3)  # std / mean of a segment's length: uniform from 0 on
LOOKUP_PASSES = 2, 3  # over fp32 rows at the speed of a copy: read and write; read gradients, read and write rows


@dataclass(frozen=True)
class Compute:
    """Seconds of table lookups and PMA on one GPU."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Exchange:
    """How embeddings travel from the GPUs that hold their rows, and gradients back."""

    name: str
    bytes_per_value: float
    columns: int = EMBED_DIM
    share: float = 1.0  # of events whose row travels
    group: int = 1_000_000  # GPUs that hold all tables together


EXCHANGES = (
    Exchange("fp32", 4),
    Exchange("bf16", 2),
    Exchange("bf16, unique rows", 2, share=UNIQUE_ROWS),
    Exchange("fp8, unique rows, 128 columns", 1, columns=128, share=UNIQUE_ROWS),
    Exchange("bf16, tables in each machine", 2, group=GPUS_PER_MACHINE),
)


def measured(name: str, **keys: str) -> dict:
    """The first row of results/<name>.jsonl with these values."""
    rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return next(row for row in rows if all(row.get(key) == value for key, value in keys.items()))


def kernels() -> Compute:
    """Lookups and a sum of kernels: PMA's own, a bf16 GEMM for projections, FlashAttention-4's bf16 backward.

    The backward is taken to lose as much to ragged lengths as FlashAttention-4's forward does.
    """
    copy = measured("norm_quantize", problem="4,000,000 x 384", variant="pma")["copy TB/s"] * 1e12
    lookup, update = (passes * EVENTS * EMBED_DIM * 4 / copy for passes in LOOKUP_PASSES)

    def for_rows(name: str, problem: str, variant: str, rows: float) -> float:
        return measured(name, problem=problem, variant=variant)["ms"] / 1e3 * rows / 4e6

    transposed = "pma, K-uniform scales, payload also transposed"
    norm = for_rows("norm_quantize", "4,000,000 x 384", transposed, EVENTS)
    norm_backward = for_rows("norm_backward", "4,000,000 x 384", "pma", EVENTS)
    dout = for_rows("quantize", "3,999,744 x 384 with delta", "pma", SEGMENTS * NUM_SEEDS)
    gemm = 2 * EVENTS * EMBED_DIM**2 / measured("hopper_kernels", case="gemm_h200")["TFLOP/s"] / 1e12
    attention = measured("attention_forward", problem=PROBLEM, variant="pma")["ms"] / 1e3
    ragged = measured("attention_forward", problem=PROBLEM, variant="FlashAttention-4, bf16")["TFLOP/s"]
    full, backward = (
        measured("hopper_kernels", case=f"flash_{direction}_h200")["TFLOP/s"] for direction in ("forward", "backward")
    )
    attention_backward = 10 * EVENTS * NUM_SEEDS * EMBED_DIM / (backward * ragged / full * 1e12)
    return Compute(lookup + norm + gemm + attention, dout + attention_backward + 2 * gemm + norm_backward + update)


def reference() -> Compute:
    """PMA on the PyTorch reference: 1.38 s and 2.06 s for 5,717,735 events (`DESIGN.md`)."""
    return Compute(1.38 * EVENTS / 5_717_735, 2.06 * EVENTS / 5_717_735)


def all_to_all(num_bytes: float, ranks: int) -> float:
    """Seconds until every rank has sent `num_bytes` in equal parts to `ranks` ranks, itself included."""
    neighbours = min(ranks, GPUS_PER_MACHINE)
    inside = num_bytes * (neighbours - 1) / ranks / (NVLINK * REACHED)
    outside = num_bytes * (ranks - neighbours) / ranks / (NETWORK * REACHED)
    return max(inside, outside) + (ranks - 1) * PEER_LATENCY


def all_reduce(num_bytes: float, ranks: int) -> float:
    if ranks == 1:
        return 0.0
    link = NVLINK if ranks <= GPUS_PER_MACHINE else NETWORK
    return 2 * num_bytes * (ranks - 1) / ranks / (link * REACHED) + 2 * math.log2(ranks) * HOP_LATENCY


def step(compute: Compute, exchange: Exchange, ranks: int) -> dict[str, float]:
    """Milliseconds of a step by what they are spent on.

    exchange: embeddings to the ranks before the forward and gradients back after the backward; nothing covers them.
    reduction: of dense gradients, what the backward does not cover.
    slowest: what all wait for the rank with most events, of a normal sum of lengths.
    """
    values = EVENTS * exchange.share * exchange.columns
    both_ways = 2 * all_to_all(values * exchange.bytes_per_value, min(ranks, exchange.group))
    reduction = max(0.0, all_reduce(4 * DENSE_PARAMETERS, ranks) - compute.backward)
    spread = LENGTH_VARIATION / math.sqrt(SEGMENTS)
    excess = spread * NormalDist().inv_cdf(ranks / (ranks + 1)) if ranks > 1 else 0.0
    seconds = {"compute": compute.forward + compute.backward, "exchange": both_ways, "reduction": reduction}
    seconds["slowest"] = excess * (seconds["compute"] + both_ways)
    return {name: 1e3 * value for name, value in seconds.items()}


def print_steps(name: str, compute: Compute, exchanges: Sequence[Exchange]) -> None:
    columns = ("compute", "exchange", "reduction", "slowest")
    print(f"\n{name}: forward {compute.forward * 1e3:.1f} ms, backward {compute.backward * 1e3:.1f} ms")
    print(f"    {'embeddings travel in':32}{'GPUs':>6}" + "".join(f"{c:>11}" for c in columns) + f"{'efficiency':>12}")
    for exchange in exchanges:
        for ranks in (1, 8, 64, 256, 1000):
            parts = step(compute, exchange, ranks)
            line = "".join(f"{parts[column]:11.1f}" for column in columns)
            print(f"    {exchange.name:32}{ranks:6}{line}{parts['compute'] / sum(parts.values()):12.0%}")


def print_memory() -> None:
    """What tables take, and what keeping a copy of them in each machine costs."""
    row, room = 4 * EMBED_DIM + 4, MEMORY * FREE_FOR_TABLES
    total, machine = TABLE_ROWS * row, GPUS_PER_MACHINE * room
    print(f"\ntables: {total / 1e12:.1f} TB, on at least {math.ceil(total / room)} GPUs with {room / 1e9:.0f} GB each")
    print(f"a machine holds {machine / 1e9:.0f} GB, {machine / row / 1e6:.0f} million rows;")
    print(f"to make the copies of 1,000 GPUs equal takes {all_reduce(room, 1000):.1f} s when it is full")


def main() -> None:
    print(__doc__)
    print_steps("lookups and kernels on an H200", kernels(), EXCHANGES)
    print_steps("PyTorch reference on an H200", reference(), EXCHANGES[:1])
    print_memory()


if __name__ == "__main__":
    main()
