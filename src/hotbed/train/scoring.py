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
from hotbed.data import CriteoLog
from hotbed.storage import Storage
from hotbed.train.loop import scored
from hotbed.train.metrics import auc, logloss
from hotbed.train.report import check_writable_file, complete_file
from hotbed.train.run_note import write_note


class Scores(NamedTuple):
    """What `write_scores` did."""

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
) -> Scores:
    """Write the click probability of every row of the logs `data` to the CSV file `out`.

    The file, a header ``score`` and one number a row, appears when it is complete.

    Args:
        storage: for the tiers that the model's rows are to lie in. Default: in memory.

    Raises:
        HotbedError, OSError: no checkpoint of a model, a malformed line, an output that cannot be written.
    """
    check_writable_file(out)
    log = CriteoLog(data, batch_size, labels="auto")
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
        file.write("score\n")
        for batch, z in scored(model, log):
            rows += len(z)
            file.writelines(f"{p:.9g}\n" for p in torch.sigmoid(z.double()).tolist())
            if "label" in batch:
                logits.append(z)
                labels.append(batch["label"])
    seconds = time.perf_counter() - began
    if not logits:
        return Scores(rows, seconds, None, None)
    z, y = torch.cat(logits), torch.cat(labels)
    area = auc(z, y)
    return Scores(rows, seconds, None if math.isnan(area) else area, logloss(z, y))
