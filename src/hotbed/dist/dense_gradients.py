"""Which dense gradients of a rank were not averaged over the ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hotbed.dist.errors import PeerError

__all__ = ["UNAVERAGED", "DenseGradients"]

UNAVERAGED = (
    "its gradient is that of this rank alone: DistributedDataParallel averages at the first backward after a "
    "forward of the model, unless that fails. Call zero_grad(), and backward once after each forward, the "
    "last one outside of no_sync()."
)
_HALF_DONE = "unmarked_param_indices", "rebuilt parameter indices"
"""What torch asserts in a forward where a backward has failed in the middle."""


class DenseGradients:
    """Dense parameters whose gradients have grown since they were last averaged.

    DistributedDataParallel averages all of them, in pieces, at the first backward after a forward.
    """

    def __init__(self, parameters: Iterable[Tensor], averaged: DistributedDataParallel) -> None:
        """`parameters`: all that DistributedDataParallel averages."""
        # Parameters keep this by their hooks, and a reducer keeps parameters.
        self._averaged = weakref.ref(averaged)
        self._every: set[int] = set()
        self._own: set[int] = set()
        self._size = self._travelled = 0
        self._averages: list[torch.futures.Future[object]] = []
        for parameter in parameters:
            self._every.add(id(parameter))
            self._size += parameter.numel()
            parameter.register_post_accumulate_grad_hook(self._grown)  # type: ignore[no-untyped-call]

    def first_own(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """Return the first of these whose gradient is that of this rank alone; None: all are averaged."""
        own = self._own if self._is_complete() else self._every
        return next((one for one in parameters if id(one) in own), None)

    def travel(self, pieces: Iterable[Tensor], averages: torch.futures.Future[object]) -> None:
        """Count what is being averaged in a backward. `averages`: done once it is."""
        self._averages.append(averages)
        self._travelled += sum(piece.numel() for piece in pieces if piece.is_floating_point())
        if self._travelled >= self._size:
            self._own.clear()

    @contextlib.contextmanager
    def of_forward(self) -> Iterator[None]:
        """For a ``with`` statement around a forward, which begins anew after a backward that failed.

        Raises:
            PeerError: torch cannot.
        """
        self._travelled = 0
        averages, self._averages = self._averages, []
        if not self._is_complete():
            self._own |= self._every
            for each in averages:
                each.wait()  # else they would come into the gradients of the next backward
            self._reducer._reset_state()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerError) or not any(t in str(error) for t in _HALF_DONE):
                raise
            raise PeerError(
                "An earlier loss.backward() has failed, and DistributedDataParallel cannot go on after it. "
                "Start the processes again, and load the last checkpoint."
            ) from error

    @property
    def _reducer(self) -> Any:
        averaged = self._averaged()
        assert averaged is not None, "the model is there"
        return averaged.reducer

    def _is_complete(self) -> bool:
        """Return False where a backward has failed between averaging and writing the averages."""
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def _grown(self, parameter: Tensor) -> None:
        self._own.add(id(parameter))
