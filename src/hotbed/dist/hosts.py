"""Memory hosts: ranks that keep rows, and answer the ranks that have batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from hotbed.dist.batch import serve_lookup
from hotbed.dist.distribute import needed_sharing
from hotbed.dist.exchange import send_no_ids
from hotbed.dist.exchanged_values import Requests
from hotbed.dist.gathered import gather_asked
from hotbed.dist.handshake import BY_HOSTS, CLOSE, Handshake
from hotbed.dist.hosts_ahead import PrefetchOnHost
from hotbed.dist.json_values import serve_values
from hotbed.dist.participant import serve_step
from hotbed.dist.place import Sharded
from hotbed.dist.ranks import Ranks
from hotbed.dist.roles import refuse_memory_host
from hotbed.dist.serving import Answer, Serving
from hotbed.errors import TableError

__all__ = ["CALLS", "release_hosts", "serve_rows"]

CALLS: dict[str, Callable[[nn.Module, Mapping[str, object]], object]] = {}
"""Functions that all ranks call, such as `hotbed.save`: what a memory host calls instead, with the arguments
of the others, by the name that they tell."""


def serve_rows(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
    """Answer the ranks that have batches: their lookups and steps, `hotbed.save`, `hotbed.load` and all else
    that they do with tables, until they call `release_hosts`.

    Called on memory hosts, where the others train:

    >>> torch.distributed.init_process_group("gloo")     # under torchrun
    >>> is_host = torch.distributed.get_rank() >= 2
    >>> model = hb.distribute(hb.EmbeddingCollection([hb.Table("item", 8)]), memory_host=is_host)
    >>> optimizer = hb.optim.Adagrad(model.parameters(), lr=0.02)
    >>> if is_host:
    ...     hb.dist.serve_rows(model, optimizer)
    ... else:
    ...     model({"item": torch.tensor([[3]])})["item"].sum().backward(); optimizer.step()
    ...     hb.dist.release_hosts(model)

    Args:
        model: as `hotbed.distribute` returned it.
        optimizer: of its tables, as the others have made it, whose learning rates are used; or a list of
            several, in which those without tables may be missing. It is kept until this returns. None: where
            the caller keeps the optimizers of the tables, or the others train nothing; steps are refused
            while a table has none.

    Raises:
        TableError: this rank is no memory host.
        PeerError: another rank is gone.
    """
    ranks = needed_sharing(model, "hotbed.dist.serve_rows").ranks
    if ranks.rank not in ranks.hosts:
        raise TableError(
            "hotbed.dist.serve_rows is for memory hosts, and this rank has batches. Give "
            "hotbed.distribute(model, memory_host=True) on those that have none."
        )
    # Tables know their optimizer as long as somebody keeps it, as this call does.
    _Host(ranks, model).serve()


def release_hosts(model: nn.Module) -> None:
    """End `serve_rows` on all memory hosts. Called by all ranks that have batches, after their last use of
    tables; where there are no memory hosts it does nothing.

    Raises:
        TableError: the model is not distributed, or this rank is a memory host.
        PeerError: another rank is gone.
    """
    ranks = needed_sharing(model, "hotbed.dist.release_hosts").ranks
    refuse_memory_host("hotbed.dist.release_hosts")
    if ranks.hosts:
        ranks.handshake(CLOSE)


class _Host:
    """A memory host at work."""

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        self._model = model
        answers: dict[str, Answer] = {
            "dense states": _listen,
            "an assignment": _answer_assignment,
            "a deletion of rows": _answer_deletion,
            "a search for ids": _answer_search,
            "a count of rows": _answer_count,
            "a lookup": self._answer_lookup,
            "a step": self._answer_step,
            "a copy of rows": _answer_copy,
            "a checkpoint": self._answer_call,
            "figures": self._answer_call,
            CLOSE: _end,
        }
        assert answers.keys() == {*BY_HOSTS, "a lookup", "a step"}
        lookups = [live.place.lookups for ref in ranks.tables if (live := ref()) is not None]
        prefetcher = lookups[0].prefetcher
        self._ahead = prefetcher if isinstance(prefetcher, PrefetchOnHost) else None
        self._serving = Serving(ranks, answers, self._holds_back)

    def serve(self) -> None:
        if self._ahead is not None:
            self._ahead.begin()
        try:
            self._serving.until(CLOSE)
        finally:
            if self._ahead is not None:
                self._ahead.end()

    def _holds_back(self) -> bool:
        return self._ahead is not None and self._ahead.holds_back()

    def _answer_lookup(self, ranks: Ranks, opened: Handshake) -> None:
        serve_lookup(ranks, opened, self._ahead)
        if self._ahead is not None:
            self._ahead.go_on()

    def _answer_step(self, ranks: Ranks, opened: Handshake) -> None:
        serve_step(ranks, opened)
        if self._ahead is not None:
            self._ahead.go_on()

    def _answer_call(self, ranks: Ranks, opened: Handshake) -> None:
        """Hear what the others tell each other; where that is a call, make it, too."""
        calls = serve_values(ranks, opened)
        match calls[0]:
            case (str(called), dict(arguments)) if called in CALLS:
                if all(call == calls[0] for call in calls):  # else the others refuse it
                    CALLS[called](self._model, arguments)


def _listen(ranks: Ranks, opened: Handshake) -> None:
    """Hear what the others tell each other."""
    serve_values(ranks, opened)


def _end(ranks: Ranks, opened: Handshake) -> None:
    """The others have no more to ask."""


def _asked(ranks: Ranks, opened: Handshake) -> tuple[Sharded, Requests]:
    """Return the place of the table that the others ask for, and what they ask."""
    place = cast(Sharded, ranks.table(opened.tables[0]).place)
    return place, send_no_ids(ranks, [place], opened.values)


def _answer_assignment(ranks: Ranks, opened: Handshake) -> None:
    place, requests = _asked(ranks, opened)
    spec = place.spec
    place.assign_asked(requests, torch.empty((0, spec.dim), dtype=spec.dtype, device="cpu"))


def _answer_deletion(ranks: Ranks, opened: Handshake) -> None:
    place, requests = _asked(ranks, opened)
    place.erase_asked(requests)


def _answer_search(ranks: Ranks, opened: Handshake) -> None:
    place, requests = _asked(ranks, opened)
    place.search_asked(requests, 0)


def _answer_count(ranks: Ranks, opened: Handshake) -> None:
    cast(Sharded, ranks.table(opened.tables[0]).place).count_asked()


def _answer_copy(ranks: Ranks, opened: Handshake) -> None:
    states, everywhere = map(bool, opened.values[opened.ended.index(False)].tolist())
    place = ranks.table(opened.tables[0]).place
    gather_asked(ranks, place, states=states, everywhere=everywhere)
