"""Vectors of items, which the items' tower of a bundle makes of the rows of their features.

Shapes: N items, w columns of a vector.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hotbed.serve.bundles.bundle import (
    ITEM_IDS,
    ITEM_VECTOR,
    ITEM_VECTORS,
    TOPK,
    BundleError,
    ItemFeatureEntry,
    LookupEntry,
)
from hotbed.serve.bundles.mapped import mapped
from hotbed.serve.bundles.reading import BundleTable, Ids, looked_up
from hotbed.serve.bundles.sessions import session_of

__all__ = ["FeatureIds", "ItemTower", "read_features", "write_features", "write_vectors"]

AT_ONCE = 8192
"""Items whose vectors are made at a time."""

Ints = NDArray[np.int64]


class FeatureIds(NamedTuple):
    """Ids that N items have of one of their features."""

    ids: Ints
    """(N,), or (n,) of all items, one after the other."""
    offsets: Ints | None
    """(N + 1,) where those of each item begin and end; None: each has one."""

    def between(self, begin: int, end: int) -> FeatureIds:
        """Return those of some neighbours."""
        if self.offsets is None:
            return FeatureIds(self.ids[begin:end], None)
        offsets = self.offsets[begin : end + 1]
        return FeatureIds(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])


class ItemTower:
    """The items' tower.

    Args:
        onnx: the tower.
        lookups: of an item's features, in the order in which the tower takes them.
        threads: that compute; 0: as many as there are cores.
    """

    def __init__(self, onnx: bytes, lookups: Sequence[LookupEntry], threads: int = 0) -> None:
        self._session, self._lookups = session_of(onnx, threads), lookups
        self._taken = [each.name for each in self._session.get_inputs()]

    def of(self, vectors: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        """Return the (N, w) vectors of items. `vectors`: of their features, by the names in lookups."""
        given = {name: vectors[name] for name in self._taken}
        (found,) = self._session.run([ITEM_VECTOR], given)
        return found.astype(np.float32, copy=False)

    def vectors(
        self, tables: Mapping[str, BundleTable], features: Sequence[FeatureIds]
    ) -> NDArray[np.float32]:
        """Return the (N, w) vectors of items.

        Raises:
            IdError: an id is outside of a static table.
        """
        asked = []
        for lookup, (ids, offsets) in zip(self._lookups, features, strict=True):
            if offsets is None and lookup["combiner"] != "none":
                offsets = np.arange(len(ids) + 1)
            asked.append(Ids.of(lookup, tables[lookup["table"]], ids, offsets))
        names = [each["vectors"] for each in self._lookups]
        return self.of(dict(zip(names, looked_up(asked), strict=True)))


def write_vectors(
    folder: str,
    tower: ItemTower,
    tables: Mapping[str, BundleTable],
    features: Sequence[FeatureIds],
    width: int,
) -> None:
    """Write the vectors of items to a bundle, or a version of one. Some lie in memory at a time.

    Args:
        features: of all items, their ids first.
        width: w.

    Raises:
        BundleError: a vector has a number that is not finite.
        IdError: an id is outside of a static table.
        OSError: as of files.
    """
    ids = features[0].ids
    with open(os.path.join(folder, ITEM_VECTORS), "xb") as file:
        # Not as a mapped file, where a full disk ends the process.
        kind = np.lib.format.dtype_to_descr(np.dtype(np.float32))
        about = {"descr": kind, "fortran_order": False, "shape": (len(ids), width)}
        np.lib.format.write_array_header_1_0(file, about)
        for begin in range(0, len(ids), AT_ONCE):
            some = [each.between(begin, min(begin + AT_ONCE, len(ids))) for each in features]
            found = tower.vectors(tables, some)
            if not (finite := np.isfinite(found).all(1)).all():
                item = ids[begin + int(np.argmin(finite))]
                raise BundleError(f"The vector of item {item} has a number that is not finite.")
            file.write(np.ascontiguousarray(found).data)


def write_features(
    folder: str, inputs: Sequence[str], features: Sequence[FeatureIds]
) -> list[ItemFeatureEntry]:
    """Write the ids of items to a bundle. Returns what it says of them.

    Args:
        inputs: names of the features.
        features: of all items, their ids first.
    """
    for number, (ids, offsets) in enumerate(features):
        np.save(_path(folder, number, "ids"), ids)
        if offsets is not None:
            np.save(_path(folder, number, "offsets"), offsets)
    return [
        {"input": name, "ids": len(each.ids), "bags": each.offsets is not None}
        for name, each in zip(inputs, features, strict=True)
    ]


def read_features(folder: str, about: Sequence[ItemFeatureEntry], items: int) -> list[FeatureIds]:
    """Return the ids of the items of a bundle, mapped into memory.

    Args:
        about: what its manifest says of them.
        items: N.

    Raises:
        BundleError: a file is damaged.
        OSError: as of files.
    """
    found = []
    for number, each in enumerate(about):
        ids = cast(Ints, mapped(_path(folder, number, "ids"), np.int64, (each["ids"],)))
        offsets = None
        if each["bags"]:
            path = _path(folder, number, "offsets")
            offsets = cast(Ints, mapped(path, np.int64, (items + 1,)))
            ends = offsets[0], offsets[-1]
            if ends != (0, len(ids)) or bool((offsets[1:] < offsets[:-1]).any()):
                raise BundleError(f"{path} is damaged: it does not rise from 0 to {len(ids)}.")
        found.append(FeatureIds(ids, offsets))
    return found


def _path(folder: str, number: int, part: str) -> str:
    """Return the path of an array of feature `number`: 0 is the item's id."""
    name = f"{TOPK}/{number}.{part}.npy" if number else ITEM_IDS
    return os.path.join(folder, name)
