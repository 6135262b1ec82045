"""Output of a run on a terminal: a progress bar while it goes, a table when it is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sized

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hotbed.data.position import wrapped_by
from hotbed.data.windows import SampleReader
from hotbed.modules.owner import groups_of, tables_of
from hotbed.text import printable
from hotbed.train.callbacks import Callback, Run, Step
from hotbed.train.metrics import RunningAuc

_REFRESH_SECONDS = 0.1
_BAR_WIDTH = 10
_BESIDE_FIGURES = len("100%") + len("00:00:00") + 3
"""Of the first line: share, time that remains and the gaps between columns; the epoch comes on top."""


class ProgressBar(Callback):
    """Loss and AUC of recent samples (of several tasks: of the first), samples a second, rows that the tables
    hold.

    The figures are worked out when the bar is redrawn, ten times a second, not at each step. What does
    not fit into a line of the terminal is left out.

    Args:
        samples: of one epoch; None: nobody knows.
        epochs: how many.
        console: where to draw.
        stored_rows: returns the rows that the model's tables hold; None leaves them out.
        tiers: returns the counters of the model's tiers, drawn on a line of their own; None if it has none.
    """

    def __init__(
        self,
        samples: int | None,
        epochs: int,
        console: Console,
        stored_rows: Callable[[], int] | None = None,
        tiers: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self._epochs = epochs
        self._stored_rows = stored_rows
        self._tiers = tiers
        self._auc, self._has_auc = RunningAuc(), True
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._loss: torch.Tensor | None = None
        self._began = self._drawn = 0.0
        self._last: Step | None = None
        self._before = 0  # rows of earlier runs, where one goes on
        # A narrow terminal has its place for figures.
        bar = [BarColumn(bar_width=_BAR_WIDTH)] if console.width >= 60 else []
        self._room = console.width - _BESIDE_FIGURES - (_BAR_WIDTH + 1) * len(bar)
        self._progress = _TwoLines(
            TextColumn("{task.fields[epoch]}"),
            *bar,
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._progress.add_task(
            "train",
            total=None if samples is None else samples * epochs,
            epoch=self._epoch(1),
            figures="",
        )

    def on_run(self, run: Run) -> None:
        self._has_auc = not run.tasks or run.tasks[0].is_of_clicks
        super().on_run(run)

    def on_start(self, model: nn.Module) -> None:
        self._began = time.perf_counter()
        self._progress.start()

    def on_step(self, step: Step) -> None:
        self._loss = step.loss if self._loss is None else 0.98 * self._loss + 0.02 * step.loss
        if self._has_auc and step.logits.numel() == step.labels.numel():  # not of retrieval
            self._waiting.append((_first(step.logits), _first(step.labels)))
        if self._last is None:
            self._before = step.rows - len(step.labels)
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
        epoch = self._epoch(self._last.epoch)
        if self._tiers is not None:
            self._progress.second = _fitting(
                _of_tiers(self._tiers()), ", ", self._progress.console.width
            )
        self._progress.update(
            self._task,
            completed=self._last.rows,
            epoch=epoch,
            figures=_fitting(self._figures(), " ", self._room - len(epoch) - 1),
        )

    def _figures(self) -> Iterator[str]:
        """The most telling first."""
        assert self._last is not None and self._loss is not None
        yield f"loss {float(self._loss):.4f}"
        if not math.isnan(area := self._auc.value()):
            yield f"AUC {area:.4f}"
        yield f"{short((self._last.rows - self._before) / (self._drawn - self._began))} samples/s"
        if self._stored_rows is not None:
            yield f"{short(self._stored_rows())} rows"


def _first(values: Tensor) -> Tensor:
    """The column of the first task."""
    return values if values.ndim < 2 else values[:, 0]


def progress_bar(
    model: nn.Module, batches: object, epochs: int, *, alone: bool
) -> list[ProgressBar]:
    """The bar of a training; none where standard error is no terminal.

    Args:
        alone: no other process has to be asked how many rows there are.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        return []
    tables, groups = list(tables_of(model).values()), groups_of(model)
    stored = (lambda: sum(map(len, tables))) if alone and tables else None
    tiers = groups[0].stats if len(groups) == 1 and groups[0].tiers is not None else None
    return [ProgressBar(_samples_in(batches), epochs, console, stored, tiers)]


def _samples_in(batches: object) -> int | None:
    """Return the samples of one epoch, if that is known without reading the data."""
    batches = wrapped_by(batches)[-1]
    if isinstance(batches, SampleReader):
        return None if batches.stop is None else batches.stop - batches.start
    if isinstance(batches, DataLoader):
        listed = not isinstance(batches.dataset, IterableDataset)
        return len(batches.sampler) if listed and isinstance(batches.sampler, Sized) else None
    if isinstance(batches, list | tuple):
        return sum(len(batch["label"]) for batch in batches)
    return None


class _TwoLines(Progress):
    """A bar, and a line of text below it, if there is any."""

    second = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.second:
            yield Text(self.second, no_wrap=True)


def _fitting(parts: Iterable[str], gap: str, room: int) -> str:
    """As many of the first parts as fit."""
    text = ""
    for part in parts:
        longer = text + gap + part if text else part
        if len(longer) > room:
            break
        text = longer
    return text


def _of_tiers(counted: dict[str, float]) -> Iterator[str]:
    yield f"{counted['hit_rate']:.0%} hits"
    yield f"{counted['wait_ms'] / 1e3:,.1f} s waited"
    # Of the SSD once it has some, else of RAM below a device.
    tier = "ssd" if counted["rows_from_ssd"] + counted["rows_to_ssd"] > 0 else "host"
    yield f"{short(counted[f'rows_from_{tier}'])} rows read"
    yield f"{short(counted[f'rows_to_{tier}'])} written"
    yield f"{counted['queue_depth']:.0f} batches ahead"


def short(count: float) -> str:
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
        table.add_row(name, literal(value))
    return table


def literal(text: str) -> Text:
    """Text of others, such as a name in a file, as it is: no markup, and nothing that steers a terminal."""
    return Text(printable(text))


def notice(console: Console, text: str) -> None:
    """Something that is no error and to be known, above a bar if there is one."""
    console.print(literal(f"Notice: {text}"), soft_wrap=True)
