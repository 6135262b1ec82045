"""Many processes, see docs/distributed.md, and which of them keeps what, see docs/plans.md.

A plan cuts each table into shards, at most one for each rank, in ways such as `Replicated`, `TableWise`,
`RowWise`, `ColumnWise`, `GridWise`.
"""

from hotbed.dist.distribute import distribute
from hotbed.dist.errors import PeerError
from hotbed.dist.hosts import release_hosts, serve_rows
from hotbed.dist.join import joinables
from hotbed.dist.loaders import Even, Slice, Slices, even, slices
from hotbed.dist.measured import Measured, predict
from hotbed.dist.measuring import measure
from hotbed.dist.plan_table import PlanCost, TableChoice
from hotbed.dist.planning import plan
from hotbed.dist.plans import Plan
from hotbed.dist.rates import Rates
from hotbed.dist.remedies import Remedy
from hotbed.dist.row_codecs import CODECS, ByRow
from hotbed.dist.sizes import States
from hotbed.dist.traffic import Traffic, traffic_of
from hotbed.dist.whole_batches import Owned, owned
from hotbed.errors import PlanError
from hotbed.sharding import (
    ColumnWise,
    GridWise,
    Replicated,
    RowWise,
    Sharding,
    TableWise,
    hashed_owner,
    modulo_owner,
)
from hotbed.text import warn_renamed

__all__ = [
    "CODECS",
    "ByRow",
    "ColumnWise",
    "Even",
    "GridWise",
    "Measured",
    "Owned",
    "Plan",
    "PlanCost",
    "PeerError",
    "PlanError",
    "Rates",
    "Remedy",
    "Replicated",
    "RowWise",
    "Sharding",
    "Slice",
    "Slices",
    "States",
    "TableChoice",
    "TableWise",
    "Traffic",
    "distribute",
    "even",
    "hashed_owner",
    "joinables",
    "measure",
    "modulo_owner",
    "owned",
    "plan",
    "predict",
    "release_hosts",
    "serve_rows",
    "slices",
    "traffic_of",
]


def __getattr__(name: str) -> object:
    """Names that have changed, for one version."""
    if name not in ("hashed_keeper", "modulo_keeper"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now = name.replace("keeper", "owner")
    warn_renamed(name, now)
    return globals()[now]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
