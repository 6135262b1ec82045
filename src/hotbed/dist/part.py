"""What sharded tables do in a step: gradients go to the keepers, all vote, each steps what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotbed.dist.ranks import Ranks
from hotbed.dist.trip import Trip
from hotbed.errors import HotbedError
from hotbed.step.on_host import HostPart, rows_of
from hotbed.table.gradients import LeftRows

__all__ = ["ShardedPart"]


class ShardedPart:
    """`hotbed.table.part.Part`. Called by all ranks, with the same tables."""

    def __init__(self, optimizer: Any, ranks: Ranks) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self._host = HostPart(optimizer)
        self._tables: list[tuple[Any, Any, Any]] = []
        self._stepped: list[tuple[Any, Any, Any]] = []

    def take_table(self, live: Any, rule: Any, hyper: Any, share: Any = None) -> None:
        self._tables.append((live, rule, hyper))

    def take_dense(self, parameter: Tensor, grad: Tensor, index: int, position: int) -> None:
        raise NotImplementedError("dense parameters lie on the host")

    @property
    def idle(self) -> bool:
        return not self._tables

    def decide(self, *, beside: bool) -> bool:
        fault: HotbedError | None = None
        trips, own = self._ranks.waiting, []
        try:
            own = [self._by_trip(live, rule, trips) for live, rule, _ in self._tables]
        except HotbedError as error:
            fault = error
        flags = [int(grad is not None) for of_table in own for grad in of_table]
        flags = flags or [0] * (len(self._tables) * len(trips))
        told = self._ranks.agree("a step", flags, fault).any(0).view(len(self._tables), -1)
        for at, trip in enumerate(trips):
            wanted = [n for n in range(len(self._tables)) if bool(told[n, at])]
            if wanted:
                self._give(trip, [(self._tables[n][0], own[n][at]) for n in wanted])
        self._stepped = [self._tables[n] for n in range(len(self._tables)) if bool(told[n].any())]
        try:
            for live, _, hyper in self._stepped:
                for part in live.place.own.values():
                    rows = rows_of(part) or _none_of(part)
                    self._host.take_table(part, part.rule, hyper, rows)
            self._host.decide(beside=beside)
        except HotbedError as error:
            fault = error
        finally:
            for live, _, _ in self._stepped:
                for part in live.place.own.values():
                    part.drop_gradient()
        self._ranks.agree("a step", fault=fault)
        return True

    def _by_trip(self, live: Any, rule: Any, trips: list[Trip]) -> list[Tensor | None]:
        """The gradient of a table as (n, dim) for each trip; None where there is none."""
        self._optimizer.check_hold(live, rule)
        rows = rows_of(live)
        found: list[Tensor | None] = []
        for trip in trips:
            if rows is None or live.place not in trip.places:
                found.append(None)
                continue
            t = trip.places.index(live.place)
            first, count = trip.first_slots[t], len(trip.asked[t])
            here = torch.nonzero((rows.slots >= first) & (rows.slots < first + count)).flatten()
            grad = torch.zeros((count, live.spec.dim), dtype=live.spec.compute_dtype)
            grad.index_add_(0, rows.slots[here] - first, rows.rows[here])
            found.append(grad if len(here) else None)
        return found

    def _give(self, trip: Trip, grads: list[tuple[Any, Tensor | None]]) -> None:
        at = {trip.places.index(live.place): grad for live, grad in grads}
        trip.give([at.get(t) for t in range(len(trip.places))], sorted(at))

    def apply(self) -> None:
        self._host.apply()
        for _, rule, _ in self._stepped:
            rule.restart(rule.steps + 1, rule.base, rule.last)

    def finishing(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


def _none_of(live: Any) -> LeftRows:
    """No rows: a step all the same."""
    rows = torch.empty((0, live.spec.dim), dtype=live.spec.compute_dtype)
    return LeftRows(torch.empty(0, dtype=torch.int64), rows, True, True)
