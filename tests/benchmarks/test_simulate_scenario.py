"""The scenario `simulate` as it is called: what it reports, checks and explains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import draw, simulate, simulated_worlds, worlds
from benchmarks.report import Report
from hotbed.dist import Rates
from tools.benchmark_tables import section

ROOT = Path(__file__).resolve().parents[2]


def ran(**options: Any) -> Report:
    return simulate.run(quick=True, progress=lambda text: None, checks=False, **options)


def test_a_run_without_the_check_is_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "run", None)
    report = ran()
    titles = [f"{simulate.PREDICTED}, {network}" for network in ("InfiniBand", "Ethernet")]
    assert [line["GPUs"] for line in report.tables[titles[0]]] == [*simulate.QUICK_GPUS]
    assert report.tables[titles[0]][1]["step ms"] < report.tables[titles[1]][1]["step ms"]
    assert not report.rows
    for title in titles:
        phases = report.tables[title.replace(simulate.PREDICTED, simulate.PHASES)]
        for line, parts in zip(report.tables[title], phases, strict=True):
            summed = sum(value for name, value in parts.items() if name != "GPUs")
            assert summed == pytest.approx(line["step ms"], abs=0.05)


def test_tables_are_printed_and_written(tmp_path: Path) -> None:
    report = ran(network="Ethernet", gpus=[16, 8], changes=["Ethernet NIC=25"])
    console = Console(record=True, width=120)
    report.show(console)
    said = console.export_text()
    assert "Ethernet NIC" in said and "given by --set" in said and "InfiniBand," not in said
    assert [line["GPUs"] for line in report.tables[f"{simulate.PREDICTED}, Ethernet"]] == [8, 16]
    text = section("simulate", report.as_json())
    assert "**Assumptions**" in text and "| Ethernet NIC | 25 | GB/s | given by --set |" in text


def test_the_picture_shows_both_networks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = draw.simulate(ran().as_json())
    figure.savefig(tmp_path / "simulate.svg")
    drawn = (tmp_path / "simulate.svg").read_text(encoding="utf-8")
    assert "Ethernet, predicted" in drawn and "send gradients" in drawn


def test_figures_of_the_host_come_from_a_file(tmp_path: Path) -> None:
    Rates(forward_call=0.5).write(tmp_path / "rates.toml")
    slow = ran(rates=tmp_path / "rates.toml", gpus=[8], network="InfiniBand")
    lines = {line["assumption"]: line for line in slow.tables[simulate.ASSUMPTIONS]}
    assert lines["host: forward_call"]["source"] == "measured: rates.toml"
    assert slow.tables[f"{simulate.PREDICTED}, InfiniBand"][0]["step ms"] > 500
    given = ran(rates=tmp_path / "rates.toml", changes=["host: forward_call=1"], gpus=[8])
    assert given.tables[f"{simulate.PREDICTED}, InfiniBand"][0]["step ms"] < 20


def test_no_gpus_are_refused() -> None:
    with pytest.raises(SystemExit, match="from 1 on"):
        ran(gpus=[0])


@pytest.mark.process
def test_the_check_runs_small() -> None:
    report = simulate.run(
        quick=True, progress=lambda text: None, gpus=[8], network="InfiniBand", checks=True
    )
    rows = report.tables[simulated_worlds.CHECKED]
    assert [(row["processes"], row["of"]) for row in rows] == [
        (world, part) for world in (1, 2) for part in ("tables", "whole model")
    ]
    assert all(row["predicted ms"] > 0 and row["measured ms"] > 0 for row in rows)
    assert len(report.rows) == 6 and len(report.ratios) == 5


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate", "--help"], ["--no-check", "efficiency", "--json", '"assumed" means']),
        (["--help"], ["SCENARIO --help", "simulate", "measured-plan"]),
        (["measured-plan", "--help"], ["--model", "--quick"]),
    ],
)
def test_help_teaches(words: list[str], said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": os.pathsep.join(part for part in sys.path if part), "COLUMNS": "110"},
    )
    assert not [text for text in said if text not in done.stdout]
