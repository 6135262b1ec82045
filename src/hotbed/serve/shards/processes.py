"""Shards and their replicas as processes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator

import uvicorn

from hotbed.errors import HotbedError
from hotbed.serve.http.children import kept_running
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.shards.addresses import UNIX
from hotbed.serve.shards.app import from_environment

__all__ = ["shards_here"]

FACTORY = f"{from_environment.__module__}:{from_environment.__qualname__}"
BEGIN = 120.0
"""Seconds in which shards begin."""


@contextlib.contextmanager
def shards_here(settings: ServeSettings) -> Iterator[str]:
    """For a ``with`` statement: processes that have the rows of a bundle. Returns the path of the file of
    their addresses.

    Raises:
        HotbedError: they do not begin.
    """
    of_shards = dataclasses.replace(settings, shards=0, follow=None, rows_only=True)
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="hotbed-shards-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        sockets = [
            [os.path.join(folder, f"{shard}.{replica}") for replica in range(settings.replicas)]
            for shard in range(settings.shards)
        ]
        for path in itertools.chain.from_iterable(sockets):
            stack.enter_context(kept_running(_serve, of_shards, path))
        end = time.monotonic() + BEGIN
        while not all(map(_lives, itertools.chain.from_iterable(sockets))):
            if time.monotonic() > end:
                raise HotbedError(f"The shards have not begun in {BEGIN:g} s.")
            time.sleep(0.05)
        where = os.path.join(folder, "shards.json")
        with open(where, "w", encoding="utf-8") as file:
            json.dump({"shards": [[UNIX + path for path in each] for each in sockets]}, file)
        yield where


def _serve(settings: ServeSettings, path: str) -> None:
    """Answer with rows, at a socket of this machine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of one that has died
    with settings.in_environment():
        uvicorn.run(
            FACTORY,
            factory=True,
            uds=path,
            ws="none",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=75,
        )


def _lives(path: str) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(path)
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            return connection.recv(12).endswith(b"200")
        except OSError:
            return False
