"""SGD and FTRL: rules linear in the gradient."""

from __future__ import annotations

from typing import Any

import torch

from hotbed.errors import OptimizerError
from hotbed.optim.base import TableOptimizer
from hotbed.optim.dense import DenseFactory, Ftrl
from hotbed.optim.options import arguments

__all__ = ["FTRL", "SGD"]


class SGD(TableOptimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD``.

        b = momentum b + (1 - dampening) g;   w -= lr b        (nesterov: w -= lr (g + momentum b))

    Args:
        params: see `TableOptimizer`, also for ``untouched``, ``dense``, ``fused``, ``replace_state``.
        lr: learning rate.
        momentum: 0 keeps no state.
        dampening: share of the gradient that does not enter the buffer.
        weight_decay: L2, added to the gradient; or, with ``decoupled_weight_decay``, the row shrinks
            by lr * weight_decay first. With ``untouched="lazy"`` touched rows only.
        nesterov: needs momentum and no dampening.
        maximize: step up the gradient.
    """

    _rule = "sgd"
    _dense = torch.optim.SGD

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        untouched: str = "lazy",
        dense: DenseFactory | None = None,
        fused: bool = False,
        replace_state: bool = False,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        if not group["momentum"] >= 0:
            raise ValueError(f"momentum must not be negative, got {group['momentum']}")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("nesterov=True needs momentum > 0 and dampening 0")

    def _flags(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"momentum": group["momentum"] != 0, "nesterov": bool(group["nesterov"])}

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum": group["momentum"], "dampening": group["dampening"]}


class FTRL(TableOptimizer):
    """Follow the regularised leader, per coordinate: McMahan et al., "Ad click prediction: a view from
    the trenches", KDD 2013, algorithm 1, with the options of Keras.

        n' = n + g^2;   z += g + 2 l2_shrinkage w - (n'^-lr_power - n^-lr_power) / lr * w
        w = (clip(z, -l1, l1) - z) / (n'^-lr_power / lr + 2 l2 + beta / lr)

    Args:
        params: see `TableOptimizer`, also for ``untouched``, ``dense``, ``fused``, ``replace_state``.
        lr: learning rate, above 0.
        lr_power: at most 0; the rate falls as n^lr_power.
        initial_accumulator_value: first value of n.
        l1: sets weights whose |z| is smaller to exactly 0.
        l2: pulls weights towards 0.
        l2_shrinkage: L2 of the loss instead of the leader.
        beta: keeps the first steps small.

    The first step on a row forgets most of its first value: the weight is a function of z and n.
    Dense parameters are stepped by the same rule.
    """

    _rule = "ftrl"
    _dense = Ftrl

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        l2_shrinkage: float = 0.0,
        beta: float = 0.0,
        *,
        maximize: bool = False,
        untouched: str = "lazy",
        dense: DenseFactory | None = None,
        fused: bool = False,
        replace_state: bool = False,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        if not group["lr_power"] <= 0:
            raise ValueError(f"lr_power must be at most 0, got {group['lr_power']}")
        for key in ("initial_accumulator_value", "l1", "l2", "l2_shrinkage", "beta"):
            if not group[key] >= 0:
                raise ValueError(f"{key} must not be negative, got {group[key]}")

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        if not float(group["lr"]) > 0:
            raise OptimizerError(
                f"FTRL divides by lr, so it must be above 0, got {group['lr']}; let a schedule end at "
                "a small value instead."
            )
        return {key: group[key] for key in ("lr_power", "l1", "l2", "l2_shrinkage", "beta")}
