"""The command `hotbed`: its help, and its subcommands."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hotbed.cli import checkpoint, data
from hotbed.cli.export import export
from hotbed.cli.inspect import inspect
from hotbed.cli.plan import plan
from hotbed.cli.predict import predict
from hotbed.cli.report import report
from hotbed.cli.row_server import row_server
from hotbed.cli.serve import serve
from hotbed.cli.table_formats import dump, import_
from hotbed.cli.train import train

app = typer.Typer(
    name="hotbed",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        import torch

        import hotbed

        typer.echo(f"hotbed {hotbed.__version__} (torch {torch.__version__})")
        raise typer.Exit()


@app.callback()
def hotbed(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Say which one this is."),
    ] = False,
) -> None:
    """Train and apply recommender models with embedding tables, on files of samples.

    A [bold]click log[/bold] is a file in the format of the Criteo data sets, plain or gzip: no
    header, tabs between columns; a label (0 or 1), 13 integers, 26 categories of 8 hexadecimal
    digits; empty means missing. Parquet, CSV and TSV files of other columns need a [bold]schema[/bold],
    which says what each column is, and which data stats proposes. No vocabulary is built: tables
    grow as ids are met.

    [bold]Examples[/bold]

      [cyan]hotbed train --data day_0.tsv.gz day_1.tsv.gz --save model[/cyan]
      Trains a DLRM on nine tenths of the samples, tests it on the last tenth, saves it.

      [cyan]hotbed data stats visits.csv --out schema.toml[/cyan]
      Shows what the columns of Parquet or CSV files hold, and proposes a schema.

      [cyan]hotbed train --data visits.csv --schema schema.toml --model deepfm --save model[/cyan]
      Trains on such files; hotbed predict then takes others with the same columns.

      [cyan]hotbed train --config run.toml --lr 3e-3 --json figures.json[/cyan]
      Takes options from a file, one of them from the command line, and writes the figures.

      [cyan]hotbed predict model --data day_2.tsv.gz --out scores.csv[/cyan]
      Writes the click probability of each sample of a log, with or without labels.

      [cyan]hotbed export model bundle --data day_2.tsv.gz[/cyan]
      Writes what answers requests without Hotbed: ONNX, and rows that are mapped into memory.

      [cyan]hotbed serve bundle[/cyan]
      Answers requests with it, over HTTP.

      [cyan]hotbed report runs/1[/cyan]
      Draws what train --run has recorded as one HTML page.

      [cyan]hotbed checkpoint show model[/cyan]
      Shows the tables of what train has saved (--save, --checkpoint); verify reads every byte of it.

      [cyan]hotbed import model.pt --to runs/imported[/cyan]
      Makes a checkpoint of tables that others have written; dump writes them for others.

      [cyan]hotbed inspect /nvme/rows[/cyan]
      Shows what the SSD folder of a run (train --ssd) holds.

      [cyan]hotbed plan --model dlrm --world-size 8 --expected-rows 10_000_000[/cyan]
      Shows which of 8 processes would keep which part of which table.

    [bold]What a run prints:[/bold] while it trains, a bar with loss and AUC of recent samples,
    samples a second and rows that the tables hold (on standard error); at the end a table with AUC
    and log loss on the test samples, speed and peak memory. The exit code is 0, 2 after an error (told in one
    sentence), and 130 after Ctrl-C, which ends training after the current step and still tests,
    saves and reports what was reached.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that a terminal's encoding has not must not end a command that prints it.
        sys.stdout.reconfigure(errors="backslashreplace")


class Command(TyperCommand):
    """Lets ``--data`` take several paths, as in ``--data a.tsv b.tsv --dim 16``, and says what a mistyped
    option may have meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, _spread(args))
        except Exception as error:
            near = getattr(error, "possibilities", None)
            if near:
                meant = " or ".join(sorted(near))
                named = getattr(error, "option_name", "")
                text = f"There is no option {named}. Did you mean {meant}?"
                vars(error).update(message=text, possibilities=None)
            raise


def _spread(args: list[str]) -> list[str]:
    """The arguments, with ``--data`` before every path."""
    spread: list[str] = []
    after_data = False
    for arg in args:
        if arg.startswith("-"):
            after_data = arg.partition("=")[0] == "--data"
        elif after_data and spread[-1] != "--data":
            spread.append("--data")
        spread.append(arg)
    return spread


for command in (train, predict, export, serve, report, inspect, plan, dump):
    app.command(cls=Command)(command)
app.command("import", cls=Command)(import_)
app.command("row-server", cls=Command)(row_server)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(data.app, name="data")
