"""One lookup for all converted layers of a model, before its forward."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hotbed.conversion.layers import ConvertedLayer
from hotbed.errors import HotbedError, TableError
from hotbed.inputs.bags import Bags
from hotbed.modules.owner import TableOwner
from hotbed.ops.outside_graphs import outside_graphs
from hotbed.places.tiered.prepared import Prepared
from hotbed.table.live import LiveTable

__all__ = ["FusedLookups", "InputsOf", "LayerInputs"]

InputsOf = Callable[..., Mapping[str, object]]
"""Arguments of a model's forward → what each layer will be called with, by its path."""

LayerInputs = Mapping[str, object]
"""By path: ids; a tuple of ids, offsets and weights of an EmbeddingBag; or a list of such, one a call."""


class FusedLookups(TableOwner):
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
        self._found: dict[str, list[tuple[tuple[object, ...], Tensor]]] = {}
        self._arguments: tuple[tuple[object, ...], dict[str, object]] | None = None
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

    @property
    def owner(self) -> TableOwner:
        return self

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
        self._found, self._arguments = {}, (args, kwargs)

    def _look_all_up(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        try:
            with torch.no_grad():
                given = self.embedding_inputs(*args, **kwargs)
        except HotbedError:
            raise
        except (
            Exception
        ) as error:  # whatever a user's function raises of a batch that it does not know
            self._say(f"inputs= raised {type(error).__name__}: {error}")
            return
        calls = self._calls(given)
        if not calls:
            return
        table_of = [self._position[path] for path, _ in calls]
        with self._live[0].place.ranks.reporting("a lookup"), self._without_autocast():
            self._refuse_transforms()
            bags = self._read(given)
            vectors = self._look_up(self._live, table_of, [path for path, _ in calls], bags)
        for (path, inputs), found in zip(calls, vectors, strict=True):
            layer = self.layers_by_path[path]
            own = found.to(layer.dtype).contiguous()
            self._found.setdefault(path, []).append((inputs, layer.shaped(own, inputs)))

    def after(self, *unused: object) -> None:
        """Forget what no layer has asked for; a forward hook of the model."""
        self._found, self._arguments = {}, None

    def pop(self, layer: ConvertedLayer, inputs: tuple[object, ...]) -> Tensor | None:
        """Return the vectors of a layer for these inputs, once; None: they were not looked up."""
        if self._arguments is not None:  # the first layer of this forward
            arguments, self._arguments = self._arguments, None
            self._look_all_up(*arguments)
        path = layer.path
        for at, (expected, vectors) in enumerate(self._found.get(path, ())):
            if _same(expected, inputs):
                del self._found[path][at]
                return vectors
        if self._found.get(path):
            self._say(f"layer {path!r} was called with other ids than inputs= has for it")
        return None

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

    def _look_up(
        self,
        live: Sequence[LiveTable],
        table_of: Sequence[int],
        features: Sequence[str],
        bags: Sequence[Bags],
    ) -> list[Tensor]:
        self._parameters.update((name, table.parameter) for name, table in self._owned.items())
        try:
            return super()._look_up(live, table_of, features, bags)
        finally:
            self._parameters.clear()

    def features_of(self, name: str) -> dict[str, LiveTable]:
        return {path: self._live[at] for path, at in self._position.items()}

    def inputs_from(self, batch: Mapping[str, object], name: str) -> object:
        return batch

    def prepare(self, inputs: object) -> Prepared:
        paths = [path for path, _ in self._calls(inputs)]
        return Prepared(
            inputs, self._live, [self._position[path] for path in paths], paths, self._read
        )

    def _read(self, inputs: object) -> list[Bags]:
        return [self.layers_by_path[path].bags_of(one) for path, one in self._calls(inputs)]


def _same(expected: tuple[object, ...], given: tuple[object, ...]) -> bool:
    longest = max(len(expected), len(given))
    ours, theirs = ((*some, *(None,) * (longest - len(some))) for some in (expected, given))
    return all(map(_alike, ours, theirs))


def _alike(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.requires_grad or other.requires_grad:  # gradients of weights go to this very tensor
            return False
        return one.shape == other.shape and one.device == other.device and torch.equal(one, other)
    return False
