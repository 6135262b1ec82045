"""The kinds of handle: the parameters that stand for tables, and what torch may do with each.

`Handle` aliases the rows of a static table: it is them. `FollowingHandle` does too, but some of its
rows may be behind the steps taken (``untouched="exact"``), so they are brought up to date before torch
reads or writes any. `HalfLoadedHandle` refuses both. `OpenHandle` has no rows: those of a dynamic table
come and go.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn

from hotbed.errors import TableError
from hotbed.table.described import SteppedTable
from hotbed.table.gradients import WaitingGradient
from hotbed.table.sparse_gradient import Function, Keywords, plain_access

__all__ = [
    "FollowingHandle",
    "HalfLoadedHandle",
    "Handle",
    "OpenHandle",
    "TableOfHandle",
    "instances",
    "touches_rows",
]

T = TypeVar("T")

# Properties that hand out rows. All others tell about the parameter, or carry its gradient.
_ROW_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"}

# Functions that touch no row.
_ABOUT = {
    "__dir__",
    "__format__",
    "__hash__",
    "__len__",
    "__repr__",
    "_is_view",
    "backward",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "grad",
    "has_names",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "size",
    "storage_offset",
    "stride",
}
_VALUE_QUESTIONS = {"is_nonzero", "is_same_size", "is_set_to"}


class TableOfHandle(SteppedTable, Protocol):
    """A live table, as its handle sees it.

    Attributes:
        place: a `hotbed.table.place.Place`, which some kinds of handle know by its class.
    """

    place: Any

    @property
    def parameter(self) -> Handle: ...

    def bring_up_to_date(self) -> None: ...
    def refuse_half_loaded(self) -> None: ...
    def __len__(self) -> int: ...


def _property_of(func: Callable[..., object]) -> str:
    """Return the name of the property whose ``__get__`` or the like it is."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def touches_rows(func: Callable[..., object]) -> bool:
    """Return True if a function of torch's reads or writes rows of a handle."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _property_of(func) in _ROW_PROPERTIES
    if name in _ABOUT:
        return False
    return not name.startswith("is_") or name in _VALUE_QUESTIONS


class Handle(nn.Parameter):
    """The parameter of a table. Copies and pickles as the table does, rows and all."""

    is_current = True
    """Whether its data are the rows, as the last step has left them."""

    hotbed_table: TableOfHandle
    waiting: WaitingGradient

    @property
    def grad(self) -> Tensor | None:
        """(rows, dim) sparse COO over slots of the compute dtype, or None."""
        return self.waiting.look(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.waiting.replace(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.waiting.drop(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Handle:
        return copy.deepcopy(self.hotbed_table, memo).parameter

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return _handle_of, (self.hotbed_table,)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.data, requires_grad=self.requires_grad))


def _handle_of(table: TableOfHandle) -> Handle:
    return table.parameter


class FollowingHandle(Handle):
    """The handle of a static table whose rows follow a dense optimizer.

    Threading: reading it may write rows, so unlike a lookup it wants the table alone.
    """

    is_current = False

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Iterable[object] = (), kwargs: Keywords = None
    ) -> object:
        kwargs = kwargs or {}
        if touches_rows(func) or func.__name__ == "__format__":
            for found in instances((args, kwargs), cls):
                found.hotbed_table.bring_up_to_date()
        with plain_access():
            return func(*args, **kwargs)


class HalfLoadedHandle(Handle):
    """The handle of a static table whose load has failed in its middle: its rows are those of no
    checkpoint."""

    is_current = False

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Iterable[object] = (), kwargs: Keywords = None
    ) -> object:
        kwargs = kwargs or {}
        if touches_rows(func):
            for found in instances((args, kwargs), cls):
                found.hotbed_table.refuse_half_loaded()
        with plain_access():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Handle of table {self.hotbed_table.name!r}, which is half loaded"


class _Rowless:
    """Refuses whatever needs rows, at once: torch would compute on nothing, or for ever."""

    @property
    def of_table(self) -> TableOfHandle:
        raise NotImplementedError

    def numel(self) -> int:
        """Elements of the rows that are stored by now; the shape says how many there could be."""
        return len(self.of_table) * int(self.of_table.spec.dim)

    nelement = numel

    @property
    def nbytes(self) -> int:
        return self.numel() * int(self.of_table.compute_dtype.itemsize)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: object,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and kwargs.get("materialize_grads"):
            return _all_gradients(*args, **kwargs)
        if func is torch.numel:
            return next(instances((args, kwargs), _Rowless)).numel()
        if not touches_rows(func):
            with plain_access():
                return func(*args, **kwargs)
        table = next(instances((args, kwargs), _Rowless)).of_table
        wanted = func.__name__
        if wanted in ("__get__", "__set__"):
            wanted = {"__get__": "", "__set__": "setting "}[wanted] + _property_of(func)
        if wanted in ("data", "detach"):
            with plain_access():
                rows = func(*args, **kwargs)
            assert isinstance(rows, Tensor)
            return _OpenRows.over(rows, table)
        raise TableError(
            f"Table {table.name!r}: its parameter holds no rows, as they are kept by id, so "
            f"{wanted.strip('_')!r} has nothing to work on. Read rows with rows() or lookup(ids), write "
            "them with assign(ids, values) or a state_dict, and choose first values with "
            "Table(init=...)."
        )


class OpenHandle(_Rowless, Handle):  # type: ignore[override]
    """The handle of a dynamic table: of its dim, with more rows than can be, and none in memory."""

    is_current = False

    @property
    def of_table(self) -> TableOfHandle:
        return self.hotbed_table

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        table = self.hotbed_table
        here = table.place.tables_here(table)
        rows = sum(map(len, here))
        kept = "" if here == [table] else " on this rank"
        return (
            f"Handle of table {table.name!r}: {rows:,} rows × {table.spec.dim}{kept}, kept by id. Its shape, "
            f"{tuple(self.shape)}, only says that there is room for any id."
        )


class _OpenRows(_Rowless, Tensor):  # type: ignore[override]
    """Result of ``data`` and ``detach()`` of an `OpenHandle`, without rows as that is."""

    _table: TableOfHandle

    @property
    def of_table(self) -> TableOfHandle:
        return self._table

    @classmethod
    def over(cls, rows: Tensor, table: TableOfHandle) -> Tensor:
        made = Tensor._make_subclass(cls, rows)
        made._table = table
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Rows of table {self.of_table.name!r}, which are not kept in its parameter"


def _all_gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """``torch.autograd.grad`` where an unused input is to have a gradient of zeros: torch would make
    a dense one for a table."""
    options |= {"materialize_grads": False, "allow_unused": True}
    with plain_access():
        found = torch.autograd.grad(outputs, inputs, **options)
        return tuple(
            torch.zeros_like(
                given,
                layout=torch.sparse_coo if isinstance(given, _Rowless) else torch.strided,
                requires_grad=bool(options["create_graph"]),
            )
            if grad is None
            else grad
            for given, grad in zip(inputs, found, strict=True)
        )


def instances(value: object, kind: type[T]) -> Iterator[T]:
    """Yield the objects of a kind in nested arguments."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from instances(item, kind)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from instances(item, kind)
