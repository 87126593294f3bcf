"""One PMA for each key of a TorchRec feature dictionary."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from pma.jagged import to_keyed_tensor
from pma.modules.pma import PMA

if TYPE_CHECKING:
    from torchrec import JaggedTensor, KeyedTensor


class PMACollection(nn.Module):
    """Pool several jagged features of one batch, each with its own PMA.

    Args:
        pools: key → PMA, in the order that the output has.
    Raises:
        TypeError: a value that is not a PMA.    ValueError: no key at all.
    """

    def __init__(self, pools: Mapping[str, PMA]) -> None:
        super().__init__()
        if not pools:
            raise ValueError("pools must hold at least one key, got none")
        for key, pool in pools.items():
            if not isinstance(pool, PMA):
                raise TypeError(f"pools[{key!r}] must be a pma.PMA, got {type(pool).__name__}")
        self.keys = list(pools)
        self.pools = nn.ModuleDict(pools)

    def forward(self, features: "Mapping[str, JaggedTensor]") -> "KeyedTensor":
        """Pool every key of the collection.

        Args:
            features: key → JaggedTensor, as `torchrec.EmbeddingCollection` returns; other keys are ignored.
        Returns:
            KeyedTensor [B, Σ S·E], keys in the collection's order, length_per_key S·E.
        Raises:
            ValueError: a key of the collection is missing, or the keys differ in B.
        """
        missing = [key for key in self.keys if key not in features]
        if missing:
            raise ValueError(f"features must hold the keys {self.keys}, got {list(features)}, missing {missing}")
        pooled = [pool(features[key]).flatten(1) for key, pool in zip(self.keys, self.pools.values(), strict=True)]
        sizes = {key: p.shape[0] for key, p in zip(self.keys, pooled, strict=True)}
        torch._check(
            all(p.shape[0] == pooled[0].shape[0] for p in pooled),
            lambda: f"features must agree in their number of segments, got {sizes}",
        )
        return to_keyed_tensor(self.keys, pooled)
