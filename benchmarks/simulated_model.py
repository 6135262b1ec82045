"""The click model of `simulate`: MLPerf's DLRM-DCNv2, by its published sizes."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.simulated_assumptions import Assumptions

__all__ = ["FLOP_A_SAMPLE", "IDS", "PARAMETERS", "ROWS", "tables_of", "traffic_of"]

ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)  # fmt: skip
"""Of each table: `--num_embeddings_per_feature` of its reference."""
IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Of a bag of each table: `--multi_hot_sizes`."""

_DIM, _DENSE = 128, 13
_BOTTOM, _TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)
_CROSS_LAYERS, _CROSS_RANK = 3, 512


def _weights_of(widths: tuple[int, ...]) -> int:
    return sum(a * b for a, b in itertools.pairwise(widths))


_JOINED = (len(ROWS) + 1) * _DIM
_WEIGHTS = (
    _weights_of((_DENSE, *_BOTTOM))
    + _CROSS_LAYERS * 2 * _JOINED * _CROSS_RANK
    + _weights_of((_JOINED, *_TOP))
)
PARAMETERS = _WEIGHTS + sum(_BOTTOM) + _CROSS_LAYERS * _JOINED + sum(_TOP)
"""Of the dense part."""
FLOP_A_SAMPLE = 3 * 2 * _WEIGHTS
"""Two for each weight in a forward, and twice as many in a backward."""


def tables_of(assumed: Assumptions) -> list[Any]:
    """Return the `hotbed.Table`s."""
    import hotbed as hb

    dim, times = int(assumed["dim"]), assumed["rows"]
    return [
        hb.Table(f"C{at + 1}", dim=dim, rows=max(1, round(rows * times)), combiner="sum")
        for at, rows in enumerate(ROWS)
    ]


def traffic_of(assumed: Assumptions, gpus: int) -> dict[str, Any]:
    """Return the `hotbed.dist.Traffic` of a rank, by table, with the growth of distinct ids between the
    batch of one rank and that of all."""
    import hotbed as hb

    batch, skew = round(assumed["batch"]), assumed["skew"]
    found = {}
    for table, ids in zip(tables_of(assumed), IDS, strict=True):
        assert table.rows is not None
        mean = max(1.0, ids * assumed["ids a bag"])
        one, all_ = (
            hb.dist.Traffic.assumed(table.rows, bags=bags, ids_a_bag=mean, skew=skew)
            for bags in (batch, batch * gpus)
        )
        growth = one.growth
        if gpus > 1 and one.distinct > 0:
            growth = min(1.0, max(0.0, math.log(all_.distinct / one.distinct) / math.log(gpus)))
        found[table.name] = hb.dist.Traffic(one.bags, one.ids, one.distinct, growth)
    return found
