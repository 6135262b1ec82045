"""Checkpoints of tables that several processes share: who writes what, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from torch import nn

from hotbed.checkpoint.entries import RuleEntry, TableEntry
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.rules import rule_of
from hotbed.checkpoint.tables import entry_of
from hotbed.dist.distribute import sharing_of
from hotbed.dist.errors import mark_known_to_all
from hotbed.table.alone import ALONE, Processes
from hotbed.table.live import LiveTable

__all__ = [
    "KIND",
    "any_under_way",
    "beside_signs",
    "entries_of",
    "own_tables",
    "ranks_of",
    "refuse_other_arguments",
    "tables_here",
]

KIND = "a checkpoint"

T = TypeVar("T")


def ranks_of(tables: Mapping[str, LiveTable], model: nn.Module) -> Processes:
    """The processes that share the tables of a model, or train it; or the one that has it alone.

    Raises:
        CheckpointError: some are shared by others than others are.
    """
    found = {table.place.ranks for table in tables.values()} - {ALONE}
    if len(found) > 1:
        raise CheckpointError(
            "Parts of the model were distributed one by one. Distribute the whole model, or save each by "
            "itself."
        )
    if not tables and (sharing := sharing_of(model)) is not None:
        return sharing.ranks
    return found.pop() if found else ALONE


def any_under_way(ranks: Processes, own: bool) -> bool:
    """Return True if a save is under way on some rank; `own`: on this one. All ranks that call
    ``save(skip=True)`` call this.

    Raises:
        CheckpointError: on all, where others do something else.
    """
    calls = ranks.values_of_all(KIND, ("save(skip=True)", {"under way": own}))
    _refuse_other_calls(calls)
    return any(of_rank["under way"] for _, of_rank in calls)


def _refuse_other_calls(calls: Sequence[tuple[str, Mapping[str, object]]]) -> None:
    if other_calls := [rank for rank, (other, _) in enumerate(calls) if other != calls[0][0]]:
        error = CheckpointError(
            f"Rank 0 calls hotbed.{calls[0][0]}, and rank {other_calls[0]} "
            f"hotbed.{calls[other_calls[0]][0]}. All ranks save and load in the same order."
        )
        mark_known_to_all(error)
        raise error


def refuse_other_arguments(called: str, given: Mapping[str, object], ranks: Processes) -> None:
    """Raise CheckpointError on all ranks where they call `save` or `load` with other arguments. All ranks
    call this, but for memory hosts, which hear of it and do the same."""
    calls = ranks.values_of_all(KIND, (called, dict(given)))
    _refuse_other_calls(calls)
    every = [arguments for _, arguments in calls]
    for rank, other in enumerate(every):
        for name, value in every[0].items():
            if other[name] != value:
                error = CheckpointError(
                    f"hotbed.{called} has {name}={value!r} on rank 0 and {other[name]!r} on rank {rank}. All "
                    "ranks give it the same."
                )
                mark_known_to_all(error)
                raise error


def beside_signs(ranks: Processes, work: Callable[[], T]) -> T:
    """Return what some long work gives, done on another thread while this one shows the other ranks that it
    is there."""
    if ranks is ALONE:
        return work()
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(work)
        for _ in ranks.heartbeat(KIND, _until(under_way)):
            pass
        return under_way.result()


def _until(under_way: Future[T]) -> Iterator[None]:
    while not under_way.done():
        wait([under_way], timeout=_SECONDS)
        yield


_SECONDS = 0.5
"""Between two looks at whether a sign is due."""


def tables_here(tables: Mapping[str, LiveTable]) -> dict[str, LiveTable]:
    """Shards of these tables in this process."""
    return {stem: own for stem, table in tables.items() for own in table.place.tables_here(table)}


def own_tables(tables: Mapping[str, LiveTable], ranks: Processes) -> dict[str, LiveTable]:
    """Tables and shards whose rows this process saves; rank 0 saves those that are not shared."""
    return {
        stem: own
        for stem, table in tables.items()
        if table.place.ranks is ranks or ranks.rank == 0
        for own in table.place.tables_to_save(table)
    }


def entries_of(
    tables: Mapping[str, LiveTable], own: Mapping[str, LiveTable], ranks: Processes, *, states: bool
) -> dict[str, TableEntry]:
    """Return the manifest's entries of all tables. All ranks call this."""
    rules = ranks.values_of_all(
        KIND, {stem: rule_of(table) for stem, table in own.items()} if states else {}
    )
    return {
        stem: entry_of(table, _longest([reported[stem] for reported in rules if stem in reported]))
        for stem, table in tables.items()
    }


def _longest(rules: list[RuleEntry | None]) -> RuleEntry | None:
    """Return, of one rule in several processes, the one that remembers most of what rows may have missed."""

    def forgotten(rule: RuleEntry | None) -> int:
        return 0 if rule is None or rule["history"] is None else int(rule["history"]["forgotten"])

    return min(rules, key=forgotten, default=None)
