"""Items of a two-tower model in a version of its bundle: vectors as new rows and weights make them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hotbed.serve.bundles.bundle import ITEM, TOPK, USER, Bundle, TableEntry
from hotbed.serve.bundles.dense_weights import with_weights
from hotbed.serve.bundles.item_tower import ItemTower, read_features, write_vectors
from hotbed.serve.bundles.manifests import read_whole
from hotbed.serve.bundles.reading import BundleTable, MappedRows

__all__ = ["write_followed_items"]

THREADS = 1
"""That make vectors: others answer meanwhile."""


def write_followed_items(
    folder: str,
    bundle: str,
    about: Bundle,
    layers: Mapping[str, Sequence[TableEntry]],
    state: Mapping[str, object],
) -> None:
    """Write the vectors of all items of a bundle, and the users' tower, to a version; do nothing where the
    bundle has no items' tower.

    Args:
        folder: where the version is being written, with its layers.
        about: the bundle's manifest.
        layers: of the version, by table.
        state: the checkpoint's state_dict, without tables.

    Raises:
        BundleError: the bundle is damaged, or weights or vectors have a number that is not finite.
        OSError: as of files.
    """
    topk, towers = about.get("topk"), about.get("towers")
    if topk is None or towers is None:
        return
    made = {}
    for name, parameters in ((USER, towers["user"]), (ITEM, towers["item"])):
        contents = read_whole(bundle, name, about["files"])
        made[name] = with_weights(os.path.join(bundle, name), contents, parameters, state)
    os.mkdir(os.path.join(folder, TOPK))
    with open(os.path.join(folder, USER), "xb") as file:
        file.write(made[USER])
    by_input = {each["input"]: each for each in about["lookups"]}
    lookups = [by_input[each["input"]] for each in towers["features"]]
    tables = {}
    for stem in {each["table"] for each in lookups}:
        new = [MappedRows(folder, each) for each in layers[stem]]
        tables[stem] = BundleTable([MappedRows(bundle, about["tables"][stem]), *new])
    features = read_features(bundle, towers["features"], topk["items"])
    tower = ItemTower(made[ITEM], lookups, THREADS)
    write_vectors(folder, tower, tables, features, topk["width"])
