"""`Traffic`: how much a batch asks of a table, counted in a sample of the data or assumed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from hotbed.arrays import describe, iterated
from hotbed.errors import InputError, PlanError
from hotbed.inputs.bags import Bags, read_bags
from hotbed.tables import Table

__all__ = ["Traffic", "traffic_of"]

_BAGS, _SKEW = 2048, 1.05


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Ids that the batch of one rank asks of a table, means over batches.

    >>> hb.dist.Traffic(bags=2048, ids=40_960, distinct=11_000, growth=0.8)

    Raises:
        PlanError: numbers that contradict each other.
    """

    bags: float
    """Bags of all features of the table together; unpooled, its ids."""
    ids: float
    """Ids in these bags, repeated ones among them, those of padding not."""
    distinct: float
    """Distinct ids."""
    growth: float = 1.0
    """Twice as many samples have ``2 ** growth`` times as many distinct ids (Heaps' law): 0 if batches ask
    for the same ids, 1 if each asks for others."""
    features: int = 1
    """Features that read the table."""
    has_lengths: bool = False
    """True if bags of a feature differ in length."""
    is_weighted: bool = False
    """True if ids have weights, so that no owner pools their bags."""

    def __post_init__(self) -> None:
        for name in ("bags", "ids", "distinct", "growth", "features"):
            _check_number(name, getattr(self, name))
        for name in ("has_lengths", "is_weighted"):
            if not isinstance(flag := getattr(self, name), bool | np.bool_):
                raise PlanError(f"Traffic: {name} must be True or False, not {flag!r}.")
        if self.distinct > self.ids or self.growth > 1:
            raise PlanError(f"{self} has more distinct ids than ids, or a growth above 1.")

    def distinct_of(self, batches: int, rows: int | None) -> float:
        """Return the expected distinct ids of so many batches together; `rows`: of the table, None: any."""
        found = self.distinct * math.pow(batches, self.growth)
        return found if rows is None else min(found, max(self.distinct, rows))

    @classmethod
    def assumed(
        cls, rows: int, *, bags: int = _BAGS, ids_a_bag: float = 1.0, skew: float = _SKEW
    ) -> Traffic:
        """Return the traffic of ids that follow a power law.

        Args:
            rows: ids there are.
            bags: of the batch of one rank.
            ids_a_bag: mean.
            skew: exponent: the k-th most frequent id occurs in proportion to ``k ** -skew``; 0: uniform.

        Raises:
            PlanError: numbers that cannot be.
        """
        _check_number("rows", rows, 63)
        for name, number in (("bags", bags), ("ids_a_bag", ids_a_bag), ("skew", skew)):
            _check_number(name, number)
        ids = bags * ids_a_bag
        one, two = (_expected_distinct(rows, many, skew) for many in (ids, 2 * ids))
        growth = math.log2(two / one) if one > 0 else 1.0
        return cls(bags, ids, min(one, ids), min(1.0, max(0.0, growth)))


def _check_number(name: str, given: object, bits: int = 40) -> None:
    """Raise PlanError where an argument is no number from 0 to ``2 ** bits``."""
    is_number = isinstance(given, int | float | np.number) and not isinstance(given, bool)
    if not is_number or not 0 <= cast(float, given) <= 2**bits:
        raise PlanError(f"Traffic: {name} must be from 0 to 2 ** {bits}, not {given!r}.")


def _expected_distinct(rows: int, ids: float, skew: float) -> float:
    """Expected distinct ones of so many draws: the sum over ids of ``1 - (1 - p) ** draws``, over pieces of
    ids that are about equally frequent."""
    if rows < 1 or ids <= 0:
        return 0.0
    edges = np.unique(np.floor(np.geomspace(1, rows + 1, 512)))
    counts, middles = np.diff(edges), np.sqrt(edges[:-1] * (edges[1:] - 1.0))
    weights = middles**-skew
    shares = weights / (weights * counts).sum()
    return float((counts * -np.expm1(ids * np.log1p(-np.minimum(shares, 1 - 1e-12)))).sum())


def traffic_of(
    tables: Iterable[Table],
    batches: Iterable[Mapping[str, object]],
    features: Mapping[str, str] | None = None,
) -> dict[str, Traffic]:
    """Count what batches ask of tables.

    >>> traffic = hb.dist.traffic_of([hb.Table("item", 16)], [{"item": torch.tensor([3, 7, 3])}])

    Args:
        batches: some batches of one rank, dicts of what `hotbed.EmbeddingCollection` takes; other entries
            are not read.
        features: feature to the name of its table. Default: features are named as their tables.

    Returns:
        By table, of those that batches ask for.

    Raises:
        InputError: a batch is no dict, or a feature's input cannot be read.
        PlanError: tables or features are none, or a feature reads a table that is not there.
    """
    known = _by_name(tables)
    if not isinstance(features, Mapping | None):
        raise PlanError(f"features must be a dict feature → table name, not {features!r}.")
    each = iterated(batches)
    if isinstance(batches, Mapping | str) or each is None:
        raise InputError(f"batches must be several dicts of inputs, not {describe(batches)}.")
    names = {name: name for name in known} if features is None else dict(features)
    for feature, name in names.items():
        if not isinstance(name, str) or name not in known:
            raise PlanError(f"Feature {feature!r} reads the table {name!r}, which is not there.")
    counted: dict[str, _Counted] = {}
    for number, batch in enumerate(each):
        if not isinstance(batch, Mapping):
            raise InputError(
                f"batches: number {number} must be a dict of inputs by feature, not {describe(batch)}."
            )
        read: dict[str, list[Bags]] = {}
        for feature, name in names.items():
            if feature in batch:
                table = known[name]
                bags = read_bags(feature, batch[feature], table.compute_dtype, table.combiner)
                read.setdefault(name, []).append(bags)
        for name, of_table in read.items():
            counted.setdefault(name, _Counted(known[name])).add(of_table)
    return {name: one.mean() for name, one in counted.items()}


def _by_name(tables: object) -> dict[str, Table]:
    """Return tables by their names; PlanError: they are none."""
    known = {}
    for table in iterated(tables) or [tables]:
        if not isinstance(table, Table):
            raise PlanError(f"tables must be several hotbed.Table, not {table!r}.")
        known[table.name] = table
    return known


class _Counted:
    """Sums over the batches so far."""

    def __init__(self, table: Table) -> None:
        self._padding = table.padding_idx
        self._sums = [0, 0, 0]
        self._batches = self._features = 0
        self._pairs: list[tuple[int, int]] = []
        self._before: Tensor | None = None
        self._has_lengths = self._is_weighted = False

    def add(self, features: Sequence[Bags]) -> None:
        ids = torch.cat([bags.ids.long().cpu() for bags in features])
        if self._padding is not None:
            ids = ids[ids != self._padding]
        distinct = torch.unique(ids)
        sums = sum(bags.bags for bags in features), len(ids), len(distinct)
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)]
        self._batches += 1
        self._features = max(self._features, len(features))
        self._has_lengths |= any(bags.offsets is not None for bags in features)
        self._is_weighted |= any(bags.weights is not None for bags in features)
        if self._before is not None:
            both = len(torch.unique(torch.cat([self._before, distinct])))
            self._pairs.append((len(self._before) + len(distinct), 2 * both))
        self._before = distinct

    def mean(self) -> Traffic:
        bags, ids, distinct = (each / self._batches for each in self._sums)
        single, both = (sum(column) for column in itertools.zip_longest(*self._pairs or [(1, 2)]))
        growth = math.log2(both / single) if single else 1.0
        return Traffic(
            bags=bags,
            ids=ids,
            distinct=distinct,
            growth=min(1.0, max(0.0, growth)),
            features=self._features,
            has_lengths=self._has_lengths,
            is_weighted=self._is_weighted,
        )
