"""Reports of what each rank waits for after a timeout, exchanged through the store of the process group."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as torch_dist
from torch.distributed import distributed_c10d

from hotbed.dist.errors import PeerError
from hotbed.dist.handshake import advice

__all__ = ["BACKWARD", "WaitReports", "meet", "store_of"]

BACKWARD = "loss.backward(), where gradients of dense layers travel"
"""Name of a wait that is no exchange."""

_PREFIX = "hotbed"
_OFTEN = 0.01
"""Seconds between two looks into the store."""
_GRACE = 5.0
"""Seconds, at most, that a rank which has waited too long gives the others to say what they wait for."""
_LONGEST = 500
"""Characters of what one says."""
_SILENT = "in none of Hotbed's calls, or has not waited as long"

_meetings: weakref.WeakKeyDictionary[torch_dist.ProcessGroup, dict[str, int]] = (
    weakref.WeakKeyDictionary()
)
"""How often processes of a group have met, all of them or some."""


class WaitReports:
    """Reports that the ranks of one group write after a timeout."""

    def __init__(
        self, group: torch_dist.ProcessGroup, rank: int, size: int, timeout: float
    ) -> None:
        """`timeout`: seconds after which a rank counts as gone."""
        self._store = store_of(f"waits/{group.group_name}")
        self._rank, self._size, self._timeout = rank, size, timeout

    def loss(self, error: BaseException, kind: str, call: str, waits: str, steps: int) -> str:
        """Why the ranks have nothing to do together any more.

        Args:
            error: that has shown it.
            kind: of the last exchange that this rank has begun;
            call: the same in words.
            waits: what it does instead; "": it waits in that.
            steps: that the ranks have taken.
        """
        text = " ".join(str(error).split())[:300]
        long = "too long" in text or "imed out" in text
        reported = self.reported(
            f"in {waits}, after {call}" if waits else f"in {call}", patient=long
        )
        advised = f"{advice([kind])} " if long else ""
        return (
            f"Another rank ended, or kept this one waiting for more than {self._timeout:g} s. {reported} "
            f"{advised}The tables here are as {steps} steps have left them. ({text})"
        )

    def reported(self, own: str, *, patient: bool) -> str:
        """A sentence on what each rank waits in.

        Args:
            own: this one, such as ``"a step (exchange 12)"``.
            patient: whether the others get some time to say it, as they wait, too.
        """
        said, grace = {self._rank: own}, min(self._timeout, _GRACE)

        def exchange() -> None:
            self._store.set(str(self._rank), own[:_LONGEST])
            others = [rank for rank in range(self._size) if rank != self._rank]
            missing = _await(self._store, others, grace if patient else 0.0)
            for rank in set(others) - set(missing):
                said[rank] = self._store.get(str(rank)).decode(errors="replace")

        _bounded(exchange, grace + 1)
        texts = [f"rank {rank} waits {said.get(rank, _SILENT)}" for rank in range(self._size)]
        return f"R{'; '.join(texts)[1:]}."


def meet(called: str, seconds: float, ranks: Sequence[int] | None = None) -> int:
    """Waits until all processes of the default group have called this as often. Returns how often these have
    met.

    Args:
        called: what the user has called.
        seconds: that one may keep the others waiting.
        ranks: those that meet, always the same some. None: all.

    Raises:
        PeerError: naming the ranks that have not.
    """
    group = distributed_c10d._get_default_group()
    rank, who = torch_dist.get_rank(), "all" if ranks is None else "some"
    counts = _meetings.setdefault(group, {})
    number = counts[who] = counts.get(who, 0) + 1
    store = store_of(f"meeting/{who}/{number}")
    store.set(str(rank), called)
    if store.check(["ended"]):
        ended = store.get("ended").decode()
        raise PeerError(f"This rank calls {called} after the others have given up: {ended}")
    everybody = range(torch_dist.get_world_size()) if ranks is None else ranks
    missing = _await(store, everybody, seconds)
    if not missing:
        return number
    late = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    text = (
        f"{late} did not call {called} in {seconds:g} s, where the others wait. All ranks call it, in the "
        "same order."
    )
    store.set("ended", text)
    raise PeerError(text[0].upper() + text[1:])


def store_of(name: str) -> distributed_c10d.Store:
    """Return a part of the store of the default group."""
    return distributed_c10d.PrefixStore(f"{_PREFIX}/{name}", distributed_c10d._get_default_store())


def _await(store: distributed_c10d.Store, ranks: Sequence[int], seconds: float) -> list[int]:
    """Return the ranks that have reported nothing within `seconds`."""
    until, missing = time.monotonic() + seconds, list(ranks)
    while True:
        missing = [rank for rank in missing if not store.check([str(rank)])]
        if not missing or time.monotonic() >= until:
            return missing
        time.sleep(_OFTEN)


def _bounded(work: Callable[[], None], seconds: float) -> None:
    """On a thread that is left alone if it takes longer: a store may be gone with the rank that kept it."""

    def quiet() -> None:
        try:
            work()
        except RuntimeError:  # the store is gone
            pass

    thread = threading.Thread(target=quiet, name="hotbed-waits", daemon=True)
    thread.start()
    thread.join(seconds)
