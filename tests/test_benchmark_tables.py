"""docs/results.md and its pictures show the committed results, of those only what was measured quietly."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import draw
from tools.benchmark_tables import PAGE, SCENARIOS, section, to_be_run, with_results


def row(name: str, times_floor: float, other_work: float) -> dict[str, Any]:
    measured = {"median_ms": 4.0, "times_floor": times_floor, "other_work": other_work}
    return {"name": name, "config": "sgd, forward", **measured}


def told(*rows: dict[str, Any], tables: dict[str, list[dict[str, Any]]] | None = None) -> str:
    return section(
        "step",
        {
            "scenario": "step",
            "date": "2026-11-21T16:28:44+00:00",
            "commit": "e884a6a",
            "hardware": {"cpu": "a CPU", "cores": 2, "copy_gb_per_s": {"1": 10.0, "2": 20.0}},
            "versions": {"torch": "2.13.0", "fbgemm-gpu-cpu": "1.8.0"},
            "rows": rows,
            "ratios": {"fbgemm/sgd/forward": 4.5},
            "figures": {},
            "remarks": [],
            "tables": tables or {},
        },
    )


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_results(page), "run python -m tools.benchmark_tables"


def test_quiet_rows_are_quoted_and_noisy_ones_named() -> None:
    quiet = told(row("hotbed", 1.75, 0.05), row("fbgemm", 9.5, 0.01))
    assert "| sgd, forward | 1.75 | 9.5 |" in quiet
    assert "`fbgemm/sgd/forward` 4.50" in quiet and "noisy" not in quiet
    mixed = told(row("hotbed", 1.75, 0.05), row("fbgemm", 9.5, 0.06))
    assert "| sgd, forward | 1.75 | noisy |" in mixed
    assert "up to 6% of the machine" in mixed and "4.50" not in mixed and "9.5" not in mixed


def test_tables_with_measured_times_are_not_quoted_from_noisy_runs() -> None:
    tables = {"checked": [{"measured ms": 3.25}], "predicted": [{"GPUs": 1024, "step ms": 2.5}]}
    quiet = told(row("hotbed", 1.75, 0.05), tables=tables)
    noisy = told(row("hotbed", 1.75, 0.06), tables=tables)
    assert "**Checked**" in quiet and "| 3.25 |" in quiet and "| 1,024 | 2.5 |" in quiet
    assert "Checked" not in noisy and "| 1,024 | 2.5 |" in noisy


def test_pictures_show_the_committed_figures() -> None:
    shown = (draw.PICTURES / "steps.svg").read_text(encoding="utf-8")
    for scenario in draw.STEPS:
        result = json.loads((draw.RESULTS / f"{scenario}.json").read_text(encoding="utf-8"))
        measured = draw.training_steps(result)
        assert set(rule for rule, _ in measured) == set(draw.RULES)
        for (_, name), value in measured.items():
            assert name not in draw.COLOURS or f">{value:.1f}<" in shown, (
                "python -m benchmarks.draw"
            )


def test_pictures_are_of_the_committed_runs() -> None:
    pictures = {"steps": draw.STEPS, "tiers": ["tiers"], "simulate": ["simulate"]}
    for name, scenarios in pictures.items():
        drawn = (draw.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        assert draw.sources(*scenarios) in drawn, "python -m benchmarks.draw"


def test_noisy_rows_are_not_drawn() -> None:
    config = "sgd, forward+backward+update"
    rows = [
        {**row("hotbed", 1.75, 0.06), "config": config},
        {**row("fbgemm", 9.5, 0.01), "config": config},
    ]
    assert draw.training_steps({"rows": rows}) == {("sgd", "fbgemm"): 9.5}


def test_what_is_missing_or_noisy_is_named() -> None:
    quiet = {name: {"rows": [row("hotbed", 1.75, 0.01)]} for name in SCENARIOS}
    assert "step" not in to_be_run(quiet)
    mixed = {**quiet, "step": {"rows": [row("hotbed", 1.75, 0.06)]}}
    del mixed["index"]
    said = to_be_run(mixed)
    assert "Without a committed run: `index`" in said and "run again: `step`." in said
