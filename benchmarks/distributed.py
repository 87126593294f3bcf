"""Weak and strong scaling of the module (DDP, FSDP2) and of the whole model (TorchRec's DMP) on the ranks that run it.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed [--rounds 15] [--what module model]

NCCL with a GPU for each rank, gloo on CPUs: there it is a smoke of small problems, and only ratios count. All variants
take turns in one run, and the slowest rank counts. The model needs torchrec.

    alone    the first rank while the others wait: the bare module, or the model with all tables on one rank
    apart    all ranks at a time without communication (the module only)
    weak     every rank has the whole problem;  speedup = ranks × alone / together
    strong   every rank has its part of it;     speedup = alone with the whole / together
    exposed  together − apart, of the model − alone: communication that no computation covers
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks import record
from pma.testing import make_dout, make_jagged, make_pma, uneven_lengths

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from process_group import init_process_group

CALLS = 4  # steps between two looks at the clock
Step = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """Sizes of the module, then of the model of `examples/next_item.py`; lengths are uniform from 0 on."""

    embed_dim: int
    num_heads: int
    num_seeds: int
    segments: int
    max_length: int
    num_items: int
    histories: int
    max_history: int


PROBLEMS = {
    "cuda": Problem(384, 3, 512, 768, 4096, 4_000_000, 4096, 200),
    "cpu": Problem(64, 2, 8, 32, 200, 20_000, 64, 50),
}


@dataclass(frozen=True)
class Variant:
    """A step to time, and the name of the variant that does the same work without communication."""

    step: Step
    module: nn.Module
    silent: str


IDLE = Variant(lambda: None, nn.Identity(), "")  # of ranks that wait while the first one works alone


def module_variants(problem: Problem, device: torch.device) -> dict[str, Variant]:
    """Forward and backward of one PMA, its gradients reduced over ranks, none of an optimizer."""
    mesh = DeviceMesh.from_group(dist.GroupMember.WORLD, device.type)
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "alone": lambda module: module,
        "apart": lambda module: module,
        "ddp": DistributedDataParallel,
        "fsdp2": lambda module: fully_shard(module, mesh=mesh),
    }
    variants = {}
    for share in ("whole", "part"):
        lengths = uneven_lengths(problem.segments, problem.max_length)
        lengths = lengths if share == "whole" else lengths[dist.get_rank() :: dist.get_world_size()]
        events, offsets = (tensor.to(device) for tensor in make_jagged(lengths, problem.embed_dim))
        events.requires_grad_()
        for name, wrap in wrappers.items():
            if name == "alone" and dist.get_rank():
                variants[f"{name} {share}"] = IDLE
                continue
            sizes = {"num_heads": problem.num_heads, "num_seeds": problem.num_seeds, "device": device}
            module = wrap(make_pma(embed_dim=problem.embed_dim, **sizes))
            variants[f"{name} {share}"] = Variant(_pool_step(module, events, offsets), module, f"apart {share}")
    return variants


def _pool_step(module: nn.Module, events: Tensor, offsets: Tensor) -> Step:
    dout = make_dout(module(events, offsets))

    def step() -> None:
        module.zero_grad()
        events.grad = None
        module(events, offsets).backward(dout)

    return step


def take_turns(variants: dict[str, Variant], rounds: int, device: torch.device) -> tuple[dict, dict]:
    """Median milliseconds of a step and, on a GPU, peak bytes of one beyond what lay there; of the slowest rank."""
    for variant in variants.values():
        for _ in range(3):
            variant.step()
    times: dict[str, list[float]] = {name: [] for name in variants}
    peaks = dict.fromkeys(variants, 0)
    for _ in range(rounds):
        for name, variant in variants.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            _meet(device)
            begin = time.perf_counter()
            for _ in range(CALLS):
                variant.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(device) - before)
            times[name].append((time.perf_counter() - begin) / CALLS * 1e3)
    slowest = torch.tensor(
        [[statistics.median(times[n]), peaks[n]] for n in variants], dtype=torch.float64, device=device
    )
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    medians, peaks_bytes = slowest.t().tolist()
    return dict(zip(variants, medians, strict=True)), dict(zip(variants, peaks_bytes, strict=True))


def _meet(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def state_bytes(module: nn.Module) -> int:
    """Bytes of weights that this rank holds."""
    total = 0
    for tensor in module.state_dict().values():
        if isinstance(tensor, ShardedTensor):
            parts = [shard.tensor for shard in tensor.local_shards()]
        else:
            parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor]
        total += sum(part.nbytes for part in parts)
    return total


def compare(what: str, variants: dict[str, Variant], problem: Problem, rounds: int, device: torch.device) -> list[dict]:
    """Time the variants; on rank 0 print a table. Returns its rows."""
    times, peaks = take_turns(variants, rounds, device)
    ranks, backend, rows = dist.get_world_size(), dist.get_backend(), []
    for name, variant in variants.items():
        parallel, share = name.split()
        if parallel in ("alone", "apart"):
            continue
        speedup = (ranks if share == "whole" else 1) * times["alone whole"] / times[name]
        rows.append(
            {
                "what": what, "parallel": parallel, "scaling": "weak" if share == "whole" else "strong", "ranks": ranks,
                "ms": round(times[name], 3), "silent ms": round(times[variant.silent], 3), "speedup": round(speedup, 3),
                "exposed ms": round(times[name] - times[variant.silent], 3),
                "step MB": round(peaks[name] / 1e6, 1) or None,
                "weights MB": round(state_bytes(variant.module) / 1e6, 3), "backend": backend,
                "problem": asdict(problem),
                "protocol": f"variants in turn, median of {rounds} rounds of {CALLS} steps, slowest rank",
            }
        )  # fmt: skip
    if dist.get_rank() == 0:
        print(f"{what}, {ranks} ranks, {backend}, {device.type}")
        for row in rows:
            print(
                f"    {row['parallel']:8}{row['scaling']:8}{row['ms']:10.2f} ms{row['silent ms']:10.2f} silent"
                f"{row['speedup']:7.2f}x{row['exposed ms']:9.2f} ms exposed{row['weights MB']:10.2f} MB of weights"
                + (f"{row['step MB']:10.0f} MB in a step" if row["step MB"] else "")
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--what", nargs="+", choices=("module", "model"), default=["module", "model"])
    arguments = parser.parse_args()
    device = init_process_group()
    problem = PROBLEMS[device.type]
    rows = []
    for what in arguments.what:
        if what == "model":
            from benchmarks.distributed_model import model_variants as make_variants
        else:
            make_variants = module_variants
        rows += compare(what, make_variants(problem, device), problem, arguments.rounds, device)
    if dist.get_rank() == 0:
        record.append("distributed", rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
