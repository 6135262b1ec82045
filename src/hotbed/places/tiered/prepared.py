"""A batch that look-ahead has read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hotbed.errors import InputError
from hotbed.inputs.bags import Bags
from hotbed.table.lookups import InputBatch, StoredTable, lookups_of

__all__ = ["Prepared"]


@dataclasses.dataclass(slots=True, eq=False)
class Prepared:
    """A batch that was read and grouped before its forward.

    A forward knows it by its ids: the core compares what it gets with what was grouped, so it does
    not matter what they lie in.
    """

    inputs: object
    live: Sequence[StoredTable]
    table_of: Sequence[int]
    names: Sequence[str]
    read: Callable[[object], list[Bags]]
    """Makes bags of inputs, once now and again to see whether the loader has changed them."""
    frozen: list[int] = dataclasses.field(init=False)
    bags: list[Bags] = dataclasses.field(init=False)
    """What the core reads after it has grouped: copies, which nobody else changes."""
    batch: InputBatch = dataclasses.field(init=False)
    """The core's."""
    waited_for: bool = dataclasses.field(default=False, init=False)
    """True if its rows were not yet resident when the loop asked for it."""

    def __post_init__(self) -> None:
        self.frozen = [t for t, table in enumerate(self.live) if not table.parameter.requires_grad]
        self.bags = [
            _copied(bag, t in self.frozen)
            for t, bag in zip(self.table_of, self.read(self.inputs), strict=True)
        ]
        self.batch = lookups_of(self.live).make_batch(self.live, self.table_of, self.bags)

    @property
    def ids(self) -> int:
        """Positions, of all features."""
        return sum(bag.ids.numel() for bag in self.bags)

    def serves(self, live: Sequence[StoredTable], batch: InputBatch, frozen: Sequence[int]) -> bool:
        """Whether it is what a forward asks for by `batch`, which need not have been checked."""
        same = self.live is live and self.frozen == frozen
        return same and bool(self.batch.first_difference(batch) < 0)

    def change(self, inputs: object) -> str | None:
        """Return the error message if the inputs of a batch have changed since they were read; else None."""
        try:
            bags = self.read(inputs)
            now = lookups_of(self.live).make_batch(self.live, self.table_of, bags)
            at = self.batch.first_difference(now)
            if at < 0:
                return None
            what = f"feature {self.names[at]!r}"
        except InputError as error:
            what = str(error).rstrip(".")
        return (
            f"A batch was changed after look-ahead had read it ({what}). A loader that fills the same "
            "tensors or containers again would train other batches than it gives: let it make new ones "
            "for each batch, or use lookahead(..., depth=0)."
        )


def _copied(bag: Bags, ids_too: bool) -> Bags:
    """With offsets of its own where they lie on the host, and ids if wanted."""
    if bag.offsets is not None and bag.offsets.device.type == "cpu":
        bag = bag._replace(offsets=bag.offsets.clone())
    return bag._replace(ids=bag.ids.clone()) if ids_too else bag
