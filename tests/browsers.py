"""A browser without a window, that tests drive by the DevTools protocol."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["BROWSER", "Browser", "browser"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
"""Path of the browser; None: there is none."""
WAIT = 60.0
"""Seconds in which it answers, or a page is as it is to be."""


class Browser:
    """A browser with one page.

    Attributes:
        faults: what the page has written to the console as errors, and thrown.
        asked: URLs that it has fetched.
    """

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out, self._rest, self._number = into, out, b"", 0
        self._session: str | None = None
        self.faults: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> Any:
        """Return what a method of the protocol answers."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                return found["result"]
            self._note(found)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + WAIT
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._out], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"The browser has not answered in {WAIT:g} s."
            piece = os.read(self._out, 1 << 16)
            assert piece, "The browser has ended."
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(about["exceptionDetails"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.faults.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which is JSON; of a promise what it resolves to."""
        told = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def soon(self, expression: str) -> Any:
        """Return the value of an expression when it is true."""
        end = time.monotonic() + WAIT
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"{expression} is not true. {self.faults}"
            time.sleep(0.02)
        return found


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """For a ``with`` statement: a browser that keeps its files in a folder."""
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    theirs, into = os.pipe()
    out, ours = os.pipe()
    # It reads from file 3 and writes to file 4.
    command = f'exec "$@" 3<&{theirs} 4>&{ours}'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", BROWSER, *options, f"--user-data-dir={folder}"],
        pass_fds=(theirs, ours),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    os.close(ours)
    try:
        yield Browser(into, out)
    finally:
        process.terminate()
        try:
            process.wait(WAIT)
        finally:
            process.kill()
            os.close(into)
            os.close(out)
