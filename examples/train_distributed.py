"""The MovieLens model on many GPUs: TorchRec shards its tables, DDP or FSDP2 holds its dense part.

    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py                      # dmp
    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py --parallel fsdp2
    torchrun --standalone --nproc-per-node 4 examples/train_distributed.py --resume outputs/checkpoint-3

    dmp    TorchRec's DistributedModelParallel: tables as its planner shards them, the dense part in DDP
    fsdp2  the same for the tables, the dense part in FSDP2
    ddp    everything in DDP, tables too

NCCL where there are GPUs, gloo elsewhere. Batches of input travel to the ranks that hold their rows while the step
before computes (TorchRec's train pipeline). Checkpoints load on any number of ranks.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from movielens import Batch, training_targets
from next_item import PRECISIONS, Judge, Metrics, NextItemModel, Task, make_task
from process_group import init_process_group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    get_unwrapped_module,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import HardwareConfig, KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.train_pipeline import TrainPipeline, TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from tqdm import tqdm

PARALLEL = ("dmp", "fsdp2", "ddp")
EXCHANGE = ("fp32", "fp16", "bf16")
SHARDING_TYPES = [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE]
RESERVED_SHARE = 0.2  # of a GPU's memory, for what isn't a table
PER_USER = 16  # training interactions drawn from every user in an epoch
DENSE_LEARNING_RATE = 6e-3  # peaks of a one-cycle schedule
TABLES_LEARNING_RATE = 6e-2


class TrainingModel(nn.Module):
    """A model as TorchRec's train pipelines call it: a batch in, the loss and what to hand out of the pipeline out."""

    def __init__(self, model: NextItemModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """→ loss, (loss, logits, labels)."""
        logits = self.model(batch.features)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


class FullyShardedScorer(DataParallelWrapper):
    """What `DistributedModelParallel` does with the dense part: FSDP2 instead of DDP.

    One unit, because PMA reads the weights of its layers itself; a deep model gets one for each block.
    """

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        fully_shard(dmp.module.model.scorer, mesh=DeviceMesh.from_group(env.process_group, device.type))


@dataclass(frozen=True)
class Layout:
    """How a model lies on ranks.

    parallel: "dmp", "fsdp2" or "ddp".    device: this rank's.    group: the ranks, None for all.
    exchange: the precision in which embeddings of sharded tables travel to their events, and gradients back.
    """

    parallel: str
    device: torch.device
    exchange: str = "fp32"
    group: dist.ProcessGroup | None = None


def parallelize(model: NextItemModel, layout: Layout) -> nn.Module:
    """Spread a model over ranks that have drawn the same dense parameters.

    Tables may be on "meta": TorchRec makes each rank's part where it belongs.
    """
    group, device, training_model = layout.group or dist.GroupMember.WORLD, layout.device, TrainingModel(model)
    if layout.parallel == "ddp":
        device_ids = None if device.type == "cpu" else [device]
        return DistributedDataParallel(training_model.to(device), device_ids, process_group=group)
    model.scorer.to(device)
    precision = CommType[layout.exchange.upper()]
    codecs = get_qcomm_codecs_registry(QCommsConfig(precision, precision), device=device)
    sharders = [EmbeddingCollectionSharder(qcomm_codecs_registry=codecs)]
    return DistributedModelParallel(
        training_model,
        ShardingEnv.from_process_group(group),
        device,
        plan_tables(training_model, sharders, device, group),
        sharders,
        data_parallel_wrapper=FullyShardedScorer() if layout.parallel == "fsdp2" else DefaultDataParallelWrapper(),
    )


def plan_tables(
    model: TrainingModel, sharders: list[EmbeddingCollectionSharder], device: torch.device, group: dist.ProcessGroup
) -> ShardingPlan:
    """Ask TorchRec's planner where each table goes; every rank gets the plan of the first."""
    on_gpu, num_ranks = device.type == "cuda", group.size()
    ranks_of_machine = min(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), num_ranks)
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=num_ranks, local_world_size=ranks_of_machine),
        # The planner takes 32 GiB a GPU unless it is told.
        HardwareConfig(hbm_cap_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else None),
        KernelConfig(compute_device=device.type),
    )
    constraint = ParameterConstraints(sharding_types=[each.value for each in SHARDING_TYPES])
    planner = EmbeddingShardingPlanner(
        topology=topology,
        storage_reservation=FixedPercentageStorageReservation(RESERVED_SHARE),
        constraints={table.name: constraint for table in model.model.embeddings.embedding_configs()},
    )
    return planner.collective_plan(model, sharders, group)


def make_optimizers(model: nn.Module, num_steps: int) -> list[WarmupOptimizer]:
    """Adam for what DDP or FSDP2 holds; sharded tables bring their own. Both with a learning rate of one cycle."""
    unwrapped = get_unwrapped_module(model)
    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(unwrapped.named_parameters())), torch.optim.Adam)
    optimizers = {"dense": (dense, DENSE_LEARNING_RATE)}
    if isinstance(model, DistributedModelParallel):
        optimizers["tables"] = (model.fused_optimizer, TABLES_LEARNING_RATE)
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=max(num_steps // 10, 1), value=0.04),
        WarmupStage(WarmupPolicy.POLY, max_iters=num_steps + 1, decay_iters=num_steps + 1),
    ]
    return [
        WarmupOptimizer(optimizer, stages, peak, param_name=f"__warmup_{name}")
        for name, (optimizer, peak) in optimizers.items()
    ]


class Trainer:
    """A spread model with its optimizers and train pipeline."""

    def __init__(self, model: NextItemModel, layout: Layout, num_steps: int) -> None:
        self.device = layout.device
        if layout.parallel != "ddp":  # rows of sharded tables are updated in the backward
            _apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.parameters(), {"lr": TABLES_LEARNING_RATE})
        self.model = parallelize(model, layout)
        self.optimizers = make_optimizers(self.model, num_steps)
        self.optimizer = CombinedOptimizer(self.optimizers)
        pipeline = TrainPipelineBase if layout.parallel == "ddp" else TrainPipelineSparseDist
        self.pipeline: TrainPipeline = pipeline(self.model, self.optimizer, self.device)

    def run(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Send batches through the pipeline, a step each if the model is in training. → (loss, logits, labels)."""
        source = (batch.pin_memory() if self.device.type == "cuda" else batch for batch in batches)
        self.pipeline.reset()
        while True:
            try:
                yield self.pipeline.progress(source)
            except StopIteration:
                return

    def train(self, batches: Iterable[Batch], progress: tqdm) -> float:
        """Take one step for each batch. → their mean loss, over all ranks."""
        self.model.train()
        mean = MeanMetric().to(self.device)
        for loss, _, _ in self.run(batches):
            mean.update(loss)
            progress.update()
        return mean.compute().item()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Metrics:
        """Judge the model on a held-out batch of each rank, all of them together."""
        self.model.eval()
        judge = Judge().to(self.device)
        for _, logits, labels in self.run([batch]):
            judge.update(logits, labels)
        return judge.metrics()  # gathers over ranks

    def save(self, path: Path, epoch: int) -> None:
        """Write weights, optimizer state and the steps taken, each rank its own shards."""
        dcp.save(self._state(epoch), checkpoint_id=path)

    def load(self, path: Path) -> int:
        """Read what `save` wrote on any number of ranks. → the epoch."""
        dense, *tables = self.optimizers
        dense.init_state()  # state is read in place: there must be some
        for optimizer in tables:
            optimizer.step()
        state = self._state(epoch=0)
        dcp.load(state, checkpoint_id=path)
        return int(state["epoch"])

    def _state(self, epoch: int) -> dict[str, object]:
        is_dmp = isinstance(self.model, DistributedModelParallel)
        model = self.model if is_dmp else get_unwrapped_module(self.model)
        return {"model": model, "optimizer": self.optimizer, "epoch": torch.tensor(epoch)}


def training_batches(task: Task, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
    """This rank's share of each batch of an epoch: all ranks draw the same order, each its own negatives.

    A last batch that is not full is left out: a mean over ranks is a mean over samples only if they have equally many.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    users, targets = training_targets(task.interactions, PER_USER, _generator(seed, epoch))
    negatives = _generator(seed, epoch, rank)
    local = batch_size // num_ranks
    for first in range(rank * local, len(users) - batch_size + rank * local + 1, batch_size):
        yield task.training.make(users[first : first + local], targets[first : first + local], negatives)


def _generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(key))  # of ints the same in every process


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--parallel", choices=PARALLEL, default="dmp")
    parser.add_argument("--exchange", choices=EXCHANGE, default="fp32", help="of embeddings; bf16 on GPUs only")
    parser.add_argument("--precision", choices=PRECISIONS, default="mxfp8")
    parser.add_argument("--epochs", type=int, default=6, help="in the end, those before --resume included")
    parser.add_argument(
        "--batch-size", type=int, default=128, help="segments in a training batch, of all ranks together"
    )
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, batches and negatives")
    parser.add_argument("--no-compile", action="store_true", help="run the dense part without torch.compile")
    parser.add_argument("--quick", action="store_true", help="64 users, so that an epoch has 8 steps of 128")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="for checkpoint-<epoch>")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint, of any number of ranks")
    return parser.parse_args()


def main() -> None:
    """Train, judge after every epoch, write a checkpoint after every epoch."""
    arguments = parse_arguments()
    device = init_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if arguments.batch_size % num_ranks:
        raise SystemExit(f"--batch-size must be a multiple of the {num_ranks} ranks, got {arguments.batch_size}")
    task = make_task(64 if arguments.quick else None, rank, num_ranks)
    torch.manual_seed(arguments.seed)
    tables_device = "cpu" if arguments.parallel == "ddp" else "meta"
    model = NextItemModel(task.interactions.num_items, arguments.precision, tables_device)
    if not arguments.no_compile:
        model.scorer.pooler.compile(fullgraph=True)
    steps_per_epoch = task.interactions.num_users * PER_USER // arguments.batch_size
    layout = Layout(arguments.parallel, device, arguments.exchange)
    trainer = Trainer(model, layout, arguments.epochs * steps_per_epoch)
    torch.manual_seed(hash((arguments.seed, rank)))  # ranks drop out different elements
    done = trainer.load(arguments.resume) if arguments.resume else 0
    for epoch in range(done, arguments.epochs):
        batches = training_batches(task, arguments.batch_size, arguments.seed, epoch)
        with tqdm(total=steps_per_epoch, desc=f"epoch {epoch + 1}", unit="step", disable=rank != 0) as progress:
            loss = trainer.train(batches, progress)
        path = arguments.output_dir / f"checkpoint-{epoch + 1}"
        trainer.save(path, epoch + 1)
        metrics = trainer.evaluate(task.validation)
        if rank == 0:
            print(f"epoch {epoch + 1}: training loss {loss:.4f}, validation {metrics}, {path}", flush=True)
    metrics = trainer.evaluate(task.test)
    if rank == 0:
        print(f"{num_ranks} ranks, {arguments.parallel}, {arguments.precision}: test {metrics}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
