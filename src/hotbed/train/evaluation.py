"""Evaluation of a model on batches with labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hotbed.checkpoint.ranks import ranks_of
from hotbed.modules.owner import tables_of
from hotbed.train.alike import FIGURES, declared_tasks, refuse_others, telling_errors
from hotbed.train.batches import Batch, ids_of_tiers, moved
from hotbed.train.metrics import auc, logloss
from hotbed.train.tasks import Task, TaskError, figures_of, tasks_of

__all__ = [
    "ONE_LABEL",
    "Evaluation",
    "Scores",
    "evaluate",
    "evaluated",
    "first_label",
    "score",
    "scored",
]

ONE_LABEL = "label"
"""The name in figures of the label of a model without tasks."""


class Evaluation(NamedTuple):
    """Quality of a model's scores."""

    auc: float
    """Of several tasks: of the first."""
    logloss: float
    """Of several tasks: of the first."""
    rows: int
    seconds: float
    interrupted: bool
    tasks: dict[str, dict[str, float]]
    """Metrics by task: name → name of the metric → figure; without tasks, those of "label"."""


class Scores(NamedTuple):
    """Logits and labels of all ranks."""

    logits: Tensor
    """(N,) or (N, T), on the host, at least float32."""
    labels: Tensor
    """(N,) or (N, T), on the host."""
    seconds: float
    interrupted: bool


def scored(
    model: nn.Module, batches: Iterable[Batch], device: torch.device | str | None = None
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch with its logits, the model in evaluation mode and without gradients.

    The model's mode is as it was between batches and afterwards.
    """
    staying = ids_of_tiers(model)
    for batch in batches:
        batch = moved(batch, device, staying)
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                logits = model(batch)
        finally:
            model.train(training)
        yield batch, logits


def score(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    device: torch.device | str | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Scores:
    """Return the logits and labels of the batches of all ranks; nothing in the model changes."""
    began, ranks = time.perf_counter(), ranks_of(tables_of(model), model)
    logits: list[Tensor] = [torch.empty(0, device="cpu")]
    labels: list[Tensor] = [torch.empty(0, device="cpu")]
    interrupted = False
    with telling_errors(ranks):
        for batch, scores in scored(model, batches, device):
            logits.append(scores.to(torch.promote_types(scores.dtype, torch.float32)).cpu())
            if "label" not in batch:
                raise TaskError("A batch has no label to evaluate by: give {'label': ...}.")
            labels.append(batch["label"].cpu())
            if ranks.ends(should_stop or _never):
                interrupted = True
                break
    of_ranks = ranks.values_of_all(FIGURES, (torch.cat(logits), torch.cat(labels)))
    z, y = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
    return Scores(z, y, time.perf_counter() - began, interrupted)


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    tasks: Sequence[Task] | None = None,
    device: torch.device | str | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Evaluation:
    """Return the exact metrics of `model` on `batches`; nothing in the model changes.

    Without tasks they are AUC and log loss of labels (B,). A distributed model is evaluated on the batches
    of all ranks, which have as many each: see `hotbed.dist.slices` and `hotbed.dist.even`.

    Raises:
        TaskError: logits or labels have not one column a task.
        PeerError: another rank has other tasks, or its loader or model has failed.
    """
    ranks = ranks_of(tables_of(model), model)
    with telling_errors(ranks):
        known = tasks_of(tasks)
    refuse_others(declared_tasks(known), ranks, "hotbed.train.evaluate")
    return evaluated(score(model, batches, device=device, should_stop=should_stop), known)


def first_label(scores: Scores) -> tuple[Tensor, Tensor]:
    """Return logits and labels (N,) of the first label, of samples that have it."""
    z, y = scores.logits, scores.labels
    if y.dim() == 2:
        z, y = z[:, 0], y[:, 0]
        there = ~torch.isnan(y)
        return z[there], y[there]
    return z, y


def evaluated(scores: Scores, tasks: Sequence[Task] = ()) -> Evaluation:
    """Return the metrics of scores; without tasks, AUC and log loss."""
    z, y, seconds, interrupted = scores
    if tasks:
        found = figures_of(tasks, z, y)
        first = found[tasks[0].name]
    else:
        first = {"auc": auc(z, y), "logloss": logloss(z, y)}
        found = {ONE_LABEL: first}
    area, mean = (first.get(name, math.nan) for name in ("auc", "logloss"))
    return Evaluation(area, mean, len(y), seconds, interrupted, found)


def _never() -> bool:
    return False
