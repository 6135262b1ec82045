"""Rows that are nowhere yet, of a table that was made with device="meta"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Final, NoReturn

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import TableError
from hotbed.table.lookups import Call, Lookups, TiersOfTable
from hotbed.table.place import MovedTable, Place
from hotbed.table.place_factory import PlaceFactory, make_core
from hotbed.table.records import Records
from hotbed.tables import Table

__all__ = ["OnMeta", "on_meta"]


def on_meta(
    spec: Table,
    key: int,
    tiers: TiersOfTable | None = None,
    budget: _core.MemoryBudget | None = None,
) -> OnMeta:
    """A `PlaceFactory`. `tiers`: in which they will lie."""
    made = OnMeta(make_core(spec, key, elsewhere=True), spec, budget)
    made.tiers = tiers
    return made


class MetaLookups(Lookups):
    """Tables that have no rows yet."""

    where = "nowhere yet"

    def resolve(self, call: Call) -> NoReturn:
        _refuse(call.live[0].name)


_ON_META: Final = MetaLookups()


def _refuse(name: str) -> NoReturn:
    raise TableError(
        f'Table {name!r} was made with device="meta" and has no rows. hotbed.distribute(model) gives each '
        "rank its part of them."
    )


class OnMeta(Place):
    """All rows are their first values, and take no memory."""

    rows_move = True

    def __init__(
        self, core: _core.Table, spec: Table, budget: _core.MemoryBudget | None = None
    ) -> None:
        super().__init__(core, spec, _ON_META, budget)

    def _refuse(self) -> NoReturn:
        _refuse(self.core.name)

    def read(self, ids: Tensor) -> Tensor:
        self._refuse()

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        return iter(())

    def ids(self) -> Tensor:
        self._refuse()

    def contains(self, ids: Tensor) -> Tensor:
        self._refuse()

    def write(self, records: Records) -> None:
        self._refuse()

    def erase(self, ids: Tensor) -> int:
        self._refuse()

    def forget(self) -> None:
        """Do nothing: all rows are their first values."""

    def memory(self) -> dict[str, int]:
        return dict.fromkeys(("rows", "weights", "states", "index", "total"), 0)

    def reset_states(self, rule: _core.TableRule, firsts: Sequence[float]) -> None:
        self._refuse()

    def make_states(self, rule: _core.TableRule | None) -> None:
        if rule is not None:
            self._refuse()

    def give_up(self, live: MovedTable) -> None:
        """There are none."""

    def for_copy(
        self, memo: dict[int, object] | None
    ) -> tuple[PlaceFactory, Callable[[MovedTable], None] | None]:
        return on_meta, None

    def refuse_device(self, device: torch.device, by_kernels: ModuleType) -> None:
        self._refuse()

    def move_to_device(
        self, live: MovedTable, device: torch.device, by_kernels: ModuleType
    ) -> None:
        self._refuse()
