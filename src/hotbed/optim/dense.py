"""The dense half of a Hotbed optimizer: a torch optimizer that follows the outer one's groups."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed import _core
from hotbed.errors import OptimizerError
from hotbed.optim.guards import mark_inner
from hotbed.optim.options import GroupOptions
from hotbed.table.live import live_table

__all__ = ["LR_RATIO", "Composition", "DenseFactory", "DenseHalf", "name_of"]

DenseFactory = Callable[[list[dict[str, Any]]], Optimizer]

LR_RATIO = "dense_lr_ratio"
"""Option of a group: the learning rates of ``dense=`` as multiples of its own."""


class DenseHalf:
    """Steps the dense parameters of an outer optimizer's groups, with one inner optimizer a group.

    Args:
        outer: the Hotbed optimizer; the inner ones work on its ``state``.
        kind: the torch class of the same rule, which follows all numbers of the outer group.
        chosen: the user's ``dense=``: a class, called with groups that carry the outer ``lr``, or a
            factory, called with groups of parameters only. Its hyperparameters are its own; its
            learning rate keeps its ratio to the outer one, so schedules act on both.
    """

    def __init__(
        self, outer: Optimizer, kind: type[Optimizer], chosen: DenseFactory | None
    ) -> None:
        self._outer = weakref.ref(outer)  # a cycle would keep tables until the next collection
        self.kind = kind
        self.chosen = chosen
        self.accepted = set(inspect.signature(kind).parameters) - {"params"}
        self.inners: list[tuple[int, Optimizer]] = []

    @property
    def outer(self) -> Optimizer:
        outer = self._outer()
        assert outer is not None
        return outer

    def zero_grad(self, set_to_none: bool) -> None:
        for _, inner in self.inners:
            inner.zero_grad(set_to_none)

    def add_group(self, index: int) -> None:
        """Takes the dense parameters of the outer group `index` in."""
        group = self.outer.param_groups[index]
        parameters = [p for p in group["params"] if live_table(p) is None]
        if not parameters:
            return
        inner = (
            self._same_rule(group, parameters)
            if self.chosen is None
            else self._chosen(group, parameters)
        )
        mark_inner(inner)
        self.outer.state.update(inner.state)  # torch's Adagrad makes its states at once
        inner.state = self.outer.state
        self.inners.append((index, inner))

    def drop_group(self, index: int) -> None:
        """Takes `add_group` back."""
        self.inners = [(at, inner) for at, inner in self.inners if at != index]

    def _same_rule(self, group: Mapping[str, object], parameters: list[Tensor]) -> Optimizer:
        options = {name: value for name, value in group.items() if name in self.accepted}
        try:
            made: Callable[..., Optimizer] = self.kind
            return made(parameters, **options)
        except (RuntimeError, TypeError, ValueError) as error:
            raise OptimizerError(
                f"{type(self.outer).__name__}: torch.optim.{self.kind.__name__}, which steps the dense "
                f"parameters, refuses its options: {error}"
            ) from error

    def _chosen(self, group: dict[str, Any], parameters: list[Tensor]) -> Optimizer:
        assert self.chosen is not None
        maximize, own = bool(group.get("maximize")), {"params": parameters}
        if isinstance(self.chosen, type):
            own |= {"lr": group["lr"]} | ({"maximize": True} if maximize else {})
        inner = self.chosen([own])
        if not isinstance(inner, Optimizer):
            raise OptimizerError(
                f"dense={self.chosen!r} must make a torch.optim.Optimizer of the groups it is "
                f"given, got {type(inner).__name__}."
            )
        name = type(inner).__name__
        if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
               for p in inspect.signature(inner.step).parameters.values()):  # fmt: skip
            raise OptimizerError(
                f"dense={name}: its step wants a closure, to be called again and again, which cannot be "
                "as tables are stepped once. Choose one whose step needs none."
            )
        if any(bool(g.get("maximize")) != maximize for g in inner.param_groups) or (
            maximize and "maximize" not in inner.defaults
        ):
            raise OptimizerError(
                f"dense={name}: tables step {'up' if maximize else 'down'} the gradient and dense "
                f"parameters would step the other way. Give it maximize={maximize}, or choose one that "
                "has it."
            )
        if group["lr"]:
            lr = float(group["lr"])
            group.setdefault(LR_RATIO, [float(g["lr"]) / lr for g in inner.param_groups])
        return inner

    def step(self) -> None:
        for index, inner in self.inners:
            group = self.outer.param_groups[index]
            for k, mine in enumerate(inner.param_groups):
                if self.chosen is not None:
                    ratios = group.get(LR_RATIO)
                    mine["lr"] = group["lr"] * ratios[k] if ratios else group["lr"]
                    continue
                for key in mine:
                    if key != "params" and key in group:
                        mine[key] = group[key]
                if group.get("decoupled_weight_decay") and "decoupled_weight_decay" not in mine:
                    _shrink(mine)
            inner.step()

    def check_loaded(self, index: int, group: Mapping[str, object]) -> None:
        """Raises OptimizerError where the rates in a group of a state_dict are of another ``dense=``."""
        counts = [len(inner.param_groups) for at, inner in self.inners if at == index]
        ratios = group.get(LR_RATIO)
        if self.chosen is None or ratios is None or counts == []:
            return
        if not isinstance(ratios, list) or counts != [len(ratios)]:
            raise OptimizerError(
                f"{type(self.outer).__name__}: the loaded state has {LR_RATIO}={ratios!r} in group {index}, "
                f"and dense= makes {counts[0]} groups of it. Load it with the dense= that it is of."
            )

    def check_state(
        self, options: GroupOptions, parameter: Tensor, state: Mapping[str, object]
    ) -> None:
        """Raises OptimizerError where the loaded state of a dense parameter is of another rule, or
        shape. torch would find out in the step, when tables have taken theirs."""
        if self.chosen is None:
            wanted = [p[0] for p in _core.state_planes(options.rule, options.initial)]
        else:
            wanted = list(self.outer.state.get(parameter, {}))
        for name in wanted if state else ():
            value = state.get(name)
            if name not in state or (
                isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape
            ):
                raise OptimizerError(
                    f"{type(self.outer).__name__}: the loaded state of a dense parameter of shape "
                    f"{tuple(parameter.shape)} lacks {name} of that shape; it has "
                    f"{', '.join(map(str, state))}."
                )

    def rejoin(self) -> None:
        """Follows the outer optimizer's state after it was loaded."""
        for _, inner in self.inners:
            inner.state = self.outer.state


@torch.no_grad()
def _shrink(group: dict[str, Any]) -> None:
    """Decoupled decay for rules whose torch class has none: w *= 1 - lr * weight_decay."""
    factor = 1 - float(group["lr"]) * group["weight_decay"]
    group["weight_decay"] = 0.0
    if factor != 1:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.mul_(factor)


@dataclasses.dataclass
class Composition:
    """Parts of a Hotbed optimizer."""

    arguments: Mapping[str, object]
    """Of its constructor, beside the parameters."""
    groups: Sequence[GroupOptions]
    """Its groups, with the numbers of their last step."""
    dense: DenseHalf
    """Torch's optimizers of dense parameters."""
    loaded: str = ""
    """Digest of the states that were loaded last, where ranks share tables."""


def name_of(parameter: Tensor, group: Mapping[str, object], position: int) -> str:
    """Return the name of a dense parameter for errors: its name in the largest module that has it."""
    names = group.get("param_names")
    if isinstance(names, Sequence):
        return f"Parameter {names[position]!r}"
    best = ""
    for thing in gc.get_objects():
        if isinstance(type(thing), type) and issubclass(type(thing), nn.Module):
            for name, found in thing.named_parameters():
                if found is parameter and len(name) > len(best):
                    best = name
    shape = tuple(parameter.shape)
    return f"Parameter {best!r} of shape {shape}" if best else f"A dense parameter of shape {shape}"
