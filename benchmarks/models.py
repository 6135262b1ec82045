"""Every click model on the Criteo log, beside a twin of stock torch parts with the same first weights and
batches.

Both make one pass in the order of time, Adam for dense layers and rows that a batch has (SparseAdam for the
twin's tables, its eps as Adam means it), and are tested on the last tenth.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.peers import torch_models
from benchmarks.peers.torch_dlrm import COLUMNS, TorchDlrm, Vocabulary
from benchmarks.report import Report
from benchmarks.train import (
    BATCH,
    DIM,
    LR,
    QUICK_BATCHES,
    TEST_FRACTION,
    area_under_curve,
    click_log,
    one_pass,
)

SEEDS, QUICK_SEEDS = 3, 1

TWINS: dict[str, Callable[[list[int], int], nn.Module]] = {
    "dlrm": TorchDlrm,
    "wide-deep": torch_models.TorchWideDeep,
    "deepfm": torch_models.TorchDeepFM,
    "xdeepfm": torch_models.TorchXDeepFM,
    "dcn": torch_models.TorchDCN,
    "dcn-v1": torch_models.TorchDCNv1,
    "pnn": torch_models.TorchPNN,
    "autoint": torch_models.TorchAutoInt,
    "final-mlp": torch_models.TorchFinalMLP,
    "mmoe": torch_models.TorchMMoE,
}


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    from hotbed.data import CriteoLog

    report = Report("models", quick)
    with tempfile.TemporaryDirectory() as scratch:
        path, source = click_log(Path(scratch), quick)
        rows = (0, QUICK_BATCHES * BATCH) if quick else None
        training, testing = CriteoLog(path, batch_size=BATCH, rows=rows).split(TEST_FRACTION)
        progress("reading the log")
        train, test = list(training), list(testing)
    if "generated" in source:
        report.remarks.append("The real log is not there: set HOTBED_SHARED. Generated rows.")
    vocabulary = Vocabulary(train + test)
    mapped = [[vocabulary(batch) for batch in batches] for batches in (train, test)]
    samples = sum(len(batch["label"]) for batch in train)
    for name in TWINS:
        timings = {who: Timing() for who in ("hotbed", "torch")}
        aucs: dict[str, list[float]] = {who: [] for who in timings}
        losses: dict[str, list[float]] = {who: [] for who in timings}
        for seed in range(QUICK_SEEDS if quick else SEEDS):
            pair = _pair(name, seed, vocabulary)
            batches = {"hotbed": (train, test), "torch": (mapped[0], mapped[1])}
            for who in [*timings] if seed % 2 else [*timings][::-1]:
                progress(f"{name}, seed {seed}: {who}")
                model, optimizer = pair.pop(who)
                with OtherWork() as other:
                    ms = one_pass(model, optimizer, batches[who][0])
                timings[who].ms.append(ms)
                timings[who].other_work = max(timings[who].other_work, other.share)
                aucs[who].append(area_under_curve(model, batches[who][1]))
                losses[who].append(log_loss(model, batches[who][1]))
                parameters = sum(p.numel() for p in dense_of(model))
                del model, optimizer
                gc.collect()
        _note(report, name, f"{source}, {samples:,} rows, batch {BATCH}", timings, aucs, samples)
        for who, values in losses.items():
            report.figures[f"{name}: {who}, mean test log loss"] = round(statistics.mean(values), 5)
        report.figures[f"{name}: parameters of dense layers"] = parameters
    report.remarks.append(
        "torch gets its vocabulary, a pass over the whole log, outside the timed part, and row numbers in "
        "place of ids. Batches lie in memory."
    )
    return report


def _note(
    report: Report,
    name: str,
    config: str,
    timings: dict[str, Timing],
    aucs: dict[str, list[float]],
    samples: int,
) -> None:
    for who, timing in timings.items():
        report.add(f"{name}: {who}", config, timing)
        report.figures[f"{name}: {who}, rows a second"] = round(samples / (timing.median / 1e3))
        for what, of in (("mean", statistics.mean), ("smallest", min), ("largest", max)):
            report.figures[f"{name}: {who}, {what} test AUC"] = round(of(aucs[who]), 5)
    differences = [
        ours - theirs for ours, theirs in zip(aucs["hotbed"], aucs["torch"], strict=True)
    ]
    report.figures[f"{name}: largest |difference of paired AUC|"] = round(
        max(map(abs, differences)), 5
    )
    report.figures[f"{name}: mean difference of paired AUC"] = round(
        statistics.mean(differences), 5
    )
    report.ratios[f"{name}: torch/hotbed"] = timings["torch"].median / timings["hotbed"].median


@torch.no_grad()
def log_loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    model.eval()
    logits = torch.cat([model(batch) for batch in batches])
    labels = torch.cat([batch["label"] for batch in batches])
    return float(nn.functional.binary_cross_entropy_with_logits(logits, labels))


def _pair(name: str, seed: int, vocabulary: Vocabulary) -> dict[str, tuple[nn.Module, Any]]:
    """A model, and its twin with the same weights, each with its optimizer."""
    import hotbed as hb

    torch.manual_seed(seed)
    kind = hb.models.MODELS[name]
    settings = {"tasks": 1} if name == "mmoe" else {}
    model = kind(COLUMNS, dim=DIM, seed=seed, **settings)
    twin = TWINS[name](vocabulary.rows(), DIM)
    copy_weights(model, twin, vocabulary)
    return {
        "hotbed": (model, hb.optim.Adam(model.parameters(), lr=LR)),
        "torch": (twin, _TwoAdams(twin)),
    }


def dense_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the dense layers, in the order in which both twins have them."""
    if isinstance(model, torch_models.TorchFinalMLP):
        return model.dense_parameters()
    of_tables = [
        p for part in ("tables", "weights", "embeddings") for p in _parameters(model, part)
    ]
    return [p for p in model.parameters() if all(p is not other for other in of_tables)]


def _parameters(model: nn.Module, part: str) -> list[nn.Parameter]:
    owner = getattr(model, part, None)
    return list(owner.parameters()) if isinstance(owner, nn.Module) else []


@torch.no_grad()
def copy_weights(model: Any, twin: Any, vocabulary: Vocabulary) -> None:
    """Gives the twin the weights of Hotbed's model, those of ids included that no batch has named yet."""
    for suffix, tables in (("", twin.tables), (".wide", getattr(twin, "weights", []))):
        for column, table in zip(COLUMNS, tables, strict=False):
            ids = torch.from_numpy(vocabulary.ids[column])
            table.weight.copy_(model.embeddings.lookup(f"{column}{suffix}", ids))
    for ours, theirs in zip(dense_of(model), dense_of(twin), strict=True):
        theirs.copy_(ours.view_as(theirs))


class _TwoAdams:
    """SparseAdam for tables, its eps as Adam's, and Adam for the rest."""

    def __init__(self, twin: nn.Module) -> None:
        tables = [*_parameters(twin, "tables"), *_parameters(twin, "weights")]
        self.parts = (
            torch.optim.SparseAdam(tables, lr=LR),
            torch.optim.Adam(dense_of(twin), lr=LR),
        )
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        (group,) = self.parts[0].param_groups
        shrunk: float = (1 - group["betas"][1] ** self.steps) ** 0.5
        group["eps"] = self.parts[0].defaults["eps"] * shrunk
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def largest_difference(name: str, batches: list[dict[str, Tensor]], seed: int = 0) -> float:
    """The largest difference of two twins' losses over some steps."""
    vocabulary = Vocabulary(batches)
    pair = _pair(name, seed, vocabulary)
    losses = []
    for (model, optimizer), of in (
        (pair["hotbed"], batches),
        (pair["torch"], map(vocabulary, batches)),
    ):
        losses.append([])
        for batch in of:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return max(abs(ours - theirs) for ours, theirs in zip(*losses, strict=True))
