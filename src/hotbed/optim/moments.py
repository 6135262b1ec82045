"""Adam and its kin: rules with a first moment and bias correction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hotbed.optim.base import TableOptimizer
from hotbed.optim.constructors import Stock, arguments
from hotbed.optim.options import DECAY, EPS, FOREACH, LR, MAXIMIZE, Fixed, Number, Rule

__all__ = ["Adam", "AdamW", "Adamax", "RowwiseAdam", "SparseAdam"]

BETAS = Number("betas", "[0, 1)", core=("beta1", "beta2"))


def _foreach_fits(group: Mapping[str, object]) -> str:
    """torch's Adam says so when it is made only, and fails in the step when it is told so later."""
    betas = group["betas"]
    given = (group["lr"], *betas) if isinstance(betas, Iterable) else ()
    wrong = group["foreach"] and any(isinstance(x, Tensor) for x in given)
    return "foreach=True needs lr and betas that are no tensors" if wrong else ""


class Adam(TableOptimizer):
    """Adam: rows as ``torch.optim.SparseAdam`` (lazy) or ``torch.optim.Adam`` (exact) moves them.

        m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
        exact:  w -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
        lazy:   w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

    They differ in where eps stands, as torch's two do. t counts the steps of the table, not of the
    row. Dense parameters go to ``torch.optim.Adam`` either way.

    Args:
        params: see `TableOptimizer`, also for ``untouched``, ``dense``, ``fused``, ``replace_state``.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the divisor.
        weight_decay: L2, added to the gradient; or, with ``decoupled_weight_decay``, as in `AdamW`.
        amsgrad: divide by the largest v so far.
        maximize: step up the gradient.
    """

    _rule = Rule(
        "adam",
        torch.optim.Adam,
        (LR, BETAS, EPS, *DECAY, Fixed("amsgrad"), MAXIMIZE, FOREACH),
        _foreach_fits,
        lazy="plain_eps",
        command="adam",
        states="2 dim (3 with amsgrad)",
        update=(
            "m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²; exact: w −= lr/(1−β₁ᵗ) · "
            "m/(√(v/(1−β₂ᵗ)) + eps); lazy: w −= lr·√(1−β₂ᵗ)/(1−β₁ᵗ) · m/(√v + eps)"
        ),
        source="torch's Adam; its SparseAdam, which places eps so",
        exact=(
            ("also amsgrad", "bounded replay", "at most K steps (below), then closed form"),
            (
                "β₁² ≥ β₂ (amsgrad too)",
                "refused",
                "the steps of an untouched row do not fade, so replay has no bound",
            ),
        ),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Unpack[Stock],
    ) -> None:
        super().__init__(params, arguments(locals()))


class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``: a touched row (with
    ``untouched="exact"`` every row) first shrinks by lr * weight_decay. Arguments as of `Adam`.
    """

    _rule = dataclasses.replace(
        Adam.declared_rule(),
        dense=torch.optim.AdamW,
        options=tuple(
            Fixed(option.name, only=True) if option == DECAY[1] else option
            for option in Adam.declared_rule().options
        ),
        command="adamw",
        states="as Adam",
        update="w ·= 1 − lr·wd, then Adam",
        source="torch",
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=True, **options
        )


class SparseAdam(Adam):
    """`Adam` with ``untouched="lazy"`` under the name of ``torch.optim.SparseAdam``, whose state_dict it
    loads. Dense parameters, which torch's refuses, go to ``torch.optim.Adam``. Other arguments as of
    `Adam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, maximize=maximize, untouched="lazy", **options)


class RowwiseAdam(Adam):
    """Adam with one second moment a row, of the mean of g^2 over its columns. Arguments as of `Adam`,
    whose torch class steps the dense parameters.
    """

    _rule = dataclasses.replace(
        Adam.declared_rule(),
        core="rowwise_adam",
        command="rowwise-adam",
        command_dense=torch.optim.Adam,
        states="dim + 1 (+ 1)",
        update="Adam with v = β₂v + (1−β₂)mean(g²), one a row",
        source="",
    )


class Adamax(TableOptimizer):
    """Adamax, as ``torch.optim.Adamax``.

        m = beta1 m + (1 - beta1) g;   u = max(beta2 u, |g| + eps)
        w -= lr / (1 - beta1^t) * m / u

    Args:
        params: see `TableOptimizer`, also for ``untouched``, ``dense``, ``fused``, ``replace_state``.
        lr: learning rate.
        betas: decay of the mean and of the largest gradient.
        eps: added to |g|. With ``untouched="exact"`` it must not change between steps.
        weight_decay: L2, added to the gradient; or, with ``decoupled_weight_decay``, the row shrinks
            by lr * weight_decay first.
        maximize: step up the gradient.
    """

    _rule = Rule(
        "adamax",
        torch.optim.Adamax,
        (LR, BETAS, EPS, Fixed("eps", of=float, untouched="exact"), *DECAY, MAXIMIZE, FOREACH),
        command="adamax",
        states="2 dim",
        update="m as Adam; u = max(β₂u, |g| + eps); w −= lr/(1−β₁ᵗ) · m/u",
        source="torch",
        exact=(
            ("", "bounded replay", "at most K steps, then closed form"),
            ("β₁ ≥ β₂", "refused", "likewise"),
        ),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Stock],
    ) -> None:
        super().__init__(params, arguments(locals()))
