"""Rows of a checkpoint that differ from those that are served, as a layer over these."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.behind import FirstRows, RowsBehind
from hotbed.checkpoint.chain import Link
from hotbed.checkpoint.chain_rows import removed_in, rows_of_chain
from hotbed.checkpoint.entries import TableDescription
from hotbed.checkpoint.errors import DamagedError
from hotbed.checkpoint.rows import TableRows, fault_of_ids
from hotbed.checkpoint.single import differs
from hotbed.checkpoint.tables import table_of
from hotbed.collection import EmbeddingCollection
from hotbed.serve.bundles.bundle import BundleError, TableEntry
from hotbed.serve.bundles.defaults import Default, moving
from hotbed.serve.bundles.layers import (
    AT_ONCE,
    NewLayer,
    StoredRows,
    decoded_bits,
    encoded_bits,
)
from hotbed.serve.bundles.mapped import found_in
from hotbed.table.live import LiveTable, live_table

__all__ = ["CheckpointTable", "ServedTable", "write_changes"]


class ServedTable(NamedTuple):
    """Rows of a table as they are served."""

    layers: Sequence[StoredRows]
    """Those of the bundle, then those that changed since, the oldest first."""
    only: NDArray[np.int64] | None
    """Ids that were asked for when the bundle was exported, rising; None: all."""

    @property
    def about(self) -> TableEntry:
        return self.layers[0].about

    def is_wanted(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of (n,) ids: True for those that the bundle is to have."""
        if self.only is None:
            return np.ones(len(ids), np.bool_)
        return found_in(self.only, ids)[1]

    @property
    def default(self) -> Default:
        return self.layers[0].default

    def have_rows(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of (n,) ids: True for those that have a row."""
        mask = np.zeros(len(ids), np.bool_)
        for layer in self.layers:
            mask |= layer.find(ids)[1]
        return mask

    def differ(self, ids: NDArray[np.int64], bits: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return a mask of (n,) ids: True where (n, bytes) rows are others than those that are served."""
        mask, rest = np.empty(len(ids), np.bool_), np.arange(len(ids))
        for layer in reversed(self.layers):
            at, there = layer.find(ids[rest])
            mask[rest[there]] = (layer.bits(at[there]) != bits[rest[there]]).any(1)
            rest = rest[~there]
        # A default is read as it is, and would not be in few bits.
        read = decoded_bits(self.about, bits[rest])
        default = np.ascontiguousarray(self.default.rows(ids[rest]))
        mask[rest] = (read.view(np.int32) != default.view(np.int32)).any(1)
        return mask


class CheckpointTable:
    """A table of a checkpoint, with all rows or those since another one.

    Args:
        stem: its name.
        links: the checkpoint and its bases, the newest first.
        since: `uid` of the checkpoint whose rows are served; None: it is not known.

    Attributes:
        is_whole: True if all rows are given, as it is not known which have changed.
    """

    def __init__(self, stem: str, links: Sequence[Link], since: str | None) -> None:
        self.stem, self.entry = stem, links[0].manifest["tables"][stem]
        later = [
            *itertools.takewhile(
                lambda link: since is None or link.manifest.get("uid") != since, links
            )
        ]
        rule = self.entry["rule"]
        self._moves = rule is not None and rule["untouched"] == "exact"
        self.is_whole = self._moves or len(later) == len(links)
        self.is_whole |= any(link.manifest["tables"][stem]["removed"] is None for link in later)
        self._links = links if self.is_whole else later
        self._live = self._made()
        self._behind = None
        if self._moves:
            try:
                self._behind = RowsBehind(self._live, self.entry)
            except ValueError as error:
                raise DamagedError(f"{links[0].folder}: table {stem!r}: {error}.") from None

    @property
    def moves_untouched(self) -> bool:
        """Return whether steps have moved rows that no batch has had."""
        return self._behind is not None and self._behind.rule.has_moved_untouched

    def _made(self) -> LiveTable:
        """Return a table without rows that has the saved initializer and key."""
        again: TableDescription = {
            "rows": None,
            "dim": self.entry["dim"],
            "dtype": self.entry["dtype"],
            "combiner": "sum",
            "padding_idx": self.entry["padding_idx"],
            "init": self.entry["init"] or {"kind": "Constant", "value": 0.0},
        }
        try:
            table = table_of("rows", again)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BundleError(f"Table {self.stem!r}: {error}.") from None
        made = EmbeddingCollection([table], seed=0)
        (handle,) = made.parameters()
        live = live_table(handle)
        assert live is not None
        live.draw_again(int(self.entry["key"] or "0", 16))
        return live

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (n,) ids, each once, and their (n, dim) float32 rows, some megabytes at a time.

        Raises:
            DamagedError: a file is missing or damaged.
        """
        columns = {self.stem: slice(0, self.entry["dim"])}
        as_stored = [self.stem] if self._moves else []
        for path, rows in rows_of_chain(self._links, columns, as_stored, again=True):
            ids = rows.tensors["ids"]
            if len(ids):
                if fault := fault_of_ids(path, self.stem, ids, self.entry["rows"]):
                    raise DamagedError(f"{fault}.")
                yield ids, self._current(path, rows)

    def _current(self, path: str, rows: TableRows) -> Tensor:
        if self._behind is None:
            return rows.tensors["weights"].float()
        if fault := differs(path, self.entry, rows):
            raise DamagedError(f"{fault}.")
        try:
            return self._behind.weights(rows.tensors).float()
        except (KeyError, ValueError) as error:
            raise DamagedError(f"{path}: rows of {self.stem!r}: {error}.") from None

    def removed(self) -> NDArray[np.int64]:
        """Return (n,) ids that were no more at some time; some may have a row again. Not for whole ones."""
        none = torch.empty(0, dtype=torch.int64)
        found = [removed_in(link, [self.stem])[self.stem] for link in self._links]
        return np.unique(torch.cat([none, *found]).numpy())

    def first_rows(self, ids: NDArray[np.int64]) -> Tensor:
        """Return (n, dim) float32 rows of ids of a static table that were not saved.

        Raises:
            BundleError: their first values are not known.
        """
        if self.entry["init"] is None or self.entry["key"] is None:
            raise BundleError(
                f"Table {self.stem!r}: the row {ids[0]} was not saved, and starts from an initializer that "
                "is none of hotbed.init. Export a new bundle."
            )
        source = self._behind or FirstRows(self._live, getattr(torch, self.entry["dtype"]))
        weights = source.read(torch.from_numpy(np.ascontiguousarray(ids))).weights
        assert weights is not None
        return weights.float()


def write_changes(
    folder: str, files: str, served: ServedTable, table: CheckpointTable
) -> TableEntry | None:
    """Write a layer of the rows of a checkpoint that differ from those that are served. Rows pass by some
    megabytes at a time; some 32 bytes a changed row are in memory, and where all rows are read one byte for
    each that is served.

    Args:
        folder: of the new version.
        files: what the names of the layer's files begin with.

    Returns:
        Its entry in the manifest; None: nothing differs, and nothing is written.

    Raises:
        CheckpointError: the checkpoint is damaged.
        BundleError: a row has a number that is not finite, or ids without row would read first values that
            training does not read.
        OSError: it cannot be written.
    """
    about = served.about
    if "first" in about and table.moves_untouched:
        raise BundleError(moving(table.stem))
    seen = [np.zeros(len(layer), np.bool_) for layer in served.layers if table.is_whole]
    given: list[NDArray[np.int64]] = []
    with NewLayer(folder, files, about) as layer:
        for ids_of_chunk, weights in table.chunks():
            ids = ids_of_chunk.numpy()
            if not bool(torch.isfinite(weights).all()):
                raise BundleError(
                    f"Table {table.stem!r} has a row with a number that is not finite."
                )
            if table.is_whole:
                for mask, own in zip(seen, served.layers, strict=True):
                    at, there = own.find(ids)
                    mask[at[there]] = True
            else:
                given.append(ids.copy())
            bits = encoded_bits(about, weights)
            new = served.is_wanted(ids)
            if table.is_whole:  # else they have changed, and are not looked for
                new[new] = served.differ(ids[new], bits[new])
            layer.add(ids[new], bits[new])
        gone = _unseen(served, seen) if table.is_whole else _removed(table, given)
        for begin in range(0, len(gone), AT_ONCE):
            ids = gone[begin : begin + AT_ONCE]
            ids = ids[served.is_wanted(ids) & served.have_rows(ids)]
            rows = table.first_rows(ids) if about["static"] else _tensor(served.default.rows(ids))
            bits = encoded_bits(about, rows)
            new = served.differ(ids, bits)
            layer.add(ids[new], bits[new])
        return layer.finish(served.default)


def _tensor(rows: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(np.array(rows))


def _unseen(served: ServedTable, seen: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """Return ids that are served and that a whole checkpoint has not."""
    found = [np.empty(0, np.int64)]
    for mask, layer in zip(seen, served.layers, strict=True):
        at = np.flatnonzero(~mask)
        found.append(at if layer.ids is None else np.asarray(layer.ids[at], np.int64))
    return np.unique(np.concatenate(found))


def _removed(table: CheckpointTable, given: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.setdiff1d(table.removed(), np.concatenate([np.empty(0, np.int64), *given]))
