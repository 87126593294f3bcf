"""Side-by-side times of several variants in one run on a GPU.

Each variant is captured in a CUDA graph of several calls, so that the host takes no part; all graphs are warmed, then
replayed in turn, round after round; the median over the rounds counts. Inputs are the caller's: random, and larger
than the L2 cache, or rotated by the variant itself.
"""

import statistics
from collections.abc import Callable

import torch


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


def jagged_lengths(total: int, segments: int, seed: int = 0) -> torch.Tensor:
    """Uneven, mostly odd lengths with the given sum: uniform between 1 and twice the mean. → [segments] int64."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max(2, 2 * total // segments), (segments,), generator=generator)
    lengths = (lengths * (total / lengths.sum())).long() | 1
    lengths[lengths.argmax()] += total - lengths.sum()
    return lengths
