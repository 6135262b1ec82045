"""Logs of a run for TensorBoard."""

from __future__ import annotations

import os
import time
from typing import Protocol

from hotbed.data.arguments import whole
from hotbed.errors import HotbedError
from hotbed.paths import path_text
from hotbed.train.callbacks import Callback, Run, Step, Validated
from hotbed.train.csv_log import RecentLoss

__all__ = ["TensorBoardLog"]


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...
    def flush(self) -> object: ...
    def close(self) -> object: ...


class TensorBoardLog(Callback):
    """A callback of `fit` that writes events for TensorBoard: loss, lr, samples a second, and all figures of
    a `Validation`, over steps.

    The loss is the mean since the event before. A run that goes on hides events of steps that are taken
    again. On ranks the first one writes.

    Args:
        folder: where events go.
        every: steps between two events.

    Raises:
        InputError: `every` is no positive integer.
        MissingPackage: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 100) -> None:
        every = whole("every", every, 1)
        self.folder, self.every = os.path.abspath(path_text(folder, "folder")), every
        check_tensorboard()
        self._writer: _Writer | None = None
        self._loss = RecentLoss()
        self._run: Run | None = None
        self._rows, self._since = 0, 0.0

    def on_run(self, run: Run) -> None:
        self._run, self._rows, self._since = run, run.position.rows, time.perf_counter()
        if run.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            begun = run.position.steps
            self._writer = SummaryWriter(self.folder, purge_step=begun + 1 if begun else None)
        super().on_run(run)

    def on_step(self, step: Step) -> None:
        if self._writer is None or self._run is None:
            return
        self._loss.add(step)
        if step.number % self.every == 0:
            now = time.perf_counter()
            speed = (step.rows - self._rows) / max(now - self._since, 1e-9)
            self._rows, self._since = step.rows, now
            self._writer.add_scalar("train/loss", self._loss.read(), step.number)
            lr = float(self._run.optimizer.param_groups[0]["lr"])
            self._writer.add_scalar("train/lr", lr, step.number)
            self._writer.add_scalar("train/samples_per_second", speed, step.number)

    def on_validation(self, validated: Validated) -> None:
        if self._writer is not None:
            for task, figures in validated.evaluation.tasks.items():
                for name, value in figures.items():
                    self._writer.add_scalar(f"validation/{task}/{name}", value, validated.step)
            self._writer.flush()

    def on_end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MissingPackage(HotbedError, ImportError):
    """A package that an option needs is not installed."""


def check_tensorboard() -> None:
    """Raise MissingPackage if TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingPackage(
            f"TensorBoardLog needs the package tensorboard ({error}): pip install tensorboard."
        ) from None
