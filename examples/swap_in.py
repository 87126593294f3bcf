"""Swap PMA into a model that pools its embedded history by the mean. Two lines change, marked below."""

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import pma

WIDTH, SEEDS = 64, 4


class MeanPoolingModel(nn.Module):
    """Before: the mean of the history's embeddings, then a linear score."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item_table", embedding_dim=WIDTH, num_embeddings=1000, feature_names=["history"])
        self.embed = EmbeddingCollection(tables=[table])
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """features: key "history". → [B, 1]."""
        history = self.embed(features)["history"]
        sums = torch.segment_reduce(history.values(), "sum", offsets=history.offsets().long(), axis=0, initial=0.0)
        return self.score(sums / history.lengths().clamp(min=1)[:, None])


class AttentionPoolingModel(nn.Module):
    """After: seeds attend over the history."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item_table", embedding_dim=WIDTH, num_embeddings=1000, feature_names=["history"])
        self.embed = EmbeddingCollection(tables=[table])
        self.pool = pma.PMA(embed_dim=WIDTH, num_heads=2, num_seeds=SEEDS)  # new
        self.score = nn.Linear(SEEDS * WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """features: key "history". → [B, 1]."""
        history = self.embed(features)["history"]
        return self.score(self.pool(history).flatten(1))  # instead of the mean


if __name__ == "__main__":
    torch.manual_seed(0)
    batch = KeyedJaggedTensor.from_lengths_sync(
        keys=["history"], values=torch.randint(0, 1000, (60,)), lengths=torch.tensor([20, 0, 40])
    )
    for model in (MeanPoolingModel(), AttentionPoolingModel()):
        scores = model(batch)
        scores.square().mean().backward()
        print(type(model).__name__, scores.flatten().tolist())
