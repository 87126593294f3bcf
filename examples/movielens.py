"""MovieLens-100K as next-item prediction: reading the ratings, splitting by time, cutting jagged batches."""

import csv
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

DATASET_FOLDER = "dataset_example/ml-100k"
NUM_RATINGS = 6  # ratings 1 to 5, 0 unused
NUM_RECENCIES = 16  # buckets of an event's distance from the end of its segment
KEYS = ["item", "rating", "recency", "candidate"]


@dataclass(frozen=True)
class Interactions:
    """All ratings, by user and then by time: user u owns rows user_offsets[u] to user_offsets[u + 1].

    items: [N] int64, counted from 0.        ratings: [N] int64, 1 to 5.
    user_offsets: [U + 1] int64.             titles: I names.
    """

    items: Tensor
    ratings: Tensor
    user_offsets: Tensor
    titles: list[str]

    @property
    def num_users(self) -> int:
        return self.user_offsets.numel() - 1

    @property
    def num_items(self) -> int:
        return len(self.titles)

    def seen(self, except_last: int = 0) -> Tensor:
        """[U, I] bool: did this user rate this item, in all but the last `except_last` interactions?"""
        lengths = self.user_offsets.diff()
        users = torch.arange(self.num_users).repeat_interleave(lengths)  # [N]
        from_end = self.user_offsets[users + 1] - torch.arange(users.numel())  # [N], 1 for a user's last row
        kept = from_end > except_last
        seen = torch.zeros(self.num_users, self.num_items, dtype=torch.bool)
        seen[users[kept], self.items[kept]] = True
        return seen


@dataclass(frozen=True)
class Batch(Pipelineable):
    """B questions "what comes next?": a segment of events each, and 1 + N candidates of which the first is right.

    features: keys item, rating and recency (the events, T values each) and candidate (B * (1 + N) values).
    labels: [B, 1 + N] float, 1 in column 0.
    """

    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.features.to(device, non_blocking), self.labels.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return Batch(self.features.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)


def load_movielens(max_users: int | None = None) -> Interactions:
    """Read MovieLens-100K from the files that the `recbole` wheel carries; keep the first `max_users` users."""
    folder = _dataset_folder()
    item_rows = _read_table(folder / "ml-100k.item")
    item_index = {row["item_id:token"]: index for index, row in enumerate(item_rows)}
    rows = _read_table(folder / "ml-100k.inter")
    columns = [
        torch.tensor([int(row["user_id:token"]) - 1 for row in rows]),
        torch.tensor([int(float(row["timestamp:float"])) for row in rows]),
        torch.tensor([item_index[row["item_id:token"]] for row in rows]),
        torch.tensor([int(float(row["rating:float"])) for row in rows]),
    ]
    by_time = columns[1].argsort(stable=True)
    order = by_time[columns[0][by_time].argsort(stable=True)]
    users, _, items, ratings = (column[order] for column in columns)
    lengths = users.bincount()[:max_users]
    user_offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    num_rows = int(user_offsets[-1])
    titles = [f"{row['movie_title:token_seq']} ({row['release_year:token']})" for row in item_rows]
    return Interactions(items[:num_rows], ratings[:num_rows], user_offsets, titles)


def _dataset_folder() -> Path:
    spec = importlib.util.find_spec("recbole")  # finds the package without importing it
    for parent in spec.submodule_search_locations or [] if spec else []:
        folder = Path(parent) / DATASET_FOLDER
        if (folder / "ml-100k.inter").is_file() and (folder / "ml-100k.item").is_file():
            return folder
    raise FileNotFoundError(
        "MovieLens-100K is read from the recbole wheel, which was not found; "
        "install it with: pip install --no-deps recbole==1.2.1"
    )


def _read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


class BatchMaker:
    """Cuts histories before a given interaction and draws the items that compete with it.

    Args:
        interactions: the ratings.
        known: [U, I] bool, items that are no negatives for a user.
        num_negatives: N, drawn uniformly without repeats.
        max_length: events kept of a history, the latest ones.
    """

    def __init__(self, interactions: Interactions, known: Tensor, num_negatives: int, max_length: int) -> None:
        self.interactions = interactions
        self.eligible = (~known).float()
        self.num_negatives = num_negatives
        self.max_length = max_length

    def make(self, users: Tensor, targets: Tensor, generator: torch.Generator) -> Batch:
        """Ask for the interactions at rows `targets` [B] of `users` [B], given what these users did before."""
        negatives = torch.multinomial(self.eligible[users], self.num_negatives, generator=generator)  # [B, N]
        candidates = torch.cat([self.interactions.items[targets, None], negatives], dim=1)  # [B, 1 + N]
        labels = torch.zeros(candidates.shape)
        labels[:, 0] = 1.0
        return Batch(self.features(users, targets, candidates), labels)

    def features(self, users: Tensor, targets: Tensor, candidates: Tensor) -> KeyedJaggedTensor:
        """Return what `users` [B] did before rows `targets` [B], with `candidates` [B, C] for what they do there."""
        offsets, rows = self._history_rows(users, targets)
        lengths = offsets.diff()
        from_end = offsets[1:].repeat_interleave(lengths) - torch.arange(rows.numel())  # 1 for the latest event
        events = (self.interactions.items[rows], self.interactions.ratings[rows], recency(from_end))  # [T] each
        return KeyedJaggedTensor(
            keys=KEYS,
            values=torch.cat([*events, candidates.flatten()]),
            lengths=torch.cat([lengths, lengths, lengths, torch.full_like(lengths, candidates.shape[1])]),
        )

    def _history_rows(self, users: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets [B + 1] and rows [T] of the histories, each the rows just before its target."""
        starts = torch.maximum(self.interactions.user_offsets[users], targets - self.max_length)
        lengths = targets - starts
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        rows = torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths)
        return offsets, rows


def recency(from_end: Tensor) -> Tensor:
    """Bucket distances from the end (1, 2, ...): two buckets an octave, [T] int64 below NUM_RECENCIES."""
    return (2 * from_end.float().log2()).long().clamp(max=NUM_RECENCIES - 1)


def training_targets(interactions: Interactions, per_user: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `per_user` training interactions of every user, shuffled: users and rows, [U * per_user] each.

    A user's first interaction has no history and the last two are held out.
    """
    first, last = interactions.user_offsets[:-1] + 1, interactions.user_offsets[1:] - 2
    uniform = torch.rand(interactions.num_users, per_user, generator=generator)
    targets = first[:, None] + (uniform * (last - first)[:, None]).long()
    users = torch.arange(interactions.num_users)[:, None].expand_as(targets)
    shuffle = torch.randperm(targets.numel(), generator=generator)
    return users.flatten()[shuffle], targets.flatten()[shuffle]
