"""Independent oracles for the row rules, and a small table that drives the C++ rules directly.

Where torch has the rule, the oracle is torch.optim on a dense parameter. Otherwise it is written
here in numpy from the source of the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hotbed import _core
from hotbed.ops.duplicates import sum_duplicates

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


@dataclass
class Case:
    """A rule with options, as the core, torch and the oracles name them."""

    name: str
    rule: str
    hyper: dict[str, float]
    options: dict[str, bool] = field(default_factory=dict)
    oracle: Callable[..., Any] | None = None  # (params, lr) -> optimizer on dense parameters
    first: float = 0.0  # initial accumulator value

    def core_options(self) -> _core.RuleOptions:
        options = _core.RuleOptions()
        options.rule = getattr(_core.Rule, self.rule)
        for key, value in self.options.items():
            setattr(options, key, value)
        return options

    def core_hyper(self, **changes: float) -> _core.Hyperparameters:
        hyper = _core.Hyperparameters()
        for key, value in {**self.hyper, **changes}.items():
            setattr(hyper, key, value)
        return hyper


class CoreTable:
    """Weights and states of one table in torch tensors, updated by the core."""

    def __init__(self, case: Case, weights: torch.Tensor, key: int = 7) -> None:
        self.case = case
        self.weights = weights.clone()
        rows, dim = weights.shape
        self.compute = torch.float64 if weights.dtype == torch.float64 else torch.float32
        self.states = {
            name: torch.full((rows, 1 if one else dim), first, dtype=self.compute)
            for name, one, first in _core.state_planes(case.core_options(), case.first)
        }
        self.last_step = torch.zeros(rows, dtype=torch.int64)
        self.step_count = 0
        self.update = _core.RowUpdate()
        self.update.options = case.core_options()
        self.update.dim = dim
        self.update.table_key = key
        self.update.dtype = DTYPES[weights.dtype]
        self.update.set_planes(
            self.weights.data_ptr(),
            [s.data_ptr() for s in self.states.values()],
            0,
            self.last_step.data_ptr(),
        )

    def step(self, ids: torch.Tensor, grads: torch.Tensor, **changes: float) -> None:
        """ids (n,) possibly repeating, grads (n, dim)."""
        ids, grads = sum_duplicates(ids, grads.to(self.compute))
        self.step_count += 1
        self.update.hyper = self.case.core_hyper(**changes)
        self.update.set_gradient(ids.data_ptr(), grads.data_ptr(), len(ids), self.step_count)
        _core.update([self.update])


class DenseRule(torch.optim.Optimizer):
    """A rule torch lacks, dense, in the precision of its parameter. `hyper` as in the core."""

    def __init__(self, params: Any, lr: float, hyper: dict[str, float], first: float) -> None:
        super().__init__(params, {"lr": lr})
        self.hyper, self.first = hyper, first

    def rule(self, w: Any, g: Any, state: dict[str, Any], lr: Any, t: int) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                t = state["step"] = state.get("step", 0) + 1
                number = p.numpy().dtype.type
                arrays = {k: v.numpy() for k, v in state.items() if k != "step"}
                w = self.rule(p.numpy(), p.grad.numpy(), arrays, number(group["lr"]), t)
                p.copy_(torch.from_numpy(w))
                for k, v in arrays.items():
                    state[k] = torch.from_numpy(v)


class DenseRowwiseAdagrad(DenseRule):
    """FBGEMM, EXACT_ROWWISE_ADAGRAD: the mean of g^2 over the row is added to one sum a row."""

    def rule(self, w: Any, g: Any, state: dict[str, Any], lr: Any, t: int) -> Any:
        number, h = w.dtype.type, self.hyper
        if "sum" not in state:
            state["sum"] = np.full((len(w), 1), self.first, dtype=w.dtype)
        if h.get("weight_decay") and not h.get("decoupled"):
            g = g + number(h["weight_decay"]) * w
        if h.get("decoupled"):
            w = w * (1 - lr * number(h["weight_decay"]))
        lr = lr / (1 + (t - 1) * number(h.get("lr_decay", 0.0)))
        state["sum"] = state["sum"] + np.mean(g * g, axis=1, keepdims=True, dtype=w.dtype)
        return w - lr * g / (np.sqrt(state["sum"]) + number(h["eps"]))


class DenseRowwiseAdam(DenseRule):
    """Adam with one second moment a row, of the mean of g^2 over the row."""

    def rule(self, w: Any, g: Any, state: dict[str, Any], lr: Any, t: int) -> Any:
        number, h = w.dtype.type, self.hyper
        if "exp_avg" not in state:
            state["exp_avg"] = np.zeros_like(w)
            state["exp_avg_sq"] = np.zeros((len(w), 1), dtype=w.dtype)
            if h.get("amsgrad"):
                state["max_exp_avg_sq"] = np.zeros((len(w), 1), dtype=w.dtype)
        b1, b2 = number(h["beta1"]), number(h["beta2"])
        if h.get("decoupled"):
            w = w * (1 - lr * number(h["weight_decay"]))
        square = np.mean(g * g, axis=1, keepdims=True, dtype=w.dtype)
        state["exp_avg"] = b1 * state["exp_avg"] + (1 - b1) * g
        state["exp_avg_sq"] = b2 * state["exp_avg_sq"] + (1 - b2) * square
        second = state["exp_avg_sq"]
        if h.get("amsgrad"):
            second = state["max_exp_avg_sq"] = np.maximum(state["max_exp_avg_sq"], second)
        step_size = lr / number(1 - h["beta1"] ** t)
        scale = number((1 - h["beta2"] ** t) ** 0.5)
        return w - step_size * state["exp_avg"] / (np.sqrt(second) / scale + number(h["eps"]))


class DenseFtrl(DenseRule):
    """McMahan et al. 2013, algorithm 1, per coordinate; options and the meaning of l2 as in Keras.

    z += g - (n'^-p - n^-p) / lr * w;   w = -(z - clip(z, -l1, l1)) / (n'^-p / lr + 2 l2 + beta/lr)
    """

    def rule(self, w: Any, g: Any, state: dict[str, Any], lr: Any, t: int) -> Any:
        number, h = w.dtype.type, self.hyper
        if "linear" not in state:
            state["linear"] = np.zeros_like(w)
            state["accumulator"] = np.full_like(w, self.first)
        p = number(-h.get("lr_power", -0.5))
        old = state["accumulator"]
        new = old + g * g
        sigma = (np.power(new, p) - np.power(old, p)) / lr
        state["linear"] = (
            state["linear"] + g + number(2 * h.get("l2_shrinkage", 0.0)) * w - sigma * w
        )
        state["accumulator"] = new
        l1 = number(h.get("l1", 0.0))
        z = state["linear"]
        l2 = number(h.get("l2", 0.0)) + number(h.get("beta", 0.0)) / (2 * lr)
        return (np.clip(z, -l1, l1) - z) / (np.power(new, p) / lr + 2 * l2)


def _torch(name: str, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda params, lr: getattr(torch.optim, name)(params, lr=lr, **options)


def _dense(kind: type[DenseRule], first: float = 0.0, **hyper: Any) -> Callable[..., DenseRule]:
    return lambda params, lr: kind(params, lr, hyper, first)


_adam = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_rms = {"lr": 0.01, "alpha": 0.99, "eps": 1e-8}
_ftrl = {"lr": 0.05}

CASES = [
    Case("sgd", "sgd", {"lr": 0.1}, {}, _torch("SGD")),
    Case("sgd_maximize", "sgd", {"lr": 0.1}, {"maximize": True}, _torch("SGD", maximize=True)),
    Case("sgd_l2", "sgd", {"lr": 0.1, "weight_decay": 0.02}, {}, _torch("SGD", weight_decay=0.02)),
    Case(
        "sgd_momentum",
        "sgd",
        {"lr": 0.1, "momentum": 0.9},
        {"momentum": True},
        _torch("SGD", momentum=0.9),
    ),
    Case(
        "sgd_dampening_l2_maximize",
        "sgd",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
        {"momentum": True, "maximize": True},
        _torch("SGD", momentum=0.9, dampening=0.3, weight_decay=0.02, maximize=True),
    ),
    Case(
        "sgd_nesterov",
        "sgd",
        {"lr": 0.1, "momentum": 0.8},
        {"momentum": True, "nesterov": True},
        _torch("SGD", momentum=0.8, nesterov=True),
    ),
    Case(
        "sgd_nesterov_l2",
        "sgd",
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01},
        {"momentum": True, "nesterov": True},
        _torch("SGD", momentum=0.8, nesterov=True, weight_decay=0.01),
    ),
    Case("adagrad", "adagrad", {"lr": 0.1, "eps": 1e-10}, {}, _torch("Adagrad")),
    Case(
        "adagrad_options",
        "adagrad",
        {"lr": 0.1, "eps": 1e-6, "lr_decay": 0.05, "weight_decay": 0.01},
        {"maximize": True},
        _torch(
            "Adagrad",
            eps=1e-6,
            lr_decay=0.05,
            weight_decay=0.01,
            initial_accumulator_value=0.1,
            maximize=True,
        ),
        first=0.1,
    ),
    Case(
        "rowwise_adagrad",
        "rowwise_adagrad",
        {"lr": 0.1, "eps": 1e-8},
        {},
        _dense(DenseRowwiseAdagrad, eps=1e-8),
    ),
    Case(
        "rowwise_adagrad_l2",
        "rowwise_adagrad",
        {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.01, "lr_decay": 0.02},
        {},
        _dense(DenseRowwiseAdagrad, 0.1, eps=1e-8, weight_decay=0.01, lr_decay=0.02),
        first=0.1,
    ),
    Case(
        "rowwise_adagrad_decoupled",
        "rowwise_adagrad",
        {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.01},
        {"decoupled_weight_decay": True},
        _dense(DenseRowwiseAdagrad, eps=1e-8, weight_decay=0.01, decoupled=True),
    ),
    Case("adam", "adam", _adam, {}, _torch("Adam")),
    Case(
        "adam_small_betas",
        "adam",
        {**_adam, "beta1": 0.3, "beta2": 0.4},
        {},
        _torch("Adam", betas=(0.3, 0.4)),
    ),
    Case("adam_amsgrad", "adam", _adam, {"amsgrad": True}, _torch("Adam", amsgrad=True)),
    Case(
        "adam_l2_maximize",
        "adam",
        {**_adam, "weight_decay": 0.05},
        {"maximize": True},
        _torch("Adam", weight_decay=0.05, maximize=True),
    ),
    Case(
        "adamw",
        "adam",
        {**_adam, "weight_decay": 0.1},
        {"decoupled_weight_decay": True},
        _torch("AdamW", weight_decay=0.1),
    ),
    Case(
        "rowwise_adam",
        "rowwise_adam",
        _adam,
        {},
        _dense(DenseRowwiseAdam, beta1=0.9, beta2=0.999, eps=1e-8),
    ),
    Case(
        "rowwise_adam_amsgrad_decoupled",
        "rowwise_adam",
        {**_adam, "weight_decay": 0.1},
        {"amsgrad": True, "decoupled_weight_decay": True},
        _dense(
            DenseRowwiseAdam,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            amsgrad=True,
            weight_decay=0.1,
            decoupled=True,
        ),
    ),
    Case("adamax", "adamax", _adam, {}, _torch("Adamax")),
    Case(
        "adamax_l2",
        "adamax",
        {**_adam, "weight_decay": 0.05},
        {"maximize": True},
        _torch("Adamax", weight_decay=0.05, maximize=True),
    ),
    Case("adadelta", "adadelta", {"lr": 1.0, "alpha": 0.9, "eps": 1e-6}, {}, _torch("Adadelta")),
    Case(
        "adadelta_l2",
        "adadelta",
        {"lr": 0.5, "alpha": 0.8, "eps": 1e-5, "weight_decay": 0.05},
        {"maximize": True},
        _torch("Adadelta", rho=0.8, eps=1e-5, weight_decay=0.05, maximize=True),
    ),
    Case("rmsprop", "rmsprop", _rms, {}, _torch("RMSprop")),
    Case("rmsprop_centered", "rmsprop", _rms, {"centered": True}, _torch("RMSprop", centered=True)),
    Case(
        "rmsprop_momentum",
        "rmsprop",
        {**_rms, "momentum": 0.7},
        {"momentum": True},
        _torch("RMSprop", momentum=0.7),
    ),
    Case(
        "rmsprop_all",
        "rmsprop",
        {**_rms, "momentum": 0.7, "weight_decay": 0.05},
        {"momentum": True, "centered": True, "maximize": True},
        _torch("RMSprop", momentum=0.7, weight_decay=0.05, centered=True, maximize=True),
    ),
    Case("ftrl", "ftrl", _ftrl, {}, _dense(DenseFtrl, 0.1), first=0.1),
    Case(
        "ftrl_regularised",
        "ftrl",
        {**_ftrl, "l1": 0.3, "l2": 0.05, "beta": 0.5},
        {},
        _dense(DenseFtrl, 0.1, l1=0.3, l2=0.05, beta=0.5),
        first=0.1,
    ),
    Case(
        "ftrl_power_shrinkage",
        "ftrl",
        {**_ftrl, "lr_power": -0.7, "l2_shrinkage": 0.05, "l1": 0.01},
        {},
        _dense(DenseFtrl, 0.2, lr_power=-0.7, l2_shrinkage=0.05, l1=0.01),
        first=0.2,
    ),
]

CASE_IDS = [case.name for case in CASES]


class LazyOracle:
    """A dense optimizer after whose steps the rows that got no gradient are put back."""

    def __init__(self, case: Case, weights: torch.Tensor) -> None:
        self.parameter = torch.nn.Parameter(weights.clone())
        assert case.oracle is not None
        self.first = case.first
        self.optimizer = case.oracle([self.parameter], case.hyper["lr"])

    @torch.no_grad()
    def step(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        p = self.parameter
        p.grad = torch.zeros_like(p).index_add_(0, ids, grads.to(p.dtype))
        rows = torch.ones(len(p), dtype=torch.bool)
        rows[ids] = False
        before = {k: v.clone() for k, v in self._planes().items()}
        self.optimizer.step()
        for name, plane in self._planes().items():
            if name in before:
                plane[rows] = before[name][rows]
            else:  # created by this step
                plane[rows] = self.first if name in ("sum", "accumulator") else 0.0

    def _planes(self) -> dict[str, torch.Tensor]:
        planes = {
            k: v
            for k, v in self.optimizer.state[self.parameter].items()
            if isinstance(v, torch.Tensor) and v.dim() == 2
        }
        return {"weights": self.parameter.data, **planes}
