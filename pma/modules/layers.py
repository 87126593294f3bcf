"""Parameter holders with the names of a conventional model: `RMSNorm` and `Projection`.

PMA fuses their mathematics into its operators; each is also usable alone, in plain PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension, weight 1 at the start."""

    def __init__(self, embed_dim: int, eps: float, *, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__(embed_dim, eps=eps, device=device, dtype=dtype)


class Projection(nn.Module):
    """x Wᵀ without bias, W [E, E] Xavier-uniform at the start."""

    def __init__(self, embed_dim: int, *, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(embed_dim, embed_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight again."""
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., E] → [..., E]."""
        return F.linear(x, self.weight)
