"""Guards against what would pass silently: a table that the wrong optimizer drives, or none."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hotbed.errors import OptimizerError
from hotbed.ops.outside_graphs import outside_graphs
from hotbed.optim.options import torch_classes
from hotbed.table.live import LiveTable, live_table
from hotbed.table.with_handle import live_tables

__all__ = [
    "mark_inner",
    "mark_table_optimizer",
    "of_other_states",
    "refuse_several_devices",
    "table_optimizers",
]

# Classes of torch whose rule is no other's → the Hotbed class with that of the same, or the nearest, rule.
_NEAREST = {"ASGD": "SGD", "SparseAdam": "SparseAdam"}

_made: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()

_KIND = "_hotbed_kind"
_CHECKED = "_hotbed_checked"


def mark_inner(optimizer: Optimizer) -> None:
    """`optimizer` steps the dense half inside a Hotbed optimizer, which has been checked itself."""
    optimizer.__dict__[_KIND] = "inner"


def mark_table_optimizer(optimizer: Optimizer) -> None:
    """`optimizer` may hold tables."""
    optimizer.__dict__[_KIND] = "tables"
    with _lock:
        _made[next(_numbers)] = optimizer


def table_optimizers() -> list[Optimizer]:
    """Return the live optimizers that may hold tables, in the order in which they were made."""
    with _lock:
        return [one for _, one in sorted(_made.items())]


def of_other_states(live: LiveTable) -> OptimizerError:
    """Return the error for a table with the states of an optimizer of another rule."""
    other = live.optimizer
    kind = "an optimizer that is gone," if other is None else f"hotbed.optim.{type(other).__name__}"
    return OptimizerError(
        f"Table {live.name!r} has the states of {kind} with another rule or other options. "
        "Pass replace_state=True to drop them."
    )


def refuse_several_devices(kind: str, tables: Sequence[LiveTable]) -> None:
    """Raise OptimizerError where tables that the host does not step lie on several devices."""
    where = {live.place.stepped_with for live in tables}
    if len(where) > 1:
        named = ", ".join(sorted({str(one) for one in where}))
        raise OptimizerError(
            f"{kind}: its tables lie on {named}. Make an optimizer for each device, and for each model that "
            "was distributed."
        )


@outside_graphs
def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    kind = optimizer.__dict__.get(_KIND)
    if kind == "inner":
        return
    if kind is None:
        _refuse_handles(optimizer)
    for live in live_tables():
        if live.optimizer is None and live.has_gradient:
            live.complaint = OptimizerError(
                f"Table {live.name!r} had a gradient when {type(optimizer).__name__} took a step, "
                "but no optimizer holds the table: it would never be trained. Give its parameter to "
                "a hotbed.optim optimizer (all of model.parameters(), or "
                "hotbed.split_parameters(model)[0]), or freeze it with requires_grad_(False)."
            )


def _refuse_handles(optimizer: Optimizer) -> None:
    size = sum(len(group["params"]) for group in optimizer.param_groups)
    if optimizer.__dict__.get(_CHECKED) == size:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            live = live_table(parameter)
            if live is None:
                continue
            name = type(optimizer).__name__
            dense = "Adam" if name == "SparseAdam" else name  # which takes no dense gradients
            nearest = name if name in torch_classes() else _NEAREST.get(name, "Adam")
            use = f"hotbed.optim.{nearest}"
            raise OptimizerError(
                f"Table {live.name!r} is in a torch.optim.{name}, which cannot update its rows. Use "
                f"{use}(model.parameters(), ...) for tables and dense parameters alike, "
                f"hotbed.optim.convert(optimizer) for an optimizer that is there already, or give "
                f"hotbed.split_parameters(model)[0] to {use} and [1] to torch.optim.{dense}."
            )
    optimizer.__dict__[_CHECKED] = size


register_optimizer_step_pre_hook(_before_step)
