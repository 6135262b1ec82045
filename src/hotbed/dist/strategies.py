"""Which rank keeps which table or slice: the strategies of `hotbed.plan`; see docs/plans.md.

"basic", "memory_balanced" and "memory_optimized" are those of NVIDIA's distributed-embeddings
(``DistEmbeddingStrategy``), whose sizes are elements: rows times columns.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hotbed.dist.sizes import RankSums, Sizes
from hotbed.sharding import (
    ColumnWise,
    Replicated,
    RowWise,
    Sharding,
    TableWise,
    even_widths,
    sharding_of,
)
from hotbed.tables import Table

__all__ = ["REPLICATED_BYTES", "STRATEGIES", "Strategy", "Thresholds", "by_row"]

REPLICATED_BYTES = 1 << 20
"""Weights of the largest table that "auto" replicates, and

A replicated table costs the gradients of a batch's distinct rows, sent to every other rank, at most rows x
dim numbers to each; an exchanged one the distinct rows and their gradients, once. So tables with few rows
are better replicated: 1 MiB is 4,096 rows of dim 64.
"""

ALL_REPLICATED_BYTES = 64 << 20
"""of all of them together, so that thousands of small tables do not send large gradients to every rank."""

WHOLE_SHARE = 4
""""auto" cuts tables above one of so many parts of what a rank keeps on average. Handing out the rest, the
largest first to the least loaded rank, then leaves none more than 1 + 1/4 of the average."""


class Thresholds(NamedTuple):
    """In elements; None: none."""

    column: int | None = None
    row: int | None = None
    data_parallel: int | None = None


class ColumnSlices(NamedTuple):
    """A table that is to be kept by one rank, or slice by slice by several."""

    table: Table
    widths: tuple[int, ...]
    """Columns of each slice, the widest first."""
    sizes: tuple[int, ...]
    """Of each slice, in what the strategy balances."""

    def placed(self, ranks: Sequence[int]) -> Sharding:
        """With slice k on ranks[k]. Slices on one rank become one, and columns go in the order of ranks, so
        that what a rank keeps lies side by side."""
        widths: dict[int, int] = {}
        left = iter(self.widths)
        for rank in sorted(ranks):
            widths[rank] = widths.get(rank, 0) + next(left)
        if len(widths) == 1 and self.table.sharding != ColumnWise():
            return TableWise(ranks[0])
        return ColumnWise(tuple(widths), tuple(widths.values()))


Measure = Callable[[Table, int, int], int]
"""Of (table, rows, columns): what a strategy balances."""

Assign = Callable[[Sequence[int], list[int]], list[int]]
"""(sizes of slices, what each rank keeps already) -> the rank of each slice."""

Strategy = Callable[[Sequence[Table], int, Thresholds, Sizes], dict[str, Sharding]]
"""(tables, world size, thresholds, sizes) -> a placed kind for each table."""


def round_robin(sizes: Sequence[int], kept: list[int]) -> list[int]:
    """Slice k on rank k mod n."""
    return [at % len(kept) for at in range(len(sizes))]


def zigzag(sizes: Sequence[int], kept: list[int]) -> list[int]:
    """The largest first, to the ranks up and down again: as many slices each, and nearly as much. Of equal
    ones the last comes first."""
    order = sorted(range(len(sizes)), key=lambda at: (sizes[at], at), reverse=True)
    world_size, ranks = len(kept), [0] * len(sizes)
    for turn, at in enumerate(order):
        place = turn % (2 * world_size)
        ranks[at] = min(place, 2 * world_size - 1 - place)
    return ranks


def largest_first(sizes: Sequence[int], kept: list[int]) -> list[int]:
    """The largest first, to the rank that keeps least, of several the first."""
    order = sorted(range(len(sizes)), key=lambda at: (sizes[at], at), reverse=True)
    heap = [(load, rank) for rank, load in enumerate(kept)]
    heapq.heapify(heap)
    ranks = [0] * len(sizes)
    for at in order:
        load, ranks[at] = heap[0]
        heapq.heapreplace(heap, (load + sizes[at], ranks[at]))
    return ranks


def by_elements(assign: Assign) -> Strategy:
    """A strategy of distributed-embeddings: thresholds, then columns, then `assign`."""

    def strategy(
        tables: Sequence[Table], world_size: int, thresholds: Thresholds, sizes: Sizes
    ) -> dict[str, Sharding]:
        chosen: dict[str, Sharding] = {}
        for table in tables:
            forced, elements = wished(table), (table.rows or 0) * table.dim
            if forced is not None and forced.placed:
                chosen[table.name] = forced
            elif forced is not None or world_size == 1:
                continue
            elif 0 < elements <= (thresholds.data_parallel or 0):
                chosen[table.name] = Replicated()
            elif table.rows is None or elements >= (thresholds.row or math.inf):
                chosen[table.name] = RowWise()
        left = [table for table in tables if table.name not in chosen]
        column = thresholds.column
        if column is None:
            all_elements = [sizes.rows_of(table) * table.dim for table in left]
            column = _derived_threshold(all_elements, world_size)
        slices = [_slices(table, column, world_size, sizes, _elements) for table in left]
        named = [t for t in tables if t.name in chosen and t.sharding is not None]
        kept = _kept(named, chosen, world_size, sizes, _elements)
        return chosen | _assigned(slices, assign, kept)

    return strategy


def auto(
    tables: Sequence[Table], world_size: int, thresholds: Thresholds, sizes: Sizes
) -> dict[str, Sharding]:
    """Small tables replicated, large and dynamic ones by row, the others whole, by bytes with states. The
    order of the tables does not matter."""
    tables = sorted(tables, key=lambda table: table.name)

    def bytes_of(table: Table, rows: int, columns: int) -> int:
        return sizes.load_of(table, rows, columns).total

    chosen = {t.name: f for t in tables if (f := wished(t)) is not None and f.placed}
    free = [table for table in tables if table.sharding is None]
    if world_size > 1:
        small = _small(free, thresholds.data_parallel)
        chosen |= dict.fromkeys(small, Replicated())
        total = sum(sizes.bytes_of(table) for table in tables if table.name not in small)
        for table in free:
            if table.name not in small and _is_large(
                table, thresholds.row, WHOLE_SHARE * world_size * sizes.bytes_of(table) > total
            ):
                chosen |= _cut_evenly(table, world_size)
    slices = [
        _slices(table, thresholds.column, world_size, sizes, bytes_of)
        for table in tables
        if table.name not in chosen
    ]
    cut_tables = [table for table in tables if table.name in chosen]
    kept = _kept(cut_tables, chosen, world_size, sizes, bytes_of)
    return chosen | _assigned(slices, largest_first, kept)


def by_row(
    tables: Sequence[Table], world_size: int, thresholds: Thresholds, sizes: Sizes
) -> dict[str, Sharding]:
    """Every table by row that has no wish, however few rows it has; the others as "auto" has them."""
    chosen = auto(tables, world_size, thresholds, sizes)
    return chosen | {table.name: RowWise() for table in tables if table.sharding is None}


STRATEGIES: dict[str, Strategy] = {
    "auto": auto,
    "basic": by_elements(round_robin),
    "memory_balanced": by_elements(zigzag),
    "memory_optimized": by_elements(largest_first),
}


def wished(table: Table) -> Sharding | None:
    """Return the sharding that `Table(sharding=...)` asks for."""
    return None if table.sharding is None else sharding_of(table.sharding)


def _small(tables: Sequence[Table], most_elements: int | None) -> list[str]:
    """Names of those that "auto" replicates."""
    static = [table for table in tables if table.rows is not None]
    weights = {t.name: (t.rows or 0) * t.dim * t.dtype.itemsize for t in static}
    if most_elements is not None:
        return [t.name for t in static if (t.rows or 0) * t.dim <= most_elements]
    names, left = [], ALL_REPLICATED_BYTES
    for name in sorted(weights, key=lambda name: weights[name]):
        left -= weights[name]
        if weights[name] <= REPLICATED_BYTES and left >= 0:
            names.append(name)
    return names


def _is_large(table: Table, least_elements: int | None, above_share: bool) -> bool:
    """Whether "auto" cuts it."""
    if table.rows is None:
        return True
    return above_share if least_elements is None else table.rows * table.dim >= least_elements


def _cut_evenly(table: Table, world_size: int) -> dict[str, Sharding]:
    """Among all ranks; empty where a table has too few rows and columns."""
    if table.rows is None or table.rows >= world_size:
        return {table.name: RowWise()}
    if table.dim >= world_size:
        return {table.name: ColumnWise(tuple(range(world_size)))}
    return {}


def _derived_threshold(elements: Sequence[int], world_size: int) -> int | None:
    """That with which there is a slice for every rank: the largest is halved until there are enough."""
    threshold, heap = None, [-size for size in elements]
    heapq.heapify(heap)
    while heap and len(heap) < world_size and heap[0] < -1:
        largest = -heap[0]
        threshold = largest - 1
        heapq.heapreplace(heap, -(largest // 2))
        heapq.heappush(heap, -(largest // 2))
    return threshold


def _slices(
    table: Table, threshold: int | None, world_size: int, sizes: Sizes, measure: Measure
) -> ColumnSlices:
    """In the least power of two that brings each down to `threshold` elements, or as its kind wants."""
    rows, most, wanted = sizes.rows_of(table), min(world_size, table.dim), 1
    while threshold is not None and wanted < most and rows * table.dim > threshold * wanted:
        wanted *= 2
    kind = wished(table)
    count = min(wanted if kind is None else kind.slices(table, wanted, world_size), most)
    widths = even_widths(table.dim, count)
    by_width = {width: measure(table, rows, width) for width in set(widths)}
    return ColumnSlices(table, widths, tuple(by_width[width] for width in widths))


def _kept(
    tables: Sequence[Table],
    chosen: Mapping[str, Sharding],
    world_size: int,
    sizes: Sizes,
    measure: Measure,
) -> list[int]:
    """Return the load of each rank by these tables, whose kinds name their ranks."""
    sums = RankSums(world_size)
    for table in tables:
        kind, rows = chosen[table.name], sizes.rows_of(table)
        if not kind.fault(table, world_size):  # the plan will tell of it
            for ranks, *extent in kind.extents(table, rows, world_size):
                sums.add(ranks, measure(table, *extent))
    return sums.of_ranks()


def _assigned(
    slices: Sequence[ColumnSlices], assign: Assign, kept: list[int]
) -> dict[str, Sharding]:
    """Each table with the ranks of its slices."""
    ranks = iter(assign([size for table in slices for size in table.sizes], kept))
    return {each.table.name: each.placed([next(ranks) for _ in each.sizes]) for each in slices}


def _elements(table: Table, rows: int, columns: int) -> int:
    return rows * columns
