"""`hotbed checkpoint`: verify, show, diff."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hotbed.cli.errors import told_in_one_sentence

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

Folder = Annotated[
    str,
    typer.Argument(metavar="DIR", help="A checkpoint, or a folder of them, whose latest is meant."),
]


@app.callback()
def checkpoint() -> None:
    """Look at checkpoints, which hotbed.save writes. Changes nothing.

    [bold]Examples[/bold]

      [cyan]hotbed checkpoint verify runs/1[/cyan]
      Reads all files of the latest checkpoint and compares them with their checksums.

      [cyan]hotbed checkpoint diff runs/1/step-000000001000 runs/1[/cyan]
      Tells how many rows of each table have changed since step 1000.
    """


@app.command()
def verify(path: Folder) -> None:
    """Read a checkpoint in full. The exit code is 1 if a file is missing or damaged."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.text import Text

    console, faults = Console(), 0
    with told_in_one_sentence():
        from hotbed.checkpoint.folder import opened
        from hotbed.checkpoint.looking import contents, verified

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        with opened(path) as folder, progress as bar:
            about = contents(folder)
            task = bar.add_task("Reading", total=about["bytes"])
            for _, size, fault in verified(folder):
                bar.advance(task, size)
                if fault:
                    faults += 1
                    console.print(Text(fault, style="red"), soft_wrap=True, highlight=False)
        told = "is damaged, see above" if faults else "is whole"
        console.print(
            f"{about['path']} {told}: step {about['step']:,}, {about['bytes'] / 1e6:,.1f} MB.",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
    if faults:
        raise typer.Exit(1)


@app.command()
def show(
    path: Folder,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
) -> None:
    """Show the tables of a checkpoint: rows, dtype, and the optimizer whose states they have."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    with told_in_one_sentence():
        from hotbed.checkpoint.looking import contents
        from hotbed.train.report import check_writable_file, write_json

        if json is not None:
            check_writable_file(json)
        about = contents(path)
        if json is not None:
            write_json(json, about)
        title = escape(f"{about['path']}, step {about['step']:,}")
        shown = Table(title=title, title_justify="left")
        for heading in ("table", "ids", "rows saved", "dim", "dtype", "optimizer", "steps"):
            shown.add_column(
                heading, justify="right" if heading in ("rows saved", "dim", "steps") else "left"
            )
        for each in about["tables"]:
            rule = "none" if each["rule"] is None else f"{each['rule']}, {each['untouched']}"
            shown.add_row(
                escape(each["table"]),
                "any" if each["rows"] is None else f"0 .. {each['rows'] - 1:,}",
                f"{each['saved_rows']:,}",
                str(each["dim"]),
                each["dtype"],
                rule,
                "" if each["steps"] is None else f"{each['steps']:,}",
            )
        Console().print(shown)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint.")],
    second: Annotated[str, typer.Argument(metavar="DIR", help="Another.")],
) -> None:
    """Count the rows of each table that two checkpoints do not have in common."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    with told_in_one_sentence():
        from hotbed.checkpoint.looking import differences

        shown = Table()
        shown.add_column("table")
        for heading in ("only in the first", "only in the second", "changed", "equal"):
            shown.add_column(heading, justify="right")
        with Console(stderr=True).status("Reading both ..."):
            found: list[Any] = list(differences(first, second))
        for each in found:
            shown.add_row(escape(each.table), *(f"{count:,}" for count in each[1:]))
        Console().print(shown)
