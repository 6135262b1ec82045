"""Statistics of the columns of files, as `hotbed data stats` shows them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotbed.data.arrow_files import file_of, require_arrow
from hotbed.data.arrow_values import MISSING, BadValue, bags_of, hashed, integers, numbers
from hotbed.data.id_counts import IdCounts, Skew
from hotbed.data.lines import DataError
from hotbed.data.paths import Paths, files_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ColumnStatistics", "statistics_of"]

_SEPARATORS = ("|", ";")
_SEPARATED_SHARE = 0.05
"""Of values with a separator in the first piece, from which on a column of text is taken for bags."""


@dataclasses.dataclass(frozen=True)
class ColumnStatistics:
    """One column of files. Shares are of rows, or of ids in bags."""

    name: str
    arrow_type: str
    """Arrow's name of the type of its values in the first file; text files have text."""
    rows: int
    missing: int
    """Rows without a value."""
    distinct: int
    """Distinct values, or values in bags."""
    is_exact: bool
    """False if `distinct` and `skew` are estimates."""
    skew: Skew
    is_numeric: bool
    """True if all values are numbers, in columns of text, too."""
    is_integral: bool
    """True if all values are integers, in columns of floats or text, too."""
    separator: str | None
    """Separator of bags in text; "" if they are Arrow's lists; None if values are no bags."""
    low: float = math.nan
    """Least number."""
    mean: float = math.nan
    high: float = math.nan
    std: float = math.nan
    longest: int = 0
    """Values in the longest bag."""

    @property
    def is_unreadable(self) -> bool:
        """True if the type is none of those that are read, such as a date."""
        return self.rows > 0 and self.distinct == 0 and self.missing < self.rows


def statistics_of(
    paths: Paths,
    rows: int | None = None,
    *,
    names: Sequence[str] | None = None,
    header: Sequence[str] | None = None,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> list[ColumnStatistics]:
    """Return the statistics of columns in their order.

    Args:
        paths: as `hotbed.data.open` has them.
        rows: read so many from the beginning; None: all.
        names: columns; None: all of the first file.
        header: names of the columns of text files without a header.
        progress: called with the rows read, and how many there are, if that is known.

    Raises:
        DataError: a damaged file, a column that is missing in one or there twice.
    """
    require_arrow()
    files = [file_of(path, header) for path in files_of(paths)]
    wanted = files[0].columns(list(files[0].names() if names is None else names))
    known = [file.known_rows() for file in files]
    total = None if None in known else sum(count or 0 for count in known)
    most = rows if total is None or rows is None else min(rows, total)
    gathered = {name: _Gathered(name) for name in wanted}
    done = 0
    for file in files:
        if rows is not None and done >= rows:
            break
        for piece in file.batches(file.columns(wanted)):
            piece = piece if rows is None else piece.slice(0, min(rows - done, piece.num_rows))
            for name, one in gathered.items():
                _add(one, piece.column(name), file.path)
            done += piece.num_rows
            progress(done, total if rows is None else most)
            if rows is not None and done >= rows:
                break
    return [one.statistics() for one in gathered.values()]


def _add(gathered: _Gathered, array: pa.Array, path: str) -> None:
    try:
        gathered.add(array)
    except BadValue as wrong:
        raise DataError(f"{path}, column {gathered.name!r}: {wrong.text}") from None


class _Gathered:
    """Numbers of one column so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._type = ""
        self._separator: str | None = None
        self._is_text = self._is_unreadable = False
        self._is_numeric = self._is_integral = True
        self._rows = self._missing = self._longest = 0
        self._counts = IdCounts()
        self._count = 0
        self._sums = np.zeros(2)  # of numbers, and of their squares, less the first one
        self._shift: float | None = None
        self._low, self._high = math.inf, -math.inf

    def add(self, array: pa.Array) -> None:
        if not self._type:
            self._begin(array)
        self._rows += len(array)
        if self._separator is not None:
            array, offsets = bags_of(array, self._separator)
            lengths = np.diff(offsets)
            self._missing += int((lengths == 0).sum())
            self._longest = max(self._longest, int(lengths.max(initial=0)))
        values = self._numbers(array) if self._is_numeric else None
        if values is None or self._is_text:
            ids = self._ids(array)
        else:  # integers of 64 bits have more digits than floats
            ids = values.view(np.int64) if _is_float(array) else _integers(array)
        present = ids != MISSING if values is None else ~np.isnan(values)
        ids = ids[present]
        self._counts.add(ids)
        if self._separator is None:
            self._missing += int((~present).sum())

    def _begin(self, array: pa.Array) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        kind = array.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        self._type = "text" if pa.types.is_binary(kind) else str(kind)
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if any(test(kind) for test in lists):
            self._type = f"list of {kind.value_type}"
            self._separator = ""
        plain = str(kind) in ("string", "large_string", "string_view", "binary", "large_binary")
        self._is_text = plain
        text = pc.cast(array, pa.large_binary()) if plain else array
        for separator in _SEPARATORS if plain and len(array) else ():
            found = pc.sum(pc.match_substring(text, separator)).as_py() or 0
            if found > _SEPARATED_SHARE * max(1, len(array) - array.null_count):
                self._separator = separator

    def _numbers(self, array: pa.Array) -> NDArray[np.float64] | None:
        """The array as numbers, which are taken in; None if it is something else."""
        try:
            values = numbers(array)
        except BadValue:
            self._is_numeric = self._is_integral = False
            return None
        found = values[np.isfinite(values)]
        if len(found):
            shift = self._shift = float(found[0]) if self._shift is None else self._shift
            self._is_integral = self._is_integral and bool((np.trunc(found) == found).all())
            self._count += len(found)
            with np.errstate(over="ignore", invalid="ignore"):
                self._sums += (found - shift).sum(), np.square(found - shift).sum()
            self._low = min(self._low, float(found.min()))
            self._high = max(self._high, float(found.max()))
        return values

    def _ids(self, array: pa.Array) -> NDArray[np.int64]:
        """The array's values as ids to be counted. Those that are no values for ids are none."""
        try:
            return hashed(array)
        except BadValue:
            self._is_numeric = self._is_integral = False
            return np.empty(0, np.int64)

    def statistics(self) -> ColumnStatistics:
        """Return all that was found out."""
        numeric = self._is_numeric and self._count > 0
        mean = std = math.nan
        if numeric:
            shifted, squares = (self._sums / self._count).tolist()
            mean = shifted + (self._shift or 0.0)
            is_finite = math.isfinite(squares)
            std = math.sqrt(max(0.0, squares - shifted**2)) if is_finite else math.inf
        return ColumnStatistics(
            self.name,
            self._type or "no rows",
            self._rows,
            self._missing,
            self._counts.distinct(),
            self._counts.is_exact,
            self._counts.skew(),
            numeric,
            numeric and self._is_integral,
            self._separator,
            self._low if numeric else math.nan,
            mean,
            self._high if numeric else math.nan,
            std,
            self._longest,
        )


def _is_float(array: pa.Array) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(array.type) or pa.types.is_decimal(array.type))


def _integers(array: pa.Array) -> NDArray[np.int64]:
    import pyarrow as pa

    if pa.types.is_unsigned_integer(array.type):
        array = array.cast("uint64").view("int64")
    return integers(array)
