"""Where rows may lie: `Storage`, and how sizes are written."""

from __future__ import annotations

import dataclasses
import numbers
import os
import re
from collections.abc import Sequence
from fractions import Fraction

from hotbed import _core
from hotbed.arrays import integer
from hotbed.errors import StorageError
from hotbed.tables import Table
from hotbed.text import brief

__all__ = ["INDEX_BYTES", "Storage", "parse_bytes"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

MOST_BYTES = 2**60
"""Of a budget: sums and products of budgets and row sizes stay below 2**64."""

INDEX_BYTES = 4
"""Of a row of a static table in the index of the SSD."""

_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_BELOW_SSD = 64
"""Bytes that names of files below the directory add."""


def parse_bytes(size: int | str) -> int:
    """Bytes of ``"8GB"``, ``"1.5 GiB"`` or a plain number.

    Raises:
        StorageError: it is none of these, or more than 2**60.
    """
    given = integer(size)
    if isinstance(size, str) and len(size) <= 1000:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match and (unit := _UNITS.get(match[2].upper())) is not None:
            given = int(Fraction(match[1]) * unit)
    if given is None or given < 0:
        raise StorageError(
            f"A size is a number of bytes or like '8GB' or '512MiB', not {brief(size)}."
        )
    if given > MOST_BYTES:
        raise StorageError(
            f"A size is at most {MOST_BYTES:,} bytes (2**60), not {brief(size)}. Give what the machine "
            "has."
        )
    return given


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Budgets for the tiers of a collection. What is not named does not exist and costs nothing.

    >>> hb.Storage(host="2GB", ssd="rows")                  # a CPU machine
    >>> hb.Storage(device="4GB", host="32GB", ssd="rows")   # a GPU machine

    Budgets count everything that is kept for the tables of a collection together: rows, optimizer
    states, indices (the SSD's lie in memory), and rows on their way. Sizes are bytes, or text such as
    ``"8GB"``. With `host` alone all rows must fit; what needs more raises `StorageError` and changes
    nothing.

    Raises:
        StorageError: a field that cannot be honoured.
    """

    device: int | str | None = None
    """Memory of the device that computes: after ``model.to("cuda")`` the GPU's. Until then, a region of
    its own in RAM stands in for it, so that the same code runs."""

    host: int | str | None = None
    """RAM. Without ``device`` this is the tier that computes."""

    ssd: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """A directory for the rows that fit nowhere else; it is made if it does not exist, and locked
    while the collection lives. Relative to the working directory of now. Without it, all rows must fit
    into the tiers above. In a process group (``torch.distributed``) each process has a folder ``rank-<r>``
    in it; of a list of directories, one for each drive, processes of a machine take them in turn."""

    reset: bool = False
    """Delete the logs that earlier runs left at ``ssd``, and nothing else there. Without it, a directory
    that holds rows is refused: rows of different steps cannot be trained on."""

    space_ratio: float = 1.5
    """The log takes at most this many times the bytes of its live rows (and a few segments), and what is
    written to it while a checkpoint is saved in the background; down to 1.15. Smaller means more
    rewriting."""

    def __post_init__(self) -> None:
        for name in ("device", "host"):
            size = getattr(self, name)
            if size is not None:
                try:
                    bytes_ = parse_bytes(size)
                except StorageError as error:
                    raise StorageError(f"Storage({name}={brief(size)}): {error}") from None
                if not bytes_:
                    raise StorageError(f"Storage({name}={size!r}): a budget must be above 0.")
                object.__setattr__(self, name, bytes_)
        if self.ssd is not None:
            several = isinstance(self.ssd, (list, tuple))
            paths = tuple(map(_directory, self.ssd if several else [self.ssd]))  # type: ignore[arg-type]
            if not paths:
                raise StorageError("Storage(ssd=[]) names no directory; give one or more, or None.")
            object.__setattr__(self, "ssd", paths if len(paths) > 1 else paths[0])
            if self.host is None:
                raise StorageError(
                    "Storage(ssd=...) needs host=, the memory that its index and its hottest rows "
                    "may take, such as host='2GB'."
                )
        if self.device is not None and self.host is None:
            raise StorageError("Storage(device=...) needs host=, where rows go that do not fit.")
        if not isinstance(self.reset, bool):
            raise StorageError(
                f"Storage(reset={brief(self.reset)}) must be True or False: True deletes rows."
            )
        numeric = isinstance(self.space_ratio, numbers.Real)
        if not numeric or not 1.15 <= self.space_ratio <= 100:
            raise StorageError(
                f"Storage(space_ratio={brief(self.space_ratio)}) must lie between 1.15 and 100."
            )
        object.__setattr__(self, "space_ratio", float(self.space_ratio))

    @property
    def budgets(self) -> tuple[int, int]:
        """Bytes of (the tier that computes, the host's tier below it or 0)."""
        host, device = parse_bytes(self.host or 0), parse_bytes(self.device or 0)
        return (device, host) if device else (host, 0)

    @property
    def tiered(self) -> bool:
        """True if rows may leave the tier that computes."""
        return self.device is not None or self.ssd is not None

    def memory_budget(self) -> _core.MemoryBudget | None:
        """Return a fresh budget where all rows must fit into the host's memory, else None."""
        if self.tiered or self.host is None:
            return None
        return _core.MemoryBudget(parse_bytes(self.host))

    def check_fit(self, tables: Sequence[Table]) -> None:
        """Raise StorageError where the tables take more from the start than there may be."""
        if self.ssd is not None:
            self._check_log(tables)
        if self.tiered or self.host is None:
            return
        assert isinstance(self.host, int)
        needed = sum((t.rows or 0) * t.dim * t.dtype.itemsize for t in tables)
        if needed > self.host:
            raise StorageError(
                f"Storage(host={self.host:,}): the tables' weights alone take {needed:,} bytes. Raise "
                f"it to at least {needed:,}, or give an ssd= path for the rows that do not fit."
            )

    def _check_log(self, tables: Sequence[Table]) -> None:
        assert isinstance(self.host, int)
        index = INDEX_BYTES * sum(t.rows or 0 for t in tables)
        if index > self.host:
            largest = max(tables, key=lambda t: t.rows or 0)
            raise StorageError(
                f"The SSD's index of static tables lies in host memory, {INDEX_BYTES} bytes for each "
                f"row that there can be; table {largest.name!r} has rows={largest.rows:,}. Raise "
                f"Storage(host={self.host:,}) to at least {index:,} bytes, or pass rows=None, with "
                "which only ids that were met take memory."
            )
        for table in tables:
            record = table.dim * table.dtype.itemsize
            if record > _core.MOST_RECORD_BYTES:
                raise StorageError(
                    f"Table {table.name!r}: a row of dim {table.dim} takes {record:,} bytes, and a "
                    f"row on an SSD at most {_core.MOST_RECORD_BYTES:,}, optimizer states included. "
                    "Use a smaller dim or dtype."
                )
        sizes = len({(table.dim, table.dtype) for table in tables})
        if sizes > _core.MOST_RECORD_SIZES:
            raise StorageError(
                f"Storage(ssd=...): the tables have {sizes} different pairs of dim and dtype, and rows "
                f"of at most {_core.MOST_RECORD_SIZES} sizes can lie in one folder. Make several "
                "collections, with a folder each, or give tables the same dim."
            )


def _directory(given: str | os.PathLike[str]) -> str:
    """The absolute path that is meant.

    Raises:
        StorageError: no directory can be there.
    """
    named = f"Storage(ssd={brief(given)})"
    try:
        path = os.fsdecode(os.fspath(given))
    except TypeError:
        raise StorageError(f"{named} is no path; give text in UTF-8 or a pathlib.Path.") from None
    if not path or "\0" in path:
        raise StorageError(f"{named} is no path: it {'holds a NUL' if path else 'is empty'}.")
    try:
        path = os.path.abspath(path)
        total, longest = len(path.encode()), max(len(n.encode()) for n in path.split(os.sep))
    except UnicodeEncodeError:
        raise StorageError(f"{named} is no path; give text in UTF-8 or a pathlib.Path.") from None
    except OSError as error:  # of the working directory
        raise StorageError(f"{named} leads nowhere: {error}.") from None
    if longest > _LONGEST_NAME or total > _LONGEST_PATH - _BELOW_SSD:
        raise StorageError(
            f"{named} is too long: {total:,} bytes, and {longest:,} in its longest name, where "
            f"{_LONGEST_PATH - _BELOW_SSD:,} and {_LONGEST_NAME} are possible."
        )
    if os.path.exists(path) and not os.path.isdir(path):
        raise StorageError(f"{named} is a file; give a directory.")
    return path
