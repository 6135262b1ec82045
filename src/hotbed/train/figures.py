"""The figures of a run of `hotbed train`: what --json writes, and the closing table shows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import nn

from hotbed.checkpoint.ranks import ranks_of
from hotbed.collection import EmbeddingCollection
from hotbed.modules.owner import tables_of
from hotbed.table.alone import Processes
from hotbed.train.evaluation import Evaluation
from hotbed.train.loop import FitResult
from hotbed.train.report import peak_rss_bytes, versions
from hotbed.train.settings import TrainSettings

__all__ = ["embeddings_of", "figures", "lines", "table_sizes"]


def embeddings_of(model: nn.Module) -> EmbeddingCollection:
    embeddings = model.embeddings
    assert isinstance(embeddings, EmbeddingCollection)
    return embeddings


def figures(
    settings: TrainSettings,
    model: nn.Module,
    result: FitResult,
    evaluation: Evaluation | None,
    interrupted: bool,
) -> dict[str, object]:
    """The figures of a run, of all ranks together; every rank calls it."""
    ranks, embeddings = ranks_of(tables_of(model), model), embeddings_of(model)
    tiers = embeddings.stats() if embeddings.has_tiers else {}
    of_ranks = ranks.values_of_all("figures", (peak_rss_bytes(), tiers))
    return {
        "auc": None if evaluation is None else evaluation.auc,
        "logloss": None if evaluation is None else evaluation.logloss,
        "samples_per_second": result.samples_per_second,
        "rows": result.rows,
        "epochs": result.epochs,
        "steps": result.steps,
        "test_rows": 0 if evaluation is None else evaluation.rows,
        "stored_rows": embeddings.count(),
        "seconds": result.seconds,
        "processes": ranks.size,
        "peak_rss_bytes": max(peak for peak, _ in of_ranks),
        "interrupted": interrupted,
        "tiers": _together([tiers for _, tiers in of_ranks]),
        "config": dataclasses.asdict(settings),
        "versions": versions(),
    }


def table_sizes(model: nn.Module, ranks: Processes) -> list[dict[str, object]]:
    """Name, rows and bytes of each table, of all ranks together; every rank calls it."""
    of_ranks = ranks.values_of_all("figures", embeddings_of(model).memory())
    return [
        {
            "name": name,
            "rows": sum(one[name]["rows"] for one in of_ranks),
            "bytes": sum(one[name]["total"] for one in of_ranks),
        }
        for name in of_ranks[0]
    ]


def _together(tiers: list[dict[str, float]]) -> dict[str, float]:
    """Counters of all processes."""
    if len(tiers) == 1 or not tiers[0]:
        return tiers[0]
    summed = {name: sum(one.get(name, 0.0) for one in tiers) for name in tiers[0]}
    summed["hit_rate"] = 1 - summed["rows_missed"] / max(1.0, summed["rows_used"])
    return summed


def lines(report: dict[str, Any]) -> dict[str, str]:
    """The rows of the closing table."""
    config = report["config"]
    shown = {
        "model": f"{config['model']}, dim {config['dim']}, {config['optimizer']} {config['lr']:g}",
        "samples trained on": f"{report['rows']:,}",
        "samples a second": f"{report['samples_per_second']:,.0f}",
        "samples tested on": "none",
    }
    if report["test_rows"]:
        shown["samples tested on"] = f"{report['test_rows']:,} (the last by time)"
        shown["test AUC"] = f"{report['auc']:.4f}"
        if math.isnan(report["auc"]):
            why = "a score is NaN" if math.isnan(report["logloss"]) else "all labels are alike"
            shown["test AUC"] = f"none: {why}"
        shown["test log loss"] = f"{report['logloss']:.4f}"
    if validation := report["validation"]:
        best = "none"
        if validation["best_step"] is not None:
            best = f"log loss {validation['best']:.4f} at step {validation['best_step']:,}"
        shown["best validation"] = f"{best} (of {validation['count']:,})"
        if validation["restored"]:
            shown["model"] += ", the best"
    if report["skipped_lines"]:
        shown["malformed lines skipped"] = f"{report['skipped_lines']:,}"
    shown["rows stored"] = f"{report['stored_rows']:,}"
    if tiers := report["tiers"]:
        shown["rows found in fast memory"] = f"{tiers['hit_rate']:.1%}"
        shown["rows brought up"] = f"{tiers['rows_missed'] - tiers['rows_created']:,.0f}"
        shown["rows written back"] = f"{tiers['rows_written_back']:,.0f}"
        shown["waited for rows"] = f"{tiers['wait_ms'] / 1e3:.1f} s"
    if report["processes"] > 1:
        shown["processes"] = f"{report['processes']}"
    shown["peak memory"] = f"{report['peak_rss_bytes'] / 2**20:,.0f} MiB"
    if config["json"]:
        shown["figures in"] = config["json"]
    if config["trace"]:
        shown["trace in"] = f"{config['trace']} (open it in ui.perfetto.dev)"
    return shown
