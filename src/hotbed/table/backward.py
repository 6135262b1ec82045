"""Gradients that a backward gives to the handles of a batch's tables, or updates that it makes at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor
from torch.autograd.graph import Node

from hotbed import _core
from hotbed.errors import HotbedError
from hotbed.table.gradients import GradientShare
from hotbed.table.handles import Handle
from hotbed.table.sparse_gradient import plain_access

__all__ = [
    "Changes",
    "Deferred",
    "FusedUpdate",
    "FusedUpdates",
    "ChangingPlace",
    "PendingGradient",
    "Update",
    "UpdatedTable",
    "leave",
]

Changes = Literal[
    "step", "fused", "catch up", "write", "states", "erase", "forget", "move", "handle"
]


class Deferred(Protocol):
    """An error that a device may find later."""

    def pop(self) -> HotbedError | None:
        """Return the error, the first time it is asked for; waits for the device."""


class FusedUpdate(Protocol):
    """Update of one table during backward, set by an optimizer with ``fused=True``."""

    @property
    def updates(self) -> FusedUpdates:
        """All of the optimizer."""

    def start(self) -> tuple[_core.TableRule, _core.Hyperparameters] | None:
        """Return the rule and the numbers to step with; None: the gradient is to be kept for the step."""

    def keep(self, share: GradientShare) -> None:
        """Keep the first gradient until the step."""

    def done(self) -> None:
        """Note that the table was updated."""

    def refuse(self, slot: int, element: int) -> HotbedError:
        """Return the error for a gradient that is not finite."""


class FusedUpdates(Protocol):
    """Updates during backward of all tables of an optimizer."""

    notice: Deferred | None


class ChangingPlace(Protocol):
    """A place that is called before its rows change."""

    writes: int
    """Times that values may have changed."""

    def changing(
        self,
        kind: Changes,
        *,
        ids: Callable[[], Tensor] | None = None,
        slots: Callable[[], Tensor] | None = None,
    ) -> None: ...


class UpdatedTable(Protocol):
    """A live table, as a backward sees it."""

    @property
    def parameter(self) -> Handle: ...
    @property
    def place(self) -> ChangingPlace: ...
    @property
    def fused_update(self) -> FusedUpdate | None: ...

    def refuse_half_loaded(self) -> None: ...


Update = tuple[int, FusedUpdate, _core.TableRule, _core.Hyperparameters]
"""Position of a table, its update, rule and numbers."""


class PendingGradient(Protocol):
    """Gradient of one backward for the tables of a batch, not yet summed by row."""

    def step(self, updates: Sequence[Update]) -> None:
        """Update tables at once."""

    def slots(self, table: int) -> Tensor:
        """Return the slots of the rows that `step` changes, (n,) int64 on the host, each once."""

    def shares(self, tables: Sequence[int]) -> Sequence[GradientShare]:
        """Return the rows of the tables at these positions, for `WaitingGradient.add`."""


def leave(
    left: PendingGradient, live: Sequence[UpdatedTable], nodes: Mapping[int, Node]
) -> list[Tensor | None]:
    """Give handles the gradients of a backward, and update tables of optimizers with ``fused=True``.

    Args:
        live: the tables.
        nodes: of the tables that want a gradient, by position, the node by which torch would add it
            to the handle's ``grad``.

    Returns:
        For each table what backward is to return: None where the handle, or an update, has taken it.
    """
    updates: list[Update] = []
    later: list[int] = []
    for t in nodes:
        update = live[t].fused_update
        if update is None or (start := update.start()) is None:
            later.append(t)
        else:
            updates.append((t, update, *start))
    if updates:
        for t, *_ in updates:
            live[t].refuse_half_loaded()
            live[t].place.changing("fused", slots=functools.partial(left.slots, t))
        left.step(updates)
        for _, update, _, _ in updates:
            update.done()
    grads: list[Tensor | None] = [None] * len(live)
    for t, share in zip(later, left.shares(later) if later else (), strict=True):
        table = live[t]
        if table.fused_update is not None:
            table.fused_update.keep(share)
            continue
        handle = table.parameter
        with plain_access():
            grads[t] = handle.waiting.add(handle, share, nodes[t])
    return grads
