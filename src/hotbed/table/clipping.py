"""Gradients as clipping sees them: a norm, and elements to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hotbed.table.handles import Handle
from hotbed.table.sparse_gradient import norm_of_rows

__all__ = ["ClippingCall", "DenseGradient", "Gradient", "RowGradient", "gradient_of"]


class ClippingCall(NamedTuple):
    """Call of clipping, alike in all processes that share tables."""

    function: str
    arguments: Mapping[str, object]
    dense: Sequence[Tensor]
    """Dense parameters that have a gradient."""


class Gradient(Protocol):
    """Gradient of one parameter."""

    device: torch.device

    def norm(self, norm_type: float) -> Tensor | None:
        """Over all elements; None where there are none."""

    def scale(self, factor: Tensor) -> None: ...

    def clamp(self, limit: float) -> None: ...


class RowGradient:
    """The rows of a table in the memory of this process, each once."""

    def __init__(self, rows: Tensor) -> None:
        self._rows, self.device = rows, rows.device

    def norm(self, norm_type: float) -> Tensor | None:
        return norm_of_rows(self._rows, norm_type) if self._rows.numel() else None

    def scale(self, factor: Tensor) -> None:
        self._rows.mul_(factor.to(device=self._rows.device, dtype=self._rows.dtype))

    def clamp(self, limit: float) -> None:
        self._rows.clamp_(-limit, limit)


class DenseGradient(RowGradient):
    """All elements of a parameter."""

    def norm(self, norm_type: float) -> Tensor | None:
        rows = self._rows
        return torch.linalg.vector_norm(rows, norm_type) if rows.numel() else None


def gradient_of(handle: Handle) -> Gradient | None:
    """The one that waits for a step of a table; None where there is none."""
    grad = handle.waiting.look(handle, each_once=True)
    if grad is None:
        return None
    return RowGradient(grad._values()) if grad.is_sparse else DenseGradient(grad)
