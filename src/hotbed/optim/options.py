"""Options of optimizers: a rule declares its options once, and every check follows from that.

An option is a `Number`, which may be another at each step and then counts for tables and dense
parameters alike; or `Fixed`: it decides which states a row has or what moves it, and must stay what it
was when the optimizer was made; or `DenseOnly`. A number of which something is fixed is declared as both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import is_not, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hotbed import _core
from hotbed.errors import OptimizerError
from hotbed.optim.number import Number
from hotbed.table.live import live_table
from hotbed.text import brief

__all__ = [
    "DECAY",
    "EPS",
    "FOREACH",
    "LR",
    "MAXIMIZE",
    "NOT_FOR_TABLES",
    "DenseOnly",
    "Fixed",
    "GroupOptions",
    "Number",
    "Rule",
    "check_flags",
    "fault_of_numbers",
    "loadable",
    "numbers_of",
    "refuse_in_groups",
    "refuse_strangers",
    "refuse_tables_twice",
    "strangers",
    "torch_classes",
]


@dataclasses.dataclass(frozen=True)
class Fixed:
    """An option of which something must stay.

    Args:
        name: in a parameter group.
        of: what: ``bool``, whether it is on, which is a flag of the core's; or ``float``, all of it.
        only: the one value it may have; None: any.
        untouched: it is fixed where the optimizer has this ``untouched``; None: always.
    """

    name: str
    of: type[bool] | type[float] = bool
    only: bool | None = None
    untouched: str | None = None


@dataclasses.dataclass(frozen=True)
class DenseOnly:
    """An option that only says how torch computes."""

    name: str


_DECLARED: list[Rule] = []


@dataclasses.dataclass(frozen=True)
class Rule:
    """How tables and dense parameters are stepped.

    Args:
        core: the rule's name in the core.
        dense: the torch class of the same rule.
        options: all that a parameter group says about it.
        relation: says what is wrong with options that are right one by one.
        lazy: the core's flag that tells untouched="lazy" from "exact"; "": the steps are the same.
        command: what `hotbed train` calls it; "": not at all.
        command_dense: the class of torch.optim with which that steps the dense parameters, as it comes;
            None: with `dense`, told all numbers of the rule.
        states: of a row, for docs/optimizers.md, as are
        update: the formula,
        source: where it comes from, and
        exact: of options, what untouched="exact" is with them, and what a missed stretch costs then.
    """

    core: str
    dense: type[Optimizer]
    options: tuple[Number | Fixed | DenseOnly, ...]
    relation: Callable[[Mapping[str, object]], str] = lambda group: ""
    lazy: str = ""
    command: str = ""
    command_dense: type[Optimizer] | None = None
    states: str = ""
    update: str = ""
    source: str = ""
    exact: tuple[tuple[str, str, str], ...] = ()
    names: frozenset[str] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(option.name for option in self.options))
        _DECLARED.append(self)


LR = Number("lr", "[0, 1e30]")
EPS = Number("eps", "[0, inf)")
DECAY = (
    Number("weight_decay", "[0, inf)"),
    Fixed("decoupled_weight_decay"),
)
MAXIMIZE = Fixed("maximize")
FOREACH = DenseOnly("foreach")

# Of torch's optimizers.
NOT_FOR_TABLES = ("capturable", "differentiable")

_OF_THE_WHOLE = ("dense", "fused", "replace_state", "untouched")

# Options that a user may try on any optimizer, and what to say of them.
_STRANGERS = {
    "l1": "L1 regularisation is a part of hotbed.optim.FTRL only. Elsewhere add a penalty on the "
    "looked-up vectors to the loss, such as l1 * vectors.abs().sum()",
    "l2": "it is called weight_decay here, and FTRL alone has l2",
}


class GroupOptions:
    """The options of a parameter group.

    Attributes:
        rule: the core's RuleOptions.
        hyper: the core's Hyperparameters of the step to come, once they are read.
        initial: first value of the states that have one.
    """

    def __init__(
        self, kind: str, rule: Rule, untouched: str, index: int, group: Mapping[str, Any]
    ) -> None:
        """Raises OptimizerError where one cannot be honoured.

        Args:
            kind: name of the optimizer's class.
            untouched: of the optimizer.
            index: number of the group.
        """
        self._declared, self._kind, self._index = rule, kind, index
        self._options = [o for o in self._declared.options if not isinstance(o, DenseOnly)]
        self._values_of = itemgetter(*(option.name for option in self._options))
        self._positions = range(len(self._options))
        self._made: dict[str, tuple[object, bool | float]] = {}
        # The values that were right at the last step and need no second look.
        self._seen = self._unread = [object()] * len(self._options)
        self.hyper = _core.Hyperparameters()
        self.read(group)
        self.rule = _core.RuleOptions()
        self.rule.rule = getattr(_core.Rule, self._declared.core)
        if self._declared.lazy:
            setattr(self.rule, self._declared.lazy, untouched == "lazy")
        for option in self._options:
            if not isinstance(option, Fixed) or option.untouched not in (None, untouched):
                continue
            given = group[option.name]
            value = self._of(option, given)
            if option.only not in (None, value):
                raise self._error(
                    option.name,
                    f"is {given!r}, and this class is for {option.only}. Use another class",
                )
            self._made[option.name] = given, value
            if option.of is bool:
                setattr(self.rule, option.name, value)
        self.initial = float(group.get("initial_accumulator_value", 0.0))

    def read(self, group: Mapping[str, object], *, loaded: bool = False) -> _core.Hyperparameters:
        """Checks the group as it is now, and returns its numbers.

        Args:
            loaded: it comes from a state_dict, and is only to be checked.

        Raises:
            OptimizerError: tables cannot follow it, or not as dense parameters would.
        """
        try:
            values = self._values_of(group)
        except KeyError as error:
            raise self._error(error.args[0], "is missing") from None
        hyper, seen = (
            (_core.Hyperparameters(), self._unread) if loaded else (self.hyper, self._seen)
        )
        changed = list(compress(self._positions, map(is_not, values, seen)))
        if not group.keys().isdisjoint(NOT_FOR_TABLES):
            check_flags(self._kind, self._declared, group)
        if not changed:
            return hyper
        if not loaded:
            self._seen = self._unread
        right = list(seen)
        for at in changed:
            option, value = self._options[at], values[at]
            if isinstance(option, Number):
                if fault := option.read(value, hyper, loaded=loaded):
                    raise self._error(option.name, fault)
            elif option.name in self._made:
                given, made = self._made[option.name]
                if value is not given and self._of(option, value) != made:
                    raise self._changed(option.name, given, value, loaded)
            right[at] = value if _stays_as_it_is(value) else self._unread[at]
        if fault := self._declared.relation(group):
            raise OptimizerError(f"{self._kind}, group {self._index}: {fault}.")
        if not loaded:
            self._seen = right
        return hyper

    def are_of(self, rule: _core.TableRule | None, exact: bool) -> bool:
        """Return True if a table's rule has these options."""
        return (
            rule is not None
            and rule.options == self.rule
            and rule.exact == exact
            and rule.initial_accumulator_value == self.initial
        )

    def fault_of_exact(self, rules: Sequence[_core.TableRule], hyper: _core.Hyperparameters) -> str:
        """Why tables with these rules cannot be stepped with ``untouched="exact"``; empty if they can."""
        reason = _core.why_not_exact(self.rule, hyper) if rules else ""
        if not reason and not all(rule.exact for rule in rules):
            stays = _core.untouched_rows_stay(self.rule, hyper)
            reason = "" if stays else "weight_decay was 0 when the optimizer was made"
        return reason

    def _of(self, option: Fixed, value: object) -> bool | float:
        try:
            return option.of(value)  # type: ignore[arg-type]
        except (OverflowError, RuntimeError, TypeError, ValueError):
            raise self._error(
                option.name, f"is {brief(value)}, and must be True or False"
            ) from None

    def _error(self, name: str, fault: str) -> OptimizerError:
        return OptimizerError(f"{self._kind}: {name} of group {self._index} {fault}.")

    def _changed(self, name: str, old: object, new: object, loaded: bool) -> OptimizerError:
        if loaded:
            fault = (
                f"is {new!r} in the loaded state, and was {old!r} when the optimizer was made. Make it with "
                f"{name}={new!r}, then load"
            )
        else:
            fault = (
                f"changed from {old!r} to {new!r}, which its tables and their states cannot follow. Make a "
                "new optimizer, with replace_state=True"
            )
        return self._error(name, fault)


def _stays_as_it_is(value: object) -> bool:
    """Unlike a tensor, which is the same one when its number is another."""
    return type(value) in (float, int, bool) or (
        type(value) is tuple and all(map(_stays_as_it_is, value))
    )


def loadable(own: Mapping[str, object], saved: Mapping[str, object]) -> dict[str, object]:
    """A group of a state_dict; what it does not tell is as in the group `own`."""
    # What torch computes with its fused=True is the same; ours is no option of groups.
    dropped = {"fused", *(name for name in NOT_FOR_TABLES if not saved.get(name))}
    return {**own, **{name: value for name, value in saved.items() if name not in dropped}}


def check_flags(kind: str, rule: Rule, options: Mapping[str, object]) -> None:
    """Raises where an option that is on or off is neither, or only torch's optimizers can honour it; or
    `untouched` is no word for it."""
    untouched = options.get("untouched", "lazy")
    if not (isinstance(untouched, str) and untouched in ("lazy", "exact")):
        raise OptimizerError(f'untouched must be "lazy" or "exact", got {brief(untouched)}.')
    numbers = {option.name for option in rule.options if isinstance(option, Number)}
    for name in (*(rule.names - numbers), "fused", "replace_state", *NOT_FOR_TABLES):
        value = options.get(name)
        if not (value is None or (isinstance(value, (int, np.bool_)) and value in (0, 1))):
            raise OptimizerError(f"{kind}: {name} is {brief(value)}; it must be True or False.")
    for name in NOT_FOR_TABLES:
        if options.get(name):
            raise OptimizerError(
                f"{kind}: {name}=True cannot be honoured for tables. Give it to the dense part only: "
                f"dense=lambda groups: torch.optim.X(groups, {name}=True)."
            )


def strangers(rule: Rule, names: Iterable[str]) -> list[str]:
    """Return those of `names` that are options of other rules only."""
    known = _STRANGERS.keys() | {name for declared in _DECLARED for name in declared.names}
    return [name for name in names if name in known and name not in rule.names]


def torch_classes() -> set[str]:
    """Names of the classes of torch.optim of whose rule there is a class here."""
    kinds = {rule.dense for rule in _DECLARED}
    return {kind.__name__ for kind in kinds if getattr(torch.optim, kind.__name__, None) is kind}


def refuse_strangers(kind: str, rule: Rule, names: Iterable[str]) -> None:
    """Raises where one of `names` is an option of other rules only."""
    for name in strangers(rule, names):
        more = f": {_STRANGERS[name]}" if name in _STRANGERS else ", which belongs to another rule"
        raise OptimizerError(f"{kind} has no option {name}{more}.")


def refuse_in_groups(kind: str, names: Iterable[str]) -> None:
    """Raises where one of `names` holds for an optimizer as a whole."""
    for name in names:
        if name in _OF_THE_WHOLE:
            raise OptimizerError(
                f"{kind}: {name} is an option of the whole optimizer. Give it to the optimizer itself, "
                "beside its groups, or make two optimizers."
            )


def refuse_tables_twice(group: dict[str, object]) -> None:
    """Raises where a table is in `group` twice: torch only warns, and would step it twice."""
    given = group["params"]
    if isinstance(given, Iterable) and not isinstance(given, (Tensor, set)):
        given = group["params"] = list(given)
    seen: set[object] = set()
    for parameter in given if isinstance(given, list) else ():
        parameter = parameter[1] if isinstance(parameter, tuple) else parameter
        live = live_table(parameter)
        if live is not None and parameter in seen:
            raise OptimizerError(
                f"Table {live.name!r} is given to the optimizer twice, as by modules that share it. "
                "Pass each parameter once: model.parameters() of the module around them does."
            )
        seen.add(parameter)


NUMBERS = [name for name in dir(_core.Hyperparameters) if not name.startswith("_")]
"""Names of the core's numbers of a step."""


def fault_of_numbers(rule: Rule, hyper: _core.Hyperparameters) -> str:
    """Why no step of a rule can have had these numbers of the core's; empty if one can."""
    for option in rule.options:
        if not isinstance(option, Number):
            continue
        for name in option.core or ():
            if not option.low <= (number := getattr(hyper, name)) <= option.high:
                return f"{name} is {number!r}, which is outside {option.span}"
    return ""


def numbers_of(hyper: _core.Hyperparameters) -> dict[str, float]:
    """The core's numbers of a step by name."""
    return {name: getattr(hyper, name) for name in NUMBERS}
