"""The whole model of `benchmarks.distributed`: its training step through TorchRec's pipeline."""

from collections.abc import Iterator
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from benchmarks.distributed import IDLE, Problem, Variant  # which finds the examples
from pma.testing import uneven_lengths

from movielens import KEYS, NUM_RATINGS, NUM_RECENCIES, Batch  # isort: skip
from next_item import NUM_NEGATIVES, NextItemModel  # isort: skip
from train_distributed import Layout, Trainer  # isort: skip


def model_variants(problem: Problem, device: torch.device) -> dict[str, Variant]:
    """Training steps of the example's model through its pipeline: tables sharded, the dense part in DDP or FSDP2."""
    first = dist.new_group([0])
    spread = {"alone": ("dmp", first), "dmp": ("dmp", None), "fsdp2": ("fsdp2", None)}
    variants = {}
    for share, histories in (("whole", problem.histories), ("part", problem.histories // dist.get_world_size())):
        for name, (parallel, group) in spread.items():
            if name == "alone" and dist.get_rank():
                variants[f"{name} {share}"] = IDLE
                continue
            torch.manual_seed(0)
            model = NextItemModel(problem.num_items, "mxfp8", tables_device="meta")
            trainer = Trainer(model, Layout(parallel, device, group=group), num_steps=1_000_000)
            trainer.model.train()
            steps = trainer.run(_random_batches(problem, histories))
            variants[f"{name} {share}"] = Variant(partial(next, steps), trainer.model, f"alone {share}")
    return variants


def _random_batches(problem: Problem, histories: int) -> Iterator[Batch]:
    """Endlessly the same few batches, other ones on each rank."""
    batches = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(4 * dist.get_rank() + seed)
        lengths = torch.tensor(uneven_lengths(histories, problem.max_history, seed=seed))
        sizes = (problem.num_items, NUM_RATINGS, NUM_RECENCIES)
        events = [torch.randint(size, (int(lengths.sum()),), generator=generator) for size in sizes]
        candidates = torch.randint(problem.num_items, (histories, 1 + NUM_NEGATIVES), generator=generator)
        counts = torch.full_like(lengths, 1 + NUM_NEGATIVES)
        features = KeyedJaggedTensor(
            KEYS, torch.cat([*events, candidates.flatten()]), lengths=torch.cat([lengths, lengths, lengths, counts])
        )
        batches.append(Batch(features, (torch.arange(1 + NUM_NEGATIVES) == 0).float().expand(histories, -1)))
    return (batches[index % len(batches)] for index in count())
