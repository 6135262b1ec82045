"""`hotbed data`: stats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hotbed.cli.errors import in_one_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from hotbed.data import Schema
    from hotbed.data.guesses import Guess
    from hotbed.data.statistics import ColumnStatistics

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

_ROWS = 1_000_000
_DIM, _FLOATS = 16, 3
"""Of proposed tables: width, and numbers that Adam keeps of each weight, with the weight."""


@app.callback()
def data() -> None:
    """Look at data in Parquet, CSV or TSV files. Changes nothing.

    [bold]Example[/bold]

      [cyan]hotbed data stats clicks.parquet --out schema.toml[/cyan]
      Shows what the columns hold, and writes a schema for hotbed.data.open.
    """


@app.command()
def stats(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, folders or 'patterns*'.")
    ],
    schema: Annotated[
        str | None,
        typer.Option("--schema", metavar="FILE", help="Columns of this schema, as they are there."),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE.toml", help="Write the schema here.")
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write a picture of each id column's skew."),
    ] = None,
    rows: Annotated[
        int,
        typer.Option("--rows", metavar="N", help="Read so many rows from the beginning.", min=1),
    ] = _ROWS,
    every: Annotated[bool, typer.Option("--all", help="Read all rows.")] = False,
    columns: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Names of the columns, if text has no header."),
    ] = None,
) -> None:
    """Show what the columns of files hold, and propose a schema and tables for them.

    Of each column: its type, missing values, distinct values (with ~ an estimate), skew, numbers, and
    a guess at its kind. Look the guesses over before you train: a number that names a thing is an id.

    The skew is the share of lookups that the most frequent id has, and the most frequent hundredth of
    ids: the larger it is, the more a small fast tier serves.

    [bold]Examples[/bold]

      [cyan]hotbed data stats clicks.parquet[/cyan]
      Reads the first million rows.

      [cyan]hotbed data stats days/ --all --out schema.toml --html skew.html[/cyan]
      Reads all files of a folder, writes a schema to edit, and a page with pictures.

      [cyan]hotbed data stats 'days/*.csv.gz' --schema schema.toml --out schema.toml[/cyan]
      Keeps the kinds of a schema, and writes means and deviations of its numbers anew.

      [cyan]hotbed data stats log.tsv --columns label,price,user[/cyan]
      Names the columns of a file without a header.
    """
    from rich.console import Console

    console = Console()
    with in_one_sentence():
        from hotbed.data import Schema
        from hotbed.data.guesses import schema_of
        from hotbed.data.skew_picture import page_of
        from hotbed.train.report import complete_file, write_json

        _check_outputs(paths, schema, {"--out": out, "--json": json, "--html": html})
        given = None if schema is None else Schema.read(schema)
        header = None if columns is None else columns.split(",")
        found = _read(paths, None if every else rows, given, header)
        guesses = _guesses(found, given)
        _show(found, guesses, console, None if every else rows)
        proposed = schema_of(guesses.items()) if any(g.kind for g in guesses.values()) else None
        if proposed is not None:
            _show_tables(proposed, found, console)
        if out is not None and proposed is not None:
            proposed.write(out)
        if json is not None:
            write_json(json, _figures(found, guesses, proposed))
        if html is not None:
            features = proposed.features if proposed is not None else {}
            with complete_file(html) as file:
                file.write(page_of([c for c in found if c.name in features], ", ".join(paths)))


def _check_outputs(
    paths: Sequence[str], schema: str | None, outputs: Mapping[str, str | None]
) -> None:
    from hotbed.data.paths import files_of
    from hotbed.train.paths import Named, refuse_clashes
    from hotbed.train.report import check_writable_file

    written = [Named(option, path) for option, path in outputs.items() if path is not None]
    reads = [Named("PATH", path) for path in files_of(paths)]
    # A schema may be written anew in its place.
    reads += [Named("--schema", schema)] if schema not in (None, outputs["--out"]) else []
    refuse_clashes(reads, written)
    for named in written:
        check_writable_file(named.path)


def _read(
    paths: Sequence[str], rows: int | None, schema: Schema | None, header: Sequence[str] | None
) -> list[ColumnStatistics]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from hotbed.data.statistics import statistics_of

    names = None
    if schema is not None:
        reads = (column.reads(name) for name, column in schema.columns.items())
        names = list(dict.fromkeys(name for each in reads for name in each))
    shown = (TextColumn("Reading rows"), BarColumn(), MofNCompleteColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total)

        return statistics_of(paths, rows, names=names, header=header, progress=progress)


def _guesses(found: Sequence[ColumnStatistics], given: Schema | None) -> dict[str, Guess]:
    from hotbed.data import Label
    from hotbed.data.guesses import Guess, guess, refreshed

    if given is not None:
        by_name = {column.name: column for column in found}
        return {
            name: Guess(refreshed(kind, by_name[name]) if name in by_name else kind, "as given")
            for name, kind in given.columns.items()
        }
    guesses: dict[str, Guess] = {}
    for column in found:
        has_label = any(isinstance(one.kind, Label) for one in guesses.values())
        guesses[column.name] = guess(column, has_label)
    return guesses


def _show(
    found: Sequence[ColumnStatistics],
    guesses: Mapping[str, Guess],
    console: Console,
    most: int | None,
) -> None:
    from rich import box
    from rich.table import Table

    from hotbed.train.progress import literal, short

    rows = found[0].rows if found else 0
    table = Table(
        title=f"{rows:,} rows" if rows != most else f"The first {rows:,} rows",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("column", overflow="fold", min_width=6)
    table.add_column("type", overflow="fold", min_width=6, max_width=9)
    table.add_column("kind", no_wrap=True)
    for heading in ("missing", "distinct", "top id", "top 1%"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("min, mean, max", overflow="fold", min_width=8)
    for column in found:
        kind = guesses[column.name].kind if column.name in guesses else None
        numbers = ", ".join(f"{value:.4g}" for value in (column.low, column.mean, column.high))
        about = "" if column.is_exact else "~"
        table.add_row(
            literal(column.name),
            literal(column.arrow_type),
            "-" if kind is None else kind.kind,
            f"{column.missing / column.rows:.1%}" if column.rows else "",
            about + (f"{column.distinct:,}" if column.distinct < 1e7 else short(column.distinct)),
            f"{column.skew.first:.1%}",
            f"{column.skew.hundredth:.1%}",
            numbers if column.is_numeric else "",
        )
    console.print(table)
    left = [f"{name} ({guessed.reason})" for name, guessed in guesses.items() if not guessed.kind]
    if left:
        console.print(literal(f"Left out: {', '.join(left)}."), soft_wrap=True)


def _show_tables(schema: Schema, found: Sequence[ColumnStatistics], console: Console) -> None:
    from hotbed import _core
    from hotbed.train.progress import literal, notice

    rows = _table_rows(schema, found)
    if rows:
        nbytes = sum(rows.values()) * _row_bytes()
        memory = _core.available_memory()
        largest = sorted(rows.items(), key=lambda item: -item[1])[:5]
        named = ", ".join(f"{name} {count:,}" for name, count in largest)
        console.print(
            literal(
                f"{len(rows)} table{'s' * (len(rows) > 1)} of {sum(rows.values()):,} rows "
                f"({named}{', ...' * (len(rows) > 5)}), "
                f"{nbytes / 1e6:,.1f} MB at dim {_DIM} with Adam; this machine has {memory / 1e9:,.1f} GB "
                "of memory free."
            ),
            soft_wrap=True,
        )
        fits = nbytes < memory / 2
        console.print(
            "They fit into memory."
            if fits
            else f'Keep the rest on an SSD: hb.Storage(host="{max(1, memory // 2 // 10**9)}GB", ssd="rows").'
        )
    if not schema.labels:
        notice(console, "no column looks like a label. Name one in the schema before you train.")


def _row_bytes() -> int:
    """Bytes of a row with its states and its id."""
    return _FLOATS * _DIM * 4 + 8


def _table_rows(schema: Schema, found: Sequence[ColumnStatistics]) -> dict[str, int]:
    """Rows of each table: those that it declares, or the most distinct ids of a feature.

    A pair is left out unless it declares rows, as nobody has counted its ids.
    """
    distinct = {column.name: column.distinct for column in found}
    rows: dict[str, int] = {}
    for table in schema.tables(_DIM):
        ids = [distinct.get(name, 0) for name, its in schema.features.items() if its == table.name]
        rows[table.name] = table.rows if table.rows is not None else max(ids)
    return {name: count for name, count in rows.items() if count}


def _figures(
    found: Sequence[ColumnStatistics], guesses: Mapping[str, Guess], schema: Schema | None
) -> dict[str, object]:
    import dataclasses

    columns = []
    for column in found:
        kind = guesses[column.name].kind if column.name in guesses else None
        columns.append(
            {
                **{f.name: getattr(column, f.name) for f in dataclasses.fields(column)},
                "skew": column.skew._asdict(),
                "kind": None if kind is None else kind.kind,
                "reason": guesses[column.name].reason if column.name in guesses else "of a pair",
            }
        )
    tables = {} if schema is None else _table_rows(schema, found)
    return {
        "rows": found[0].rows if found else 0,
        "columns": columns,
        "tables": {n: {"rows": c, "bytes": c * _row_bytes()} for n, c in tables.items()},
        "schema": None if schema is None else schema.as_json(),
    }
