"""Covering arrays: few cases in which any two values of different factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Choice = tuple[str, Any]
"""A factor and one of its values."""

Case = dict[str, Any]
"""A value for each factor."""

Allowed = Callable[[Choice, Choice], bool]
"""Whether two values of different factors can be in one case, in either order."""


def pairs_of(factors: Mapping[str, Sequence[Any]], allowed: Allowed) -> list[tuple[Choice, Choice]]:
    """Any two values of different factors that can meet, factors in their order."""
    return [
        ((one, a), (other, b))
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
        if allowed((one, a), (other, b))
    ]


def covering(factors: Mapping[str, Sequence[Any]], allowed: Allowed) -> list[Case]:
    """Cases in which every allowed pair meets; the same ones each time.

    Greedy: each case begins with the first pair that has met in none, and goes on with the value that meets
    most others for the first time; of equals with the one that has been in fewest cases.

    Raises:
        ValueError: a pair that is allowed fits with no value of another factor.
    """
    waiting = dict.fromkeys(pairs_of(factors, allowed))
    order = list(factors)
    used: dict[Choice, int] = {}
    cases = []
    while waiting:
        case: Case = dict(next(iter(waiting)))
        for factor in order:
            if factor not in case:
                fitting = [
                    value
                    for value in factors[factor]
                    if all(allowed((factor, value), choice) for choice in case.items())
                ]
                if not fitting:
                    raise ValueError(f"No {factor} fits {case}.")
                chosen = list(case.items())
                gains = []
                for value in fitting:
                    choice = factor, value
                    met = sum(_in_order(order, choice, other) in waiting for other in chosen)
                    gains.append((met, -used.get(choice, 0)))
                case[factor] = fitting[gains.index(max(gains))]
        for choice in case.items():
            used[choice] = used.get(choice, 0) + 1
        for pair in itertools.combinations([(factor, case[factor]) for factor in order], 2):
            waiting.pop(pair, None)
        cases.append({factor: case[factor] for factor in order})
    return cases


def _in_order(order: list[str], a: Choice, b: Choice) -> tuple[Choice, Choice]:
    return (a, b) if order.index(a[0]) < order.index(b[0]) else (b, a)
