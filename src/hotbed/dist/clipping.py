"""Norms and changes of gradients at their owners: clipping, and a GradScaler's look for infinities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hotbed.dist.declarations import Declaration, of_clipping
from hotbed.dist.gradients import collect
from hotbed.dist.handshake import Handshake
from hotbed.dist.ranks import Ranks
from hotbed.dist.shards import TableOnRanks
from hotbed.dist.waiting_gradients import waiting_of
from hotbed.table.clipping import ClippingCall, Gradient
from hotbed.table.live import LiveTable
from hotbed.table.sparse_gradient import norm_of_rows

__all__ = [
    "CHANGE",
    "NORM",
    "SUM",
    "ShardedGradient",
    "Together",
    "look_for_infinities",
    "serve_infinities",
]

SUM, NORM, CHANGE = "a sum of gradients", "a norm of gradients", "a change of gradients"
LOOK = "a look for infinities"
SCALE, CLAMP = range(2)


class Together:
    """Gradients at their owners, of several tables, as they are clipped."""

    def __init__(self, ranks: Ranks, tables: Sequence[TableOnRanks]) -> None:
        """`tables`: of which any rank has a gradient."""
        self._ranks, self._tables = ranks, list(tables)
        self._rows: list[list[Tensor]] = []
        for live in tables:
            waiting_of(live).collect(live.parameter)
            parts = live.place.own.values()
            self._rows.append([rows for part in parts for rows in _summed(part)])
        self._norms: dict[float, list[Tensor]] = {}

    def norm(self, table: int, norm_type: float) -> Tensor:
        """Over all ranks; of all tables at once."""
        if norm_type not in self._norms:
            self._ranks.handshake(NORM, _bits([norm_type]), self._numbers)
            self._norms[norm_type] = self.sum_norms(norm_type)
        return self._norms[norm_type][table]

    def change(self, how: int, value: float, table: int) -> None:
        """All tables, when the first is asked for."""
        if table == 0:
            self._ranks.handshake(CHANGE, [how, *_bits([value])], self._numbers)
            self.change_own(how, value)

    @property
    def _numbers(self) -> list[int]:
        return [live.place.number for live in self._tables]

    def sum_norms(self, norm_type: float) -> list[Tensor]:
        own = torch.zeros(len(self._tables), dtype=torch.float64, device="cpu")
        for t, (live, rows) in enumerate(zip(self._tables, self._rows, strict=True)):
            if self._ranks.rank == 0 or not any(shard.replica for shard in live.place.shards):
                norms = [norm_of_rows(r.double(), norm_type) for r in rows if r.numel()]
                own[t] = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else 0.0
        reported = self._ranks.handshake(NORM, _bits(own.tolist()), self._numbers).values
        norms_of_ranks = reported.contiguous().view(torch.float64)
        return [
            torch.linalg.vector_norm(norms_of_ranks[:, t], norm_type).to(live.compute_dtype)
            for t, live in enumerate(self._tables)
        ]

    def change_own(self, how: int, value: float) -> None:
        for rows in self._rows:
            for some in rows:
                if how == SCALE:
                    some.mul_(torch.tensor(value, dtype=some.dtype, device="cpu"))
                else:
                    some.clamp_(-value, value)


class ShardedGradient:
    """`hotbed.table.clipping.Gradient`, at the owners. Called by all ranks."""

    device = torch.device("cpu")

    def __init__(self, together: Together, table: int) -> None:
        self._together, self._table = together, table

    @classmethod
    def every(
        cls, ranks: Ranks, tables: Sequence[TableOnRanks], call: ClippingCall
    ) -> list[Gradient | None]:
        """Bring the gradients of tables to their owners."""
        with ranks.reporting(SUM):
            _, collected = collect(ranks, SUM, tables, declared=of_clipping(call))
        ranks.vote(SUM, fault=collected.fault)
        collected.keep()
        together = Together(ranks, collected.tables)
        made = {live: cls(together, t) for t, live in enumerate(collected.tables)}
        return [made.get(live) for live in tables]

    def norm(self, norm_type: float) -> Tensor | None:
        return self._together.norm(self._table, norm_type)

    def scale(self, factor: Tensor) -> None:
        self._together.change(SCALE, float(factor), self._table)

    def clamp(self, limit: float) -> None:
        self._together.change(CLAMP, limit, self._table)


def look_for_infinities(
    ranks: Ranks,
    tables: Sequence[TableOnRanks],
    factor: float,
    declared: Declaration,
    unscale: Callable[[], bool],
) -> bool:
    """Return True if a gradient has a NaN or an infinity on any rank. Called by all ranks.

    Args:
        factor: by which gradients are scaled that clipping has brought to their owners.
        declared: what must be alike on all ranks.
        unscale: scales all other gradients; returns True if one of them has a NaN or an infinity.
    """
    ranks.handshake(
        LOOK, _bits([factor]), [live.place.number for live in tables], declared=declared
    )
    with ranks.reporting(LOOK):
        is_bad = unscale()
        grads = [live.waiting.look(live.parameter) for live in tables]
        rows = [grad._values() for grad in grads if grad is not None]
        rows += _scaled_at_owners(tables, factor)
    return _any_infinite(ranks, rows, is_bad)


def serve_infinities(ranks: Ranks, opened: Handshake) -> None:
    """The part of a rank that has no batch."""
    reported = opened.values[opened.ended.index(False)].contiguous()
    factor = float(reported.view(torch.float64)[0])
    _any_infinite(
        ranks, _scaled_at_owners([ranks.table(number) for number in opened.tables], factor)
    )


def _any_infinite(ranks: Ranks, rows: Iterable[Tensor], is_bad: bool = False) -> bool:
    """Return True if these rows of any rank have a NaN or an infinity, or any rank knows of one elsewhere
    (`is_bad`). Called by all ranks, those without a batch among them, whose shards may have some."""
    bad = is_bad or any(not bool(torch.isfinite(some).all()) for some in rows)
    return bool(ranks.handshake(LOOK, [int(bad)]).values.any())


def _scaled_at_owners(tables: Iterable[TableOnRanks], factor: float) -> list[Tensor]:
    """The collected gradients on this rank, scaled."""
    parts = [
        part for live in tables if waiting_of(live).at_owners for part in live.place.own.values()
    ]
    rows = [some for part in parts for some in _summed(part)]
    for some in rows:
        some.mul_(torch.tensor(factor, dtype=some.dtype, device="cpu"))
    return rows


def _bits(numbers: Sequence[float]) -> list[int]:
    found: list[int] = (
        torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.int64).tolist()
    )
    return found


def _summed(part: LiveTable) -> list[Tensor]:
    """The rows of a part's gradient, each once; changes to them count."""
    grad = part.waiting.look(part.parameter, each_once=True)
    return [] if grad is None else [grad._values()]
