"""Bytes of messages between ranks that ask for rows and ranks that own them, where each asks as much.

Shapes: R ranks; 2 distances: to and from ranks of other machines, and others of the own machine. Where nobody
said which ranks share a machine, each has one of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Flow", "Topology"]

Floats = NDArray[np.float64]


class Flow(NamedTuple):
    """Bytes of one kind of message in a step."""

    asking: Floats
    """(2, R) of each rank as one that asks."""
    asked: Floats
    """(2, R) of each rank as one that is asked."""


class Topology(NamedTuple):
    """Ranks on machines with as many ranks each, side by side."""

    ranks: int
    local: int
    """Ranks of a machine."""

    @classmethod
    def of(cls, ranks: int, local_world_size: int | None) -> Topology:
        """Return machines where ranks exchange rows by way of them: several, with several ranks each."""
        local = local_world_size or 1
        return cls(ranks, local if local < ranks else 1)

    @property
    def machines(self) -> int:
        return self.ranks // self.local

    def direct(self, amounts: Floats) -> Flow:
        """Return the flow between each rank and each owner.

        Args:
            amounts: (R,) between one rank and each owner.
        """
        near = np.repeat(amounts.reshape(self.machines, self.local).sum(1), self.local)
        return Flow(
            np.stack([amounts.sum() - near, near - amounts]),
            np.stack([amounts * (self.ranks - self.local), amounts * (self.local - 1)]),
        )

    def through(self, amounts: Floats) -> Floats:
        """Return (R,) amounts of the owners that each rank asks for its machine: those of its local rank.

        Args:
            amounts: (R,) of each owner.
        """
        return np.tile(amounts.reshape(self.machines, self.local).sum(0), self.machines)

    def inside(self, amounts: Floats) -> Flow:
        """Return the flow between each rank and those of its machine that ask owners for it.

        Args:
            amounts: (R,) of one rank for each owner.
        """
        through, nothing = self.through(amounts), np.zeros(self.ranks)
        return Flow(
            np.stack([nothing, amounts.sum() - through]),
            np.stack([nothing, through * (self.local - 1)]),
        )

    def across(self, amounts: Floats) -> Flow:
        """Return the flow between each rank and owners of its local rank.

        Args:
            amounts: (R,) of one machine for each owner.
        """
        nothing = np.zeros(self.ranks)
        return Flow(
            np.stack([self.through(amounts) - amounts, nothing]),
            np.stack([amounts * (self.machines - 1), nothing]),
        )
