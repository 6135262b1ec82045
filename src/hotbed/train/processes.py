"""The processes of a run that torchrun has started, or another by the same environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as torch_dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from hotbed.train.settings import SettingsError

__all__ = ["first", "process_group"]


def first() -> bool:
    """Whether this is the process that speaks for all."""
    return not _several() or os.environ.get("RANK") == "0"


def _several() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


@contextlib.contextmanager
def process_group() -> Iterator[bool]:
    """For a ``with`` statement: whether there are several processes, which are a process group then.

    Raises:
        SettingsError: it is not said how they find each other.
    """
    if not _several():
        yield False
        return
    try:
        store, rank, size = next(rendezvous("env://"))
    except ValueError as error:
        raise SettingsError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, as if there were several processes, but they cannot "
            f"find each other: {error}. Start them with torchrun, or unset WORLD_SIZE."
        ) from None
    # After a restart torchrun's store still has what the processes before have left in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt {attempt}", store)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield True
    finally:
        torch_dist.destroy_process_group()
