"""Loads that fail half way: the model refuses to train and to save until a load succeeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from hotbed.checkpoint.ranks import KIND
from hotbed.errors import HotbedError
from hotbed.table.alone import Processes
from hotbed.table.live import LiveTable

__all__ = ["Changes"]

_MOST_TEXT = 800


class Changes:
    """Parts of a model that a load has changed so far.

    Attributes:
        tables: those that it changes, on ranks also those that this one keeps.
        begun: whether it has changed something.
    """

    def __init__(self, folder: str, tables: Iterable[LiveTable]) -> None:
        """`tables`: of the model, until it is known which of them the checkpoint has."""
        self._folder = folder
        self.tables = _with_own(tables)
        self.begun = False

    def are_of(self, tables: Iterable[LiveTable]) -> None:
        self.tables = _with_own(tables)

    @contextlib.contextmanager
    def of_rows(self) -> Iterator[None]:
        """For a ``with`` statement, in which rows change: while the tables are held alone."""
        self.begun = True
        for table in self.tables:
            table.note_load("")
        try:
            yield
        except BaseException as error:
            self._mark(error)
            raise

    @contextlib.contextmanager
    def kept_from_use_if_failed(self, ranks: Processes) -> Iterator[None]:
        """For a ``with`` statement: a load. Where it fails on a rank, all refuse what any has changed."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                with contextlib.suppress(HotbedError):
                    self.begun = any(ranks.values_of_all(KIND, self.begun))
            if self.begun and self.tables:
                self._mark(error)
                if isinstance(error, HotbedError):
                    error.args = (
                        f"{str(error).rstrip('.')}. The model is half loaded: it refuses to look rows up, to "
                        "train and to be saved until hotbed.load succeeds.",
                    )
            raise

    def _mark(self, error: BaseException) -> None:
        text = " ".join(str(error).split())[:_MOST_TEXT].rstrip(".")
        cause = text if isinstance(error, HotbedError) else f"{type(error).__name__}: {text}"
        for table in self.tables:
            table.note_load(f"hotbed.load of {self._folder} has failed ({cause}).")


def _with_own(tables: Iterable[LiveTable]) -> list[LiveTable]:
    """`tables`, and the ones that this process keeps of those which ranks share."""
    every = list(tables)
    return [*dict.fromkeys([*every, *(own for t in every for own in t.place.tables_here(t))])]
