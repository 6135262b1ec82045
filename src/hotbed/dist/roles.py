"""Which processes of the default group train, and which are memory hosts, with rows and no batches."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as torch_dist

from hotbed.errors import TableError

__all__ = [
    "agree",
    "memory_hosts",
    "place_among_trainers",
    "ranks_with_batches",
    "refuse_memory_host",
]

_hosts: weakref.WeakKeyDictionary[torch_dist.ProcessGroup, tuple[int, ...]] = (
    weakref.WeakKeyDictionary()
)
"""By the default group, in whose processes a model was distributed."""


def memory_hosts() -> tuple[int, ...]:
    """Return the ranks that are memory hosts, rising; none where no model was distributed."""
    if not torch_dist.is_available() or not torch_dist.is_initialized():
        return ()
    group = torch_dist.group.WORLD
    return () if group is None else _hosts.get(group, ())


def ranks_with_batches() -> list[int] | None:
    """Return the ranks that have batches, where there are others, too; None: all have."""
    hosts = memory_hosts()
    if not hosts:
        return None
    return [rank for rank in range(torch_dist.get_world_size()) if rank not in hosts]


def place_among_trainers() -> tuple[int, int]:
    """(number of this rank among those that have batches, how many these are); it is one of them."""
    ranks, rank = ranks_with_batches(), torch_dist.get_rank()
    if ranks is None:
        return rank, torch_dist.get_world_size()
    return ranks.index(rank), len(ranks)


def refuse_memory_host(called: str) -> None:
    """Raise TableError on a memory host, which has no batches. `called`: what has been."""
    hosts = memory_hosts()
    if hosts and torch_dist.get_rank() in hosts:
        raise TableError(
            f"{called} is for ranks with batches, and this one is a memory host. It calls "
            "hotbed.dist.serve_rows(model, optimizer), which answers the others until they end."
        )


def agree(hosts: Sequence[int], size: int) -> None:
    """Keep which ranks of the default group are memory hosts. Called by all ranks, with the same.

    Raises:
        TableError: rank 0 is one, or others were when the first model was distributed.
    """
    if 0 in hosts:
        raise TableError(
            "Rank 0 cannot be a memory host, as it hands out rows, prints and writes. Give the first rank to "
            "a process that trains: of several machines, that of torchrun --node-rank 0 with the static "
            "rendezvous (--master-addr HOST)."
        )
    group = torch_dist.group.WORLD
    if group is None:
        return
    earlier = _hosts.get(group, ())
    if (
        hosts and not earlier
    ):  # where there were none, models such as those of `measure` may be gone
        _hosts[group] = tuple(hosts)
    elif earlier != tuple(hosts):
        was, now = (", ".join(map(str, some)) or "none" for some in (earlier, hosts))
        raise TableError(
            f"Memory hosts are the ranks {now} of {size} for this model, and were {was} for an earlier one. "
            "A process trains all models, or none."
        )
