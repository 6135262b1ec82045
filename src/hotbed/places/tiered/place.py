"""Rows in tiers: those in use in slots of the core's memory, the others below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import OptimizerError, TableError
from hotbed.places.core_backed import CoreBacked
from hotbed.places.tiered.tiers import Tiers
from hotbed.table.lookups import Lookups
from hotbed.table.place import MovedTable
from hotbed.table.place_factory import PlaceFactory, make_core
from hotbed.table.records import Records, rows_at_once
from hotbed.tables import Table

__all__ = ["Tiered", "in_tiers"]


def in_tiers(spec: Table, key: int, tiers: Tiers) -> Tiered:
    """A `PlaceFactory`."""
    return Tiered(make_core(spec, key, tiered=True), spec, tiers)


class Tiered(CoreBacked):
    """Tables of one storage share slots."""

    rows_move = True
    tiers: Tiers

    def __init__(self, core: _core.Table, spec: Table, lookups: Lookups) -> None:
        super().__init__(core, spec, lookups)

    def join(self, live: MovedTable) -> None:
        self.tiers.add(live)

    # -- lookups ---------------------------------------------------------------------------------

    def slots_of(self, grad: Tensor, sources: Sequence[object]) -> Tensor:
        if grad.is_sparse and grad._nnz() and not sources:
            raise OptimizerError(
                f"Table {self.core.name!r} lies in tiers and its gradient comes from no batch of it, so "
                "its rows may be anywhere. Use the vectors that forward returns."
            )
        return super().slots_of(grad, sources)

    # -- rows ------------------------------------------------------------------------------------

    def set_key(self, key: int) -> None:
        self.tiers.close_window()  # it draws first values
        super().set_key(key)

    def erase(self, ids: Tensor) -> int:
        self.tiers.close_window()
        self.tiers.release_spent()
        return super().erase(ids)

    def forget(self) -> None:
        self.tiers.close_window()
        self.tiers.release_spent()
        super().forget()

    def memory(self) -> dict[str, int]:
        rows = int(self.core.size)
        weights = rows * self.spec.dim * self.spec.dtype.itemsize
        states = rows * sum(self.core.state_widths()) * self.spec.compute_dtype.itemsize
        return {
            "rows": rows,
            "weights": weights,
            "states": states,
            "index": 0,
            "total": int(self.tiers.core.memory_bytes_of(self.core)),
        }

    # -- states ----------------------------------------------------------------------------------

    def reset_states(self, rule: _core.TableRule, firsts: Sequence[float]) -> None:
        widths, dtype = self.core.state_widths(), self.spec.compute_dtype
        for ids in self.core.stored_ids().split(rows_at_once(self.core)):  # type: ignore[no-untyped-call]
            states = [
                torch.full((len(ids), width), first, dtype=dtype, device="cpu")
                for width, first in zip(widths, firsts, strict=True)
            ]
            steps = torch.full_like(ids, rule.steps) if self.core.catches_up else None
            self.write(Records(ids, states=states, steps=steps))

    # -- moving ----------------------------------------------------------------------------------

    def refuse_to_share(self) -> None:
        if not self.core.unallocated:
            raise TableError(
                f"Table {self.core.name!r} has rows in tiers already, which stay in this process. Distribute "
                "the model first, then load rows into it."
            )

    def give_up(self, live: MovedTable) -> None:
        self.tiers.give_up(live)

    def for_copy(
        self, memo: dict[int, object] | None
    ) -> tuple[PlaceFactory, Callable[[MovedTable], None] | None]:
        raise TableError(
            f"Table {self.core.name!r}: a table with Storage(...) cannot be copied or pickled: its tiers "
            "are its own. Make a new collection and load the state_dict."
        )

    def refuse_device(self, device: torch.device, by_kernels: ModuleType) -> None:
        by_kernels.refuse_tiered(self.core, self.spec, self.tiers.storage, device)

    def move_to_device(
        self, live: MovedTable, device: torch.device, by_kernels: ModuleType
    ) -> None:
        """All tables of the storage go along."""
        self.tiers.move_to(*by_kernels.place_on(self.tiers, device))
