"""Pooled vectors of rows that are only read, float32, int8 or int4: Hotbed's bundles, torch, and FBGEMM."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch

from benchmarks.workload import Workload

BYTES_OF_SCALES = {"float32": 0, "int8": 8, "int4": 4}
BYTES_OF_8 = {"float32": 32, "int8": 8, "int4": 4}
"""Of eight numbers."""
BLOCK = 1 << 16
"""Rows that are encoded at once."""


class RowFiles:
    """Files of the tables of a workload, as a bundle has them. Whoever builds first writes them."""

    def __init__(self, workload: Workload, stored_as: str) -> None:
        self.workload, self.stored_as = workload, stored_as
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def nbytes(self) -> int:
        work = self.workload
        return work.tables * work.rows * self.row_bytes()

    def row_bytes(self) -> int:
        numbers = BYTES_OF_8[self.stored_as] * self.workload.dim // 8
        return numbers + BYTES_OF_SCALES[self.stored_as]

    def least_bytes(self) -> float:
        """Return what a forward must move: ids and the rows it needs in, vectors out."""
        work = self.workload
        ids = 8 * work.tables * work.batch * work.bag
        return ids + work.unique_rows * self.row_bytes() + 4 * work.tables * work.batch * work.dim

    def folder(self) -> str:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
            for table in range(self.workload.tables):
                self._write(os.path.join(self._folder.name, str(table)), table)
        return self._folder.name

    def _write(self, path: str, table: int) -> None:
        from hotbed.serve.bundles.row_formats import ROW_FORMATS

        form, weights = ROW_FORMATS[self.stored_as], self.workload.initial_weights(table)
        stored = [form.encoded(weights[at : at + BLOCK]) for at in range(0, len(weights), BLOCK)]
        np.save(f"{path}.rows.npy", torch.cat([each.rows for each in stored]).numpy())
        scales = [each.scales for each in stored if each.scales is not None]
        if scales:
            np.save(f"{path}.scales.npy", torch.cat(scales).numpy())
        np.save(f"{path}.default.npy", np.zeros(self.workload.dim, np.float32))

    def part(self, table: int, part: str) -> np.ndarray:
        """Return an array that lies in the file's pages; writes go nowhere."""
        return np.load(os.path.join(self.folder(), f"{table}.{part}.npy"), mmap_mode="c")

    def drop(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def bags_of(work: Workload, batch: int, table: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 ids and offsets (batch + 1,)."""
    lengths = np.full(work.batch, work.bag) if work.lengths is None else work.lengths[batch, table]
    return work.ids[batch, table], np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class BundleRows:
    """All tables in one call."""

    name = "hotbed"

    def __init__(self, files: RowFiles) -> None:
        self.files = files

    def nbytes(self) -> int:
        return self.files.nbytes()

    def build(self) -> None:
        from hotbed.serve.bundles.reading import BundleTable, Ids, MappedRows

        work, folder = self.files.workload, self.files.folder()
        tables = []
        for table in range(work.tables):
            rows = MappedRows(
                folder,
                {
                    "files": str(table),
                    "dim": work.dim,
                    "rows": work.rows,
                    "static": True,
                    "stored_as": self.files.stored_as,
                },
            )
            assert rows.rows.view(np.uint8).max() >= 0  # every page is there
            tables.append(BundleTable([rows]))
        self.batches = [
            [
                Ids(table, *bags_of(work, batch, number), "sum", None)
                for number, table in enumerate(tables)
            ]
            for batch in range(len(work.ids))
        ]

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self.forward}

    def forward(self, i: int) -> list[np.ndarray]:
        from hotbed.serve.bundles.reading import looked_up

        return looked_up(self.batches[i % len(self.batches)])

    def drop(self) -> None:
        self.batches = []
        self.files.drop()


class MappedBags:
    """`torch.nn.EmbeddingBag` over the same pages, a layer a table: where memory lies decides nothing.

    Of a batch it takes another one than `BundleRows` in its turn, whose rows the caches have not.
    """

    name = "torch"

    def __init__(self, files: RowFiles) -> None:
        self.files = files

    def nbytes(self) -> int:
        return 0

    def build(self) -> None:
        work = self.files.workload
        self.bags = [
            torch.nn.EmbeddingBag.from_pretrained(
                torch.from_numpy(self.files.part(table, "rows")),
                mode="sum",
                include_last_offset=True,
            )
            for table in range(work.tables)
        ]
        self.batches = [
            [tuple(map(torch.from_numpy, bags_of(work, batch, t))) for t in range(work.tables)]
            for batch in range(len(work.ids))
        ]

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": lambda i: self.forward(i + len(self.batches) // 2)}

    @torch.inference_mode()
    def forward(self, i: int) -> list[torch.Tensor]:
        batch = self.batches[i % len(self.batches)]
        return [bag(*bags) for bag, bags in zip(self.bags, batch, strict=True)]

    def drop(self) -> None:
        self.bags, self.batches = [], []
        self.files.drop()


class FbgemmRows:
    """FBGEMM's bags for inference, int8 and int4, on the CPU; all tables in one call, float32 out."""

    name = "fbgemm"

    def __init__(self, files: RowFiles) -> None:
        self.files = files

    @staticmethod
    def lacks() -> str | None:
        if importlib.util.find_spec("fbgemm_gpu") is None:
            return "fbgemm is not installed (make peers)"
        return None

    def nbytes(self) -> int:
        return self.files.nbytes()

    def build(self) -> None:
        with warnings.catch_warnings():
            # It announces the parts of itself that its own wheel lacks.
            warnings.simplefilter("ignore")
            from fbgemm_gpu.split_embedding_configs import SparseType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
            from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
                IntNBitTableBatchedEmbeddingBagsCodegen,
            )

        work = self.files.workload
        kind = {"int8": SparseType.INT8, "int4": SparseType.INT4}[self.files.stored_as]
        specs = [
            (str(t), work.rows, work.dim, kind, EmbeddingLocation.HOST) for t in range(work.tables)
        ]
        self.bags = IntNBitTableBatchedEmbeddingBagsCodegen(
            specs, device="cpu", output_dtype=SparseType.FP32
        )
        self.bags.fill_random_weights()
        for table, (rows, scales) in enumerate(self.bags.split_embedding_weights()):
            rows.copy_(torch.from_numpy(self.files.part(table, "rows")))
            halves = self.files.part(table, "scales").astype(np.float16)
            scales.copy_(torch.from_numpy(halves.view(np.uint8)))
        self.batches = [self._batch(batch) for batch in range(len(work.ids))]

    def _batch(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and offsets of all tables, in the narrower of the types that it takes."""
        ids, offsets, first = [], [np.zeros(1, np.int64)], 0
        for table in range(self.files.workload.tables):
            of_table, bounds = bags_of(self.files.workload, batch, table)
            ids.append(of_table)
            offsets.append(bounds[1:] + first)
            first += len(of_table)
        both = np.concatenate(ids), np.concatenate(offsets)
        return torch.from_numpy(both[0]).int(), torch.from_numpy(both[1]).int()

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self.forward}

    def forward(self, i: int) -> torch.Tensor:
        vectors: torch.Tensor = self.bags(*self.batches[i % len(self.batches)])
        return vectors

    def drop(self) -> None:
        del self.bags
        self.batches = []
        self.files.drop()
