"""Callbacks of a training loop, and the step that they are given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

__all__ = ["Callback", "Step"]


class Step(NamedTuple):
    """Result of one optimizer step, for callbacks."""

    number: int
    """From 1, over all epochs, and over earlier runs where one goes on (`Position`)."""
    epoch: int
    """From 1."""
    rows: int
    """Trained on so far, over all epochs."""
    loss: Tensor
    """Loss of this batch before the step: (), detached, on the device that computes. Reading it
    (``float(step.loss)``) waits for a device, so read it as seldom as you show it."""
    logits: Tensor
    """(B,), detached."""
    labels: Tensor
    """(B,)"""


class Callback:
    """Something to be told about a run. Override what is wanted."""

    def on_start(self, model: nn.Module) -> None:
        """Before the first batch is asked for."""

    def on_step(self, step: Step) -> None:
        """After each optimizer step."""

    def on_epoch(self, epoch: int) -> None:
        """After the last step of an epoch (from 1) that was not cut short."""

    def should_stop(self) -> bool:
        """Asked after each step; True from any callback, on any rank, ends the run."""
        return False

    def on_end(self) -> None:
        """Once, also after an error."""
