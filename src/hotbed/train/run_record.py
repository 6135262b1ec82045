"""The record that `hotbed train --run` keeps of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shlex
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console

from hotbed.checkpoint.stores import store_of
from hotbed.files import Json
from hotbed.train.callbacks import Callback
from hotbed.train.csv_log import CsvLog
from hotbed.train.progress import notice
from hotbed.train.report import check_writable_file, hardware, versions, write_json
from hotbed.train.run_files import EVENTS, FORMAT, HISTORY, OWN, RECORD, VALIDATION, read_record
from hotbed.train.settings import OPTIONS, SettingsError, TrainSettings
from hotbed.train.tensorboard_log import TensorBoardLog, check_tensorboard

__all__ = ["RunRecord", "command_of"]

_COUNTERS = (
    "rows_used",
    "rows_missed",
    "rows_created",
    "rows_from_host",
    "rows_from_ssd",
    "wait_ms",
)
"""Counters of tiers in the log."""
_STEPS = 100
"""Between two lines of the log."""


class RunRecord:
    """The folder of --run, which the first process writes; without --run every method does nothing.

    Args:
        settings: of the run.
        progress: where notices go.
        is_first: this process speaks for all.
    """

    def __init__(self, settings: TrainSettings, progress: Console, *, is_first: bool) -> None:
        self._settings, self._progress = settings, progress
        self._folder = settings.run if is_first else None
        self._record: dict[str, object] = {}

    def check(self) -> None:
        """Make the folder; all that could hinder the run is found here.

        Raises:
            SettingsError: it holds the record of another run, or files that would be overwritten.
            HotbedError, OSError: it cannot be made or written, or TensorBoard is not installed.
        """
        if self._settings.log is not None:
            check_tensorboard()
        if self._folder is None:
            return
        folder = self._folder
        if os.path.lexists(os.path.join(folder, RECORD)):
            self._check_same(read_record(folder))
        elif there := [name for name in OWN if os.path.lexists(os.path.join(folder, name))]:
            raise SettingsError(
                f"--run {folder} has a file {there[0]}, and no {RECORD} of a run. Name another folder."
            )
        os.makedirs(folder, exist_ok=True)
        check_writable_file(os.path.join(folder, RECORD))

    def _check_same(self, record: Mapping[str, Json]) -> None:
        settings = self._settings
        if not settings.resumes:
            raise SettingsError(
                f"--run {settings.run} holds the record of a run. Go on with that run by --resume, or name "
                "another folder."
            )
        kept = record.get("identity")
        for field, own in _identity(settings).items():
            was, option = kept.get(field) if isinstance(kept, dict) else None, OPTIONS[field]
            if own != was:
                raise SettingsError(
                    f"--run {settings.run} holds the record of another run: --{option.key} is {was!r} there "
                    f"and {own!r} here. Name another folder."
                )

    def begin(self, *, processes: int, samples: Mapping[str, int]) -> None:
        """Write the record of a run that begins, or goes on. `samples`: by the part of the data: training,
        validation, test."""
        if self._folder is None:
            return
        path = os.path.join(self._folder, RECORD)
        before = read_record(self._folder) if os.path.lexists(path) else {}
        now = _now()
        self._record = {
            "format": FORMAT,
            "version": 1,
            "state": "running",
            "began": before.get("began", now),
            "resumed": now if before else None,
            "command": command_of(self._settings, processes),
            "settings": _as_json(self._settings),
            "identity": _identity(self._settings),
            "versions": versions(),
            "hardware": hardware(self._settings.on),
            "processes": processes,
            "samples": dict(samples),
        }
        write_json(path, self._record)

    def callbacks(self, tiers: Callable[[], Mapping[str, float]] | None) -> list[Callback]:
        """Return the logs of the run. `tiers`: returns counters of its tiers, if it has some."""
        if self._folder is None:
            return []
        history, validation = (os.path.join(self._folder, name) for name in (HISTORY, VALIDATION))
        found: list[Callback] = [
            CsvLog(history, _STEPS, validation=validation, figures=tiers and _some(tiers)),
        ]
        if self._settings.log == "tensorboard":
            found.append(TensorBoardLog(os.path.join(self._folder, EVENTS), _STEPS))
        return found

    @contextlib.contextmanager
    def of_failures(self) -> Iterator[None]:
        """Note the error that ends the run inside a ``with`` statement."""
        try:
            yield
        except BaseException as error:
            self.end("failed", error=f"{type(error).__name__}: {error}")
            raise

    def end(self, state: str, **further: object) -> None:
        """Write how the run ended. A disk that is full for it costs nothing else.

        Args:
            state: ended, interrupted or failed.
            further: entries of the record.
        """
        if self._folder is None or not self._record:
            return
        self._record |= {"state": state, "ended": _now(), **further}
        try:
            write_json(os.path.join(self._folder, RECORD), self._record)
        except OSError as error:
            notice(self._progress, f"the record of this run was not completed: {error}")


def _some(tiers: Callable[[], Mapping[str, float]]) -> Callable[[], Mapping[str, float]]:
    """Return a function for the counters that the record keeps, 0 of those that are not counted yet."""

    def some() -> dict[str, float]:
        found = tiers()
        return {name: found.get(name, 0.0) for name in _COUNTERS}

    return some


def command_of(settings: TrainSettings, processes: int = 1) -> str:
    """Return the command line of a run, as a shell takes it."""
    words = ["hotbed", "train"]
    if processes > 1:  # torchrun takes --run and --log for its own, but behind --
        words = ["torchrun", "--nproc-per-node", str(processes), "-m", "--", *words]
    for field, option in OPTIONS.items():
        value = getattr(settings, field)
        if value == option.default or value is False:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            words += [f"--{option.key}"] if each is True else [f"--{option.key}", str(each)]
    return shlex.join(words)


def _as_json(settings: TrainSettings) -> dict[str, object]:
    found = dataclasses.asdict(settings)
    return {name: [*value] if isinstance(value, tuple) else value for name, value in found.items()}


def _identity(settings: TrainSettings) -> dict[str, object]:
    """Return what does not change when a run goes on, with absolute paths."""
    path = settings.checkpoint
    checkpoint = path and store_of(path).resolved(path)
    return {**settings.of_same_run(), "checkpoint": checkpoint}


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
