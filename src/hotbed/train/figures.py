"""The figures of a run of `hotbed train`: what --json writes, and the closing table shows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypedDict

from torch import nn

from hotbed.checkpoint.ranks import ranks_of
from hotbed.collection import EmbeddingCollection
from hotbed.modules.owner import tables_of
from hotbed.table.alone import Processes
from hotbed.train.evaluation import Evaluation
from hotbed.train.loop import FitResult
from hotbed.train.report import peak_rss_bytes, versions
from hotbed.train.settings import TrainSettings

__all__ = ["OF_ALL", "embeddings_of", "figures", "lines", "table_sizes", "tell_too"]

OF_ALL = "figures of all"
"""By which memory hosts know that all are asked."""


class _OfProcess(TypedDict):
    peak_rss_bytes: int
    tiers: dict[str, float]
    memory: dict[str, dict[str, int]]


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
    of_all = _of_all(model, ranks)
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
        "processes": ranks.trainers,
        "memory_hosts": ranks.size - ranks.trainers,
        "peak_rss_bytes": max(one["peak_rss_bytes"] for one in of_all),
        "interrupted": interrupted,
        "tiers": _together([one["tiers"] for one in of_all if one["tiers"]]),
        "config": dataclasses.asdict(settings),
        "versions": versions(),
    }


def table_sizes(model: nn.Module, ranks: Processes) -> list[dict[str, object]]:
    """Name, rows and bytes of each table, of all ranks together; every rank calls it."""
    embeddings, memory = embeddings_of(model), [one["memory"] for one in _of_all(model, ranks)]
    return [
        {
            "name": name,
            "rows": embeddings.count(name),
            "bytes": sum(one[name]["total"] for one in memory),
        }
        for name in memory[0]
    ]


def _of_all(model: nn.Module, ranks: Processes) -> list[_OfProcess]:
    """Return what each process tells of itself, memory hosts among them. All ranks call this."""
    if ranks.trainers < ranks.size:
        ranks.values_of_all("figures", (OF_ALL, {}))  # memory hosts hear it, and do the same
    return _told(model, ranks)


def _told(model: nn.Module, ranks: Processes) -> list[_OfProcess]:
    embeddings = embeddings_of(model)
    own: _OfProcess = {
        "peak_rss_bytes": peak_rss_bytes(),
        "tiers": embeddings.stats() if embeddings.has_tiers else {},
        "memory": embeddings.memory(),
    }
    return ranks.values_of_all("figures", own)


def tell_too(model: nn.Module, arguments: object) -> None:
    """Do on a memory host what the others do in `_of_all`."""
    _told(model, ranks_of(tables_of(model), model))


def _together(tiers: list[dict[str, float]]) -> dict[str, float]:
    """Counters of all processes that have some."""
    if len(tiers) < 2:
        return tiers[0] if tiers else {}
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
    if report["processes"] > 1 or report["memory_hosts"]:
        shown["processes"] = f"{report['processes']}"
    if report["memory_hosts"]:
        shown["memory hosts"] = f"{report['memory_hosts']}"
    shown["peak memory"] = f"{report['peak_rss_bytes'] / 2**20:,.0f} MiB"
    if config["json"]:
        shown["figures in"] = config["json"]
    if config["trace"]:
        shown["trace in"] = f"{config['trace']} (open it in ui.perfetto.dev)"
    return shown
