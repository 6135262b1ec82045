"""Plans as tables for people."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hotbed.dist.sizes import bytes_in_words
from hotbed.text import printable

__all__ = ["PlanCost", "RankLine", "TableChoice", "TableLine", "printed"]

_TABLES, _RANKS = 40, 16
"""How many are shown."""


class TableChoice(NamedTuple):
    """Why a table is cut as it is."""

    mean: float
    """Seconds that a rank works on the table in a step, mean over the ranks."""
    second: str
    """Name of the next best kind of sharding; empty: there is no other."""
    longer: float
    """Seconds by which a step would be longer with it."""

    @property
    def said(self) -> str:
        """The next best kind, and what it would add to a step."""
        return f"{self.second} {self.longer * 1e3:+.2f}" if self.second else ""


class PlanCost(NamedTuple):
    """Predicted cost of a plan."""

    step: float
    """Seconds of a step, without dense layers: in each phase those of the slowest rank."""
    of_ranks: Sequence[float]
    """Seconds that each rank works, without waiting."""
    sent: Sequence[Sequence[float]]
    """Bytes that each rank sends in a step: of ids, rows, vectors and gradients; then of ids, rows and
    gradients that go by way of a rank of the own machine, to or from that one."""
    tables: Mapping[str, TableChoice]
    strategies: Mapping[str, float]
    """Seconds of a step by the plan of each named strategy."""

    @property
    def said(self) -> str:
        """One sentence on the step, and how long it would be otherwise."""
        if not self.strategies:
            return f"A step of the tables is predicted to take {self.step * 1e3:.2f} ms."
        others = ", ".join(f"{name} {ms * 1e3:.2f}" for name, ms in self.strategies.items())
        return f"A step of the tables is predicted to take {self.step * 1e3:.2f} ms; by {others}."


class TableLine(NamedTuple):
    """One table in a plan."""

    name: str
    rows: int | None
    """None: dynamic."""
    expected: int | None
    dim: int
    dtype: str
    kind: str
    owners: str
    bytes: int
    """On all ranks together."""
    cost: TableChoice | None = None


class RankLine(NamedTuple):
    """Line of one rank: its shards and bytes."""

    rank: int
    shards: int
    tiers: dict[str, int]
    total: int
    work: float | None = None
    """Predicted seconds in a step."""


def printed(
    title: str,
    tables: Sequence[TableLine],
    ranks: Sequence[RankLine],
    width: int,
    notes: Sequence[str] = (),
) -> str:
    """Both as one text. `notes`: beside those on the tables."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False)
    console.print(title)
    console.print(_tables(tables))
    for note in [*_notes(tables), *notes]:
        console.print(note)
    console.print(_ranks(ranks))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _tables(lines: Sequence[TableLine]) -> Any:
    from rich.table import Table

    shown = Table()
    has_costs = any(line.cost for line in lines)
    costs = ("ms", "else, ms") if has_costs else ()
    for heading in ("table", "rows", "dim", "dtype", "cut by", "ranks", "bytes", *costs):
        number = heading in ("rows", "dim", "bytes", *costs)
        shown.add_column(heading, justify="right" if number else "left", overflow="fold")
    largest = sorted(lines, key=lambda line: line.bytes, reverse=True)[:_TABLES]
    chosen = set(line.name for line in largest)
    for line in lines:
        if line.name in chosen:
            size = (
                "?" if line.expected is None and line.rows is None else bytes_in_words(line.bytes)
            )
            rows = "any" if line.rows is None else f"{line.rows:,}"
            if line.expected is not None:
                rows = f"~{line.expected:,}"
            name = printable(line.name)
            cost = (f"{line.cost.mean * 1e3:.2f}", line.cost.said) if line.cost else ()
            shown.add_row(
                name, rows, str(line.dim), line.dtype, line.kind, line.owners, size, *cost
            )
    if len(lines) > len(chosen):
        rest = sum(line.bytes for line in lines if line.name not in chosen)
        said = f"{len(lines) - len(chosen):,} smaller ones"
        shown.add_row(said, "", "", "", "", "", bytes_in_words(rest))
    return shown


def _notes(lines: Sequence[TableLine]) -> list[str]:
    unknown = [
        printable(line.name) for line in lines if line.rows is None and line.expected is None
    ]
    if not unknown:
        return []
    named = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3:,} more" if len(unknown) > 3 else "")
    return [f"Nobody said how many rows to expect of {named}: they count 0 bytes."]


def _ranks(lines: Sequence[RankLine]) -> Any:
    from rich.table import Table

    shown = Table()
    costs = () if lines[0].work is None else ("ms",)
    for heading in ("rank", "shards", *lines[0].tiers, *costs):
        shown.add_column(heading, justify="right")
    for line in lines[:_RANKS]:
        shown.add_row(str(line.rank), f"{line.shards:,}", *_figures(line))
    by_size = sorted(lines, key=lambda line: line.total)
    if len(lines) > _RANKS:
        for said, line in (("least", by_size[0]), ("most", by_size[-1])):
            shown.add_row(f"{said}: {line.rank}", f"{line.shards:,}", *_figures(line))
    return shown


def _figures(line: RankLine) -> list[str]:
    """Return bytes in each tier and, if they are predicted, milliseconds."""
    sizes = [bytes_in_words(size) for size in line.tiers.values()]
    return sizes if line.work is None else [*sizes, f"{line.work * 1e3:.2f}"]
