"""A limit on the memory of a process, page cache included, by a control group (version 2 or 1)."""

from __future__ import annotations

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class MemoryLimit:
    """A control group that a process can enter. What the process held before does not count.

    `kind` is "" where no group can be made (not root, or none of the file systems is there).
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self.kind, self.folder = "", None
        for kind, parent, files in (
            ("cgroup v2", ROOT, {"memory.max": nbytes, "memory.swap.max": 0}),
            ("cgroup v1", ROOT / "memory", {"memory.limit_in_bytes": nbytes}),
        ):
            folder = parent / f"hotbed-{name}-{os.getpid()}"
            try:
                if kind == "cgroup v2":
                    if "memory" not in (parent / "cgroup.controllers").read_text().split():
                        continue
                    (parent / "cgroup.subtree_control").write_text("+memory")
                folder.mkdir()
            except OSError:
                continue
            self.folder = folder
            try:
                for file, value in files.items():
                    if (folder / file).exists():
                        (folder / file).write_text(str(value))
            except OSError:
                self.remove()
                continue
            self.kind = kind
            return

    def enter(self, process: int) -> None:
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(process))

    def remove(self) -> None:
        """After its processes have ended."""
        if self.folder is None:
            return
        for _ in range(100):
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.05)
