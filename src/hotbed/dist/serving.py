"""Answers of a rank that has no batches: to the lookups, steps and saves of the ranks that have some."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hotbed.dist.batch import serve_lookup, serve_rows
from hotbed.dist.clipping import CHANGE, NORM, SUM, Together, serve_infinities
from hotbed.dist.errors import PeerError, PeerLost, is_known_to_all
from hotbed.dist.gradients import serve_collect
from hotbed.dist.handshake import ENDED, MERGE, Handshake
from hotbed.dist.merging import serve_merge
from hotbed.dist.participant import serve_step
from hotbed.dist.ranks import Ranks

__all__ = ["Answer", "Serving"]

Answer = Callable[[Ranks, Handshake], None]
"""Part of a rank without batches in what the others have opened."""


class Serving:
    """Answers for the shards of this rank.

    Attributes:
        fault: of another rank at the last exchange, which may have ended it.
    """

    fault: Exception | None = None

    def __init__(
        self,
        ranks: Ranks,
        more: Mapping[str, Answer] | None = None,
        holds_back: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            more: answers by kind of exchange, beside those of every rank that has ended.
            holds_back: returns what `Ranks.serve` is given.
        """
        self._ranks, self._holds_back = ranks, holds_back
        self._answers: dict[str, Answer] = {
            "a lookup": serve_lookup,
            "a lookup of rows": serve_rows,
            "a step": serve_step,
            "a look for infinities": serve_infinities,
            SUM: self._serve_sum,
            NORM: self._serve_norm,
            CHANGE: self._serve_change,
            MERGE: serve_merge,
            "the end": _end,
            **(more or {}),
        }

    def until(self, last: str) -> None:
        """Answer until the others open an exchange of the kind `last`, and that, too.

        Raises:
            PeerError: another rank is gone.
            BaseException: this rank could not answer, which the others did not hear of.
        """
        kind = ""
        while kind != last:
            try:
                with self._ranks.reporting(ENDED):
                    opened = self._ranks.serve(holds_back=self._holds_back())
                    self._answers[opened.kind](self._ranks, opened)
                    kind, self.fault = opened.kind, None
            except Exception as error:
                heard = isinstance(error, PeerError) or is_known_to_all(error)  # by all ranks
                if isinstance(error, PeerLost) or not heard:
                    raise
                self.fault = error

    def _serve_sum(self, ranks: Ranks, opened: Handshake) -> None:
        collected = serve_collect(ranks, opened, 0)
        ranks.vote(SUM, fault=collected.fault)
        collected.keep()
        self._together = Together(ranks, collected.tables)

    def _serve_norm(self, ranks: Ranks, opened: Handshake) -> None:
        reported = opened.values[opened.ended.index(False)].contiguous()
        self._together.sum_norms(float(reported.view(torch.float64)[0]))

    def _serve_change(self, ranks: Ranks, opened: Handshake) -> None:
        reported = opened.values[opened.ended.index(False)].contiguous()
        self._together.change_own(int(reported[0]), float(reported.view(torch.float64)[1]))


def _end(ranks: Ranks, opened: Handshake) -> None:
    """The others have no more to ask."""
