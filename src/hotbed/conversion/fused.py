"""One lookup for all converted layers of a model, before its forward."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hotbed.conversion.layers import ConvertedLayer, OneLookup
from hotbed.errors import HotbedError, IdError, InputError, TableError
from hotbed.group.lookup import lookup
from hotbed.inputs.bags import Bags
from hotbed.ops.outside_graphs import outside_graphs
from hotbed.table.alone import ALONE
from hotbed.table.live import LiveTable
from hotbed.table.lookups import CallAhead, lookups_of
from hotbed.table.prefetch import BatchAhead
from hotbed.table.sparse_gradient import plain_access

__all__ = ["FusedLookups", "InputsOf"]

InputsOf = Callable[..., Mapping[str, object]]
"""Arguments of a model's forward → what each layer will be called with, by its path: ids; a tuple of ids,
offsets and weights of an EmbeddingBag; or a list of such, one a call."""


class FusedLookups(OneLookup):
    """The tables of all converted layers, looked up in one call.

    The layers know it; it is no module of the model, which may call each of those in turn.

    Args:
        layers: by path.
        inputs_of: what each is called with.
    """

    def __init__(self, layers: Mapping[str, ConvertedLayer], inputs_of: InputsOf) -> None:
        super().__init__()
        self.layers_by_path = dict(layers)
        self.embedding_inputs = inputs_of
        tables = {path: layer.live_tables()["weight"] for path, layer in layers.items()}
        self._live = list(dict.fromkeys(tables.values()))
        self._position = {path: self._live.index(table) for path, table in tables.items()}
        self._forwards: dict[int, _Forward] = {}
        """By the thread that is in it."""
        self._said = False
        # Not parameters of its own: those of the layers are the model's.
        self._owned = {f"table_{t}": table for t, table in enumerate(self._live)}
        for path, layer in layers.items():
            layer.__dict__.update(fused=self, path=path)

    @property
    def training(self) -> bool:
        """As the layers are; they are switched by the model."""
        return next(iter(self.layers_by_path.values())).training

    @training.setter
    def training(self, mode: bool) -> None: ...

    # -- before and after the model's forward ----------------------------------------------------

    def hook(self, model: nn.Module) -> None:
        """Have this look up before each forward of the model."""
        self._hooks = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, always_call=True),
        ]

    def unhook(self) -> None:
        """Leave the model, and its layers look up by themselves."""
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers_by_path.values():
            layer.__dict__.update(fused=None)

    @outside_graphs
    def before(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Note what the model was called with; a forward pre-hook of it."""
        self._forwards[threading.get_ident()] = _Forward((args, kwargs))

    @outside_graphs
    def after(self, *unused: object) -> None:
        """Forget what no layer has asked for; a forward hook of the model."""
        self._forwards.pop(threading.get_ident(), None)

    @outside_graphs
    def pop(self, layer: ConvertedLayer, inputs: tuple[object, ...]) -> Tensor | None:
        """Return the vectors of a layer for these inputs, once; None: they were not looked up."""
        forward = self._forwards.get(threading.get_ident())
        if forward is None:
            return None
        if forward.arguments is not None:  # the first layer of this forward
            arguments, forward.arguments = forward.arguments, None
            self._look_all_up(forward, *arguments)
        vectors = forward.found.get(layer.path, [])
        if not vectors or forward.mode != _mode(layer.training):
            return None
        at = self._position[layer.path]
        if forward.writes[at] != _writes(self._live[at]):
            return None
        for at, one in enumerate(vectors):
            if one.serves(inputs):
                del vectors[at]
                return one.vectors
        self._say(f"layer {layer.path!r} was called with other ids than inputs= has for it")
        return None

    def _look_all_up(
        self, forward: _Forward, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        try:
            with torch.no_grad():
                given = self.embedding_inputs(*args, **kwargs)
        except HotbedError:
            raise
        except Exception as error:  # of the user's function, which may not know such a batch
            self._say(f"inputs= raised {type(error).__name__}: {error}")
            return
        calls = self._calls(given)
        if not calls:
            return
        paths = [path for path, _ in calls]
        table_of = [self._position[path] for path in paths]
        try:
            with self._live[0].place.ranks.reporting("a lookup"), self._without_autocast():
                self._refuse_transforms()
                bags, handles = self._read(given), [table.parameter for table in self._live]
                with plain_access():
                    vectors = lookup(self._live, handles, table_of, paths, bags, self.training)
        except (IdError, InputError) as error:
            if self._live[0].place.ranks is not ALONE:
                raise
            self._say(f"ids of inputs= cannot be looked up ({error})")
            return
        forward.mode, forward.writes = _mode(self.training), [*map(_writes, self._live)]
        for (path, inputs), found in zip(calls, vectors, strict=True):
            layer = self.layers_by_path[path]
            own = layer.shaped(found.to(layer.dtype).contiguous(), inputs)
            forward.found.setdefault(path, []).append(_Found(inputs, own))

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"hotbed.convert: {what}. Such lookups are made layer by layer, right and slower.",
                stacklevel=2,
            )

    def _calls(self, given: object) -> list[tuple[str, tuple[object, ...]]]:
        if not isinstance(given, Mapping):
            raise TableError(
                f"hotbed.convert: inputs must return a dict of layers' paths, got {type(given).__name__}."
            )
        calls = []
        for path, inputs in given.items():
            if path not in self.layers_by_path:
                raise TableError(
                    f"hotbed.convert: inputs= names {path!r}, which is no converted layer. Those are "
                    f"{', '.join(map(repr, self.layers_by_path))}."
                )
            for one in inputs if isinstance(inputs, list) else [inputs]:
                calls.append((path, one if isinstance(one, tuple) else (one,)))
        return calls

    def _without_autocast(self) -> contextlib.AbstractContextManager[object]:
        return self._live[0].place.lookups.without_autocast()

    # -- as a module with tables -----------------------------------------------------------------

    def features_of(self, name: str) -> dict[str, LiveTable]:
        return {path: self._live[at] for path, at in self._position.items()}

    def inputs_from(self, batch: Mapping[str, object], name: str) -> object:
        return batch

    def prepare(self, inputs: object) -> BatchAhead:
        paths = [path for path, _ in self._calls(inputs)]
        table_of = [self._position[path] for path in paths]
        return lookups_of(self._live).prepare(
            CallAhead(inputs, self._live, table_of, paths, self._read)
        )

    def _read(self, inputs: object) -> list[Bags]:
        return [self.layers_by_path[path].bags_of(one) for path, one in self._calls(inputs)]


_Mode = tuple[bool, bool, bool]


def _mode(training: bool) -> _Mode:
    """Return what decides about a lookup beside its ids."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), training


def _writes(table: LiveTable) -> int:
    """Return how often rows have changed."""
    table.note_writes()
    return table.place.writes


class _Found:
    """Vectors that were looked up for one call of a layer."""

    def __init__(self, inputs: tuple[object, ...], vectors: Tensor) -> None:
        self.vectors = vectors
        # An inference tensor has no count of changes, and so is copied.
        self._inputs = [
            one.clone() if isinstance(one, Tensor) and one.is_inference() else one for one in inputs
        ]
        self._versions = [_version(one) for one in self._inputs]

    def serves(self, given: tuple[object, ...]) -> bool:
        """Return True if a layer that is called with these inputs gets these vectors."""
        if self._versions != [_version(one) for one in self._inputs]:
            return False  # the model has changed them since they were looked up
        longest = max(len(self._inputs), len(given))
        ours, theirs = ([*some, *[None] * (longest - len(some))] for some in (self._inputs, given))
        return all(map(_alike, ours, theirs))


@dataclasses.dataclass(eq=False)
class _Forward:
    """A forward of the model that is under way."""

    arguments: tuple[tuple[object, ...], dict[str, object]] | None
    """Until they were looked up."""
    found: dict[str, list[_Found]] = dataclasses.field(default_factory=dict)
    mode: _Mode | None = None
    writes: list[int] = dataclasses.field(default_factory=list)
    """Of each table, how often its rows had changed."""


def _version(one: object) -> int:
    return one._version if isinstance(one, Tensor) and not one.is_inference() else 0


def _alike(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.requires_grad or other.requires_grad:  # gradients of weights go to this very tensor
            return False
        return one.shape == other.shape and one.device == other.device and torch.equal(one, other)
    return False
