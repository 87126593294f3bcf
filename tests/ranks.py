"""Gloo processes on this machine that run functions together, as ranks of one process group."""

import datetime
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)  # of a collective that not all ranks join


class Ranks:
    """`ranks.run(f, x)` calls f(x) on every rank and returns what each returned, or raises what one raised."""

    def __init__(self, pools: list[ProcessPoolExecutor]) -> None:
        self._pools = pools

    def run(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        futures = [pool.submit(function, *arguments) for pool in self._pools]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        return [future.result() for future in (futures if len(done) == len(futures) else done)]


@contextmanager
def ranks(num_ranks: int, folder: Path) -> Iterator[Ranks]:
    """Processes that live as long as the context; they meet in a file of `folder`, so that no port can be taken."""
    spawn = multiprocessing.get_context("spawn")
    pools = [
        ProcessPoolExecutor(1, spawn, initializer=_join, initargs=(rank, num_ranks, folder / "store"))
        for rank in range(num_ranks)
    ]
    group = Ranks(pools)
    try:
        yield group
        group.run(dist.destroy_process_group)
    finally:
        for pool in pools:
            pool.shutdown()


def _join(rank: int, num_ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=TIMEOUT)
