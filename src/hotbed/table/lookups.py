"""How tables that lie alike are looked up in one call."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hotbed.errors import TableError
from hotbed.inputs.bags import Bags
from hotbed.table.alone import ALONE
from hotbed.table.records import Records
from hotbed.table.resolved import Resolved

__all__ = ["Call", "Lookups", "lookups_of"]


class Call(NamedTuple):
    """A batch that is to be looked up."""

    live: Sequence[Any]
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


class Lookups(abc.ABC):
    """Tables that lie alike, and can be looked up in one call.

    Two tables can serve one call if their places have the same `Lookups`, which is compared by
    identity. Every method that is given tables is given some of its own.

    Attributes:
        device: where vectors come out.
        tiers: the tiers below, or None (`hotbed.places.tiered.tiers.Tiers`).
        ranks: the processes that share the tables.
        is_immediate: True if a forward finds all rows allocated and no error deferred, so that it need not
            ask.
    """

    device = torch.device("cpu")
    tiers: Any = None
    ranks: Any = ALONE
    is_immediate = False

    @property
    def where(self) -> str:
        """Name for errors, such as "cpu"."""
        return str(self.device)

    # -- lookups ---------------------------------------------------------------------------------

    def allocate(self, live: Sequence[Any]) -> None:
        """Allocate rows that were waiting for the optimizer to fix their layout."""

    def are_allocated(self, live: Sequence[Any]) -> bool:
        """True if no table waits for its rows. Called while the tables are held."""
        return True

    def raise_deferred(
        self, live: Sequence[Any], *, training: bool = True, wait: bool = False
    ) -> None:
        """Raise deferred errors of earlier batches and steps of these tables, if any have arrived; with
        `wait`, all of them."""

    @abc.abstractmethod
    def resolve(self, call: Call) -> Resolved:
        """Check a batch and find the slots of its rows.

        Raises:
            IdError, InputError, OutOfMemory, StorageError: before anything has changed.
        """

    def make_batch(self, live: Sequence[Any], table_of: Sequence[int], bags: Sequence[Bags]) -> Any:
        """Return the core's batch, or an object with its methods, for look-ahead to announce and bring
        up. Only called where there are tiers."""
        raise NotImplementedError

    def without_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """For a ``with`` statement: lookups inside give vectors of the compute dtype."""
        return contextlib.nullcontext()

    # -- all rows --------------------------------------------------------------------------------

    def records(
        self, live: Sequence[Any], *, states: bool, current: bool
    ) -> Iterator[tuple[int, Records]]:
        """Stream all stored rows of these tables, as `hotbed.table.place.Place.records`, each with the
        position of its table. Rows that lie together are read in one pass."""
        for at, table in enumerate(live):
            for rows in table.place.records(states=states, current=current):
                yield at, rows

    def stats(self, live: Sequence[Any]) -> dict[str, float]:
        """Return counters; see `EmbeddingCollection.stats`."""
        return {"memory_bytes": float(sum(table.memory()["total"] for table in live))}

    def flush(self, live: Sequence[Any]) -> None:
        """Write to the disk what the tiers keep there."""

    def note_hottest(self, live: Sequence[Any]) -> None:
        """Write the most used ids into the folder of the SSD, for `hotbed inspect`."""


def lookups_of(live: Sequence[Any], names: Sequence[str] = ()) -> Lookups:
    """Return what these tables have in common.

    Args:
        names: what errors are to call them; default: their own names.

    Raises:
        TableError: they lie in different places, and cannot serve one call.
    """
    first: Lookups = live[0].place.lookups
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
