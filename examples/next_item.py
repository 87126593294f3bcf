"""The next-item model of both MovieLens examples, what it learns from and how it is judged.

`train_movielens.py` trains it in one process, `train_distributed.py` on any number of GPUs.
"""

import math
from dataclasses import dataclass

import torch
from movielens import NUM_RATINGS, NUM_RECENCIES, Batch, BatchMaker, Interactions, load_movielens
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities.data import dim_zero_cat
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.metrics.ne import compute_ne, get_ne_states

import pma

PRECISIONS = ("mxfp8", "bf16", "fp32")
EMBED_DIM = 64
NUM_HEADS = 2
NUM_SEEDS = 4
DROPOUT = 0.1
MAX_LENGTH = 50  # latest events kept of a history
NUM_NEGATIVES = 4  # a positive, in training; held-out loss and NE are weighted to the same base rate
NUM_RIVALS = 99  # negatives of a held-out positive
TOP_K = 10
NE_EPS = 1e-12
RIVALS_SEED = 2024  # not --seed: every run is judged on the same rivals


class Pooler(nn.Module):
    """Events to a user vector, by PMA and a head on what its seeds have gathered."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.dropout = nn.Dropout(DROPOUT)
        self.pma = pma.PMA(EMBED_DIM, NUM_HEADS, NUM_SEEDS, precision=precision)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(NUM_SEEDS * EMBED_DIM, EMBED_DIM),
            nn.GELU(),
            nn.Dropout(DROPOUT),
            nn.Linear(EMBED_DIM, EMBED_DIM),
        )

    def forward(self, events: Tensor, offsets: Tensor) -> Tensor:
        """Pool `events` [T, E] of segments `offsets` [B + 1] into user vectors [B, E]."""
        return self.head(self.pma(self.dropout(events), offsets))  # [T, E] -> [B, S, E] -> [B, E]


class Scorer(nn.Module):
    """The dense part, everything behind the tables: a user vector, and its dot product with each candidate."""

    def __init__(self, num_items: int, precision: str) -> None:
        super().__init__()
        self.pooler = Pooler(precision)
        self.item_bias = nn.Embedding(num_items, 1)
        nn.init.constant_(self.item_bias.weight, -math.log(NUM_NEGATIVES))  # the logit of the base rate

    def forward(self, events: Tensor, offsets: Tensor, candidates: Tensor, items: Tensor) -> Tensor:
        """Score `items` [B * C], whose embeddings `candidates` [B * C, E] are. → logits [B, C]."""
        pma.mark_dynamic(events, offsets)
        users = self.pooler(events, offsets)  # [B, E]
        candidates = candidates.unflatten(0, (len(users), -1))  # [B, C, E]
        return torch.einsum("be,bce->bc", users, candidates) + self.item_bias(items).view(candidates.shape[:2])


class NextItemModel(nn.Module):
    """Scores candidate items for segments of past events; one item table serves events and candidates.

    `forward` is no more than TorchRec's train pipelines can trace. `tables_device="meta"` leaves the tables to them.
    """

    def __init__(self, num_items: int, precision: str, tables_device: str = "cpu") -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(
            [
                _table("item", num_items, ["item", "candidate"]),
                _table("rating", NUM_RATINGS, ["rating"]),
                _table("recency", NUM_RECENCIES, ["recency"]),
            ],
            device=torch.device(tables_device),
        )
        self.scorer = Scorer(num_items, precision)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B, C] of the C candidates that each of the B segments comes with."""
        embedded = self.embeddings(features)  # a JaggedTensor for every key
        events = embedded["item"].values() + embedded["rating"].values() + embedded["recency"].values()  # [T, E]
        candidates, items = embedded["candidate"].values(), features["candidate"].values()
        return self.scorer(events, embedded["item"].offsets(), candidates, items)


def _table(name: str, num_embeddings: int, feature_names: list[str]) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name, embedding_dim=EMBED_DIM, num_embeddings=num_embeddings, feature_names=feature_names
    )


@dataclass(frozen=True)
class Task:
    """What every run shares: the ratings, the maker of training batches, and two held-out batches."""

    interactions: Interactions
    training: BatchMaker
    validation: Batch
    test: Batch


def make_task(max_users: int | None = None, rank: int = 0, num_ranks: int = 1) -> Task:
    """Hold out every user's last interaction for the test and the one before for validation.

    A rank's held-out batches are of every `num_ranks`-th user.
    """
    interactions = load_movielens(max_users)
    training = BatchMaker(interactions, interactions.seen(except_last=2), NUM_NEGATIVES, MAX_LENGTH)
    held_out = BatchMaker(interactions, interactions.seen(), NUM_RIVALS, MAX_LENGTH)
    generator = torch.Generator().manual_seed(RIVALS_SEED + rank)
    users = torch.arange(rank, interactions.num_users, num_ranks)
    ends = interactions.user_offsets[users + 1]
    validation, test = (held_out.make(users, ends - back, generator) for back in (2, 1))
    return Task(interactions, training, validation, test)


@dataclass(frozen=True)
class Metrics:
    """Held-out quality: log-loss and NE at the base rate of training, AUC and hit rate among all rivals."""

    loss: float
    auc: float
    ne: float
    hit_rate: float


class Judge(Metric):
    """Gathers held-out logits [B, 1 + N], each positive with its rivals; `metrics` is over all ranks.

    Rivals are weighted down to NUM_NEGATIVES a positive, so that loss and NE keep the base rate of training and all
    rivals still count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.add_state("logits", default=[], dist_reduce_fx="cat")
        self.add_state("labels", default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.logits.append(logits)
        self.labels.append(labels)

    def compute(self) -> dict[str, Tensor]:
        logits, labels = dim_zero_cat(self.logits), dim_zero_cat(self.labels)
        positives, rivals = logits[:, :1], logits[:, 1:]
        weights = torch.where(labels == 1, 1.0, NUM_NEGATIVES / NUM_RIVALS)
        sums = get_ne_states(labels.flatten(), logits.sigmoid().flatten(), weights.flatten(), eta=NE_EPS)
        cross_entropy = sums.pop("cross_entropy_sum")  # in bits
        wins = (positives > rivals).sum(dim=1)  # [B]; a tie or a NaN wins nothing
        return {
            "loss": cross_entropy / sums["weighted_num_samples"] * math.log(2),
            "auc": binary_auroc(logits.flatten(), labels.flatten().long()),
            "ne": compute_ne(cross_entropy, **sums, eta=NE_EPS),
            "hit_rate": (wins > NUM_RIVALS - TOP_K).float().mean(),
        }

    def metrics(self) -> Metrics:
        return Metrics(**{name: value.item() for name, value in self.compute().items()})
