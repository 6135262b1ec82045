"""The dense part of a model on many ranks: torch's DistributedDataParallel, under the model's own names."""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hotbed.dist.averaging import AveragingGroup
from hotbed.dist.declarations import of_loaded
from hotbed.dist.dense_gradients import DenseGradients
from hotbed.dist.errors import PeerLost
from hotbed.dist.handshake import FORWARD
from hotbed.dist.ranks import Ranks
from hotbed.dist.roles import ranks_with_batches
from hotbed.dist.wire import group_of
from hotbed.errors import TableError
from hotbed.modules.owner import TableOwner, are_tables_left_out
from hotbed.ops.outside_graphs import outside_graphs
from hotbed.table.live import live_table

__all__ = ["CompareLoads", "averaged_dense", "refuse_options", "replace_forward"]

_OWN = ("self", "module", "process_group", "device_ids", "output_device", "device_mesh")
"""Arguments of DistributedDataParallel that `hotbed.distribute` gives, or that hosts have not."""
_MOST_OF_ERROR = 300
"""Characters of an error of torch's, which may repeat a long value."""


def refuse_options(given: object) -> None:
    """Raise TableError unless they are options of DistributedDataParallel, before anything has changed."""
    known = [n for n in inspect.signature(DistributedDataParallel).parameters if n not in _OWN]
    if not isinstance(given, Mapping):
        raise TableError(
            f"ddp must be a dict of options, such as {{'static_graph': True}}, got {given!r}."
        )
    for name in given:
        if name not in known:
            raise TableError(f"ddp={{{name!r}: ...}}: hotbed.distribute takes {', '.join(known)}.")


class _Called(nn.Module):
    """Module that DistributedDataParallel wraps: the model's own forward, over its parts. It does not keep
    the model, which keeps it."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        parts = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        self.__dict__.update({part: model.__dict__[part] for part in parts})
        self._ranks, self._forward = ranks, _forward_of(model)

    def forward(self, *args: object, **kwargs: object) -> object:
        self._ranks.inside_forward = True
        try:
            with _telling_errors(self._ranks):
                return self._forward(*args, **kwargs)
        finally:
            self._ranks.inside_forward = False


def _forward_of(model: nn.Module) -> Callable[..., object]:
    """A model's own, which does not keep it: in a circle, a model that goes would leave its tables behind
    until Python next looks for circles."""
    if "forward" in model.__dict__:
        own: Callable[..., object] = model.__dict__["forward"]
        return own
    kept = weakref.ref(model)

    def forward(*args: object, **kwargs: object) -> object:
        called = kept()
        assert called is not None, "its forward is called"
        return type(called).forward(called, *args, **kwargs)

    return forward


def averaged_dense(
    model: nn.Module, ranks: Ranks, options: Mapping[str, Any]
) -> DistributedDataParallel | None:
    """Return what averages gradients of dense parameters over the ranks; None where none is trained, and on
    memory hosts. These get the values of rank 0. Called by all ranks.

    Args:
        options: of DistributedDataParallel.

    Raises:
        TableError: DistributedDataParallel refuses one.
        PeerError: on another rank.
    """
    tables = {n for n, p in model.named_parameters() if live_table(p) is not None}
    dense = [p for n, p in model.named_parameters() if n not in tables and p.requires_grad]
    if dense and ranks.rank in ranks.hosts:
        # The others do when they have averaged something for the first time.
        ranks.handshake("a distribution")
        return None
    return _averaged(model, tables, ranks, options) if dense else None


def replace_forward(
    model: nn.Module, ranks: Ranks, averaged: DistributedDataParallel | None
) -> None:
    """Have the model's forward call `averaged`, the result of `averaged_dense`. The model stays the same
    object, with ``no_sync()``."""
    called: Callable[..., object] = averaged or _forward_of(model)
    tells = averaged is None and not isinstance(model, TableOwner)  # whose lookups do it
    talks = None if averaged is None or ranks.hosts else _Talks(averaged, ranks)

    @functools.wraps(type(model).forward)
    def forward(*args: object, **kwargs: object) -> object:
        with ranks.listening("a forward, where buffers of dense layers travel"):
            within: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
            if ranks.before_forward is not None:
                if torch.is_grad_enabled():
                    ranks.before_forward()
                    within = contextlib.nullcontext() if averaged is None else _told_in_join(ranks)
                elif averaged is not None:
                    raise TableError(
                        "Inside of torch's Join ranks that have ended take part in training forwards only: "
                        "evaluate before or behind it, with hotbed.dist.even or hotbed.dist.slices."
                    )
            elif talks is not None:
                talks.meet()
            dense = contextlib.nullcontext() if ranks.dense is None else ranks.dense.of_forward()
            own = _telling_errors(ranks) if tells else contextlib.nullcontext()
            with within, dense, own:
                return called(*args, **kwargs)

    def no_sync() -> contextlib.AbstractContextManager[object]:
        return averaged.no_sync() if averaged else contextlib.nullcontext()

    model.__dict__.update(forward=forward, no_sync=no_sync)


def _telling_errors(ranks: Ranks) -> contextlib.AbstractContextManager[object]:
    """For a ``with`` statement: other ranks hear of errors before the first exchange of a forward. (In a
    graph of torch.compile they hear when this process ends.)"""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return ranks.reporting(FORWARD, ends=False)


@contextlib.contextmanager
def _told_in_join(ranks: Ranks) -> Iterator[None]:
    """Nothing can be done together behind a forward inside of torch's Join that fails, as ranks that have
    ended wait for its backward."""
    try:
        yield
    except PeerLost:
        raise
    except BaseException as error:
        ranks.lose(
            "A forward inside of Join has failed here, for whose backward the ranks wait that have no "
            f"batches any more: they cannot go on together. ({type(error).__name__}: {error})"
        )
        raise


class _Talks:
    """Meets the other ranks before a forward in which DistributedDataParallel sends something before the
    model's own: buffers, or in one of the first how it has divided gradients. There errors of others so far
    are heard."""

    def __init__(self, averaged: DistributedDataParallel, ranks: Ranks) -> None:
        self._averaged, self._ranks = weakref.ref(averaged), weakref.ref(ranks)
        self._met = 0  # the same on all ranks

    @outside_graphs
    def meet(self) -> None:
        averaged, ranks = self._averaged(), self._ranks()
        assert averaged is not None and ranks is not None, "the forward of their model is called"
        if averaged._join_config.enable:  # ranks that have ended do not meet here
            return
        divides = torch.is_grad_enabled() and self._met < _FIRST
        if divides or _sends_buffers(averaged):
            ranks.handshake(FORWARD)
            self._met += divides


def _sends_buffers(averaged: DistributedDataParallel) -> bool:
    sends: Callable[[], bool] = averaged.will_sync_module_buffers
    return sends()


_FIRST = 3
"""Forwards in which gradients may be divided anew: behind the first backward."""


class CompareLoads:
    """Hook of a distributed model that compares, on all ranks, the dense parameters that a state_dict gives
    it, before they are loaded."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(
        self, model: nn.Module, state: Mapping[str, object], prefix: str, *_: object
    ) -> None:
        if are_tables_left_out():  # by hotbed.load, which reads one file on all ranks
            return
        dense = [name for name, p in model.named_parameters() if live_table(p) is None]
        given = {name: state.get(prefix + name) for name in dense}
        with self._ranks.reporting("a load of rows"):
            declared = of_loaded({n: v for n, v in given.items() if isinstance(v, Tensor)})
        self._ranks.handshake("a load of rows", declared=declared)

    def watch(self, model: nn.Module) -> None:
        """Register the hook. `model`: has tables, so that all ranks load it together."""
        # The public name of it came after torch 2.5.
        model._register_load_state_dict_pre_hook(self, with_module=True)  # type: ignore[no-untyped-call]


def _averaged(
    model: nn.Module, tables: set[str], ranks: Ranks, options: Mapping[str, Any]
) -> DistributedDataParallel:
    called = _Called(model, ranks)
    # What DistributedDataParallel reads, by the name that its own helper for this gives it. What a model
    # itself has it calls ".name" at one place and "name" at others.
    named = [*tables, *(f".{name}" for name in tables)]
    called.__dict__["_ddp_params_and_buffers_to_ignore"] = named
    group = group_of(
        ranks,
        "hotbed.distribute",
        ranks.timeout,
        ranks_with_batches(),
        timeout=datetime.timedelta(seconds=ranks.timeout),
    )
    ranks.inside_forward = False
    averaging = AveragingGroup.over(group, ranks)
    met = functools.partial(ranks.handshake, "a distribution")
    if isinstance(averaging, AveragingGroup):
        averaging.before_first = met
    with ranks.reporting("a distribution"):
        try:
            averaged = DistributedDataParallel(called, process_group=averaging, **options)
        except (AttributeError, TypeError, ValueError) as error:
            text = str(error)[:_MOST_OF_ERROR]
            raise TableError(
                f"DistributedDataParallel refuses a value of ddp={list(options)}: {text}"
            ) from error
    if isinstance(averaging, AveragingGroup):
        averaging.meet()
        kept = dict(model.named_parameters()).items()
        trained = [p for name, p in kept if name not in tables and p.requires_grad]
        ranks.dense = averaging.gradients = DenseGradients(trained, averaged)
    else:
        met()
    averaged.__dict__.update(process_group=group, averaging=averaging)  # which is to live as long
    return averaged
