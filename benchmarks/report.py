"""What a scenario returns, as a table on the screen and as JSON."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.measure import Timing

NOISY_SHARE = 0.05


@dataclass
class Report:
    """Rows, ratios and remarks of one scenario.

    A ratio ``"peer/what"`` is the peer's median over Hotbed's: above 1, Hotbed is faster. Other
    ratios say in `remarks` what they are.
    """

    scenario: str
    quick: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Part of the scenario → the exception that ended it."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Part of the scenario → why it was not measured, or not to its end."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Title → lines, whose keys are the headings."""
    hardware: dict[str, Any] = field(default_factory=machine.hardware)

    def remark(self, text: str) -> None:
        """Adds it once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def add(
        self,
        name: str,
        config: str,
        timing: Timing,
        moved_bytes: float | None = None,
        threads: int | None = None,
        floor_ms: float | None = None,
    ) -> None:
        """Adds a row; `moved_bytes` is the least that the work, on `threads` (all), must move.

        `floor_ms` is the floor where it does not follow from the bytes and this machine's memory.
        """
        row: dict[str, Any] = {
            "name": name,
            "config": config,
            "median_ms": round(timing.median, 3),
            "min_ms": round(min(timing.ms), 3),
            "max_ms": round(max(timing.ms), 3),
            "iterations": len(timing.ms),
            "other_work": round(timing.other_work, 3),
        }
        if moved_bytes is not None:
            row["moved_mb"] = round(moved_bytes / 1e6, 1)
            if floor_ms is None:
                bandwidths = self.hardware["copy_gb_per_s"]
                rate = bandwidths["1"] if threads == 1 else max(bandwidths.values())
                floor_ms = moved_bytes / (rate * 1e9) * 1e3
        if floor_ms is not None:
            row["floor_ms"] = round(floor_ms, 3)
            row["times_floor"] = round(timing.median / floor_ms, 2)
            row["share_of_roof"] = round(floor_ms / timing.median, 3)
        self.rows.append(row)

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "quick": self.quick,
            "rows": self.rows,
            "ratios": {name: round(ratio, 3) for name, ratio in self.ratios.items()},
            "figures": self.figures,
            **({"tables": self.tables} if self.tables else {}),
            "remarks": self.remarks + self._noise(),
            "failed": self.failed,
            "skipped": self.skipped,
            "hardware": self.hardware,
            "versions": machine.versions(),
            "commit": machine.commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever is killed meanwhile leaves the file as it was.
        fresh = path.with_name(path.name + ".part")
        fresh.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        fresh.replace(path)

    def show(self, console: Console) -> None:
        console.rule(f"{self.scenario}{' (quick: not for quoting)' if self.quick else ''}")
        for config in dict.fromkeys(row["config"] for row in self.rows):
            table = Table(title=config, title_justify="left", title_style="bold")
            table.add_column("")
            for heading in ("median ms", "min", "max", "floor ms", "× floor"):
                table.add_column(heading, justify="right")
            for row in self.rows:
                if row["config"] == config:
                    cells = [f"{row[key]:,.2f}" for key in ("median_ms", "min_ms", "max_ms")]
                    if "floor_ms" in row:
                        cells += [f"{row['floor_ms']:,.2f}", f"{row['times_floor']:,.1f}"]
                    table.add_row(row["name"], *cells)
            console.print(table)
        for title, lines in self.tables.items():
            console.print(printed(title, lines))
        for title, values in (("ratio", self.ratios), ("figure", self.figures)):
            if values:
                part = Table(title)
                part.add_column("value", justify="right")
                for name, value in values.items():
                    part.add_row(name, in_words(value))
                console.print(part)
        rates = self.hardware["copy_gb_per_s"].items()
        copy = ", ".join(f"{rate} GB/s on {threads} threads" for threads, rate in rates)
        console.print(f"{self.hardware['cpu']}, {self.hardware['cores']} cores; copies {copy}")
        if "gpu" in self.hardware:
            console.print(", ".join(f"{k} {v}" for k, v in self.hardware["gpu"].items()))
        for remark in self.remarks + self._noise():
            console.print(f"• {remark}")
        for heading, parts in (("SKIPPED", self.skipped), ("FAILED", self.failed)):
            for name, reason in parts.items():
                console.print(f"{heading} {name}: {reason}", markup=False)

    def _noise(self) -> list[str]:
        worst = max((row["other_work"] for row in self.rows), default=0.0)
        if worst <= NOISY_SHARE:
            return []
        return [
            f"NOISY: other processes took up to {worst:.0%} of the machine while this was "
            f"measured; do not quote these figures."
        ]


def printed(title: str, lines: list[dict[str, Any]]) -> Table:
    """Return a table of `Report.tables` for a console."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading, value in lines[0].items() if lines else ():
        table.add_column(heading, justify="left" if isinstance(value, str) else "right")
    for line in lines:
        table.add_row(*(in_words(value) for value in line.values()))
    return table


def in_words(value: float | str) -> str:
    """Return a number with at most four digits, or a text as it is."""
    if isinstance(value, str):
        return value
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
