"""Items of a two-tower model and both its towers, as parts of a bundle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotbed.data import MISSING_ID, Id
from hotbed.models import TwoTower
from hotbed.serve.bundles.bundle import (
    ITEM,
    ITEM_VECTOR,
    TOPK,
    USER,
    USER_VECTOR,
    BundleError,
    ExportError,
    LookupEntry,
    TopKEntry,
    TowersEntry,
)
from hotbed.serve.bundles.item_tower import FeatureIds, ItemTower, write_features, write_vectors
from hotbed.serve.bundles.reading import BundleTable
from hotbed.serve.bundles.sessions import session_of
from hotbed.serve.exporting.asking import ids_of
from hotbed.serve.exporting.comparing import TOLERANCE, apart
from hotbed.serve.exporting.dense import Leaves, named_outputs, onnx_of, parameters_of, program_of
from hotbed.serve.exporting.lookups import Recorded, WithoutTables

__all__ = ["Items", "Towers", "WrittenItems", "towers_of", "write_items"]

Items = Iterable[Mapping[str, Tensor]]
"""Batches with the features of items."""


class _Onnx(NamedTuple):
    """A tower, as ONNX."""

    model: bytes
    parameters: dict[str, str]
    """Initialisers that are parameters → their names in the model's state_dict."""


class Towers(NamedTuple):
    """A two-tower model as it was traced for its bundle."""

    model: TwoTower
    """In evaluation mode, without its tables."""
    lookups: Sequence[LookupEntry]
    """Of an item's features, in the order in which the tower takes them."""
    user: _Onnx
    item: _Onnx
    items: Items | None


class WrittenItems(TypedDict):
    """Describes the items of a bundle."""

    topk: TopKEntry
    towers: TowersEntry


class _Users(nn.Module):
    """Vectors of users, divided by the temperature, of a model whose tables are taken away."""

    def __init__(self, model: TwoTower) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        settings = self.model.settings
        vectors = self.model.embeddings(batch)
        dense = [batch["dense"]] if self.model.num_dense else []
        users = self.model.users_of([vectors[name] for name in settings.user], dense)
        return {USER_VECTOR: users / settings.temperature}


class _Items(nn.Module):
    """Vectors of items, of a model whose tables are taken away."""

    def __init__(self, model: TwoTower) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        vectors = self.model.embeddings(batch)
        items = self.model.items_of([vectors[name] for name in self.model.settings.item])
        return {ITEM_VECTOR: items.float()}


def towers_of(
    model: nn.Module,
    leaves: Leaves,
    found: Recorded,
    lookups: Sequence[LookupEntry],
    items: Items | None,
) -> Towers | None:
    """Return the towers of a model, which are traced and compared with the model's scores; None where a
    bundle has no items: the model is another one, or its items have more than an id and none are given.

    Args:
        leaves: of the sample.
        found: what the model looked up of it, and answered.
        items: None: the rows of the item's table are the items.

    Raises:
        ExportError: there are items of another model; or products of vectors are not the model's scores.
    """
    if not isinstance(model, TwoTower):
        if items is not None:
            raise ExportError(f"items are a TwoTower's, and the model is {type(model).__name__}.")
        return None
    if items is None and (len(model.settings.item) > 1 or type(model) is not TwoTower):
        return None
    bare = WithoutTables(model)
    own = bare.model.eval()
    assert isinstance(own, TwoTower)

    def traced(tower: nn.Module, output: str) -> _Onnx:
        bare.model = tower.eval()
        program = program_of(bare, found.lookups, leaves)
        onnx = onnx_of(program, [output])
        names = parameters_of(program, onnx)
        parameters = {each: name.removeprefix("model.") for each, name in names.items()}
        return _Onnx(onnx.SerializeToString(), parameters)

    user, item = traced(_Users(own), USER_VECTOR), traced(_Items(own), ITEM_VECTOR)
    by_input = {each["input"]: each for each in lookups}
    towers = Towers(own, [by_input[name] for name in model.settings.item], user, item, items)
    _compare(towers, leaves, found)
    return towers


def _compare(towers: Towers, leaves: Leaves, found: Recorded) -> None:
    """Raise ExportError where products of vectors are not the model's scores of the sample."""
    session = session_of(towers.user.model)
    vectors = {lookup.input: lookup.vectors for lookup in found.lookups}
    given = {
        name: leaf for name, leaf in leaves.named.items() if isinstance(leaf, Tensor)
    } | vectors
    fed = {each.name: given[each.name].detach().cpu().numpy() for each in session.get_inputs()}
    (users,) = session.run([USER_VECTOR], fed)
    names = [each["vectors"] for each in towers.lookups]
    looked_up = {name: vectors[name].detach().cpu().numpy() for name in names}
    items = ItemTower(towers.item.model, towers.lookups).of(looked_up)
    outputs = [*named_outputs(found.outputs).values()]
    scores = torch.from_numpy(users).mul(torch.from_numpy(items)).sum(1)
    away = apart(scores, outputs[0]) if len(outputs) == 1 else float("nan")
    if not away <= TOLERANCE:
        raise ExportError(
            f"Products of users' and items' vectors are not the scores that the model answers, by {away:.3g}."
        )


def write_items(folder: str, towers: Towers, tables: Mapping[str, BundleTable]) -> WrittenItems:
    """Write the towers and all items, with their vectors, to a bundle. Returns what it says of them.

    Args:
        tables: as the bundle has them.

    Raises:
        ExportError: a vector is not finite, or there are no batches of items.
        InputError, IdError: a batch of items has not the features of an item.
    """
    settings = towers.model.settings
    os.mkdir(os.path.join(folder, TOPK))
    for name, tower in ((USER, towers.user), (ITEM, towers.item)):
        with open(os.path.join(folder, name), "xb") as file:
            file.write(tower.model)
    features = _rows(towers, tables) if towers.items is None else _given(towers, towers.items)
    inputs = [each["input"] for each in towers.lookups]
    about = write_features(folder, inputs, features)
    maker = ItemTower(towers.item.model, towers.lookups)
    try:
        write_vectors(folder, maker, tables, features, settings.out)
    except BundleError as error:
        raise ExportError(str(error)) from error
    dense = ["dense"] if towers.model.num_dense else []
    count = len(features[0].ids)
    return {
        "topk": {"inputs": [*settings.user, *dense], "items": count, "width": settings.out},
        "towers": {
            "user": towers.user.parameters,
            "item": towers.item.parameters,
            "features": about,
        },
    }


def _rows(towers: Towers, tables: Mapping[str, BundleTable]) -> list[FeatureIds]:
    """Return the ids of all rows of the item's table."""
    (lookup,) = towers.lookups
    table = tables[lookup["table"]]
    layer = table.layers[0]
    ids = np.arange(table.about["rows"]) if layer.ids is None else layer.ids
    none = [MISSING_ID, lookup["padding_idx"], _missing_in(towers.model)]
    is_none = np.isin(ids, [each for each in none if each is not None])
    return [FeatureIds(np.asarray(ids[~is_none], np.int64), None)]


def _missing_in(model: TwoTower) -> int | None:
    """Return the id that stands for a missing item in a static table; None: there is none."""
    name = model.settings.item[0]
    column = None if model.schema is None else model.schema.columns.get(name)
    return column.missing if isinstance(column, Id) else None


def _given(towers: Towers, batches: Items) -> list[FeatureIds]:
    """Return the ids of the items in batches, of each feature, in the order of the items' ids. An item that
    comes again has what it had first."""
    found: list[list[FeatureIds]] = [[] for _ in towers.lookups]
    for batch in batches:
        count = len(towers.model.item_ids(batch))
        for own, lookup in zip(found, towers.lookups, strict=True):
            own.append(_of_batch(batch, lookup, count))
    if not found[0]:
        raise ExportError("items has no batches. Pass one with the features of each item.")
    every = [_joined(each) for each in found]
    _, first = np.unique(every[0].ids, return_index=True)
    return [_taken(each, first) for each in every]


def _of_batch(batch: Mapping[str, Tensor], lookup: LookupEntry, count: int) -> FeatureIds:
    name = lookup["input"]
    if name not in batch:
        raise ExportError(f"A batch of items has no {name!r}, but {', '.join(batch)}.")
    ids, offsets = ids_of(batch[name], lookup)
    if lookup["combiner"] == "none" and (offsets is not None or ids.ndim != 1):
        raise ExportError(f"Items have one {name!r} each, as its table has no combiner. Pass (B,).")
    items = len(ids) if offsets is None else len(offsets) - 1
    if items != count:
        raise ExportError(f"A batch of items has {count} ids, and {name!r} of {items} items.")
    return FeatureIds(ids, offsets)


def _joined(parts: Sequence[FeatureIds]) -> FeatureIds:
    """Return the ids of all batches. Offsets are left out where each item has one."""
    ids = np.concatenate([each.ids for each in parts])
    lengths = [np.diff(each.offsets) for each in parts if each.offsets is not None]
    every = np.concatenate([np.empty(0, np.int64), *lengths])
    if (every == 1).all():
        return FeatureIds(ids, None)
    return FeatureIds(ids, np.concatenate([[0], every.cumsum()]))


def _taken(ids: FeatureIds, order: NDArray[np.int64]) -> FeatureIds:
    """Return the ids of the items at (N,) positions."""
    if ids.offsets is None:
        return FeatureIds(ids.ids[order], None)
    begins, lengths = ids.offsets[order], np.diff(ids.offsets)[order]
    offsets = np.concatenate([[0], lengths.cumsum()])
    at = np.repeat(begins - offsets[:-1], lengths) + np.arange(offsets[-1])
    return FeatureIds(ids.ids[at], offsets)
