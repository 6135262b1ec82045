"""Callbacks of a training loop, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hotbed.data.position import Position
from hotbed.train.evaluation import Evaluation
from hotbed.train.tasks import Task

__all__ = ["Callback", "Run", "Step", "Validated"]


class Run(NamedTuple):
    """A call of `fit`, for callbacks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tasks: tuple[Task, ...]
    """Empty where there is one label."""
    device: torch.device | str | None
    """Where batches are moved."""
    position: Position
    """Where the run stands; until the first step, where it begins."""
    callbacks: Sequence[Callback]
    """All of the run, in their order."""
    rank: int
    """Number of this process among those that train the model, from 0."""


class Step(NamedTuple):
    """Result of one optimizer step, for callbacks."""

    number: int
    """Number of the step, from 1, over all epochs, and over earlier runs where one goes on (`Position`)."""
    epoch: int
    """Number of the epoch, from 1."""
    rows: int
    """Samples trained on so far, over all epochs."""
    loss: Tensor
    """Loss of this batch before the step: (), detached, on the device that computes. Reading it
    (``float(step.loss)``) waits for a device, so read it as seldom as you show it. On ranks their mean
    is that of the whole batch."""
    logits: Tensor
    """Logits (B,) or (B, T), detached."""
    labels: Tensor
    """Labels (B,) or (B, T) of the batch."""


class Validated(NamedTuple):
    """Result of one evaluation by `Validation`."""

    step: int
    """Steps taken by then."""
    epoch: int
    rows: int
    """Samples trained on by then."""
    value: float
    """The figure that is compared."""
    is_best: bool
    """True if it is better than all before."""
    evaluation: Evaluation


class Callback:
    """Base of objects that `fit` calls during a run. Override the methods that you need."""

    def on_run(self, run: Run) -> None:
        """Run before the first batch is asked for, as `on_start`, which it calls, with all of the run."""
        self.on_start(run.model)

    def on_start(self, model: nn.Module) -> None:
        """Run before the first batch is asked for."""

    def declared(self) -> Mapping[str, object]:
        """Return options that must be alike on all ranks, by name; `fit` compares them after `on_run`."""
        return {}

    def on_step(self, step: Step) -> None:
        """Run after each optimizer step."""

    def on_epoch(self, epoch: int) -> None:
        """Run after the last step of an epoch (from 1) that was not cut short."""

    def on_validation(self, validated: Validated) -> None:
        """Run after a `Validation` among the callbacks of the same run has evaluated the model."""

    def should_stop(self) -> bool:
        """Asked after each step, and after each batch of a `Validation`; True from any callback, on any
        rank, ends the run."""
        return False

    def has_ended(self) -> bool:
        """Asked after each step, and before the first; True ends the run. All ranks answer the same."""
        return False

    def on_finish(self) -> None:
        """Run once after the last step, also of a run that was stopped, but not after an error."""

    def on_end(self) -> None:
        """Run once at the end, also after an error."""
