"""Leases on the folders of checkpoints in object storage, which has no locks.

A lease is a small object beside the files: `reading-HEX`, `writing-HEX` or `removing-HEX`, JSON with the time
at which it runs out. Its owner renews it while it works, and removes it behind that; that of a process which
died runs out.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import secrets
import threading
import time

from hotbed.checkpoint.stores.objects import Objects

__all__ = ["LEASE", "READING", "REMOVING", "WRITING", "Lease", "has_run_out", "is_of", "now"]

READING, WRITING, REMOVING = "reading", "writing", "removing"
LEASE = re.compile(r"(reading|writing|removing)-[0-9a-f]{32}")
"""Names of leases."""
_SECONDS = 600.0
"""From one renewal until a lease runs out."""
_RENEWED = 120.0
"""Seconds between two renewals."""
_CLOCKS = 300.0
"""Seconds by which the clocks of two machines may differ: others take a lease for run out so much later."""


def now() -> float:
    """Return the seconds since 1970."""
    return time.time()


def is_of(kind: str, name: str) -> bool:
    """Return True for the name of a lease of a kind."""
    return LEASE.fullmatch(name) is not None and name.startswith(kind)


def has_run_out(objects: Objects, folder: str, name: str) -> bool:
    """Return True if the owner of a lease is certainly dead.

    Raises:
        FileNotFoundError: its owner has removed it.
        OSError: it cannot be read.
    """
    said = objects.contents(f"{folder}/{name}")
    with contextlib.suppress(KeyError, TypeError, ValueError):
        expires = datetime.datetime.fromisoformat(json.loads(said)["expires"])
        return now() > expires.timestamp() + _CLOCKS
    return False  # it is being written just now


class Lease:
    """A lease of this process.

    Attributes:
        name: of its object.
        expires: when it runs out, in seconds since 1970.
    """

    def __init__(self, objects: Objects, folder: str, kind: str) -> None:
        self.name = f"{kind}-{secrets.token_hex(16)}"
        self.expires = 0.0
        self._objects, self._path = objects, f"{folder}/{self.name}"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Write it, and renew it from now on.

        Raises:
            OSError: it cannot be written.
        """
        self._write()
        self._thread = threading.Thread(target=self._renew, name="hotbed-lease", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # an ending process begins no threads
            self._thread = None

    def _write(self) -> None:
        expires = now() + _SECONDS
        when = datetime.datetime.fromtimestamp(expires, datetime.timezone.utc)
        self._objects.put(self._path, json.dumps({"expires": when.isoformat()}).encode())
        self.expires = expires

    def _renew(self) -> None:
        # One that has run out, as this process was suspended, may have been another's chance.
        while not self._ended.wait(_RENEWED) and not self.is_lost:
            with contextlib.suppress(OSError):  # it is tried again
                self._write()

    @property
    def is_lost(self) -> bool:
        """Return True if others may have taken its owner for dead."""
        return now() > self.expires

    def release(self) -> None:
        """Remove it; called again, it does nothing. One that cannot be removed runs out."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            self._objects.remove(self._path)
