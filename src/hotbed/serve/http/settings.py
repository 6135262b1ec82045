"""Settings of a server: from the command, through the environment, to its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator

from hotbed.errors import InputError
from hotbed.serve.http.limits import Limits, check_count

__all__ = ["ServeSettings"]

VARIABLE = "HOTBED_SERVE"
LEAST_MEMORY = 500_000_000
"""Bytes that a server takes without rows."""
MOST = 120_000
"""Bytes; Linux takes no more than 128 KiB in a variable."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of a server."""

    bundle: str
    name: str
    threads: int = 1
    """That compute the dense part of one batch."""
    memory: int | None = None
    """Bytes that the server and its workers may have, with pages of mapped rows."""
    follow: str | None = None
    """A run whose checkpoints are served as they come."""
    shards: int = 0
    """Processes beside it that have the rows; 0: each worker maps all."""
    replicas: int = 1
    """Processes a shard."""
    shards_file: str | None = None
    """Where processes are named that have the rows."""
    rows_only: bool = False
    """Whether it is one that `shards_file` names."""
    workers: int = 1
    """Processes that answer."""
    tokens: tuple[str, ...] = ()
    """Who may ask, if there are any."""
    certificate: str | None = None
    """A file, for TLS."""
    key: str | None = None
    """Its."""
    grpc: str | None = None
    """``ADDRESS:PORT`` at which gRPC is answered, too, which the process that begins workers holds."""
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.shards and self.shards_file is not None:
            raise InputError(
                "shards are begun here, and shards_file names others. Pass one of them."
            )
        if self.rows_only and (self.shards or self.shards_file or self.follow):
            raise InputError("rows_only has rows, and asks no shards and follows no run.")
        if self.rows_only and self.grpc is not None:
            raise InputError("rows_only has rows, and answers no gRPC. Pass one of them.")
        if self.memory is not None and self.memory < LEAST_MEMORY:
            raise InputError(f"memory is {self.memory:,} bytes. Pass {LEAST_MEMORY:,} or more.")
        if self.shards < 0:
            raise InputError(f"shards is {self.shards}. Pass 0 or more.")
        for name in ("workers", "threads", "replicas"):
            check_count(name, getattr(self, name))
        is_odd = not self.name.isprintable() or self.name in ("", ".", "..")
        if is_odd or "/" in self.name or ":" in self.name:
            raise InputError(
                f"{self.name!r} is to be a part of a path: a name without / and :. Pass one by --name."
            )

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """For a ``with`` statement: processes that are begun from here are told.

        Raises:
            InputError: there are too many tokens.
        """
        told = json.dumps(dataclasses.asdict(self))
        if len(told) > MOST:
            raise InputError(
                f"{len(self.tokens):,} tokens are more than workers can be told. Pass fewer, or shorter ones."
            )
        os.environ[VARIABLE] = told
        try:
            yield
        finally:
            del os.environ[VARIABLE]

    @classmethod
    def from_environment(cls) -> ServeSettings:
        """Return what this process was told."""
        values = json.loads(os.environ[VARIABLE])
        limits = Limits(**values.pop("limits"))
        return cls(**{**values, "tokens": tuple(values["tokens"]), "limits": limits})
