"""How many threads a command uses, and how they wait for each other."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

SPINS = "1000"
"""Looks at the work of the others before a thread sleeps, each of some nanoseconds.

libgomp's own 300,000 take milliseconds of a core. On a busy machine it is that core which the others
would need (`python -m benchmarks busy`)."""


def allocate(environment: MutableMapping[str, str], root: Path = Path("/")) -> None:
    """Sets what OpenMP reads when it is loaded, where the user has not."""
    environment.setdefault("OMP_NUM_THREADS", str(usable_cores(root)))
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on, and no more than its CPU quotas pay for."""
    usable = os.sched_getaffinity(0)
    # Hardware threads of one core count once, as torch counts them.
    cores = len({_core_of(root, number) for number in usable})
    return max(1, min([cores, *(math.ceil(quota) for quota in cpu_quotas(root))]))


def _core_of(root: Path, number: int) -> str:
    siblings = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
    return _text(siblings) or str(number)


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """Cores that the groups of this process may use, each with the groups that it lies in.

    Both versions of control groups, which a machine may have side by side, and as far as they are
    visible from a container.
    """
    groups: dict[str, str] = {}  # controllers of a hierarchy → the path of the group in it
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups[controllers] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        top, folder = (_unescaped(field) for field in mount.split()[3:5])
        kind, *_, options = system.split()
        for controllers, path in groups.items():
            if kind == "cgroup2" and not controllers:
                files = ["cpu.max"]
            elif (
                kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(",")
            ):
                files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            else:
                continue
            yield from _quotas(root / folder.lstrip("/"), os.path.relpath(path, top), files)


def _quotas(mount: Path, group: str, files: list[str]) -> Iterator[float]:
    """Of a group below a mount point, and of all that it lies in."""
    parts = Path(group).parts
    if ".." in parts:  # the mount point shows another part of the tree: in a container, its own
        parts = ()
    for depth in range(len(parts) + 1):
        folder = mount.joinpath(*parts[:depth])
        numbers = " ".join(_text(folder / file) for file in files).split()
        if len(numbers) == 2 and all(map(str.isdecimal, numbers)) and int(numbers[1]):
            yield int(numbers[0]) / int(numbers[1])


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
