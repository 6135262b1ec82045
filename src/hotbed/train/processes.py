"""The processes of a run that torchrun has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as torch_dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

__all__ = ["first", "process_group"]


def first() -> bool:
    """Whether this is the process that speaks for all."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def process_group() -> Iterator[bool]:
    """For a ``with`` statement: whether there are several processes, which are a process group then."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not torch_dist.is_torchelastic_launched():
        yield False
        return
    store, rank, size = next(rendezvous("env://"))
    # After a restart torchrun's store still has what the processes before have left in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt {attempt}", store)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield True
    finally:
        torch_dist.destroy_process_group()
