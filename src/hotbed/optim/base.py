"""What all Hotbed optimizers share: one torch optimizer over tables and dense parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotbed import _core
from hotbed.errors import NotFiniteError, OptimizerError
from hotbed.handles import LiveTable, live_table
from hotbed.optim.dense import DenseFactory, DenseHalf, name_of
from hotbed.optim.fused import FusedUpdates
from hotbed.optim.gradients import not_finite, rows_of
from hotbed.optim.guards import mark_table_optimizer
from hotbed.optim.on_device import device_part
from hotbed.optim.options import refuse_strangers, refuse_tables_twice
from hotbed.optim.saved_states import add_states, put_states, take_states
from hotbed.parameters import plain_access
from hotbed.resolve.outside_graphs import outside_graphs

__all__ = ["TableOptimizer"]


class TableOptimizer(Optimizer):
    """Base of the optimizers in `hotbed.optim`: one rule for tables and dense parameters alike.

    Tables are stepped by the core, all in one call; dense parameters by torch's optimizer of the same
    rule, or by ``dense``. Constructing it gives every table the states of the rule.

    Args:
        params: as for any torch optimizer: ``model.parameters()``, or groups.
        untouched: what happens to rows that a batch does not touch. ``"lazy"``: nothing; neither they
            nor their states change. ``"exact"``: what the dense optimizer would have done to them,
            made up for when they are next used. docs/optimizers.md says what that costs for each rule.
        dense: another optimizer for the dense parameters: a class (``torch.optim.SGD``), which gets
            this one's ``lr``, or a factory ``lambda groups: torch.optim.SGD(groups, lr=0.1)``.
            Learning rate schedules act on both in proportion.
        fused: update each table during backward instead of keeping its gradient. No accumulation, no
            clipping, and a step is not all or nothing; a second training forward before ``step``
            raises, and so does a GradScaler, whose scaled gradients would be applied. (The very
            first gradients wait for ``step``, so that a GradScaler is met before it did harm.)
        replace_state: take tables over from an optimizer with another rule, dropping its states.

    Raises:
        OptimizerError: see the message; nothing has changed then.
        NotFiniteError: from ``step``: some gradient has a NaN or an infinity; nothing has changed.
    """

    _rule: ClassVar[str]
    _dense: ClassVar[type[Optimizer]]

    def __new__(cls, *args: Any, **options: Any) -> TableOptimizer:
        accepted = inspect.signature(cls.__init__).parameters
        refuse_strangers(cls, [name for name in options if name not in accepted])
        return super().__new__(cls)

    def __init__(self, params: Any, options: dict[str, Any]) -> None:
        """`options`: the arguments of the rule, and those described above."""
        self.untouched: str = options.pop("untouched")
        self.fused: bool = options.pop("fused")
        self._replace_state: bool = options.pop("replace_state")
        dense: DenseFactory | None = options.pop("dense")
        if self.untouched not in ("lazy", "exact"):
            raise OptimizerError(f'untouched must be "lazy" or "exact", got {self.untouched!r}.')
        for flag in ("capturable", "differentiable"):
            if options.pop(flag, False):
                raise OptimizerError(
                    f"{type(self).__name__}: {flag}=True cannot be honoured for tables. Give it to the "
                    f"dense part only: dense=lambda groups: torch.optim.X(groups, {flag}=True)."
                )
        self._rules: dict[Tensor, Any] = {}
        self._live: dict[Tensor, LiveTable] = {}
        self._hyper: list[Any] = []  # of each group, filled before use
        self._options: list[Any] = []
        self._half = DenseHalf(self, self._dense, dense)
        self._in_backward = FusedUpdates(self) if self.fused else None
        super().__init__(params, options)
        mark_table_optimizer(self)

    # -- what a rule says ------------------------------------------------------------------------

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError on a number outside its range; called when a group is added."""

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        """The group's numbers by their names in the core, without lr and weight_decay."""
        raise NotImplementedError

    def _flags(self, group: dict[str, Any]) -> dict[str, bool]:
        """The group's structural options by their names in the core."""
        return {}

    # -- groups and tables -----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; tables among the parameters get the states of the rule."""
        refuse_strangers(type(self), [k for k in param_group if k not in self.defaults])
        refuse_tables_twice(param_group)
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        group = self.param_groups[index]
        try:
            if not float(group["lr"]) >= 0:
                raise ValueError(f"lr must not be negative, got {group['lr']}")
            if not group.get("weight_decay", 0) >= 0:
                raise ValueError(f"weight_decay must not be negative, got {group['weight_decay']}")
            self._check_group(group)
            options = _core.RuleOptions()
            options.rule = getattr(_core.Rule, self._rule)
            options.maximize = bool(group.get("maximize"))
            options.decoupled_weight_decay = bool(group.get("decoupled_weight_decay"))
            for name, value in self._flags(group).items():
                setattr(options, name, value)
            hyper = self._fill(_core.Hyperparameters(), group)
            tables = [(p, t) for p in group["params"] if (t := live_table(p)) is not None]
            initial = float(group.get("initial_accumulator_value", 0.0))
            exact = self._check_tables([t for _, t in tables], options, initial, hyper)
            self._half.add_group(index)
            for parameter, live in tables:
                self._attach(parameter, live, index, options, initial, exact)
        except Exception:
            self.param_groups.pop()
            raise
        self._options.append(options)
        self._hyper.append(hyper)

    def _check_tables(
        self, tables: list[LiveTable], options: Any, initial: float, hyper: Any
    ) -> bool:
        """Raises where a table cannot be taken; returns whether rows need catching up."""
        exact = self.untouched == "exact"
        if exact and tables and (reason := _core.why_not_exact(options, hyper)):
            raise OptimizerError(
                f'{type(self).__name__} with untouched="exact" (table {tables[0].name!r}): {reason}.'
            )
        exact = exact and not _core.untouched_rows_stay(options, hyper)
        for live in tables:
            if exact and live.device_rows is not None:
                raise OptimizerError(
                    f'{type(self).__name__} with untouched="exact": table {live.name!r} lies on '
                    f'{live.device}, where rows are not brought up to date. Use untouched="lazy", or '
                    "leave the table on the CPU."
                )
            rule = live.rule
            if rule is None or self._replace_state or _same(rule, options, initial, exact):
                continue
            other = live.optimizer
            holder = (
                f"a {type(other).__name__}" if other is not None else "an optimizer that is gone"
            )
            raise OptimizerError(
                f"Table {live.name!r} has the states of {holder} with another rule or other options. "
                "Pass replace_state=True to drop them."
            )
        fresh = [t for t in tables if not self._keeps_states(t, options, initial, exact)]
        _core.TableRule.check_memory([live.core for live in fresh], options, exact)
        return exact

    def _keeps_states(self, live: LiveTable, options: Any, initial: float, exact: bool) -> bool:
        rule = live.rule
        return rule is not None and not self._replace_state and _same(rule, options, initial, exact)

    def _attach(
        self,
        parameter: Tensor,
        live: LiveTable,
        index: int,
        options: Any,
        initial: float,
        exact: bool,
    ) -> None:
        rule = live.rule
        if not self._keeps_states(live, options, initial, exact):
            live.rule = None
            rule = live.rule = _core.TableRule.make(live.core, options, initial, exact)
        self._rules[parameter] = rule
        self._live[parameter] = live
        live.optimizer = self
        live.complaint = None
        live.fused_update = None
        if self._in_backward is not None:
            self._in_backward.attach(live, rule, index)

    def _fill(self, hyper: Any, group: dict[str, Any]) -> Any:
        hyper.lr = float(group["lr"])
        if not math.isfinite(hyper.lr):
            raise OptimizerError(
                f"{type(self).__name__}: lr is {hyper.lr}, which would spoil every row it meets. Look "
                "for a division in the schedule that sets it."
            )
        hyper.weight_decay = group.get("weight_decay", 0.0)
        for name, value in self._numbers(group).items():
            setattr(hyper, name, value)
        return hyper

    def numbers_of_step(self, index: int) -> Any:
        """The numbers of group `index` for the step to come."""
        group = self.param_groups[index]
        hyper, options = self._fill(self._hyper[index], group), self._options[index]
        for name, value in self._flags(group).items():
            if getattr(options, name) != value:
                raise OptimizerError(
                    f"{type(self).__name__}: {name} of group {index} changed after construction, and "
                    "with it the states of its tables. Make a new optimizer with replace_state=True."
                )
        if self.untouched == "exact":
            reason = _core.why_not_exact(options, hyper)
            if reason or not (
                all(self._rules[p].exact for p in group["params"] if p in self._rules)
                or _core.untouched_rows_stay(options, hyper)
            ):
                reason = reason or "weight_decay was 0 when the optimizer was made"
                raise OptimizerError(f'{type(self).__name__} with untouched="exact": {reason}.')
        return hyper

    # -- stepping --------------------------------------------------------------------------------

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over tables and dense parameters.

        Raises:
            NotFiniteError: naming the table or parameter; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        away = device_part(self)
        entries: list[tuple[Any, int, int, int, Any, bool]] = []
        entered: list[LiveTable] = []
        held: list[Tensor] = []  # alive until the core has read them
        dense: list[tuple[Tensor, int, int]] = []
        views: list[tuple[int, int, bool]] = []
        with plain_access():
            for index, group in enumerate(self.param_groups):
                hyper = None
                for position, parameter in enumerate(group["params"]):
                    if away is not None and away.takes(parameter, index, position):
                        continue
                    grad = parameter.grad
                    if grad is None:
                        continue
                    rule = self._rules.get(parameter)
                    if rule is None:
                        self._view(grad, parameter, index, position, dense, views)
                        continue
                    if hyper is None:
                        hyper = self.numbers_of_step(index)
                    live = self._live[parameter]
                    self.check_hold(live, rule)
                    slots, values = rows_of(grad, live)
                    held += (slots, values)
                    as_reduced = values._version == 0
                    entries.append(
                        (rule, slots.data_ptr(), values.data_ptr(), len(slots), hyper, as_reduced)
                    )
                    entered.append(live)
        waiting = None if self._in_backward is None else self._in_backward.first
        for live, rule, index, kept_slots, kept_rows, kept in waiting or ():
            self.check_hold(live, rule)
            if kept_slots is None or kept_rows is None:
                assert away is not None
                away.take_share(live, index, kept)
                continue
            entries.append(
                (
                    rule,
                    kept_slots.data_ptr(),
                    kept_rows.data_ptr(),
                    len(kept_slots),
                    self.numbers_of_step(index),
                    True,
                )
            )
            entered.append(live)
        if away is not None and not away.decide(beside=bool(entries or views)):
            return loss
        try:
            array, element, slot = _core.step(entries, views)
        except IndexError as error:
            raise OptimizerError(
                f"A gradient names slot {error}, which no table has: a table was loaded or cleared "
                "between backward and step. Call zero_grad() after loading."
            ) from None
        if array >= 0:
            if array < len(entered):
                raise not_finite(entered[array], slot, element)
            parameter, index, position = dense[array - len(entered)]
            name = name_of(parameter, self.param_groups[index], position)
            raise NotFiniteError(
                f"{name} has a NaN or an infinity in its gradient (element {element}); no row and no "
                "parameter was changed. Skip the batch, or look for the division or logarithm behind."
            )
        (self._half.step if away is None else away.step)()
        if self._in_backward is not None:
            self._in_backward.stepped()
        return loss

    @outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``fused=True`` a batch that got no ``step`` is given up."""
        for live in self._live.values():
            if live.device_rows is not None and (set_to_none or live.pending.shares):
                live.drop_gradient()  # without summing it
        with plain_access():
            super().zero_grad(set_to_none)
        if self._in_backward is not None:
            self._in_backward.give_up()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``GradScaler.step`` asks first, and nothing else does."""
        if self.fused:
            raise OptimizerError(
                f"{type(self).__name__}(fused=True) updates tables during backward, before a "
                "GradScaler could unscale the gradients. Use fused=False, or no GradScaler (bfloat16 "
                "needs none)."
            )
        # With tables on a device the step takes what the scaler has found along, unseen by the host.
        return any(live.device_rows is not None for live in self._live.values())

    def check_hold(self, live: LiveTable, rule: Any) -> None:
        if not rule.holds_table:
            raise OptimizerError(
                f"Table {live.name!r} was taken over by another optimizer "
                f"({type(live.optimizer).__name__}, replace_state=True); this {type(self).__name__} "
                "must not step it any more."
            )

    def _view(
        self,
        grad: Tensor,
        parameter: Tensor,
        index: int,
        position: int,
        dense: list[tuple[Tensor, int, int]],
        views: list[tuple[int, int, bool]],
    ) -> None:
        """Adds a dense gradient to those the core checks, or checks it here."""
        if grad.is_sparse:
            grad = grad._values()
        kind = grad.dtype
        if (
            kind not in (torch.float32, torch.float64)
            or not grad.is_contiguous()
            or not grad.is_cpu
        ):
            if bool(torch.isfinite(grad).all()):
                return
            name = name_of(parameter, self.param_groups[index], position)
            raise NotFiniteError(
                f"{name} has a NaN or an infinity in its gradient; no row and no parameter was "
                "changed. Skip the batch, or look for the division or logarithm behind."
            )
        dense.append((parameter, index, position))
        views.append((grad.data_ptr(), grad.numel(), kind == torch.float64))

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch. The entry of a table has its states by rising id:
        ``{"step", "ids" (rows,), state (rows, dim or 1), ...}``.

        Raises:
            OptimizerError: the states do not fit in memory twice.
        """
        packed: dict[str, Any] = super().state_dict()
        add_states(self, packed["state"])
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; ids of a dynamic table that have no row yet get one.

        Raises:
            OptimizerError, ValueError: it does not fit; nothing has changed.
        """
        entries: dict[int, Any] = dict(state_dict["state"])
        loaded = take_states(self, entries)
        super().load_state_dict({**state_dict, "state": entries})
        self._half.rejoin()
        put_states(self, loaded)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise OptimizerError(
            f"A {type(self).__name__} cannot be copied: the states live in the tables. Make a new one "
            "over the copied model and load this one's state_dict()."
        )


def _same(rule: Any, options: Any, initial: float, exact: bool) -> bool:
    return bool(
        rule.options == options
        and rule.exact == exact
        and rule.initial_accumulator_value == initial
    )
