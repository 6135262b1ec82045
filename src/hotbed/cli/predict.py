"""`hotbed predict`."""

from __future__ import annotations

from typing import Annotated

import typer

from hotbed.cli.errors import told_in_one_sentence


def predict(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="What `hotbed train --save` wrote.")],
    data: Annotated[
        list[str], typer.Option("--data", metavar="PATH", help="A click log; may be repeated.")
    ],
    out: Annotated[str, typer.Option("--out", metavar="FILE.csv", help="Where scores go.")],
    batch_size: Annotated[int, typer.Option(help="Rows scored at a time.", min=1)] = 4096,
) -> None:
    """Score the rows of click logs with a saved model.

    The lines may start with a label or not; the first line decides. FILE.csv has the header
    "score" and one click probability a row, in the order of the rows; with labels also their
    AUC and log loss are printed.

    [bold]Example[/bold]

      [cyan]hotbed predict model --data new.tsv.gz --out scores.csv[/cyan]
    """
    with told_in_one_sentence():
        from hotbed.train.scoring import write_scores

        scores = write_scores(folder, data, out, batch_size)
    line = f"{scores.rows:,} rows scored in {scores.seconds:.1f} s, written to {out}."
    if scores.auc is not None:
        line += f" AUC {scores.auc:.4f}, log loss {scores.logloss:.4f}."
    typer.echo(line)
