"""`convert`: an optimizer of torch's that was made before its model was converted."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer

from hotbed.errors import OptimizerError
from hotbed.optim.base import TableOptimizer
from hotbed.optim.options import Fixed
from hotbed.table.converted_weight import ConvertedWeight

__all__ = ["convert"]

_OF_TORCH = {"foreach", "capturable", "differentiable", "fused"}
"""Options that choose how torch computes, not what."""


def convert(optimizer: Optimizer, **options: object) -> TableOptimizer:
    """Return the optimizer of the same rule in `hotbed.optim`, over the parameters of the converted model.

    Groups, their numbers and the states are those of `optimizer`, which is not to be used any more. As torch
    moves all rows in a step, but for SparseAdam, so does this one: ``untouched="exact"``.

    >>> optimizer = hb.optim.convert(optimizer)

    Args:
        optimizer: one of torch.optim's with a rule of `hotbed.optim`.
        options: others of its class, such as ``untouched="lazy"``.

    Raises:
        OptimizerError: it is of another kind, or has options that tables do not have.
    """
    if isinstance(optimizer, TableOptimizer):
        return optimizer
    kind = _kind_of(optimizer)
    accepted = {
        name
        for base in kind.__mro__
        if issubclass(base, TableOptimizer)
        for name in inspect.signature(base.__init__).parameters
    }
    fixed = {o.name for o in kind.declared_rule().options if isinstance(o, Fixed) and o.only}
    own = accepted - _OF_TORCH - fixed
    defaults = {k: v for k, v in optimizer.defaults.items() if k in own}
    if type(optimizer) is not torch.optim.SparseAdam:
        defaults["untouched"] = "exact"
    groups = []
    for group in optimizer.param_groups:
        numbers = {k: v for k, v in group.items() if k in own and defaults.get(k) != v}
        handles = [p.handle if isinstance(p, ConvertedWeight) else p for p in group["params"]]
        groups.append({**numbers, "params": handles})
    made: TableOptimizer = kind(groups, **{**defaults, **options})
    made.load_state_dict(optimizer.state_dict())
    return made


def _kind_of(optimizer: Optimizer) -> type[TableOptimizer]:
    known = {
        getattr(torch.optim, kind.__name__): kind
        for kind in _subclasses(TableOptimizer)
        if hasattr(torch.optim, kind.__name__)
    }
    if type(optimizer) in known:
        return known[type(optimizer)]
    raise OptimizerError(
        f"hotbed.optim.convert takes torch.optim's {', '.join(sorted(one.__name__ for one in known))}; got "
        f"{type(optimizer).__name__}. Make an optimizer of hotbed.optim over model.parameters() instead."
    )


def _subclasses(kind: type[TableOptimizer]) -> list[type[TableOptimizer]]:
    """Return the optimizers of this package below a class."""
    found = [own for own in kind.__subclasses__() if own.__module__.startswith("hotbed.")]
    return [*found, *(one for own in found for one in _subclasses(own))]
