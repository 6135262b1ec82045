"""Errors that a device finds in a batch or a step, and the host raises when it knows of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hotbed.errors import HotbedError
from hotbed.ops.gpu.recording import now_or_after, recording
from hotbed.table.gradients import WaitingGradient
from hotbed.table.lookups import StoredTable

__all__ = ["DeferredError", "ReportedGradient", "raise_deferred_errors"]


class DeferredError:
    """Integers on their way to the host, and what they mean. One that was made while a step was
    recorded is sent anew after each replay.

    Threading: for the training thread.
    """

    def __init__(
        self,
        reported: Tensor,
        error_of: Callable[[list[int]], HotbedError | None],
        table: StoredTable,
        *,
        reader: bool = False,
    ) -> None:
        """`reported`: (n,) integers on the device, copied behind what is launched so far. `error_of`: called
        once with them; the error to raise, or None if all was good. `table`: its next forward asks.
        `reader`: no training is concerned, only the thread that makes the notice."""
        self._error_of = error_of
        self._thread = threading.get_ident()
        self._of_reader = reader
        self.error: HotbedError | None = None
        now_or_after(lambda: self._send(reported, table))

    def _send(self, reported: Tensor, table: StoredTable) -> None:
        self._event: torch.cuda.Event | None = None
        if reported.device.type == "cuda":
            self._host = torch.empty(
                reported.shape, dtype=reported.dtype, device="cpu", pin_memory=True
            )
            self._host.copy_(reported, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(reported.device))
        else:
            self._host = reported.clone()
        self._taken, self.error = False, None
        _errors_of(table).append(self)

    def concerns(self, training: bool) -> bool:
        """Whether the thread that asks, in a training forward or not, is to hear of it."""
        return self._thread == threading.get_ident() or (training and not self._of_reader)

    @property
    def ready(self) -> bool:
        """Whether they have arrived."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def pop(self) -> HotbedError | None:
        """The error that they tell of, the first time it is asked for; waits for them."""
        if self._taken:
            return None
        if self._event is not None:
            self._event.synchronize()
        self._taken = True
        self.error = self._error_of(self._host.numpy().tolist())
        return self.error


class ReportedGradient(WaitingGradient):
    """Gradients that wait for a step on a device, and the errors that come from there."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred_errors: deque[DeferredError] = deque()
        """On their way from the device, in their order."""


def _errors_of(table: StoredTable) -> deque[DeferredError]:
    assert isinstance(table.waiting, ReportedGradient)
    return table.waiting.deferred_errors


def raise_deferred_errors(
    tables: Sequence[StoredTable], *, training: bool = True, wait: bool = False
) -> None:
    """Raises the error of an earlier batch or step of these tables, if it has arrived.

    Args:
        training: the forward that asks is one of training, and hears of steps of other threads.
        wait: for all that are on their way: whoever reads rows waits for the device anyway, and hears
            of everything.
    """
    if recording() is not None:
        return
    for table in tables:
        errors = _errors_of(table)
        while errors and (wait or (errors[0].concerns(training) and errors[0].ready)):
            error = errors.popleft().pop()
            if error is not None:
                raise error
