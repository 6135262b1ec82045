"""`hotbed train`."""

from __future__ import annotations

import typer

from hotbed.cli.errors import in_one_sentence
from hotbed.cli.options import command, made_of
from hotbed.train.settings import TrainSettings


@command(TrainSettings, config=True)
def train(given: dict[str, object], config: str | None) -> None:
    """Train a model on click logs, or on files that a schema describes, and test it on the last samples.

    A [bold]sample[/bold] is a line of a log or a row of a file; a [bold]row[/bold] is what a table
    keeps for an id.
    Prints a progress bar (standard error) and a closing table (standard output). FILE of --json
    holds auc, logloss, samples_per_second, rows and test_rows (samples trained and tested on),
    epochs, stored_rows (rows of all tables), peak_rss_bytes, interrupted, the options and the
    versions used.

    [bold]Examples[/bold]

      [cyan]hotbed train --data train.tsv.gz[/cyan]

      [cyan]hotbed train --data visits.parquet --schema schema.toml --model dcn --set layers=4[/cyan]

      [cyan]hotbed train --data train.tsv.gz --host 2GB --ssd /nvme/rows[/cyan]

      [cyan]hotbed train --data train.tsv.gz --checkpoint runs/1 --resume[/cyan]

      [cyan]hotbed train --data train.tsv.gz --validation-fraction 0.1 --patience 3 --run runs/1[/cyan]

      [cyan]hotbed train --from model --data day_2.tsv.gz --save model[/cyan]

      [cyan]hotbed train --data train.tsv.gz --on cuda --device 8GB --host 40GB[/cyan]

      [cyan]torchrun --nproc-per-node 4 -m hotbed train --data train.tsv.gz[/cyan]

      [cyan]hotbed train --model wide-deep --data day_*.tsv --optimizer ftrl --lr 0.05[/cyan]
    """
    from rich.console import Console

    from hotbed.train.processes import first

    quiet = not first()
    console = Console(stderr=True, quiet=quiet)
    with in_one_sentence(given, console):
        from hotbed.train.recipe import train as run

        settings = made_of(TrainSettings, given)
        settings.check_paths(config)
        report = run(settings, console, Console(quiet=quiet))
    if report["interrupted"]:
        raise typer.Exit(130)
