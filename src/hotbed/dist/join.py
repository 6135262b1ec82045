"""Uneven ends: a rank that has no batches any more answers for its shards until no rank has one."""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from hotbed.dist.distribute import Sharing, needed_sharing, sharing_of
from hotbed.dist.errors import PeerLost, is_gone
from hotbed.dist.roles import place_among_trainers, ranks_with_batches, refuse_memory_host
from hotbed.dist.serving import Serving
from hotbed.dist.wire import group_of
from hotbed.optim.base import TableOptimizer
from hotbed.optim.guards import table_optimizers

__all__ = ["is_in_join", "joinables"]

_WATCHED = "_hotbed_watched"


def joinables(model: nn.Module) -> list[Joinable]:
    """For torch's ``Join``: with it, ranks may have different numbers of batches.

    >>> from torch.distributed.algorithms.join import Join
    >>> torch.distributed.init_process_group("gloo")     # under torchrun
    >>> model = hb.distribute(hb.models.DLRM(["item"]))
    >>> optimizer = hb.optim.Adagrad(model.parameters(), lr=0.01)
    >>> with Join(hb.dist.joinables(model)):
    ...     for batch in loader:
    ...         loss = loss_fn(model(batch), batch["label"]); loss.backward()
    ...         optimizer.step(); optimizer.zero_grad()

    A rank whose loader has ended takes part in the others' steps with no samples. Gradients are divided by
    the number of all ranks. When all have ended, each has the dense layers of the one that ended last, and
    their states in Hotbed optimizers; those in torch's own stay as they are.

    Args:
        model: as `distribute` returned it.

    Raises:
        TableError: it is not distributed. ``Join`` raises PeerError on ranks that have ended where another
            one fails.
    """
    sharing = needed_sharing(model, "hotbed.dist.joinables")
    refuse_memory_host("hotbed.dist.joinables")
    _watch_joins()
    tables = _Tables(sharing)
    if sharing.dense is None:
        return [] if sharing.plan is None else [tables]
    # The first tells Join of each forward: tables do, where there are some.
    return [sharing.dense, tables] if sharing.plan is None else [tables, sharing.dense]


def is_in_join(model: nn.Module) -> bool:
    """Return True inside of torch's ``Join``, where ranks may have ended: they take part in steps only."""
    sharing = sharing_of(model)
    if sharing is None:
        return False
    dense = sharing.dense
    return sharing.ranks.before_forward is not None or (
        dense is not None and bool(dense._join_config.enable)
    )


class _Tables(Joinable):
    """The shards of a model."""

    def __init__(self, sharing: Sharing) -> None:
        super().__init__()
        self._sharing = sharing
        ranks = sharing.ranks
        if sharing.dense is not None:
            self._group: torch_dist.ProcessGroup = sharing.dense.join_process_group
        else:
            if ranks.beside is None:
                ranks.beside = group_of(
                    ranks,
                    "hotbed.dist.joinables",
                    ranks.timeout,
                    ranks_with_batches(),
                    timeout=datetime.timedelta(seconds=ranks.timeout),
                    backend="gloo",
                )
            self._group = ranks.beside

    def _notify(self) -> None:
        """Tells Join that there is more to come."""
        Join.notify_join_context(self)

    def join_hook(self, **options: object) -> JoinHook:
        if self._sharing.plan is None:
            return _Aligning(self._sharing)
        self._sharing.ranks.before_forward = self._notify  # anew in each Join
        return _Serving(self._sharing)

    @property
    def join_device(self) -> torch.device:
        dense = self._sharing.dense
        found: torch.device = torch.device("cpu") if dense is None else dense.join_device
        return found

    @property
    def join_process_group(self) -> torch_dist.ProcessGroup:
        return self._group


def _dense_of(sharing: Sharing) -> dict[str, tuple[Optimizer, Tensor]]:
    """Return each dense parameter that a Hotbed optimizer steps beside the model's tables, or in the model,
    with torch's optimizer of it, by a name that is the same on all ranks."""
    ranks, dense = sharing.ranks, sharing.dense
    tables = {table for number in range(len(ranks.tables)) if (table := ranks.tables[number]())}
    names = {} if dense is None else {p: name for name, p in dense.module.named_parameters()}
    found: dict[str, tuple[Optimizer, Tensor]] = {}
    for outer in table_optimizers():
        assert isinstance(outer, TableOptimizer)
        steps_tables = not tables.isdisjoint(outer.tables)
        for at, inner in enumerate(outer.dense_optimizers):
            every = [p for group in inner.param_groups for p in group["params"]]
            for position, parameter in enumerate(every):
                if parameter in names:
                    found[names[parameter]] = inner, parameter
                elif steps_tables:
                    found[f"{type(outer).__name__} {at} {position}"] = inner, parameter
    return found


def _align_dense_states(sharing: Sharing, is_last: bool) -> None:
    """Give all ranks the dense states of one that ended last, as they get its dense layers."""
    ranks, kind = sharing.ranks, "dense states"
    last = ranks.values_of_all(kind, is_last)
    if all(last):
        return
    source = last.index(True)  # among the ranks with batches, as memory hosts tell nothing
    own_number, _ = place_among_trainers()
    with ranks.reporting(kind):
        dense = _dense_of(sharing)
        own = {name: dict(one.state.get(p, {})) for name, (one, p) in dense.items()}
    received = ranks.values_of_all(kind, own if own_number == source else None)[source]
    with torch.no_grad():
        for name in dense.keys() & received.keys():
            one, parameter = dense[name]
            _take_state(one.state[parameter], received[name])


def _take_state(own: dict[str, object], given: Mapping[str, object]) -> None:
    for name in own.keys() - given.keys():
        del own[name]
    for name, value in given.items():
        kept = own.get(name)
        if isinstance(kept, Tensor) and isinstance(value, Tensor) and kept.shape == value.shape:
            kept.copy_(value)
        else:
            own[name] = value


class _Aligning(JoinHook):
    """Brings states of dense layers to ranks that ended early, where there are no tables to answer for."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing, self._ranks = sharing, sharing.ranks

    def raise_heard(self, error: RuntimeError) -> NoReturn:
        """Raise why another rank has ended, in place of what torch says where one is gone, `error`."""
        with self._ranks.listening("Join for those that have batches"):
            raise error

    def post_hook(self, is_last_joiner: bool) -> None:
        _align_dense_states(self._sharing, is_last_joiner)


class _Serving(_Aligning):
    """Answers on a thread, as the main one waits for gradients of dense layers meanwhile."""

    def __init__(self, sharing: Sharing) -> None:
        super().__init__(sharing)
        self._serving = Serving(self._ranks)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def _answer(self) -> None:
        try:
            self._serving.until("the end")
        except BaseException as error:  # raised again by the main thread
            self._error = error

    def main_hook(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer, name="hotbed-shards", daemon=True)
            self._thread.start()
        else:
            self._raise_error()

    def raise_heard(self, error: RuntimeError) -> NoReturn:
        if self._thread is not None:
            self._thread.join(self._ranks.timeout)  # which notices, too
            self._raise_error()
        super().raise_heard(error)

    def _raise_error(self) -> None:
        if isinstance(self._error, PeerLost) and self._serving.fault is not None:
            raise self._serving.fault  # which says why
        if self._error is not None:
            raise self._error

    def post_hook(self, is_last_joiner: bool) -> None:
        self._ranks.before_forward = None
        if self._thread is None:
            self._ranks.handshake("the end")
        else:
            self._thread.join()
            self._raise_error()
        super().post_hook(is_last_joiner)


def _watch_joins() -> None:
    """From now on, ``Join`` raises why another rank has ended: its main thread waits in an all-reduce of
    torch's, which says only that a connection was closed."""
    leave = Join.__exit__
    if hasattr(leave, _WATCHED):
        return

    @functools.wraps(leave)
    def watched(
        self: Join,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            leave(self, kind, value, traceback)
        except RuntimeError as error:
            for hook in self._join_hooks:
                if isinstance(hook, _Aligning) and is_gone(error):
                    hook.raise_heard(error)
            raise

    setattr(watched, _WATCHED, True)
    Join.__exit__ = watched  # type: ignore[method-assign]
