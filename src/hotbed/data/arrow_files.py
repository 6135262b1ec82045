"""Files of columns: Parquet, and text with commas or tabs, as Arrow reads them."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, ClassVar

from hotbed.data.lines import DataError
from hotbed.text import brief

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq

__all__ = ["ColumnFile", "file_of", "require_arrow"]

_PARQUET, _ENCRYPTED, _ARROW = b"PAR1", b"PARE", b"ARROW1"
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
_BLOCK_BYTES = 1 << 22
_HEADER_BYTES = 1 << 20
_PIECE_ROWS, _PIECE_BYTES = 1 << 16, 1 << 25
_DELIMITERS = ("\t", ",", ";", "|")
_WRONG_LINE = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+): ?(.*)")


class ColumnFile(ABC):
    """A file of rows with named columns, of which some are read."""

    format: ClassVar[str]

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all columns, in their order."""

    @abstractmethod
    def known_rows(self) -> int | None:
        """Number of rows, if that is known without reading them."""

    @abstractmethod
    def batches(self, names: Sequence[str], start: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield the rows from row `start` on, some megabytes at a time, with these columns."""

    def count_rows(self) -> int:
        """Number of rows; reads the file through where it does not tell."""
        rows = self.known_rows()
        if rows is not None:
            return rows
        names = self.names()
        known = [name for name in names if names.count(name) == 1 and "\ufffd" not in name]
        return sum(batch.num_rows for batch in self.batches((known or names)[:1]))

    def columns(self, wanted: Sequence[str]) -> list[str]:
        """Return `wanted`; raises DataError where the file has not each of them once."""
        names = self.names()
        for name in wanted:
            if "\ufffd" in name:
                raise DataError(
                    f"{self.path}: the name of column {name!r} is not text in UTF-8. Write it in UTF-8."
                )
            found = names.count(name)
            if found != 1:
                have = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
                said = f"{found} columns" if found else "no column"
                raise DataError(
                    f"{self.path} has {said} of the name {name!r}; it has {have or 'none'}."
                    f"{'' if found else self.remedy}"
                )
        return list(wanted)

    remedy: ClassVar[str] = ""
    """What to do where a column is missing."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Raise as DataError whatever Arrow raises of a damaged file."""
        try:
            yield
        except (DataError, FileNotFoundError, PermissionError, IsADirectoryError, MemoryError):
            raise
        except (OSError, ValueError, NotImplementedError, KeyError) as error:
            raise DataError(self.said(" ".join(str(error).split())[:300].rstrip("."))) from None

    def said(self, text: str) -> str:
        """The message for an error of Arrow's."""
        return f"{self.path} cannot be read as {self.format}: {text}. Fetch or write it again."


class Parquet(ColumnFile):
    """A Parquet file."""

    format = "Parquet"

    def names(self) -> list[str]:
        with self.reading(), self._open() as file:
            return list(file.schema_arrow.names)

    def known_rows(self) -> int:
        with self.reading(), self._open() as file:
            return int(file.metadata.num_rows)

    def batches(self, names: Sequence[str], start: int = 0) -> Iterator[pa.RecordBatch]:
        with self.reading(), self._open() as file:
            metadata, groups = file.metadata, list(range(file.metadata.num_row_groups))
            while groups and start >= metadata.row_group(groups[0]).num_rows:
                start -= metadata.row_group(groups.pop(0)).num_rows
            for batch in file.iter_batches(
                _piece_rows(metadata),
                row_groups=groups,
                columns=list(names),
                use_threads=_threads(),
            ):
                passed = min(start, batch.num_rows)
                start -= passed
                yield batch.slice(passed)

    def _open(self) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.path, pre_buffer=False, page_checksum_verification=True)


class Delimited(ColumnFile):
    """Text with a line a row: CSV, TSV, or with semicolons, plain or compressed. All values are bytes.

    Args:
        header: names of the columns where the first line is a row already.
    """

    format = "CSV"
    remedy = " If the first line is no header, pass columns=[...]."

    def __init__(self, path: str, header: Sequence[str] | None) -> None:
        super().__init__(path)
        self._header = None if header is None else list(header)
        self._delimiter = ","
        self._is_without_rows = False

    def known_rows(self) -> None:
        return None

    def said(self, text: str) -> str:
        found = _WRONG_LINE.search(text)
        if found is None:
            return super().said(text)
        number, expected, got, line = found.groups()
        row = int(number) - (self._header is None)
        return (
            f"{self.path}, row {row}: {expected} values expected, a column each, got {got}: {brief(line)}. "
            f"Mend the line; a value with {self._delimiter!r} in it needs quotes."
        )

    def names(self) -> list[str]:
        return self._header if self._header is not None else self._first_row()

    def batches(self, names: Sequence[str], start: int = 0) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.csv as pa_csv

        first = self._first_row()
        if self._is_without_rows or not first:
            return
        with self.reading(), self._stream() as stream:
            quotes = _Quotes(stream)
            rows = pa_csv.open_csv(
                pa.PythonFile(quotes, "r"),
                pa_csv.ReadOptions(
                    use_threads=False, block_size=_BLOCK_BYTES, column_names=self._header
                ),
                pa_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                _as_bytes(names),
            )
            for batch in rows:
                passed = min(start, batch.num_rows)
                start -= passed
                yield batch.slice(passed)
        if quotes.count % 2:
            self._refuse_open_quote()

    def head(self, size: int) -> bytes:
        """Return the first bytes, decompressed."""
        with self.reading(), self._stream() as stream:
            return bytes(stream.read(size))

    def _stream(self) -> pa.NativeFile:
        import pyarrow as pa

        return pa.input_stream(self.path, compression=_compression(_head(self.path)))

    def _first_row(self) -> list[str]:
        """Return the values of the first line that is not blank, and find out the delimiter."""
        head = self.head(_HEADER_BYTES).removeprefix(b"\xef\xbb\xbf")
        text = head.decode("utf-8", "replace").lstrip("\r\n")
        line = text.partition("\n")[0].rstrip("\r")
        if "\0" in line:
            raise DataError(
                f"{self.path} is neither Parquet nor text: its first line has zero bytes."
            )
        if not line and self._header is None:
            raise DataError(f"{self.path} is empty: there is no header with names of columns.")
        # Arrow takes a header without an end for no file.
        self._is_without_rows = self._header is None and text == line
        columns = 0 if self._header is None else len(self._header)
        bare = re.sub('"[^"]*"?', "", line)
        delimiter = max(
            _DELIMITERS,
            key=lambda one: (bare.count(one) == columns - 1, bare.count(one), one == "\t"),
        )
        self._delimiter = delimiter if delimiter in bare else ","
        with self.reading():
            return next(csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter), [])

    def _refuse_open_quote(self) -> None:
        """Raise DataError where a quote that is never closed has swallowed the last lines.

        Python's reader tells that; it is slow, and asked where the number of quotes is odd.
        """
        last: list[str] = []
        number = 0
        with self._stream() as stream:
            text = io.TextIOWrapper(stream, "utf-8", "replace", newline="")
            try:
                for row in csv.reader(text, delimiter=self._delimiter):
                    last, number = row, number + 1
            except csv.Error:  # a field that is too long
                number, last = number + 1, ["\n"]
        if last and "\n" in last[-1]:
            raise DataError(
                f"{self.path}, row {number - (self._header is None)}: a quote is never closed, so all lines "
                "behind it are one value. Close it, or write a quote within quotes twice."
            )


class _Quotes(io.RawIOBase):
    """A stream that counts the quotes that were read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        self.count += data.count(b'"')
        return data

    def readable(self) -> bool:
        return True


def file_of(path: str, header: Sequence[str] | None = None) -> ColumnFile:
    """The file at `path`, of the kind that its first bytes tell.

    Args:
        header: names of the columns of text without a header.

    Raises:
        DataError: a kind that is not read.
    """
    head = _head(path)
    if head.startswith(_PARQUET):
        return Parquet(path)
    compressed = _compression(head)
    inside = head
    if compressed is not None:
        inside = Delimited(path, header).head(8)
    name = os.path.basename(path).lower()
    if compressed and inside.startswith(_PARQUET):
        raise DataError(
            f"{path} is a Parquet file inside {compressed}. Decompress it: Parquet compresses its columns."
        )
    if inside.startswith((_ENCRYPTED, _ARROW)):
        kind = "an Arrow (Feather)" if inside.startswith(_ARROW) else "an encrypted Parquet"
        raise DataError(f"{path} is {kind} file, which is not read. Write it as Parquet.")
    if name.endswith((".parquet", ".pq")):
        raise DataError(f"{path} does not begin as a Parquet file does. Fetch or write it again.")
    return Delimited(path, header)


def require_arrow() -> None:
    """Raise DataError where pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise DataError("Reading columns needs pyarrow: pip install hotbed[arrow].") from None


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(8)


def _compression(head: bytes) -> str | None:
    return next((name for magic, name in _COMPRESSIONS.items() if head.startswith(magic)), None)


def _piece_rows(metadata: pq.FileMetaData) -> int:
    """Rows that are read at a time, so that long lists take no more memory than short ones."""
    groups = [metadata.row_group(at) for at in range(min(metadata.num_row_groups, 16))]
    rows = sum(group.num_rows for group in groups)
    width = sum(group.total_byte_size for group in groups) // max(rows, 1)
    return max(1, min(_PIECE_ROWS, _PIECE_BYTES // max(int(width), 1)))


def _threads() -> bool:
    """True if Arrow may decode columns side by side: not in a DataLoader's workers."""
    from torch.utils.data import get_worker_info

    return get_worker_info() is None


def _as_bytes(names: Sequence[str]) -> pa_csv.ConvertOptions:
    """Options for columns as bytes; what is empty is null."""
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    return pa_csv.ConvertOptions(
        include_columns=list(names),
        column_types=dict(zip(names, itertools.repeat(pa.binary()), strict=False)),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
        check_utf8=False,
    )
