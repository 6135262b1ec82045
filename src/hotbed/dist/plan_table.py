"""Plans as tables for people."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from hotbed.dist.sizes import bytes_in_words
from hotbed.text import printable

__all__ = ["RankLine", "TableLine", "printed"]

_TABLES, _RANKS = 40, 16
"""How many are shown."""


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


class RankLine(NamedTuple):
    """Line of one rank: its shards and bytes."""

    rank: int
    shards: int
    tiers: dict[str, int]
    total: int


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
    for heading in ("table", "rows", "dim", "dtype", "cut by", "ranks", "bytes"):
        number = heading in ("rows", "dim", "bytes")
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
            shown.add_row(name, rows, str(line.dim), line.dtype, line.kind, line.owners, size)
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
    for heading in ("rank", "shards", *lines[0].tiers):
        shown.add_column(heading, justify="right")
    for line in lines[:_RANKS]:
        shown.add_row(
            str(line.rank), f"{line.shards:,}", *(bytes_in_words(b) for b in line.tiers.values())
        )
    by_size = sorted(lines, key=lambda line: line.total)
    if len(lines) > _RANKS:
        for said, line in (("least", by_size[0]), ("most", by_size[-1])):
            sizes = (bytes_in_words(b) for b in line.tiers.values())
            shown.add_row(f"{said}: {line.rank}", f"{line.shards:,}", *sizes)
    return shown
