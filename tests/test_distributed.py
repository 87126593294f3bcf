"""Two gloo processes beside one: PMA and the model of `examples/train_distributed.py` under DDP, FSDP2 and TorchRec."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import train_distributed
from movielens import Batch
from next_item import PRECISIONS, NextItemModel, Task, make_task
from ranks import ranks
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.types import ShardingType
from train_distributed import PARALLEL, Layout, Trainer, TrainingModel, parallelize

import pma
from pma.testing import KERNEL_BUDGET, ULPS_FP32, make_dout, make_jagged, make_pma, relative_error

CPU = torch.device("cpu")
NUM_USERS, NUM_CANDIDATES, NUM_STEPS = 32, 5, 4
TABLES_LR = 2.0**20  # of SGD, so that a table moves by its gradient and nothing is lost to what it was
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    with ranks(1, tmp_path_factory.mktemp("ranks")) as group:
        yield group


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    with ranks(2, tmp_path_factory.mktemp("ranks")) as group:
        yield group


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# ---- the whole model -------------------------------------------------------------------------------------------------


@cache
def movielens() -> Task:
    return make_task(NUM_USERS)


def make_batch(part: int, num_parts: int, step: int = 0) -> Batch:
    """A part of one batch of NUM_USERS histories: parts are equally many segments, of unequal lengths."""
    task = movielens()
    generator = torch.Generator().manual_seed(step)
    items = torch.randint(task.interactions.num_items, (NUM_USERS, NUM_CANDIDATES), generator=generator)
    ends = task.interactions.user_offsets[1:] - (torch.arange(NUM_USERS) + step) % 9
    users = torch.arange(NUM_USERS).chunk(num_parts)[part]
    labels = torch.zeros(len(users), NUM_CANDIDATES)
    labels[:, 0] = 1
    return Batch(task.training.features(users, ends[users], items[users]), labels)


def make_model(precision: str) -> NextItemModel:
    """The same weights in every process; no dropout, which would differ."""
    torch.manual_seed(0)
    model = NextItemModel(movielens().interactions.num_items, precision)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def model_alone(precision: str) -> Gradients:
    """Loss and every gradient of one process that has the whole batch."""
    model = TrainingModel(make_model(precision))
    loss, _ = model(make_batch(0, 1))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def model_on_ranks(parallel: str, precision: str) -> Gradients:
    """The same on a rank that has its part of the batch; gradients of sharded tables are whole on rank 0."""
    model = make_model(precision)
    if parallel != "ddp":
        _apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": TABLES_LR})
    model = parallelize(model, Layout(parallel, CPU))
    before = sharded_tables(model)
    loss, _ = model(make_batch(dist.get_rank(), dist.get_world_size()))
    loss.backward()
    after = sharded_tables(model)
    dense = {n: p for n, p in get_unwrapped_module(model).named_parameters() if n not in before}
    gradients = {name: whole(parameter.grad) for name, parameter in dense.items()}
    gradients |= {name: (before[name] - after[name]) / TABLES_LR for name in before}
    return gradients | {"loss": mean_over_ranks(loss)}


def sharded_tables(model: nn.Module) -> Gradients:
    """Every table that TorchRec has sharded, whole on rank 0, of no meaning on others."""
    tables = {name: t for name, t in model.state_dict().items() if isinstance(t, ShardedTensor)}
    values = {name: torch.empty(table.size()) for name, table in tables.items()}
    for name, table in tables.items():
        table.gather(0, out=values[name] if dist.get_rank() == 0 else None)
    return values


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss_and_every_gradient_are_those_of_one_process(two_ranks, parallel, precision):
    """In bf16 the seeds' gradient is rounded on each rank before it is summed: that is bf16's own error, twice."""
    expected = model_alone(precision)
    actual, _ = two_ranks.run(model_on_ranks, parallel, precision)
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    budgets = dict.fromkeys(expected, ULPS_FP32)
    if precision == "bf16":
        truth = model_alone("fp32")
        budgets = {name: KERNEL_BUDGET * relative_error(expected[name], truth[name]) for name in expected}
    assert all(errors[name] <= budgets[name] for name in expected), (errors, budgets)


def model_sharded(sharding_type: str) -> Gradients:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_distributed, "SHARDING_TYPES", [ShardingType(sharding_type)])
        return model_on_ranks("dmp", "mxfp8")


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_gradients_do_not_depend_on_how_tables_are_sharded(two_ranks, sharding_type):
    expected, (actual, _) = model_alone("mxfp8"), two_ranks.run(model_sharded, sharding_type)
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert max(errors.values()) <= ULPS_FP32, errors


def train(parallel: str, first: int, last: int, resume: Path | None = None, save: Path | None = None) -> list[float]:
    """Losses of steps first … last − 1, over all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    trainer = Trainer(make_model("mxfp8"), Layout(parallel, CPU), NUM_STEPS)
    if resume is not None and trainer.load(resume) != first:
        raise RuntimeError("the checkpoint is of another step")
    trainer.model.train()
    losses = [loss for loss, _, _ in trainer.run(make_batch(rank, num_ranks, step) for step in range(first, last))]
    if save is not None:
        trainer.save(save, last)
    return mean_over_ranks(torch.stack(losses)).tolist()


@pytest.mark.parametrize("parallel", PARALLEL)
def test_training_resumes_on_another_number_of_ranks(one_rank, two_ranks, parallel, tmp_path):
    """Weights, moments, learning rate: the steps after a checkpoint have the losses of a run without a break."""
    unbroken = train_on(two_ranks, parallel, 0, NUM_STEPS)
    for writer, reader in ((two_ranks, one_rank), (one_rank, two_ranks)):
        path = tmp_path / f"from {id(writer)}"
        losses = train_on(writer, parallel, 0, 2, None, path) + train_on(reader, parallel, 2, NUM_STEPS, path)
        assert relative_error(torch.tensor(losses), torch.tensor(unbroken)) <= ULPS_FP32, (losses, unbroken)
    assert unbroken[0] != unbroken[2]


def train_on(group, *arguments) -> list[float]:
    losses, *others = group.run(train, *arguments)
    assert all(other == losses for other in others)
    return losses


def test_a_checkpoint_of_sharded_tables_loads_into_the_plain_model(two_ranks, tmp_path):
    """For serving: no process group, no TorchRec sharding."""
    train_on(two_ranks, "fsdp2", 0, 2, None, tmp_path)
    model = TrainingModel(make_model("mxfp8"))
    before = [p.detach().clone() for p in model.parameters()]
    dcp.load({"model": model}, checkpoint_id=tmp_path)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    (expected,) = {losses[0] for losses in two_ranks.run(train, "fsdp2", 2, 3, tmp_path)}
    loss, _ = model(make_batch(0, 1, step=2))
    assert relative_error(loss, torch.tensor(expected)) <= ULPS_FP32


# ---- the module alone ------------------------------------------------------------------------------------------------

SIZES = {"embed_dim": 64, "num_heads": 2, "num_seeds": 5}
LENGTHS = ((5, 0, 65, 9), (33, 1, 0, 12))  # of two ranks' segments


def ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


def fsdp2(module: nn.Module, **policy: torch.dtype) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


def compiled(module: nn.Module) -> nn.Module:
    module.compile(fullgraph=True, backend="aot_eager")
    return module


def recomputed(module: nn.Module):
    return lambda events, offsets: checkpoint(module, events, offsets, use_reentrant=False)


VARIANTS = {
    "ddp": ddp,
    "ddp of compiled": lambda module: ddp(compiled(module)),
    "compiled ddp": lambda module: torch.compile(ddp(module), backend="aot_eager"),
    "recomputed ddp": lambda module: recomputed(ddp(module)),
    "fsdp2": fsdp2,
    "fsdp2 of compiled": lambda module: fsdp2(compiled(module)),
    "recomputed fsdp2": lambda module: recomputed(fsdp2(module)),
    "recomputed fsdp2 of compiled": lambda module: recomputed(fsdp2(compiled(module))),
    "fsdp2 of compiled and recomputed": lambda module: fsdp2(compiled(checkpoint_wrapper(module))),
}


def module_on_ranks(variant: str) -> Gradients:
    """Gradients of the mean over ranks; rank r has segments LENGTHS[r]."""
    torch._dynamo.reset()
    module = make_pma(value_projection=True, **SIZES)
    spread = VARIANTS[variant](module)
    events, offsets = make_jagged(LENGTHS[dist.get_rank()], 64, seed=dist.get_rank())
    pma.mark_dynamic(events, offsets)
    out = spread(events, offsets)
    out.backward(make_dout(out, seed=dist.get_rank()))
    return {name: whole(parameter.grad) for name, parameter in module.named_parameters()}


def module_alone() -> Gradients:
    module = make_pma(value_projection=True, **SIZES)
    parts = [make_jagged(lengths, 64, seed=rank) for rank, lengths in enumerate(LENGTHS)]
    outs = torch.cat([module(*part) for part in parts])  # only to draw their gradients
    douts = torch.cat([make_dout(out, seed=rank) for rank, out in enumerate(outs.chunk(2))])
    events, lengths = torch.cat([events for events, _ in parts]), torch.tensor([0, *LENGTHS[0], *LENGTHS[1]])
    module(events, lengths.cumsum(0)).backward(douts / 2)
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_module_in_every_wrapper_and_the_same_bits_again(two_ranks, variant):
    actual, other = two_ranks.run(module_on_ranks, variant)
    again, _ = two_ranks.run(module_on_ranks, variant)
    for name, gradient in module_alone().items():
        assert relative_error(actual[name], gradient) <= ULPS_FP32, name
        assert torch.equal(actual[name], other[name]) and torch.equal(actual[name], again[name]), name


def unusual_batches_and_dtypes() -> None:
    """A rank without events or segments takes part in every reduction, and gradients keep their parameters' dtypes."""
    for wrap in (ddp, fsdp2, lambda module: fsdp2(module, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
        for lengths in ((), (0, 0)):
            module = make_pma(value_projection=True, **SIZES)
            spread = wrap(module)
            events, offsets = make_jagged((5, 40) if dist.get_rank() == 0 else lengths, 64)
            spread(events, offsets).sum().backward()
            for name, parameter in module.named_parameters():
                gradient = whole(parameter.grad)
                assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name
                assert gradient.any(), name


def test_a_rank_without_events_and_mixed_precision(two_ranks):
    two_ranks.run(unusual_batches_and_dtypes)


def from_meta() -> Gradients:
    torch.manual_seed(0)
    module = fsdp2(pma.PMA(value_projection=True, device="meta", **SIZES))
    module.to_empty(device="cpu")
    for child in module.modules():
        child.reset_parameters()
    return {name: whole(parameter.detach()) for name, parameter in module.named_parameters()}


def test_a_module_is_sharded_before_it_has_memory(two_ranks):
    first, second = two_ranks.run(from_meta)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])
        if not name.endswith("norm.weight"):
            assert not torch.equal(*parameter[:4].chunk(2)) and not torch.equal(*parameter[-4:].chunk(2)), name
    assert (first["key_norm.weight"] == 1).all()
    halves = first["key_proj.weight"].chunk(2)  # of the two ranks
    assert not torch.equal(*halves) and all(0.1 < half.std() < 0.15 for half in halves)


class Pooled(nn.Module):
    """A table and a PMA that have no memory yet."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item", embedding_dim=64, num_embeddings=100, feature_names=["item"])
        self.embeddings = EmbeddingCollection([table], device=torch.device("meta"))
        self.pool = pma.PMA(device="meta", **SIZES)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        events = self.embeddings(features)["item"]
        return self.pool(events.values(), events.offsets())


def dmp_from_meta() -> Gradients:
    torch.manual_seed(dist.get_rank())
    model = DistributedModelParallel(Pooled(), device=CPU)
    model(KeyedJaggedTensor(["item"], torch.arange(10), lengths=torch.tensor([4, 6]))).sum().backward()
    return {name: parameter.detach() for name, parameter in model.module.pool.named_parameters()}


def test_torchrec_makes_the_parameters_of_a_module_on_meta(two_ranks):
    first, second = two_ranks.run(dmp_from_meta)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 0.015 < first["seed_embs"].std() < 0.025 and 0.1 < first["key_proj.weight"].std() < 0.15


def sharded_layers() -> str:
    module = make_pma(**SIZES)
    fsdp2(module.key_proj)
    with pytest.raises(pma.UnsupportedError) as error:
        module(*make_jagged((3,), 64))
    return str(error.value)


def test_layers_sharded_apart_are_refused_by_name(two_ranks):
    for message in two_ranks.run(sharded_layers):
        assert message.startswith("key_proj must be a whole tensor") and "fully_shard" in message
