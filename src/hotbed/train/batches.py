"""Batches on their way to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hotbed.modules.owner import owners_of

__all__ = ["Batch", "Loss", "ids_of_tiers", "moved"]

Batch = Mapping[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def ids_of_tiers(model: nn.Module) -> frozenset[str]:
    """The features of tables in tiers."""
    return frozenset(
        feature
        for name, module in owners_of(model).items()
        if module.prefetcher is not None
        for feature in module.features_of(name)
    )


def moved(batch: Batch, device: torch.device | str | None, staying: frozenset[str]) -> Batch:
    """Return the batch on `device`, but for the features `staying`."""
    if device is None:
        return batch
    return {name: value if name in staying else _to(value, device) for name, value in batch.items()}


def _to(value: Tensor, device: torch.device | str) -> Tensor:
    return value.to(device, non_blocking=True) if hasattr(value, "to") else value
