"""Vectors of the items of a two-tower model, and its users' tower, as parts of a bundle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotbed.data import MISSING_ID, Id
from hotbed.models import TwoTower
from hotbed.serve.asking import ids_of
from hotbed.serve.bundle import (
    ITEM_IDS,
    ITEM_VECTORS,
    USER,
    USER_VECTOR,
    ExportError,
    LookupEntry,
    TopKEntry,
)
from hotbed.serve.dense import Leaves, named_outputs, onnx_of, program_of
from hotbed.serve.lookups import Recorded, WithoutTables
from hotbed.serve.reading import BundleTable, vectors_of
from hotbed.serve.sessions import session_of

__all__ = ["Items", "Towers", "towers_of", "write_items"]

Items = Iterable[Mapping[str, Tensor]]
"""Batches with the features of items."""
_AT_ONCE = 8192
"""Items whose vectors are made at a time."""
_TOLERANCE = 1e-5
"""Of products of vectors beside the model's scores, absolute and relative to the largest."""


class Towers(NamedTuple):
    """A two-tower model as it was traced for its bundle."""

    model: TwoTower
    """In evaluation mode, without its tables."""
    lookups: Sequence[LookupEntry]
    """Of an item's features, in the order in which the tower takes them."""
    users: bytes
    """The users' tower, as ONNX."""
    items: Items | None


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


def towers_of(
    model: nn.Module,
    leaves: Leaves,
    found: Recorded,
    lookups: Sequence[LookupEntry],
    items: Items | None,
) -> Towers | None:
    """Return the towers of a model, of which the users' is traced and compared with the model's scores; None
    where a bundle has no items: the model is another one, or its items have more than an id and none are
    given.

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
    bare.model = _Users(own).eval()
    users = onnx_of(program_of(bare, found.lookups, leaves), [USER_VECTOR]).SerializeToString()
    by_input = {each["input"]: each for each in lookups}
    towers = Towers(own, [by_input[name] for name in model.settings.item], users, items)
    _compare(towers, leaves, found)
    return towers


def _compare(towers: Towers, leaves: Leaves, found: Recorded) -> None:
    """Raise ExportError where products of vectors are not the model's scores of the sample."""
    session = session_of(towers.users)
    vectors = {lookup.input: lookup.vectors for lookup in found.lookups}
    given = {name: leaf for name, leaf in leaves.named.items() if isinstance(leaf, Tensor)}
    fed = {
        each.name: {**given, **vectors}[each.name].detach().cpu().numpy()
        for each in session.get_inputs()
    }
    (users,) = session.run([USER_VECTOR], fed)
    with torch.no_grad():
        items = towers.model.items_of([vectors[each["vectors"]] for each in towers.lookups])
    outputs = [*named_outputs(found.outputs).values()]
    expected = outputs[0].detach().float().cpu()
    scores = torch.from_numpy(users).mul(items.float().cpu()).sum(1)
    same = len(outputs) == 1 and scores.shape == expected.shape
    away = float((scores - expected).abs().max()) if same else float("nan")
    if not away <= _TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ExportError(
            f"Products of users' and items' vectors are not the scores that the model answers, by {away:.3g}."
        )


def write_items(folder: str, towers: Towers, tables: Mapping[str, BundleTable]) -> TopKEntry:
    """Write the vectors of all items and the users' tower to a bundle. Returns what it says of them.

    Args:
        tables: as the bundle has them.

    Raises:
        ExportError: a vector is not finite, or there are no batches of items.
        InputError, IdError: a batch of items has not the features of an item.
    """
    settings = towers.model.settings
    os.mkdir(os.path.join(folder, os.path.dirname(USER)))
    with open(os.path.join(folder, USER), "xb") as file:
        file.write(towers.users)
    write = _write_rows if towers.items is None else _write_given
    count = write(folder, towers, tables)
    dense = ["dense"] if towers.model.num_dense else []
    return {"inputs": [*settings.user, *dense], "items": count, "width": settings.out}


def _vectors(
    towers: Towers, tables: Mapping[str, BundleTable], batch: Mapping[str, object]
) -> NDArray[np.float32]:
    """Return the (B, w) float32 vectors of items, whose rows are as the bundle has them.

    Raises:
        ExportError: one is not finite.
        IdError: an id is outside of a static table.
    """
    device = next(towers.model.item_tower.parameters()).device
    looked_up: list[Tensor] = []
    for each in towers.lookups:
        ids, offsets = ids_of(batch[each["input"]], each)
        vectors = vectors_of(each, tables[each["table"]], ids, offsets)
        looked_up.append(torch.from_numpy(vectors).to(device))
        if len(looked_up[-1]) != len(looked_up[0]):
            raise ExportError(
                f"A batch of items has {len(looked_up[0])} ids, and {each['input']!r} of "
                f"{len(looked_up[-1])} items."
            )
    with torch.no_grad():
        found: NDArray[np.float32] = towers.model.items_of(looked_up).float().cpu().numpy()
    if not np.isfinite(found).all():
        raise ExportError("The vector of an item has a number that is not finite.")
    return found


def _write_rows(folder: str, towers: Towers, tables: Mapping[str, BundleTable]) -> int:
    """Write the vectors of all rows of the item's table; returns how many. Some lie in memory at a time."""
    (lookup,) = towers.lookups
    table = tables[lookup["table"]]
    layer = table.layers[0]
    ids = np.arange(table.about["rows"]) if layer.ids is None else layer.ids
    none = [MISSING_ID, lookup["padding_idx"], _missing_in(towers.model)]
    ids = ids[~np.isin(ids, [each for each in none if each is not None])]
    np.save(os.path.join(folder, ITEM_IDS), ids)
    path, shape = os.path.join(folder, ITEM_VECTORS), (len(ids), towers.model.settings.out)
    if not len(ids):  # nothing to map
        np.save(path, np.empty(shape, np.float32))
        return 0
    written = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    for begin in range(0, len(ids), _AT_ONCE):
        some = torch.from_numpy(ids[begin : begin + _AT_ONCE])
        written[begin : begin + _AT_ONCE] = _vectors(towers, tables, {lookup["input"]: some})
    return len(ids)


def _missing_in(model: TwoTower) -> int | None:
    """Return the id that stands for a missing item in a static table; None: there is none."""
    name = model.settings.item[0]
    column = None if model.schema is None else model.schema.columns.get(name)
    return column.missing if isinstance(column, Id) else None


def _write_given(folder: str, towers: Towers, tables: Mapping[str, BundleTable]) -> int:
    """Write the vectors of the items in batches; returns how many. All lie in memory meanwhile."""
    ids, vectors = [], []
    for batch in towers.items or ():
        ids.append(towers.model.item_ids(batch).long().cpu().numpy())
        for name in towers.model.settings.item:
            if name not in batch:
                raise ExportError(f"A batch of items has no {name!r}, but {', '.join(batch)}.")
        vectors.append(_vectors(towers, tables, batch))
    if not ids:
        raise ExportError("items has no batches. Pass one with the features of each item.")
    known, first = np.unique(np.concatenate(ids), return_index=True)
    np.save(os.path.join(folder, ITEM_IDS), known)
    np.save(os.path.join(folder, ITEM_VECTORS), np.concatenate(vectors)[first])
    return len(known)
