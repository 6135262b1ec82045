"""Batches that look-ahead has read, and those that wait for their forward."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from typing_extensions import Self

from hotbed.errors import InputError
from hotbed.inputs.bags import Bags
from hotbed.table.lookups import CallAhead, InputBatch, StoredTable, lookups_of

__all__ = ["Offered", "Offers", "Prepared", "ReadBatch"]


class Offered(Protocol):
    """A batch that waits for the forward that comes with its ids."""

    def serves(self, live: Sequence[StoredTable], batch: InputBatch, frozen: Sequence[int]) -> bool:
        """Return True if it is what a forward asks for by `batch`, which need not have been checked."""

    def changed(self) -> str | None:
        """Return the message for a batch that is no longer what was read; else None."""


T = TypeVar("T", bound=Offered)


class Offers(Generic[T]):
    """Batches that look-ahead has yielded and no forward has used."""

    def __init__(self) -> None:
        self.batches: list[T] = []
        self._said_changed = False

    def __len__(self) -> int:
        return len(self.batches)

    def append(self, batch: T) -> None:
        self.batches.append(batch)

    def clear(self) -> None:
        self.batches.clear()

    def pop(
        self, live: Sequence[StoredTable], batch: InputBatch, frozen: Sequence[int]
    ) -> T | None:
        """Return the one for the batch of a forward, or None."""
        for at, offered in enumerate(self.batches):
            if offered.serves(live, batch, frozen):
                return self.batches.pop(at)
        for offered in self.batches:
            if not self._said_changed and (change := offered.changed()):
                self._said_changed = True
                warnings.warn(f"{change} This forward uses what it was given.", stacklevel=2)
        return None


class ReadInputs(Protocol):
    """Inputs that are read, which can be checked and compared with others: the core's batch, or what stands
    for it."""

    def check(self) -> tuple[int, int, int, int, int]: ...
    def first_difference(self, now: Self) -> int: ...
    def group(self, frozen: Sequence[int], /) -> None: ...


B = TypeVar("B", bound=ReadInputs)


class ReadBatch(abc.ABC, Generic[B]):
    """`hotbed.table.prefetch.BatchAhead`, but for what is done with its rows.

    A forward knows it by its ids: the core compares what it gets with what was grouped, so it does
    not matter what they lie in.

    Attributes:
        bags: what the core reads after it has grouped: copies, which nobody else changes.
        batch: what the core has of them.
        frozen: positions of tables whose parameter requires no gradient.
    """

    def __init__(self, call: CallAhead, bags: Sequence[Bags]) -> None:
        """`bags`: what `call` reads."""
        self.inputs, self.live, self.table_of, self._names, self._read = call
        live, table_of = call.live, call.table_of
        self.frozen = [t for t, table in enumerate(live) if not table.parameter.requires_grad]
        self.bags = [
            bag.copied(ids=self._keeps_ids(t)) for t, bag in zip(table_of, bags, strict=True)
        ]
        self.batch = self._batch_of(self.bags)

    @abc.abstractmethod
    def _batch_of(self, bags: Sequence[Bags]) -> B:
        """Return what the core has of inputs that are read."""

    @abc.abstractmethod
    def _keeps_ids(self, table: int) -> bool:
        """Return True if the core reads ids of a table where they lie, after it has grouped the others."""

    @property
    def ids(self) -> int:
        return sum(bag.positions for bag in self.bags)

    def group(self) -> bool:
        if self.batch.check()[0]:
            return False
        self.batch.group(self.frozen)
        return True

    def serves(self, live: Sequence[StoredTable], batch: InputBatch, frozen: Sequence[int]) -> bool:
        same = self.live is live and self.frozen == frozen
        return same and bool(self.batch.first_difference(cast(B, batch)) < 0)

    def changed(self) -> str | None:
        return self.change(self.inputs)

    def change(self, inputs: object) -> str | None:
        try:
            bags = self._read(inputs)  # which the core reads where they lie
            at = self.batch.first_difference(self._batch_of(bags))
            if at < 0:
                return None
            what = f"feature {self._names[at]!r}"
        except InputError as error:
            what = str(error).rstrip(".")
        return (
            f"A batch was changed after look-ahead had read it ({what}). A loader that fills the same "
            "tensors or containers again would train other batches than it gives: let it make new ones "
            "for each batch, or use lookahead(..., depth=0)."
        )


class Prepared(ReadBatch[InputBatch]):
    """A batch of tables in tiers."""

    waited_for = False

    def __init__(self, offers: Offers[Any], call: CallAhead) -> None:
        """`offers`: where a forward finds it."""
        super().__init__(call, call.read(call.inputs))
        self._offers = offers

    def _batch_of(self, bags: Sequence[Bags]) -> InputBatch:
        return lookups_of(self.live).make_batch(self.live, self.table_of, bags)

    def _keeps_ids(self, table: int) -> bool:
        return table in self.frozen

    def announce(self) -> None:
        self.batch.announce()

    def admit(self) -> bool:
        return self.batch.admit()

    def offer(self, waited: bool) -> None:
        self.waited_for = waited
        self._offers.append(self)
