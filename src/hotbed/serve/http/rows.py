"""Where a worker has the rows of its model from."""

from __future__ import annotations

import abc
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hotbed.serve.bundles.reading import FetchedTable, ReadTable
from hotbed.serve.http.answering import Answering
from hotbed.serve.http.errors import busy
from hotbed.serve.http.parts import Part
from hotbed.serve.shards.fetching import Fetcher, ShardError
from hotbed.serve.shards.messages import Wanted
from hotbed.serve.shards.splits import Splits

__all__ = ["MappedFiles", "Rows", "Shards"]


class Rows(abc.ABC):
    """Where a worker has rows from."""

    at_once = 1
    """Batches that are answered at a time."""
    are_here = False
    """True: nothing is waited for."""

    @abc.abstractmethod
    async def tables(self, model: Answering, asked: Mapping[str, Part]) -> Mapping[str, ReadTable]:
        """Return tables by name, which have the rows that samples need.

        Raises:
            RequestError: they cannot be had now.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Give back what it holds."""


class MappedFiles(Rows):
    """Files of the bundle, mapped into the memory of this process."""

    are_here = True

    async def tables(self, model: Answering, asked: Mapping[str, Part]) -> Mapping[str, ReadTable]:
        return model.tables

    async def close(self) -> None: ...


class Shards(Rows):
    """Other processes, each of which has a part of the rows in its memory."""

    at_once = 4

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._splits: dict[str, Splits] = {}

    async def close(self) -> None:
        await self._fetcher.close()

    async def tables(self, model: Answering, asked: Mapping[str, Part]) -> Mapping[str, ReadTable]:
        splits = self._splits.get(model.at.base)
        if splits is None:
            splits = Splits(model.tables, self._fetcher.shards)
            self._splits = {model.at.base: splits}
        ids = _distinct(model, asked)
        cuts = {name: splits.cuts(name, each) for name, each in ids.items()}
        wanted = [
            Wanted(
                model.at.model_version,
                {name: ids[name][cut[n] : cut[n + 1]] for name, cut in cuts.items()},
            )
            for n in range(splits.shards)
        ]
        dims = {name: table.about["dim"] for name, table in model.tables.items()}
        try:
            parts = await self._fetcher.rows(wanted, dims)
        except ShardError as error:
            raise busy(str(error), 1) from None
        return {
            name: FetchedTable(
                model.tables[name].about, each, np.concatenate([part[name] for part in parts])
            )
            for name, each in ids.items()
        }


def _distinct(model: Answering, asked: Mapping[str, Part]) -> dict[str, NDArray[np.int64]]:
    """Return the ids of each table that samples need, rising, each once."""
    found: dict[str, list[NDArray[np.int64]]] = {}
    for lookup in model.lookups:
        ids, _ = model.inputs[lookup["input"]].bags(asked[lookup["input"]])
        if lookup["padding_idx"] is not None:
            ids = ids[ids != lookup["padding_idx"]]
        found.setdefault(lookup["table"], []).append(ids)
    return {name: np.unique(np.concatenate(each)) for name, each in found.items()}
