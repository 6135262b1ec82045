"""`fused=True`: tables are updated during backward, and keep no gradient."""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

from hotbed import _core
from hotbed.errors import NotFiniteError, OptimizerError
from hotbed.places.host.step import not_finite
from hotbed.table.backward import Deferred
from hotbed.table.gradients import GradientShare
from hotbed.table.live import LiveTable

__all__ = ["FusedUpdates"]


class FusedOptimizer(Protocol):
    """A `hotbed.optim.TableOptimizer` with ``fused=True``."""

    def check_hold(self, live: LiveTable, rule: _core.TableRule) -> None: ...
    def numbers_of_step(self, index: int) -> _core.Hyperparameters: ...


class FirstGradient(NamedTuple):
    """Gradient of a table from the first backward."""

    live: LiveTable
    rule: _core.TableRule
    group: int
    share: GradientShare
    """What backward left of it."""


class FusedUpdates:
    """Updates that backward makes to the tables of one optimizer.

    Attributes:
        first: what the first backward left; None from the first step on. Only ``step`` shows that a
            GradScaler is at work, and that is too late for gradients that were applied, so the first
            ones wait for it.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.notice: Deferred | None = None  # of the last update on a device
        self._tables: list[LiveTable] = []
        self.first: list[FirstGradient] | None = []

    def attach(self, live: LiveTable, rule: _core.TableRule, index: int) -> None:
        """Lets backward update `live` with the numbers of group `index`.

        The table does not keep the optimizer alive: one that is gone updates nothing.
        """
        update = FusedUpdate(self, live, rule, index)
        live.fused_update = update
        self._tables.append(live)
        optimizer = self.optimizer()
        assert optimizer is not None

        def stop() -> None:
            if live.fused_update is update:
                live.fused_update, live.complaint = None, None

        weakref.finalize(optimizer, stop).atexit = False

    def raise_deferred(self) -> None:
        """Raise what a device has found out about the last update."""
        notice, self.notice = self.notice, None
        if notice is not None and (error := notice.pop()) is not None:
            raise error

    def stepped(self) -> None:
        """A step was taken: the next forward and backward may come."""
        self.first = None
        self._let_backward_come()

    def give_up(self) -> None:
        """The last backward gets no step."""
        if self.first is not None:
            self.first.clear()
        self._let_backward_come()

    def _let_backward_come(self) -> None:
        for live in self._tables:
            if live.fused_update is not None:
                live.complaint = None


class FusedUpdate:
    """How backward updates one table."""

    def __init__(
        self, updates: FusedUpdates, live: LiveTable, rule: _core.TableRule, index: int
    ) -> None:
        self.updates, self._live, self._rule, self._index = updates, live, rule, index
        self._waiting = OptimizerError(
            f"Table {live.name!r} is updated during backward (fused=True), so there must be one "
            "forward and one backward for each step(); a second one came first. Use fused=False to "
            "accumulate gradients."
        )

    def start(self) -> tuple[_core.TableRule, _core.Hyperparameters] | None:
        """The rule, and the numbers to step with; None: the gradient is to be kept for the step.

        Raises:
            OptimizerError: a step() is missing, or the optimizer has lost the table.
        """
        optimizer = self.updates.optimizer()
        assert optimizer is not None
        optimizer.check_hold(self._live, self._rule)
        self.updates.raise_deferred()
        if self._live.complaint is self._waiting:
            raise self._waiting
        if self.updates.first is not None:
            return None
        return self._rule, optimizer.numbers_of_step(self._index)

    def keep(self, share: GradientShare) -> None:
        """Takes the first gradient until the step."""
        assert self.updates.first is not None
        self.updates.first.append(FirstGradient(self._live, self._rule, self._index, share))
        self.done()

    def done(self) -> None:
        """The table was updated: step() must come before the next forward."""
        self._live.complaint = self._waiting

    def refuse(self, slot: int, element: int) -> NotFiniteError:
        """The error for a gradient that is not finite."""
        return not_finite(self._live, slot, element, fused=True)
