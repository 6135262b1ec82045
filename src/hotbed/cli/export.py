"""`hotbed export`."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from hotbed.cli.errors import in_one_sentence
from hotbed.cli.storage_options import Host, ResetSsd, Ssd


def export(
    folder: Annotated[
        str,
        typer.Argument(metavar="DIR", help="What `hotbed train` wrote to --save or --checkpoint."),
    ],
    out: Annotated[str, typer.Argument(metavar="BUNDLE", help="The folder to write.")],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="PATH...",
            help="Files as `hotbed predict` takes them, of which the first samples are the bundle's sample "
            "request.",
        ),
    ],
    rows: Annotated[
        str, typer.Option(metavar="float32|float16|int8|int4", help="How rows are stored.")
    ] = "float32",
    default: Annotated[
        str,
        typer.Option(
            metavar="zeros|mean|first",
            help="The vector of an id without row: zeros, the rows' mean, or the first values that it has "
            "in training (for `hotbed serve` alone).",
        ),
    ] = "zeros",
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone",
            help="Write one ONNX model with the tables inside, too: standalone.onnx.",
        ),
    ] = False,
    host: Host = None,
    ssd: Ssd = None,
    reset_ssd: ResetSsd = False,
) -> None:
    """Write a saved model as a bundle, which answers requests without Hotbed and torch.

    BUNDLE has the dense part as ONNX, rows in files that are mapped into memory, what is asked with and
    answered, and a sample request. An earlier bundle there is replaced. It needs
    pip install 'hotbed\\[export]'.

    [bold]Examples[/bold]

      [cyan]hotbed export model bundle --data day_2.tsv[/cyan]

      [cyan]hotbed export runs/1 bundle --data day_2.tsv --rows int8[/cyan]
    """
    from rich.console import Console

    console = Console(stderr=True)
    with in_one_sentence({"host": host, "ssd": ssd}, console):
        from hotbed.checkpoint.folder import is_of_checkpoints
        from hotbed.serve.bundles.bundle import is_of_a_bundle
        from hotbed.serve.exporting.saved import export_saved
        from hotbed.train.paths import Folder, Named, refuse_clashes
        from hotbed.train.run_note import is_of_a_run, write_note
        from hotbed.train.settings import storage_of

        folders = [
            Folder(Named("DIR", folder), is_of_checkpoints),
            Folder(Named("BUNDLE", out), is_of_a_bundle),
        ]
        if ssd is not None:
            folders.append(Folder(Named("--ssd", ssd), is_of_a_run))
        refuse_clashes(reads=[Named("--data", path) for path in data], writes=[], folders=folders)
        storage = storage_of(host, ssd, reset_ssd, saved_in=[folder])
        with console.status("Exporting ..."):
            size = export_saved(folder, out, data, rows, default, storage, standalone)
        if ssd is not None:
            with contextlib.suppress(OSError):
                write_note(ssd, may_go=True)  # the rows are in `folder`
    typer.echo(f"{out}: {size / 1e6:,.1f} MB. It answers with onnxruntime and NumPy.")
