"""Errors about checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from hotbed.errors import HotbedError

__all__ = ["CheckpointError", "DamagedError", "others_loaded_by"]


class CheckpointError(HotbedError, ValueError):
    """A checkpoint cannot be loaded or saved; the message names the file, table or value."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, damaged, or cannot be read.

    ``others`` are the checkpoints beside it that are whole as far as the sizes of their files tell, the
    latest first; ``fault`` is the message without them.
    """

    others: Sequence[str] | None = None
    fault = ""

    def name_others(self, others: Sequence[str], line: str = "hotbed.load({path!r}, ...)") -> None:
        """Add to the message which other checkpoints there are.

        Args:
            line: how one is loaded, by its ``{path}`` or ``{name}``.
        """
        self.fault = self.fault or str(self)
        self.others = others
        if not others:
            self.args = (f"{self.fault} No other checkpoint beside it is whole.",)
            return
        names = ", ".join(os.path.basename(path) for path in others[:_MOST_NAMED])
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        how = line.format(path=others[0], name=os.path.basename(others[0]))
        self.args = (
            f"{self.fault} Whole checkpoints beside it, by their sizes: {names}{more}. Load one by {how}. "
            f"To read them in full: hotbed checkpoint verify --all {os.path.dirname(others[0])}",
        )


_MOST_NAMED = 3


@contextlib.contextmanager
def others_loaded_by(line: str) -> Iterator[None]:
    """For a ``with`` statement: errors about damaged checkpoints say so how to load others; see
    `DamagedError.name_others`."""
    try:
        yield
    except DamagedError as error:
        if error.others is not None:
            error.name_others(error.others, line)
        raise
