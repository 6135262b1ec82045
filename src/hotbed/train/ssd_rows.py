"""The rows that `hotbed train` leaves in --ssd, and its note about them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from torch import nn

from hotbed.errors import StorageError
from hotbed.places.tiered.folder import of_process
from hotbed.train.figures import embeddings_of
from hotbed.train.progress import notice
from hotbed.train.run_note import forget_note, write_note

__all__ = ["SsdRows"]


class SsdRows:
    """The rows of this process in --ssd; without --ssd every method does nothing.

    Args:
        ssd: the folder of --ssd.
        progress: where notices go.
        of_logs: ids are those of click logs, which write them in hexadecimal.
    """

    def __init__(self, ssd: str | None, progress: Console, *, of_logs: bool = True) -> None:
        self._ssd, self._progress, self._of_logs = ssd, progress, of_logs

    @property
    def _folder(self) -> str:
        assert self._ssd is not None
        return str(of_process(self._ssd))

    def forget_note(self) -> None:
        """Remove the note of an earlier run."""
        if self._ssd is not None:
            forget_note(self._folder)

    def leave_note(self, *, may_go: bool) -> None:
        """Write what `hotbed inspect` and the next run want to know.

        Args:
            may_go: nothing is lost with the rows.
        """
        if self._ssd is not None:
            with self._told_if_not_written():
                write_note(self._folder, may_go=may_go, of_logs=self._of_logs)

    def complete(self, model: nn.Module, *, is_saved: bool) -> None:
        """Write what is not there yet: all rows, if they are saved nowhere else."""
        if self._ssd is None:
            return
        embeddings = embeddings_of(model)
        if is_saved:
            with self._told_if_not_written():
                embeddings.group.note_hottest()
            return
        try:
            with self._progress.status("Writing rows to the SSD ..."):
                embeddings.flush()
        except StorageError as error:
            text = f"rows of this run are missing in --ssd {self._ssd}: {error}"
            notice(self._progress, text)

    @contextlib.contextmanager
    def _told_if_not_written(self) -> Iterator[None]:
        """A disk too full for a note costs nothing else."""
        try:
            yield
        except OSError as error:
            text = f"what the rows in --ssd {self._ssd} are was not noted: {error}"
            notice(self._progress, text)
