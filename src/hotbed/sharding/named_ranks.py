"""Ranks that a kind of sharding names: checked, and in words."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.arrays import integer
from hotbed.errors import PlanError
from hotbed.sharding.kind import Sharding
from hotbed.sharding.owners import MOST_RANKS

__all__ = ["checked_rank", "distinct_ranks", "first_ranks", "no_rank", "several"]


def no_rank(owner: int, world_size: int) -> str:
    """Return why a rank is none; empty if it is one."""
    if 0 <= owner < world_size:
        return ""
    if owner < 0:
        return "no rank is named to keep it"
    return f"rank {owner} is outside [0, {world_size})"


def first_ranks(ranks: Sequence[int]) -> str:
    """Return the first of some ranks, and how many more there are."""
    shown = [str(rank) for rank in ranks[:8]]
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def distinct_ranks(kind: Sharding, given: object, advice: str = "") -> tuple[int, ...]:
    """Return the ranks that are given as owners.

    Raises:
        PlanError: they are none, or one comes twice.
    """
    owners = tuple(checked_rank(kind, owner) for owner in several(kind, "owners", given))
    if not owners or len(set(owners)) < len(owners):
        raise PlanError(f"{type(kind).__name__}: owners={given!r} must be distinct ranks{advice}.")
    return owners


def checked_rank(kind: Sharding, given: object) -> int:
    """Return a rank; PlanError: it is none."""
    rank = integer(given)
    if rank is None or not 0 <= rank < MOST_RANKS:
        raise PlanError(
            f"{type(kind).__name__}: a rank is a number from 0 to {MOST_RANKS - 1:,}, not {given!r}."
        )
    return rank


def several(kind: Sharding, name: str, given: object) -> list[object]:
    """Return the items of a tuple or list; PlanError: it is neither."""
    if isinstance(given, (tuple, list, range)):
        return list(given)
    raise PlanError(f"{type(kind).__name__}: {name} must be several numbers, not {given!r}.")
