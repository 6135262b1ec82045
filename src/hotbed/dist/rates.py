"""`Rates`: measured seconds of a machine for each unit of a step's work, and their file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import PlanError
from hotbed.files import appearing, read_toml
from hotbed.paths import path_text

__all__ = ["ALIKE", "PHASES", "PHASE_OF", "UNITS", "Rates"]

PHASES = ("ask", "answer", "receive", "send gradients", "update")
"""Between them ranks wait for each other: a step takes the sum of what the slowest rank takes in each.

Ranks group the ids of their samples ("ask"), look up what others ask of them ("answer"), pool what came and
run backward ("receive"), write gradients ("send gradients"), and sum and apply those of their rows
("update").
"""

_VERSION = 1
_MOST_SECONDS = 1e6
"""That any unit takes."""


def _in(phase: str, seconds: float) -> float:
    """Declare a figure of a phase."""
    found: float = dataclasses.field(default=seconds, metadata={"phase": PHASES.index(phase)})
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds that each unit of a step's work takes on a rank, as `hotbed.dist.measure` measures them.

    Defaults are about those of two processes that share memory on two cores of an AMD EPYC.

    Raises:
        PlanError: a figure is no number of seconds.
    """

    forward_call: float = _in("ask", 0.0018)
    """A forward, whatever it looks up: its calls, and the latency of its messages."""
    forward_table: float = _in("ask", 4.4e-05)
    """A table whose rows travel."""
    forward_feature: float = _in("ask", 3.7e-05)
    """A feature whose bags owners pool."""
    grouped_id: float = _in("ask", 2.9e-08)
    """An id of a batch that is looked up among those before it."""
    ordered_id: float = _in("ask", 2e-08)
    """A distinct id of a table whose rows are split, which is ordered by its owner."""
    row: float = _in("answer", 5e-09)
    """A row that an owner looks up for a rank."""
    row_byte: float = _in("answer", 1e-10)
    """A byte of such rows on its way to messages, and from there to the forward."""
    bag_row: float = _in("answer", 7e-09)
    """An id that an owner looks up to pool its bag."""
    bag_byte: float = _in("answer", 2e-11)
    """A byte of the rows of bags."""
    cold_byte: float = _in("answer", 2.2e-10)
    """A byte of distinct rows that come from memory, and not from a cache of the processor."""
    ssd_row: float = _in("answer", 0.0001)
    """A row that is read from an SSD."""
    received_byte: float = _in("receive", 3e-10)
    """A byte that comes from another rank in a forward: ids, rows, vectors."""
    inside_byte: float = _in("receive", 3e-10)
    """Such a byte from a rank of the same machine, where it is said how many ranks a machine has."""
    vector_byte: float = _in("receive", 2e-10)
    """A byte of vectors, or of the rows of bags, that the requester writes to a forward's output."""
    backward_call: float = _in("receive", 0.00029)
    """A backward."""
    backward_table: float = _in("receive", 3e-05)
    """A table in a backward."""
    backward_id: float = _in("receive", 5e-09)
    """An id of a batch whose gradient is summed by row, of tables whose rows travel."""
    backward_byte: float = _in("receive", 1.4e-10)
    """A byte of gradients of vectors."""
    step_call: float = _in("send gradients", 0.0013)
    """A step of the optimizer, and the latency of its messages."""
    step_table: float = _in("send gradients", 3.8e-05)
    """A table in it whose rows travel."""
    step_feature: float = _in("send gradients", 3.4e-05)
    """A feature in it whose bags owners pool."""
    ordered_gradient: float = _in("send gradients", 1e-08)
    """A gradient of a row of such a table, which is written to the message to its owner."""
    written_byte: float = _in("send gradients", 1e-10)
    """A byte of gradients that are written to messages."""
    gradient_row: float = _in("update", 2e-08)
    """A gradient of a row that an owner sums with those of other ranks."""
    gradient_byte: float = _in("update", 5e-11)
    """A byte of such gradients."""
    bag_gradient_row: float = _in("update", 2e-09)
    """An id of a bag to whose row an owner adds the bag's gradient."""
    bag_gradient_byte: float = _in("update", 7e-11)
    """A byte of these additions."""
    updated_row: float = _in("update", 2e-09)
    """A row that is updated."""
    updated_byte: float = _in("update", 3.4e-10)
    """A byte of updated rows and their states."""
    cold_updated_byte: float = _in("update", 5e-11)
    """A byte of them that comes from memory."""
    received_gradient_byte: float = _in("update", 3e-10)
    """A byte of gradients that comes from another rank."""
    inside_gradient_byte: float = _in("update", 3e-10)
    """As `inside_byte`, of gradients."""

    def __post_init__(self) -> None:
        for name in UNITS:
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= _MOST_SECONDS:
                raise PlanError(
                    f"Rates: {name} must be seconds from 0 to {_MOST_SECONDS:,.0f}, not {value!r}."
                )

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Rates:
        """Return rates of (U,) seconds, in the order of `UNITS`.

        Raises:
            PlanError: they are none, or not as many.
        """
        if len(seconds) != len(UNITS):
            raise PlanError(f"Rates.of: expected {len(UNITS)} seconds, got {len(seconds)}.")
        given = (one.item() if isinstance(one, np.generic) else one for one in seconds)
        return cls(**dict(zip(UNITS, given, strict=True)))

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Return (U,) seconds, in the order of `UNITS`."""
        return np.array([getattr(self, name) for name in UNITS], np.float64)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the figures as TOML, which `read` reads.

        Raises:
            OSError: it cannot be written.
        """
        lines = [f"version = {_VERSION}", "", "[seconds]"]
        lines += [f"{name} = {float(getattr(self, name))!r}" for name in UNITS]
        with appearing(path_text(path)) as part, open(part, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Rates:
        """Read figures that `write` has written.

        Raises:
            PlanError: naming the file and what in it is wrong.
        """
        named = path_text(path)
        try:
            read = read_toml(named)
        except OSError as error:
            raise PlanError(f"{named}: {error.strerror}.") from None
        except ValueError as error:
            raise PlanError(f"{named} is not TOML: {error}.") from None
        seconds = read.get("seconds")
        if set(read) != {"version", "seconds"} or not isinstance(seconds, dict):
            raise PlanError(f"{named}: figures have the key version and a section [seconds].")
        if read["version"] != _VERSION:
            raise PlanError(f"{named}: version {read['version']!r} is not {_VERSION}.")
        for name, alike in ALIKE.items():  # which earlier versions did not tell apart
            seconds.setdefault(name, seconds.get(alike))
        if other := set(UNITS) ^ set(seconds):
            wrong = sorted(other)[0]
            raise PlanError(f"{named}: the key {wrong!r} is missing or unknown in [seconds].")
        try:
            return cls(**seconds)
        except PlanError as error:
            raise PlanError(f"{named}: {error}") from None


UNITS = tuple(field.name for field in dataclasses.fields(Rates))
"""Names of the figures."""
ALIKE = {
    "inside_byte": "received_byte",
    "inside_gradient_byte": "received_gradient_byte",
}
"""Figures, and those of others that they equal where nobody says which ranks share a machine."""
PHASE_OF = np.array([field.metadata["phase"] for field in dataclasses.fields(Rates)])
"""(U,) position in `PHASES` of each."""
