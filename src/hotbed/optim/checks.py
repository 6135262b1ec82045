"""Check of whether a table can be stepped by a rule."""

from __future__ import annotations

from hotbed import _core
from hotbed.errors import OptimizerError
from hotbed.init import Columns
from hotbed.table.live import LiveTable

__all__ = ["check_table"]


def check_table(
    live: LiveTable, optimizer: str, rule: _core.RuleOptions, *, exact: bool, fused: bool
) -> None:
    """Raise OptimizerError if a table cannot be stepped by a rule, or not in this way.

    Args:
        optimizer: name of its class, for errors.
        exact: rows that a batch does not touch are moved as in torch.
        fused: rows are stepped during backward.
    """
    if exact:
        live.place.refuse_exact(optimizer)
    live.place.refuse_rule(optimizer, rule, fused=fused)
    one_a_row = any(one for _, one, _ in _core.state_planes(rule))
    if one_a_row and isinstance(live.spec.init, Columns):
        raise OptimizerError(
            f"{optimizer} (table {live.name!r}): its rule has one state for a whole row, and by init.Columns "
            "a row is several vectors. Choose one with a state a column, such as Adam."
        )
