"""`hotbed inspect`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from hotbed.cli.errors import in_one_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from hotbed.places.tiered.hottest import Used

_SHOWN = 5
"""Hottest ids of a table; all that were noted are in the JSON."""


def inspect(
    path: Annotated[str, typer.Argument(metavar="DIR", help="The --ssd folder of a run.")],
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
) -> None:
    """Show what the log of a run holds: tables, rows, bytes, hottest ids, and what a crash has cost.

    Reads all of it and changes nothing. A log that a run is writing cannot be inspected. Ids that
    `hotbed train` has met are shown as click logs write them, those of other runs in decimal.

    [bold]Example[/bold]

      [cyan]hotbed inspect /nvme/rows[/cyan]
    """
    from rich.console import Console

    console = Console()
    with in_one_sentence():
        from hotbed.places.tiered.hottest import noted
        from hotbed.train.paths import Folder, Named, refuse_clashes
        from hotbed.train.report import check_writable_file, write_json
        from hotbed.train.run_note import ids_are_hexadecimal, is_of_a_run

        if json is not None:
            named = [Named("--json", json)]
            refuse_clashes([], named, [Folder(Named("DIR", path), is_of_a_run)])
            check_writable_file(json)
        with Console(stderr=True).status("Reading the log ..."):
            found = contents(Path(path))
        used = noted(Path(path))
        if json is not None:
            write_json(json, {"logs": found, "hottest": used})
        for log in found:
            _show(log, console)
        _show_hottest(used, _hexadecimal if ids_are_hexadecimal(path) else str, console)


class TableContents(TypedDict):
    """Rows of one table in a log."""

    table: str
    ids: str | int
    rows: int
    record_bytes: int


class LogContents(TypedDict):
    """Rows in a log, and what it takes on the disk."""

    path: str
    tables: list[TableContents]
    segments: int
    bytes: int
    live_bytes: int
    superseded_records: int
    dropped_blocks: list[dict[str, str | int]]


def contents(folder: Path) -> list[LogContents]:
    """Return the rows in the logs of a folder, or of the folders ``rows-<n>`` in it.

    Raises:
        StorageError: there is none, or one is in use or damaged beyond reading.
    """
    from hotbed import _core
    from hotbed.errors import StorageError
    from hotbed.places.tiered.folder import logs_in

    if "\0" in str(folder):
        raise StorageError(f"{str(folder)!r} is no path: it has a zero byte.")
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise StorageError(f"{str(folder)!r} is no path in UTF-8.") from None
    folders = logs_in(folder) or [folder]
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder. Name the --ssd folder of a run.")
    logs: list[LogContents] = []
    for each in folders:
        log = _core.RowLog.open_to_read(str(each))
        statistics = log.statistics()["stores"]
        tables: list[TableContents] = [
            {
                "table": name,
                "ids": "any" if limit is None else limit,
                "rows": log.rows(store, number),
                "record_bytes": record_bytes,
            }
            for store, (record_bytes, described) in enumerate(log.stores)
            for number, name, limit in described
        ]
        recovery = log.recovery()
        logs.append(
            {
                "path": str(each),
                "tables": tables,
                "segments": sum(store["segments"] for store in statistics),
                "bytes": sum(store["bytes"] for store in statistics),
                "live_bytes": sum(store["live_bytes"] for store in statistics),
                "superseded_records": sum(store["superseded"] for store in recovery),
                "dropped_blocks": [
                    block for store in recovery for block in store["dropped_blocks"]
                ],
            }
        )
        log.close()
    return logs


def _show(log: LogContents, console: Console) -> None:
    from rich.table import Table

    from hotbed.train.progress import literal

    table = Table(title=literal(log["path"]), title_justify="left")
    for heading in ("table", "ids", "rows", "bytes a row", "MB"):
        table.add_column(heading, justify="left" if heading == "table" else "right")
    for each in log["tables"]:
        if not each["rows"]:
            continue
        ids = f"0 .. {each['ids'] - 1:,}" if isinstance(each["ids"], int) else each["ids"]
        mb = each["rows"] * each["record_bytes"] / 1e6
        table.add_row(
            literal(each["table"]),
            ids,
            f"{each['rows']:,}",
            f"{each['record_bytes']:,}",
            f"{mb:,.1f}",
        )
    if table.rows:
        console.print(table)
    empty = [each["table"] for each in log["tables"] if not each["rows"]]
    if empty:
        console.print(literal(f"{log['path']}: no rows of {', '.join(empty)}."))
    share = log["live_bytes"] / log["bytes"] if log["bytes"] else 1.0
    console.print(
        f"{log['segments']:,} segments, {log['bytes'] / 1e6:,.1f} MB, {share:.0%} of it live; "
        f"{log['superseded_records']:,} older records."
    )
    for block in log["dropped_blocks"]:
        where = f"{block['path']} at {block['offset']:,}"
        console.print(literal(f"Dropped: {where}: {block['reason']}."))


def _hexadecimal(row: int) -> str:
    """An id as a click log writes it."""
    return f"{row:08x}" if row >= 0 else "missing"


def _show_hottest(
    used: dict[str, list[Used]], written: Callable[[int], str], console: Console
) -> None:
    from rich.table import Table

    from hotbed.train.progress import literal

    if not any(used.values()):
        console.print("Hottest ids: none were noted; a run notes them when it ends or is flushed.")
        return
    table = Table(title="Hottest ids (how often they were used, at most)", title_justify="left")
    for heading in ("table", "ids"):
        table.add_column(heading)
    for name, rows in used.items():
        if rows:
            shown = ", ".join(f"{written(row)} ({uses:,})" for row, uses, _ in rows[:_SHOWN])
            table.add_row(literal(name), shown)
    console.print(table)
