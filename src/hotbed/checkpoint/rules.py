"""How a table was stepped, as JSON values: the rule, its options, and what rows may have missed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hotbed import _core
from hotbed.checkpoint.entries import History, RuleEntry
from hotbed.checkpoint.errors import CheckpointError
from hotbed.optim import RULES
from hotbed.optim.options import fault_of_numbers
from hotbed.table.live import LiveTable

__all__ = ["forget_steps", "give_history", "refuse_other_rule", "rule_again", "rule_of"]

_OPTIONS = sorted(
    name
    for name, value in vars(_core.RuleOptions).items()
    if isinstance(value, property) and name != "rule"
)
_NUMBERS = sorted(
    name for name, value in vars(_core.Hyperparameters).items() if isinstance(value, property)
)


def rule_of(table: LiveTable) -> RuleEntry | None:
    """None: no optimizer has it."""
    rule = table.rule
    if rule is None:
        return None
    return {
        "name": rule.options.rule.name,
        "options": {name: getattr(rule.options, name) for name in _OPTIONS},
        "initial_accumulator_value": rule.initial_accumulator_value,
        "untouched": "exact" if rule.exact else "lazy",
        "states": [
            [name, 1 if one_a_row else table.spec.origin.dim]
            for name, one_a_row, _ in _core.state_planes(rule.options)
        ],
        "steps": rule.steps,
        "history": _history_of(rule) if rule.exact else None,
    }


def _history_of(rule: _core.TableRule) -> History:
    forgotten, base, ratio, size, last, runs = rule.history()
    return {
        "forgotten": forgotten,
        "base": list(base),
        "largest": [ratio, size],
        "numbers": _NUMBERS,
        "last": _numbers_of(last),
        "runs": [[count, *_numbers_of(numbers)] for count, numbers in runs],
    }


def _numbers_of(hyper: _core.Hyperparameters) -> list[float]:
    return [getattr(hyper, name) for name in _NUMBERS]


def refuse_other_rule(stem: str, table: LiveTable, saved: RuleEntry) -> None:
    """Raises CheckpointError where the states of a table are not those that were saved."""
    own = rule_of(table)
    assert own is not None
    was: dict[str, object]
    now: dict[str, object]
    was, now = ({**rule, **rule["options"]} for rule in (saved, own))
    kind = ("name", "untouched", "initial_accumulator_value", *_OPTIONS, "states")
    reported = [name for name in kind if was.get(name) != now[name]]
    if reported:
        differences = "; ".join(
            f"{name} {was.get(name)!r}, now {now[name]!r}" for name in reported[:3]
        )
        raise CheckpointError(
            f"Table {stem!r} was saved with another optimizer: {differences}. Make the optimizer as it "
            "was, or load the model before another one is made."
        )


def forget_steps(rule: _core.TableRule) -> None:
    """As if none had been taken."""
    rule.restart(0, [1, 0, 0, 1, 1], _core.Hyperparameters())


def give_history(rule: _core.TableRule, saved: Mapping[str, object] | None) -> None:
    """Starts a rule over with the steps that were saved.

    Raises:
        ValueError: no `rule_of` has made it.
    """
    given: Mapping[str, Any] = saved or {}
    match given:
        case {"steps": int(steps), "history": None}:
            rule.restart(steps, [1, 0, 0, 1, 1], _core.Hyperparameters())
        case {
            "history": {
                "forgotten": int(forgotten),
                "base": [*base],
                "largest": [ratio, size],
                "numbers": [*names],
                "last": [*last],
                "runs": [*runs],
            }
        } if names == _NUMBERS and len(base) == 5:
            again = [(int(count), _hyper_of(numbers)) for count, *numbers in runs]
            total = forgotten + sum(count for count, _ in again)
            for hyper in [*(hyper for _, hyper in again), *([_hyper_of(last)] if total else [])]:
                _check_numbers(rule, hyper)
            if (
                not all(map(math.isfinite, base))
                or not (ratio >= 0 and size >= 0)
                or min([forgotten, *(count - 1 for count, _ in again)]) < 0
                or total != given.get("steps")
                or total >= 1 << 40
            ):
                raise ValueError("the history of its steps has no such numbers")
            rule.restore((forgotten, base, ratio, size, _hyper_of(last), again))
        case _:
            raise ValueError("the history of its steps is incomplete")


def _check_numbers(rule: _core.TableRule, hyper: _core.Hyperparameters) -> None:
    """Raises ValueError where no step of a table's rule can have had these numbers."""
    faults = [
        fault_of_numbers(kind.declared_rule(), hyper)
        for kind in RULES
        if kind.declared_rule().core == rule.options.rule.name
    ]
    if fault := min(faults, key=len) or _core.why_not_exact(rule.options, hyper):
        raise ValueError(f"the history of its steps has numbers that none can have had: {fault}")


def _hyper_of(numbers: list[float]) -> _core.Hyperparameters:
    if len(numbers) != len(_NUMBERS):
        raise ValueError("the history of its steps is incomplete")
    hyper = _core.Hyperparameters()
    for name, value in zip(_NUMBERS, numbers, strict=True):
        setattr(hyper, name, value)
    return hyper


def rule_again(core: _core.Table, saved: RuleEntry) -> _core.TableRule:
    """Give a table of the core the rule and the history that were saved.

    Raises:
        ValueError: no `rule_of` has made it.
    """
    options = _core.RuleOptions()
    options.rule = getattr(_core.Rule, saved["name"])
    for name, value in saved["options"].items():
        if name not in _OPTIONS:
            raise ValueError(f"the option {name!r} of its rule is unknown")
        setattr(options, name, value)
    rule = _core.TableRule.make(core, options, float(saved["initial_accumulator_value"]), True)
    give_history(rule, saved)
    return rule
