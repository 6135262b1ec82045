"""The host's part of a step: the core's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import NotFiniteError, OptimizerError
from hotbed.table.gradients import GradientRows, GradientShare
from hotbed.table.lookups import StoredTable
from hotbed.table.participant import SteppingOptimizer
from hotbed.table.sparse_gradient import stored_gradient

__all__ = ["NO_ROWS", "HostParticipant", "not_finite"]

NO_ROWS = GradientRows(torch.empty(0, dtype=torch.int64), torch.empty((0, 1)), True, True)
"""Of any table: a step all the same."""


_Entry = tuple[_core.TableRule, int, int, int, _core.Hyperparameters, bool, bool]
"""Rule, slots, rows and their count, numbers, distinct, finite."""


class HostParticipant:
    """`hotbed.table.participant.StepParticipant` of tables in the core's memory, stepped in one call."""

    includes_host = True

    def __init__(self, optimizer: SteppingOptimizer) -> None:
        self._optimizer = optimizer
        self._entries: list[_Entry] = []
        self._tables: list[StoredTable] = []
        self._held: list[GradientRows] = []  # alive until the core has read them
        self._views: list[tuple[int, int, bool]] = []
        self._dense: list[tuple[Tensor, int, int]] = []
        self._core: _core.Step | None = None

    def add_table(
        self,
        live: StoredTable,
        rule: _core.TableRule,
        hyper: _core.Hyperparameters,
        share: GradientShare | None = None,
    ) -> None:
        rows = rows_of(live) if share is None else share
        if rows is not None:
            assert isinstance(rows, GradientRows)
            self._optimizer.check_hold(live, rule)
            self.add_rows(live, rule, hyper, rows)

    def add_rows(
        self,
        live: StoredTable,
        rule: _core.TableRule,
        hyper: _core.Hyperparameters,
        rows: GradientRows,
    ) -> None:
        """A table with a gradient, of an optimizer that is known to hold it."""
        self._entries.append((rule, *rows.in_core, hyper, rows.distinct, rows.finite))
        self._tables.append(live)
        self._held.append(rows)

    def add_without_rows(
        self, stepped: Sequence[tuple[StoredTable, _core.TableRule, _core.Hyperparameters]]
    ) -> None:
        """The same of tables, with their rules and numbers, whose step counts without a row."""
        self._entries += [(rule, 0, 0, 0, hyper, True, True) for _, rule, hyper in stepped]
        self._tables += [live for live, _, _ in stepped]
        self._held += [NO_ROWS] * len(stepped)

    def add_dense(self, parameter: Tensor, grad: Tensor, index: int, position: int) -> None:
        if grad.is_sparse:
            grad = grad._values()
        kind = grad.dtype
        if kind in (torch.float32, torch.float64) and grad.is_contiguous() and grad.is_cpu:
            self._views.append((grad.data_ptr(), grad.numel(), kind == torch.float64))
            self._dense.append((parameter, index, position))
        elif not bool(torch.isfinite(grad).all()):
            raise NotFiniteError(
                f"{self._optimizer.name_of(parameter, index, position)} has a NaN or an infinity in its "
                "gradient; no row and no parameter was changed. Skip the batch, or look for the division "
                "or logarithm behind."
            )

    @property
    def idle(self) -> bool:
        return not self._entries and not self._views

    def decide(self, *, beside: bool) -> bool:
        self._core = _core.Step(self._entries, self._views)
        try:
            array, element, slot = self._core.decide()
        except IndexError as error:
            raise OptimizerError(
                f"A gradient names slot {error}, which no table has: a table was loaded or cleared "
                "between backward and step. Call zero_grad() after loading."
            ) from None
        if array < 0:
            return True
        if array < len(self._tables):
            raise not_finite(self._tables[array], slot, element)
        name = self._optimizer.name_of(*self._dense[array - len(self._tables)])
        raise NotFiniteError(
            f"{name} has a NaN or an infinity in its gradient (element "
            f"{element}); no row and no parameter was changed. Skip the batch, or look for the division "
            "or logarithm behind."
        )

    def apply(self) -> None:
        for live, rows in zip(self._tables, self._held, strict=True):
            live.place.changing("step", slots=functools.partial(_slots_of, rows))
        assert self._core is not None
        self._core.apply()

    def finishing(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


def _slots_of(rows: GradientRows) -> Tensor:
    return rows.slots


def rows_of(live: StoredTable) -> GradientRows | None:
    """The gradient of a table in the core's memory, as it is to be stepped; None where it has none.

    Raises:
        OptimizerError: it is none of a lookup, and the table needs one that is.
    """
    handle = live.parameter
    if len(handle.waiting.shares) == 1 and stored_gradient(handle) is None:
        share = handle.waiting.shares[0]
        assert isinstance(share, GradientRows)
        return share
    grad = handle.waiting.look(handle)
    if grad is None:
        return None
    slots = live.place.slots_of(grad, handle.waiting.sources_of(handle))
    values = grad._values() if grad.is_sparse else grad
    if values.dtype != live.spec.compute_dtype:
        values = values.to(live.spec.compute_dtype)
    return GradientRows(slots.contiguous(), values.contiguous())


def not_finite(
    live: StoredTable, slot: int, element: int, *, fused: bool = False
) -> NotFiniteError:
    """The error for element `element` of a table's gradient rows, which is in the row of `slot`."""
    unchanged = (
        "the table was not changed, other tables may have been (fused=True)"
        if fused
        else "no row and no parameter was changed"
    )
    column = live.spec.origin.column + element % live.spec.dim
    return NotFiniteError(
        f"Table {live.name!r}, id {live.id_of(slot)}, column {column}: the gradient is "
        f"NaN or infinite; {unchanged}. Skip the batch, or look for the division or logarithm behind."
    )
