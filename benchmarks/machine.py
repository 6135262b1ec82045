"""What a figure depends on besides the code: hardware, versions, and other work on the machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("hotbed", "torch", "numpy", "triton", "fbgemm-gpu-cpu", "torchrec", "rocksdict", "lmdb")
ROOT = Path(__file__).resolve().parents[1]


def copy_bandwidth(threads: int, nbytes: int = 512 << 20, repeats: int = 7) -> float:
    """Bytes read plus bytes written a second while torch copies `nbytes`: the roofline."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    source = torch.ones(nbytes // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return 2 * source.nbytes / statistics.median(seconds)


def hardware() -> dict[str, Any]:
    """The machine, with its copy bandwidth by number of threads: one, and all."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = torch.get_num_threads()
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gb": round(memory / 1e9, 1),
        "huge_pages": _huge_pages(),
        "copy_gb_per_s": {str(n): round(copy_bandwidth(n) / 1e9, 1) for n in sorted({1, threads})},
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__  # with the build: +cpu, +cu128
    return found


def commit() -> str:
    """The commit of the checkout, with ``+`` where files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


_KERNEL_THREAD = 0x00200000
"""Flag in /proc/PID/stat."""


class OtherWork:
    """Measures the share of the machine that other processes took while a block ran.

    What the kernel does by itself (interrupts, its own threads) counts as of nobody: with tiers over an SSD
    and links it is the run's own reads and messages.

    A second OpenMP thread that waits for a core stalls every parallel region, so a benchmark on
    two cores is worth little when this share is more than a few percent.
    """

    def __init__(self, beside: int | None = None) -> None:
        """`beside`: a process that does part of the work, with those that it has begun."""
        self._beside = beside

    share = 0.0
    seconds = (0.0, 0.0, 0.0)
    """The machine's cores busy with processes, the machine's cores in all, this process."""

    def __enter__(self) -> OtherWork:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        ended = self._now()
        self.seconds = busy, total, own = (
            ended[0] - self._start[0],
            ended[1] - self._start[1],
            ended[2] - self._start[2],
        )
        self.share = max(0.0, busy - own) / total if total > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Seconds: the machine's cores busy with processes, the machine's cores in all, this process."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        total = sum(fields) / tick
        of_nobody = (sum(fields[3:7]) + _of_kernel_threads()) / tick  # idle, and interrupts
        own = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            own += usage.ru_utime + usage.ru_stime
        for process in [] if self._beside is None else family_of(self._beside):
            own += _ticks_of(Path(f"/proc/{process}/stat")) / tick
        return total - of_nobody, total, own


def family_of(process: int) -> list[int]:
    """Return a process and those that it has begun."""
    found = [process]
    for pid in found:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def _of_kernel_threads() -> int:
    """Ticks that the kernel's own threads have run."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            ticks += _ticks_of(stat) if int(_fields_of(stat)[6]) & _KERNEL_THREAD else 0
    return ticks


def _fields_of(stat: Path) -> list[str]:
    """Return what /proc says of a process, behind its name."""
    return stat.read_text().rsplit(")", 1)[1].split()


def _ticks_of(stat: Path) -> int:
    """Return for how many ticks a process has run."""
    fields = _fields_of(stat)
    return int(fields[11]) + int(fields[12])


def available_bytes() -> int:
    """Memory that new work can have, by the kernel's own estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not tell MemAvailable")


def free_bytes(device: torch.device) -> int:
    """Memory that new work can have there: of a CUDA device its own, else the machine's."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    text = path.read_text() if path.exists() else ""
    return text.split("[", 1)[1].split("]", 1)[0] if "[" in text else "unknown"
