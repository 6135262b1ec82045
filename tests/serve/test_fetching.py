"""Shards that are asked for rows: replicas that have none, and files of addresses that are being written."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hotbed.serve.shards import fetching
from hotbed.serve.shards.addresses import Addresses
from hotbed.serve.shards.fetching import Fetcher, ShardError
from hotbed.serve.shards.messages import Wanted, rows_message

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
WANTED = Wanted("1-a", {"t": np.array([4, 9])})


class Replica:
    """Answers every request alike."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body, self.asked = status, body, 0

    async def begin(self) -> str:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def end(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        head = f"HTTP/1.1 {self.status} x\r\nContent-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + self.body)
        await writer.drain()
        writer.close()


def good() -> Replica:
    return Replica(200, rows_message([ROWS]))


async def rows_of(fetcher: Fetcher) -> np.ndarray:
    (found,) = await fetcher.rows([WANTED], {"t": 3})
    return found["t"]


@pytest.mark.parametrize(
    "other", [Replica(404, b"no such version"), Replica(500, b""), Replica(200, b"abc")]
)
def test_another_replica_is_asked(tmp_path: Path, other: Replica) -> None:
    """One may have a version that another has not yet."""

    async def run() -> None:
        fine = good()
        file = tmp_path / "shards.json"
        names = [await other.begin(), await fine.begin(), "127.0.0.1:1"]
        file.write_text(json.dumps({"shards": [names]}))
        fetcher = Fetcher(Addresses(str(file)), 5)
        for _ in range(6):
            np.testing.assert_array_equal(await rows_of(fetcher), ROWS)
        assert fine.asked == 6 and other.asked <= 1  # it rests then
        await fetcher.close()
        await asyncio.gather(fine.end(), other.end())

    asyncio.run(run())


def test_no_replica_has_the_version(tmp_path: Path) -> None:
    async def run() -> None:
        file = tmp_path / "shards.json"
        none = Replica(404, b"no version 1-a")
        file.write_text(json.dumps({"shards": [[await none.begin()]]}))
        fetcher = Fetcher(Addresses(str(file)), 0.3)
        with pytest.raises(ShardError, match="Shard 0 of 1 does not answer: .*no version 1-a"):
            await rows_of(fetcher)
        await fetcher.close()
        await none.end()

    asyncio.run(run())


@pytest.mark.parametrize("spoil", [lambda f: f.write_text('{"shar'), lambda f: f.unlink()])
def test_a_file_that_cannot_be_read_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], object],
) -> None:
    """It may be half written."""
    monkeypatch.setattr(fetching, "REFRESH", 0.0)

    async def run() -> None:
        first, second = good(), good()
        file = tmp_path / "shards.json"
        names = [[await first.begin()]], [[await second.begin()]]
        file.write_text(json.dumps({"shards": names[0]}))
        fetcher = Fetcher(Addresses(str(file)), 5)
        spoil(file)
        with caplog.at_level(logging.WARNING, "uvicorn.error"):
            for _ in range(3):
                np.testing.assert_array_equal(await rows_of(fetcher), ROWS)
            assert len(caplog.records) == 1 and "before are used" in caplog.text
            file.write_text(json.dumps({"shards": [*names[0], *names[1]]}))
            np.testing.assert_array_equal(await rows_of(fetcher), ROWS)
            assert "names 2 shards, and not 1" in caplog.text
        assert second.asked == 0
        file.write_text(json.dumps({"shards": names[1]}))
        np.testing.assert_array_equal(await rows_of(fetcher), ROWS)
        assert second.asked == 1
        await fetcher.close()
        await asyncio.gather(first.end(), second.end())

    asyncio.run(run())
