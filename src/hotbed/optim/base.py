"""Base of all Hotbed optimizers: one torch optimizer over tables and dense parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hotbed import _core
from hotbed.errors import OptimizerError
from hotbed.ops.outside_graphs import outside_graphs
from hotbed.optim.checks import check_table
from hotbed.optim.constructors import spell_out
from hotbed.optim.dense import Composition, DenseFactory, DenseHalf, name_of
from hotbed.optim.fused import FusedUpdates
from hotbed.optim.guards import mark_table_optimizer, of_other_states, refuse_several_devices
from hotbed.optim.options import (
    NOT_FOR_TABLES,
    GroupOptions,
    Rule,
    check_flags,
    refuse_in_groups,
    refuse_strangers,
    refuse_tables_twice,
)
from hotbed.optim.saved_states import Held, Loading, add_states
from hotbed.places.host.step import HostParticipant
from hotbed.table.live import LiveTable, live_table
from hotbed.table.locks import alone
from hotbed.table.lookups import StoredTable
from hotbed.table.matrix import with_handles
from hotbed.table.participant import StepParticipant
from hotbed.table.place import ON_HOST, Place
from hotbed.table.sparse_gradient import plain_access

__all__ = ["TableOptimizer"]

R = TypeVar("R")
_Joining = tuple[int, list[LiveTable], bool]
"""A group's number, its tables, and whether rows of them need catching up."""


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
            clipping, and a step is not all or nothing; a second training forward before ``step`` raises, and
            so does a GradScaler. (The very first gradients wait for ``step``, so that it is met before that.)
        replace_state: take tables over from an optimizer with another rule, dropping its states.

    Raises:
        OptimizerError: see the message; nothing has changed then.
        NotFiniteError: from ``step``: some gradient has a NaN or an infinity; nothing has changed.
    """

    _rule: ClassVar[Rule]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            spell_out(cls.__init__)

    def __new__(cls, *args: object, **options: object) -> TableOptimizer:
        accepted = inspect.signature(cls.__init__).parameters
        refuse_strangers(cls.__name__, cls._rule, [n for n in options if n not in accepted])
        return super().__new__(cls)

    def __init__(self, params: ParamsT, options: dict[str, Any]) -> None:
        """`options`: the arguments of the rule, and those described above."""
        arguments = dict(options)
        check_flags(type(self).__name__, self._rule, options)
        self._untouched: str = options.pop("untouched")
        self._fused, self._replace_state = options.pop("fused"), options.pop("replace_state")
        dense: DenseFactory | None = options.pop("dense")
        self._rules: dict[Tensor, _core.TableRule] = {}
        self._live: dict[Tensor, LiveTable] = {}
        self._groups: list[GroupOptions] = []
        self._half = DenseHalf(self, self._rule.dense, dense)
        self.composition = Composition(arguments, self._groups, self._half)
        self._in_backward = FusedUpdates(self) if self.fused else None
        # Tables are attached when all groups are known to be right.
        self._waiting: list[_Joining] | None = []
        super().__init__(params, {k: v for k, v in options.items() if k not in NOT_FOR_TABLES})
        waiting, self._waiting = self._waiting, None
        self._attach(waiting)
        _core.give_back_freed()  # by whatever has filled tables
        mark_table_optimizer(self)
        with torch.autograd.profiler.record_function(type(self).__name__):
            pass  # it imports what it needs when it is first used, and the first step would wait

    @property
    def untouched(self) -> str:
        """Treatment of rows that a batch does not touch: "lazy" or "exact"."""
        return self._untouched

    @property
    def fused(self) -> bool:
        """True if tables are updated during backward."""
        return bool(self._fused)

    @classmethod
    def declared_rule(cls) -> Rule:
        """Return the declaration of the rule and its options."""
        return cls._rule

    @property
    def dense_optimizers(self) -> Sequence[Optimizer]:
        """Torch's optimizers that step the dense parameters."""
        return [inner for _, inner in self._half.inners]

    @property
    def tables(self) -> list[LiveTable]:
        """Its live tables."""
        return list(self._live.values())

    def raise_of_last_backward(self) -> None:
        """Raise what a device has found out of tables updated during backward; waits for it."""
        if self._in_backward is not None:
            self._in_backward.raise_deferred()

    @property
    def _held(self) -> Held:
        return Held(self._rule, self._groups, self._live, self._rules, self._half)

    # -- groups and tables -----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; tables among the parameters get the states of the rule."""
        index = len(self.param_groups)
        refuse_in_groups(type(self).__name__, param_group)
        refuse_strangers(type(self).__name__, self._rule, param_group)
        refuse_tables_twice(param_group)
        super().add_param_group(with_handles(param_group))
        try:
            group = self.param_groups[index]
            options = GroupOptions(type(self).__name__, self._rule, self._untouched, index, group)
            tables = [t for p in group["params"] if (t := live_table(p)) is not None]
            exact = self._check_tables(tables, options)
            self._half.add_group(index)
        except Exception:
            self.param_groups.pop()
            raise
        self._groups.append(options)
        joining = index, tables, exact
        if self._waiting is not None:
            self._waiting.append(joining)
            return
        try:
            self._attach([joining])
        except Exception:
            self._half.drop_group(index)
            self._groups.pop()
            self.param_groups.pop()
            raise

    def _check_tables(self, tables: list[LiveTable], options: GroupOptions) -> bool:
        """Raises where a table cannot be taken; returns whether rows need catching up."""
        exact = self.untouched == "exact"
        if exact and tables and (reason := _core.why_not_exact(options.rule, options.hyper)):
            raise OptimizerError(
                f'{type(self).__name__} with untouched="exact" (table {tables[0].name!r}): {reason}.'
            )
        exact = exact and not _core.untouched_rows_stay(options.rule, options.hyper)
        for live in tables:
            check_table(live, type(self).__name__, options.rule, exact=exact, fused=self.fused)
            if live.rule is None or self._replace_state or options.are_of(live.rule, exact):
                continue
            raise of_other_states(live)
        fresh = [live.core for live in tables if not self._keeps_states(live, options, exact)]
        _core.TableRule.check_memory(fresh, options.rule, exact)
        return exact

    def _keeps_states(self, live: LiveTable, options: GroupOptions, exact: bool) -> bool:
        return not self._replace_state and options.are_of(live.rule, exact)

    def _attach(self, groups: list[_Joining]) -> None:
        """Gives tables the states of the rule. If that fails, those that had none are without again."""
        new: list[LiveTable] = []
        try:
            with alone(live for _, tables, _ in groups for live in tables):
                for index, tables, exact in groups:
                    for live in tables:
                        new += [live] if live.rule is None else []
                        self._attach_table(live, index, exact)
        except Exception:
            for live in new:
                live.rule = live.optimizer = live.fused_update = None
                self._rules.pop(live.parameter, None)
                self._live.pop(live.parameter, None)
            raise

    def _attach_table(self, live: LiveTable, index: int, exact: bool) -> None:
        options = self._groups[index]
        if not self._keeps_states(live, options, exact):
            live.place.changing("states")
            live.rule = None
            live.rule = _core.TableRule.make(live.core, options.rule, options.initial, exact)
        rule = self._rules[live.parameter] = live.held_rule
        self._live[live.parameter] = live
        live.optimizer = self
        live.complaint = None
        live.fused_update = None
        if self._in_backward is not None:
            self._in_backward.attach(live, rule, index)

    def numbers_of_step(
        self, index: int, loaded: Mapping[str, object] | None = None
    ) -> _core.Hyperparameters:
        """The numbers of group `index` for the step to come; or only checks a `loaded` group.

        Raises:
            OptimizerError: an option is what tables cannot follow.
        """
        options, group = self._groups[index], self.param_groups[index]
        hyper = options.read(loaded or group, loaded=loaded is not None)
        if self.untouched == "exact":
            rules = [self._rules[p] for p in group["params"] if p in self._rules]
            if reason := options.fault_of_exact(rules, hyper):
                raise OptimizerError(f'{type(self).__name__} with untouched="exact": {reason}.')
        return hyper

    # -- stepping --------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], R]) -> R: ...
    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], R] | None = None) -> R | None:
        """One step over tables and dense parameters.

        Raises:
            NotFiniteError: naming the table or parameter; nothing has changed.
            TableError: a table is half loaded; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        live = next((t for t in self._live.values() if t.place.stepped_with is not ON_HOST), None)
        with alone(self._live.values()):
            if live is None:
                self._step({ON_HOST: HostParticipant(self)})
            else:
                with live.place.ranks.reporting("a step"):
                    self._step(self._parts(live.place))
        return loss

    def _check_rows(self) -> None:
        with plain_access():
            for parameter, live in self._live.items():
                live.refuse_half_loaded()
                if parameter.data_ptr() != live.address:
                    live.check_handle()  # takes weights that were put in place of the handle's

    def _step(self, parts: dict[Hashable, StepParticipant]) -> None:
        self._check_rows()
        if len(self._groups) != len(self.param_groups):
            raise OptimizerError(
                f"{type(self).__name__}: {len(self._groups)} groups were added and param_groups has "
                f"{len(self.param_groups)}. Add groups by add_param_group(); to drop one, make a new "
                "optimizer."
            )
        numbers = [self.numbers_of_step(index) for index in range(len(self.param_groups))]
        with plain_access():
            for index, group in enumerate(self.param_groups):
                for position, parameter in enumerate(group["params"]):
                    live = self._live.get(parameter)
                    if live is not None:
                        rule = self._rules[parameter]
                        parts[live.place.stepped_with].add_table(live, rule, numbers[index])
                    elif (grad := parameter.grad) is not None:
                        part = parts.get(grad.device) or parts[ON_HOST]
                        part.add_dense(parameter, grad, index, position)
        waiting = None if self._in_backward is None else self._in_backward.first
        for live, rule, index, share in waiting or ():
            parts[live.place.stepped_with].add_table(live, rule, numbers[index], share)
        every = list(dict.fromkeys(parts.values()))
        beside = sum(not part.idle for part in every) > 1
        if not all(part.decide(beside=beside) for part in every):
            return
        finish = self._half.step
        for part in reversed(every):  # what may still fail comes first
            part.apply()
            finish = part.finishing(finish)
        finish()
        if self._in_backward is not None:
            self._in_backward.stepped()

    def _parts(self, place: Place) -> dict[Hashable, StepParticipant]:
        """Return the participants of a step by memory, the host last, as it raises at once.

        Args:
            place: one that is not the host's.

        Raises:
            OptimizerError: the tables lie on several devices.
            NotFiniteError, IdError: the step before was not taken.
        """
        elsewhere = [live for live in self._live.values() if live.place.stepped_with is not ON_HOST]
        refuse_several_devices(type(self).__name__, elsewhere)
        part = place.make_participant(self, elsewhere)
        host = part if part.includes_host else HostParticipant(self)
        return {place.stepped_with: part, ON_HOST: host}

    @outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``fused=True`` a batch that got no ``step`` is given up."""
        with plain_access():
            for parameter, live in self._live.items():
                if set_to_none:
                    live.waiting.drop(parameter)  # without summing it
                else:
                    live.waiting.zero(parameter)
            self._half.zero_grad(set_to_none)
        if self._in_backward is not None:
            self._in_backward.give_up()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if the step unscales by itself; only ``GradScaler.step`` asks, and asks it first."""
        if self.fused:
            raise OptimizerError(
                f"{type(self).__name__}(fused=True) updates tables in backward, before a GradScaler could "
                "unscale the gradients. Use fused=False, or no GradScaler (bfloat16 needs none)."
            )
        # On a device the step takes what the scaler has found along, unseen by the host.
        return any(live.place.unscales for live in self._live.values())

    def check_hold(self, live: StoredTable, rule: _core.TableRule) -> None:
        if not rule.holds_table:
            raise OptimizerError(
                f"Table {live.name!r} was taken over by another optimizer ({type(live.optimizer).__name__}, "
                f"replace_state=True); this {type(self).__name__} must not step it any more."
            )

    def name_of(self, parameter: Tensor, index: int, position: int) -> str:
        """Return the name of a dense parameter for errors, by its group and position there."""
        return name_of(parameter, self.param_groups[index], position)

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch. The entry of a table has its states by rising id:
        ``{"step", "ids" (rows,), state (rows, dim or 1), ...}``.

        Raises:
            OptimizerError: the states do not fit in memory twice.
        """
        hook = self.register_state_dict_post_hook(
            lambda _, made: add_states(self, self._held, made), prepend=True
        )
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; ids of a dynamic table that have no row yet get one. A state_dict of torch's
        optimizer of the same rule loads too: row k of a parameter's state is that of id k.

        Raises:
            OptimizerError: it does not fit; nothing has changed.
        """
        loading = Loading(self, self._held)
        hooks = [
            self.register_load_state_dict_pre_hook(loading.check),
            self.register_load_state_dict_post_hook(loading.finish, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise OptimizerError(
            f"{type(self).__name__}: an optimizer that holds tables cannot be copied or pickled, nor can "
            "what holds it, such as a learning rate schedule: the states live in the tables. Save its "
            "state_dict(), make a new one over the copied or loaded model, and load it there."
        )
