"""The states of tables in the state_dict of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hotbed import _core
from hotbed.digests import digest_of
from hotbed.errors import OptimizerError
from hotbed.optim.dense import Composition, DenseHalf
from hotbed.optim.options import (
    GroupOptions,
    Rule,
    fault_of_numbers,
    loadable,
    numbers_of,
    strangers,
)
from hotbed.table.live import LiveTable
from hotbed.table.locks import alone, reading
from hotbed.table.states import (
    check_states,
    copy_states,
    reset_states,
    settle_rows,
    write_states,
)

__all__ = ["Loading", "add_states"]


class LoadedOptimizer(Protocol):
    """A `hotbed.optim.TableOptimizer` whose state is saved or loaded."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def composition(self) -> Composition: ...
    def check_hold(self, live: LiveTable, rule: _core.TableRule) -> None: ...
    def numbers_of_step(
        self, index: int, loaded: Mapping[str, object] | None = None
    ) -> _core.Hyperparameters: ...


class Held(NamedTuple):
    """Rule, groups and tables of an optimizer, for its saved states."""

    rule: Rule
    groups: Sequence[GroupOptions]
    live: Mapping[Tensor, LiveTable]
    rules: Mapping[Tensor, _core.TableRule]
    half: DenseHalf


def add_states(
    optimizer: LoadedOptimizer, held: Held, packed: Mapping[str, dict[object, object]]
) -> None:
    """Adds an entry for each table, by the number of its parameter.

    Raises:
        OptimizerError: the states do not fit in memory twice.
    """
    with reading(held.live.values()):
        for index, parameter in enumerate(
            p for group in optimizer.param_groups for p in group["params"]
        ):
            live = held.live.get(parameter)
            if live is None:
                continue
            rule = held.rules[parameter]
            optimizer.check_hold(live, rule)
            entry: dict[str, object] = {"step": rule.steps, **copy_states(live)}
            if rule.exact:
                entry["untouched"] = {"base": list(rule.base), "last": numbers_of(rule.last)}
            packed["state"][index] = entry


class _Entry(NamedTuple):
    """Entry of a table in a state_dict."""

    steps: int = 0
    base: list[float] = [1, 0, 0, 1, 1]
    """What all steps did to rows that no batch has touched: nothing."""
    last: _core.Hyperparameters | None = None
    states: dict[str, Tensor] | None = None


class Loading:
    """A state_dict on its way into an optimizer: all of it is checked, then torch takes the dense part,
    then the tables get theirs."""

    def __init__(self, optimizer: LoadedOptimizer, held: Held) -> None:
        self._optimizer, self._held = optimizer, held
        self._tables: list[tuple[LiveTable, _core.TableRule, _Entry]] = []
        self._digest = ""

    def check(self, _: object, given: dict[str, Any]) -> dict[str, object]:
        """Return the part of it that torch is to load.

        Raises:
            OptimizerError: it does not fit.
        """
        optimizer, held = self._optimizer, self._held
        groups, states = given.get("param_groups"), given.get("state")
        if not isinstance(groups, list) or not isinstance(states, dict):
            raise self._error(
                f"has {', '.join(map(str, given)) or 'nothing'}: it is no optimizer's"
            )
        sizes, own = ([len(g["params"]) for g in gs] for gs in (groups, optimizer.param_groups))
        if sizes != own:
            raise self._error(
                f"has groups of {sizes} parameters, and the optimizer of {own}. Give it the same "
                "parameters in the same groups"
            )
        if any(live.place.ranks.size > 1 for live in held.live.values()):
            self._digest = digest_of(states)
        merged, states = [], dict(states)
        for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            for name in strangers(held.rule, saved):
                raise self._error(f"has an option {name}, so it is one of another optimizer")
            merged.append(loadable(group, saved))
            optimizer.numbers_of_step(index, merged[-1])
            held.half.check_loaded(index, merged[-1])
            for number, parameter in zip(saved["params"], group["params"], strict=True):
                live = held.live.get(parameter)
                if live is None:
                    held.half.check_state(held.groups[index], parameter, states.get(number) or {})
                    continue
                rule = held.rules[parameter]
                optimizer.check_hold(live, rule)
                self._tables.append((live, rule, self._entry(live, states.pop(number, None) or {})))
        return {**given, "param_groups": merged, "state": states}

    def _entry(self, live: LiveTable, found: dict[str, Any]) -> _Entry:
        found = {name: value for name, value in found.items() if value is not None}
        if not found:
            return _Entry()
        states, why = check_states(live, found), ""
        missed = found.get("untouched", {"base": _Entry().base, "last": {}})
        try:
            # torch's SGD counts no steps; what has a buffer has taken one.
            steps = int(found.get("step", 1))
            if steps < 0 or steps != float(found.get("step", 1)):
                raise ValueError
            base, last = [float(x) for x in missed["base"]], _core.Hyperparameters()
            if len(base) != len(_Entry().base) or not all(map(math.isfinite, base)):
                raise ValueError
            for name, value in missed["last"].items():
                setattr(last, name, float(value))
            taken = steps and missed["last"]  # before the first step there are no numbers
            if taken and (why := fault_of_numbers(self._held.rule, last)):
                raise ValueError
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            raise self._error(
                f"has for table {live.name!r} a step {found.get('step')!r} and missed steps {missed!r}, "
                f"which no optimizer has written{why and f': {why}'}"
            ) from None
        return _Entry(steps, base, last, states)

    def finish(self, _: object) -> None:
        """Gives tables their states; those that have none there begin anew."""
        self._held.half.rejoin()
        self._optimizer.composition.loaded = self._digest
        with alone(live for live, _, _ in self._tables):
            self._put_back()

    def _put_back(self) -> None:
        for live, rule, entry in self._tables:
            settle_rows(live, entry.base)
            live.place.changing("states")
            live.place.restart(rule, entry.steps, entry.base, entry.last or _core.Hyperparameters())
            reset_states(live)
            if entry.states is not None:
                write_states(live, entry.states)

    def _error(self, fault: str) -> OptimizerError:
        return OptimizerError(f"{type(self._optimizer).__name__}: the loaded state {fault}.")
