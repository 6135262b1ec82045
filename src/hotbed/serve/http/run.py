"""A server as processes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from uvicorn.supervisors import Multiprocess

from hotbed.errors import InputError
from hotbed.serve.grpc.port import announced, held
from hotbed.serve.http.app import from_environment
from hotbed.serve.http.connections import Impatient
from hotbed.serve.http.followed import following
from hotbed.serve.http.memory_group import held_to
from hotbed.serve.http.metrics import FIGURES
from hotbed.serve.http.server import Server
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.shards import app
from hotbed.serve.shards.processes import shards_here

__all__ = ["address_of", "serve"]

PROTOCOL = f"{Impatient.__module__}:{Impatient.__qualname__}"
FACTORY = f"{from_environment.__module__}:{from_environment.__qualname__}"
ROWS_FACTORY = f"{app.from_environment.__module__}:{app.from_environment.__qualname__}"
FIGURES_OF_ONE = 8 << 20
"""Bytes of files that a worker may need for its figures."""
BACKLOG = 2048
"""Connections that may wait to be taken."""


def address_of(bind: str) -> tuple[str, int]:
    """Return the address and the port of ``ADDRESS:PORT``.

    Raises:
        InputError: it is none.
    """
    host, _, port = bind.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InputError(f"{bind!r} is no ADDRESS:PORT. Pass one such as 127.0.0.1:8501.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def serve(
    settings: ServeSettings,
    host: str,
    port: int,
    began: Callable[[str], None] = lambda address: None,
    told: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve a bundle until a signal ends it: requests that are being answered end first.

    Args:
        port: 0: one that is free.
        began: is called with the address when connections are taken.
        told: is called with what whoever runs it should know.

    Raises:
        BundleError, OSError: the bundle cannot be read, or the address not bound.
        CheckpointError: `settings.follow` is no folder of checkpoints.
    """
    Server(settings)
    _raise_descriptors()
    limits = settings.limits
    with contextlib.ExitStack() as stack:
        _end_in_order(stack)
        if settings.memory is not None and not stack.enter_context(held_to(settings.memory)):
            told(
                "The memory is not held to --memory: this process may not make a control group. To hold it, "
                f"begin the server in one: systemd-run --scope -p MemoryMax={settings.memory} hotbed serve "
                "... Without, the system takes back pages of rows when it needs memory."
            )
        if settings.follow is not None:
            stack.enter_context(following(settings.bundle, settings.follow))
        if settings.shards:
            file = stack.enter_context(shards_here(settings))
            settings = dataclasses.replace(settings, shards=0, shards_file=file)
        if settings.grpc is not None:
            at = stack.enter_context(held(*address_of(settings.grpc)))
            settings = dataclasses.replace(settings, grpc=at)
            line = f"{settings.name} answers gRPC at {at}"
            stack.enter_context(announced(at, lambda: told(line)))
        if settings.workers > 1:
            stack.enter_context(_figures_of(settings.workers))
            # Of matrix products of top-k, which take all cores in each worker otherwise.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", str(settings.threads))
        stack.enter_context(settings.in_environment())
        listening = stack.enter_context(_listening(host, port))
        scheme = "http" if settings.certificate is None else "https"
        bound, at = listening.getsockname()[:2]
        began(f"{scheme}://{f'[{bound}]' if ':' in bound else bound}:{at}")
        config = uvicorn.Config(
            ROWS_FACTORY if settings.rows_only else FACTORY,
            factory=True,
            fd=listening.fileno(),
            workers=settings.workers,
            http=PROTOCOL,
            ws="none",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=round(2 * limits.seconds),
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.key,
        )
        if settings.workers > 1:
            _answer_by_several(config, listening)
        else:
            uvicorn.Server(config).run(sockets=[listening])


@contextlib.contextmanager
def _figures_of(workers: int) -> Iterator[None]:
    """For a ``with`` statement: workers that begin share what they count."""
    folder = tempfile.mkdtemp(prefix="hotbed-metrics-")
    try:
        if shutil.disk_usage(folder).free < workers * FIGURES_OF_ONE:
            # Files that are mapped end a process where there is no space for them.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        os.environ[FIGURES] = folder
        yield
    finally:
        os.environ.pop(FIGURES, None)
        shutil.rmtree(folder, ignore_errors=True)


def _answer_by_several(config: uvicorn.Config, listening: socket.socket) -> None:
    """Have processes answer until a signal ends them. uvicorn has taken `target` for it, and does no more."""
    supervisor: Callable[..., Multiprocess] = Multiprocess
    is_told = "target" in inspect.signature(Multiprocess).parameters
    more = {"target": uvicorn.Server(config).run} if is_told else {}
    supervisor(config, sockets=[listening], **more).run()


def _end_in_order(stack: contextlib.ExitStack) -> None:
    """Let signals that end the server end the process with 0, behind what `stack` has left to do."""
    if threading.current_thread() is not threading.main_thread():
        return
    for each in (signal.SIGTERM, signal.SIGINT):
        stack.callback(signal.signal, each, signal.signal(each, _exit))


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections, which workers inherit."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.create_server((host, port), family=family, backlog=BACKLOG)
    taken.set_inheritable(True)
    return taken


def _raise_descriptors() -> None:
    """Let this process have as many files and connections open as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
