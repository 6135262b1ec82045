"""The main job end to end: a DLRM on the Criteo log, beside a twin of stock torch parts."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.machine import ROOT, OtherWork
from benchmarks.measure import Timing
from benchmarks.peers.torch_dlrm import COLUMNS, TorchDlrm, TwoAdams, Vocabulary
from benchmarks.report import Report

BATCH, DIM, LR, SEEDS = 512, 16, 1e-3, 5
TEST_FRACTION = 0.1
COMPARED_LOSSES = 200
QUICK_BATCHES, QUICK_SEEDS = 40, 2

Batch = dict[str, Tensor]


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    from hotbed.data import CriteoLog

    report = Report("train", quick)
    with tempfile.TemporaryDirectory() as scratch:
        path, source = click_log(Path(scratch), quick)
        if "generated" in source:
            report.remarks.append("The real log is not there: set HOTBED_SHARED. Generated rows.")
        log = CriteoLog(path, batch_size=BATCH)
        if quick:
            log = CriteoLog(path, batch_size=BATCH, rows=(0, QUICK_BATCHES * BATCH))
        training, testing = log.split(TEST_FRACTION)
        progress("reading the log")
        train, test = list(training), list(testing)
        vocabulary = Vocabulary(train + test)
        seeds = range(QUICK_SEEDS if quick else SEEDS)
        _train_all(report, source, training, train, test, vocabulary, seeds, progress)
    progress("comparing losses from copied weights")
    count = min(COMPARED_LOSSES, len(train))
    for eps_as_adam, twin in ((False, "SparseAdam"), (True, "SparseAdam with Adam's eps")):
        what = f"largest difference in the first {count} losses, {twin}"
        report.figures[what] = largest_loss_difference(train[:count], vocabulary, eps_as_adam)
    return report


def _train_all(
    report: Report,
    source: str,
    training: Iterable[Batch],
    train: list[Batch],
    test: list[Batch],
    vocabulary: Vocabulary,
    seeds: Iterable[int],
    progress: Callable[[str], None],
) -> None:
    mapped_train = [vocabulary(batch) for batch in train]
    mapped_test = [vocabulary(batch) for batch in test]
    rows = sum(len(batch["label"]) for batch in train)

    # For each contender: its model, its batches in memory, its batches from the file.
    contenders: dict[
        str, tuple[Callable[[int], Any], list[Batch], Iterable[Batch], list[Batch]]
    ] = {
        "hotbed": (hotbed_dlrm, train, training, test),
        "torch": (
            lambda seed: torch_dlrm(seed, vocabulary.rows()),
            mapped_train,
            _Mapped(training, vocabulary),
            mapped_test,
        ),
    }
    timings = {
        (name, variant): Timing() for name in contenders for variant in ("in memory", "from file")
    }
    aucs: dict[str, list[float]] = {name: [] for name in contenders}
    for seed in seeds:
        # Whoever goes first changes with the seed.
        order = list(contenders) if seed % 2 == 0 else list(contenders)[::-1]
        for variant in ("in memory", "from file"):
            for name in order:
                make, kept, streamed, tests = contenders[name]
                progress(f"seed {seed}, {variant}: {name}")
                model, optimizer = make(seed)
                with OtherWork() as other:
                    ms = one_pass(model, optimizer, kept if variant == "in memory" else streamed)
                timing = timings[name, variant]
                timing.ms.append(ms)
                timing.other_work = max(timing.other_work, other.share)
                if variant == "in memory":
                    aucs[name].append(area_under_curve(model, tests))
                del model, optimizer
                gc.collect()

    for variant in ("in memory", "from file"):
        config = f"{source}, {rows:,} rows, batch {BATCH}, one pass, batches {variant}"
        for name in contenders:
            timing = timings[name, variant]
            report.add(name, config, timing)
            report.figures[f"{name}, {variant}: rows a second"] = round(
                rows / (timing.median / 1e3)
            )
        ratio = timings["torch", variant].median / timings["hotbed", variant].median
        report.ratios[f"torch/train {variant}"] = ratio
    for name, values in aucs.items():
        report.figures[f"{name}: mean test AUC"] = round(statistics.mean(values), 5)
        report.figures[f"{name}: smallest test AUC"] = round(min(values), 5)
        report.figures[f"{name}: largest test AUC"] = round(max(values), 5)
    report.figures["mean test AUC, hotbed - torch"] = round(
        statistics.mean(aucs["hotbed"]) - statistics.mean(aucs["torch"]), 5
    )
    report.remarks.append(
        "torch gets its vocabulary, a pass over the whole log, outside the timed part; from file, "
        "it looks row numbers up in it. Hotbed's tables are dynamic and need none."
    )


def click_log(scratch: Path, quick: bool) -> tuple[Path, str]:
    """The real Criteo rows, or as many generated ones."""
    root = os.environ.get("HOTBED_SHARED")
    shared = Path(root) if root else ROOT.parent / "shared"
    path = shared / "data" / "criteo" / "train.tsv.gz"
    if path.is_file():
        return path, "Criteo log"
    from hotbed.data import write_criteo_tsv

    path = scratch / "clicks.tsv"
    write_criteo_tsv(path, rows=QUICK_BATCHES * BATCH if quick else 137_139, seed=0)
    return path, "generated log"


def hotbed_dlrm(seed: int) -> tuple[nn.Module, Any]:
    import hotbed.models
    import hotbed.optim

    torch.manual_seed(seed)
    model = hotbed.models.DLRM(COLUMNS, dim=DIM, bottom=[64, DIM], top=[256, 128], seed=seed)
    return model, hotbed.optim.Adam(model.parameters(), lr=LR)


def torch_dlrm(seed: int, rows: list[int]) -> tuple[TorchDlrm, TwoAdams]:
    torch.manual_seed(seed)
    model = TorchDlrm(rows, DIM)
    return model, TwoAdams(model, LR)


def one_pass(model: nn.Module, optimizer: Any, batches: Iterable[Batch]) -> float:
    """Trains on every batch once; milliseconds."""
    start = time.perf_counter()
    for batch in batches:
        training_step(model, optimizer, batch)
    return (time.perf_counter() - start) * 1e3


def training_step(model: nn.Module, optimizer: Any, batch: Batch) -> Tensor:
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def area_under_curve(model: nn.Module, batches: list[Batch]) -> float:
    """The share of (click, no click) pairs in the right order, ties half."""
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(batch) for batch in batches]).double().numpy()
    labels = torch.cat([batch["label"] for batch in batches]).numpy() > 0.5
    clicked, passed = scores[labels], np.sort(scores[~labels])
    below = np.searchsorted(passed, clicked, side="left").sum()
    not_above = np.searchsorted(passed, clicked, side="right").sum()
    return float((below + not_above) / 2 / (len(clicked) * len(passed)))


def largest_loss_difference(
    batches: list[Batch], vocabulary: Vocabulary, eps_as_adam: bool
) -> float:
    """Trains both from the same weights on the same batches; the largest |difference| of losses."""
    twin, _ = torch_dlrm(0, vocabulary.rows())
    twin_optimizer = TwoAdams(twin, LR, eps_as_adam=eps_as_adam)
    model, optimizer = hotbed_dlrm(0)
    copy_weights(twin, model, vocabulary)
    largest = 0.0
    for batch in batches:
        ours = training_step(model, optimizer, batch)
        theirs = training_step(twin, twin_optimizer, vocabulary(batch))
        largest = max(largest, abs(ours.item() - theirs.item()))
    return largest


@torch.no_grad()
def copy_weights(twin: TorchDlrm, model: Any, vocabulary: Vocabulary) -> None:
    """Gives Hotbed's DLRM the weights of the twin, every row of every table included."""
    for column, table in zip(COLUMNS, twin.tables, strict=True):
        model.embeddings.assign(column, torch.from_numpy(vocabulary.ids[column]), table.weight)
    for source, target in ((twin.bottom, model.bottom), (twin.top, model.top)):
        for theirs, ours in zip(source.parameters(), target.parameters(), strict=True):
            ours.copy_(theirs)


class _Mapped:
    """Batches of a log with row numbers in place of ids."""

    def __init__(self, batches: Iterable[Batch], vocabulary: Vocabulary) -> None:
        self.batches, self.vocabulary = batches, vocabulary

    def __iter__(self) -> Iterator[Batch]:
        return map(self.vocabulary, self.batches)
