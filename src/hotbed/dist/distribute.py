"""A model on many ranks: tables in parts, dense layers alike on all."""

from __future__ import annotations

import dataclasses
import numbers
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hotbed import _core
from hotbed.dist.batch import ShardedLookups
from hotbed.dist.declarations import of_arguments, of_model, of_plan
from hotbed.dist.delivery import deliver
from hotbed.dist.dense import CompareLoads, averaged_dense, refuse_options, replace_forward
from hotbed.dist.errors import PeerError
from hotbed.dist.exchange import order_by_owner, send_ids
from hotbed.dist.hosts_ahead import PrefetchOnHost
from hotbed.dist.measured import Measured
from hotbed.dist.place import Sharded
from hotbed.dist.planning import plan as planned
from hotbed.dist.planning import tables_to_plan
from hotbed.dist.plans import Plan
from hotbed.dist.prefetch import PrefetchOnRanks
from hotbed.dist.ranks import Ranks
from hotbed.dist.roles import agree
from hotbed.dist.row_codecs import Codecs, codecs_of, wire_of
from hotbed.dist.scaling import watch_scalers
from hotbed.dist.shards import Shard, TableOnRanks
from hotbed.errors import HotbedError, OptimizerError, PlanError, TableError
from hotbed.places.moves import factory_for
from hotbed.sharding import checked_local_size
from hotbed.sharding.coverage import check_kind
from hotbed.table.live import LiveTable
from hotbed.table.place_factory import make_core
from hotbed.table.records import Records
from hotbed.table.state_dict import signed_key
from hotbed.table.with_handle import unregister
from hotbed.tables import Table, part_of

__all__ = ["Sharing", "check_tables", "distribute", "needed_sharing", "share_tables", "sharing_of"]

_ATTRIBUTE = "_hotbed_sharing"
_DEFAULT_TIMEOUT = 30.0
_LONGEST = 10**9
"""Seconds of a timeout, which torch counts in milliseconds."""


class Sharing(NamedTuple):
    """How a model lies on many ranks."""

    ranks: Ranks
    plan: Plan | None
    """None: it has no tables."""
    dense: DistributedDataParallel | None
    """What averages gradients of dense parameters."""


def sharing_of(model: nn.Module) -> Sharing | None:
    """None: it was not distributed."""
    found: Sharing | None = model.__dict__.get(_ATTRIBUTE)
    return found


def needed_sharing(model: nn.Module, called: str) -> Sharing:
    """Return how a model lies on many ranks. `called`: by the user, with the model.

    Raises:
        TableError: it was not distributed.
    """
    sharing = sharing_of(model)
    if sharing is None:
        raise TableError(
            f"This {type(model).__name__} is not distributed, or is a part of what is. {called} takes what "
            "hotbed.distribute has returned."
        )
    return sharing


def distribute(
    model: nn.Module,
    plan: Plan | Measured | str = "auto",
    *,
    timeout: float = _DEFAULT_TIMEOUT,
    shared_memory: bool = True,
    rows: str = "stored",
    gradients: str = "stored",
    memory_host: bool = False,
    local_world_size: int | None = None,
    prefetch: int = 0,
    ddp: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Train one model by all processes of the default process group.

    Each keeps a part of the tables, and all have the dense layers alike. All ranks call this, before an
    optimizer is made.

    >>> torch.distributed.init_process_group("gloo")     # under torchrun
    >>> model = hb.distribute(hb.models.DLRM(["item"]))
    >>> optimizer = hb.optim.Adagrad(model.parameters(), lr=0.01)

    The model stays the same object with the same names. A forward takes this rank's samples; gradients are
    means over the ranks, of dense layers by torch's DistributedDataParallel (``model.no_sync()`` is there,
    too). Lookups and steps are called by all ranks in the same order. Rank 0's rows and dense weights are
    those of all; where tables have no ``seed``, its first values, too.

    Args:
        model: on the host, with tables or without; those made with ``device="meta"`` take no memory until
            now.
        plan: who keeps what: a `Plan`, or a strategy of `plan`, such as `Measured` with the same figures on
            all ranks.
        timeout: seconds that a rank may keep the others waiting until they raise `PeerError`.
        shared_memory: whether ranks of one machine exchange rows through memory that they see, if they can.
        rows: how rows and vectors travel to forwards: ``"stored"``, ``"float16"``, ``"bfloat16"``, ``"int8"``
            with a scale a row, or another of `hotbed.dist.CODECS`. ``Table(wire=...)`` says so of one table.
        gradients: how gradients travel to the owners, who sum them in float32; ``"int8"`` rounds at random.
        memory_host: on this rank: it keeps rows and has no batches, and calls `hotbed.dist.serve_rows`. Where
            there are such ranks, a strategy gives all tables to them but the small ones, which all keep.
            Gradients are means over the others; rank 0 is one of these.
        local_world_size: ranks on each machine, which lie side by side. Where there are several machines, the
            ids that ranks of one ask for are brought together before they cross to another.
        prefetch: 1: under `hotbed.lookahead`, rows of the next batch travel while this one computes, but for
            those that its step changes, from memory hosts, too; results are the same.
        ddp: arguments of DistributedDataParallel, such as ``{"find_unused_parameters": True}``.

    Raises:
        OptimizerError: a table has an optimizer.
        PlanError: another rank has another plan, or the plan does not fit the model or the ranks.
        TableError: there is no process group, an argument that cannot be, or the model cannot be
            distributed.
        PeerError: another rank could not, has another model, or does not call this.
    """
    if not torch_dist.is_available() or not torch_dist.is_initialized():
        raise TableError(
            'hotbed.distribute needs a process group: torch.distributed.init_process_group("gloo"), in '
            "processes that torchrun --nproc-per-node N starts."
        )
    if isinstance(model, DistributedDataParallel) or sharing_of(model) is not None:
        raise TableError(
            f"This {type(model).__name__} is distributed already. Give the bare model, once: its dense "
            "layers come into DistributedDataParallel by themselves."
        )
    if not isinstance(shared_memory, bool):
        raise TableError(f"shared_memory must be True or False, got {shared_memory!r}.")
    if type(prefetch) is not int or prefetch not in (0, 1):
        raise TableError(f"prefetch must be 0 or 1, got {prefetch!r}.")
    seconds = _checked_timeout(timeout)
    if not isinstance(memory_host, bool):
        raise TableError(f"memory_host must be True or False, got {memory_host!r}.")
    ranks = Ranks(
        timeout=seconds or _DEFAULT_TIMEOUT,
        shared_memory=shared_memory,
        memory_host=memory_host,
        local_world_size=checked_local_size(local_world_size),
    )
    agree(ranks.hosts, ranks.size)
    with ranks.reporting("a distribution"):
        if seconds is None:
            raise TableError(
                f"timeout must be seconds above 0, at most {_LONGEST:,}, got {timeout!r}."
            )
        refuse_options(ddp or {})
        codecs_of(rows, gradients)
        chosen = _chosen(model, plan, ranks)
        _warn_of_idle_cores()
        specs = tables_to_plan(model).values()
        named = {"rows": rows, "gradients": gradients}
        for spec in specs:
            wire_of(spec, rows, gradients)
            for what, name in zip(("rows", "gradients"), spec.wire or (), strict=False):
                named[f"{what} of table {spec.name!r}"] = name
        declared = of_arguments(named, ddp or {}, specs, prefetch)
    ranks.handshake("a distribution", declared=declared)
    check_tables(model, chosen, ranks)
    with ranks.listening("hotbed.distribute"):
        dense = averaged_dense(model, ranks, ddp or {})  # which may yet refuse its options
    share_tables(model, chosen, ranks, rows, gradients, prefetch)
    replace_forward(model, ranks, dense)
    if chosen is not None:
        CompareLoads(ranks).watch(model)
    watch_scalers()
    model.__dict__[_ATTRIBUTE] = Sharing(ranks, chosen, dense)
    return model


def _checked_timeout(given: object) -> float | None:
    """None: it is none, which all ranks are to hear."""
    if isinstance(given, numbers.Real) and not isinstance(given, bool):
        seconds = float(given)
        if 0 < seconds <= _LONGEST:
            return seconds
    return None


def _chosen(model: nn.Module, plan: Plan | Measured | str, ranks: Ranks) -> Plan | None:
    """None where there are no tables to plan."""
    if isinstance(plan, str | Measured):
        if tables_to_plan(model):
            if ranks.hosts:
                return planned(model, len(ranks.hosts), strategy=plan).on(ranks.hosts, ranks.size)
            size = ranks.size if ranks.machines is None else ranks.machines.shape
            return planned(model, size, strategy=plan)
        if ranks.hosts:
            raise PlanError(f"This {type(model).__name__} has no tables for memory hosts to keep.")
        return None
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is a hotbed.dist.Plan or the name of a strategy, not {plan!r}.")
    return plan


def check_tables(model: nn.Module, plan: Plan | None, ranks: Ranks) -> None:
    """Raise an error on all ranks where a plan, the model of a rank or its tables cannot be shared. Called
    by all ranks.

    Args:
        plan: None: there are no tables.

    Raises:
        OptimizerError, PlanError, TableError, PeerError: before anything has changed.
    """
    tables = tables_to_plan(model)
    shardings = {} if plan is None else plan.shardings
    with ranks.reporting("a distribution"):
        if plan is not None:
            _refuse(tables, plan, ranks)
            for spec in tables.values():
                check_kind(plan.shardings[spec.name], spec, spec.name, ranks.size)
        for live in tables:
            live.check_handle()
        declared = of_model(model, list(tables.values())), of_plan(shardings)
    for each in declared:
        ranks.handshake("a distribution", declared=each)


def share_tables(
    model: nn.Module,
    plan: Plan | None,
    ranks: Ranks,
    rows: str = "stored",
    gradients: str = "stored",
    prefetch: int = 0,
) -> None:
    """Give each rank its shards of every table of a model, with the rows that rank 0 has. Called by all
    ranks, which have called `check_tables` with the same.

    Args:
        rows, gradients, prefetch: as of `distribute`.

    Raises:
        HotbedError: rows have no room on a rank.
        PeerError: on another rank.
    """
    tables = tables_to_plan(model)
    keys = [signed_key(live.key) for live in tables]
    changed = [int(_has_rows(live)) for live in tables]
    in_tiers = int(any(live.place.tiers is not None for live in tables))
    told = ranks.handshake("a distribution", [in_tiers, *keys, *changed]).values
    _, *of_first = told[0].tolist()
    fault: HotbedError | None = None
    some_ahead = prefetch > 0 or bool(told[:, 0].any())
    prefetcher: PrefetchOnRanks | None = None
    if some_ahead and ranks.rank in ranks.hosts:
        prefetcher = PrefetchOnHost(ranks, rows_ahead=prefetch > 0)
    elif some_ahead:
        prefetcher = PrefetchOnRanks(ranks, rows_ahead=prefetch > 0)
    lookups = ShardedLookups(ranks, prefetcher)
    try:
        for (live, spec), key, has_rows in zip(
            tables.items(), of_first, of_first[len(tables) :], strict=False
        ):
            assert plan is not None
            codecs = wire_of(spec, rows, gradients)
            _share(live, spec.name, plan, lookups, key % (1 << 64), bool(has_rows), codecs)
    except PeerError:
        raise
    except HotbedError as error:
        fault = error
    ranks.vote("a distribution", fault=fault)


def _refuse(tables: Mapping[LiveTable, Table], plan: Plan, ranks: Ranks) -> None:
    for live, spec in tables.items():
        if live.rule is not None:
            raise OptimizerError(
                f"Table {live.name!r} has an optimizer. Distribute the model first, then make the optimizer."
            )
        live.place.refuse_to_share()
        if live.has_gradient:
            raise TableError(
                f"Table {live.name!r} has a gradient, which would be lost as its rows come to other ranks. "
                "Call hotbed.distribute before the first backward, or zero_grad() before it."
            )
        named = plan.tables.get(spec.name)
        if named is None or (named.dim, named.rows) != (live.spec.dim, live.spec.rows):
            raise PlanError(f"The plan is not for this model: it has no such table {spec.name!r}.")
    if plan.world_size != ranks.size:
        raise PlanError(f"The plan is for {plan.world_size} ranks, and there are {ranks.size}.")


def _has_rows(live: LiveTable) -> bool:
    """Whether there are some that are not first values."""
    return len(live) > 0 if live.spec.rows is None else live.place.changed


def _share(
    live: LiveTable,
    name: str,
    plan: Plan,
    lookups: ShardedLookups,
    key: int,
    rows: bool,
    codecs: Codecs,
) -> None:
    """`name`: in the plan. `rows`: whether rank 0 has some to hand out."""
    spec, old, kind, ranks = live.spec, live.place, plan.shardings[name], lookups.ranks
    given, owners = kind.owner_rule(spec) is _core.OwnerRule.given, dict[object, int]()
    shards = []
    for rank in kind.in_order(ranks.size):
        if (kept := kind.kept(plan.tables[name], rank, ranks.size)) is not None:
            owner = rank
            if not given:
                owner = owners.setdefault((kept.first, kept.stride, kept.owns), len(owners))
            shards.append(Shard(rank, part_of(spec, kept), kind.replicated, owner))
    shards.sort(key=lambda shard: shard.rank)
    stream = live.records(states=False) if rows and ranks.rank == 0 else iter(())
    if not rows:
        old.give_up(live)
    own: dict[Shard, LiveTable] = {}
    for shard in shards:
        if shard.rank == ranks.rank:
            part = dataclasses.replace(shard.part, combiner="none")
            made = LiveTable(part, key, factory_for(part, tiers=old.tiers, budget=old.budget))
            unregister(made)
            own[shard] = made
    core = make_core(spec, key, elsewhere=True)
    place = Sharded(core, spec, lookups, len(ranks.tables), kind, shards, own, codecs)
    ranks.tables.append(weakref.ref(cast(TableOnRanks, live)))
    if rows:
        _hand_out(place, stream)
        old.give_up(live)
    live.adopt(place)


def _hand_out(place: Sharded, stream: Iterator[Records]) -> None:
    """`stream`: of rank 0 all rows, of others nothing."""
    nothing = (
        torch.empty(0, dtype=torch.int64, device="cpu"),
        torch.empty((0, place.spec.dim), device="cpu"),
    )
    while True:
        rows = next(stream, None)
        ids, weights = nothing if rows is None else (rows.ids, rows.weights)
        assert weights is not None
        by_owner = order_by_owner(place.ranks.layout([place]), ids, [len(ids)])
        said = [int(rows is not None), *by_owner.counts_to_owners]
        reported = place.ranks.handshake("a distribution", said).values
        if not bool(reported[:, 0].any()):
            return
        requests = send_ids(place.ranks, by_owner, reported[:, 1:])
        for live, own, some in deliver(place.ranks, requests, weights.to(place.spec.dtype)):
            live.assign(own, some)


def _warn_of_idle_cores() -> None:
    """torchrun gives each process one thread, unless it is told another number."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    cores = (os.cpu_count() or 1) // max(1, processes)
    if processes and cores > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        if os.environ.get("LOCAL_RANK") == "0":
            warnings.warn(
                f"OMP_NUM_THREADS is 1, as torchrun sets it, so cores are idle: start it with "
                f"OMP_NUM_THREADS={cores}, the cores of this machine for each process.",
                stacklevel=3,
            )
