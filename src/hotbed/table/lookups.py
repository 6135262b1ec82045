"""How tables that lie alike are looked up in one call."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from hotbed.errors import TableError
from hotbed.inputs.bags import Bags
from hotbed.storage import Storage
from hotbed.table.alone import ALONE, Processes
from hotbed.table.backward import ChangingPlace
from hotbed.table.gradients import WaitingGradient
from hotbed.table.locks import reading
from hotbed.table.prefetch import BatchAhead, Prefetcher, ReadsBags
from hotbed.table.records import Records, RowsOfMoment
from hotbed.table.resolved import PooledTable, Resolved

__all__ = [
    "Call",
    "CallAhead",
    "InputBatch",
    "TiersOfTable",
    "Lookups",
    "PlaceOfTable",
    "StoredTable",
    "changed_records_of",
    "lookups_of",
    "records_of",
    "snapshot_of",
]


class TiersOfTable(Protocol):
    """The tiers that rows lie in, or will lie in: `hotbed.places.tiered.tiers.Tiers`."""

    @property
    def storage(self) -> Storage: ...


class PlaceOfTable(ChangingPlace, Protocol):
    """A `hotbed.table.place.Place`, as those who work on several tables see it."""

    @property
    def lookups(self) -> Lookups: ...
    @property
    def tiers(self) -> TiersOfTable | None: ...

    def slots_of(self, grad: Tensor, sources: Sequence[object]) -> Tensor: ...
    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]: ...


class StoredTable(PooledTable, Protocol):
    """A `hotbed.table.live.LiveTable`, as its place, lookups and steps see it."""

    @property
    def combiner(self) -> int: ...
    @property
    def place(self) -> PlaceOfTable: ...
    @property
    def waiting(self) -> WaitingGradient: ...
    @property
    def has_gradient(self) -> bool: ...
    @property
    def follows(self) -> bool: ...
    @property
    def failed_load(self) -> str: ...
    @property
    def optimizer(self) -> Optimizer | None: ...

    def id_of(self, slot: int) -> int: ...
    def memory(self) -> dict[str, int]: ...
    def raise_deferred(self) -> None: ...


T = TypeVar("T", bound=StoredTable)


class InputBatch(Protocol):
    """The core's batch, or one that stands for it: inputs that are read, for look-ahead to announce and
    bring up, and for a forward."""

    def check(self) -> tuple[int, int, int, int, int]: ...
    def resolve(self, insert: bool, transpose: bool, frozen: Sequence[int]) -> None: ...
    def first_difference(self, now: Self) -> int: ...
    def use_weights_of(self, now: Self) -> None: ...
    def group(self, frozen: Sequence[int], /) -> None: ...
    def announce(self) -> None: ...
    def admit(self) -> bool: ...


class Call(NamedTuple):
    """A batch that is to be looked up."""

    live: Sequence[StoredTable]
    """The tables."""
    table_of: Sequence[int]
    """For each feature, the position of its table."""
    names: Sequence[str]
    """Names of the features, for errors."""
    bags: Sequence[Bags]
    """The features' inputs."""
    frozen: Sequence[int]
    """Positions of tables whose parameter requires no gradient; they take no new rows."""
    training: bool
    """True if ids that a dynamic table has not met get rows."""


class CallAhead(NamedTuple):
    """A lookup that look-ahead reads before its forward: tables and features as of `Call`."""

    inputs: object
    """What forward takes."""
    live: Sequence[StoredTable]
    table_of: Sequence[int]
    names: Sequence[str]
    read: ReadsBags
    """Called now, and again to see whether the loader has changed the inputs."""


class PlaceInLog(NamedTuple):
    """Where a row log has the rows of a table."""

    store: int
    number: int
    rows: int


class Lookups(abc.ABC):
    """Tables that lie alike, and can be looked up in one call.

    Two tables can serve one call if their places have the same `Lookups`, which is compared by
    identity. Every method that is given tables is given some of its own.

    Attributes:
        device: where vectors come out.
        ranks: the processes that share the tables.
        is_immediate: True if a forward finds all rows allocated and no error deferred, so that it need not
            ask.
    """

    device = torch.device("cpu")
    ranks: Processes = ALONE
    is_immediate = False

    @property
    def tiers(self) -> TiersOfTable | None:
        """The tiers below, or None."""
        return None

    @property
    def prefetcher(self) -> Prefetcher | None:
        """Return the prefetcher of rows of later batches; None: they lie where they are computed."""
        return None

    @property
    def where(self) -> str:
        """Name for errors, such as "cpu"."""
        return str(self.device)

    # -- lookups ---------------------------------------------------------------------------------

    def allocate(self, live: Sequence[StoredTable]) -> None:
        """Allocate rows that were waiting for the optimizer to fix their layout."""

    def are_allocated(self, live: Sequence[StoredTable]) -> bool:
        """True if no table waits for its rows. Called while the tables are held."""
        return True

    def raise_deferred(
        self, live: Sequence[StoredTable], *, training: bool = True, wait: bool = False
    ) -> None:
        """Raise deferred errors of earlier batches and steps of these tables, if any have arrived; with
        `wait`, all of them."""

    @abc.abstractmethod
    def resolve(self, call: Call) -> Resolved:
        """Check a batch and find the slots of its rows.

        Raises:
            IdError, InputError, OutOfMemory, StorageError: before anything has changed.
        """

    def make_batch(
        self, live: Sequence[StoredTable], table_of: Sequence[int], bags: Sequence[Bags]
    ) -> InputBatch:
        """Return a batch over inputs. Only called where there is a prefetcher."""
        raise NotImplementedError

    def prepare(self, call: CallAhead) -> BatchAhead:
        """Read a batch before its forward. Changes nothing.

        Raises:
            TableError: there is no prefetcher.
        """
        raise TableError(
            "prepare() reads a batch whose rows a tier brings up before its forward; table "
            f"{call.live[0].spec.name!r} has no tiers. Call forward alone, or pass "
            "storage=hotbed.Storage(...) with device= or ssd=."
        )

    def without_autocast(self) -> contextlib.AbstractContextManager[object]:
        """For a ``with`` statement: lookups inside give vectors of the compute dtype."""
        return contextlib.nullcontext()

    # -- all rows --------------------------------------------------------------------------------

    def records(
        self, live: Sequence[StoredTable], *, states: bool, current: bool
    ) -> Iterator[tuple[int, Records]]:
        """Stream all stored rows of these tables, as `hotbed.table.place.Place.records`, each with the
        position of its table. Rows that lie together are read in one pass."""
        for at, table in enumerate(live):
            for rows in table.place.records(states=states, current=current):
                yield at, rows

    def changed_records(
        self, live: Sequence[StoredTable], since: Sequence[int], *, states: bool
    ) -> Iterator[tuple[int, Records]]:
        """Stream the rows, as they are stored, that have changed since marks of the core that it knows, one
        for each table."""
        raise NotImplementedError(
            f"{type(self).__name__} has no table of which the core knows marks"
        )

    def snapshot(
        self, live: Sequence[StoredTable], since: Sequence[int], *, memory: int
    ) -> RowsOfMoment | None:
        """Return the rows of tables, of which the first is one of these, as they are now, to be read while
        others change them. Called while the tables are held. None: some of them can be read only while nobody
        changes them.

        Args:
            since: for each table a mark of the core after which rows have changed that are wanted; 0: all.
            memory: bytes of rows that were changed and not read yet; beyond that, a change waits.
        """
        return None

    def link(self, live: Sequence[StoredTable], folder: str) -> list[PlaceInLog] | None:
        """Write the rows of these tables to the SSD, and hard-link its files into a folder that is not there
        yet. Returns where the rows of each table are in them; None: they lie on no SSD. Called while the
        tables are held.

        Raises:
            StorageError: they cannot be written or linked; some may be there.
        """
        return None

    def adopt(
        self, live: Sequence[StoredTable], folder: str, places: Sequence[tuple[int, int]]
    ) -> list[int] | None:
        """Have these tables, whose rows are all first values, go on from the files in such a folder. Returns
        how many rows each has; None: they are not all that lie together, or lie otherwise than there. Called
        by who has the tables alone.

        Args:
            places: (store, number) of each there.

        Raises:
            StorageError: a file is damaged, or cannot be linked.
        """
        return None

    def stats(self, live: Sequence[StoredTable]) -> dict[str, float]:
        """Return counters; see `EmbeddingCollection.stats`."""
        return {"memory_bytes": float(sum(table.memory()["total"] for table in live))}

    def flush(self, live: Sequence[StoredTable]) -> None:
        """Write to the disk what the tiers keep there."""

    def note_hottest(self, live: Sequence[StoredTable]) -> None:
        """Write the most used ids into the folder of the SSD, for `hotbed inspect`."""


def snapshot_of(tables: Mapping[T, int], *, memory: int) -> RowsOfMoment | None:
    """Return the rows of live tables as they are now; see `Lookups.snapshot`. None: some of them can be read
    only while nobody changes them. Called while the tables are held.

    Args:
        tables: with the core's mark of each after which rows have changed that are wanted, or 0.
    """
    for table in tables:
        table.raise_deferred()
    lookups = next(iter(tables)).place.lookups
    return lookups.snapshot(list(tables), list(tables.values()), memory=memory)


def lookups_of(live: Sequence[StoredTable], names: Sequence[str] = ()) -> Lookups:
    """Return what these tables have in common.

    Args:
        names: what errors are to call them; default: their own names.

    Raises:
        TableError: they lie in different places, and cannot serve one call.
    """
    first = live[0].place.lookups
    for at, table in enumerate(live):
        other = table.place.lookups
        if other is first:
            continue
        of = [names[n] if names else live[n].name for n in (0, at)]
        if first.tiers is not None and other.tiers is not None:
            raise TableError(
                f"Tables {of[0]!r} and {of[1]!r} have Storage of their own each, and one call cannot "
                "serve both. Make one EmbeddingCollection of them with one Storage, or give their "
                "modules one hotbed.Group."
            )
        raise TableError(
            f"Tables {of[0]!r} and {of[1]!r} of one module lie in different places: {first.where} and "
            f"{other.where}. Move the whole module, or leave one out of it."
        )
    return first


def records_of(
    tables: Sequence[T], *, states: bool = True, current: bool = True
) -> Iterator[tuple[T, Records]]:
    """All stored rows of live tables, chunk by chunk, as of one step; see
    `hotbed.table.place.Place.records`. Those that lie together are read in one pass."""
    groups: dict[Lookups, list[T]] = {}
    with reading(tables):
        for table in tables:
            table.raise_deferred()
            groups.setdefault(table.place.lookups, []).append(table)
        for lookups, group in groups.items():
            for at, rows in lookups.records(group, states=states, current=current):
                yield group[at], rows


def changed_records_of(
    since: Mapping[T, int], *, states: bool = True
) -> Iterator[tuple[T, Records]]:
    """Rows of live tables, as they are stored, that have changed since marks of the core that it knows;
    see `records_of`."""
    groups: dict[Lookups, list[T]] = {}
    with reading(since):
        for table in since:
            table.raise_deferred()
            groups.setdefault(table.place.lookups, []).append(table)
        for lookups, group in groups.items():
            marks = [since[table] for table in group]
            for at, rows in lookups.changed_records(group, marks, states=states):
                yield group[at], rows
