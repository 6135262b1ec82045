"""Ctrl-C that is asked for after a step, and does not cut one in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as torch_dist

from hotbed.train.callbacks import Callback

__all__ = ["Interrupts", "stop_on_interrupt"]


class Interrupts(Callback):
    """How often Ctrl-C was pressed inside `stop_on_interrupt`; a callback that stops a run then."""

    def __init__(self) -> None:
        self.count = 0

    def should_stop(self) -> bool:
        return self()

    def __call__(self) -> bool:
        return self.count > 0


@contextmanager
def stop_on_interrupt() -> Iterator[Interrupts]:
    """Let the first Ctrl-C be asked for instead of raised, so that no step is cut in two.

    Pass the yielded object to `fit` as a callback. From the second Ctrl-C on KeyboardInterrupt is
    raised as usual. Outside the main thread, where no handler can be set, nothing changes.

    Where torchrun has started the process, it sends SIGTERM when it gets Ctrl-C: that is asked for, too.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.count += 1
        if interrupts.count > 1:
            raise KeyboardInterrupt

    def note_end(number: int, frame: FrameType | None) -> None:
        interrupts.count = max(1, interrupts.count)

    noted = {signal.SIGINT: note}
    if torch_dist.is_available() and torch_dist.is_torchelastic_launched():
        noted[signal.SIGTERM] = note_end
    before = {number: signal.signal(number, handler) for number, handler in noted.items()}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
