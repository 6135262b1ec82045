"""A step of sharded tables: gradients go to the owners, all vote, each steps the rows that it owns."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from hotbed import _core
from hotbed.dist.declarations import name_of, of_optimizer
from hotbed.dist.dense_gradients import UNAVERAGED
from hotbed.dist.errors import PeerError
from hotbed.dist.gradients import Collected, collect, serve_collect
from hotbed.dist.handshake import Handshake
from hotbed.dist.ranks import Ranks
from hotbed.dist.shards import TableOnRanks
from hotbed.errors import OptimizerError
from hotbed.optim.base import TableOptimizer
from hotbed.optim.options import NUMBERS
from hotbed.places.host.step import NO_ROWS, HostParticipant
from hotbed.table.gradients import GradientShare
from hotbed.table.locks import alone
from hotbed.table.sparse_gradient import plain_access

__all__ = ["ShardedParticipant", "serve_step"]

_FIRST = 4
"""Numbers of a step before those of its tables."""
_Taken = tuple[TableOnRanks, _core.TableRule, _core.Hyperparameters]


class ShardedParticipant:
    """`hotbed.table.participant.StepParticipant`. Called by all ranks, with the same tables.

    What the host steps besides, it steps with them, so that all ranks vote on it.
    """

    includes_host = True

    def __init__(self, optimizer: TableOptimizer, ranks: Ranks) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self._host = HostParticipant(optimizer)
        self._tables: list[_Taken] = []
        self._stepped: list[_Taken] = []
        self._dense: list[tuple[int, int]] = []
        """Group of each dense parameter with a gradient, and its position there."""
        self._dense_parameters: list[Tensor] = []

    def add_table(
        self,
        live: Any,  # a cast of each would take as long as the rest
        rule: _core.TableRule,
        hyper: _core.Hyperparameters,
        share: GradientShare | None = None,
    ) -> None:
        if live.place.stepped_with is not self._ranks:
            self._host.add_table(live, rule, hyper, share)
            return
        self._optimizer.check_hold(live, rule)
        self._tables.append((live, rule, hyper))

    def add_dense(self, parameter: Tensor, grad: Tensor, index: int, position: int) -> None:
        self._dense.append((index, position))
        self._dense_parameters.append(parameter)
        self._host.add_dense(parameter, grad, index, position)

    @property
    def idle(self) -> bool:
        return not self._tables

    def decide(self, *, beside: bool) -> bool:
        numbers = self._numbers()
        live = [live for live, _, _ in self._tables]
        declared = of_optimizer(self._optimizer)
        with plain_access():
            # Numbers travel in the handshake of `collect`, and nothing comes between that and the gradients
            # it announces; so ranks compare them afterwards, before anything is applied.
            opened, collected = collect(self._ranks, "a step", live, numbers, declared)
            fault = self._fault_of_numbers(opened, numbers) or self._fault_of_dense()
            self._vote(collected, fault or collected.fault, beside=beside)
        return True

    def serve(self, opened: Handshake) -> None:
        """The part of a rank that has no batch: decides and applies."""
        width = _width(opened.values[opened.ended.index(False)].tolist(), len(self._tables))
        collected = serve_collect(self._ranks, opened, width)
        self._vote(collected, collected.fault, beside=False)
        self.apply()

    def _vote(self, collected: Collected, fault: Exception | None, *, beside: bool) -> None:
        """Decide the step on all ranks; ranks without batches are here, too. `fault`: of this rank."""
        chosen = set(collected.tables)
        self._stepped = [one for one in self._tables if one[0] in chosen]
        try:
            self._host.add_without_rows(self._stepped)  # they count on all ranks
            for live, _, hyper in self._stepped:
                for part in live.place.own.values():
                    rows = collected.rows_of(live, part) or NO_ROWS
                    of_part = part.rule
                    assert of_part is not None
                    self._host.add_rows(part, of_part, hyper, rows)
            if fault is None:
                self._host.decide(beside=beside)
        except Exception as error:
            fault = error
        self._ranks.vote("a step", fault=fault)

    def _numbers(self) -> list[int]:
        """Steps taken by all tables; how many groups of numbers there are; how many dense parameters have a
        gradient, and a hash of which; then, for `_heard`, the group of each table, and the bits of the
        numbers, those of groups without tables, too."""
        hypers = [hyper for _, _, hyper in self._tables]
        of_groups = [options.hyper for options in self._optimizer.composition.groups]
        distinct = list({id(hyper): hyper for hyper in [*hypers, *of_groups]}.values())
        at = {id(hyper): n for n, hyper in enumerate(distinct)}
        numbers = [float(getattr(hyper, name)) for hyper in distinct for name in NUMBERS]
        bits = struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))
        steps = sum(int(rule.steps) for _, rule, _ in self._tables)
        which = zlib.crc32(repr(self._dense).encode())
        dense = len(self._dense), which
        return [steps, len(distinct), *dense, *(at[id(hyper)] for hyper in hypers), *bits]

    def _fault_of_numbers(self, opened: Handshake, own: list[int]) -> PeerError | None:
        """Return the error where another rank steps with other numbers."""
        for rank, reported in enumerate(opened.values[:, : len(own)].tolist()):
            if opened.ended[rank] or reported == own:
                continue
            if reported[0] != own[0]:
                return PeerError(
                    f"Rank {rank} has taken {reported[0]} steps of tables, and rank {self._ranks.rank} "
                    f"{own[0]}. Load the state of the optimizer on all ranks, or on none."
                )
            if reported[2:_FIRST] != own[2:_FIRST]:
                which = "others" if reported[2] == own[2] else str(own[2])
                return PeerError(
                    f"Rank {rank} has gradients of {reported[2]} dense parameters, and rank "
                    f"{self._ranks.rank} of {which}. Call backward() and zero_grad() alike on all ranks."
                )
            count = len(self._tables)
            lives = [live for live, _, _ in self._tables]
            whose = {at: f"table {t.name!r}" for at, t in zip(own[_FIRST:], lives, strict=False)}
            pairs = zip(_groups(reported, count), _groups(own, count), strict=True)
            for at, pair in enumerate(pairs):
                for name, theirs, ours in zip(NUMBERS, *pair, strict=True):
                    if theirs != ours:
                        return PeerError(
                            f"Rank {rank} steps {whose.get(at, 'dense parameters')} with {name}={theirs}, "
                            f"rank {self._ranks.rank} with {ours}. Schedules must be alike on all ranks."
                        )
        return None

    def _fault_of_dense(self) -> OptimizerError | None:
        """Return the error where a dense gradient is that of this rank alone."""
        gradients = self._ranks.dense
        own = None if gradients is None else gradients.first_own(self._dense_parameters)
        if own is None:
            return None
        return OptimizerError(f"Dense parameter {name_of(own)}: {UNAVERAGED}")

    def apply(self) -> None:
        self._host.apply()
        self._ranks.steps += 1

    def finishing(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


def serve_step(ranks: Ranks, opened: Handshake) -> None:
    """The part of a rank that has no batch in a step of the others, with their numbers."""
    tables = [ranks.table(number) for number in opened.tables]
    reported = opened.values[opened.ended.index(False)].tolist()
    try:
        part = _participant_without_batch(ranks, tables, reported, opened.declared)
    except Exception as error:  # of this rank, which the others hear of in the vote
        serve_collect(ranks, opened, _width(reported, len(tables)))
        ranks.vote("a step", fault=error)
        raise
    with alone(tables):
        part.serve(opened)


def _participant_without_batch(
    ranks: Ranks, tables: Sequence[TableOnRanks], reported: list[int], declared: int
) -> ShardedParticipant:
    """`reported`: the numbers of a rank with a batch, as of `ShardedParticipant._numbers`. `declared`: the
    digest of its optimizer."""
    optimizer = cast(TableOptimizer | None, tables[0].optimizer)
    if optimizer is None:
        raise OptimizerError(
            f"Rank {ranks.rank} has no optimizer, and answers for its shards. Keep it until all have left "
            "Join, or memory hosts are released."
        )
    if of_optimizer(optimizer).digest != declared:
        raise OptimizerError(
            f"Rank {ranks.rank} answers for its shards with another optimizer, or other options, than the "
            f"ranks with batches, of the type {type(optimizer).__name__}. Make the same on all ranks."
        )
    part = ShardedParticipant(optimizer, ranks)
    for numbers, live in zip(_heard(reported, len(tables)), tables, strict=True):
        hyper = _core.Hyperparameters()
        for name, number in zip(NUMBERS, numbers, strict=True):
            setattr(hyper, name, number)
        assert live.rule is not None
        part.add_table(live, live.rule, hyper)
    return part


def _width(reported: list[int], tables: int) -> int:
    """Return the number of int64 words that `ShardedParticipant._numbers` emits."""
    return _FIRST + tables + reported[1] * len(NUMBERS)


def _groups(reported: list[int], tables: int) -> list[tuple[float, ...]]:
    """The numbers of each group."""
    begin, width = _FIRST + tables, len(NUMBERS)
    rows = [reported[begin + width * n : begin + width * (n + 1)] for n in range(reported[1])]
    return [struct.unpack(f"{width}d", struct.pack(f"{width}q", *row)) for row in rows]


def _heard(reported: list[int], tables: int) -> list[tuple[float, ...]]:
    """For each table its numbers."""
    groups = _groups(reported, tables)
    return [groups[at] for at in reported[_FIRST : _FIRST + tables]]
