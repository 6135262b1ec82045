"""The port of a server's gRPC, which the process that begins workers holds, and each of them listens at."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import threading
from collections.abc import Callable, Iterator

from hotbed.errors import InputError

__all__ = ["announced", "held"]

NEEDED = {"grpc": "grpcio", "google.protobuf": "protobuf"}
"""Packages by module."""
LOOK = 0.1
"""Seconds between two looks for a worker that listens."""


@contextlib.contextmanager
def held(host: str, port: int) -> Iterator[str]:
    """For a ``with`` statement: ``ADDRESS:PORT`` where workers may listen, and no other server.

    Args:
        port: 0: one that is free.

    Raises:
        OSError: another server listens there.
        InputError: gRPC is not installed.
    """
    _check_installed()
    # gRPC writes a line for much that clients do wrong; what is wrong here is raised.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserved.bind((host, port))
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"--grpc {host}:{port}") from None
        # Only now, or a port at which others share their connections would not be told from a free one.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # or others may take it
        at = reserved.getsockname()
        yield f"[{at[0]}]:{at[1]}" if family == socket.AF_INET6 else f"{at[0]}:{at[1]}"


@contextlib.contextmanager
def announced(at: str, listens: Callable[[], None]) -> Iterator[None]:
    """For a ``with`` statement: `listens` is called, in another thread, once a worker takes connections.

    Until then they are refused: there is no queue as of HTTP, whose socket the first process has.

    Args:
        at: an address of `held`.
    """
    ended = threading.Event()
    args = (at, listens, ended)
    thread = threading.Thread(target=_announce, args=args, name="hotbed-announces", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _announce(at: str, listens: Callable[[], None], ended: threading.Event) -> None:
    host, _, port = at.rpartition(":")
    while not ended.wait(LOOK):
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK).close()
        except OSError:
            continue
        listens()
        return


def _check_installed() -> None:
    for module, package in NEEDED.items():
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # of what it is in
            is_there = False
        if not is_there:
            raise InputError(f"--grpc needs {package}: pip install 'hotbed[grpc]'")
