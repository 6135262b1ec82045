"""Servers and their clients as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import ROOT
from benchmarks.serving_client import Asked, Told

__all__ = ["Served", "ask", "free_port", "hotbed_serves", "running"]


class Served(NamedTuple):
    """A server that runs."""

    port: int
    process: int


@contextlib.contextmanager
def hotbed_serves(bundle: Path, *options: object) -> Iterator[Served]:
    """For a ``with`` statement: `hotbed serve` in a process."""
    port = free_port()
    command = [sys.executable, "-m", "hotbed", "serve", str(bundle)]
    command += ["--bind", f"127.0.0.1:{port}", *map(str, options)]
    with running(command, {}, port, "/readyz") as process:
        yield Served(port, process)


def ask(asked: Asked) -> Told:
    """Return how requests went."""
    command = [sys.executable, "-m", "benchmarks.serving_client", json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told: Told = json.loads(done.stdout)
    return told


@contextlib.contextmanager
def running(command: list[str], more: Mapping[str, str], port: int, ready: str) -> Iterator[int]:
    """For a ``with`` statement: a server in a process, whose number it gives."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **more})
    try:
        end = time.monotonic() + 120
        while not _answers(f"http://127.0.0.1:{port}{ready}"):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[2]} does not serve.")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """Return one that nothing listens to."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
