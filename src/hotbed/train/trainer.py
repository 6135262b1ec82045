"""One training step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from hotbed import trace
from hotbed.checkpoint.ranks import ranks_of
from hotbed.data.position import Position
from hotbed.dist.loaders import Slice
from hotbed.dist.timeouts import BACKWARD
from hotbed.errors import HotbedError
from hotbed.modules.owner import tables_of
from hotbed.text import brief
from hotbed.train.alike import telling_errors
from hotbed.train.batches import Batch, Loss, ids_of_tiers, moved
from hotbed.train.callbacks import Step
from hotbed.train.task_loss import Labelled, as_floats, labelled, loss_of_tasks, one_loss
from hotbed.train.tasks import Task, TaskError

__all__ = ["Trainer", "TrainingError"]


class TrainingError(HotbedError, RuntimeError):
    """Training cannot go on; the message says at which step and why."""


class Trainer:
    """Takes the steps of `fit`, whose arguments it has.

    Attributes:
        between_batches: a context in which other ranks are told of errors between two batches.
    """

    between_batches: Callable[[], contextlib.AbstractContextManager[None]]

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        tasks: Sequence[Task],
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        device: torch.device | str | None,
        position: Position,
    ) -> None:
        self.model, self.optimizer, self.loss, self.tasks = model, optimizer, loss, tasks
        self.scheduler, self.device = scheduler, device
        self.position, self.ranks = position, ranks_of(tables_of(model), model)
        self.staying = ids_of_tiers(model)
        self.between_batches = functools.partial(telling_errors, self.ranks)

    def step(self, batch: Batch, epoch: int) -> Step | None:
        """Train on one batch. None: it has no rows, so there was no step.

        Raises:
            TrainingError: the loss is not finite.
            TaskError: a batch without labels, or logits or a loss that do not fit them.
        """
        position, ranks = self.position, self.ranks
        of_all = batch.samples if isinstance(batch, Slice) else None
        with telling_errors(ranks):
            if not isinstance(batch, Mapping) or "label" not in batch:
                raise TaskError(
                    f"Expected a dict with a label, {{'label': ...}}; got {brief(batch)}."
                )
            samples = len(batch["label"]) if of_all is None else of_all
        if not samples and (ranks.trainers == 1 or of_all is not None):
            return None
        found = labelled(self.tasks, batch["label"], ranks) if self.tasks else []
        batch = moved(batch, self.device, self.staying)
        labels = batch["label"]
        with trace.span("forward"):
            logits = self.model(batch)
            value = self._loss(logits, labels, found, of_all)
        if value.device.type == "cpu" and ranks.trainers == 1 and not math.isfinite(value.item()):
            remedy = "Lower the learning rate, or look for extreme inputs."
            if not self.tasks and bool(torch.isnan(labels).any()):
                remedy = "Labels are NaN: with tasks=[hotbed.train.Task(name)] such samples are left out."
            raise TrainingError(
                f"Step {position.steps + 1}, epoch {epoch}: the loss is {value.item()}, so the "
                f"step was not taken. {remedy}"
            )
        with trace.span("backward"), ranks.listening(BACKWARD):
            value.backward()  # type: ignore[no-untyped-call]
        with trace.span("step"):
            self.optimizer.step()
        position.steps += 1
        position.rows += samples
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            with self.between_batches():
                self.scheduler.step()
        return Step(position.steps, epoch, position.rows, value.detach(), logits.detach(), labels)

    def _loss(
        self, logits: Tensor, labels: Tensor, found: Sequence[Labelled], of_all: int | None
    ) -> Tensor:
        """Return the loss of this rank's samples; its average over ranks is that of all.

        Args:
            of_all: samples of the batch of which this rank has a slice.
        """
        if self.tasks:
            return loss_of_tasks(self.tasks, logits, labels, found) if len(labels) else logits.sum()
        if labels.ndim == 1 and logits.shape == (len(labels), 1):  # a loss would pair all with all
            raise TaskError(
                f"Expected logits of the shape {tuple(labels.shape)} of the labels; got "
                f"{tuple(logits.shape)}. Return logits[:, 0], or pass tasks=[hotbed.train.Task(name)]."
            )
        if self.loss is binary_cross_entropy_with_logits:
            labels = as_floats(labels, logits)
        value = one_loss(self.loss(logits, labels)) if len(labels) else logits.sum()
        if of_all:  # ranks with more samples count more
            value = value * (self.ranks.trainers * len(labels) / of_all)
        return value
