"""Kinds of columns: a class each, which says what a column of a file becomes in a batch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Values
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed import _core
from hotbed.data.arrow_values import (
    MISSING,
    BadValue,
    bags_of,
    hashed,
    integers,
    numbers,
    texts,
)
from hotbed.data.blocks import Builder
from hotbed.data.fields import choice, fraction, name_or_none, names, number_or_none, text
from hotbed.data.json_values import array_of, lists_of
from hotbed.files import Json
from hotbed.jagged import Jagged
from hotbed.tables import COMBINERS

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "KINDS",
    "Column",
    "Feature",
    "Id",
    "Ids",
    "Key",
    "Label",
    "Number",
    "Pair",
    "Sequence",
    "Source",
]

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Column(ABC):
    """A kind of column. A new kind is a subclass and an entry in `KINDS`."""

    kind: ClassVar[str]
    """Name of the kind in schema files."""
    key: ClassVar[str | None] = None
    """Entry of a batch that columns of this kind share; None: each has its own, by its name."""
    json_types: ClassVar[tuple[str, ...]] = ("string", "integer", "null")
    """Types of its values in JSON."""

    def reads(self, name: str) -> tuple[str, ...]:
        """Names of the columns of a file that it is made of."""
        return (name,)

    @abstractmethod
    def add(self, name: str, source: Source, builder: Builder) -> None:
        """Add to the batch what the columns hold; raises BadValue."""

    def array(self, values: Values[Json]) -> pa.Array:
        """Return values as JSON has them as an array that `add` takes; raises BadValue."""
        return array_of(values)


class Source:
    """Rows of a file, as kinds of columns read them.

    Args:
        arrays: Arrow arrays of the columns, of as many rows each.
        kinds: the columns of the schema.
    """

    def __init__(self, arrays: Mapping[str, pa.Array], kinds: Mapping[str, Column]) -> None:
        self.arrays = arrays
        self._kinds = kinds
        self._ids: dict[str, Ints] = {}
        self.has_one_label = sum(isinstance(kind, Label) for kind in kinds.values()) == 1

    def ids(self, name: str) -> Ints:
        """(n,) ids of a column of the kind `Id`, before its ``rows=`` is taken into account."""
        if name not in self._ids:
            kind = self._kinds[name]
            assert isinstance(kind, Id)
            self._ids[name] = kind.raw(self.arrays[name])
        return self._ids[name]


@dataclasses.dataclass(frozen=True)
class Label(Column):
    """A column to be predicted: 0 or 1, or any number.

    ``batch["label"]`` is float32 (B,), or (B, T) if a schema has T > 1 labels, in its order. A missing
    value is NaN where there are several, and an error where there is one.
    """

    kind = "label"
    key = "label"
    json_types = ("number", "string", "null")

    def add(self, name: str, source: Source, builder: Builder) -> None:
        given = numbers(source.arrays[name])
        if source.has_one_label and (missing := np.isnan(given)).any():
            raise BadValue(
                int(np.argmax(missing)), "the label is missing. Leave out rows without one."
            )
        builder.number("label", _finite(given.astype(np.float32), given))


@dataclasses.dataclass(frozen=True)
class Number(Column):
    """A column of ``batch["dense"]``, float32 (B, n) in the order of the schema.

    Raises:
        SchemaError: no such transform, ``"standard"`` without `mean` and `std`.
    """

    kind = "number"
    key = "dense"
    json_types = ("number", "string", "null")

    transform: str = "none"
    """``"none"``; ``"log"``: log(1 + max(x, 0)), as in `CriteoLog`; ``"standard"``: (x - mean) / std."""
    missing: float = 0.0
    """Number in the batch, after the transform, where the value is missing: null, NaN or empty."""
    mean: float | None = None
    """Mean of the column, for ``"standard"``; ``hotbed data stats`` writes it."""
    std: float | None = None
    """Standard deviation of the column, above 0."""

    def __post_init__(self) -> None:
        choice("transform", self.transform, tuple(_TRANSFORMS))
        fraction("missing", self.missing)
        if self.transform == "standard" or self.mean is not None or self.std is not None:
            fraction("mean", self.mean)
            fraction("std", self.std, above=0.0)

    def add(self, name: str, source: Source, builder: Builder) -> None:
        given = numbers(source.arrays[name])
        with np.errstate(over="ignore"):
            made = _TRANSFORMS[self.transform](self, given).astype(np.float32)
        made = _finite(made, given)
        made[np.isnan(given)] = self.missing
        builder.number("dense", made)


_TRANSFORMS: Mapping[str, Callable[[Number, NDArray[np.float64]], NDArray[np.float64]]] = {
    "none": lambda number, x: x,
    "log": lambda number, x: np.log1p(np.maximum(x, 0.0)),
    "standard": lambda number, x: (x - (number.mean or 0.0)) / (number.std or 1.0),
}


@dataclasses.dataclass(frozen=True)
class Feature(Column):
    """A kind of column with ids that a table has rows for."""

    table: str | None = dataclasses.field(default=None, kw_only=True)
    """Name of its table, which several features may share. None: the column's."""
    rows: int | None = dataclasses.field(default=None, kw_only=True)
    """None: the table takes any id. A number makes it static: hashed ids are taken modulo `rows`, other ids
    must be in [0, rows), and the table has one row more, the last, for what is missing."""

    def __post_init__(self) -> None:
        name_or_none("table", self.table)
        object.__setattr__(self, "rows", number_or_none("rows", self.rows))

    @property
    def missing(self) -> int:
        """Id of a missing value: -1, or `rows` in a static table."""
        return MISSING if self.rows is None else self.rows

    @property
    def combiner(self) -> str | None:
        """Combiner that its table needs; None: any will do."""
        return None

    @property
    def padding(self) -> int | None:
        """Id that its table must take for padding; None: it has none."""
        return None

    @property
    @abstractmethod
    def hashes(self) -> bool:
        """True if its ids are hashes."""

    def stored(self, ids: Ints) -> Ints:
        """Ids of the table, of ids as `hashed` and `integers` return them; raises BadValue."""
        if self.rows is None:
            return ids
        missing = ids == MISSING
        if self.hashes:
            return np.where(missing, self.rows, ids % self.rows)
        wrong = ~missing & ((ids < 0) | (ids >= self.rows))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise BadValue(
                row,
                f"id {ids[row]} is outside [0, {self.rows}). Leave out rows= for open-ended ids.",
            )
        return np.where(missing, self.rows, ids)


@dataclasses.dataclass(frozen=True)
class _OfValues(Feature):
    values: str = dataclasses.field(default="hash", kw_only=True)
    """``"hash"``: ids are `hash_ids` of the value's text, which for an integer is its decimal form.
    ``"int"``: the integers themselves, and -1 means missing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("values", self.values, tuple(_IDS))

    @property
    def hashes(self) -> bool:
        return self.values == "hash"

    def raw(self, array: pa.Array) -> Ints:
        """(n,) ids before `rows` is taken into account."""
        return _IDS[self.values](array)


_IDS: Mapping[str, Callable[[pa.Array], Ints]] = {"hash": hashed, "int": integers}


class _OfLists(_OfValues):
    separator: str
    json_types = ("array", "string", "integer", "null")

    def array(self, values: Values[Json]) -> pa.Array:
        return lists_of(values, self.separator)


@dataclasses.dataclass(frozen=True)
class Id(_OfValues):
    """A feature of one id a sample: int64 (B,)."""

    kind = "id"

    def add(self, name: str, source: Source, builder: Builder) -> None:
        builder.ids(name, self.stored(source.ids(name)))


@dataclasses.dataclass(frozen=True)
class Ids(_OfLists):
    """A feature of any number of ids a sample: `hotbed.Jagged`. Missing ids are left out."""

    kind = "ids"

    separator: str = "|"
    """Cuts text into values; "": text is one value. Lists of Parquet files need none."""
    pooling: str = "mean"
    """How the table makes one vector of a bag, see `hotbed.Table.combiner`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        text("separator", self.separator)
        choice("pooling", self.pooling, COMBINERS)

    @property
    def combiner(self) -> str | None:
        return self.pooling

    def add(self, name: str, source: Source, builder: Builder) -> None:
        ids, offsets = _bags(self, source.arrays[name], self.separator)
        builder.value(name, Jagged(torch.from_numpy(ids), torch.from_numpy(offsets)))


@dataclasses.dataclass(frozen=True)
class Sequence(_OfLists):
    """A feature of the last ids of a list, in their order: int64 (B, length), padded at the end.

    The padding is -1, or `rows` in a static table, and the padding_idx of its table. Missing ids are left
    out.
    """

    kind = "sequence"

    length: int = 50
    """Ids that are kept of a list, from its end."""
    separator: str = "|"
    """Cuts text into values; "": text is one value. Lists of Parquet files need none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "length", number_or_none("length", self.length, required=True))
        text("separator", self.separator)

    @property
    def combiner(self) -> str | None:
        return "none"

    @property
    def padding(self) -> int | None:
        return self.missing

    def add(self, name: str, source: Source, builder: Builder) -> None:
        ids, offsets = _bags(self, source.arrays[name], self.separator)
        kept = np.minimum(np.diff(offsets), self.length)
        padded = np.full((len(kept), self.length), self.missing, np.int64)
        column = np.arange(self.length)
        filled = column < kept[:, None]
        padded[filled] = ids[((offsets[1:] - kept)[:, None] + column)[filled]]
        builder.value(name, torch.from_numpy(padded))


@dataclasses.dataclass(frozen=True)
class Pair(Feature):
    """A feature made of two others of one id a sample: int64 (B,).

    Its id is the XXH64 of 16 bytes: both ids (before ``rows=``) as little-endian int64, one after the
    other. An id that is missing counts as -1.
    """

    kind = "pair"

    of: tuple[str, str]
    """Names of two columns of the schema of the kind `Id`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "of", names("of", self.of, 2))

    @property
    def hashes(self) -> bool:
        return True

    def reads(self, name: str) -> tuple[str, ...]:
        return self.of

    def add(self, name: str, source: Source, builder: Builder) -> None:
        both = np.ascontiguousarray(np.stack([source.ids(one) for one in self.of], axis=1), "<i8")
        ids = np.empty(len(both), np.int64)
        _core.hash_ids(both.ctypes.data, 0, 16, len(ids), 0, ids.ctypes.data)
        builder.ids(name, self.stored(ids))


@dataclasses.dataclass(frozen=True)
class Key(Column):
    """A column that tells samples apart and is no feature: ``batch[name]``, a list of B strings."""

    kind = "key"

    values: str = "text"
    """``"text"``: strings, "" where one is missing; ``"int"``: an int64 tensor (B,), -1 where one is."""

    def __post_init__(self) -> None:
        choice("values", self.values, ("text", "int"))

    def add(self, name: str, source: Source, builder: Builder) -> None:
        if self.values == "int":
            builder.value(name, torch.from_numpy(integers(source.arrays[name]).copy()))
        else:
            builder.value(name, texts(source.arrays[name]))


def _finite(made: NDArray[np.float32], given: NDArray[np.float64]) -> NDArray[np.float32]:
    """`made`, of which none is infinite; raises BadValue."""
    wrong = np.isinf(made)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadValue(
            row, f"{given[row]:g} is infinite as float32. Clean it, or take its logarithm."
        )
    return made


def _bags(column: _OfValues, array: pa.Array, separator: str) -> tuple[Ints, Ints]:
    """(ids, offsets) of bags without the ids that are missing; raises BadValue."""
    values, offsets = bags_of(array, separator)
    try:
        ids = column.raw(values)
        present = ids != MISSING
        ids = column.stored(ids)
    except BadValue as wrong:
        if wrong.row is None:
            raise
        row = int(np.searchsorted(offsets, wrong.row, side="right")) - 1
        raise BadValue(row, wrong.text) from None
    if present.all():
        return ids if ids.flags.writeable else ids.copy(), offsets
    before = np.append(0, np.cumsum(present))
    return ids[present], before[offsets]


KINDS: Mapping[str, type[Column]] = {
    kind.kind: kind for kind in (Label, Number, Id, Ids, Sequence, Pair, Key)
}
"""Kinds of columns by their names in schema files."""
