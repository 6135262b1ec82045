"""Parts of a checkpoint beside rows: dense layers, optimizers, schedulers, loaders and random states."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.randomness import random_states
from hotbed.checkpoint.ranks import KIND
from hotbed.checkpoint.values import decoded, encoded
from hotbed.files import Json
from hotbed.modules.owner import tables_left_out
from hotbed.optim.base import TableOptimizer
from hotbed.table.alone import Processes
from hotbed.text import brief

__all__ = ["kinds_of", "refuse_other_model", "several", "values_of"]


def several(one_or_more: object, method: str) -> list[Any]:
    """`method`: what each must have."""
    if one_or_more is None:
        return []
    found = [one_or_more]
    if isinstance(one_or_more, (list, tuple)) and type(one_or_more) in (list, tuple):
        found = list(one_or_more)
    for one in found:
        if not callable(getattr(one, method, None)):
            raise CheckpointError(
                f"Optimizers, schedulers and loaders need {method}(), which one of the type "
                f"{type(one).__qualname__} has not. Several go in a list."
            )
    return found


def kinds_of(method: str, *given: object) -> dict[str, list[str]]:
    """Return the types of optimizers, schedulers and loaders, in this order. `method`: of each."""
    found = [[type(one).__name__ for one in several(some, method)] for some in given]
    return dict(zip(("optimizer", "scheduler", "loader"), found, strict=True))


def refuse_other_model(called: str, model: object) -> None:
    """Raise CheckpointError unless it is a module. `called`: with which arguments."""
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"{called}: expected a torch.nn.Module as model, got {brief(model)}.")


class _OfRank(TypedDict):
    values: Json
    tensors: dict[str, Tensor]


def values_of(
    model: nn.Module, optimizer: object, scheduler: object, loader: object, ranks: Processes
) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """All but rows: as JSON values, and the tensors in them."""
    with ranks.reporting(KIND):
        found = _found(model, optimizer, scheduler, loader)
    of_others = {"loaders": found["loaders"], "random": found["random"]}
    if ranks.size > 1:
        own: dict[str, Tensor] = {}
        with ranks.reporting(KIND):
            said = encoded(of_others, "ranks", own)
        every = ranks.values_of_all(KIND, _OfRank(values=said, tensors=own))
        found["ranks"] = [decoded(one["values"], one["tensors"]) for one in every]
    tensors: dict[str, Tensor] = {}
    with ranks.reporting(KIND):
        values = {name: encoded(value, name, tensors) for name, value in found.items()}
    return values, tensors


def _found(
    model: nn.Module, optimizer: object, scheduler: object, loader: object
) -> dict[str, object]:
    with tables_left_out():
        dense = model.state_dict()
    found: dict[str, object] = {
        "model": dict(dense),
        "versions": {
            name: about["version"]
            for name, about in getattr(dense, "_metadata", {}).items()
            if "version" in about
        },
        "optimizers": [_state_of(one) for one in several(optimizer, "state_dict")],
        "schedulers": [one.state_dict() for one in several(scheduler, "state_dict")],
        "loaders": [one.state_dict() for one in several(loader, "state_dict")],
        "random": random_states(),
    }
    return found


def _state_of(optimizer: Optimizer) -> dict[str, object]:
    """Without the states of tables, which lie with their rows."""
    if isinstance(optimizer, TableOptimizer):
        return Optimizer.state_dict(optimizer)
    return optimizer.state_dict()
