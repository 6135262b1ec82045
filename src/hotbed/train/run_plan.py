"""Who kept what in a run on many ranks, what batches asked of tables, and how evenly ranks served them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from hotbed.dist import Plan, PlanError, Slices, Traffic, traffic_of
from hotbed.dist.distribute import sharing_of
from hotbed.dist.planning import tables_to_plan
from hotbed.files import Json
from hotbed.modules.owner import owners_of
from hotbed.sharding import checked_local_size
from hotbed.tables import Table
from hotbed.train.run_files import RunError

__all__ = ["PlanOfRun", "imbalance_in_words", "plan_entry", "read_plan", "traffic_entry"]

_BATCHES = 8
"""Batches of the first rank that are counted."""
_UNEVEN = 1.25
"""Most that a rank may serve, as a multiple of the mean, before the run's end tells of it."""


class PlanOfRun(NamedTuple):
    """A run's plan, as its record has it."""

    plan: Plan
    traffic: dict[str, Traffic]
    optimizer: str
    expected_rows: dict[str, int]
    """Of dynamic tables, those that they had in the end."""
    local_world_size: int | None = None
    """Ranks of a machine, as the run was told."""


def plan_entry(
    model: nn.Module, optimizer: str, asked: Mapping[str, Json]
) -> dict[str, Json] | None:
    """Return the entry of a run's record; None: the model has no tables on several ranks, or memory hosts
    keep them. Called by all ranks.

    Args:
        asked: as the first rank's `traffic_entry` returned it.
    """
    sharing = sharing_of(model)
    if sharing is None or sharing.plan is None or sharing.ranks.size < 2 or sharing.ranks.hosts:
        return None
    ranks, tables = sharing.ranks, tables_to_plan(model)
    rows = {
        spec.name: sum(len(own) for own in live.place.tables_here(live))
        for live, spec in tables.items()
        if spec.rows is None
    }
    own = [ranks.served, sum(ranks.sent.values()), *rows.values()]
    of_ranks: list[list[int]] = ranks.values_of_all("figures", own)
    served, sent, *of_tables = (list(each) for each in zip(*of_ranks, strict=True))
    for name, counts in zip(rows, of_tables, strict=True):
        is_split = sharing.plan.shardings[name].owner_rule(sharing.plan.tables[name]) is not None
        rows[name] = sum(counts) if is_split else max(counts)
    mean = sum(served) / len(served)
    return {
        "plan": sharing.plan.as_json(),
        "optimizer": optimizer,
        "tables": {
            spec.name: {
                "dim": spec.dim,
                "rows": spec.rows,
                "dtype": str(spec.dtype).removeprefix("torch."),
                "combiner": spec.combiner,
                "expected_rows": rows.get(spec.name),
            }
            for spec in tables.values()
        },
        "traffic": dict(asked),
        "ids_served": list(served),
        "bytes_sent": list(sent),
        "imbalance": round(max(served) / mean, 3) if mean else 1.0,
    }


def imbalance_in_words(entry: Mapping[str, Json] | None) -> str:
    """Return a sentence on ranks that serve much more than others; empty: none does."""
    match entry:
        case {"imbalance": float(times), "ids_served": list(served)} if times > _UNEVEN:
            busiest = served.index(max(served))  # type: ignore[type-var]
            return (
                f"Rank {busiest} was asked for {times:.2f} times as many ids as ranks are on average. With a "
                "record (--run DIR), hotbed plan --from DIR looks for a better plan."
            )
    return ""


def read_plan(record: Mapping[str, Json], named: str) -> PlanOfRun:
    """Return the plan in a run's record.

    Args:
        named: the record, for errors.

    Raises:
        RunError: the run had one process, or did not end, or the entry is damaged.
    """
    entry = record.get("sharding")
    if not isinstance(entry, dict):
        raise RunError(
            f"{named} is the record of a run on one process, or of one that has not ended: it has no plan."
        )
    try:
        settings = record.get("settings")
        local = settings.get("local_world_size") if isinstance(settings, dict) else None
        return _read(entry, local)
    except (PlanError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{named}: the plan of the run is damaged: {error}.") from None


def _read(entry: Mapping[str, Json], local: Json) -> PlanOfRun:
    described, counted = entry["tables"], entry["traffic"]
    if not isinstance(described, dict) or not isinstance(counted, dict):
        raise TypeError("tables and traffic must be objects")
    tables, rows = [], {}
    for name, one in described.items():
        if not isinstance(one, dict):
            raise TypeError(f"table {name!r} is no object")
        fields = {**one, "dtype": getattr(torch, str(one["dtype"]))}
        expected = fields.pop("expected_rows")
        tables.append(Table(name, **fields))
        if isinstance(expected, int):
            rows[name] = expected
    traffic = {name: Traffic(**values) for name, values in counted.items()}  # type: ignore[arg-type]
    plan, of_machine = Plan.from_json(entry["plan"], tables), checked_local_size(local)
    if plan.world_size % (of_machine or 1):
        raise ValueError(f"local_world_size={local} does not divide its {plan.world_size} ranks")
    return PlanOfRun(plan, traffic, str(entry["optimizer"]), rows, of_machine)


def traffic_entry(model: nn.Module, batches: Iterable[Mapping[str, object]]) -> dict[str, Json]:
    """Return what the first batches ask of each table; of a model without a plan nothing.

    Args:
        batches: whole ones, of all ranks together, of which this rank's part is counted.
    """
    sharing = sharing_of(model)
    if sharing is None or sharing.plan is None:
        return {}
    names = {live: spec.name for live, spec in tables_to_plan(model).items()}
    features = {
        feature: names[live]
        for name, module in owners_of(model).items()
        for feature, live in module.features_of(name).items()
    }
    read = [
        *itertools.islice(Slices(copy.copy(batches)), _BATCHES)
    ]  # whose epochs begin with the run
    counted = traffic_of(sharing.plan.tables.values(), read, features)
    return {name: {**dataclasses.asdict(one)} for name, one in counted.items()}
