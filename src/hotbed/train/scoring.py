"""The whole of `hotbed predict`: a saved model and click logs in, scores out."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hotbed.checkpoint import load_model
from hotbed.checkpoint.files import others_loaded_by
from hotbed.data import CATEGORIES, MISSING_ID, CriteoLog
from hotbed.storage import Storage
from hotbed.train.evaluation import scored
from hotbed.train.metrics import auc, logloss
from hotbed.train.report import check_writable_file, complete_file
from hotbed.train.run_note import write_note
from hotbed.train.settings import SettingsError


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
    """Write the click probability of every row of the logs `data` to the CSV file `out`.

    The file appears when it is complete. Its header is ``line,score`` or ``KEY,score``; the rows are in the
    order of the logs.

    Args:
        key: the column, one of C1 to C26, that tells rows apart, as the log writes it. Default: the number of
            the line, see `CriteoLog`.
        storage: for the tiers that the model's rows are to lie in. Default: in memory.

    Raises:
        HotbedError, OSError: no checkpoint of a model, a malformed line, an output that cannot be written.
    """
    if key is not None and key not in CATEGORIES:
        raise SettingsError(f"--key is {key}; it must be one of C1 to C{len(CATEGORIES)}.")
    check_writable_file(out)
    log = CriteoLog(data, batch_size, labels="auto", line_numbers=key is None)
    with others_loaded_by("hotbed predict {path}"):
        model = load_model(folder, storage=storage)
    if storage is not None and storage.ssd is not None:
        with contextlib.suppress(OSError):
            write_note(str(storage.ssd), may_go=True)  # the rows are in `folder`
    began = time.perf_counter()
    logits: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    rows = 0
    with complete_file(out) as file:
        file.write(f"{key or 'line'},score\n")
        for batch, z in scored(model, log):
            rows += len(z)
            scores = torch.sigmoid(z.double()).tolist()
            keys = batch[key or "line"].tolist()
            if key is not None:
                keys = ["" if id_ == MISSING_ID else f"{id_:08x}" for id_ in keys]
            file.writelines(f"{k},{p:.9g}\n" for k, p in zip(keys, scores, strict=True))
            if "label" in batch:
                logits.append(z)
                labels.append(batch["label"])
    seconds = time.perf_counter() - began
    if not logits:
        return Scores(rows, seconds, None, None)
    z, y = torch.cat(logits), torch.cat(labels)
    area = auc(z, y)
    return Scores(rows, seconds, None if math.isnan(area) else area, logloss(z, y))
