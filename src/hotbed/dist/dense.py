"""The dense part of a model on many ranks: torch's DistributedDataParallel, under the model's own names."""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hotbed.dist.averaging import AveragingGroup
from hotbed.dist.declarations import of_loaded
from hotbed.dist.dense_gradients import DenseGradients
from hotbed.dist.ranks import Ranks
from hotbed.dist.roles import ranks_with_batches
from hotbed.dist.wire import group_of
from hotbed.errors import TableError
from hotbed.modules.owner import are_tables_left_out
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

    @functools.wraps(type(model).forward)
    def forward(*args: object, **kwargs: object) -> object:
        with ranks.listening("a forward, where buffers of dense layers travel"):
            if ranks.before_forward is not None:
                ranks.before_forward()
            with contextlib.nullcontext() if ranks.dense is None else ranks.dense.of_forward():
                return called(*args, **kwargs)

    def no_sync() -> contextlib.AbstractContextManager[object]:
        return averaged.no_sync() if averaged else contextlib.nullcontext()

    model.__dict__.update(forward=forward, no_sync=no_sync)


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
