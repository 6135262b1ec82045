"""The rows of a static table that lie in tiers, or on several ranks, read as one matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hotbed.errors import TableError
from hotbed.table.described import SteppedTable
from hotbed.table.handles import instances, touches_rows
from hotbed.table.sparse_gradient import Function, Keywords, plain_access

__all__ = ["MOST_BYTES", "MatrixOfRows", "with_handles"]

T = TypeVar("T")

MOST_BYTES = 1 << 30
"""Size up to which rows are gathered into one tensor."""


class _Table(SteppedTable, Protocol):
    @property
    def parameter(self) -> nn.Parameter: ...
    def lookup(self, ids: Tensor) -> Tensor: ...


class MatrixOfRows(nn.Parameter):
    """Stands for the (rows, dim) weight of a static table in tiers or on ranks, of which it holds nothing.

    Where torch reads it without gradients, all rows are gathered first, up to `MOST_BYTES`; on ranks all of
    them read it. An optimizer of Hotbed's takes it for the table's handle.

    Raises:
        TableError: it is written to, it has more bytes, or a gradient is wanted of it.
    """

    hotbed_table: _Table

    @classmethod
    def of(cls, table: _Table) -> MatrixOfRows:
        """Return the matrix of a static table."""
        spec, handle = table.spec, table.parameter
        nothing = torch.full((), float("nan"), dtype=spec.compute_dtype, device=handle.device)
        assert spec.rows is not None
        data = nothing.expand(spec.rows, spec.dim)
        made: MatrixOfRows = Tensor._make_subclass(cls, data, handle.requires_grad)
        made.hotbed_table = table
        return made

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the table, as its handle has it."""
        return self.hotbed_table.parameter.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.hotbed_table.parameter.grad = value

    @property
    def requires_grad(self) -> bool:
        """True if the table is trained."""
        return bool(self.hotbed_table.parameter.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> MatrixOfRows:
        """Train the table, or freeze it."""
        self.hotbed_table.parameter.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[[Tensor], object]) -> object:
        """Register a hook of the table's handle."""
        return self.hotbed_table.parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], object]) -> object:
        """Register a hook of the table's handle."""
        return self.hotbed_table.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def gathered(self) -> Tensor:
        """Return a copy of the rows, (rows, dim)."""
        table = self.hotbed_table
        rows, dim = self.shape
        if (size := rows * dim * self.dtype.itemsize) > MOST_BYTES:
            raise TableError(
                f"Table {table.name!r}: its weight, read as one matrix, takes {size:,} bytes, more than "
                f"{MOST_BYTES:,}. Read rows with lookup(ids), some at a time."
            )
        with plain_access():
            return table.lookup(torch.arange(rows, device="cpu"))

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        return nn.Parameter(self.gathered(), requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return MatrixOfRows.of, (self.hotbed_table,)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        named = f"{self.hotbed_table.name!r}, {tuple(self.shape)}"
        return f"Rows of table {named}, which lie in tiers or on ranks"

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Iterable[object] = (), kwargs: Keywords = None
    ) -> object:
        args, kwargs = tuple(args), dict(kwargs or {})
        matrices = list(instances((args, kwargs), cls))
        name = func.__name__
        if not touches_rows(func) or not matrices:
            with plain_access():
                return func(*args, **kwargs)
        named = f"Table {matrices[0].hotbed_table.name!r}"
        written = args[0] if args else kwargs.get("tensor")
        if isinstance(written, cls) and (_writes(name) or _hands_out_memory(func)):
            raise TableError(
                f"{named}: its rows lie in tiers or on ranks, so its weight cannot be written to "
                f"({name.strip('_')}). Write rows with assign(ids, values), or all by layer.weight = values."
            )
        if any(isinstance(out, cls) for out in instances(kwargs.get("out"), Tensor)):
            raise TableError(
                f"{named}: its rows lie in tiers or on ranks, so its weight cannot be an out= of torch's."
            )
        if torch.is_grad_enabled() and any(m.requires_grad for m in matrices):
            raise TableError(
                f"{named}: its rows lie in tiers or on ranks, so no gradient can go through its whole "
                f"weight ({name.strip('_')}). Look ids up; read it inside torch.no_grad(); or keep this "
                "layer in memory: hotbed.convert(..., skip=[its path])."
            )
        gathered = [one.gathered() for one in matrices]
        own = {id(one): rows for one, rows in zip(matrices, gathered, strict=True)}
        args, kwargs = tree_map(lambda v: own.get(id(v), v), (args, kwargs))
        with plain_access():
            result = func(*args, **kwargs)
            where = {rows.untyped_storage().data_ptr() for rows in gathered}
            return tree_map(lambda v: _ReadOnly.of(v, named) if _lies_in(v, where) else v, result)


class _ReadOnly(Tensor):
    """A view of gathered rows, which is read, and not written to: it would change a copy."""

    named: str

    @classmethod
    def of(cls, view: Tensor, named: str) -> Tensor:
        made = view.as_subclass(cls)
        made.named = named
        return made

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Iterable[object] = (), kwargs: Keywords = None
    ) -> object:
        args, kwargs = tuple(args), dict(kwargs or {})
        written = args[0] if args else kwargs.get("tensor")
        name = func.__name__
        writes = (
            (_writes(name) and name != "requires_grad_")
            or _hands_out_memory(func)
            or func.__name__ == "numpy"
        )
        if isinstance(written, cls) and writes:
            raise TableError(
                f"{written.named}: its rows lie in tiers or on ranks, and this is a view of a copy of them, "
                f"which cannot be written to ({name.strip('_')}). Take clone() of it."
            )
        with plain_access():
            result = func(*args, **kwargs)
            views = list(instances((args, kwargs), cls))
            where = {one.untyped_storage().data_ptr() for one in views}
            return tree_map(
                lambda v: cls.of(v, views[0].named) if _lies_in(v, where) else v, result
            )


def _lies_in(value: object, where: set[int]) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.untyped_storage().data_ptr() in where


def with_handles(group: dict[str, T]) -> dict[str, T]:
    """Return a group of an optimizer's parameters, with the handle of its table for each `MatrixOfRows`."""
    given = group["params"]
    every: list[object] = [given] if isinstance(given, Tensor) else list(given)  # type: ignore[call-overload]
    own = [p.hotbed_table.parameter if isinstance(p, MatrixOfRows) else p for p in every]
    return {**group, "params": own}  # type: ignore[dict-item]


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__")


def _hands_out_memory(func: Function) -> bool:
    """True for ``data`` and the like, through which rows of a tensor may be written."""
    of_property = getattr(getattr(func, "__self__", None), "__name__", "")
    return func.__name__ == "__get__" and of_property in ("data", "__cuda_array_interface__")
