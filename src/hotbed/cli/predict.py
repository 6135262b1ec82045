"""`hotbed predict`."""

from __future__ import annotations

from typing import Annotated

import typer

from hotbed.cli.errors import in_one_sentence
from hotbed.cli.storage_options import Host, ResetSsd, Ssd


def predict(
    folder: Annotated[
        str,
        typer.Argument(metavar="DIR", help="What `hotbed train` wrote to --save or --checkpoint."),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="PATH...",
            help="Click logs, or files of the schema that the model was trained with.",
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="FILE.csv", help="Where scores go.")],
    key: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="What tells samples apart in FILE.csv: C1 to C26 of a log, or a column that the model does "
            "not use. Default: the number of the line, or of the row.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Samples scored at a time.", min=1, max=2**31 - 1)
    ] = 4096,
    host: Host = None,
    ssd: Ssd = None,
    reset_ssd: ResetSsd = False,
) -> None:
    """Score the samples of click logs, or of files with the model's columns, with a saved model.

    Labels may be there or not; the first line decides. FILE.csv has the header
    "line,score", or "COLUMN,score" with --key, and for each sample, in their order, the number of its
    line (from 1, over all logs, blank lines counted) or its value in that column, and its click
    probability. With labels also their AUC and log loss are printed.

    [bold]Examples[/bold]

      [cyan]hotbed predict model --data new.tsv.gz --out scores.csv[/cyan]

      [cyan]hotbed predict model --data new.tsv.gz --out scores.csv --key C9[/cyan]

      [cyan]hotbed predict model --data new.tsv.gz --out scores.csv --host 2GB --ssd /nvme/rows[/cyan]
    """
    from rich.console import Console

    console = Console(stderr=True)
    with in_one_sentence({"host": host, "ssd": ssd}, console):
        from hotbed.checkpoint.folder import is_of_checkpoints
        from hotbed.train.paths import Folder, Named, refuse_clashes
        from hotbed.train.run_note import is_of_a_run
        from hotbed.train.scoring import write_scores
        from hotbed.train.settings import storage_of

        folders = [Folder(Named("DIR", folder), is_of_checkpoints)]
        if ssd is not None:
            folders.append(Folder(Named("--ssd", ssd), is_of_a_run))
        refuse_clashes(
            reads=[Named("--data", path) for path in data],
            writes=[Named("--out", out)],
            folders=folders,
        )
        storage = storage_of(host, ssd, reset_ssd, saved_in=[folder])
        with console.status("Scoring ..."):
            scores = write_scores(folder, data, out, batch_size, storage, key)
    line = f"{scores.rows:,} samples scored in {scores.seconds:.1f} s, written to {out}."
    if scores.auc is not None:
        line += f" AUC {scores.auc:.4f}, log loss {scores.logloss:.4f}."
    typer.echo(line)
