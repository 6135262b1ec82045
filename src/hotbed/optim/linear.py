"""SGD and FTRL: rules linear in the gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hotbed.optim.base import TableOptimizer
from hotbed.optim.constructors import Coupled, Shared, arguments
from hotbed.optim.options import DECAY, FOREACH, LR, MAXIMIZE, Fixed, Number, Rule

__all__ = ["FTRL", "SGD"]


def _nesterov_fits(group: Mapping[str, object]) -> str:
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
        exact=(
            ("plain", "same as lazy", "none"),
            (
                "momentum, Nesterov, weight decay of either kind",
                "closed form",
                "a 2×2 matrix a stretch",
            ),
        ),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Coupled],
    ) -> None:
        super().__init__(params, arguments(locals()))


class Ftrl(Optimizer):
    """FTRL for dense parameters, with the arithmetic of `hotbed.optim.FTRL`; torch has none."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        l2_shrinkage: float = 0.0,
        beta: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_power": lr_power,
                "initial_accumulator_value": initial_accumulator_value,
                "l1": l1,
                "l2": l2,
                "l2_shrinkage": l2_shrinkage,
                "beta": beta,
                "maximize": maximize,
            },
        )

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr = float(group["lr"])
            power = -group["lr_power"]
            ridge = 2 * group["l2"] + group["beta"] / lr
            for w in group["params"]:
                if w.grad is None:
                    continue
                g = -w.grad if group["maximize"] else w.grad
                state = self.state[w]
                if not state:
                    state["accumulator"] = torch.full_like(w, group["initial_accumulator_value"])
                    state["linear"] = torch.zeros_like(w)
                total, z = state["accumulator"], state["linear"]
                old = total.pow(power)
                total.addcmul_(g, g)
                new = total.pow(power)
                z.add_(g).add_(w, alpha=2 * group["l2_shrinkage"]).addcmul_(
                    new - old, w, value=-1 / lr
                )
                curvature = new / lr + ridge
                clipped = z.clamp(-group["l1"], group["l1"])
                flat = ~(curvature > 0)
                w.copy_(((clipped - z) / curvature).masked_fill_(flat, 0.0))


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
        exact=(
            ("l1, l2, beta", "closed form", "w = f(z, n) at the last step's numbers"),
            ("l2_shrinkage", "refused", "g depends on w, so each missed step on the one before"),
        ),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        l2_shrinkage: float = 0.0,
        beta: float = 0.0,
        **options: Unpack[Shared],
    ) -> None:
        super().__init__(params, arguments(locals()))
