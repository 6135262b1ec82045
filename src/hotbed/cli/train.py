"""`hotbed train`."""

from __future__ import annotations

from typing import Annotated

import typer

from hotbed.cli.config import read_config
from hotbed.cli.errors import told_in_one_sentence


def _take_config(ctx: typer.Context, path: str | None) -> str | None:
    if path is not None:
        from hotbed.train.settings import TrainSettings

        with told_in_one_sentence():
            ctx.default_map = {**(ctx.default_map or {}), **read_config(path, TrainSettings)}
    return path


def train(
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH...", help="Click logs, in order of time."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            is_eager=True,
            callback=_take_config,
            help="Options from a file, by the names below (batch-size = 512); those given here win.",
        ),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Begin with the model and optimizer that an earlier run has left (--save, --checkpoint).",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="dlrm or wide-deep.")] = "dlrm",
    dim: Annotated[int, typer.Option(help="Width of the embeddings.")] = 16,
    optimizer: Annotated[
        str,
        typer.Option(
            help="sgd, adagrad, rowwise-adagrad, adam, adamw, rowwise-adam, adamax, adadelta, "
            "rmsprop or ftrl; for tables and dense layers alike."
        ),
    ] = "adam",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(help="Samples a step.")] = 512,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.")] = 1,
    test_fraction: Annotated[
        float, typer.Option(help="Share of the samples, the last ones, that is kept for testing.")
    ] = 0.1,
    shuffle: Annotated[
        int,
        typer.Option(help="Shuffle within windows of so many samples; 0 keeps the order of time."),
    ] = 0,
    on_error: Annotated[
        str, typer.Option(help="At a malformed line: raise, or skip (and count).")
    ] = "raise",
    seed: Annotated[int, typer.Option(help="Of first values and shuffling.")] = 0,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="DIR",
            help="Save the model here at the end, with its optimizer, in place of one that is there.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="DIR",
            help="Save the run here every so many steps (--every), so that it can go on.",
        ),
    ] = None,
    every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 1000,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay in --checkpoint.")] = 3,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the latest in --checkpoint; begin if there is none. The end is the same to "
            "the bit as that of a run that was never stopped; --epochs may be more.",
        ),
    ] = False,
    resume_from: Annotated[
        str | None,
        typer.Option(
            "--resume-from",
            metavar="NAME",
            help="As --resume, from this checkpoint in --checkpoint, such as step-000000001000, and not from "
            "the latest, which may be damaged; hotbed checkpoint show lists them.",
        ),
    ] = None,
    on: Annotated[
        str, typer.Option(help="Where the model computes: cpu, cuda or cuda:N. See --device.")
    ] = "cpu",
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="SIZE",
            help="Memory that tables and optimizer states may take, like 2GB; the rest goes to --ssd.",
        ),
    ] = None,
    ssd: Annotated[
        str | None,
        typer.Option("--ssd", metavar="DIR", help="Where rows go that do not fit into --host."),
    ] = None,
    reset_ssd: Annotated[
        bool,
        typer.Option(
            "--reset-ssd",
            help="Delete the rows that an earlier run left in --ssd, also where it did not save them.",
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="SIZE", help="Memory of the device that computes, above --host."
        ),
    ] = None,
    depth: Annotated[
        int,
        typer.Option(
            help="Batches whose rows are brought up ahead, on one process; 0 disables it."
        ),
    ] = 2,
    horizon: Annotated[
        int | None,
        typer.Option(
            help="Batches whose ids are known ahead, so that their rows are kept. Default: 32, of small "
            "ones up to 128."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Write what ran when, for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Train a model on click logs and test it on the last samples.

    A [bold]sample[/bold] is a line of a log; a [bold]row[/bold] is what a table keeps for an id.
    Prints a progress bar (standard error) and a closing table (standard output). FILE of --json
    holds auc, logloss, samples_per_second, rows and test_rows (samples trained and tested on),
    epochs, stored_rows (rows of all tables), peak_rss_bytes, interrupted, the options and the
    versions used.

    [bold]Examples[/bold]

      [cyan]hotbed train --data train.tsv.gz[/cyan]

      [cyan]hotbed train --data train.tsv.gz --host 2GB --ssd /nvme/rows[/cyan]

      [cyan]hotbed train --data train.tsv.gz --checkpoint runs/1 --resume[/cyan]

      [cyan]hotbed train --from model --data day_2.tsv.gz --save model[/cyan]

      [cyan]hotbed train --data train.tsv.gz --on cuda --device 8GB --host 40GB[/cyan]

      [cyan]torchrun --nproc-per-node 4 -m hotbed train --data train.tsv.gz[/cyan]

      [cyan]hotbed train --model wide-deep --data day_*.tsv --optimizer ftrl --lr 0.05[/cyan]
    """
    from rich.console import Console

    from hotbed.train.processes import first

    quiet = not first()
    console = Console(stderr=True, quiet=quiet)
    with told_in_one_sentence({"device": device, "host": host, "ssd": ssd}, console):
        from hotbed.train.recipe import train as run
        from hotbed.train.settings import TrainSettings

        settings = TrainSettings(
            data=tuple(data or ()),
            from_=from_,
            model=model,
            dim=dim,
            optimizer=optimizer,
            lr=lr,
            batch_size=batch_size,
            epochs=epochs,
            test_fraction=test_fraction,
            shuffle=shuffle,
            on_error=on_error,
            seed=seed,
            json=json,
            save=save,
            checkpoint=checkpoint,
            every=every,
            keep=keep,
            resume=resume,
            resume_from=resume_from,
            on=on,
            device=device,
            host=host,
            ssd=ssd,
            reset_ssd=reset_ssd,
            depth=depth,
            horizon=horizon,
            trace=trace,
        )
        settings.check_paths(config)
        report = run(settings, console, Console(quiet=quiet))
    if report["interrupted"]:
        raise typer.Exit(130)
