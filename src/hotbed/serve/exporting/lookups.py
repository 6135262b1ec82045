"""Lookups of a model for a sample, and its modules as they take vectors in place of ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hotbed.collection import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.modules.owner import TableOwner, owners_of
from hotbed.serve.bundles.bundle import ExportError
from hotbed.table.live import LiveTable

__all__ = ["Lookup", "Recorded", "WithoutTables", "copied", "recorded"]


class Lookup(NamedTuple):
    """Vectors that a model has looked up."""

    name: str
    """Of the module and the feature, as in the model's state_dict."""
    ids: object
    """As the module was given them."""
    table: LiveTable
    vectors: Tensor
    module: str
    """Its name in the model."""

    @property
    def input(self) -> str:
        """Name of the dense part's input that takes them. (A leaf of the sample may have the module's.)"""
        return f"vectors/{self.name}"


class Recorded(NamedTuple):
    """A forward of a sample."""

    lookups: list[Lookup]
    """In the order in which the model makes them."""
    outputs: object


class WithoutTables:
    """A model whose modules with tables return vectors that they are given. It shares its parameters, and has
    buffers of its own.

    Args:
        model: whose modules stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.owners = {name: _Owner(owner) for name, owner in owners_of(model).items()}
        self.model = copied(model, {each.owner: each for each in self.owners.values()})
        own = {
            buffer: buffer.clone() for buffer in self.model.buffers()
        }  # which forwards may change
        for module in self.model.modules():
            buffers = module.__dict__["_buffers"]
            module.__dict__["_buffers"] = {n: own.get(each) for n, each in buffers.items()}


def copied(module: nn.Module, others: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with others in place of some of its parts. It shares its parameters.

    Args:
        others: what stands for which. Copies are added, of which only the references to parts are their own.
    """
    if module not in others:
        # Without what classes do when they are copied, which some refuse.
        own = others[module] = type(module).__new__(type(module))
        own.__dict__.update(module.__dict__)
        own.__dict__["_modules"] = {
            name: None if each is None else copied(each, others)
            for name, each in module.__dict__["_modules"].items()
        }
    return others[module]


class _Call(NamedTuple):
    args: tuple[object, ...]
    options: Mapping[str, object]
    found: object


class _Owner(nn.Module):
    """In place of a module with tables. It has what that has."""

    owner: TableOwner

    def __init__(self, owner: TableOwner) -> None:
        super().__init__()
        object.__setattr__(self, "owner", owner)  # not as a part, whose parameters were the model's
        self.calls: list[_Call] | None = None
        self.given: Iterator[object] = iter(())

    def forward(self, *args: object, **options: object) -> object:
        if self.calls is None:
            return next(self.given, None)
        found: object = self.owner(*args, **options)
        self.calls.append(_Call(args, options, found))
        return found

    def as_returned(self, name: str, vectors: Mapping[str, Tensor]) -> object:
        """Return vectors, by the names of `Lookup`, as the module returns them. `name`: its own."""
        if not isinstance(self.owner, EmbeddingCollection):
            (table,) = self.owner.live_tables().values()
            return vectors[name or table.spec.name]
        named = {
            feature: vectors[f"{name}.{feature}" if name else feature]
            for feature in self.owner.features
        }
        return [*named.values()] if self.owner.in_order else named

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found: Tensor | nn.Module = getattr(self.owner, name)
            return found


def recorded(bare: WithoutTables, args: tuple[object, ...]) -> Recorded:
    """Run a sample through a model, with its tables. Returns what it looked up.

    Raises:
        ExportError: it is called in a way that no request can have.
    """
    for owner in bare.owners.values():
        owner.calls = []
    try:
        with torch.no_grad():
            outputs = bare.model(*args)
        lookups = [
            lookup
            for name, owner in bare.owners.items()
            for call in owner.calls or ()
            for lookup in _lookups(name, owner.owner, call)
        ]
    finally:
        for owner in bare.owners.values():
            owner.calls = None
    names = [lookup.name for lookup in lookups]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ExportError(
            f"{min(twice)!r} is looked up more than once in a forward. Look it up once, and use its vectors "
            "twice."
        )
    return Recorded(lookups, outputs)


def _lookups(name: str, owner: TableOwner, call: _Call) -> Iterator[Lookup]:
    """Yield what one call of a module has looked up."""
    if call.options or len(call.args) != 1:
        raise ExportError(
            f"{name or type(owner).__name__} is called with more than ids. Give its bags as (B, K) or as a "
            "hotbed.Jagged, and no weights."
        )
    (given,), found, tables = call.args, call.found, owner.live_tables()
    if not isinstance(owner, EmbeddingCollection):
        (table,) = tables.values()
        yield _lookup(name, name or table.spec.name, given, table, found)
        return
    if isinstance(given, list | tuple) and isinstance(found, list):
        given, found = (dict(zip(owner.features, each, strict=True)) for each in (given, found))
    if not isinstance(given, Mapping) or not isinstance(found, dict):
        raise ExportError(
            f"{name or 'The collection'} is given {type(given).__name__}. Give it a dict of its features."
        )
    for feature, of_table in owner.features.items():
        own = f"{name}.{feature}" if name else feature
        yield _lookup(name, own, given[feature], tables[of_table], found[feature])


def _lookup(module: str, name: str, ids: object, table: LiveTable, vectors: object) -> Lookup:
    if isinstance(vectors, Jagged):
        raise ExportError(
            f"{name!r} has as many vectors as ids, for bags of different lengths. Pass (B, K) ids, "
            "padding_idx where there are fewer, or give its table a combiner."
        )
    if getattr(ids, "weights", None) is not None:
        raise ExportError(f"{name!r} is looked up with weights, which a bundle does not take yet.")
    if not isinstance(ids, Tensor | Jagged):
        raise ExportError(
            f"The ids of {name!r} are {type(ids).__name__}. Give the sample's as tensors or hotbed.Jagged."
        )
    assert isinstance(vectors, Tensor)
    return Lookup(name, ids, table, vectors, module)
