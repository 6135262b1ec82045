"""Report of a run: its figures as JSON, and the measurements they need."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

import numpy as np
import torch

from hotbed.errors import HotbedError
from hotbed.files import appearing, is_special, new_beside


class OutputError(HotbedError, OSError):
    """A result cannot be written; known before the work that leads to it."""


def peak_rss_bytes() -> int:
    """The most memory this process ever had resident."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                # Unlike getrusage's figure this one starts anew with the program.
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions() -> dict[str, str]:
    """Versions of everything that may change a figure."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        hotbed = version("hotbed")
    except PackageNotFoundError:  # run from a source tree
        hotbed = "source"
    return {
        "hotbed": hotbed,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def hardware(device: str = "cpu") -> dict[str, object]:
    """Processor, cores, bytes of memory, and the name of the device that computes."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    found: dict[str, object] = {
        "processor": name,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "device": device,
    }
    if device != "cpu":
        found["device"] = f"{device}: {torch.cuda.get_device_name(device)}"
    return found


def check_writable_file(path: str) -> None:
    """Raise OutputError if a file cannot be created at `path`."""
    if not path:
        raise OutputError("Cannot write '': the path is empty. Name a file.")
    if "\0" in path:
        raise OutputError(f"Cannot write {path!r}: no path can have a zero byte.")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise OutputError(f"Cannot write {path!r}: the folder {folder!r} does not exist.")
    if os.path.isdir(path):
        raise OutputError(f"Cannot write {path!r}: it is a folder.")
    if is_special(path):
        return
    try:
        os.unlink(new_beside(path))
    except OSError as error:
        raise OutputError(f"Cannot write {path!r}: {error.strerror}.") from None


@contextmanager
def complete_file(path: str) -> Iterator[TextIO]:
    """A UTF-8 text file that appears at `path` when it is complete, or not at all.

    A device or a pipe is written to as it is: it must not be replaced by a file.

    Raises:
        OutputError: it cannot be written.
    """
    part = path
    try:
        with appearing(path) as part, open(part, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.filename not in (None, path, part):
            raise
        raise OutputError(f"Cannot write {path!r}: {error.strerror}.") from None


def write_json(path: str, report: Mapping[str, object]) -> None:
    """Write `report`, figures that are not finite as null; the file appears when complete."""
    with complete_file(path) as file:
        json.dump(_finite(report), file, indent=2, allow_nan=False)
        file.write("\n")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
