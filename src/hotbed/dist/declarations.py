"""Declarations of models and optimizers, which must be equal on all ranks.

A declaration is walked field by field and option by option, so that a new one is in it by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hotbed.digests import digest_of
from hotbed.dist.errors import PeerError
from hotbed.dist.row_codecs import CODECS, ByRow
from hotbed.errors import HotbedError, PlanError
from hotbed.modules.owner import owners_of
from hotbed.optim.base import TableOptimizer
from hotbed.optim.dense import LR_RATIO
from hotbed.optim.options import Number
from hotbed.sharding import Sharding
from hotbed.table.clipping import ClippingCall
from hotbed.table.live import live_table
from hotbed.tables import Table

__all__ = [
    "Declaration",
    "differences",
    "in_words",
    "name_of",
    "of_arguments",
    "of_clipping",
    "of_loaded",
    "of_model",
    "of_optimizer",
    "of_plan",
    "of_scaler",
]

_names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
"""Of dense parameters of distributed models."""
_MOST_NAMED = 3
"""Differences that an error names."""
_DIGITS = 12
"""Of a digest in an error."""


class Declaration:
    """Values by name, in words.

    Attributes:
        digest: 63 bits that two declarations have in common if they are equal.
        text: the values as JSON.
    """

    def __init__(
        self, values: Mapping[str, str], remedy: str, kind: type[HotbedError] = PeerError
    ) -> None:
        """`kind`: of the error where ranks declare other values, which ends with `remedy`."""
        self.text = json.dumps(values)
        self.digest = int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "little") >> 1
        self._remedy, self._kind = remedy, kind

    def refusal(self, texts: Mapping[int, str]) -> HotbedError:
        """The error where ranks have other declarations."""
        return self._kind(f"{differences(texts)} {self._remedy}")


def differences(texts: Mapping[int, str]) -> str:
    """A sentence on what the first rank and the next that has another declaration declare.

    Args:
        texts: of the declarations, not all equal, by rank.
    """
    first, *others = sorted(texts)
    other = next(rank for rank in others if texts[rank] != texts[first])
    ours, theirs = (json.loads(texts[rank] or "{}") for rank in (first, other))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    named = "; ".join(
        f"{name} is {ours.get(name, 'missing')} on rank {first} and {theirs.get(name, 'missing')} on rank "
        f"{other}"
        for name in names[:_MOST_NAMED]
    )
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"The ranks differ: {named}{more}."


def of_plan(shardings: Mapping[str, Sharding]) -> Declaration:
    """Declare which rank owns which shards."""
    values = {f"table {name!r}": in_words(sharding) for name, sharding in shardings.items()}
    remedy = "They have different plans: make it on one, write it, and read it on the others."
    return Declaration(values, remedy, PlanError)


def of_arguments(
    codecs: Mapping[str, str], ddp: Mapping[str, object], tables: Iterable[Table], prefetch: int
) -> Declaration:
    """Declare the forms in which rows travel, options of DistributedDataParallel, and `prefetch`.

    Args:
        codecs: names by what travels so.
        tables: whose rows travel.
    """
    dtypes = {(t.dim, dtype) for t in tables for dtype in (t.dtype, t.compute_dtype)}
    shapes = sorted((dim, str(dtype), dtype) for dim, dtype in dtypes)
    values = {f"ddp={{{name!r}: ...}}": in_words(value) for name, value in ddp.items()}
    values["prefetch"] = in_words(prefetch)
    for what, name in codecs.items():
        codec = CODECS[name]
        values[f"the codec of {what}"] = f"{name}: {in_words(type(codec))}"
        if not isinstance(codec, ByRow):
            continue
        for dim, named, dtype in shapes:
            try:
                size = in_words(codec.row_bytes(dim, dtype))
            except Exception as error:  # as it will be when rows travel
                size = type(error).__name__
            values[f"bytes of rows of {dim} {named} in the codec of {what}"] = size
    return Declaration(values, "Give hotbed.distribute the same arguments on all ranks.")


def of_model(model: nn.Module, tables: Sequence[Table]) -> Declaration:
    """Declare the tables, which features they serve, dense parameters and buffers. Keys are not in it: all
    ranks take those of rank 0.

    Args:
        tables: of the model, as a plan has them.
    """
    values = {"the order of tables": in_words([table.name for table in tables])}
    for table in tables:
        for field in dataclasses.fields(Table):
            if field.name not in ("name", "sharding"):  # which the plan has
                # Of an initializer what it draws from, as any object can be one.
                value = table.bands() if field.name == "init" else getattr(table, field.name)
                values[f"{field.name} of table {table.name!r}"] = in_words(value)
    for prefix, module in owners_of(model).items():
        at = f" of module {prefix!r}" if prefix else ""
        features = [(name, table.name) for name, table in module.features_of(prefix).items()]
        values[f"features{at}"] = in_words(features)
    for name, parameter in model.named_parameters():
        if live_table(parameter) is None:
            values[f"parameter {name!r}"] = _shape(parameter) + _layout(parameter)
            _names[parameter] = name
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        values[f"buffer {name!r}"] = f"{in_words(buffer.dtype)} {tuple(buffer.shape)}"
    values["the order of buffers"] = in_words(list(buffers))  # in which they travel
    return Declaration(values, "All ranks must make the same model.")


def of_clipping(call: ClippingCall) -> Declaration:
    """Declare a call of clipping, and which dense parameters have a gradient."""
    values = {
        f"{name} of {call.function}": in_words(given) for name, given in call.arguments.items()
    }
    dense = [f"{_names.get(one, '')} {_shape(one)}".lstrip() for one in call.dense]
    values[f"dense gradients that {call.function} is given"] = in_words(dense)
    return Declaration(values, f"Call {call.function} alike on all ranks.")


def of_scaler(state: Mapping[str, object]) -> Declaration:
    """Declare the state_dict of a GradScaler."""
    values = {
        f"{name.lstrip('_')} of the GradScaler": in_words(value) for name, value in state.items()
    }
    return Declaration(values, "All ranks must make and update the same GradScaler.")


def of_loaded(loaded: Mapping[str, Tensor]) -> Declaration:
    """Declare values of dense parameters that are about to be loaded, by name."""
    values = {
        f"{name!r} in the state_dict": f"{in_words(value.dtype)} {tuple(value.shape)} with digest "
        f"{digest_of(value)[:_DIGITS]}"
        for name, value in loaded.items()
    }
    return Declaration(values, "Load the same state_dict on all ranks.")


def of_optimizer(optimizer: TableOptimizer) -> Declaration:
    """The kind of a `TableOptimizer`, its groups, and all its options but numbers that travel with each step.
    Made anew when one has changed."""
    options = _options.get(optimizer)
    if options is None:
        options = _options[optimizer] = _Options(optimizer)
    return options.declaration(optimizer)


class _Options:
    """The options of an optimizer, and its declaration as they were at the last step."""

    def __init__(self, optimizer: TableOptimizer) -> None:
        travel = {
            o.name for o in optimizer.declared_rule().options if isinstance(o, Number) and o.core
        }
        self._names = [*(name for name in optimizer.defaults if name not in travel), LR_RATIO]
        self._sizes: list[int] = []
        self._values: list[object] = []
        self._declaration: Declaration | None = None

    def declaration(self, optimizer: TableOptimizer) -> Declaration:
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        values = [value for _, _, value in self._of_groups(optimizer)]
        values.append(optimizer.composition.loaded)
        same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if self._declaration is None or sizes != self._sizes or not same:
            self._sizes, self._values = sizes, values
            self._declaration = self._made(optimizer)
        return self._declaration

    def _of_groups(
        self, optimizer: TableOptimizer
    ) -> Iterator[tuple[str, tuple[int, ...], object]]:
        """(name, group, value) of each option; the groups of ``dense=`` are parts of the outer ones."""
        for index, group in enumerate(optimizer.param_groups):
            for name in self._names:
                yield name, (index,), group.get(name)
        dense = optimizer.composition.dense
        if dense.chosen is not None:
            for index, inner in dense.inners:
                for k, group in enumerate(inner.param_groups):
                    for name, value in group.items():
                        if name not in ("params", "lr"):  # which follows that of the outer group
                            yield name, (index, k), value

    def _made(self, optimizer: TableOptimizer) -> Declaration:
        kind = type(optimizer)
        values = {"the optimizer": in_words(kind)}
        values |= {
            f"{name} of {kind.__name__}": in_words(value)
            for name, value in optimizer.composition.arguments.items()
            if name not in optimizer.defaults
        }
        values |= {
            f"the dense optimizer of group {index}": in_words(type(inner))
            for index, inner in optimizer.composition.dense.inners
        }
        for index, group in enumerate(optimizer.param_groups):
            lives = [(parameter, live_table(parameter)) for parameter in group["params"]]
            names = [live.name for _, live in lives if live is not None]
            dense = [parameter for parameter, live in lives if live is None]
            shapes = [f"{_names.get(one, '')} {_shape(one)}".lstrip() for one in dense]
            values[f"tables of group {index}"] = in_words(names)
            values[f"dense parameters of group {index}"] = in_words(shapes)
        if loaded := optimizer.composition.loaded:
            values["the digest of the state that was loaded last"] = loaded[:_DIGITS]
        for name, at, value in self._of_groups(optimizer):
            values[f"{name} of group {'.'.join(map(str, at))}"] = in_words(value)
        remedy = "All ranks must make the same optimizer, and load the same state into it, or none."
        return Declaration(values, remedy)


_options: weakref.WeakKeyDictionary[TableOptimizer, _Options] = weakref.WeakKeyDictionary()


def in_words(value: Any) -> str:
    """A value as the same text in each process: numbers to the last digit, objects without addresses."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # 1 and 1.0 are one number
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        return in_words(value.tolist())
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{in_words(k)}: {in_words(v)}' for k, v in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(in_words, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(f'{n}={in_words(v)}' for n, v in fields)})"
    if isinstance(value, type) or callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return f"object of {type(value).__qualname__}" if " at 0x" in repr(value) else repr(value)


def name_of(parameter: Tensor) -> str:
    """Return the name of a dense parameter of a distributed model, or else its shape."""
    name = _names.get(parameter)
    return _shape(parameter) if name is None else repr(name)


def _shape(parameter: Tensor) -> str:
    trained = "" if parameter.requires_grad else ", not trained"
    return f"{in_words(parameter.dtype)} {tuple(parameter.shape)}{trained}"


def _layout(parameter: Tensor) -> str:
    """Return ", strides ..." of a parameter that is not contiguous, and nothing of others."""
    plain = parameter.layout != torch.strided or parameter.is_contiguous()
    return "" if plain else f", strides {parameter.stride()}"
