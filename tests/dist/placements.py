"""NVIDIA's placement once more, from its description alone and as plainly as can be."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import hotbed as hb


def table(name: str, rows: int | None, dim: int, **more: Any) -> hb.Table:
    return hb.Table(name, dim, rows, **more)


def tables(*shapes: tuple[int, int]) -> list[hb.Table]:
    """T0, T1, ... of (rows, dim)."""
    return [table(f"T{at}", *shape) for at, shape in enumerate(shapes)]


def derived_threshold(sizes: Sequence[int], world_size: int) -> int | None:
    sizes, threshold = list(sizes), None
    while sizes and len(sizes) < world_size and max(sizes) > 1:
        sizes.sort()
        largest = sizes.pop()
        threshold = largest - 1
        sizes += [largest // 2, largest // 2]
    return threshold


def slice_widths(rows: int, dim: int, threshold: int | None, world_size: int) -> list[int]:
    count = 1
    while threshold is not None and Fraction(rows * dim, count) > threshold:
        count *= 2
    count = min(count, world_size, dim)
    return [dim // count + (at < dim % count) for at in range(count)]


def dealt(strategy: str, sizes: Sequence[tuple[int, int]], world_size: int) -> list[list[int]]:
    """For each rank the tables of its slices; `sizes`: (elements, table) of each slice."""
    ids = [each for _, each in sizes]
    falling = [each for _, each in sorted(sizes, reverse=True)]
    double = 2 * world_size
    match strategy:
        case "basic":
            return [ids[rank::world_size] for rank in range(world_size)]
        case "memory_balanced":
            return [
                falling[rank::double] + falling[double - 1 - rank :: double]
                for rank in range(world_size)
            ]
    kept: list[tuple[int, list[int]]] = [(0, []) for _ in range(world_size)]
    for size, each in sorted(sizes, reverse=True):
        least = min(range(world_size), key=lambda rank: kept[rank][0])
        kept[least] = kept[least][0] + size, [*kept[least][1], each]
    return [of_rank for _, of_rank in kept]


def expected_columns(
    shapes: Sequence[tuple[int, int]], strategy: str, world_size: int, threshold: int | None
) -> list[dict[int, range]]:
    """For each rank: table → the columns that it keeps."""
    if threshold is None:
        threshold = derived_threshold([rows * dim for rows, dim in shapes], world_size)
    widths = [slice_widths(*shape, threshold, world_size) for shape in shapes]
    sizes = [(shapes[at][0] * w, at) for at, of_table in enumerate(widths) for w in of_table]
    begins, kept = [0] * len(shapes), []
    for of_rank in dealt("basic" if world_size == 1 else strategy, sizes, world_size):
        columns: dict[int, range] = {}
        for at in of_rank:
            begin, width = begins[at], widths[at].pop(0)
            columns[at] = range(columns[at].start if at in columns else begin, begin + width)
            begins[at] = begin + width
        kept.append(columns)
    return kept


def kept_columns(plan: hb.dist.Plan) -> list[dict[int, range]]:
    """The same of a plan for the tables T0, T1, ..."""
    kept: list[dict[int, range]] = []
    for rank in range(plan.world_size):
        parts = {at: plan.part(f"T{at}", rank) for at in range(len(plan.tables))}
        kept.append(
            {
                at: range(part.origin.column, part.origin.column + part.dim)
                for at, part in parts.items()
                if part.rows
            }
        )
    return kept
