"""Servers in processes of their own, and requests of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import Any

WAIT = 60.0
"""Seconds in which a server begins or ends, or a worker is there again."""


class Running:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[str], port: int, lines: list[str]) -> None:
        self.process, self.port, self.lines = process, port, lines

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path)

    def post(self, path: str, body: object) -> tuple[int, Any]:
        return self.ask("POST", path, json.dumps(body).encode())

    def ask(
        self, how: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return the status and the JSON, or the text, of an answer."""
        return self.told(how, path, body, headers)[:2]

    def told(
        self, how: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Message]:
        """Return what `ask` does, and the answer's headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        with contextlib.closing(connection):
            connection.request(how, path, body, dict(headers or {}))
            response = connection.getresponse()
            text = response.read().decode()
            try:
                return response.status, json.loads(text), response.headers
            except ValueError:
                return response.status, text, response.headers

    def workers(self) -> list[int]:
        """Return the processes that answer, by what the system says."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = " ".join((each / "children").read_text() for each in threads)
        return [int(pid) for pid in children.split() if _is_spawned(pid)]

    def ended(self) -> int:
        """Ask the server to end. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT)


def _is_spawned(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@contextlib.contextmanager
def served(bundle: Path, *options: object, temporary: Path | None = None) -> Iterator[Running]:
    """For a ``with`` statement: `hotbed serve` in a process, which ends."""
    command = [sys.executable, "-m", "hotbed", "serve", str(bundle), "--bind", "127.0.0.1:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    if temporary is not None:
        environment["TMPDIR"] = str(temporary)
    process = subprocess.Popen(
        [*command, *map(str, options)], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    lines: list[str] = []
    port = None
    rest = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"answers at https?://127\.0\.0\.1:(\d+)", line):
                port = int(found[1])
                break
        assert port is not None, "".join(lines)
        rest.start()
        yield Running(process, port, lines)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT)
        finally:
            process.kill()
            if rest.ident is not None:
                rest.join()
            process.stderr.close()


def soon(true: Any, seconds: float = WAIT) -> None:
    """Wait until `true()`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.05)
