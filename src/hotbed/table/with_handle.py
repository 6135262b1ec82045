"""A table's place and its handle parameter, through which torch sees it.

The handle is what ``model.parameters()`` yields and what carries the gradient: a sparse COO tensor
over slots, (slots (1, n), values (n, dim)). Where a place has a plane whose slots are ids, the handle
aliases it, so it can be read, printed and initialised like any parameter. Else it has the table's dim
and more rows than can be, without memory of its own; reading or writing it raises.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotbed import _core
from hotbed.errors import HotbedError
from hotbed.table import checks
from hotbed.table.backward import FusedUpdate
from hotbed.table.gradients import WaitingGradient
from hotbed.table.handles import Handle
from hotbed.table.place import Place
from hotbed.table.place_factory import PlaceFactory
from hotbed.table.sparse_gradient import plain_access
from hotbed.tables import COMBINERS, Table

__all__ = ["TableGroup", "TableWithHandle", "live_tables", "unregister"]


class TableGroup(Protocol):
    """`hotbed.Group`, as its tables see it."""

    def add(self, table: TableWithHandle) -> None: ...


class _Rows(abc.ABC):
    """Rows as a live table shows them, which its handle and its place ask for."""

    @abc.abstractmethod
    def bring_up_to_date(self) -> None: ...
    @abc.abstractmethod
    def id_of(self, slot: int) -> int: ...
    @abc.abstractmethod
    def memory(self) -> dict[str, int]: ...
    @abc.abstractmethod
    def ids(self) -> Tensor: ...

    @abc.abstractmethod
    def assign(self, ids: Tensor, values: Tensor) -> None: ...


class TableWithHandle(_Rows):
    """One table with its memory. Made by the modules; users meet it through them.

    Attributes:
        spec: the description it was made from.
        compute_dtype: of gradients and vectors.
        combiner: the core's number of spec.combiner.
        group: the `hotbed.Group` of its module; None: it is a shard of another table.
        place: where its rows lie.
        core: the compiled table.
        address: of the handle's data, unless the user replaced them.
        shape: of the handle.
        generation: how often rows were forgotten, erased or moved; slots of an earlier one mean nothing.
        optimizer: the Hotbed optimizer that drives the table, or None (a weak reference call).
        complaint: set where another optimizer stepped past a gradient of this table; the next
            training forward raises it.
        failed_load: where hotbed.load failed after it had begun to change the model: how. Until a load
            succeeds, rows are neither looked up nor stepped, saved or copied.
        rule: the core's hold of the optimizer whose states the table has, or None.
        follows: whether rows that no batch touches follow a dense optimizer, and so may be behind it.
        fused_update: set by an optimizer with ``fused=True``: steps the table in backward, which then
            leaves no gradient.
    """

    def __init__(
        self,
        spec: Table,
        key: int,
        home: PlaceFactory,
        *,
        group: TableGroup | None = None,
        requires_grad: bool = True,
    ) -> None:
        """`home`: as `hotbed.places.moves.factory_for` gives it."""
        self.group = group
        self.spec = spec
        self.compute_dtype = spec.compute_dtype
        self.combiner = COMBINERS.index(spec.combiner or "none")
        self.place = home(spec, key)
        self.core = self.place.core
        self._requires_grad = requires_grad
        self._parameter: weakref.ref[Handle] | None = None
        self._rule: _core.TableRule | None = None
        self.follows = False
        self._data = self.place.handle_data()
        self.address, self.shape = self._data.data_ptr(), self._data.shape
        self.generation = 0
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._seen = 0  # of torch's count of changes to the handle
        self.complaint: HotbedError | None = None
        self.failed_load = ""
        self.fused_update: FusedUpdate | None = None
        with _lock:
            _tables.add(self)
        self.place.join(self)
        if group is not None:
            group.add(self)

    @property
    def parameter(self) -> Handle:
        """The handle. It keeps the table, not the table it: a model that goes takes its tables along."""
        handle = None if self._parameter is None else self._parameter()
        if handle is None:
            handle = self._handle_kind()(self._data, requires_grad=self._requires_grad)
            handle.hotbed_table = self
            if handle.dtype != self.compute_dtype:
                handle.grad_dtype = self.compute_dtype
            handle.waiting = self.place.nothing_waiting()
            self._parameter = weakref.ref(handle)
        return handle

    @property
    def rule(self) -> _core.TableRule | None:
        return self._rule

    @rule.setter
    def rule(self, rule: _core.TableRule | None) -> None:
        self._rule = rule
        self.place.rewrites += 1
        self.follows = rule is not None and bool(rule.exact)
        self.parameter.__class__ = self._handle_kind()
        self.place.make_states(rule)

    @property
    def held_rule(self) -> _core.TableRule:
        """`rule`, of a table that has the states of one."""
        assert self._rule is not None
        return self._rule

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def key(self) -> int:
        """64-bit table key, the seed of first values and of stochastic rounding."""
        return int(self.core.key)

    @property
    def device(self) -> torch.device:
        """Where its vectors come out."""
        return self.place.device

    @property
    def optimizer(self) -> Optimizer | None:
        return None if self._optimizer is None else self._optimizer()

    @optimizer.setter
    def optimizer(self, value: Optimizer | None) -> None:
        self._optimizer = None if value is None else weakref.ref(value)

    def __len__(self) -> int:
        return int(self.core.size)

    def check_handle(self) -> None:
        """Adopts weights that were put in place of the handle's (``p.data = ...``), and tells the place of
        what was written into it; see `note_writes`.

        Raises:
            TableError: they do not fit; the table is as it was.
            RuntimeError: this thread reads rows; the handle keeps the weights, and the next call adopts them.
        """
        if self.note_writes():
            return
        with plain_access():
            data = self.parameter.data
            if self._data.data_ptr() != self.address:  # share_memory_() has moved what they share
                data = data.clone()
                self._data = self.place.handle_data()
            self.parameter.data = self._data
        plane = self._data
        checks.refuse_other_layout(self.spec, data, plane)
        try:
            self.assign(self.ids(), data)
        except BaseException:
            if not self.failed_load:  # a load would meet them, and be refused for them
                with plain_access():
                    self.parameter.data = data
            raise

    def note_writes(self) -> bool:
        """Tell the place of what was written into the handle, as far as torch counts that. Return False if
        weights were put in place of the handle's, which `check_handle` adopts."""
        with plain_access():
            if self.parameter.data_ptr() != self.address:
                return False
            if self.parameter._version != self._seen:
                self._seen = self.parameter._version
                self.place.changing("handle")
        return True

    def ready(self) -> None:
        """Do what may change rows before somebody reads them; see `check_handle` and `allocate`."""
        self.check_handle()
        self.allocate()

    def allocate(self) -> None:
        """Gives the rows their place, where they have none yet."""
        self.place.lookups.allocate([self])

    @property
    def waiting(self) -> WaitingGradient:
        """The gradient that waits for a step. The handle keeps it, as it keeps tables."""
        return self.parameter.waiting

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient waits for a step, without summing it."""
        parameter = self.parameter
        return parameter.waiting.waits(parameter)

    @property
    def owes_step(self) -> bool:
        """Whether that gradient is one that no step has taken."""
        return self.has_gradient and not self.parameter.waiting.is_stepped(self.parameter)

    def drop_gradient(self) -> None:
        """Forgets it, without summing it."""
        parameter = self.parameter
        parameter.waiting.drop(parameter)

    def note_load(self, failed: str) -> None:
        """Remember how a load has failed in its middle; "": one has succeeded, or is tried again."""
        self.failed_load = failed
        self.parameter.__class__ = self._handle_kind()

    def _handle_kind(self) -> type[Handle]:
        return self.place.handle_kind(self.follows, half_loaded=bool(self.failed_load))

    def refuse_half_loaded(self) -> None:
        """Raises TableError where a load has failed in its middle."""
        checks.refuse_half_loaded(self.spec, self.failed_load)

    def raise_deferred(self) -> None:
        """Raises what an earlier step was refused for, before somebody looks at rows; or that they are half
        loaded."""
        self.refuse_half_loaded()
        self.place.lookups.raise_deferred([self], wait=True)

    def rename(self, name: str) -> None:
        """Set the name that errors and descriptions use. The key stays."""
        self.spec = dataclasses.replace(self.spec, name=name)
        self.core.rename(name)

    def adopt(self, place: Place) -> None:
        """Rows lie elsewhere from now on; a gradient that waits is dropped."""
        self.drop_gradient()
        self.generation += 1  # slots of before would be read from memory that is gone
        self.place.changing("move")
        self.place, self.core = place, place.core
        parameter = self.parameter
        parameter.waiting = place.nothing_waiting()
        self._data = place.handle_data()
        self.address, self.shape = self._data.data_ptr(), self._data.shape
        with plain_access():
            parameter.data = self._data
            self._seen = parameter._version
        parameter.__class__ = self._handle_kind()


_tables: weakref.WeakSet[TableWithHandle] = weakref.WeakSet()
_lock = threading.Lock()


def unregister(table: TableWithHandle) -> None:
    """Leave out a table that no optimizer holds, as it is a shard of another one."""
    with _lock:
        _tables.discard(table)


def live_tables() -> Iterable[TableWithHandle]:
    """Return all live tables of this process that an optimizer may hold."""
    with _lock:
        return list(_tables)
