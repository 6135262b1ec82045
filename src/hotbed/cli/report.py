"""`hotbed report`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from hotbed.cli.errors import in_one_sentence


def report(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="What `hotbed train` wrote to --run.")
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE.html", help="Where the page goes. Default: DIR.html."),
    ] = None,
) -> None:
    """Draw a run as one HTML page, which needs no other file and no network.

    It shows loss, validations, calibration on the test samples, speed, where rows were found,
    bytes by table, the settings, and the command that repeats the run. Of a run that still goes
    on it shows what there is.

    [bold]Example[/bold]

      [cyan]hotbed report runs/1 --out run.html[/cyan]
    """
    with in_one_sentence():
        from hotbed.train.page import page
        from hotbed.train.paths import Folder, Named, refuse_clashes
        from hotbed.train.report import check_writable_file, complete_file
        from hotbed.train.run_files import is_of_a_record, read_run

        path = f"{os.path.abspath(folder)}.html" if out is None else out
        refuse_clashes(
            reads=[],
            writes=[Named("--out", path)],
            folders=[Folder(Named("DIR", folder), is_of_a_record)],
        )
        run = read_run(folder)
        check_writable_file(path)
        with complete_file(path) as file:
            file.write(page(run))
    typer.echo(f"The report of {folder} is in {path}.")
