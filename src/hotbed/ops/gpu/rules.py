"""The optimizer rules, for kernels: the arithmetic of csrc/kernels/rules.inl, with its bits.

Twice written, as the rest of Hotbed's kernels: the core's is the one to read for formulas and their
sources (docs/optimizers.md). What depends on the step only is computed in double on the host.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from hotbed import _core
from hotbed.ops.gpu.rows import at32, only_if

__all__ = [
    "COLUMN_RULES",
    "NUMBERS",
    "ROW_RULES",
    "apply_rule",
    "numbers_of",
    "row_rate",
    "rule_of",
]

COLUMN_RULES = {
    "sgd": 0,
    "sgd_momentum": 1,
    "adagrad": 1,
    "adam": 2,
    "adam_amsgrad": 3,
    "adamax": 2,
    "adadelta": 2,
    "rmsprop": 1,
    "rmsprop_centered": 2,
    "rmsprop_momentum": 2,
    "rmsprop_centered_momentum": 3,
    "ftrl": 2,
    "ftrl_power": 2,
    "rowwise_adagrad": 0,
    "rowwise_adam": 1,
}
"""What a column of a row becomes, and how many states of `dim` values it has."""

ROW_RULES = ("rowwise_adagrad", "rowwise_adam")
"""Those whose other states are one value a row: `row_rate` moves these first."""

NUMBERS = 12
"""Doubles of a step, at most: three of every rule, then the rule's own."""


def rule_of(options: _core.RuleOptions, hyper: _core.Hyperparameters) -> str:
    """The column rule that the options name."""
    name = options.rule.name
    if name == "sgd" and options.momentum:
        return "sgd_momentum"
    if name == "adam" and options.amsgrad:
        return "adam_amsgrad"
    if name == "rmsprop":
        return name + "_centered" * options.centered + "_momentum" * options.momentum
    if name == "ftrl" and hyper.lr_power != -0.5:
        return "ftrl_power"
    return str(name)


def numbers_of(options: _core.RuleOptions, hyper: _core.Hyperparameters, step: int) -> list[float]:
    """Return numbers of a step for kernels, in double: sign, L2, what decoupled decay keeps; the rule's.

    A single precision copy of each is what the core computes with.
    """
    h = hyper
    decoupled = options.decoupled_weight_decay
    found = [
        -1.0 if options.maximize else 1.0,
        0.0 if decoupled else h.weight_decay,
        1 - h.lr * h.weight_decay if decoupled else 1.0,
    ]
    name = options.rule.name
    if name == "sgd":
        # torch's first step puts the whole gradient into the buffer.
        found += [h.lr, h.momentum, 1.0 if step <= 1 else 1 - h.dampening, options.nesterov]
    elif name in ("adagrad", "rowwise_adagrad"):
        found += [h.lr / (1 + (step - 1) * h.lr_decay), h.eps]
    elif name in ("adam", "rowwise_adam"):
        correction = _one_minus_power(h.beta2, step)
        eps = h.eps / math.sqrt(correction) if options.plain_eps else h.eps
        step_size = h.lr / _one_minus_power(h.beta1, step)
        found += [1 - h.beta1, h.beta1, h.beta1 > 0.5, h.beta2, 1 - h.beta2]
        found += [step_size, 1 / math.sqrt(correction), eps]
    elif name == "adamax":
        step_size = h.lr / _one_minus_power(h.beta1, step)
        found += [1 - h.beta1, h.beta1, h.beta1 > 0.5, h.beta2, step_size, h.eps]
    elif name == "adadelta":
        found += [h.lr, h.alpha, 1 - h.alpha, h.eps]
    elif name == "rmsprop":
        found += [1 - h.alpha, h.alpha, h.alpha > 0.5, h.lr, h.eps, h.momentum]
    elif name == "ftrl":
        ridge = 2 * h.l2 + _ratio(h.beta, h.lr)
        found += [h.l1, 2 * h.l2_shrinkage, _ratio(1.0, h.lr), ridge, -h.lr_power]
    return [float(number) for number in found]


def _ratio(a: float, b: float) -> float:
    """a / b for a >= 0, where b may be 0 as in C++: a schedule may begin at a rate of 0."""
    if b == 0:
        return math.inf if a > 0 else math.nan
    return a / b


def _one_minus_power(beta: float, steps: int) -> float:
    """1 - beta^steps as the core takes it (csrc/kernels/power.inl)."""
    result, base = 1.0, beta
    while steps > 0:
        if steps & 1:
            result *= base
        base *= base
        steps >>= 1
    return 1 - result


# --- For kernels. ---


@triton.jit
def double(numbers, k):
    """The k-th number of a step."""
    return tl.load(numbers + k).to(tl.float64, bitcast=True)


@triton.jit
def single(numbers, k):
    """The same rounded to what rules compute with."""
    return double(numbers, k).to(tl.float32)


@triton.jit
def quotient(a, b):
    """a / b, rounded once, for blocks."""
    return tl.div_rn(a, b)


@triton.jit
def shrunk_gradient(weights, gradients, numbers):
    """The gradient as a rule sees it: with its sign, and L2 added."""
    l2 = single(numbers, 1)
    signed = single(numbers, 0) * gradients
    return tl.where(l2 != 0, signed + l2 * weights, signed)


@triton.jit
def blend(start, to, numbers):
    """start + share * (to - start), in the form that is exact at share 1 when share is large."""
    difference = to - start
    near = start + single(numbers, 3) * difference
    return tl.where(single(numbers, 5) != 0, near, to - single(numbers, 4) * difference)


@triton.jit
def apply_rule(w, g, a, b, c, rate, numbers, RULE: tl.constexpr):
    """(weights, states) after a step, of weights, gradients and up to three states of one shape.

    `rate` (like w): of the row rules, what `row_rates_kernel` found.
    """
    g = shrunk_gradient(w, g, numbers)
    w = single(numbers, 2) * w
    if RULE == "sgd":
        w = w - single(numbers, 3) * g
    elif RULE == "sgd_momentum":
        a = single(numbers, 4) * a + single(numbers, 5) * g
        ahead = tl.where(single(numbers, 6) != 0, g + single(numbers, 4) * a, a)
        w = w - single(numbers, 3) * ahead
    elif RULE == "adagrad":
        a = a + g * g
        w = w - quotient(single(numbers, 3) * g, tl.sqrt_rn(a) + single(numbers, 4))
    elif RULE == "rowwise_adagrad":
        w = w - rate * g
    elif RULE == "rowwise_adam":
        a = blend(a, g, numbers)
        w = w - rate * a
    elif RULE == "adam" or RULE == "adam_amsgrad":
        a = blend(a, g, numbers)
        b = b * single(numbers, 6) + single(numbers, 7) * g * g
        second = b
        if RULE == "adam_amsgrad":
            c = tl.where(c > b, c, b)
            second = c
        root = tl.sqrt_rn(second) * single(numbers, 9) + single(numbers, 10)
        w = w - quotient(single(numbers, 8) * a, root)
    elif RULE == "adamax":
        a = blend(a, g, numbers)
        decayed, now = b * single(numbers, 6), tl.abs(g) + single(numbers, 8)
        b = tl.where(decayed > now, decayed, now)
        w = w - quotient(single(numbers, 7) * a, b)
    elif RULE == "adadelta":
        rho, share, eps = single(numbers, 4), single(numbers, 5), single(numbers, 6)
        a = a * rho + share * g * g
        delta = quotient(tl.sqrt_rn(b + eps), tl.sqrt_rn(a + eps)) * g
        b = b * rho + share * delta * delta
        w = w - single(numbers, 3) * delta
    elif RULE == "ftrl" or RULE == "ftrl_power":
        w, a, b = ftrl(w, g, a, b, numbers, RULE)
    else:
        w, a, b, c = rmsprop(w, g, a, b, c, numbers, RULE)
    return w, a, b, c


@triton.jit
def row_rate(mean, states, slot, live, numbers, ROWS: tl.constexpr, RULE: tl.constexpr):
    """Moves the states of one value a row by the mean squares (ROWS,) of gradients; returns the rates."""
    state = at32(tl.load(states)) + slot
    square = tl.load(state, mask=live, other=0.0)
    if RULE == "rowwise_adagrad":
        square = square + mean
        tl.store(state, square, mask=live)
        divisor = tl.sqrt_rn(square) + single(numbers, 4)
        rate = single(numbers, 3)
    else:
        square = square * single(numbers, 6) + single(numbers, 7) * mean
        tl.store(state, square, mask=live)
        largest = tl.load(states + 1)
        kept = only_if(largest != 0, live)
        before = tl.load(at32(largest) + slot, mask=kept, other=0.0)
        square = tl.where(before > square, before, square)
        tl.store(at32(largest) + slot, square, mask=kept)
        divisor = tl.sqrt_rn(square) * single(numbers, 9) + single(numbers, 10)
        rate = single(numbers, 8)
    # A row of zero gradients and eps 0 would give 0 / 0 in every column.
    some = divisor > 0
    rate = tl.div_rn(tl.zeros([ROWS], tl.float32) + rate, tl.where(some, divisor, 1.0))
    return tl.where(some, rate, 0.0)


@triton.jit
def rmsprop(w, g, a, b, c, numbers, RULE: tl.constexpr):
    """States: the mean square, the mean gradient if centered, the buffer if there is momentum."""
    a = a * single(numbers, 4) + single(numbers, 3) * g * g
    variance = a
    if RULE == "rmsprop_centered" or RULE == "rmsprop_centered_momentum":
        b = blend(b, g, numbers)
        variance = a - b * b
    step = quotient(g, tl.sqrt_rn(variance) + single(numbers, 7))
    if RULE == "rmsprop_momentum":
        b = single(numbers, 8) * b + step
        step = b
    if RULE == "rmsprop_centered_momentum":
        c = single(numbers, 8) * c + step
        step = c
    return w - single(numbers, 6) * step, a, b, c


@triton.jit
def ftrl(w, g, a, b, numbers, RULE: tl.constexpr):
    """States: the sum of squares, the linear term."""
    l1, inverse_rate = single(numbers, 3), single(numbers, 5)
    before, square = a, g * g
    a = before + square
    if RULE == "ftrl":
        old = tl.sqrt_rn(before)
        root = tl.sqrt_rn(a)
        both = root + old
        rise = tl.where(both > 0, quotient(square, tl.where(both > 0, both, 1.0)), 0.0)
    else:
        wide = before.to(tl.float64)
        power = double(numbers, 7)
        new = power_of(wide + square.to(tl.float64), power)
        rise = (new - power_of(wide, power)).to(tl.float32)
        root = new.to(tl.float32)
    b = b + (g + single(numbers, 4) * w - rise * inverse_rate * w)
    curvature = root * inverse_rate + single(numbers, 6)
    clipped = tl.where(b > l1, l1, tl.where(b < -l1, -l1, b))
    # No gradient ever and no regularisation: the minimum is not unique, and zero is one.
    some = curvature > 0
    w = tl.where(some, quotient(clipped - b, tl.where(some, curvature, 1.0)), 0.0)
    return w, a, b


@triton.jit
def power_of(x, p):
    """x^p in double for x >= 0 and p >= 0."""
    raised = tl.exp(p * tl.log(tl.where(x > 0, x, 1.0)))
    return tl.where(p == 0, 1.0, tl.where(x > 0, raised, x))
