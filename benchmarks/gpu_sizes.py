"""How large the trainings of the GPU benchmark are."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of Criteo's 26 tables in the MLPerf benchmark, in which ids are taken modulo 40 M.
CRITEO_1TB = (39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10)
CRITEO_1TB += (2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36)


@dataclass(frozen=True)
class Sizes:
    """How large the trainings are; the default is what is quoted."""

    batch: int = 65536
    dim: int = 128
    batches: int = 10
    """Batches of `synthetic` and `cache`, used in turn; `dlrm` uses none twice."""
    warm_up: int = 10
    steps: int = 30
    rows: tuple[int, ...] = CRITEO_1TB
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 1024, 512, 256)
    device_budgets: tuple[int, ...] = (24 * 10**9, 12 * 10**9)
    cache_tables: int = 10
    cache_rows: int = 26_800_000
    cache_batch: int = 104_857
    cache_shares: tuple[float, ...] = (1.0, 0.8, 0.1)
    synthetic: tuple[str, ...] = ("tiny", "small")
    synthetic_most_rows: int | None = None


QUICK = Sizes(
    batch=512,
    dim=16,
    batches=4,
    warm_up=2,
    steps=3,
    rows=(3000, 50, 4, 700),
    bottom=(32,),
    top=(32,),
    device_budgets=(200_000,),
    cache_tables=2,
    cache_rows=2000,
    cache_batch=256,
    synthetic=("tiny",),
    synthetic_most_rows=1000,
)
