"""Rows in the core's memory, all of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from hotbed import _core
from hotbed.places.core_backed import CoreBacked
from hotbed.places.host.batch import IN_MEMORY
from hotbed.table.place import MovedTable
from hotbed.table.place_factory import PlaceFactory, make_core
from hotbed.tables import Table

__all__ = ["Memory", "in_memory", "in_memory_again"]

# A float32 gradient of a half-precision parameter.
_GRADIENTS_OF_OTHER_DTYPE = hasattr(torch.Tensor, "grad_dtype")


def in_memory(spec: Table, key: int, budget: _core.MemoryBudget | None = None) -> Memory:
    """A `PlaceFactory`."""
    return Memory(make_core(spec, key, budget=budget), spec, budget)


def in_memory_again(
    budget: _core.MemoryBudget | None, memo: dict[int, object] | None
) -> PlaceFactory:
    """With a copy of the budget, where that is wanted."""
    return functools.partial(
        in_memory, budget=budget if memo is None else copy.deepcopy(budget, memo)
    )


class Memory(CoreBacked):
    """The slot of a static table's row is its id; a dynamic table has an index."""

    def __init__(
        self, core: _core.Table, spec: Table, budget: _core.MemoryBudget | None = None
    ) -> None:
        super().__init__(core, spec, IN_MEMORY, budget)

    @property
    def aliased(self) -> bool:
        dtypes_agree = self.spec.dtype == self.spec.compute_dtype
        return self.spec.rows is not None and (dtypes_agree or _GRADIENTS_OF_OTHER_DTYPE)

    def handle_data(self) -> Tensor:
        return self.weights() if self.aliased else super().handle_data()

    def weights(self) -> Tensor:
        return _core.weights(self.core)

    def ids(self) -> Tensor:
        """Return ids, of a dynamic table by slot; valid until rows come or go."""
        return _core.ids(self.core) if self.spec.rows is None else super().ids()

    def memory(self) -> dict[str, int]:
        rows = int(self.core.size)
        planes, index = int(self.core.plane_bytes), int(self.core.index_bytes)
        weights = rows * self.spec.dim * self.spec.dtype.itemsize
        return {
            "rows": rows,
            "weights": weights,
            "states": planes - weights,
            "index": index,
            "total": int(self.core.resident_bytes),
        }

    # -- states ----------------------------------------------------------------------------------

    def reset_states(self, rule: _core.TableRule, firsts: Sequence[float]) -> None:
        for k, first in enumerate(firsts):
            _core.state(self.core, k).fill_(first)

    # -- moving ----------------------------------------------------------------------------------

    def for_copy(
        self, memo: dict[int, object] | None
    ) -> tuple[PlaceFactory, Callable[[MovedTable], None] | None]:
        return in_memory_again(self.budget, memo), None

    def refuse_device(self, device: torch.device, by_kernels: ModuleType) -> None:
        by_kernels.refuse_whole(self.core, self.spec, device)

    def move_to_device(
        self, live: MovedTable, device: torch.device, by_kernels: ModuleType
    ) -> None:
        by_kernels.bring(live, device)
