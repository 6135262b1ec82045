"""Launches and notes of a step while it becomes a CUDA graph (`hotbed.graphs`).

A graph repeats launches and copies between buffers of the device. Whatever the host says anew in each
step (a rule's numbers), asks (whether the last step was taken) or keeps count of is no part of it:
while a step is recorded, that is put into `before` and `after`, which the host does around a replay.

Threading: one step of a process is recorded at a time. Backward's threads see the recording; work of
other threads, which is on streams that are not recorded, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Recording", "Rehearsal", "now_or_after", "recording", "staged", "upload_into", "use"]

_ALIGNED = 32  # integers: a buffer begins where torch's own would


class Rehearsal:
    """A step that runs as ever, watched for what a recording of it will need.

    Attributes:
        room: integers of all lines.
        tables: those that were looked up.
    """

    def __init__(self) -> None:
        self.room = 0
        self.tables: dict[int, object] = {}


class Recording(Rehearsal):
    """A step whose launches are recorded, and which does nothing yet.

    Attributes:
        before: what the host does before a replay. False: the recording is of no use any more.
        after: what it does then, in this order.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        """`room`: integers that its lines take at most."""
        super().__init__()
        self.before: list[Callable[[], bool]] = []
        self.after: list[Callable[[], None]] = []
        # Not from the graph's own memory, in which buffers share places over time.
        self._arena = torch.zeros(room, dtype=torch.int64, device=device)
        self._host = torch.zeros(room, dtype=torch.int64, device="cpu")

    def lines(self, lines: Sequence[Sequence[int]]) -> Tensor:
        """A buffer that has `lines` when the recording is replayed."""
        packed = torch.tensor(lines, dtype=torch.int64, device="cpu")
        begin, end = self.room, self.room + packed.numel()
        self.room = -(-end // _ALIGNED) * _ALIGNED
        if self.room > len(self._host):
            raise RuntimeError(
                f"the step launches more than in its rehearsal ({len(self._host)} integers)"
            )
        self._host[begin:end] = packed.flatten()
        return self._arena[begin:end].view(packed.shape)

    def fill(self) -> None:
        """Copies all lines to the device; before the first replay."""
        self._arena.copy_(self._host)


_stage: Rehearsal | None = None


@contextmanager
def staged(stage: Rehearsal) -> Iterator[None]:
    """Let launches inside belong to `stage`."""
    global _stage
    if _stage is not None:
        raise RuntimeError("a step is recorded already")
    _stage = stage
    try:
        yield
    finally:
        _stage = None


def recording() -> Recording | None:
    """The recording under way, if the caller's work belongs to it."""
    if not isinstance(_stage, Recording):
        return None
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        return None
    return _stage


def upload_into(lines: Sequence[Sequence[int]]) -> Tensor | None:
    """Where a recording has lines of a launch; None where they are to be sent."""
    if _stage is None:
        return None
    now = recording()
    if now is not None:
        return now.lines(lines)
    count = sum(map(len, lines))
    _stage.room += -(-count // _ALIGNED) * _ALIGNED
    return None


def use(tables: Sequence[object]) -> None:
    """Tables are looked up."""
    if _stage is not None:
        _stage.tables.update((id(table), table) for table in tables)


def now_or_after(action: Callable[[], None]) -> None:
    """Does it; or after each replay, where a step is recorded."""
    now = recording()
    if now is None:
        action()
    else:
        now.after.append(action)
