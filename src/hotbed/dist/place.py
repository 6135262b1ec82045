"""Rows that several ranks keep: each owns some shards, and asks the others for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.batch import ShardedLookups
from hotbed.dist.clipping import ShardedGradient
from hotbed.dist.errors import NO_COPY
from hotbed.dist.gradients import SharedHandle
from hotbed.dist.participant import ShardedParticipant
from hotbed.dist.ranks import Ranks
from hotbed.dist.row_codecs import Codecs
from hotbed.dist.rows_of_ranks import ShardedRows
from hotbed.dist.shards import Shard, TableOnRanks
from hotbed.dist.waiting_gradients import WaitingOnRanks
from hotbed.errors import OptimizerError, TableError
from hotbed.optim.base import TableOptimizer
from hotbed.sharding import Sharding
from hotbed.table.clipping import ClippingCall, Gradient
from hotbed.table.live import LiveTable
from hotbed.table.lookups import StoredTable
from hotbed.table.participant import SteppingOptimizer
from hotbed.table.place import MovedTable
from hotbed.table.place_factory import PlaceFactory
from hotbed.tables import SUMMED, Table

__all__ = ["Sharded"]


class Sharded(ShardedRows):
    """A slot numbers the distinct ids of each lookup that waits for its step, one lookup after the other.

    Attributes:
        ranks: the processes that share the table.
    """

    rows_move = True

    def __init__(
        self,
        core: _core.Table,
        spec: Table,
        lookups: ShardedLookups,
        number: int,
        kind: Sharding,
        shards: Sequence[Shard],
        own: Mapping[Shard, LiveTable],
        codecs: Codecs,
    ) -> None:
        super().__init__(core, spec, lookups)
        self.number, self.kind, self.codecs = number, kind, codecs
        self.shards, self.own = list(shards), dict(own)
        owner_rule = kind.owner_rule(spec)
        given = owner_rule is _core.OwnerRule.given
        of_rows = len({shard.owner for shard in self.shards})
        among = lookups.ranks.size if given else of_rows
        self.owners = 1 if owner_rule is None else among
        self.bag_parts = 1 if owner_rule is None else of_rows
        if spec.combiner not in SUMMED or given:
            self.bag_parts = 0
        machines = lookups.ranks.machines
        several = machines is not None and machines.are_several
        self.by_machine = several and not (kind.replicated or given)
        self._handles = [live.parameter for live in self.own.values()]  # they keep gradients

    @property
    def stepped_with(self) -> Ranks:
        return self.ranks

    # -- rows of this rank -----------------------------------------------------------------------

    def tables_here(self, live: object) -> list[Any]:
        return list(self.own.values())

    def tables_to_save(self, live: object) -> list[Any]:
        return [t for s, t in self.own.items() if not s.replica or s.rank == 0]

    def refuse_local_change(self, wanted: str) -> None:
        if self.ranks.size > 1 and any(shard.replica for shard in self.shards):
            raise TableError(
                f"Table {self.core.name!r} is replicated: {wanted} with local=True would change the copy of "
                "this rank alone. Leave local=True out, on all ranks."
            )

    def parts(
        self, live: object, ids: Tensor, rows: Tensor
    ) -> Iterator[tuple[Any, Tensor, Tensor]]:
        for shard, own in self.own.items():
            found, here = shard.part.origin.ids_in_part(ids)
            at = slice(None) if here is None else here
            yield own, found, rows[at][:, shard.part.columns].contiguous()

    # -- states ----------------------------------------------------------------------------------

    def refuse_exact(self, optimizer: str) -> None:
        for live in self.own.values():
            live.place.refuse_exact(optimizer)

    def refuse_rule(self, optimizer: str, options: _core.RuleOptions, *, fused: bool) -> None:
        named = f"{optimizer} (table {self.core.name!r})"
        if fused:
            raise OptimizerError(
                f"{named}: fused=True updates tables during backward, where ranks cannot agree on it."
            )
        cut = any(shard.part.dim < self.spec.dim for shard in self.shards)
        if cut and any(one_a_row for _, one_a_row, _ in _core.state_planes(options)):
            raise OptimizerError(
                f"{named}: its rule has one state for a whole row, and the table is cut by columns, so that "
                'no rank has a whole row. Give Table(sharding="row"), or another rule.'
            )

    def make_states(self, rule: _core.TableRule | None) -> None:
        for live in self.own.values():
            made = None
            if rule is not None:
                initial = rule.initial_accumulator_value
                made = _core.TableRule.make(live.core, rule.options, initial, rule.exact)
            live.rule = made

    def reset_states(self, rule: _core.TableRule, firsts: Sequence[float]) -> None:
        for live in self.own.values():
            assert live.rule is not None
            live.place.reset_states(live.rule, firsts)

    def restart(
        self, rule: _core.TableRule, steps: int, base: Sequence[float], last: _core.Hyperparameters
    ) -> None:
        super().restart(rule, steps, base, last)
        for live in self.own.values():
            assert live.rule is not None
            live.rule.restart(steps, base, last)

    def handle_kind(self, follows: bool, half_loaded: bool) -> type[SharedHandle]:
        return SharedHandle

    def nothing_waiting(self) -> WaitingOnRanks:
        return WaitingOnRanks(self, self.ranks.waiting)

    def gradients_of(
        self, tables: Sequence[StoredTable], call: ClippingCall
    ) -> list[Gradient | None]:
        return ShardedGradient.every(self.ranks, cast(Sequence[TableOnRanks], tables), call)

    def make_participant(
        self, optimizer: SteppingOptimizer, tables: Sequence[StoredTable]
    ) -> ShardedParticipant:
        return ShardedParticipant(cast(TableOptimizer, optimizer), self.ranks)

    # -- moving ----------------------------------------------------------------------------------

    def refuse_to_share(self) -> None:
        raise TableError(f"Table {self.core.name!r} is shared by ranks already.")

    def for_copy(
        self, memo: dict[int, object] | None
    ) -> tuple[PlaceFactory, Callable[[MovedTable], None] | None]:
        raise TableError(f"Table {self.core.name!r} is shared by ranks, so {NO_COPY}")

    def refuse_device(self, device: torch.device, by_kernels: ModuleType) -> None:
        raise TableError(f"Table {self.core.name!r} is shared by ranks, on their hosts so far.")

    def move_to_device(
        self, live: MovedTable, device: torch.device, by_kernels: ModuleType
    ) -> None:
        self.refuse_device(device, by_kernels)
