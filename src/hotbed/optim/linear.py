"""SGD and FTRL: rules linear in the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hotbed.optim.base import TableOptimizer
from hotbed.optim.dense import DenseFactory, Ftrl
from hotbed.optim.options import DECAY, FOREACH, LR, MAXIMIZE, Fixed, Number, Rule, arguments

__all__ = ["FTRL", "SGD"]


def _nesterov_fits(group: Mapping[str, Any]) -> str:
    wrong = group["nesterov"] and not (group["momentum"] and group["dampening"] == 0)
    return "nesterov=True needs momentum above 0 and dampening 0" if wrong else ""


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

    _rule = Rule(
        "sgd",
        torch.optim.SGD,
        (
            LR,
            Number("momentum", "[0, inf)"),
            Fixed("momentum"),
            Number("dampening", "(-inf, inf)"),
            *DECAY,
            Fixed("nesterov"),
            MAXIMIZE,
            FOREACH,
        ),
        _nesterov_fits,
        command="sgd",
        states="none, or one buffer",
        update="b = μb + (1−damp)g; w −= lr·b; Nesterov: w −= lr·(g + μb)",
        source="torch",
    )

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


class FTRL(TableOptimizer):
    """Follow the regularised leader, per coordinate: McMahan et al., "Ad click prediction: a view from
    the trenches", KDD 2013, algorithm 1, with the options of Keras.

        n' = n + g^2;   z += g + 2 l2_shrinkage w - (n'^-lr_power - n^-lr_power) / lr * w
        w = (clip(z, -l1, l1) - z) / (n'^-lr_power / lr + 2 l2 + beta / lr)

    Args:
        params: see `TableOptimizer`, also for ``untouched``, ``dense``, ``fused``, ``replace_state``.
        lr: learning rate, above 0, as z is divided by it; let a schedule end at a small value.
        lr_power: at most 0; the rate falls as n^lr_power.
        initial_accumulator_value: first value of n.
        l1: sets weights whose |z| is smaller to exactly 0.
        l2: pulls weights towards 0.
        l2_shrinkage: L2 of the loss instead of the leader.
        beta: keeps the first steps small.

    The first step on a row forgets most of its first value: the weight is a function of z and n.
    Dense parameters are stepped by the same rule.
    """

    _rule = Rule(
        "ftrl",
        Ftrl,
        (
            Number("lr", "(0, inf)"),
            Number("lr_power", "(-inf, 0]"),
            Number("initial_accumulator_value", "[0, inf)", core=()),
            Fixed("initial_accumulator_value", of=float),
            *(Number(name, "[0, inf)") for name in ("l1", "l2", "l2_shrinkage", "beta")),
            MAXIMIZE,
        ),
        command="ftrl",
        command_dense=torch.optim.Adagrad,
        states="2 dim",
        update=(
            "n′ = n + g²; z += g − (n′⁻ᵖ − n⁻ᵖ)/lr · w; w = (clip(z, ±l1) − "
            "z)/(n′⁻ᵖ/lr + 2·l2 + beta/lr), p = lr_power ≤ 0"
        ),
        source="McMahan et al., KDD 2013; Keras",
    )

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
