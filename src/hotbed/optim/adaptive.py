"""Rules that scale a step by past squared gradients, without bias correction."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hotbed.optim.base import TableOptimizer
from hotbed.optim.constructors import Coupled, Stock, arguments
from hotbed.optim.options import DECAY, EPS, FOREACH, LR, MAXIMIZE, Fixed, Number, Rule

__all__ = ["Adadelta", "Adagrad", "RMSprop", "RowwiseAdagrad"]


class Adagrad(TableOptimizer):
    """Adagrad, as ``torch.optim.Adagrad``.

        s += g^2;   w -= lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)

    Args:
        params: see `TableOptimizer`, also for ``untouched``, ``dense``, ``fused``, ``replace_state``.
        lr: learning rate.
        lr_decay: how fast lr falls with the steps t of the table.
        weight_decay: L2, added to the gradient; or, with ``decoupled_weight_decay``, the row shrinks
            by lr * weight_decay first.
        initial_accumulator_value: first value of s.
        eps: added to the divisor.
        maximize: step up the gradient.
    """

    _rule = Rule(
        "adagrad",
        torch.optim.Adagrad,
        (
            LR,
            Number("lr_decay", "[0, inf)"),
            *DECAY,
            Number("initial_accumulator_value", "[0, inf)", core=()),
            Fixed("initial_accumulator_value", of=float),
            EPS,
            MAXIMIZE,
            FOREACH,
        ),
        command="adagrad",
        states="dim",
        update="s += g²; w −= lr/(1+(t−1)·lr_decay) · g/(√s + eps)",
        source="torch",
        exact=(
            ("plain, lr_decay", "same as lazy", "none"),
            ("decoupled decay", "closed form", "one factor a stretch"),
        ),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Coupled],
    ) -> None:
        super().__init__(params, arguments(locals()))


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum a row instead of one a column: as good in most recommenders, for a fraction
    of the state. FBGEMM's EXACT_ROWWISE_ADAGRAD:

        s += mean(g^2);   w -= lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)

    Arguments as of `Adagrad`, whose torch class steps the dense parameters.
    """

    _rule = dataclasses.replace(
        Adagrad.declared_rule(),
        core="rowwise_adagrad",
        command="rowwise-adagrad",
        command_dense=torch.optim.Adagrad,
        states="1",
        update="s += mean(g²); w −= lr/(1+(t−1)·lr_decay) · g/(√s + eps)",
        source="FBGEMM, EXACT_ROWWISE_ADAGRAD",
    )

    def __init__(
        self, params: ParamsT, lr: float = 1e-2, *, eps: float = 1e-8, **options: Any
    ) -> None:
        super().__init__(params, lr, eps=eps, **options)


class Adadelta(TableOptimizer):
    """Adadelta, as ``torch.optim.Adadelta``.

        v = rho v + (1 - rho) g^2;   d = sqrt(u + eps) / sqrt(v + eps) * g
        u = rho u + (1 - rho) d^2;   w -= lr d

    Args:
        params: see `TableOptimizer`, also for ``untouched``, ``dense``, ``fused``, ``replace_state``.
        lr: factor of the step.
        rho: decay of both averages.
        eps: added under both roots.
        weight_decay: L2, added to the gradient; or, with ``decoupled_weight_decay``, the row shrinks
            by lr * weight_decay first.
        maximize: step up the gradient.
    """

    _rule = Rule(
        "adadelta",
        torch.optim.Adadelta,
        (LR, Number("rho", "[0, 1]", core=("alpha",)), EPS, *DECAY, MAXIMIZE, FOREACH),
        command="adadelta",
        states="2 dim",
        update="v = ρv + (1−ρ)g²; d = √(a+eps)/√(v+eps) · g; a = ρa + (1−ρ)d²; w −= lr·d",
        source="torch",
        exact=(("also decoupled decay", "closed form", "two factors"),),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **options: Unpack[Stock],
    ) -> None:
        super().__init__(params, arguments(locals()))


class RMSprop(TableOptimizer):
    """RMSprop, as ``torch.optim.RMSprop``.

        v = alpha v + (1 - alpha) g^2;   centered: a = alpha a + (1 - alpha) g, v is v - a^2 below
        d = g / (sqrt(v) + eps);   with momentum: d = b = momentum b + d;   w -= lr d

    Args:
        params: see `TableOptimizer`, also for ``untouched``, ``dense``, ``fused``, ``replace_state``.
        lr: learning rate.
        alpha: decay of the averages.
        eps: added to the divisor.
        weight_decay: L2, added to the gradient; or, with ``decoupled_weight_decay``, the row shrinks
            by lr * weight_decay first.
        momentum: 0 keeps no buffer.
        centered: divide by the standard deviation instead of the root mean square.
        maximize: step up the gradient.
    """

    _rule = Rule(
        "rmsprop",
        torch.optim.RMSprop,
        (
            LR,
            Number("alpha", "[0, 1]"),
            EPS,
            *DECAY,
            Number("momentum", "[0, inf)"),
            Fixed("momentum"),
            Fixed("centered"),
            MAXIMIZE,
            FOREACH,
        ),
        command="rmsprop",
        states="dim (+ dim centered, + dim momentum)",
        update="v = αv + (1−α)g²; d = g/(√v + eps); momentum: b = μb + d; w −= lr·b",
        source="torch",
        exact=(
            (
                "plain, centered, momentum, decoupled decay",
                "closed form",
                "a 2×2 matrix and a factor",
            ),
        ),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        **options: Unpack[Stock],
    ) -> None:
        super().__init__(params, arguments(locals()))
