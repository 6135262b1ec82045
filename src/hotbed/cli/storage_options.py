"""Options of commands that load a saved model: where its rows may lie."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Host", "ResetSsd", "Ssd"]

Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="SIZE",
        help="Memory that the model's tables may take, like 2GB; the rest goes to --ssd. Default: all "
        "of them lie in memory.",
    ),
]
Ssd = Annotated[
    str | None,
    typer.Option("--ssd", metavar="FOLDER", help="Where rows go that do not fit into --host."),
]
ResetSsd = Annotated[
    bool,
    typer.Option("--reset-ssd", help="Delete the rows of an earlier run in --ssd, saved or not."),
]
