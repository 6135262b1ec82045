"""The loss of a batch with several labels, some of which are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.table.alone import Processes
from hotbed.train.tasks import Task, TaskError, columns

__all__ = ["Labelled", "as_floats", "labelled", "loss_of_tasks", "one_loss"]


class Labelled(NamedTuple):
    """Samples of this rank's batch that have the label of a task."""

    samples: Tensor | None
    """Their numbers in the batch, int64 (n,); None: all."""
    factor: float
    """Factor of their mean loss, so that the average over ranks is the task's weight times the mean over
    all samples of all ranks that have the label; 0 where there is none."""


def labelled(tasks: Sequence[Task], labels: Tensor, ranks: Processes) -> list[Labelled]:
    """Return for each task which samples have its label; labels are (B, T). All ranks call this.

    It is found where the labels lie; a device is waited for.
    """
    with ranks.reporting("figures"):
        there = ~torch.isnan(columns("labels", labels, tasks))
        counts: list[int] = there.sum(0).tolist()
    totals = counts
    if ranks.trainers > 1:
        totals = [sum(each) for each in zip(*ranks.values_of_all("figures", counts), strict=True)]
    found = []
    for t, (task, count, total) in enumerate(zip(tasks, counts, totals, strict=True)):
        factor = task.weight * (ranks.trainers * count / total) if count else 0.0
        samples = None if count == len(labels) else there[:, t].nonzero()[:, 0]
        found.append(Labelled(samples, factor))
    return found


def as_floats(labels: Tensor, logits: Tensor) -> Tensor:
    """Return labels of clicks in the dtype of the logits where they are integers or bools."""
    return labels if labels.is_floating_point() else labels.to(logits.dtype)


def one_loss(value: Tensor, whose: str = "") -> Tensor:
    """Return what a loss function returned; raises TaskError where it is no single number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TaskError(
            f"{whose}the loss must be a tensor of one number, the mean over samples; got {got}."
        )
    return value.reshape(()) if value.ndim else value


def loss_of_tasks(
    tasks: Sequence[Task], logits: Tensor, labels: Tensor, found: Sequence[Labelled]
) -> Tensor:
    """Return the sum over tasks of their factors and mean losses, a scalar.

    Raises:
        TaskError: the logits are not (B, T), or of another batch size than the labels.
    """
    z, y = columns("logits", logits, tasks), columns("labels", labels, tasks)
    if len(z) != len(y):
        raise TaskError(
            f"Expected as many logits as labels; got {tuple(logits.shape)} and {tuple(labels.shape)}."
        )
    value = z[:0].sum()  # zero, with a gradient of zeros where no label is there
    for t, (task, (samples, factor)) in enumerate(zip(tasks, found, strict=True)):
        if not factor:
            continue
        own, target = z[:, t], y[:, t]
        if samples is not None:
            samples = samples.to(z.device, non_blocking=True)
            own, target = own.index_select(0, samples), target.index_select(0, samples)
        if task.is_of_clicks:
            target = as_floats(target, own)
        value = value + factor * one_loss(task.loss(own, target), f"Task {task.name!r}: ")
    return value
