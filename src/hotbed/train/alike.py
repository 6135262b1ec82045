"""Messages among ranks that train or evaluate one model together: their arguments, and their errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from hotbed.dist import PeerError
from hotbed.dist.declarations import differences, in_words
from hotbed.dist.errors import mark_known_to_all
from hotbed.table.alone import Processes
from hotbed.train.tasks import Task

__all__ = ["FIGURES", "declared_tasks", "refuse_others", "telling_errors", "told_of_errors"]

FIGURES = "figures"
"""Kind of the exchanges of a training loop."""

T = TypeVar("T")


def declared_tasks(tasks: Sequence[Task]) -> dict[str, object]:
    """Return what decides the loss and the figures of tasks, by name."""
    found: dict[str, object] = {}
    for t, task in enumerate(tasks):
        own = {"name": task.name, "loss": task.loss, "weight": task.weight}
        own["metrics"] = [(name, type(metric)) for name, metric in task.metrics.items()]
        found |= {f"{name} of task {t}": value for name, value in own.items()}
    return found


def refuse_others(declared: Mapping[str, object], ranks: Processes, called: str) -> None:
    """Raise PeerError on all ranks where they declare other values. All call this.

    Args:
        called: what the user has called.
    """
    own = {name: in_words(value) for name, value in declared.items()}
    every = ranks.values_of_all(FIGURES, own)
    if any(other != every[0] for other in every):
        texts = {rank: json.dumps(other) for rank, other in enumerate(every)}
        error = PeerError(f"{differences(texts)} Call {called} alike on all ranks.")
        mark_known_to_all(error)
        raise error


@contextlib.contextmanager
def telling_errors(ranks: Processes) -> Iterator[None]:
    """Report errors raised inside, between two exchanges, to the other ranks, which hear of them in their
    next. Errors that all know of pass."""
    try:
        yield
    except Exception:
        with ranks.reporting(FIGURES):
            raise


def told_of_errors(batches: Iterable[T], ranks: Processes) -> Iterator[T]:
    """Yield batches. Other ranks hear of an error in making one where they look up the next of theirs."""
    with telling_errors(ranks):
        iterator = iter(batches)
    while True:
        with telling_errors(ranks):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
