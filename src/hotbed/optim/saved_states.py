"""The states of tables in the state_dict of an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hotbed import _core
from hotbed.optim.options import numbers_of
from hotbed.states import check_states, copy_states, reset_states, write_states

if TYPE_CHECKING:
    from hotbed.optim.base import TableOptimizer

__all__ = ["add_states", "put_states", "take_states"]


def _parameters(optimizer: TableOptimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def add_states(optimizer: TableOptimizer, states: dict[int, Any]) -> None:
    """Adds an entry for each table, by the number of its parameter.

    Raises:
        OptimizerError: the states do not fit in memory twice.
    """
    for index, parameter in enumerate(_parameters(optimizer)):
        live = optimizer._live.get(parameter)
        if live is None:
            continue
        rule = optimizer._rules[parameter]
        optimizer.check_hold(live, rule)
        copies = copy_states(live)
        entry: dict[str, Any] = {"step": rule.steps, **copies}
        if rule.exact:
            entry["untouched"] = {"base": list(rule.base), "last": numbers_of(rule.last)}
        states[index] = entry


def take_states(optimizer: TableOptimizer, states: dict[int, Any]) -> list[tuple[Tensor, Any]]:
    """Takes the entries of tables out: (parameter, entry or None) each.

    Raises:
        OptimizerError: an entry does not fit its table.
    """
    parameters = _parameters(optimizer)
    taken = [(p, states.pop(i, None)) for i, p in enumerate(parameters) if p in optimizer._live]
    for parameter, entry in taken:
        optimizer.check_hold(optimizer._live[parameter], optimizer._rules[parameter])
        if entry:
            check_states(optimizer._live[parameter], entry)
    return taken


def put_states(optimizer: TableOptimizer, taken: list[tuple[Tensor, Any]]) -> None:
    """Gives tables the states that were taken; those without an entry begin anew."""
    for parameter, entry in taken:
        live, rule = optimizer._live[parameter], optimizer._rules[parameter]
        missed = (entry or {}).get("untouched", {})
        last = _core.Hyperparameters()
        for name, value in missed.get("last", {}).items():
            setattr(last, name, value)
        rule.restart((entry or {}).get("step", 0), missed.get("base", [1, 0, 0, 1, 1]), last)
        reset_states(live)
        if entry:
            write_states(live, entry, insert=True)
