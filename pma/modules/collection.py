"""One PMA for each key of a TorchRec feature dictionary."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.fx.experimental.symbolic_shapes import guard_or_false

from pma.jagged import to_keyed_tensor
from pma.modules.pma import PMA

if TYPE_CHECKING:
    from torchrec import JaggedTensor, KeyedTensor


class PMACollection(nn.Module):
    """Pool several jagged features of one batch, each with its own PMA.

    Args:
        pools: key → PMA, in the order that the output has.
    Raises:
        TypeError: not a mapping of str to PMA.    ValueError: no key at all, or keys that differ only in '.' and '_'.
    """

    def __init__(self, pools: Mapping[str, PMA]) -> None:
        super().__init__()
        if not isinstance(pools, Mapping):
            raise TypeError(f"pools must map keys to pma.PMA modules, got {type(pools).__name__}")
        if not pools:
            raise ValueError("pools must hold at least one key, got none")
        for key, pool in pools.items():
            if not isinstance(key, str):
                raise TypeError(f"keys of pools must be str, got {type(key).__name__} {key!r}")
            if not isinstance(pool, PMA):
                raise TypeError(f"pools[{key!r}] must be a pma.PMA, got {type(pool).__name__}")
        self.keys = list(pools)
        self.pools = nn.ModuleDict(dict(zip(_module_names(self.keys), pools.values(), strict=True)))

    def forward(self, features: "Mapping[str, JaggedTensor]") -> "KeyedTensor":
        """Pool every key of the collection.

        Args:
            features: key → JaggedTensor, as `torchrec.EmbeddingCollection` returns; other keys are ignored.
        Returns:
            KeyedTensor [B, Σ S·E], keys in the collection's order, length_per_key S·E.
        Raises:
            ValueError: a key of the collection is missing, or the keys differ in B.
        """
        if not isinstance(features, Mapping):
            raise TypeError(
                "features must map keys to JaggedTensors of embeddings, as EmbeddingCollection returns, "
                f"got {type(features).__name__}"
            )
        missing = [key for key in self.keys if key not in features]
        if missing:
            raise ValueError(f"features must hold the keys {self.keys}, got {list(features)}, missing {missing}")
        pooled = [pool(features[key]).flatten(1) for key, pool in zip(self.keys, self.pools.values(), strict=True)]
        for key, p in zip(self.keys, pooled, strict=True):
            if guard_or_false(p.shape[0] != pooled[0].shape[0]):
                raise ValueError(
                    f"features must agree in their number of segments, got {pooled[0].shape[0]} for "
                    f"{self.keys[0]!r} and {p.shape[0]} for {key!r}"
                )
        return to_keyed_tensor(self.keys, pooled)


def _module_names(keys: list[str]) -> list[str]:
    """Names that torch accepts for any feature name: "user.id" → "user_id_pool"; never a method of ModuleDict."""
    names = [f"{key.replace('.', '_')}_pool" for key in keys]
    if len(set(names)) < len(names):
        raise ValueError(f"keys of pools must differ in more than '.' and '_', got {keys}")
    return names
