"""The whole of `hotbed predict`: a saved model and files of samples in, scores out."""

from __future__ import annotations

import contextlib
import csv
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from hotbed.checkpoint import load_model
from hotbed.checkpoint.errors import others_loaded_by
from hotbed.data import CATEGORIES, MISSING_ID, ColumnFiles, CriteoLog, Key, Schema
from hotbed.storage import Storage
from hotbed.train.batches import Batch
from hotbed.train.evaluation import scored
from hotbed.train.metrics import auc, logloss
from hotbed.train.report import check_writable_file, complete_file
from hotbed.train.run_note import write_note
from hotbed.train.settings import SettingsError


class _Rows(NamedTuple):
    """Rows to be scored, and what the lines of their scores begin with."""

    reader: Iterable[Batch]
    key: str
    """Heading of the first column."""
    scores: Sequence[str]
    """Headings of the scores, one a label."""
    keys: Callable[[Batch, range], Sequence[object]]
    """(batch, numbers of its rows) → what tells its rows apart."""


def _of_logs(data: Sequence[str], batch_size: int, key: str | None) -> _Rows:
    if key is not None and key not in CATEGORIES:
        raise SettingsError(f"--key is {key}; it must be one of C1 to C{len(CATEGORIES)}.")
    name = key or "line"

    def keys(batch: Batch, numbers: range) -> Sequence[object]:
        found = batch[name].tolist()
        return found if key is None else ["" if i == MISSING_ID else f"{i:08x}" for i in found]

    log = CriteoLog(data, batch_size, labels="auto", line_numbers=key is None)
    return _Rows(log, name, ["score"], keys)


def _of_columns(schema: Schema, data: Sequence[str], batch_size: int, key: str | None) -> _Rows:
    """Rows of files; told apart by --key, else the schema's first key column, else their numbers, from 1."""
    own = [name for name, column in schema.columns.items() if isinstance(column, Key)]
    if key is not None and key not in own:
        if key in schema.columns:
            raise SettingsError(
                f"--key {key} is a column of the kind {schema.columns[key].kind!r}. Name one that the model "
                "does not use."
            )
        schema = Schema({**schema.columns, key: Key()})
    name = key or (own[0] if own else None)

    def keys(batch: Batch, numbers: range) -> Sequence[object]:
        if name is None:
            return numbers
        found = batch[name]
        return found.tolist() if isinstance(found, torch.Tensor) else found

    reader = ColumnFiles(data, schema, batch_size, labels="auto")
    several = len(schema.labels) > 1
    return _Rows(reader, name or "row", schema.labels if several else ["score"], keys)


class Scores(NamedTuple):
    """Result of `write_scores`."""

    rows: int
    seconds: float
    auc: float | None
    """None where the rows have no labels, or all the same."""
    logloss: float | None


def write_scores(
    folder: str,
    data: Sequence[str],
    out: str,
    batch_size: int = 4096,
    storage: Storage | None = None,
    key: str | None = None,
) -> Scores:
    """Write the click probability of every row of the files `data` to the CSV file `out`.

    The file appears when it is complete. Its header is ``line,score`` or ``KEY,score``; the rows are in the
    order of the files. A model with several labels has a column for each, by its name.

    Args:
        data: click logs; or Parquet, CSV or TSV files, if the model was made of a schema.
        key: the column that tells rows apart: of logs one of C1 to C26, of other files one that the model
            does not use. Default: the number of the line, see `CriteoLog`; of other files a column of the
            kind "key", else the number of the row, from 1.
        storage: for the tiers that the model's rows are to lie in. Default: in memory.

    Raises:
        HotbedError, OSError: no checkpoint of a model, a malformed line, an output that cannot be written.
    """
    check_writable_file(out)
    with others_loaded_by("hotbed predict {path}"):
        model = load_model(folder, storage=storage)
    schema = getattr(model, "schema", None)
    asked = (
        _of_logs(data, batch_size, key)
        if schema is None
        else _of_columns(schema, data, batch_size, key)
    )
    if storage is not None and storage.ssd is not None:
        with contextlib.suppress(OSError):
            # The rows are in `folder`.
            write_note(str(storage.ssd), may_go=True, of_logs=schema is None)
    began = time.perf_counter()
    logits: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    rows = 0
    with complete_file(out) as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([asked.key, *asked.scores])
        for batch, z in scored(model, asked.reader):
            scores = torch.sigmoid(z.double()).reshape(len(z), -1).tolist()
            for name, row in zip(
                asked.keys(batch, range(rows + 1, rows + 1 + len(z))), scores, strict=True
            ):
                lines.writerow([name, *(f"{p:.9g}" for p in row)])
            rows += len(z)
            if "label" in batch and z.shape == batch["label"].shape:
                logits.append(z)
                labels.append(batch["label"])
    seconds = time.perf_counter() - began
    if not logits:
        return Scores(rows, seconds, None, None)
    z, y = torch.cat(logits), torch.cat(labels)
    area = auc(z, y)
    return Scores(rows, seconds, None if math.isnan(area) else area, logloss(z, y))
