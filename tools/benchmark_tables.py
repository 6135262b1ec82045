"""Writes the committed results into docs/results.md: python -m tools.benchmark_tables"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import NOISY_SHARE

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
SCENARIOS = (
    "step",
    "step-multihot",
    "step-narrow",
    "step-ragged",
    "dynamic",
    "index",
    "resolve",
    "ssd",
    "tiers",
    "tiers-small",
    "tiers-ranks",
    "eviction",
    "capacity",
    "synthetic",
    "train",
    "checkpoint",
    "deltas",
    "deltas-over-ssd",
    "background",
    "background-one-thread",
    "background-over-ssd",
    "background-over-ssd-one-thread",
    "linked",
    "merge",
    "exchange",
    "exchange-bags",
    "exchange-bags-23gbs",
    "exchange-bags-10",
    "exchange-bags-50",
    "exchange-bags-4-ranks",
    "codecs",
    "machines",
    "overlap",
    "memory-hosts",
    "measured-plan",
    "simulate",
    "scale",
    "scale-10gbit",
    "scale-1gbit",
    "scale-linear",
    "busy",
    "converted",
    "layers",
    "models",
    "reader",
    "many-tables",
    "quantized",
    "scale-tables",
    "import",
)
MOST_FIGURES = 40
"""More are left to the JSON."""
BEFORE_TABLES = "The JSON of each run that is quoted lies"
"""The line of the page after which everything is replaced."""


def main() -> None:
    PAGE.write_text(with_results(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_results(text: str) -> str:
    """The page with the sections of all results in place of those that it has."""
    end = text.index("\n", text.index(BEFORE_TABLES))
    results = [RESULTS / f"{scenario}.json" for scenario in SCENARIOS]
    if left := sorted(path.stem for path in set(RESULTS.glob("*.json")) - set(results)):
        raise ValueError(f"Add to SCENARIOS what has results and no section: {', '.join(left)}.")
    runs = {path.stem: json.loads(path.read_text()) for path in results if path.exists()}
    sections = [to_be_run(runs), *(section(name, run) for name, run in runs.items())]
    return text[:end] + "\n\n" + "\n".join(sections).rstrip() + "\n"


def to_be_run(runs: dict[str, dict[str, Any]]) -> str:
    """Return what is missing: scenarios without a run, and those most of whose rows are noisy."""
    missing = [name for name in SCENARIOS if name not in runs]
    if not any((RESULTS / "gpu").glob("*.json")):
        missing.append("gpu")
    noisy = [
        name
        for name, run in runs.items()
        if sum(row["other_work"] > NOISY_SHARE for row in run["rows"]) * 2 > len(run["rows"])
    ]
    lines = [f"Without a committed run: {', '.join(f'`{name}`' for name in missing)}."] * bool(
        missing
    )
    if noisy:
        lines.append(
            f"Noisy in most rows, to be run again: {', '.join(f'`{name}`' for name in noisy)}."
        )
    return "\n".join([*lines, ""])


def section(name: str, result: dict[str, Any]) -> str:
    """One run's part of the page. `name`: the scenario's; and of its network, or its machine."""
    hardware, versions = result["hardware"], result["versions"]
    copy = hardware["copy_gb_per_s"]
    on_two = f" and {copy['2']} on two" if "2" in copy else ""
    run: str = result["scenario"]
    if run == "scale" != name:
        run = name.replace("scale-", "scale --link ")
    peer = "fbgemm-gpu-cpu"
    beside = f", FBGEMM {versions[peer]}" if result["scenario"].startswith("step") else ""
    noisiest = max((row["other_work"] for row in result["rows"]), default=0.0)
    lines = [
        f"### `{name}`\n",
        f"`python -m benchmarks {run}` · {result['date'][:10]} · commit {result['commit']} · "
        f"{hardware['cpu']}, {hardware['cores']} cores, copies {copy['1']} GB/s on "
        f"one thread{on_two} · torch {versions['torch']}{beside}\n",
        *timings(result["rows"]),
    ]
    if noisiest > NOISY_SHARE:
        lines.append(
            f"Other processes took up to {noisiest:.0%} of the machine meanwhile. Rows of which they took "
            f"more than {NOISY_SHARE:.0%} are noisy and not quoted, nor are ratios; it has to be run again.\n"
        )
    elif result["ratios"]:
        ratios = ", ".join(f"`{name}` {value:.2f}" for name, value in result["ratios"].items())
        lines.append(f"Ratios: {ratios}.\n")
    lines += [f"{remark}.\n" for remark in result["remarks"] if "has crashed" in remark]
    # Sizes of the batches are in the JSON.
    figures = {k: v for k, v in result["figures"].items() if not k.startswith("unique")}
    if 0 < len(figures) <= MOST_FIGURES:
        lines += ["| figure | value |", "|---|---|"]
        lines += [f"| {name} | {_number(value)} |" for name, value in figures.items()]
        lines.append("")
    for title, of_table in result.get("tables", {}).items():
        if noisiest > NOISY_SHARE and any("measured ms" in line for line in of_table):
            continue
        lines += [f"**{title[:1].upper()}{title[1:]}**\n", *table(of_table)]
    return "\n".join(lines)


def table(lines: list[dict[str, Any]]) -> list[str]:
    """A table of `benchmarks.report.Report.tables`."""
    headings = list(lines[0]) if lines else []
    cells = [[_cell_of(line[heading]) for heading in headings] for line in lines]
    shown = [headings, ["---"] * len(headings), *cells]
    return [*(f"| {' | '.join(row)} |" for row in shown), ""]


def _cell_of(value: float | str) -> str:
    return value if isinstance(value, str) else _number(value)


def timings(rows: list[dict[str, Any]]) -> list[str]:
    """A line a configuration and a column a contender: the multiple of the floor, or milliseconds where
    there is no floor."""
    if not rows:
        return []
    floors = any(row.get("times_floor") for row in rows)
    names = list(dict.fromkeys(row["name"] for row in rows))
    unit = "× floor" if floors else "median ms"
    lines = [f"| {unit} | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for config in dict.fromkeys(row["config"] for row in rows):
        own = {row["name"]: row for row in rows if row["config"] == config}
        cells = [_cell(own[name], floors) if name in own else "" for name in names]
        lines.append(f"| {config} | {' | '.join(cells)} |")
    return [*lines, ""]


def _cell(row: dict[str, Any], floors: bool) -> str:
    if row["other_work"] > NOISY_SHARE:
        return "noisy"
    if floors and row.get("times_floor"):
        return str(row["times_floor"])
    return _milliseconds(row["median_ms"]) + (" ms" if floors else "")


def _milliseconds(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def _number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
