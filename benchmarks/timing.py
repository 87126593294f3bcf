"""Side-by-side times of several variants in one run on a GPU.

Each variant is captured in a CUDA graph of several calls, so that the host takes no part; all graphs are warmed, then
replayed in turn, round after round; the median over the rounds counts. Inputs are the caller's: random, and larger
than the L2 cache, or rotated by the variant itself.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from benchmarks import record


def side_by_side(variants: dict[str, Callable[[], object]], *, calls: int = 4, rounds: int = 15) -> dict[str, float]:
    """Median milliseconds of one call of each variant."""
    graphs = {name: _capture(call, calls) for name, call in variants.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in variants}
    for _ in range(rounds + 2):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in pairs[2:]) / calls
        for name, pairs in events.items()
    }


def _capture(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def parse_problems(description: str | None) -> list[tuple[int, int]]:
    """(rows, columns) from the command line; without arguments the standard problems."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="a multiple of 32")
    parser.add_argument("--columns", type=int)
    arguments = parser.parse_args()
    if arguments.rows is None and arguments.columns is None:
        return [(4_000_000, 384), (1_000_000, 512), (1_000_000, 1024)]
    if arguments.rows is None or arguments.columns is None:
        parser.error("--rows and --columns belong together")
    return [(arguments.rows, arguments.columns)]


def jagged_problem(rows: int, columns: int, segments: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard-normal bf16 rows on the GPU in segments cut at random rows. → [rows, columns], offsets [B+1]."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randint(0, rows + 1, (segments - 1,), generator=generator).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([rows])])
    values = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    return values, offsets.cuda()


def compare(
    name: str, problem: str, variants: dict[str, Callable[[], object]], num_bytes: float, *, calls: int = 4
) -> list[dict]:
    """Time the variants beside a device copy, print a table, append it to results/<name>.jsonl. Returns the rows.

    num_bytes: what must move through device memory; every variant's bandwidth counts these bytes alone, so a variant
    that moves more is slower by as much. The copy counts what it reads and writes. The first variant is ours.
    """
    copy_from = torch.randn(4_000_000, 384, dtype=torch.bfloat16, device="cuda")  # 2^30 would meet in one channel
    copy_to = torch.empty_like(copy_from)
    times = side_by_side({"device copy": lambda: copy_to.copy_(copy_from)} | variants, calls=calls)
    copied = 2 * copy_from.nbytes / times.pop("device copy") / 1e9
    print(f"{name}, {problem}: {num_bytes / 1e6:,.0f} MB must move; device copy {copied:.2f} TB/s")
    ours, rows = next(iter(times.values())), []
    for variant, milliseconds in times.items():
        speed = num_bytes / milliseconds / 1e9
        rows.append(
            {
                "problem": problem, "variant": variant, "ms": round(milliseconds, 4), "TB/s": round(speed, 3),
                "share of copy": round(speed / copied, 4), "times ours": round(milliseconds / ours, 3),
                "copy TB/s": round(copied, 3), "protocol": "CUDA graphs, interleaved, median of 15",
            }
        )  # fmt: skip
        print(
            f"    {variant:48}{milliseconds:9.3f} ms{speed:7.2f} TB/s{speed / copied:8.1%}{milliseconds / ours:7.2f}x"
        )
    record.append(name, rows)
    return rows
