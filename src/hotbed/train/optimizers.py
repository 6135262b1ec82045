"""The optimizers of `hotbed train`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hotbed.train.settings import OPTIMIZERS

__all__ = ["make_optimizer"]


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of that command-line name over all parameters of `model`."""
    dense = OPTIMIZERS[name].declared_rule().command_dense
    kind: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[name]
    return kind(model.parameters(), lr=lr, **({} if dense is None else {"dense": dense}))
