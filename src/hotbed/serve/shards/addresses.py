"""Where shards answer: a file that says so, whose names DNS may resolve to several replicas."""

from __future__ import annotations

import json
import os
import socket

from hotbed.errors import InputError

__all__ = ["Addresses", "read_addresses"]

UNIX = "unix:"


class Addresses:
    """Addresses of replicas by shard, as a file has them now.

    ::

        {"shards": [["10.0.0.1:8511", "10.0.0.2:8511"], ["shard-1.example:8511"]]}

    A name stands for all addresses that it resolves to. A shard on this machine is ``unix:PATH``.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def replicas(self) -> list[list[str]]:
        """Return the addresses of each shard's replicas.

        Raises:
            InputError: the file is none such.
            OSError: it cannot be read.
        """
        return [
            sorted({each for name in names for each in _resolved(name)})
            for names in read_addresses(self._path)
        ]


def read_addresses(path: str) -> list[list[str]]:
    """Return names by shard, as a file has them.

    Raises:
        InputError: the file is none such.
        OSError: it cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            contents = json.load(file)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is no JSON: {error}.") from None
    match contents:
        case {"shards": [*shards]} if shards and all(map(_are_names, shards)):
            return shards
    raise InputError(
        f'{path} does not name shards. Write {{"shards": [["ADDRESS:PORT", ...], ...]}}, a list of replicas '
        "a shard."
    )


def _are_names(names: object) -> bool:
    return isinstance(names, list) and bool(names) and all(isinstance(each, str) for each in names)


def _resolved(name: str) -> list[str]:
    """Return the addresses of a name; none while it has none."""
    if name.startswith(UNIX):
        return [name] if os.path.exists(name.removeprefix(UNIX)) else []
    host, _, port = name.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    hosts = [(family, str(to[0]), int(to[1])) for family, _, _, _, to in found]
    return [
        f"[{host}]:{at}" if family == socket.AF_INET6 else f"{host}:{at}"
        for family, host, at in hosts
    ]
