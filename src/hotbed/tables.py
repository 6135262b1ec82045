"""How a user describes a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from hotbed import _core
from hotbed import init as initializers
from hotbed.arrays import integer, is_one_of
from hotbed.errors import PlanError, TableError
from hotbed.sharding import Kept, Sharding, sharding_of

__all__ = [
    "COMBINERS",
    "CORE_DTYPES",
    "DTYPES",
    "MAX_DIM",
    "Origin",
    "Table",
    "SUMMED",
    "TablePart",
    "columns_of",
    "ids_of",
    "part_of",
    "rows_of",
]

COMBINERS = ("none", "sum", "mean", "sqrtn", "max")
SUMMED = ("sum", "mean", "sqrtn")
"""Combiners that sum, and may divide."""
CORE_DTYPES = {
    torch.float32: _core.DType.f32,
    torch.float64: _core.DType.f64,
    torch.float16: _core.DType.f16,
    torch.bfloat16: _core.DType.bf16,
}
DTYPES = tuple(CORE_DTYPES)
MAX_DIM = 1 << 22


Ids = TypeVar("Ids", int, Tensor)


class Origin(NamedTuple):
    """Where the rows of a part lie in the table that was cut. Ids of a static part count from 0: its id i
    is the table's ``first + stride * i``; a dynamic part has the table's own ids."""

    rows: int | None
    """Of the whole table; None: dynamic."""
    dim: int
    """Of the whole table."""
    first: int = 0
    stride: int = 1
    column: int = 0
    """The part's first column."""
    owns: Callable[[Tensor], Tensor] | None = None
    """Of a dynamic part: (n,) bool for (n,) int64 ids, whether they belong to it. None: all do."""

    def ids_in_table(self, ids: Ids) -> Ids:
        """The table's ids of ids of the part: ints, or (n,) int64."""
        plain = (self.first, self.stride) == (0, 1)
        return ids if plain else self.first + self.stride * ids

    def ids_in_part(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the ids of (n,) int64 ids of the table that the part has, as its own ids, and their
        mask (n,) bool. None: all."""
        if self.owns is not None:
            here = self.owns(ids)
            return ids[here], here
        if (self.first, self.stride) == (0, 1):
            return ids, None
        here = (ids >= self.first) & ((ids - self.first) % self.stride == 0)
        return self.own_ids(ids[here]), here

    def own_ids(self, ids: Tensor) -> Tensor:
        """Return the part's own ids of (n,) ids of the table, all of which it has."""
        plain = (self.first, self.stride) == (0, 1)
        return ids if plain else (ids - self.first) // self.stride

    @property
    def is_cut(self) -> bool:
        """Whether a row has another id, or a column another place, than in the table."""
        return (self.first, self.stride, self.column) != (0, 1, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """One embedding table.

    >>> hb.Table("item", dim=64, rows=10_000_000, combiner="mean")   # static: ids 0 .. rows-1
    >>> hb.Table("user", dim=64)                                     # dynamic: any int64 id

    Raises:
        TableError: a field that cannot be honoured; the message names the table and the value.
    """

    name: str
    """Name of the table in errors, checkpoints and ``collection.parameter(name)``. Together with the
    collection's seed it fixes the first values: renaming a table changes them."""

    dim: int
    """Length of a row's vector; any number from 1 to 4,194,304."""

    rows: int | None = None
    """Number of rows of a static table, whose ids are 0 .. rows-1; ``None`` makes the table dynamic:
    any 64-bit id, a row for each id that training has met."""

    combiner: str | None = "sum"
    """How the rows of a bag become one vector: ``"sum"``, ``"mean"`` (Σwv / Σw), ``"sqrtn"``
    (Σwv / √Σw²), ``"max"``, or ``None``/``"none"``: no pooling, one vector an id. An empty bag is
    zeros."""

    dtype: torch.dtype = torch.float32
    """Dtype of stored rows. float16 and bfloat16 halve memory and traffic; updates then round
    stochastically, so small ones are kept on average. Arithmetic, gradients and pooled vectors are
    float32 (float64 for float64 rows)."""

    init: initializers.Initializer | initializers.Columns = dataclasses.field(
        default_factory=initializers.Normal
    )
    """First value of a row, a pure function of (seed, table name, id, column)."""

    padding_idx: int | None = None
    """An id that stands for "nothing": never in a bag and never updated. Its row starts as zeros,
    which is what an unpooled lookup returns for it. In a static table -1 is the last row, as in
    torch's layers; in a dynamic one it is the id -1."""

    sharding: Sharding | str | None = dataclasses.field(default=None, repr=False)
    """How `hotbed.plan` must cut it among many processes: one of `hotbed.dist`'s kinds, or
    ``"replicated"``, ``"table"``, ``"row"``, ``"column"``, ``"grid"``. ``None`` leaves it to the strategy.
    One process does not ask."""

    wire: tuple[str, str] | str | None = dataclasses.field(default=None, repr=False)
    """How its rows, and its gradients, travel between processes: names of `hotbed.dist.CODECS`, such as
    ``"int8"`` for both or ``("bfloat16", "int8")``. ``None``: as `hotbed.distribute` says."""

    _least_rows: ClassVar[int] = 1

    @property
    def origin(self) -> Origin:
        """Position in the whole table: here its own ids and columns."""
        return Origin(self.rows, self.dim)

    @property
    def columns(self) -> slice:
        """Columns of the whole table that this part has."""
        return slice(self.origin.column, self.origin.column + self.dim)

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise TableError(
                f"A table's name must be a non-empty string without lone surrogates, not {self.name!r}."
            )
        dim, rows = integer(self.dim), integer(self.rows)
        if dim is None or not 0 < dim <= MAX_DIM:
            raise TableError(
                f"Table {self.name!r}: dim must be an integer from 1 to {MAX_DIM}, got {self.dim!r}."
            )
        if self.rows is not None and (rows is None or not self._least_rows <= rows < 2**63):
            raise TableError(
                f"Table {self.name!r}: rows must be a positive integer below 2**63, or None for "
                f"open-ended ids, got {self.rows!r}."
            )
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "rows", rows)
        if self.combiner is None:
            object.__setattr__(self, "combiner", "none")
        if not is_one_of(self.combiner, COMBINERS):
            raise TableError(
                f"Table {self.name!r}: combiner must be one of {', '.join(COMBINERS)}, "
                f"got {self.combiner!r}."
            )
        if not is_one_of(self.dtype, DTYPES):
            raise TableError(
                f"Table {self.name!r}: dtype must be one of "
                f"{', '.join(str(d).removeprefix('torch.') for d in DTYPES)}, got {self.dtype!r}."
            )
        if self.padding_idx is not None:
            padding = integer(self.padding_idx)
            if padding is None or not -(2**63) <= padding < 2**63:
                raise TableError(
                    f"Table {self.name!r}: padding_idx must be a 64-bit integer or None, "
                    f"got {self.padding_idx!r}."
                )
            if rows is not None:
                if not -rows <= padding < rows:
                    raise TableError(
                        f"Table {self.name!r}: padding_idx {padding} is outside [-{rows}, {rows})."
                    )
                padding %= rows
            object.__setattr__(self, "padding_idx", padding)
        if self.sharding is not None:
            try:
                object.__setattr__(self, "sharding", sharding_of(self.sharding))
            except PlanError as error:
                raise TableError(f"Table {self.name!r}: {error}") from None
        if self.wire is not None:
            wire = (self.wire, self.wire) if isinstance(self.wire, str) else self.wire
            if not (isinstance(wire, tuple) and [*map(type, wire)] == [str, str]):
                raise TableError(
                    f"Table {self.name!r}: wire must be the name of a form such as 'int8', or a pair of "
                    f"them, of rows and of gradients, got {self.wire!r}."
                )
            object.__setattr__(self, "wire", wire)
        self.bands()

    def bands(self) -> tuple[initializers.Band, ...]:
        """Return the distributions that first values are drawn from, one for all columns or several.

        Raises:
            TableError: the initializer is none, or needs a number of rows that the table has not.
        """
        if not isinstance(self.init, initializers.Initializer | initializers.Columns):
            raise TableError(
                f"Table {self.name!r}: init must be one of hotbed.init, such as "
                f"hotbed.init.Normal(0.0, 0.01), got {self.init!r}."
            )
        try:
            return initializers.bands_of(self.init, self.origin.rows, self.origin.dim)
        except (TypeError, ValueError) as error:
            raise TableError(f"Table {self.name!r}: {error}") from error

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of gradients, optimizer states and pooled vectors."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclasses.dataclass(frozen=True, slots=True)
class TablePart(Table):
    """Some rows or columns of a table, of the same name. First values, stochastic rounding and errors are
    those of the whole."""

    origin: Origin = Origin(None, 1)

    _least_rows: ClassVar[int] = 0


def rows_of(table: Table, first: int, stride: int) -> TablePart:
    """Every `stride`-th row of a static table, from row `first` on: none, if it has no such row."""
    assert table.rows is not None
    fields = _fields_of(table)
    fields["rows"] = len(range(first, table.rows, stride))
    padding = table.padding_idx
    if padding is not None:
        here = padding >= first and (padding - first) % stride == 0
        fields["padding_idx"] = (padding - first) // stride if here else None
    origin = table.origin
    return TablePart(
        **fields,
        origin=origin._replace(first=origin.ids_in_table(first), stride=origin.stride * stride),
    )


def ids_of(table: Table, owns: Callable[[Tensor], Tensor]) -> TablePart:
    """The rows of a dynamic table whose ids are such; see `Origin.owns`."""
    assert table.rows is None
    return TablePart(**_fields_of(table), origin=table.origin._replace(owns=owns))


def columns_of(table: Table, begin: int, end: int) -> TablePart:
    """The columns from `begin` to before `end`."""
    fields = _fields_of(table)
    fields["dim"] = end - begin
    origin = table.origin
    return TablePart(**fields, origin=origin._replace(column=origin.column + begin))


def part_of(table: Table, kept: Kept | None) -> Table:
    """Return the kept part of a table: the table itself where that is all; None: a part without rows."""
    if kept is None:
        return rows_of(table, table.rows, 1) if table.rows is not None else ids_of(table, _no_id)
    part = table
    if kept.owns is not None:
        part = ids_of(part, kept.owns)
    elif (kept.first, kept.stride) != (0, 1):
        part = rows_of(part, kept.first, kept.stride)
    if (kept.begin, kept.end) != (0, table.dim):
        part = columns_of(part, kept.begin, kept.end)
    return part


def _is_name(name: object) -> bool:
    """Return True if it is a non-empty string that can be encoded."""
    try:
        return isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        return False


def _no_id(ids: Tensor) -> Tensor:
    return torch.zeros_like(ids, dtype=torch.bool)


def _fields_of(table: Table) -> dict[str, Any]:
    return {field.name: getattr(table, field.name) for field in dataclasses.fields(Table)}
