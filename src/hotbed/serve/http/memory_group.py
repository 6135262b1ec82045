"""A limit on the memory of a server and its workers, pages of mapped files included: a control group."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["held_to"]

ROOT = Path("/sys/fs/cgroup")


class _Kind(NamedTuple):
    """Control groups of a version."""

    line: str
    """What begins the line of /proc/self/cgroup that has the group's path."""
    root: Path
    sign: str
    """A file of its root, which other file systems have not there."""
    limit: str
    more: tuple[tuple[str, str], ...] = ()


KINDS = (
    _Kind("0::", ROOT, "cgroup.controllers", "memory.max", (("memory.swap.max", "0"),)),
    _Kind("memory:", ROOT / "memory", "memory.limit_in_bytes", "memory.limit_in_bytes"),
)


@contextlib.contextmanager
def held_to(nbytes: int) -> Iterator[bool]:
    """For a ``with`` statement: this process, and those that it begins, have at most so much memory together.
    Gives False where no control group can be made, as one who is not root or has none delegated; then there
    is no limit."""
    for kind in KINDS:
        parent = _own(kind)
        if parent is None:
            continue
        group = parent / f"hotbed-{os.getpid()}"
        try:
            _make(group, kind, nbytes)
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield True
        finally:
            _leave(group, parent)
        return
    yield False


def _own(kind: _Kind) -> Path | None:
    """Return the group of this process; None where there are none of this kind."""
    if not (kind.root / kind.sign).is_file():
        return None
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if kind.line in (line[: len(kind.line)], line.partition(":")[2][: len(kind.line)]):
                path = kind.root / line.rpartition(":")[2].lstrip("/")
                return path if path.is_dir() else kind.root
    return None


def _make(group: Path, kind: _Kind, nbytes: int) -> None:
    group.mkdir()
    if not (group / kind.limit).exists():  # version 2: the parent has not handed memory on
        (group.parent / "cgroup.subtree_control").write_text("+memory")
    (group / kind.limit).write_text(str(nbytes))
    for file, value in kind.more:
        with contextlib.suppress(OSError):
            (group / file).write_text(value)
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _leave(group: Path, parent: Path) -> None:
    """Go back, and remove the group when its last process has ended."""
    with contextlib.suppress(OSError):
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                return
            time.sleep(0.05)
