"""A live table: the core's planes, and the handle parameter through which torch sees them.

The handle is what ``model.parameters()`` yields and what carries the gradient: a sparse COO tensor
over slots, (slots (1, n), values (n, dim)). The handle of a static table aliases the weight plane,
so it can be read, printed and initialised like any parameter. The handle of a dynamic table has the
table's dim and more rows than can be, without memory of its own; reading or writing it raises.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hotbed import _core
from hotbed.arrays import id_tensor, real_tensor
from hotbed.copies import copied, pickled
from hotbed.errors import HotbedError, IdError, InputError, TableError
from hotbed.gradients import plain_access
from hotbed.holds import alone, reading
from hotbed.parameters import Handle
from hotbed.placement import Placed
from hotbed.resolve.tiers import Tiers
from hotbed.tables import COMBINERS, Table

__all__ = ["CORE_DTYPES", "LiveTable", "live_table", "live_tables"]

CORE_DTYPES = {
    torch.float32: _core.DType.f32,
    torch.float64: _core.DType.f64,
    torch.float16: _core.DType.f16,
    torch.bfloat16: _core.DType.bf16,
}

_ROWS_AT_ONCE = 1 << 20

_CPU = torch.device("cpu")

# A float32 gradient of a half-precision parameter.
GRADIENTS_OF_OTHER_DTYPE = hasattr(torch.Tensor, "grad_dtype")


_live_tables: weakref.WeakSet[LiveTable] = weakref.WeakSet()
_of_live_tables = threading.Lock()


class LiveTable(Placed):
    """One table with its memory. Made by the modules; users meet it through them.

    Attributes:
        spec: the description it was made from.
        compute_dtype: of gradients and vectors.
        combiner: the core's number of spec.combiner.
        key: 64-bit table key, the seed of first values and of stochastic rounding.
        core: the compiled table.
        aliased: whether the handle aliases the weight plane.
        tiers: where its rows lie, or None: all in the memory that computes.
        budget: of the host's memory, where there are no tiers; None: all of it.
        address: of the handle's data, unless the user replaced them.
        shape: of the handle.
        generation: how often the rows were forgotten; slots of an earlier one mean nothing.
        optimizer: the Hotbed optimizer that drives the table, or None (a weak reference call).
        complaint: set where another optimizer stepped past a gradient of this table; the next
            training forward raises it.
        rule: the core's hold of the optimizer whose states the table has, or None.
        fused_update: set by an optimizer with ``fused=True``: steps the table in backward, which then
            leaves no gradient.
        device_rows: what keeps the rows where they lie on a device; None: the core does.
    """

    def __init__(
        self,
        spec: Table,
        key: int,
        *,
        requires_grad: bool = True,
        tiers: Tiers | None = None,
        device: torch.device | None = None,
        budget: _core.MemoryBudget | None = None,
    ) -> None:
        """`device`: where its rows are made, if it is static and in no tiers; None: the host.
        `budget`: what a table in no tiers shares with others on the host; None: all memory."""
        there = device is not None and tiers is None and spec.rows is not None
        self.spec = spec
        self.key = key
        self.compute_dtype = spec.compute_dtype
        self.combiner = COMBINERS.index(spec.combiner or "none")
        self.core = _core.Table.make(
            spec.name,
            -1 if spec.rows is None else spec.rows,
            spec.dim,
            CORE_DTYPES[spec.dtype],
            *spec.distribution(),
            key,
            spec.padding_idx,
            tiers is not None,
            there,
            budget,
        )
        self.tiers = tiers
        self.budget = budget
        if tiers is not None:
            tiers.add(self)
        self.aliased = (tiers is None and spec.rows is not None) and (
            spec.dtype == spec.compute_dtype or GRADIENTS_OF_OTHER_DTYPE
        )
        self._requires_grad = requires_grad
        self._parameter: weakref.ref[Handle] | None = None
        self._rule: Any = None
        self.device_rows: Any = None
        if there:
            self.device_rows = self._rows_on(device)
        self.place = self._place()
        self._data = self._handle_data()
        self.address, self.shape = self._data.data_ptr(), self._data.shape
        self.generation = 0
        self._optimizer: weakref.ref[Any] | None = None
        self.complaint: HotbedError | None = None
        self.fused_update: Any = None
        with _of_live_tables:
            _live_tables.add(self)

    @property
    def parameter(self) -> Handle:
        """The handle. It keeps the table, not the table it: a model that goes takes its tables along."""
        handle = None if self._parameter is None else self._parameter()
        if handle is None:
            handle = self._handle_kind()(self._data, requires_grad=self._requires_grad)
            handle.hotbed_table = self
            if handle.dtype != self.compute_dtype:
                handle.grad_dtype = self.compute_dtype
            handle.waiting = self.nothing_waiting()
            self._parameter = weakref.ref(handle)
        return handle

    @property
    def rule(self) -> Any:
        return self._rule

    @rule.setter
    def rule(self, rule: Any) -> None:
        self._rule = rule
        self.parameter.__class__ = self._handle_kind()
        if self.device_rows is not None:
            self.device_rows.make_states(self)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def optimizer(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._optimizer = None if value is None else weakref.ref(value)

    def __len__(self) -> int:
        return int(self.core.size)

    def check_handle(self) -> None:
        """Adopts weights that were put in place of the handle's (``p.data = ...``).

        Raises:
            TableError: they do not fit; the table is as it was.
        """
        with plain_access():
            if self.parameter.data_ptr() == self.address:
                return
            data = self.parameter.data
            self.parameter.data = self._data
        plane = self._data
        if data.shape != plane.shape or data.dtype != plane.dtype:
            raise TableError(
                f"Table {self.name!r}: the data of its parameter were replaced by "
                f"{_name(data.dtype)} {tuple(data.shape)}; the table keeps "
                f"{_name(plane.dtype)} {tuple(plane.shape)}. Choose the row dtype with "
                "Table(dtype=...)."
            )
        self.assign(self.ids(), data)

    def ready(self) -> None:
        """What may change rows before somebody reads them; see `check_handle` and `settle`."""
        self.check_handle()
        self.settle()

    def settle(self) -> None:
        """Gives the table its place in the tiers, where it has none yet."""
        if self.tiers is not None:
            self.tiers.settle()

    def weights(self) -> Tensor:
        """(rows, dim) the weight plane itself, by slot; valid until the table grows."""
        assert self.tiers is None
        if self.device_rows is not None:
            plane: Tensor = self.device_rows.weights
            return plane
        return _core.weights(self.core)

    def ids(self) -> Tensor:
        """(rows,) int64 the id of each slot; of a dynamic table valid until it grows."""
        if self.spec.rows is not None:
            return torch.arange(self.spec.rows, device="cpu")
        if self.tiers is not None:
            return self.stored_ids()
        ids: Tensor = _core.ids(self.core)
        return ids

    def stored_ids(self) -> Tensor:
        """(n,) int64, rising: ids whose rows are stored. A tiered static table stores those that a
        batch or an assignment has touched; the others are their first values."""
        with reading([self]):
            return self.core.stored_ids()

    @property
    def follows(self) -> bool:
        """Whether rows that no batch touches follow a dense optimizer, and so may be behind it."""
        return bool(self.core.catches_up)

    def id_of(self, slot: int) -> int:
        """The id of the row in a slot."""
        return int(self.core.id_of(slot))

    def bring_up_to_date(self) -> None:
        """Writes what the rows of a static table missed while no batch touched them."""
        if not self.follows:
            return
        with alone([self]):
            for begin in range(0, len(self), _ROWS_AT_ONCE):
                slots = torch.arange(begin, min(begin + _ROWS_AT_ONCE, len(self)), device="cpu")
                self.rule.catch_up(slots.data_ptr(), len(slots))

    def current_weights(self) -> Tensor:
        """(rows, dim) weights by slot: the plane, or a copy where rows may be behind."""
        with reading([self]):
            if self.follows or self.tiers is not None:
                return self.lookup(self.ids())
            self.wait_for_device()
            return self.weights()

    def lookup(self, ids: Tensor) -> Tensor:
        """(n, dim) rows of the ids as they are; an id without a row reads its first value."""
        self.ready()
        wanted = ids.device if isinstance(ids, Tensor) else _CPU
        ids = self._check_ids(ids)
        with reading([self]):
            self.wait_for_device()
            if self.device_rows is not None and self.tiers is None:
                return self.device_rows.read(ids).to(wanted)  # type: ignore[no-any-return]
            rows: Tensor = _core.lookup(self.core, ids.data_ptr(), len(ids))
            return rows if self.device_rows is None else rows.to(wanted)

    def assign(self, ids: Tensor, values: Tensor) -> None:
        """Writes rows; ids of a dynamic table that have none get one. Of duplicates the last wins.

        Raises:
            IdError, InputError, TableError, OutOfMemory: with the table as it was.
        """
        self.ready()
        ids = self._check_ids(ids)
        values = real_tensor(f"Table {self.name!r}", "rows", values).detach()
        if values.shape != (len(ids), self.spec.dim):
            raise TableError(
                f"Table {self.name!r}: {len(ids)} ids need values of shape "
                f"({len(ids)}, {self.spec.dim}), got {tuple(values.shape)}."
            )
        with alone([self]):
            self.wait_for_device()
            if self.device_rows is not None and self.tiers is None:
                self.device_rows.write(ids, values.to(self.spec.dtype))
                return
            values = values.to(dtype=self.spec.dtype, device="cpu").contiguous()
            _core.assign(self.core, ids.data_ptr(), len(ids), values.data_ptr())

    def _check_ids(self, given: Any) -> Tensor:
        ids = id_tensor(f"Table {self.name!r}", given)
        if ids.dim() != 1:
            raise InputError(f"Table {self.name!r}: ids must be 1-D, got shape {tuple(ids.shape)}.")
        ids = ids.to(dtype=torch.int64, device="cpu").contiguous()
        if self.spec.rows is not None and len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.spec.rows:
                raise IdError(
                    f"Table {self.name!r}: id {low if low < 0 else high} is outside "
                    f"[0, {self.spec.rows}). Pass rows=None for open-ended ids."
                )
        return ids

    def rename(self, name: str) -> None:
        """What errors, and descriptions, call the table from now on. The key stays."""
        self.spec = dataclasses.replace(self.spec, name=name)
        self.core.rename(name)

    def draw_again(self, key: int) -> None:
        """Gives every row its first value under a new key; a dynamic table forgets its rows."""
        self.set_key(key)
        self.forget_rows()

    def forget_rows(self) -> None:
        """Every row is its first value again; a dynamic table is empty. If slots get other ids with
        it, the gradient goes too."""
        self.settle()
        with alone([self]):
            self._forget_rows()

    def _forget_rows(self) -> None:
        if self.spec.rows is None:
            self.generation += 1
            self.drop_gradient()
        if self.device_rows is not None and self.tiers is None:
            self.wait_for_device()
            self.device_rows.write_first_values(self)
            return
        if self.tiers is not None:
            self.tiers.close_window()
            self.tiers.release_spent()
        if self.spec.rows is None:
            self.core.clear()
        else:
            self.core.write_first_values()

    def set_key(self, key: int) -> None:
        """Rows that are stored stay as they are."""
        with alone([self]):
            if self.tiers is not None:
                self.tiers.close_window()  # it draws first values
            self.key = key
            self.core.set_key(key)

    def refuse_copy_beyond_memory(self, purpose: str) -> None:
        """Raises TableError where a copy of all rows and ids does not fit in memory."""
        needed = len(self) * (self.spec.dim * self.spec.dtype.itemsize + 16)
        free = _core.available_memory()
        if needed > free:
            raise TableError(
                f"Table {self.name!r}: {purpose} would copy {needed} bytes, and {free} are free; "
                "it is meant for tables that fit twice in memory. Read a part of the rows with lookup(ids)."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveTable:
        """A second table with the same rows and key, without optimizer or gradient."""
        second: LiveTable = copied(self, memo)
        return second

    def __reduce__(self) -> Any:
        return pickled(self)


def live_tables() -> Iterable[LiveTable]:
    """All tables there are."""
    with _of_live_tables:
        return list(_live_tables)


def live_table(parameter: Any) -> LiveTable | None:
    """The table behind a handle, or None for an ordinary parameter."""
    return getattr(parameter, "hotbed_table", None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
