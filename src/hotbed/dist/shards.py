"""Shards: the parts of a table that ranks own."""

from __future__ import annotations

from typing import NamedTuple

from hotbed.tables import Table

__all__ = ["Shard"]


class Shard(NamedTuple):
    """A part of a table, and the rank that keeps it."""

    rank: int
    part: Table
    replica: bool = False
    """Whether every rank keeps the same."""
