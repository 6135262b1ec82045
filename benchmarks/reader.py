"""Rows a second from files to batches: 1 label, 13 numbers and 26 ids, as integers and as text."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

import hotbed as hb
from benchmarks.measure import contest
from benchmarks.report import Report
from hotbed.data import CATEGORIES, DENSE, Id, Label, Number, Schema

BATCH = 4096
ROWS, QUICK_ROWS = 400_000, 20_000
ROW_GROUP = 1 << 17
ITERATIONS = 9
Batches = Iterator[dict[str, torch.Tensor]]


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    rows = QUICK_ROWS if quick else ROWS
    report = Report("reader", quick)
    threads = pa.cpu_count()
    with tempfile.TemporaryDirectory(prefix="hotbed-reader-") as folder:
        progress("writing the files")
        files = _written(Path(folder), rows)
        contenders = [
            _Reads("hotbed, 1 thread", _hotbed, files, 1),
            _Reads("hotbed, 2 threads", _hotbed, files, 2),
            _Reads(
                "pyarrow to torch, 1 thread", _arrow, {"Parquet, integers": files[_INTEGERS]}, 1
            ),
            _Reads(
                "pyarrow to torch, 2 threads", _arrow, {"Parquet, integers": files[_INTEGERS]}, 2
            ),
            _Reads("pandas to torch", _pandas, files, 1),
        ]
        try:
            timings = contest(
                contenders, 8 << 30, iterations=3 if quick else ITERATIONS, progress=progress
            )
        finally:
            pa.set_cpu_count(threads)
    for (name, phase), timing in timings.items():
        report.add(name, f"{phase}: {rows:,} rows, batch {BATCH}", timing)
        report.figures[f"rows a second/{phase}/{name}"] = round(rows / timing.median * 1e3)
        ours = timings["hotbed, 1 thread", phase]
        if not name.startswith("hotbed"):
            report.ratios[f"{name}/{phase}"] = timing.median / ours.median
    report.remark("Ratios are over hotbed on 1 thread")
    report.remark("pandas reads whole files and hashes text by pandas.util.hash_array")
    return report


_INTEGERS, _TEXT, _CSV = "Parquet, integers", "Parquet, text", "CSV, text"


def _written(folder: Path, rows: int) -> dict[str, Path]:
    """The same rows as Parquet with ids as integers and as 8 digits of text, and as CSV."""
    clicks = list(hb.data.synthetic_clicks(rows, 1 << 15))
    columns: dict[str, pa.Array] = {
        "label": pa.array(torch.cat([batch["label"] for batch in clicks]).numpy().astype(np.int8))
    }
    dense = torch.cat([batch["dense"] for batch in clicks]).double().expm1().round().long()
    for at, name in enumerate(DENSE):
        values = dense[:, at].numpy()
        columns[name] = pa.array(values, mask=values == 0)
    texts = dict(columns)
    for name in CATEGORIES:
        ids = torch.cat([batch[name] for batch in clicks]).tolist()
        columns[name] = pa.array([None if i < 0 else i for i in ids], pa.int64())
        texts[name] = pa.array([None if i < 0 else f"{i:08x}" for i in ids])
    files = {
        name: folder / file
        for name, file in ((_INTEGERS, "ints.parquet"), (_TEXT, "text.parquet"), (_CSV, "text.csv"))
    }
    pq.write_table(pa.table(columns), files[_INTEGERS], row_group_size=ROW_GROUP)
    pq.write_table(pa.table(texts), files[_TEXT], row_group_size=ROW_GROUP)
    pa.csv.write_csv(pa.table(texts), files[_CSV])
    return files


def _hotbed(path: Path, phase: str) -> Batches:
    columns: dict[str, Any] = {"label": Label(), **{name: Number("log") for name in DENSE}}
    values = "int" if phase == _INTEGERS else "hash"
    schema = Schema({**columns, **{name: Id(values=values) for name in CATEGORIES}})
    return iter(hb.data.open(path, schema, BATCH))


def _arrow(path: Path, phase: str) -> Batches:
    """Batches as one would write them by hand for a file of integers."""
    file = pq.ParquetFile(path)
    for batch in file.iter_batches(BATCH, use_threads=pa.cpu_count() > 1):
        numbers = [batch.column(name).to_numpy(zero_copy_only=False) for name in DENSE]
        dense = np.log1p(np.nan_to_num(np.maximum(np.stack(numbers, 1), 0)))
        yield {
            "label": torch.from_numpy(batch.column("label").to_numpy().astype(np.float32)),
            "dense": torch.from_numpy(dense.astype(np.float32)),
            **{
                name: torch.from_numpy(batch.column(name).fill_null(-1).to_numpy().copy())
                for name in CATEGORIES
            },
        }


def _pandas(path: Path, phase: str) -> Batches:
    """The whole file by pandas, then slices of tensors."""
    text = dict.fromkeys(CATEGORIES, "str")
    frame = pandas.read_csv(path, dtype=text) if phase == _CSV else pandas.read_parquet(path)
    dense = torch.from_numpy(np.log1p(frame[list(DENSE)].fillna(0).clip(0).to_numpy(np.float32)))
    label = torch.from_numpy(frame["label"].to_numpy(np.float32))
    ids = {}
    for name in CATEGORIES:
        if phase == _INTEGERS:
            column = frame[name].fillna(-1).to_numpy(np.int64)
        else:
            values = frame[name].fillna("").to_numpy(object)
            column = pandas.util.hash_array(values, categorize=True).view(np.int64)
        ids[name] = torch.from_numpy(column.copy())
    for begin in range(0, len(frame), BATCH):
        part = slice(begin, begin + BATCH)
        yield {
            "label": label[part],
            "dense": dense[part],
            **{name: column[part] for name, column in ids.items()},
        }


class _Reads:
    """One way to read whole files into batches."""

    def __init__(
        self,
        name: str,
        read: Callable[[Path, str], Batches],
        files: Mapping[str, Path],
        threads: int,
    ) -> None:
        self.name, self._read, self._files, self._threads = name, read, files, threads

    def nbytes(self) -> int:
        return 1 << 30

    def build(self) -> None:
        pass

    def drop(self) -> None:
        pass

    def phases(self) -> dict[str, Callable[[int], object]]:
        def reading(phase: str) -> Callable[[int], object]:
            def read(_: int) -> int:
                pa.set_cpu_count(self._threads)
                return sum(len(batch["label"]) for batch in self._read(self._files[phase], phase))

            return read

        return {phase: reading(phase) for phase in self._files}
