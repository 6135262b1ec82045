"""Comparing what ranks that train one model together give `hotbed.train.fit` alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hotbed.data.position import Position
from hotbed.dist import PeerError
from hotbed.dist.declarations import differences, in_words
from hotbed.dist.errors import mark_known_to_all
from hotbed.table.alone import Processes
from hotbed.train.batches import Loss
from hotbed.train.callbacks import Callback
from hotbed.train.tasks import Task

__all__ = ["FIGURES", "declared_run", "refuse_other_runs"]

FIGURES = "figures"
"""Kind of the exchanges of a training loop."""


def declared_run(
    epochs: int,
    loss: Loss,
    tasks: Sequence[Task],
    position: Position,
    callbacks: Sequence[Callback],
) -> dict[str, str]:
    """Return in words, by name, the arguments of `fit` that decide what is trained and where it ends."""
    found: dict[str, object] = {"epochs": epochs}
    found |= {f"{name} of the position": getattr(position, name) for name in _PLACE}
    if not tasks:
        found["the loss"] = loss
    for t, task in enumerate(tasks):
        own = {"name": task.name, "loss": task.loss, "weight": task.weight}
        own["metrics"] = [(name, type(metric)) for name, metric in task.metrics.items()]
        found |= {f"{name} of task {t}": value for name, value in own.items()}
    counts: dict[str, int] = {}
    for callback in callbacks:
        if options := callback.declared():
            kind = type(callback).__name__
            counts[kind] = count = counts.get(kind, 0) + 1
            which = f"{kind} {count}" if count > 1 else kind
            found |= {f"{name} of {which}": value for name, value in options.items()}
    return {name: in_words(value) for name, value in found.items()}


_PLACE = "epoch", "batch", "steps"


def refuse_other_runs(declared: Mapping[str, str], ranks: Processes) -> None:
    """Raise PeerError on all ranks where they declare other runs. All ranks call this."""
    every = ranks.values_of_all(FIGURES, dict(declared))
    if any(other != every[0] for other in every):
        texts = {rank: json.dumps(other) for rank, other in enumerate(every)}
        error = PeerError(f"{differences(texts)} Call hotbed.train.fit alike on all ranks.")
        mark_known_to_all(error)
        raise error
