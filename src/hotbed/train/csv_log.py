"""Logs of a run as CSV files."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hotbed.data.arguments import whole
from hotbed.files import is_special
from hotbed.paths import path_text
from hotbed.train.callbacks import Callback, Run, Step, Validated
from hotbed.train.evaluation import ONE_LABEL
from hotbed.train.line_file import LineFile, whole_lines
from hotbed.train.report import OutputError, check_writable_file

__all__ = ["CsvLog", "RecentLoss", "figure_names"]


class RecentLoss:
    """Mean loss of the steps since it was read, summed where it lies: only reading waits for a device."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._steps = 0

    def add(self, step: Step) -> None:
        self._sum = step.loss.double() if self._sum is None else self._sum + step.loss
        self._steps += 1

    def read(self) -> float:
        """Return the mean, and begin anew; NaN if there was no step."""
        mean = float("nan") if self._sum is None else float(self._sum) / self._steps
        self._sum, self._steps = None, 0
        return mean


def figure_names(run: Run) -> list[str]:
    """Names of all figures of a validation, ``task/metric``."""
    if not run.tasks:
        return [f"{ONE_LABEL}/auc", f"{ONE_LABEL}/logloss"]
    return [f"{task.name}/{name}" for task in run.tasks for name in task.metrics]


class CsvLog(Callback):
    """A callback of `fit` that writes a CSV file: step, epoch, samples, loss, lr, samples_per_second.

    The loss is the mean since the line before, on ranks of this rank's part; lr is that of the optimizer's
    first group. A run that goes on (``position=``) goes on with the file: lines of steps that are taken
    again are replaced. Each line is written whole; a disk that is full costs lines and a warning. On ranks
    the first one writes.

    Args:
        path: the file. The log of another run that is there becomes ``path.1``, or the next number.
        every: steps between two lines.
        validation: a second file, with a line for each `Validation`: step, epoch, samples, value (the
            figure that is compared), best (1 or 0), and all figures by ``task/metric``.
        figures: returns further columns, such as ``embeddings.stats``; those of the first call.

    Raises:
        InputError: `every` is no positive integer.
        OutputError: a file cannot be written, or one that is there is no such log.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int = 100,
        *,
        validation: str | os.PathLike[str] | None = None,
        figures: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        every = whole("every", every, 1)
        self.path, self.every = os.path.abspath(path_text(path)), every
        self.validation = (
            None if validation is None else os.path.abspath(path_text(validation, "validation"))
        )
        self._figures, self._names = figures, list[str]()
        self._loss = RecentLoss()
        self._run: Run | None = None
        self._files: list[LineFile] = []
        self._last: Step | None = None
        self._written = self._rows = 0
        self._since = 0.0

    def on_run(self, run: Run) -> None:
        self._run, self._files, self._last = run, [], None
        self._written, self._rows = run.position.steps, run.position.rows
        if run.rank == 0:
            self._names = [] if self._figures is None else list(self._figures())
            head = ["step", "epoch", "samples", "loss", "lr", "samples_per_second", *self._names]
            self._begin(self.path, head, run)
            if self.validation is not None:
                head = ["step", "epoch", "samples", "value", "best", *figure_names(run)]
                self._begin(self.validation, head, run)
        self._since = time.perf_counter()
        super().on_run(run)

    def _begin(self, path: str, head: Sequence[str], run: Run) -> None:
        check_writable_file(path)
        if is_special(path):
            raise OutputError(f"Cannot log to {path!r}: it is no plain file. Name another file.")
        header, steps = _line(head), run.position.steps
        lines = whole_lines(path) if os.path.exists(path) else []
        if not lines and os.path.exists(path) and os.path.getsize(path):
            raise OutputError(f"{path!r} is no log: it has no whole line. Name another file.")
        if lines and lines[0] != header:
            raise OutputError(
                f"{path!r} begins with {lines[0][:200]!r}, and this run's log with {header!r}. Name "
                "another file."
            )
        if len(lines) > 1 and not (steps or run.position.loaded):
            os.rename(path, _free_beside(path))
        file = LineFile(path)
        file.keep(header, lambda line: _step_of(line) <= steps)
        self._files.append(file)

    def on_step(self, step: Step) -> None:
        if self._files:
            self._loss.add(step)
            self._last = step
            if step.number % self.every == 0:
                self._write()

    def on_finish(self) -> None:
        if self._last is not None and self._last.number > self._written:
            self._write()

    def on_validation(self, validated: Validated) -> None:
        if len(self._files) < 2 or self._run is None:
            return
        found = validated.evaluation.tasks
        figures = [found[task][name] for task in found for name in found[task]]
        shown = [*validated[:4], int(validated.is_best), *figures]
        self._files[1].append(_line(shown))

    def _write(self) -> None:
        assert self._run is not None and self._last is not None
        last, now = self._last, time.perf_counter()
        speed = (last.rows - self._rows) / max(now - self._since, 1e-9)
        found = {} if self._figures is None else self._figures()
        further = [found.get(name, math.nan) for name in self._names]
        lr = self._run.optimizer.param_groups[0]["lr"]
        shown = [last.number, last.epoch, last.rows, self._loss.read(), float(lr), round(speed, 1)]
        self._files[0].append(_line([*shown, *further]))
        self._written, self._rows, self._since = last.number, last.rows, now


def _free_beside(path: str) -> str:
    """Return the path with the first number behind it that nothing has."""
    numbered = (f"{path}.{number}" for number in itertools.count(1))
    return next(other for other in numbered if not os.path.lexists(other))


def _line(values: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


def _step_of(line: str) -> int:
    """The step of a line; beyond all others if it has none."""
    first = line.partition(",")[0]
    return int(first) if first.isdecimal() else 2**63
