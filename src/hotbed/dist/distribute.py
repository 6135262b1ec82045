"""A model whose tables all ranks of a process group keep together."""

from __future__ import annotations

import dataclasses
from typing import Any


from torch import nn

from hotbed.dist.place import Sharded
from hotbed.dist.plans import Plan
from hotbed.dist.ranks import Ranks
from hotbed.dist.shares import Share
from hotbed.errors import HotbedError, OptimizerError, PlanError
from hotbed.modules.owner import tables_of
from hotbed.places.moves import home_of
from hotbed.table.live import LiveTable
from hotbed.table.place import make_core
from hotbed.table.records import Records

__all__ = ["shard_tables"]


def shard_tables(model: nn.Module, plan: Plan, ranks: Ranks | None = None) -> Ranks:
    """Gives each rank its share of every table of a model, with the rows that there are. Called by all ranks,
    before an optimizer is made.

    Args:
        plan: the same on all ranks, with as many ranks as there are.
        ranks: Default: all of the default process group.

    Raises:
        OptimizerError: a table has an optimizer.
        PlanError: another rank has another plan, or a table is not in it.
    """
    ranks = ranks or Ranks()
    tables = tables_of(model)
    fault: HotbedError | None = None
    for stem, live in tables.items():
        if live.rule is not None:
            fault = OptimizerError(
                f"Table {stem!r} has an optimizer. Distribute the model first, then make the optimizer."
            )
    if plan.world_size != ranks.size:
        fault = PlanError(f"The plan is for {plan.world_size} ranks, and there are {ranks.size}.")
    keys = [live.key - (1 << 64 if live.key >> 63 else 0) for live in tables.values()]
    told = ranks.agree("a distribution", [int(plan.digest[:15], 16), *keys], fault)
    if len({*told[:, 0].tolist()}) > 1:
        raise PlanError("The ranks have different plans. Make it on one, write it, and read it on the others.")
    told = told[:, 1:]
    for live, key in zip(tables.values(), told[0].tolist(), strict=True):
        live.ready()
        live.set_key(key % (1 << 64))
        _shard(live, _shares_of(plan, live.spec.name), ranks)
    return ranks


def _shares_of(plan: Plan, name: str) -> list[Share]:
    sharding, table = plan.shardings[name], plan.tables[name]
    keepers = [
        r for r in range(plan.world_size) if sharding.kept(table, r, plan.world_size) is not None
    ]
    return [Share(rank, plan.part(name, rank)) for rank in keepers]


def _shard(live: LiveTable, shares: list[Share], ranks: Ranks) -> None:
    key, spec = live.key, live.spec
    own: dict[Share, Any] = {}
    for share in shares:
        if share.rank == ranks.rank:
            part = dataclasses.replace(share.part, combiner="none")
            own[share] = LiveTable(part, key, home_of(part))
            own[share].settle()
    place = Sharded(make_core(spec, key, elsewhere=True), spec, ranks, shares, own)
    for rows in live.records(states=False):
        place.write(Records(rows.ids, rows.weights))
    if spec.rows is None:
        live.forget_rows()
    else:
        live.core.release_rows()
    live.adopt(place)



