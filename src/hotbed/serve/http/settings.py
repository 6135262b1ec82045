"""What a server is told: from the command, through the environment, to its workers."""

from __future__ import annotations

import dataclasses
import json
import os

from hotbed.errors import InputError
from hotbed.serve.http.limits import Limits, check_count

__all__ = ["ServeSettings"]

VARIABLE = "HOTBED_SERVE"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What a server is told."""

    bundle: str
    name: str
    threads: int = 1
    """That compute the dense part of one batch."""
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
        if "/" in self.name or ":" in self.name:
            raise InputError(f"{self.name!r} is to be a part of a path: a name without / and :.")

    def to_environment(self) -> None:
        """Tell processes that are begun from here."""
        os.environ[VARIABLE] = json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_environment(cls) -> ServeSettings:
        """Return what `to_environment` was called on."""
        values = json.loads(os.environ[VARIABLE])
        limits = Limits(**values.pop("limits"))
        return cls(**{**values, "tokens": tuple(values["tokens"]), "limits": limits})
