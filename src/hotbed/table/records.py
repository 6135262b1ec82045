"""Rows on their way: out of a place, into another, to and from files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from hotbed import _core
from hotbed.tables import Table

__all__ = [
    "NO_ROWS",
    "Records",
    "RowsOfMoment",
    "gather_states",
    "gather_weights",
    "rows_at_once",
    "rows_of_widths",
]

_BYTES_AT_ONCE = 8 << 20


class Records(NamedTuple):
    """Some rows of a table. What is None is not there, or stays as it is where they are written."""

    ids: Tensor
    """(n,) int64, on the host."""
    weights: Tensor | None = None
    """(n, dim) of the table's dtype."""
    states: Sequence[Tensor] | None = None
    """(n, dim) or (n, 1) each, of the compute dtype, in the order of the optimizer's rule."""
    steps: Tensor | None = None
    """(n,) int64: of a table with ``untouched="exact"``, the step up to which each row is current; None:
    the last one."""


def rows_at_once(core: _core.Table) -> int:
    """So many rows that a chunk of them, with states, takes no more than some megabytes."""
    return rows_of_widths(int(core.dim), core.state_widths())


def rows_of_widths(dim: int, state_widths: Sequence[int]) -> int:
    """As `rows_at_once`."""
    record = 16 + 8 * (dim + sum(state_widths))
    return max(1, _BYTES_AT_ONCE // record)


class RowsOfMoment(Protocol):
    """All stored rows of some tables as they were at one moment, read while others change them."""

    @property
    def waited(self) -> float:
        """Seconds that changes have waited for memory."""

    def records(self, *, states: bool) -> Iterator[tuple[int, Records]]:
        """Stream the rows as they are stored, each with the position of its table; on any thread, once.

        Raises:
            StorageError: they were replaced as a whole meanwhile.
        """

    def stop(self) -> None:
        """Nobody wants the rest."""

    def end(self) -> None:
        """Have the tables forget it, while somebody has them alone."""


class _NoRows:
    waited = 0.0

    def records(self, *, states: bool) -> Iterator[tuple[int, Records]]:
        return iter(())

    def stop(self) -> None:
        pass

    def end(self) -> None:
        pass


NO_ROWS: Final[RowsOfMoment] = _NoRows()
"""Of no tables."""


class StoredRows(Protocol):
    """A place, as a source of rows."""

    @property
    def spec(self) -> Table: ...
    @property
    def core(self) -> _core.Table: ...

    def read(self, ids: Tensor) -> Tensor: ...
    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]: ...


def gather_weights(place: StoredRows, ids: Tensor) -> Tensor:
    """(n, dim) rows of a place as the last step has left them, by `ids`, which rise and are those of all
    stored rows at least. A row that is not stored reads its first value."""
    spec, rows = place.spec, rows_at_once(place.core)
    weights = torch.empty((len(ids), spec.dim), dtype=spec.dtype, device="cpu")
    stored = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
    for chunk in place.records(states=False):
        at = torch.searchsorted(ids, chunk.ids)
        stored[at] = True
        assert chunk.weights is not None
        weights[at] = chunk.weights
    absent = torch.nonzero(~stored).flatten()
    for begin in range(0, len(absent), rows):
        some = absent[begin : begin + rows]
        weights[some] = place.read(ids[some])
    return weights


def gather_states(place: StoredRows, ids: Tensor) -> list[Tensor]:
    """(n, width) of each state as of the last step, by `ids`, which are those of all stored rows, rising.
    (The states of others are their first values.)"""
    dtype = place.spec.compute_dtype
    states = [
        torch.empty((len(ids), width), dtype=dtype, device="cpu")
        for width in place.core.state_widths()
    ]
    for chunk in place.records():
        at = torch.searchsorted(ids, chunk.ids)
        stored = ids[at.clamp_(max=len(ids) - 1)] == chunk.ids if len(ids) else at < 0
        for state, some in zip(states, chunk.states or (), strict=True):
            state[at[stored]] = some[stored]
    return states
