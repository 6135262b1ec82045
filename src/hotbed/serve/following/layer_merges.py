"""Merging of layers on another thread, so that a row is never looked up in many of them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hotbed.serve.bundles.bundle import TABLES
from hotbed.serve.bundles.layers import StoredRows, merge_layers
from hotbed.serve.following.new_version import Layer

__all__ = ["LayerMerges"]


class LayerMerges:
    """Merges layers of tables, one at a time. Its methods are called by one thread.

    Args:
        folder: where folders for merged layers are made.
        most: layers of a table above which some are merged.
    """

    def __init__(self, folder: str, most: int) -> None:
        self._folder, self._most = folder, most
        self._pool = ThreadPoolExecutor(1, "hotbed-merge")
        self._under_way: dict[str, tuple[list[Layer], Future[Layer]]] = {}

    def begin(self, tables: Mapping[str, Sequence[Layer]]) -> None:
        """Begin to merge where there are too many layers. A merge that is under way goes on."""
        for stem, layers in tables.items():
            if len(layers) > self._most and stem not in self._under_way:
                some = [*layers[-_count([each.entry["rows"] for each in layers]) :]]
                opened = [StoredRows(*each) for each in some]  # before their version is removed
                files = f"{some[-1].entry['files']}m"
                done = self._pool.submit(_merged, self._folder, files, opened)
                self._under_way[stem] = some, done

    def take(self, tables: Mapping[str, Sequence[Layer]]) -> dict[str, list[Layer]]:
        """Return the layers of tables, with merged ones in place of those that they were made of.

        Raises:
            OSError: a merge has failed; the next call returns the layers as they were.
        """
        found = {stem: [*layers] for stem, layers in tables.items()}
        for stem, (some, done) in [*self._under_way.items()]:
            if not done.done():
                continue
            del self._under_way[stem]
            merged, names = done.result(), [each.entry["files"] for each in some]
            own = found[stem]
            there = [each.entry["files"] for each in own]
            begin = there.index(names[0])
            assert there[begin : begin + len(names)] == names
            found[stem] = [*own[:begin], merged, *own[begin + len(names) :]]
        return found

    def wait(self) -> None:
        """Return when no merge is under way."""
        for _, done in self._under_way.values():
            done.exception()

    def close(self) -> None:
        """Wait for the merge that is under way, and give up others."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _count(sizes: Sequence[int]) -> int:
    """Return how many of the newest layers to merge, at least two: so many that the next one has at least
    twice their rows. So a row is written again about once whenever its table's changes double.

    Args:
        sizes: rows of the layers, the oldest first.
    """
    count, total = 1, sizes[-1]
    for size in reversed(sizes[:-1]):
        if count >= 2 and size >= 2 * total:
            break
        count, total = count + 1, total + size
    return count


def _merged(folder: str, files: str, layers: Sequence[StoredRows]) -> Layer:
    own = os.path.join(folder, f"merged-{secrets.token_hex(8)}.part")
    os.makedirs(os.path.join(own, TABLES))
    try:
        return Layer(own, merge_layers(own, files, layers))
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
