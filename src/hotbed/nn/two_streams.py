"""Gates of features and the fusion of two streams: the parts of FinalMLP.

Shapes: B samples, D columns, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed.errors import InputError, TableError
from hotbed.nn.mlp import MLP
from hotbed.nn.widths import check_counts, check_hidden

__all__ = ["BilinearFusion", "FeatureGate"]


class FeatureGate(nn.Module):
    """Multiply each column by a number between 0 and 2 that an MLP makes of a context: (B, D) → (B, D).

    The gate is ``2 · sigmoid(MLP(context))`` (Mao et al., arXiv:2304.00902, equation 4).

    Args:
        columns: D.
        context: columns of the context; 0: it is one learned vector, the same for all samples.
        hidden: widths of the MLP's hidden layers.

    Raises:
        TableError: a width is not positive.
    """

    def __init__(self, columns: int, context: int = 0, hidden: Sequence[int] = (64,)) -> None:
        super().__init__()
        check_counts("FeatureGate", columns=columns)
        check_hidden("FeatureGate", hidden)
        learned = hidden[0] if hidden else columns
        self.constant = None if context else nn.Parameter(torch.randn(1, learned))
        self.gate = MLP(context or learned, [*hidden, columns])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return (B, D).

        Args:
            x: (B, D).
            context: (B, context columns); None if the gate was made for a learned one.

        Raises:
            InputError: a context was given and not expected, or the other way round.
        """
        if (context is None) != (self.constant is not None):
            raise InputError("FeatureGate: pass a context exactly if it was made with context > 0.")
        gate: Tensor = 2 * torch.sigmoid(self.gate(self.constant if context is None else context))
        return x * gate


class BilinearFusion(nn.Module):
    """One number of two vectors, linear in each: (B, D_1), (B, D_2) → (B, 1).

    ``b + w_1 · x + w_2 · y + Σ_h x_h W_h y_h``, x_h and y_h being the h-th of H equal parts of x and y
    (arXiv:2304.00902, equations 8 and 9).

    Args:
        first, second: D_1 and D_2.
        heads: H, which divides both.

    ``bilinear`` is (H, D_1 / H, D_2 / H), first values Xavier normal.

    Raises:
        TableError: an argument is not positive, or the heads do not divide the columns.
    """

    def __init__(self, first: int, second: int, heads: int = 1) -> None:
        super().__init__()
        check_counts("BilinearFusion", first=first, second=second, heads=heads)
        if first % heads or second % heads:
            raise TableError(
                f"BilinearFusion: {heads} heads do not divide {first} and {second} columns. Choose another "
                "number."
            )
        self.heads = heads
        self.linear = nn.Linear(first + second, 1)
        self.bilinear = nn.Parameter(torch.empty(heads, first // heads, second // heads))
        for part in self.bilinear:
            nn.init.xavier_normal_(part)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return (B, 1) of (B, D_1) and (B, D_2)."""
        left = x.view(x.shape[0], self.heads, x.shape[1] // self.heads).transpose(0, 1)
        right = y.view(y.shape[0], self.heads, y.shape[1] // self.heads).transpose(0, 1)
        products = torch.bmm(left, self.bilinear) * right
        both: Tensor = self.linear(torch.cat([x, y], 1)) + products.sum((0, 2)).unsqueeze(1)
        return both
