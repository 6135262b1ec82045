"""The kinds of handle: the parameters that stand for tables, and what torch may do with each.

`Handle` aliases the rows of a static table: it is them. `FollowingHandle` does too, but some of its
rows may be behind the steps taken (``untouched="exact"``), so they are brought up to date before torch
reads or writes any. `HalfLoadedHandle` refuses both. `OpenHandle` has no rows: those of a dynamic table
come and go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.errors import TableError
from hotbed.table.gradients import WaitingGradient, plain_access

__all__ = ["FollowingHandle", "HalfLoadedHandle", "Handle", "OpenHandle"]

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


def _touches_rows(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__ in _ROW_PROPERTIES
    if name in _ABOUT:
        return False
    return not name.startswith("is_") or name in _VALUE_QUESTIONS


class Handle(nn.Parameter):
    """The parameter of a table. Copies and pickles as the table does, rows and all."""

    is_current = True
    """Whether its data are the rows, as the last step has left them."""

    hotbed_table: Any
    waiting: WaitingGradient

    @property
    def grad(self) -> Tensor | None:
        """(rows, dim) sparse COO over slots of the compute dtype, or None."""
        return self.waiting.look(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.waiting.take_place(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.waiting.drop(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        twin: Handle = copy.deepcopy(self.hotbed_table, memo).parameter
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _handle_of, (self.hotbed_table,)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.data, requires_grad=self.requires_grad))


def _handle_of(table: Any) -> Handle:
    handle: Handle = table.parameter
    return handle


class FollowingHandle(Handle):
    """The handle of a static table whose rows follow a dense optimizer.

    Threading: reading it may write rows, so unlike a lookup it wants the table alone.
    """

    is_current = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _touches_rows(func) or func.__name__ == "__format__":
            for found in _instances((args, kwargs), cls):
                found.hotbed_table.bring_up_to_date()
        with plain_access():
            return func(*args, **kwargs)


class HalfLoadedHandle(Handle):
    """The handle of a static table whose load has failed in its middle: its rows are those of no
    checkpoint."""

    is_current = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _touches_rows(func):
            for found in _instances((args, kwargs), cls):
                found.hotbed_table.refuse_half_loaded()
        with plain_access():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Handle of table {self.hotbed_table.name!r}, which is half loaded"


class _Rowless:
    """Refuses whatever needs rows, at once: torch would compute on nothing, or for ever."""

    of_table: Any

    def numel(self) -> int:
        """Elements of the rows that are stored by now; the shape says how many there could be."""
        return len(self.of_table) * int(self.of_table.spec.dim)

    nelement = numel

    @property
    def nbytes(self) -> int:
        return self.numel() * int(self.of_table.compute_dtype.itemsize)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and kwargs.get("materialize_grads"):
            return _all_gradients(*args, **kwargs)
        if func is torch.numel:
            return next(_instances((args, kwargs), _Rowless)).numel()
        if not _touches_rows(func):
            with plain_access():
                return func(*args, **kwargs)
        table = next(_instances((args, kwargs), _Rowless)).of_table
        wanted = func.__name__
        if wanted in ("__get__", "__set__"):
            wanted = {"__get__": "", "__set__": "setting "}[wanted] + func.__self__.__name__
        if wanted in ("data", "detach"):
            with plain_access():
                return _OpenRows.over(func(*args, **kwargs), table)
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
    def of_table(self) -> Any:
        return self.hotbed_table

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
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

    @classmethod
    def over(cls, rows: Tensor, table: Any) -> Tensor:
        made: Any = Tensor._make_subclass(cls, rows)
        made.of_table = table
        return made  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Rows of table {self.of_table.name!r}, which are not kept in its parameter"


def _all_gradients(outputs: Any, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
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


def _instances(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _instances(item, kind)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _instances(item, kind)
