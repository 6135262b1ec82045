"""A text file that grows by whole lines."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from hotbed.files import appearing

__all__ = ["LineFile", "whole_lines"]


def whole_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines that end in a newline, without it. A line that a killed process has begun is left
    out.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        return [line.rstrip("\r\n") for line in file if line.endswith("\n")]


class LineFile:
    """Lines of a file, each written whole or not at all.

    A disk that is full costs lines and no training: a warning says so once, and later lines are tried.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._has_warned = False

    def keep(self, header: str, keeps: Callable[[str], bool]) -> None:
        """Begin, or go on with a file that is there: its header and the lines that `keeps` wants stay.

        Raises:
            OSError: it cannot be read or written.
        """
        kept = [header]
        if os.path.exists(self.path):
            kept += [line for line in whole_lines(self.path)[1:] if keeps(line)]
        with appearing(self.path) as part, open(part, "w", encoding="utf-8", newline="") as file:
            file.writelines(f"{line}\n" for line in kept)

    def append(self, line: str) -> None:
        """Write a line."""
        try:
            with open(self.path, "ab", buffering=0) as file:
                end, data = file.tell(), f"{line}\n".encode()
                try:
                    if file.write(data) != len(data):
                        raise OSError(0, "the disk is full", self.path)
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"A line of {self.path} could not be written: {error.strerror}. Training goes on.",
                    stacklevel=2,
                )
