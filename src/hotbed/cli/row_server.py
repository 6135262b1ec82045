"""`hotbed row-server`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, cast

from hotbed.cli.errors import in_one_sentence
from hotbed.cli.options import command
from hotbed.train.options import SIZE
from hotbed.train.settings import ROWS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowServerSettings:
    """The options of `hotbed row-server`."""

    host: Annotated[str | None, SIZE] = None
    """Memory that rows and optimizer states may take here, like 64GB; the rest goes to --ssd. Default: all
    lie in memory."""
    ssd: Annotated[str | None, ROWS] = None
    """Where rows go that do not fit into --host."""
    reset_ssd: bool = False
    """Delete the rows that an earlier run left in --ssd, also where it did not save them."""


@command(RowServerSettings)
def row_server(given: dict[str, object]) -> None:
    """Keep rows of tables for processes that train, which have little memory. Ends when they have ended.

    It is started by torchrun with the rendezvous of [cyan]hotbed train[/cyan], which tells it the model and
    the optimizer: it needs no data. All tables lie in processes like this one then, but small ones.
    Checkpoints are written by all processes, to a folder that all see.

    [bold]Examples[/bold]

      [cyan]torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 4 \\
      -m hotbed train --data train.tsv.gz[/cyan]
      On the machine that trains,

      [cyan]torchrun --nnodes 2 --node-rank 1 --master-addr HOST --nproc-per-node 4 \\
      -m hotbed row-server --host 100GB[/cyan]
      and on the one that keeps rows: 400 GB in four processes.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with in_one_sentence(given, console):
        from hotbed.train.row_server import keep_rows

        host, ssd = (cast(str | None, given[name]) for name in ("host", "ssd"))
        keep_rows(host, ssd, bool(given["reset_ssd"]), console)
