"""Whether a kind of sharding that a user wrote gives each element of a table an owner."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import PlanError
from hotbed.sharding.column import ColumnWise
from hotbed.sharding.grid import GridWise
from hotbed.sharding.kind import Kept, Shape, Sharding
from hotbed.sharding.row import RowWise
from hotbed.sharding.whole import Replicated, TableWise

__all__ = ["check_kind"]

_IDS = 512
"""Most ids that are tried."""
_MOST = 2**63
_OURS = (Replicated, TableWise, RowWise, ColumnWise, GridWise)


def check_kind(kind: Sharding, table: Shape, name: str, world_size: int) -> None:
    """Raise PlanError where the methods of `kind` contradict each other: an element without a rank or with
    several, or an owner that does not keep the row. Some hundred ids are tried.
    """
    if type(kind) in _OURS:
        return
    named = f"Table {name!r}, sharding {kind.name!r}"
    shards = [
        _checked(kind.kept(table, rank, world_size), table, named) for rank in range(world_size)
    ]
    cut_by_row = any(s is not None and (s.first, s.stride, s.owns) != (0, 1, None) for s in shards)
    cut_by_column = any(s is not None and s.end - s.begin < table.dim for s in shards)
    owner_rule = kind.owner_rule(table)
    if cut_by_row and (owner_rule is None or cut_by_column):
        why = (
            "cuts columns, too" if cut_by_column else "has no owner_rule(), such as OwnerRule.given"
        )
        raise PlanError(f"{named}: kept() cuts rows and {why}; rows could not be found.")
    ids = _ids_of(table)
    keeps = torch.zeros((world_size, len(ids), table.dim), dtype=torch.bool)
    for rank, shard in enumerate(shards):
        if shard is not None:
            keeps[rank, _rows_in(shard, ids, named), shard.begin : shard.end] = True
    wanted = world_size if kind.replicated else 1
    wrong = torch.nonzero(keeps.sum(0) != wanted)
    if len(wrong):
        at, column = wrong[0].tolist()
        raise PlanError(
            f"{named}: kept() gives column {column} of id {int(ids[at])} to "
            f"{int(keeps[:, at, column].sum())} ranks, and it must have {wanted}."
        )
    for column in sorted({shard.begin for shard in shards if shard is not None}):
        owners = kind.owner_of(table, ids.clone(), world_size, column)
        if (
            not isinstance(owners, Tensor)
            or owners.dtype != torch.int64
            or owners.shape != ids.shape
        ):
            raise PlanError(f"{named}: owner_of() must return an int64 tensor, a rank for each id.")
        if len(owners) and not (0 <= int(owners.min()) and int(owners.max()) < world_size):
            raise PlanError(f"{named}: owner_of() names a rank outside [0, {world_size}).")
        lost = torch.nonzero(~keeps[owners, torch.arange(len(ids)), column]).flatten()
        if len(lost):
            at = int(lost[0])
            raise PlanError(
                f"{named}: owner_of() says that rank {int(owners[at])} has column {column} of id "
                f"{int(ids[at])}, and kept() does not."
            )
    _refuse_other_rule(kind, table, ids, world_size, named)


def _refuse_other_rule(
    kind: Sharding, table: Shape, ids: Tensor, world_size: int, named: str
) -> None:
    """Raise PlanError where the core would find another owner by `owner_rule` than `owner_of` names."""
    rule = kind.owner_rule(table)
    if rule is None or rule is _core.OwnerRule.given:
        return
    by_rule = torch.empty_like(ids)
    _core.find_owners(ids.data_ptr(), len(ids), world_size, rule, by_rule.data_ptr())
    owners = kind.owner_of(table, ids.clone(), world_size)
    other = torch.nonzero(by_rule != owners).flatten()
    if len(other):
        at = int(other[0])
        raise PlanError(
            f"{named}: owner_of() says that rank {int(owners[at])} has id {int(ids[at])}, and owner_rule() = "
            f"OwnerRule.{rule.name} that rank {int(by_rule[at])} has it. Return OwnerRule.given, by which "
            "owner_of() counts."
        )


def _checked(shard: object, table: Shape, named: str) -> Kept | None:
    if shard is None:
        return None
    if not isinstance(shard, Kept):
        raise PlanError(f"{named}: kept() must return a Kept or None, not {shard!r}.")
    if any(type(number) is not int for number in shard[:4]):
        raise PlanError(f"{named}: kept() returns {shard}, whose numbers must be ints.")
    if not (0 <= shard.first < _MOST and 0 < shard.stride < _MOST):
        raise PlanError(
            f"{named}: kept() returns {shard}; first must be in [0, 2**63), and stride in [1, 2**63)."
        )
    if not 0 <= shard.begin < shard.end <= table.dim:
        raise PlanError(
            f"{named}: kept() returns {shard}, which is no part of {table.dim} columns."
        )
    if table.rows is not None and shard.owns is not None:
        raise PlanError(f"{named}: kept() returns owns=, which is for dynamic tables.")
    return shard


def _ids_of(table: Shape) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    if table.rows is None:
        edges = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
        return torch.cat([edges, torch.randint(-(2**62), 2**62, (_IDS,), generator=drawn)])
    if table.rows <= _IDS:
        return torch.arange(table.rows)
    some = torch.randint(0, table.rows, (_IDS,), generator=drawn)
    return torch.cat([torch.arange(64), some, torch.arange(table.rows - 64, table.rows)])


def _rows_in(shard: Kept, ids: Tensor, named: str) -> Tensor:
    if shard.owns is None:
        return ((ids >= shard.first) & ((ids - shard.first) % shard.stride == 0)) | (
            torch.tensor(shard.first == 0 and shard.stride == 1)
        )
    found = shard.owns(ids.clone())
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != ids.shape:
        raise PlanError(f"{named}: owns() must return a bool tensor, one for each id.")
    return found
