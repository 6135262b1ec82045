"""A live table: its place, and the handle parameter through which torch sees it.

The handle is what ``model.parameters()`` yields and what carries the gradient: a sparse COO tensor
over slots, (slots (1, n), values (n, dim)). Where a place has a plane whose slots are ids, the handle
aliases it, so it can be read, printed and initialised like any parameter. Else it has the table's dim
and more rows than can be, without memory of its own; reading or writing it raises.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hotbed.errors import HotbedError
from hotbed.table import checks
from hotbed.table.copies import copied, pickled
from hotbed.table.gradients import plain_access
from hotbed.table.handles import Handle
from hotbed.table.holds import alone, reading
from hotbed.table.home import Home
from hotbed.table.place import Place
from hotbed.table.records import Records, records_of
from hotbed.table.registry import register
from hotbed.tables import COMBINERS, Table

__all__ = ["LiveTable", "live_table"]

_ROWS_AT_ONCE = 1 << 20

_CPU = torch.device("cpu")


class LiveTable:
    """One table with its memory. Made by the modules; users meet it through them.

    Attributes:
        spec: the description it was made from.
        compute_dtype: of gradients and vectors.
        combiner: the core's number of spec.combiner.
        place: where its rows lie.
        core: the compiled table.
        address: of the handle's data, unless the user replaced them.
        shape: of the handle.
        generation: how often rows were forgotten or erased; slots of an earlier one mean nothing.
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
        home: Home,
        *,
        requires_grad: bool = True,
    ) -> None:
        """`home`: as `hotbed.places.moves.home_of` gives it."""
        self.spec = spec
        self.compute_dtype = spec.compute_dtype
        self.combiner = COMBINERS.index(spec.combiner or "none")
        self.place = home(spec, key)
        self.core = self.place.core
        self._requires_grad = requires_grad
        self._parameter: weakref.ref[Handle] | None = None
        self._rule: Any = None
        self.follows = False
        self._data = self.place.handle_data()
        self.address, self.shape = self._data.data_ptr(), self._data.shape
        self.generation = 0
        self._optimizer: weakref.ref[Any] | None = None
        self._seen = 0  # of torch's count of changes to the handle
        self.complaint: HotbedError | None = None
        self.failed_load = ""
        self.fused_update: Any = None
        register(self)
        self.place.join(self)

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
    def rule(self) -> Any:
        return self._rule

    @rule.setter
    def rule(self, rule: Any) -> None:
        self._rule = rule
        self.follows = rule is not None and bool(rule.exact)
        self.parameter.__class__ = self._handle_kind()
        self.place.make_states(rule)

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
    def tiers(self) -> Any:
        """`hotbed.tiers.tiers.Tiers` that its rows lie in, or None."""
        return self.place.tiers

    @property
    def optimizer(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._optimizer = None if value is None else weakref.ref(value)

    def __len__(self) -> int:
        return int(self.core.size)

    def check_handle(self) -> None:
        """Adopts weights that were put in place of the handle's (``p.data = ...``), and tells the place of
        what was written into it as far as torch counts that.

        Raises:
            TableError: they do not fit; the table is as it was.
        """
        with plain_access():
            if self.parameter.data_ptr() == self.address:
                if self.parameter._version != self._seen:
                    self._seen = self.parameter._version
                    self.place.changing("handle")
                return
            data = self.parameter.data
            self.parameter.data = self._data
        plane = self._data
        checks.refuse_other_layout(self.spec, data, plane)
        self.assign(self.ids(), data)

    def ready(self) -> None:
        """What may change rows before somebody reads them; see `check_handle` and `settle`."""
        self.check_handle()
        self.settle()

    def settle(self) -> None:
        """Gives the rows their place, where they have none yet."""
        self.place.settle()

    # -- the gradient ----------------------------------------------------------------------------

    @property
    def waiting(self) -> Any:
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

    # -- rows ------------------------------------------------------------------------------------

    def weights(self) -> Tensor:
        """(rows, dim) the weight plane itself, by slot; valid until rows come or go."""
        return self.place.weights()

    def ids(self) -> Tensor:
        """(rows,) int64 the ids of the rows, those of a plane by slot; of a dynamic table valid until
        rows come or go."""
        if self.spec.rows is not None:
            return self.place.ids()
        with reading([self]):
            return self.place.ids()

    def stored_ids(self) -> Tensor:
        """(n,) int64, rising: ids whose rows are stored. A tiered static table stores those that a
        batch or an assignment has touched; the others are their first values."""
        with reading([self]):
            return self.core.stored_ids()

    def id_of(self, slot: int) -> int:
        """The id of the row in a slot; of a part, that in the whole table."""
        return int(self.spec.origin.ids_in_table(self.core.id_of(slot)))

    def bring_up_to_date(self) -> None:
        """Writes what the rows of a static table missed while no batch touched them."""
        if not self.follows:
            return
        with alone([self]):
            self.place.changing("catch up")
            for begin in range(0, len(self), _ROWS_AT_ONCE):
                slots = torch.arange(begin, min(begin + _ROWS_AT_ONCE, len(self)), device="cpu")
                self.rule.catch_up(slots.data_ptr(), len(slots))

    def current_weights(self) -> Tensor:
        """(rows, dim) weights of a static table: the plane, or a copy where there is none that is up to
        date."""
        with reading([self]):
            self.hear()
            if self.parameter.is_current:
                return self.place.weights()
            found = self.place.all_rows()
            assert found is not None
            return found[1]

    def lookup(self, ids: Tensor, missing: checks.Missing = "initial") -> Tensor:
        """(n, dim) rows of the ids as they are; see `EmbeddingCollection.lookup`."""
        wanted = ids.device if isinstance(ids, Tensor) else _CPU
        with self.place.ranks.telling("a lookup of rows"):
            self.ready()
            ids = checks.checked_ids(self.spec, ids)
            with reading([self]):
                self.hear()
                if checks.checked_missing(missing):
                    found = self.place.contains(ids)
                    with self.place.ranks.telling("a lookup of rows"):
                        checks.refuse_absent(self.spec, ids, found)
                return self.place.read(ids).to(wanted)

    def note_load(self, failed: str) -> None:
        """Remember how a load has failed in its middle; "": one has succeeded, or is tried again."""
        self.failed_load = failed
        self.parameter.__class__ = self._handle_kind()

    def _handle_kind(self) -> type[Handle]:
        return self.place.handle_kind(self.follows, half_loaded=bool(self.failed_load))

    def refuse_half_loaded(self) -> None:
        """Raises TableError where a load has failed in its middle."""
        checks.refuse_half_loaded(self.spec, self.failed_load)

    def contains(self, ids: Tensor) -> Tensor:
        """(n,) bool: which of the ids have a row; see `EmbeddingCollection.contains`."""
        with self.place.ranks.telling("a search for ids"):
            ids = checks.any_ids(self.spec, ids)
            with reading([self]):
                self.hear()
                return self.place.contains(ids)

    def hear(self) -> None:
        """Raises what an earlier step was refused for, before somebody looks at rows; or that they are half
        loaded."""
        self.refuse_half_loaded()
        self.place.hear([self], wait=True)

    def assign(self, ids: Tensor, values: Tensor) -> None:
        """Writes rows; ids of a dynamic table that have none get one. Of duplicates the last wins.

        Raises:
            IdError, InputError, TableError, OutOfMemory: with the table as it was.
            StorageError: a tier below could not be read or written; some rows may be written, each of
                them whole.
        """
        with self.place.ranks.telling("an assignment"):
            self.ready()
            ids = checks.checked_ids(self.spec, ids)
            values = checks.checked_rows(self.spec, ids, values)
            with alone([self]):
                self.hear()
                self.place.changing("write", ids=ids)
                self.place.assign(ids, values)

    def write(self, records: Records) -> None:
        """As `hotbed.table.place.Place.write`, while the table is held alone."""
        self.place.changing("write", ids=records.ids)
        self.place.write(records)

    def all_rows(self) -> tuple[Tensor, Tensor]:
        """A copy of all rows as the last step has left them: ids (n,), rising, and weights (n, dim).

        Raises:
            TableError: it would not fit in memory.
        """
        found = self.rows_of_all("rows", everywhere=True)
        assert found is not None
        return found

    def rows_of_all(self, purpose: str, *, everywhere: bool) -> tuple[Tensor, Tensor] | None:
        """The same; of a table that ranks share on all of them, or else on the first only."""
        self.place.refuse_copy_beyond_memory(purpose)
        with reading([self]):
            self.hear()
            return self.place.all_rows(everywhere=everywhere)

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        """All stored rows, chunk by chunk, as of one step; see `hotbed.table.place.Place.records`. Until
        it is exhausted or closed, what would change rows waits, or is refused in this thread."""
        return (rows for _, rows in records_of([self], states=states, current=current))

    def erase(self, ids: Tensor) -> int:
        """Forgets rows; see `EmbeddingCollection.erase`."""
        with self.place.ranks.telling("a deletion of rows"):
            self.ready()
            ids = torch.unique(checks.checked_ids(self.spec, ids))
            with alone([self]):
                self.hear()
                checks.refuse_to_erase(self)
                self.generation += 1
                self.place.changing("erase", ids=ids)
                return self.place.erase(ids)

    def rename(self, name: str) -> None:
        """What errors, and descriptions, call the table from now on. The key stays."""
        self.spec = dataclasses.replace(self.spec, name=name)
        self.core.rename(name)

    def draw_again(self, key: int) -> None:
        """Gives every row its first value under a new key, rank 0's; a dynamic table forgets its rows."""
        self.hear()
        self.set_key(int(self.place.ranks.tell("a reset of rows", str(key))[0]))
        self.forget_rows()

    def forget_rows(self) -> None:
        """Every row is its first value again; a dynamic table is empty. If slots get other ids with
        it, the gradient goes too."""
        self.settle()
        with alone([self]):
            self.hear()
            if self.spec.rows is None:
                self.generation += 1
                self.drop_gradient()
            self.place.changing("forget")
            self.place.forget()

    def set_key(self, key: int) -> None:
        """Rows that are stored stay as they are."""
        with alone([self]):
            self.place.set_key(key)

    def memory(self) -> dict[str, int]:
        """Bytes of this table by what they hold; in tiers, of its rows wherever they lie."""
        self.settle()
        return self.place.memory()

    # -- moving and copying ----------------------------------------------------------------------

    def adopt(self, place: Place) -> None:
        """Rows lie elsewhere from now on; a gradient that waits is dropped."""
        self.drop_gradient()
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

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveTable:
        """A second table with the same rows and key, without optimizer or gradient."""
        second: LiveTable = copied(self, memo)
        return second

    def __reduce__(self) -> Any:
        return pickled(self)


def live_table(parameter: Any) -> LiveTable | None:
    """The table behind a handle, or None for an ordinary parameter."""
    return getattr(parameter, "hotbed_table", None)
