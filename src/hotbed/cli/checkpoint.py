"""`hotbed checkpoint`: verify, show, diff, merge, pack."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hotbed.cli.errors import in_one_sentence

if TYPE_CHECKING:
    from rich.table import Table

    from hotbed.checkpoint.listing import Checkpoint

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

Folder = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A checkpoint, or a folder of them, whose latest is meant; also s3://...",
    ),
]


@app.callback()
def checkpoint() -> None:
    """Look at checkpoints, which hotbed.save writes, and make whole or portable ones.

    [bold]Examples[/bold]

      [cyan]hotbed checkpoint verify runs/1[/cyan]
      Reads all files of the latest checkpoint and compares them with their checksums.

      [cyan]hotbed checkpoint show runs/1[/cyan]
      Lists the checkpoints, whole or damaged, and the tables of the latest.

      [cyan]hotbed checkpoint diff runs/1/step-000000001000 runs/1[/cyan]
      Tells how many rows of each table have changed since step 1000.

      [cyan]hotbed checkpoint merge runs/1 --out whole[/cyan]
      Makes one that needs no other of one that holds what has changed since others.

      [cyan]hotbed checkpoint pack runs/1[/cyan]
      Gives the latest files of its own in place of links to those of an SSD tier.
    """


@app.command()
def verify(
    path: Folder,
    every: Annotated[
        bool,
        typer.Option("--all", help="Verify all checkpoints of the folder, not only the latest."),
    ] = False,
) -> None:
    """Read a checkpoint in full. The exit code is 1 if a file is missing or damaged."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console, damaged = Console(), 0

    def tell(text: str, style: str = "") -> None:
        console.print(literal(text), style=style, soft_wrap=True, highlight=False)

    with in_one_sentence():
        from hotbed.checkpoint import CheckpointError, DamagedError
        from hotbed.checkpoint.folder import is_complete, opened, whole_beside
        from hotbed.checkpoint.inspect import contents, verified
        from hotbed.checkpoint.listing import list as checkpoints_in
        from hotbed.train.progress import literal

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        found = checkpoints_in(path) if every else []
        for one in found:
            if one.state in ("incomplete", "being written"):
                tell(f"{one.path} is {one.state}.")
        complete = [one.path for one in found if one.state in ("whole", "damaged")] or [path]
        for each in complete:
            faults, said = 0, ""
            try:
                bar = Progress(*columns, console=Console(stderr=True), transient=True)
                with opened(each) as folder, bar:
                    about = contents(folder)
                    task = bar.add_task("Reading", total=about["bytes_with_bases"])
                    for _, size, fault in verified(folder):
                        bar.advance(task, size)
                        if fault:
                            faults, said = faults + 1, said + fault
                            tell(fault, "red")
            except CheckpointError as error:
                if not every or not found:
                    raise
                if not is_complete(each):
                    tell(f"{each} was removed meanwhile.")
                    continue
                if not isinstance(error, DamagedError):
                    raise
                tell(error.fault, "red")
                damaged += 1
                continue
            damaged += bool(faults)
            verdict = "is damaged, see above" if faults else "is whole"
            bases = f", changes since {about['base']}" if about["base"] else ""
            much = f"{about['bytes'] / 1e6:,.1f} MB{_linked(**about)}"
            tell(f"{folder} {verdict}: step {about['step']:,}, {much}{bases}.")
        if damaged and not every:
            names = ", ".join(os.path.basename(other) for other in whole_beside(folder, said))
            how = f"hotbed checkpoint verify --all {os.path.dirname(folder)}"
            tell(f"Whole by their sizes: {names or 'none'}. To read them: {how}")
    if damaged:
        raise typer.Exit(1)


@app.command()
def show(
    path: Folder,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
) -> None:
    """Show the checkpoints of a folder with their states, and the tables of the latest: rows, dtype, and the
    optimizer whose states they have."""
    from rich.console import Console
    from rich.table import Table

    with in_one_sentence():
        from hotbed.checkpoint.folder import is_of_checkpoints
        from hotbed.checkpoint.inspect import contents
        from hotbed.checkpoint.listing import list as checkpoints_in
        from hotbed.train import paths
        from hotbed.train.progress import literal
        from hotbed.train.report import check_writable_file, write_json

        if json is not None:
            of_run = paths.Folder(paths.Named("DIR", path), is_of_checkpoints)
            paths.refuse_clashes([], [paths.Named("--json", json)], [of_run])
            check_writable_file(json)
        found = checkpoints_in(path)
        if len(found) > 1 or any(one.state != "whole" for one in found):
            Console().print(_states(found))
        about = contents(path)
        if json is not None:
            states = [{**one._asdict(), "when": one.when.isoformat()} for one in found]
            write_json(json, {**about, "checkpoints": states})
        bases = f", changes since {about['base']}" if about["base"] else ""
        title = literal(f"{about['path']}, step {about['step']:,}{bases}{_linked(**about)}")
        shown = Table(title=title, title_justify="left")
        for heading in ("table", "ids", "rows saved", "dim", "dtype", "optimizer", "steps"):
            shown.add_column(
                heading, justify="right" if heading in ("rows saved", "dim", "steps") else "left"
            )
        for each in about["tables"]:
            rule = "none" if each["rule"] is None else f"{each['rule']}, {each['untouched']}"
            shown.add_row(
                literal(each["table"]),
                "any" if each["rows"] is None else f"0 .. {each['rows'] - 1:,}",
                f"{each['saved_rows']:,}",
                str(each["dim"]),
                each["dtype"],
                literal(rule),
                "" if each["steps"] is None else f"{each['steps']:,}",
            )
        Console().print(shown)


def _linked(*, linked_bytes: int, kept_bytes: int, **_: object) -> str:
    """Return what is said of links to files of an SSD tier."""
    if not linked_bytes:
        return ""
    kept = f", {kept_bytes / 1e6:,.1f} of them kept by this checkpoint alone" if kept_bytes else ""
    return f", {linked_bytes / 1e6:,.1f} MB linked{kept}"


def _states(found: Sequence[Checkpoint]) -> Table:
    """A table of `hotbed.checkpoint.Checkpoint`."""
    from rich.table import Table

    from hotbed.train.progress import literal

    shown = Table()
    for heading in ("checkpoint", "state", "MB", "completed"):
        shown.add_column(heading, justify="right" if heading == "MB" else "left", overflow="fold")
    for one in found:
        state: str = one.state
        if one.state == "damaged":
            state = f"damaged: {one.reason}"
        elif one.base is not None:
            state = f"changes since {os.path.basename(one.base)}"
        state += _linked(linked_bytes=one.linked_bytes, kept_bytes=one.kept_bytes)
        when = (
            f"{one.when.astimezone():%Y-%m-%d %H:%M:%S}"
            if one.state in ("whole", "damaged")
            else ""
        )
        name = literal(os.path.basename(one.path))
        shown.add_row(name, literal(state), f"{one.bytes / 1e6:,.1f}", when)
    return shown


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint.")],
    second: Annotated[str, typer.Argument(metavar="DIR", help="Another.")],
) -> None:
    """Count the rows of each table that two checkpoints do not have in common."""
    from rich.console import Console
    from rich.table import Table

    with in_one_sentence():
        from hotbed.checkpoint.inspect import differences
        from hotbed.train.progress import literal

        shown = Table()
        shown.add_column("table")
        for heading in ("only in the first", "only in the second", "changed", "equal"):
            shown.add_column(heading, justify="right")
        with Console(stderr=True).status("Reading both ..."):
            found = list(differences(first, second))
        for each in found:
            shown.add_row(literal(each.table), *(f"{count:,}" for count in each[1:]))
        Console().print(shown)


@app.command()
def merge(
    path: Folder,
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="A folder of checkpoints, also a new one.")
    ],
) -> None:
    """Write a whole checkpoint that is loaded as one that holds what has changed since others."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    with in_one_sentence():
        from hotbed.checkpoint.inspect import contents
        from hotbed.checkpoint.merging import merge as merged
        from hotbed.train.progress import literal

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("Merging", total=contents(path)["bytes_with_bases"])
            made = merged(path, out, progress=lambda size: bar.advance(task, size))
        Console().print(literal(f"{made} is whole."), soft_wrap=True, highlight=False)


@app.command()
def pack(path: Folder) -> None:
    """Make a checkpoint that has links to files of an SSD tier a portable one, with files of its own."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    with in_one_sentence():
        from hotbed.checkpoint.inspect import contents
        from hotbed.checkpoint.packing import pack as packed
        from hotbed.train.progress import literal

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("Packing", total=contents(path)["linked_bytes"])
            made = packed(path, progress=lambda size: bar.advance(task, size))
        Console().print(literal(f"{made} is portable."), soft_wrap=True, highlight=False)
