"""Types of what a manifest says."""

from __future__ import annotations

from typing import Any, TypedDict

from typing_extensions import NotRequired

from hotbed.files import Json

__all__ = [
    "Base",
    "FileEntry",
    "FileRows",
    "History",
    "LinkedLog",
    "LinkedRows",
    "Manifest",
    "ModelEntry",
    "RuleEntry",
    "SizedFile",
    "Source",
    "TableDescription",
    "TableEntry",
    "Written",
]


class FileRows(TypedDict):
    """Rows of one table in a file."""

    count: int
    columns: list[int]
    """First column, and the one behind the last."""


class Written(TypedDict):
    """Size of a file, and checksums of its chunks."""

    bytes: int
    crc32c: list[str]


class SizedFile(TypedDict):
    """A file and its size."""

    name: str
    bytes: int


class FileEntry(Written):
    """A file, and the rows in it by table."""

    name: str
    rows: dict[str, FileRows]


class LinkedRows(FileRows):
    """Rows of one table in a row log."""

    store: int
    number: int
    """The table's, in the store."""
    first: int
    stride: int
    """An id of the log is ``first + stride * id`` in the table."""


class LinkedLog(TypedDict):
    """A row log whose files are linked, and the rows in it by table."""

    name: str
    """Folder."""
    files: list[SizedFile]
    rows: dict[str, LinkedRows]


Source = FileEntry | LinkedLog
"""What has rows of tables."""


class History(TypedDict):
    """Steps that rows may have missed, of a rule with ``untouched="exact"``."""

    forgotten: int
    base: list[float]
    largest: list[float]
    numbers: list[str]
    last: list[float]
    runs: list[list[float]]


class RuleEntry(TypedDict):
    """How a table was stepped."""

    name: str
    options: dict[str, bool]
    initial_accumulator_value: float
    untouched: str
    states: list[list[str | int]]
    """Name and width of each."""
    steps: int
    history: History | None


class TableDescription(TypedDict):
    """A `hotbed.Table` but for its name."""

    rows: int | None
    dim: int
    dtype: str
    combiner: str | None
    padding_idx: int | None
    init: dict[str, Json] | None


class TableEntry(TableDescription):
    """A table whose rows were saved."""

    key: str | None
    rule: RuleEntry | None
    removed: int | None
    """Ids that went since the base, of a table of which only what has changed since is here; None: all rows
    are."""


class ModelEntry(TypedDict):
    """One of `hotbed.models`, and the arguments that make it again."""

    name: str
    arguments: dict[str, Any]
    schema: NotRequired[dict[str, Json]]
    """Columns of the data that it was made for, as `hotbed.data.Schema.as_json` has them."""


class Base(TypedDict):
    """The checkpoint since which another one has what has changed."""

    name: str
    """Folder, beside the other's."""
    uid: str


class Manifest(TypedDict):
    """The manifest of a checkpoint."""

    format: str
    version: int
    step: int
    base: Base | None
    uid: NotRequired[str]
    """A number of its own."""
    model: NotRequired[ModelEntry | None]
    tables: dict[str, TableEntry]
    files: list[FileEntry]
    linked: NotRequired[list[LinkedLog]]
    values: dict[str, Json]
