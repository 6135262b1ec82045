"""`hotbed import` and `hotbed dump`."""

from __future__ import annotations

import contextlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotbed.cli.errors import in_one_sentence

if TYPE_CHECKING:
    from torch import Tensor

    from hotbed.formats.tables import FileTable

_SHOWN = 20

_KINDS = Path(__file__).parents[1] / "formats" / "kinds"
_READ = [
    module.name for module in pkgutil.iter_modules([str(_KINDS)])
]  # the help waits for no import

Format = Annotated[
    str | None,
    typer.Option("--format", metavar="NAME", help="torch, safetensors, npy, sok or parquet."),
]
Chosen = Annotated[
    list[str] | None,
    typer.Option("--table", metavar="NAME", help="Take this one only. May be given several times."),
]
Renamed = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="OLD=NEW", help="May be given several times."),
]


def import_(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file or a folder of tables.")],
    to: Annotated[
        str, typer.Option("--to", metavar="DIR", help="A new folder, for the checkpoint.")
    ],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"{', '.join(_READ)}. Default: what PATH looks like.",
        ),
    ] = None,
    table: Chosen = None,
    rename: Renamed = None,
    dim: Annotated[
        int | None,
        typer.Option(help="Numbers in a vector, which oneembedding needs to know and sok checks."),
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of oneembedding: which one, if there are several."),
    ] = None,
) -> None:
    """Make a checkpoint of tables that others have written, for hotbed.load(DIR, model, strict=False).

    Tables keep their names, so a Hotbed module of the same name finds them. Of a state_dict those are
    taken that are 2-D, named ...weight and without a bias beside them; dense layers are skipped. Nothing
    but tensors is unpickled, and no row is lost or changed: if one cannot be read, there is no checkpoint.

    [bold]Examples[/bold]

      [cyan]hotbed import model.pt --to runs/imported[/cyan]
      Takes the embeddings of what torch.save(model.state_dict(), "model.pt") wrote.

      [cyan]hotbed import dump/ --format sok --to runs/imported --rename user=user_table.weight[/cyan]
      Takes the tables of sok.dump, one of them under another name.

      [cyan]hotbed import users.parquet --to runs/imported[/cyan]
      Takes a column of ids and one of vectors. Needs pip install hotbed\\[arrow].
    """
    with in_one_sentence():
        from hotbed.checkpoint import write
        from hotbed.checkpoint.folder import is_of_checkpoints
        from hotbed.formats import FormatError, Hints, found_in
        from hotbed.formats.tables import chosen, refuse_without_room
        from hotbed.train.paths import Folder, Named, refuse_clashes

        if os.path.lexists(to) and not (os.path.isdir(to) and not os.listdir(to)):
            raise FormatError(f"{to} is there already. Name a new folder.")
        refuse_clashes([Named("PATH", path)], [], [Folder(Named("--to", to), is_of_checkpoints)])
        found = found_in(path, format_, Hints(dim, snapshot))
        tables = chosen(path, found, table or [], _pairs(rename))
        refuse_without_room(to, tables)
        rows = {each.name: each.rows for each in tables if each.rows is not None}
        with _counted("Reading", tables) as counted:
            folder = write(to, {each.name: each.chunks() for each in counted}, rows=rows)
        _show(tables, f"Written to {folder}")
        taken = {each.chunks for each in tables}
        skipped = {each.name: each.unasked for each in found.tables if each.chunks not in taken}
        _show_skipped({**skipped, **found.skipped})


def dump(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A checkpoint, or a folder of them, whose latest is meant."
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="PATH", help="A new file, or a folder for npy and sok.")
    ],
    format_: Format = None,
    table: Chosen = None,
    rename: Renamed = None,
) -> None:
    """Write the tables of a checkpoint for others: weights, no optimizer states and no dense layers.

    Static tables become arrays by id; dynamic ones become rows and, beside them, their ids. The format
    is told by the ending of PATH (.pt, .safetensors, .parquet) or by --format.

    [bold]Examples[/bold]

      [cyan]hotbed dump runs/1 --to tables.safetensors[/cyan]
      Writes all tables as a state_dict, which load_state_dict(..., strict=False) reads.

      [cyan]hotbed dump runs/1 --to user.parquet --table embeddings.user[/cyan]
      Writes one table with the columns id and vector.

      [cyan]hotbed dump runs/1 --to dump --format sok[/cyan]
      Writes what sok.load of HugeCTR reads.
    """
    with in_one_sentence():
        from hotbed.checkpoint.folder import is_of_checkpoints, opened
        from hotbed.formats import FormatError, writer_of
        from hotbed.formats.tables import chosen
        from hotbed.formats.writing import tables_in
        from hotbed.train.paths import Folder, Named, refuse_clashes

        if not to:
            raise FormatError("--to is empty. Name a new file or folder.")
        writer = writer_of(to, format_)
        if os.path.lexists(to):
            raise FormatError(f"{to} is there already. Name another.")
        refuse_clashes([], [Named("--to", to)], [Folder(Named("DIR", folder), is_of_checkpoints)])
        with opened(folder) as checkpoint:
            tables = chosen(folder, tables_in(checkpoint), table or [], _pairs(rename))
            with _counted("Writing", tables) as counted:
                writer.write(to, counted)
        _show(tables, f"Written to {to}")


def _pairs(renamed: list[str] | None) -> dict[str, str]:
    from hotbed.formats import FormatError

    pairs = [text.partition("=") for text in renamed or []]
    for old, sign, new in pairs:
        if not (old and sign and new):
            raise FormatError(f"--rename takes OLD=NEW, got {old + sign + new!r}.")
    found: dict[str, str] = {}
    for old, _, new in pairs:
        if found.setdefault(old, new) != new:
            raise FormatError(f"--rename gives {old!r} two names, {found[old]!r} and {new!r}.")
    return found


@contextlib.contextmanager
def _counted(what: str, tables: list[FileTable]) -> Iterator[list[FileTable]]:
    """Tables whose rows move a bar when they are read."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description} {task.completed:,} of {task.total:,} rows")
    columns = (text, BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=sum(table.stored for table in tables))

        def counted(
            chunks: Callable[[], Iterator[tuple[Tensor, Tensor]]],
        ) -> Iterator[tuple[Tensor, Tensor]]:
            for ids, weights in chunks():
                yield ids, weights
                bar.advance(task, len(ids))

        yield [table._replace(chunks=partial(counted, table.chunks)) for table in tables]


def _show(tables: list[FileTable], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from hotbed.train.progress import literal

    shown = Table()
    for heading in ("table", "ids", "rows", "dim", "dtype"):
        shown.add_column(heading, justify="right" if heading in ("rows", "dim") else "left")
    for each in tables:
        ids = "any" if each.rows is None else f"0 .. {each.rows - 1:,}"
        dtype = str(each.dtype).removeprefix("torch.")
        shown.add_row(literal(each.name), ids, f"{each.stored:,}", str(each.dim), dtype)
    console = Console()
    console.print(literal(f"{title}:"), soft_wrap=True, highlight=False)
    console.print(shown)


def _show_skipped(skipped: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from hotbed.train.progress import literal

    if not skipped:
        return
    shown = Table()
    shown.add_column("left; --table takes what can be one")
    shown.add_column("because it")
    for name, why in [*skipped.items()][:_SHOWN]:
        shown.add_row(literal(name), literal(why))
    if len(skipped) > _SHOWN:
        shown.add_row(f"and {len(skipped) - _SHOWN:,} more", "")
    Console().print(shown)
