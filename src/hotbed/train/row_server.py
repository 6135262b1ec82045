"""Memory hosts of `hotbed train`: what they are told of a run, and what they do in it."""

from __future__ import annotations

import json
import time

import torch.distributed as torch_dist
from rich.console import Console
from torch import nn

from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.models import description_of, model_of
from hotbed.dist import distribute, serve_rows
from hotbed.dist.hosts import CALLS
from hotbed.dist.timeouts import store_of
from hotbed.train.figures import OF_ALL, tell_too
from hotbed.train.interrupts import stop_on_interrupt
from hotbed.train.optimizers import make_optimizer
from hotbed.train.processes import process_group
from hotbed.train.settings import SettingsError, TrainSettings, storage_of

__all__ = ["announce", "keep_rows"]

_RUN = "trained"
"""Key under which rank 0 tells what is trained."""
_PAUSE = 0.1

CALLS[OF_ALL] = tell_too


def announce(settings: TrainSettings, model: nn.Module) -> None:
    """Tell memory hosts, from rank 0, which model is trained, and how."""
    if torch_dist.get_rank() == 0:
        try:
            about = description_of(model)
        except CheckpointError:  # of a class of the user's own, which hosts cannot make
            about = None
        names = "optimizer", "lr", "local_world_size"
        told = {"model": about, **{name: getattr(settings, name) for name in names}}
        store_of("run").set(_RUN, json.dumps(told))


def keep_rows(host: str | None, ssd: str | None, reset_ssd: bool, progress: Console) -> None:
    """Keep rows of the run that the other processes train, until it ends.

    Args:
        host, ssd, reset_ssd: as the options of `hotbed row-server`.

    Raises:
        SettingsError: there are no other processes, or this is the first one.
        HotbedError: rows have no room, or another process is gone.
    """
    with process_group() as shared:
        if not shared or torch_dist.get_rank() == 0:
            raise SettingsError(
                "hotbed row-server keeps rows for processes that run hotbed train, which are first. Start "
                "both by torchrun with one rendezvous, hotbed train by the one with --node-rank 0."
            )
        rank = torch_dist.get_rank()
        store = store_of("run")
        with progress.status(f"Rank {rank} waits for hotbed train ..."):
            try:
                while not store.check([_RUN]):
                    time.sleep(_PAUSE)
                run = json.loads(store.get(_RUN))
            except RuntimeError:  # of torch's: the store goes with the processes that train
                raise SettingsError(
                    "hotbed train has ended before it told what it trains; what it printed says why."
                ) from None
        storage = storage_of(host, ssd, reset_ssd)
        model = model_of("hotbed train", run["model"], storage)
        distribute(model, memory_host=True, local_world_size=run["local_world_size"])
        optimizer = make_optimizer(run["optimizer"], model, run["lr"])
        with (
            stop_on_interrupt(),  # which the others ask for: they end after a step, and tell
            progress.status(f"Rank {rank} keeps rows ..."),
        ):
            serve_rows(model, optimizer)
