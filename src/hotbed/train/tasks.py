"""Tasks of a model: a label, its loss and its metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hotbed.errors import HotbedError
from hotbed.text import brief
from hotbed.train.batches import Loss
from hotbed.train.metrics import Auc, LogLoss, MeanLoss, Metric

__all__ = ["Task", "TaskError", "columns", "figures_of", "tasks_of"]


_NAME = "printable text without a slash"


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and bool(name) and "/" not in name


class TaskError(HotbedError, ValueError):
    """Tasks that cannot be honoured, or logits or labels that do not fit them."""


@dataclass(frozen=True)
class Task:
    """One label of several: column t of logits and labels (B, T) is that of task t.

    A label that is NaN is missing: its sample counts neither in the task's loss nor in its metrics.
    """

    name: str
    """Its name in figures and logs, without a slash."""
    loss: Loss = field(default=binary_cross_entropy_with_logits, kw_only=True)
    """A function of logits and labels, (N,) each, to their mean loss, a scalar."""
    weight: float = field(default=1.0, kw_only=True)
    """Factor of the loss in the sum over tasks."""
    metrics: Mapping[str, Metric] = field(default_factory=dict, kw_only=True)
    """Objects that `evaluate` updates with all logits and labels, such as those of torchmetrics, by the
    names of their figures. Labels that are all whole numbers come as int64 where the loss is that of
    clicks. Default: auc and logloss of clicks; of another loss that loss."""

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise TaskError(f"A task's name is {brief(self.name)}; give {_NAME}.")
        if not callable(self.loss):
            raise TaskError(
                f"Task {self.name!r}: loss is {brief(self.loss)}; give a function of logits and labels."
            )
        if not isinstance(self.weight, int | float) or not 0 <= self.weight < math.inf:
            raise TaskError(
                f"Task {self.name!r}: weight is {brief(self.weight)}; give a number from 0 on."
            )
        metrics = self.metrics or self._usual()
        if not isinstance(metrics, Mapping):
            raise TaskError(
                f"Task {self.name!r}: metrics is {brief(metrics)}; give a dict of names and metrics."
            )
        for name, metric in metrics.items():
            if isinstance(metric, type):
                raise TaskError(
                    f"Task {self.name!r}, metric {brief(name)}: expected an object, got the class "
                    f"{metric.__name__}. Make one of it: {metric.__name__}()."
                )
            if not all(hasattr(metric, each) for each in ("update", "compute", "reset")):
                raise TaskError(
                    f"Task {self.name!r}, metric {brief(name)}: expected an object with update(), "
                    f"compute() and reset(), got {type(metric).__name__}."
                )
            if not _is_name(name):
                raise TaskError(
                    f"Task {self.name!r}: a metric's name is {brief(name)}; give {_NAME}."
                )
        object.__setattr__(self, "metrics", dict(metrics))

    @property
    def is_of_clicks(self) -> bool:
        """True if the loss is `binary_cross_entropy_with_logits`."""
        return self.loss is binary_cross_entropy_with_logits

    def _usual(self) -> dict[str, Metric]:
        if self.is_of_clicks:
            return {"auc": Auc(), "logloss": LogLoss()}
        return {"loss": MeanLoss(self.loss)}

    def figures(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the metrics of logits and labels (N,); NaN where no label is there."""
        there = ~torch.isnan(labels)
        logits, labels = logits[there], labels[there]
        if not len(labels):
            return dict.fromkeys(self.metrics, math.nan)
        if self.is_of_clicks and torch.equal(labels, labels.round()):
            labels = labels.long()
        found = {}
        for name, metric in self.metrics.items():
            with _of_these_rows_alone(metric):
                metric.update(logits, labels)
                found[name] = float(metric.compute())
        return found


@contextlib.contextmanager
def _of_these_rows_alone(metric: Metric) -> Iterator[None]:
    """Empty before and after. One of torchmetrics would add the rows of other ranks, which are there."""
    shared = "distributed_available_fn"
    before = getattr(metric, shared, None)
    metric.reset()
    try:
        if before is not None:
            setattr(metric, shared, _never)
        yield
    finally:
        if before is not None:
            setattr(metric, shared, before)
        metric.reset()


def _never() -> bool:
    return False


def tasks_of(tasks: Sequence[Task] | None) -> tuple[Task, ...]:
    """Return the tasks; none for None.

    Raises:
        TaskError: an empty list, no task, or two of one name.
    """
    if tasks is None:
        return ()
    if isinstance(tasks, Task) or not tasks:
        raise TaskError(f"tasks= takes a list of hotbed.train.Task; got {brief(tasks)}.")
    for task in tasks:
        if not isinstance(task, Task):
            raise TaskError(f"tasks= takes a list of hotbed.train.Task; got {brief(task)} in it.")
    names = [task.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TaskError(f"Two tasks are named {twice[0]!r}. Give each its own name.")
    return tuple(tasks)


def columns(what: str, values: Tensor, tasks: Sequence[Task]) -> Tensor:
    """Return logits or labels as (B, T); (B,) may stand for (B, 1).

    Raises:
        TaskError: they have not one column a task.
    """
    wide = values[:, None] if values.ndim == 1 else values
    if wide.ndim != 2 or wide.shape[1] != len(tasks):
        names = ", ".join(repr(task.name) for task in tasks)
        raise TaskError(
            f"Expected {what} of shape (B, {len(tasks)}), a column for each of {names}; got "
            f"{tuple(values.shape)}."
        )
    return wide


def figures_of(
    tasks: Sequence[Task], logits: Tensor, labels: Tensor
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task, by name, of logits and labels (N, T), or (N,) of one task."""
    if not len(labels):
        return {task.name: dict.fromkeys(task.metrics, math.nan) for task in tasks}
    z, y = columns("logits", logits, tasks), columns("labels", labels, tasks)
    return {task.name: task.figures(z[:, t], y[:, t]) for t, task in enumerate(tasks)}
