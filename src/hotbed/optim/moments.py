"""Adam and its kin: rules with a first moment and bias correction."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hotbed.errors import OptimizerError
from hotbed.optim.base import TableOptimizer
from hotbed.optim.dense import DenseFactory
from hotbed.optim.options import arguments

__all__ = ["Adam", "AdamW", "Adamax", "RowwiseAdam"]


class _Moments(TableOptimizer):
    def _check_group(self, group: dict[str, Any]) -> None:
        for i, beta in enumerate(group["betas"]):
            if not 0 <= float(beta) < 1:
                raise ValueError(f"betas[{i}] must be in [0, 1), got {beta}")
        if not group["eps"] >= 0:
            raise ValueError(f"eps must not be negative, got {group['eps']}")

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        return {"beta1": float(beta1), "beta2": float(beta2), "eps": group["eps"]}


class Adam(_Moments):
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

    _rule = "adam"
    _dense: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        untouched: str = "lazy",
        dense: DenseFactory | None = None,
        fused: bool = False,
        replace_state: bool = False,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def _flags(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"amsgrad": bool(group["amsgrad"]), "plain_eps": self.untouched == "lazy"}


class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``: a touched row (with
    ``untouched="exact"`` every row) first shrinks by lr * weight_decay. Arguments as of `Adam`.
    """

    _dense = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
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


class RowwiseAdam(Adam):
    """Adam with one second moment a row, of the mean of g^2 over its columns. Arguments as of `Adam`,
    whose torch class steps the dense parameters.
    """

    _rule = "rowwise_adam"


class Adamax(_Moments):
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

    _rule = "adamax"
    _dense = torch.optim.Adamax

    def __init__(
        self,
        params: Any,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        untouched: str = "lazy",
        dense: DenseFactory | None = None,
        fused: bool = False,
        replace_state: bool = False,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        first = group.setdefault("first_eps", group["eps"])
        if self.untouched == "exact" and group["eps"] != first:
            raise OptimizerError(
                f'Adamax with untouched="exact": eps changed from {first} to {group["eps"]}, and rows '
                "that were left alone cannot follow that. Keep eps, or make a new optimizer."
            )
        return super()._numbers(group)
