"""Callbacks of a training loop, and the step that they are given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

__all__ = ["Callback", "Step"]


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
    (``float(step.loss)``) waits for a device, so read it as seldom as you show it."""
    logits: Tensor
    """Logits (B,), detached."""
    labels: Tensor
    """Labels (B,) of the batch."""


class Callback:
    """Base of objects that `fit` calls during a run. Override the methods that you need."""

    def on_start(self, model: nn.Module) -> None:
        """Run before the first batch is asked for."""

    def on_step(self, step: Step) -> None:
        """Run after each optimizer step."""

    def on_epoch(self, epoch: int) -> None:
        """Run after the last step of an epoch (from 1) that was not cut short."""

    def should_stop(self) -> bool:
        """Asked after each step; True from any callback, on any rank, ends the run."""
        return False

    def on_end(self) -> None:
        """Run once at the end, also after an error."""
