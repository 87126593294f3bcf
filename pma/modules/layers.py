"""The projection that PMA holds beside `torch.nn.RMSNorm`.

PMA fuses the mathematics of both into its operators; each is also usable alone, in plain PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
