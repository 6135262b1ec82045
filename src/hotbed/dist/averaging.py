"""The group over which DistributedDataParallel averages gradients."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as torch_dist
from torch._C import _distributed_c10d

from hotbed.dist.dense_gradients import DenseGradients
from hotbed.dist.ranks import Ranks
from hotbed.dist.timeouts import BACKWARD
from hotbed.ops.outside_graphs import outside_graphs

__all__ = ["AveragingGroup"]

_work_of: Any = getattr(_distributed_c10d, "_create_work_from_future")  # noqa: B009  (untyped)


class AveragingGroup(torch_dist.ProcessGroup):
    """A group of Gloo whose all-reduce says what the ranks wait for where one is gone, or waits elsewhere.
    ``loss.backward()`` raises it as a RuntimeError of torch's.

    Attributes:
        before_first: called before the ranks first do something in it; None: they have.
        gradients: those that are averaged in it, once they are known.
    """

    def __init__(self, group: torch_dist.ProcessGroup, ranks: Ranks) -> None:
        made: Any = super().__init__  # whose type knows one of its two forms
        made(torch_dist.get_rank(group), torch_dist.get_world_size(group))
        self._group, self._ranks = group, weakref.ref(ranks)
        self.before_first: Callable[[], object] | None = None
        self.gradients: DenseGradients | None = None

    @classmethod
    def over(cls, group: torch_dist.ProcessGroup, ranks: Ranks) -> torch_dist.ProcessGroup:
        """Return a group that averages over Gloo; of any other backend, `group` itself."""
        return cls(group, ranks) if torch_dist.get_backend(group) == "gloo" else group

    def getBackendName(self) -> str:
        return "hotbed"

    @outside_graphs
    def allreduce(self, *arguments: Any) -> Any:
        future = self._group.allreduce(*arguments).get_future()
        # The last to let go of a group must not be its own thread, which would wait for itself: a
        # callback runs there, and so keeps none.
        averaged = future.then(functools.partial(_finished, self._ranks))
        if self.gradients is not None:
            self.gradients.travel(arguments[0], averaged)
        return _work_of(averaged)

    def meet(self) -> None:
        """Call `before_first`, once."""
        before, self.before_first = self.before_first, None
        if before is not None:
            before()

    @outside_graphs
    def allgather(self, *arguments: Any) -> Any:
        self.meet()
        return self._group.allgather(*arguments)

    @outside_graphs
    def broadcast(self, *arguments: Any) -> Any:
        self.meet()
        return self._group.broadcast(*arguments)


def _finished(kept: weakref.ref[Ranks], future: Any) -> Any:
    try:
        return future.value()
    except RuntimeError:
        ranks = kept()
        if ranks is None:
            raise
        with ranks.listening(BACKWARD):
            raise
