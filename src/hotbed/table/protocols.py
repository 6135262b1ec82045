"""Protocols of a place, one for each caller, with the defaults of most places."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import OptimizerError, TableError
from hotbed.table.alone import Processes
from hotbed.table.by_slot import OPEN_ROWS
from hotbed.table.clipping import ClippingCall, Gradient, gradient_of
from hotbed.table.gradients import WaitingGradient
from hotbed.table.handles import FollowingHandle, HalfLoadedHandle, Handle, OpenHandle
from hotbed.table.lookups import StoredTable
from hotbed.table.participant import StepParticipant, SteppingOptimizer
from hotbed.table.records import Records, gather_states, gather_weights
from hotbed.tables import Table

__all__ = [
    "HandleOfTable",
    "LocalShards",
    "RowAccess",
    "RowCopies",
    "StepState",
    "TableInPlace",
]


T = TypeVar("T")


class TableInPlace(abc.ABC):
    """Attributes that all of them have; see `hotbed.table.place.Place`."""

    core: _core.Table
    spec: Table
    device: torch.device
    ranks: Processes
    rows_move = False


class HandleOfTable(TableInPlace):
    """Data, class and gradients of the handle, by the place of the rows."""

    @property
    def aliased(self) -> bool:
        return False

    def handle_kind(self, follows: bool, half_loaded: bool) -> type[Handle]:
        """Return the class of the handle.

        Args:
            follows: rows that no batch touches may be behind the steps taken.
            half_loaded: rows are those of no checkpoint.
        """
        if not self.aliased:
            return OpenHandle
        if half_loaded:
            return HalfLoadedHandle
        return FollowingHandle if follows else Handle

    def handle_data(self) -> Tensor:
        """Return the data of the handle."""
        rows = OPEN_ROWS if self.spec.rows is None or self.rows_move else self.spec.rows
        nothing = torch.full((), float("nan"), dtype=self.spec.compute_dtype, device=self.device)
        return nothing.expand(rows, self.spec.dim)

    def nothing_waiting(self) -> WaitingGradient:
        """Return an empty store of gradients."""
        return WaitingGradient()

    def slots_of(self, grad: Tensor, sources: Sequence[object]) -> Tensor:
        """(n,) int64 slots of the rows of a gradient that autograd or the user has made.

        Args:
            sources: the batches that it comes from, as far as that is known.

        Raises:
            OptimizerError: its rows could be anywhere.
        """
        if grad.is_sparse:
            return grad._indices()[0]
        if self.spec.rows is None or self.rows_move:
            kind = "is dynamic" if self.spec.rows is None else "lies in tiers"
            raise OptimizerError(
                f"Table {self.core.name!r} {kind} and has a dense gradient: the loss used its parameter "
                "directly. Use the vectors that forward returns."
            )
        return torch.arange(self.spec.rows, device=self.device)


class RowAccess(TableInPlace):
    """Rows by id: read, written, erased, streamed."""

    def set_key(self, key: int) -> None:
        """First values come from another key; rows that are stored stay as they are."""
        self.core.set_key(key)

    def weights(self) -> Tensor:
        """(rows, dim) the plane itself, by slot; where all rows have slots that stay."""
        raise TableError(f"Table {self.core.name!r} has no plane of its own.")

    def ids(self) -> Tensor:
        """(rows,) int64, on the host: of a static table all, else those that are stored."""
        if self.spec.rows is not None:
            return torch.arange(self.spec.rows, device="cpu")
        return self.core.stored_ids()

    @abc.abstractmethod
    def read(self, ids: Tensor) -> Tensor:
        """(n, dim) rows, wherever they are at hand; an id without a row reads its first value."""

    @abc.abstractmethod
    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        """All rows that are stored, each once, in the order in which they lie, some megabytes at a time.
        A static table in tiers stores those that a batch or an assignment has touched; if steps have
        moved others too (``untouched="exact"``), they come last, where `current`.

        Rows must not change until it is exhausted or closed, and rows of tiers do not move: who calls
        holds the tables.

        Args:
            states: whether states come along.
            current: as the last step has left them; else as they are stored, with the steps up to which
                they are current (``untouched="exact"``).

        Raises:
            StorageError: rows cannot be read.
        """

    @abc.abstractmethod
    def write(self, records: Records) -> None:
        """Overwrites rows, and gives ids of a dynamic table that have none one. Of duplicates the last
        wins. Whole records (weights, and states if the table has some) are written without reading what
        they overwrite.

        Raises:
            OutOfMemory: nothing has changed.
            StorageError: of rows in tiers some may be written, each of them whole.
        """

    def assign(self, ids: Tensor, values: Tensor) -> None:
        """(n, dim) values into the rows of n ids; as `write`."""
        self.write(Records(ids, values))

    def contains(self, ids: Tensor) -> Tensor:
        """(n,) bool: which ids have a row. A static table has those of all ids in [0, rows)."""
        found = torch.empty(len(ids), dtype=torch.bool, device="cpu")
        self.core.contains(ids.data_ptr(), len(ids), found.data_ptr())
        return found

    def erase(self, ids: Tensor) -> int:
        """Forgets the rows of distinct ids, those that there are: how many. Other rows of a dynamic table may
        get other slots; those of a static one are as if no batch had had them."""
        return int(self.core.erase(ids.data_ptr(), len(ids)))

    @abc.abstractmethod
    def forget(self) -> None:
        """Every row is its first value again; a dynamic table is empty."""

    @abc.abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes by what they hold, wherever that lies; as ``total``, what is in memory."""

    def count(self) -> int:
        """Rows that there are."""
        return int(self.core.size)


class RowCopies(RowAccess):
    """Copies of all rows, for a ``state_dict``."""

    def refuse_copy_beyond_memory(self, purpose: str) -> None:
        """Raises TableError where a copy of all rows and ids does not fit in memory."""
        needed = int(self.core.size) * (self.spec.dim * self.spec.dtype.itemsize + 16)
        free = _core.available_memory()
        if needed > free:
            raise TableError(
                f"Table {self.core.name!r}: {purpose} would copy {needed} bytes, and {free} are free; "
                "it is meant for tables that fit twice in memory. Read a part of the rows with lookup(ids)."
            )

    def all_rows(self, *, everywhere: bool = True) -> tuple[Tensor, Tensor] | None:
        """A copy of all rows as the last step has left them: (n,) ids, rising, and weights (n, dim).

        Args:
            everywhere: whether each process that shares them gets it; else None comes back on some.
        """
        ids = self.ids()
        ids = ids.sort().values if self.spec.rows is None else ids
        return ids, gather_weights(self, ids)

    def all_states(self) -> tuple[Tensor, Sequence[Tensor]] | None:
        """A copy of all optimizer states: (n,) ids of stored rows, rising, and states in the order of the
        rule; None on some of the processes that share them.

        Raises:
            OptimizerError: it does not fit in memory.
        """
        ids = self.core.stored_ids()
        width = sum(self.core.state_widths()) * self.spec.compute_dtype.itemsize
        needed, free = len(ids) * (width + 16), _core.available_memory()
        if needed > free:
            raise OptimizerError(
                f"Table {self.core.name!r}: a state_dict would copy {needed} bytes of optimizer state and "
                f"{free} are free; it is meant for tables that fit twice in memory."
            )
        return ids, gather_states(self, ids)


class LocalShards(TableInPlace):
    """Which tables of this process a table is made of."""

    def tables_here(self, live: T) -> list[T]:
        """Tables of this process that its table, `live`, is made of."""
        return [live]

    def tables_to_save(self, live: T) -> list[T]:
        """Return those of them that this process saves, so that all processes together save each once."""
        return [live]

    def parts(self, live: T, ids: Tensor, rows: Tensor) -> Iterator[tuple[T, Tensor, Tensor]]:
        """Tables of this process that its table, `live`, is made of, with what belongs to each of (n,) ids
        and (n, dim) rows."""
        yield live, ids, rows

    def refuse_local_change(self, wanted: str) -> None:
        """Raises TableError where others have copies of its rows. `wanted`: what would change those here."""


class StepState(TableInPlace):
    """Optimizer states, and what a step asks."""

    def refuse_exact(self, optimizer: str) -> None:
        """Raises OptimizerError where rows that no batch touches cannot be brought up to date."""

    def refuse_rule(self, optimizer: str, options: _core.RuleOptions, *, fused: bool) -> None:
        """Raises OptimizerError where rows cannot be stepped by a rule, or not during backward."""

    def make_states(self, rule: _core.TableRule | None) -> None:
        """Makes the states of a rule that the core has taken, at their first values; None: there are
        none."""

    @abc.abstractmethod
    def reset_states(self, rule: _core.TableRule, firsts: Sequence[float]) -> None:
        """Gives all rows the first values of their states."""

    def restart(
        self, rule: _core.TableRule, steps: int, base: Sequence[float], last: _core.Hyperparameters
    ) -> None:
        """The rule has taken so many steps; see the core's."""
        rule.restart(steps, base, last)

    def make_participant(
        self, optimizer: SteppingOptimizer, tables: Sequence[StoredTable]
    ) -> StepParticipant:
        """Return the participant of an optimizer's tables in places of an equal ``stepped_with``; not for
        `ON_HOST`."""
        raise NotImplementedError

    def gradients_of(
        self, tables: Sequence[StoredTable], call: ClippingCall
    ) -> list[Gradient | None]:
        """For clipping: of tables in places of an equal `stepped_with`; None where there is none."""
        return [gradient_of(live.parameter) for live in tables]
