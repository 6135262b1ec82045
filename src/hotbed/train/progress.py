"""What a run shows on a terminal: a progress bar while it goes, a table when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from hotbed.train.loop import Callback, Step
from hotbed.train.metrics import RunningAuc

_REFRESH_SECONDS = 0.1


class ProgressBar(Callback):
    """Loss and AUC of recent rows, rows a second, rows stored.

    The figures are worked out when the bar is redrawn, ten times a second, not at each step.

    Args:
        rows: of one epoch.
        epochs: how many.
        console: where to draw.
        stored_rows: returns the rows that the model's tables hold; None leaves them out.
        tiers: returns the counters of the model's tiers, or nothing where it has none.
    """

    def __init__(
        self,
        rows: int,
        epochs: int,
        console: Console,
        stored_rows: Callable[[], int] | None = None,
        tiers: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self._epochs = epochs
        self._stored_rows = stored_rows
        self._tiers = tiers
        self._auc = RunningAuc()
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._loss: float | None = None
        self._began = self._drawn = 0.0
        self._last: Step | None = None
        self._progress = Progress(
            TextColumn("{task.fields[epoch]}"),
            BarColumn(bar_width=10),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._progress.add_task(
            "train", total=rows * epochs, epoch=self._epoch(1), figures=""
        )

    def on_start(self, model: nn.Module) -> None:
        self._began = time.perf_counter()
        self._progress.start()

    def on_step(self, step: Step) -> None:
        self._loss = step.loss if self._loss is None else 0.98 * self._loss + 0.02 * step.loss
        self._waiting.append((step.logits, step.labels))
        self._last = step
        if time.perf_counter() - self._drawn >= _REFRESH_SECONDS:
            self._draw()

    def on_end(self) -> None:
        self._draw()
        self._progress.stop()

    def _epoch(self, number: int) -> str:
        return f"{number}/{self._epochs}" if self._epochs > 1 else "train"

    def _draw(self) -> None:
        self._drawn = time.perf_counter()
        if self._last is None or self._loss is None:
            return
        if self._waiting:
            logits, labels = zip(*self._waiting, strict=True)
            self._auc.update(torch.cat(logits), torch.cat(labels))
            self._waiting.clear()
        speed = self._last.rows / (self._drawn - self._began)
        figures = f"loss {self._loss:.4f} AUC {self._auc.value():.4f} {speed:,.0f} rows/s"
        if self._stored_rows is not None:
            figures += f" {self._stored_rows():,} stored"
        if self._tiers is not None and (counted := self._tiers()):
            figures += (
                f" · {counted['hit_rate']:.0%} hits, {_read_and_written(counted)}, "
                f"{counted['queue_depth']:.0f} ahead, "
                f"{(counted['stall_ms'] + counted['wait_ms']) / 1e3:,.1f} s waited"
            )
        self._progress.update(
            self._task,
            completed=self._last.rows,
            epoch=self._epoch(self._last.epoch),
            figures=figures,
        )


def _read_and_written(counted: dict[str, float]) -> str:
    """Rows so far: of the SSD once it has some, else of RAM below a device."""
    tier = "ssd" if counted["rows_from_ssd"] + counted["rows_to_ssd"] > 0 else "host"
    read, written = counted[f"rows_from_{tier}"], counted[f"rows_to_{tier}"]
    return f"{_short(read)} read, {_short(written)} written"


def _short(count: float) -> str:
    """Three digits: 999, 1.23k, 45.6k, 789k, 1.23M."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5 or unit == "G":
            break
        count /= 1000
    digits = 0 if not unit or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f}{unit}"


def closing_table(title: str, lines: dict[str, str]) -> Table:
    """A two-column table of names and figures."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in lines.items():
        table.add_row(name, value)
    return table
