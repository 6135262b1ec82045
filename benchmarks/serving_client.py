"""Clients of a server of models, in a process of their own: python -m benchmarks.serving_client '{...}'"""

from __future__ import annotations

import asyncio
import json
import resource
import selectors
import sys
import time
from pathlib import Path
from typing import TypedDict

__all__ = ["Asked", "Told"]


class Asked(TypedDict):
    """What is to be asked."""

    port: int
    path: str
    bodies: list[str]
    """Files, each of a request."""
    connections: int
    rate: float
    """Requests a second, sent whether or not those before are answered; 0: each connection asks when it is
    answered."""
    seconds: float
    once: bool
    """Whether each request is sent once, whatever that takes."""


class Told(TypedDict):
    """How it went."""

    ms: list[float]
    """From when a request was to be sent until its answer had come."""
    statuses: dict[str, int]
    seconds: float
    client_seconds: float
    """Of a core, that the clients took."""


class _Connection:
    async def opened(self, port: int) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)

    async def ask(self, request: bytes) -> str:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next(line for line in lines if line.startswith("content-length:"))
        await self._reader.readexactly(int(length.partition(":")[2]))
        return lines[0].split()[1]


async def _run(asked: Asked) -> Told:
    requests = [_request(asked["path"], Path(name).read_bytes()) for name in asked["bodies"]]
    free: asyncio.Queue[_Connection] = asyncio.Queue()
    for _ in range(asked["connections"]):
        connection = _Connection()
        await connection.opened(asked["port"])
        free.put_nowait(connection)
    ms: list[float] = []
    statuses: dict[str, int] = {}

    async def one(number: int, due: float) -> None:
        connection = await free.get()
        status = await connection.ask(requests[number % len(requests)])
        ms.append((time.perf_counter() - due) * 1e3)
        statuses[status] = statuses.get(status, 0) + 1
        free.put_nowait(connection)

    async def in_turn(first: int) -> None:
        number = first
        while number < len(requests) if asked["once"] else time.perf_counter() < end:
            await one(number, time.perf_counter())
            number += asked["connections"]

    begun, before = time.perf_counter(), _cpu()
    end = begun + asked["seconds"]
    if asked["rate"]:
        tasks = []
        for number in range(round(asked["rate"] * asked["seconds"])):
            due = begun + number / asked["rate"]
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(number, due)))
        await asyncio.gather(*tasks)
    else:
        await asyncio.gather(*(in_turn(first) for first in range(asked["connections"])))
    took = time.perf_counter() - begun
    return {
        "ms": ms,
        "statuses": statuses,
        "seconds": took,
        "client_seconds": _cpu() - before,
    }


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    # Others wait in whole milliseconds, which is as long as an answer may take.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    json.dump(loop.run_until_complete(_run(json.loads(sys.argv[1]))), sys.stdout)
