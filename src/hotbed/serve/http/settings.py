"""What a server is told: from the command, through the environment, to its workers."""

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
MOST = 120_000
"""Bytes; Linux takes no more than 128 KiB in a variable."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What a server is told."""

    bundle: str
    name: str
    threads: int = 1
    """That compute the dense part of one batch."""
    follow: str | None = None
    """A run whose checkpoints are served as they come."""
    workers: int = 1
    """Processes that answer."""
    tokens: tuple[str, ...] = ()
    """Who may ask, if there are any."""
    certificate: str | None = None
    """A file, for TLS."""
    key: str | None = None
    """Its."""
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("workers", "threads"):
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
