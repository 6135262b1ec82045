"""Stepping a table during backward (``fused=True``)."""

from __future__ import annotations

import weakref
from typing import Any

from hotbed.errors import NotFiniteError, OptimizerError
from hotbed.handles import LiveTable
from hotbed.optim.gradients import not_finite

__all__ = ["FusedUpdate"]


class FusedUpdate:
    """How backward steps a table at once (``fused=True``)."""

    def __init__(self, optimizer: Any, live: LiveTable, rule: Any, index: int) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._live, self._rule, self._index = live, rule, index
        self._waiting = OptimizerError(
            f"Table {live.name!r} is updated during backward (fused=True), so there must be one "
            "forward and one backward for each step(); a second one came first. Use fused=False to "
            "accumulate gradients."
        )

    def start(self) -> tuple[Any, Any]:
        """The rule and the numbers to step with.

        Raises:
            OptimizerError: a step() is missing, or the optimizer is gone or has lost the table.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise OptimizerError(
                f"Table {self._live.name!r} is updated during backward by an optimizer (fused=True) "
                "that is gone. Keep the optimizer, or make a new one."
            )
        optimizer.check_hold(self._live, self._rule)
        if self._live.complaint is self._waiting:
            raise self._waiting
        return self._rule, optimizer.numbers_of_step(self._index)

    def done(self) -> None:
        """The table was stepped: step() must come before the next forward."""
        self._live.complaint = self._waiting

    def refuse(self, slot: int, element: int) -> NotFiniteError:
        """The error for a gradient that is not finite."""
        return not_finite(self._live, slot, element, fused=True)
