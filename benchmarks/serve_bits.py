"""Rows in few bits: test AUC on the Criteo log of the same models, and sizes of their bundles."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotbed as hb
from benchmarks.peers.torch_dlrm import COLUMNS
from benchmarks.report import Report
from benchmarks.train import BATCH, LR, QUICK_BATCHES, TEST_FRACTION, area_under_curve, click_log

DIM = 64
FORMS = ("float32", "float16", "int8", "int4")
SEEDS = 5
STUDENT = 2.776
"""Quantile 0.975 of Student's t with four degrees of freedom."""


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("serve-bits", quick)
    scores: dict[str, list[float]] = {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path, source = click_log(folder, quick)
        rows = (0, QUICK_BATCHES * BATCH) if quick else None
        training, testing = hb.data.CriteoLog(path, batch_size=BATCH, rows=rows).split(
            TEST_FRACTION
        )
        train, test = list(training), list(testing)
        seeds = 2 if quick else SEEDS
        for seed in range(seeds):
            progress(f"seed {seed + 1} of {seeds}")
            model = _trained(seed, train)
            for form in FORMS:
                few = hb.serve.quantized(model, rows=form)
                scores[form].append(area_under_curve(few, test))
        progress("bundles")
        sizes = {form: _size(model, test[0], folder, form) for form in FORMS}
    for form in FORMS[1:]:
        away = [a - b for a, b in zip(scores[form], scores["float32"], strict=True)]
        named = f"DLRM, dim {DIM}, {source}, {seeds} seeds, {form}: test AUC minus that of float32"
        report.figures[f"{named}, mean"] = round(statistics.mean(away), 6)
        report.figures[f"{named}, +- of the mean"] = round(
            STUDENT * statistics.stdev(away) / math.sqrt(seeds), 6
        )
        report.ratios[f"size of float32 rows over {form}, ids apart"] = round(
            sizes["float32"] / sizes[form], 2
        )
    report.figures["float32: mean test AUC"] = round(statistics.mean(scores["float32"]), 5)
    report.remark(
        "One pass over the log in time order; one model is tested with each kind of rows. 95 % of the mean."
    )
    return report


def _trained(seed: int, train: list[Any]) -> nn.Module:
    torch.manual_seed(seed)
    model = hb.models.DLRM(COLUMNS, dim=DIM, seed=seed)
    optimizer = hb.optim.Adam(model.parameters(), lr=LR)
    for batch in train:
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def _size(model: nn.Module, batch: dict[str, Any], folder: Path, form: str) -> int:
    """Return bytes of a bundle's rows, with scales and without ids."""
    sample = {name: values[:8] for name, values in batch.items()}
    bundle = hb.export(model, folder / form, sample=sample, rows=form)
    files = [*bundle.glob("tables/*.rows.npy"), *bundle.glob("tables/*.scales.npy")]
    return sum(file.stat().st_size for file in files)
