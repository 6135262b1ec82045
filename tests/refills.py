"""How a loader may fill a tensor again: torch counts the first way only."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def by_torch(tensor: Tensor, values: Tensor) -> None:
    tensor.copy_(values)


def by_numpy(tensor: Tensor, values: Tensor) -> None:
    tensor.numpy()[:] = values.numpy()


def by_data(tensor: Tensor, values: Tensor) -> None:
    tensor.data.copy_(values)


FILLS: list[Callable[[Tensor, Tensor], None]] = [by_torch, by_numpy, by_data]
