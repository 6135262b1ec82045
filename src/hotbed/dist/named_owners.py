"""Owners of ids as a kind of sharding names them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hotbed.dist.shards import Shard
from hotbed.errors import PlanError
from hotbed.sharding import Sharding
from hotbed.tables import Table

__all__ = ["NamedOwners"]


class NamedOwners:
    """Table whose kind of sharding names the owner of each id, with the shards that these owners keep.

    Attributes:
        table: position among the tables of a layout.
        spec: of the table.
    """

    def __init__(
        self, table: int, kind: Sharding, spec: Table, shards: Iterable[Shard], size: int
    ) -> None:
        """`size`: how many ranks there are."""
        self.table, self.spec = table, spec
        self._kind, self._size = kind, size
        self._origins = {shard.rank: shard.part.origin for shard in shards}
        of_ranks = [self._origins.get(rank) for rank in range(size)]
        firsts = [2**63 - 1 if one is None else one.first for one in of_ranks]
        strides = [1 if one is None else one.stride for one in of_ranks]
        self._firsts, self._strides = (
            torch.tensor(some, dtype=torch.int64, device="cpu") for some in (firsts, strides)
        )

    def of(self, ids: Tensor) -> Tensor:
        """Return (n,) int64 ranks that own (n,) int64 ids.

        Raises:
            PlanError: they are no ranks, or do not keep the rows.
        """
        named = f"Table {self.spec.name!r}: owner_of() of sharding {self._kind.name!r}"
        owners = self._kind.owner_of(self.spec, ids.clone(), self._size)
        if not isinstance(owners, Tensor):
            raise PlanError(f"{named} must return a tensor, got {type(owners).__qualname__}.")
        if owners.dtype != torch.int64 or owners.shape != ids.shape:
            raise PlanError(
                f"{named} must return ({len(ids)},) int64 ranks; got {tuple(owners.shape)} {owners.dtype}."
            )
        outside = torch.nonzero((owners < 0) | (owners >= self._size)).flatten()
        if len(outside):
            at = int(outside[0])
            raise PlanError(
                f"{named} says that rank {int(owners[at])} has id {int(ids[at])}, and there are "
                f"{self._size} ranks."
            )
        strangers = torch.nonzero(~self._keep(owners, ids)).flatten()
        if len(strangers):
            rank, id_ = int(owners[strangers[0]]), int(ids[strangers[0]])
            if rank not in self._origins:
                raise PlanError(
                    f"{named}: rank {rank} owns ids and has no shard, such as id {id_}."
                )
            raise PlanError(f"{named} says that rank {rank} has id {id_}, and kept() does not.")
        return owners

    def _keep(self, owners: Tensor, ids: Tensor) -> Tensor:
        """Return (n,) bool: whether each owner keeps the row of its id. Else two ids could share a row."""
        if self.spec.rows is not None:
            firsts = self._firsts[owners]
            return (ids >= firsts) & ((ids - firsts) % self._strides[owners] == 0)
        kept = torch.zeros(ids.shape, dtype=torch.bool, device="cpu")
        for rank, origin in self._origins.items():
            mine = torch.nonzero(owners == rank).flatten()
            kept[mine] = True if origin.owns is None else origin.owns(ids[mine])
        return kept
