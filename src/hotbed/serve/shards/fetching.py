"""Rows that are asked of shards, of whichever of their replicas answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import aiohttp
import numpy as np
from numpy.typing import NDArray

from hotbed.errors import HotbedError, InputError
from hotbed.serve.shards.addresses import UNIX, Addresses
from hotbed.serve.shards.messages import Wanted, read_rows, wanted_message

__all__ = ["Fetcher", "ShardError"]

REFRESH = 0.5
"""Seconds between two looks at the file of addresses."""
ANSWER = 1.0
"""Seconds in which a replica answers, or another one is asked."""
REST = 1.0
"""Seconds in which one that has not answered is asked after the others."""
AGAIN = 0.05
"""Seconds after which all are asked again when none has answered."""


_NO_ANSWER = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)


class ShardError(HotbedError):
    """No replica of a shard answers, or it does not have what is asked for."""


class Fetcher:
    """Asks shards for rows. It belongs to one event loop.

    Args:
        seconds: in which rows must be there.
        token: that shards ask for; None: none.
    """

    def __init__(self, addresses: Addresses, seconds: float, token: str | None = None) -> None:
        self._addresses, self._seconds = addresses, seconds
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        """By path of a socket; "" for addresses of the network."""
        self._replicas = addresses.replicas()
        self._looked = time.monotonic()
        self._resting: dict[str, float] = {}
        """Until when, of those that have not answered."""
        self._turn = 0
        self._told = ""

    @property
    def shards(self) -> int:
        """Return how many there are."""
        return len(self._replicas)

    async def close(self) -> None:
        """End connections."""
        for session in self._sessions.values():
            await session.close()

    async def rows(
        self, wanted: list[Wanted], dims: Mapping[str, int]
    ) -> list[dict[str, NDArray[np.float32]]]:
        """Return (n, dim) rows by table, of what is wanted of each shard.

        Raises:
            ShardError: no replica of a shard answers in time with rows of the version.
        """
        await self._look()
        asked = [self._of(shard, each, dims) for shard, each in enumerate(wanted)]
        return await asyncio.gather(*asked)

    async def _look(self) -> None:
        if time.monotonic() - self._looked > REFRESH:
            self._looked = time.monotonic()
            try:
                replicas = await asyncio.to_thread(self._addresses.replicas)
            except (InputError, OSError) as error:  # it may be half written
                self._warn(f"{error} The addresses before are used.")
                return
            if len(replicas) != self.shards:  # whoever asks has cut for others
                self._warn(
                    f"The file of addresses names {len(replicas)} shards, and not {self.shards}. Begin the "
                    "server again to use them."
                )
                return
            self._replicas, self._told = replicas, ""
            there = {address for each in replicas for address in each}
            self._resting = {each: at for each, at in self._resting.items() if each in there}

    def _warn(self, text: str) -> None:
        """Write a line to the log, once while it stays the same."""
        if text != self._told:
            self._told = text
            logging.getLogger("uvicorn.error").warning(text)

    async def _of(
        self, shard: int, wanted: Wanted, dims: Mapping[str, int]
    ) -> dict[str, NDArray[np.float32]]:
        if not any(map(len, wanted.ids.values())):
            return {name: np.empty((0, dims[name]), np.float32) for name in wanted.ids}
        message, end = wanted_message(wanted), time.monotonic() + self._seconds
        told = "it has no address"
        while time.monotonic() < end:
            for address in self._in_turn(shard):
                try:
                    answer = await self._ask(address, message)
                    return read_rows(answer, wanted, dims)
                except (*_NO_ANSWER, ShardError) as error:
                    told = f"{address}: {error or type(error).__name__}"
                    self._resting[address] = time.monotonic() + REST
            await asyncio.sleep(AGAIN)
            await self._look()
        raise ShardError(f"Shard {shard} of {self.shards} does not answer: {told}.")

    def _in_turn(self, shard: int) -> list[str]:
        """Return the replicas of a shard in the order in which they are asked."""
        there = self._replicas[shard]
        self._turn += 1
        first = self._turn % max(1, len(there))
        now = time.monotonic()
        rotated = there[first:] + there[:first]
        return sorted(rotated, key=lambda address: self._resting.get(address, 0.0) > now)

    async def _ask(self, address: str, message: bytes) -> bytes:
        session, url = self._session(address)
        async with session.post(url, data=message) as response:
            if response.status == 404:
                raise ShardError(f"{address}: {(await response.text())[:200]}")
            response.raise_for_status()
            return await response.read()

    def _session(self, address: str) -> tuple[aiohttp.ClientSession, str]:
        """Return a session with an address, and the URL of rows there."""
        path = address.removeprefix(UNIX) if address.startswith(UNIX) else ""
        if path not in self._sessions:
            self._sessions[path] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path) if path else aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=ANSWER),
            )
        return self._sessions[path], f"http://{'shard' if path else address}/rows"
