"""The folder of a `Storage` on SSD: who uses it, and what in it is Hotbed's.

Hotbed's are the file ``in-use``, the note of the most used ids, and folders ``rows-<n>`` that hold the
manifest of a row log. Everything else is the user's, also in these folders, and stays.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as torch_dist

from hotbed import _core
from hotbed.errors import StorageError
from hotbed.places.tiered import hottest

__all__ = ["is_own", "logs_in", "lock", "of_process"]

_Folder = str | os.PathLike[str]

_LOCK = "in-use"
_LOG = re.compile(r"rows-\d+")


def is_own(name: str) -> bool:
    """Whether a file or folder of that name may be Hotbed's."""
    return name in (_LOCK, hottest.NAME) or _LOG.fullmatch(name) is not None


def logs_in(folder: Path) -> list[Path]:
    """Folders of row logs, the oldest first."""
    named = [p for p in folder.glob("rows-*") if _LOG.fullmatch(p.name)]
    return sorted(
        (p for p in named if not p.is_symlink() and _core.holds_log(str(p))),
        key=lambda p: int(p.name.removeprefix("rows-")),
    )


def of_process(ssd: _Folder | Sequence[_Folder]) -> Path:
    """The folder of this process at one or several ``Storage.ssd``."""
    paths = [ssd] if isinstance(ssd, (str, os.PathLike)) else list(ssd)
    if not torch_dist.is_available() or not torch_dist.is_initialized():
        return Path(paths[0])
    if torch_dist.get_world_size() == 1:
        return Path(paths[0])
    rank = torch_dist.get_rank()
    local = int(os.environ.get("LOCAL_RANK", rank))
    return Path(paths[local % len(paths)]) / f"rank-{rank}"


def lock(folder: Path, reset: bool) -> _core.FolderLock:
    """Locks a folder for the rows of one collection, for as long as the lock lives in this process.

    Raises:
        StorageError: another collection uses it, or it holds rows and `reset` does not say that they
            may go, or it cannot be made.
    """
    named = f"Storage(ssd={str(folder)!r})"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{named} cannot be used: {error}.") from None
    lock = _core.FolderLock(
        str(folder), _LOCK, False, named, "Give each collection a folder of its own."
    )
    try:
        _empty(folder, named, reset)
    except BaseException:
        del lock  # the traceback, which may be kept, shall not keep the folder
        raise
    return lock


def _empty(folder: Path, named: str, reset: bool) -> None:
    logs = logs_in(folder)
    if logs and not reset:
        raise StorageError(
            f"{named} holds rows of an earlier run ({logs[0].name}). They come from different steps, "
            "so training cannot go on from them: look at them with 'hotbed inspect', and pass "
            "reset=True to delete them."
        )
    for log in logs:
        if left := _core.discard_log(str(log)):
            warnings.warn(
                f"{named}: {log.name} stays, as it holds what is not Hotbed's: {', '.join(left)}.",
                stacklevel=3,
            )
    hottest.forget(folder)
