"""Experts that tasks share, mixed by a gate of each task: the middle of MMoE.

Shapes: B samples, D columns, E experts of width w, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed.nn.mlp import MLP
from hotbed.nn.widths import check_counts, check_layers

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(nn.Module):
    """Weighted sums of experts, a weighing for each task: (B, D) → T × (B, w).

    Task t gets ``Σ_e softmax(G_t x)_e f_e(x)``, with MLPs f_e that all tasks share (Ma et al., "Modeling Task
    Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD 2018, equations 6 and 7).

    Args:
        in_features: D.
        tasks: T.
        experts: E.
        layers: widths of an expert's layers, the last one w; ReLU follows all but the last.

    ``gates.weight`` is (T · E, D), without a bias.

    Raises:
        TableError: an argument is not positive.
    """

    def __init__(
        self, in_features: int, tasks: int, experts: int = 3, layers: Sequence[int] = (256, 128)
    ) -> None:
        super().__init__()
        check_counts("MixtureOfExperts", in_features=in_features, tasks=tasks, experts=experts)
        check_layers("MixtureOfExperts", layers)
        self.experts = nn.ModuleList(MLP(in_features, layers) for _ in range(experts))
        self.gates = nn.Linear(in_features, tasks * experts, bias=False)
        self.tasks = tasks

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return T tensors (B, w) of (B, D)."""
        seen = torch.stack([expert(x) for expert in self.experts], 1)  # (B, E, w)
        gates = self.gates(x).unflatten(1, (self.tasks, len(self.experts))).softmax(2)
        return torch.bmm(gates, seen).unbind(1)
