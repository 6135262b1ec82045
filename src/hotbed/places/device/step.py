"""Steps over tables on a device, with the dense parameters beside them: all of it or nothing.

Whether a step is taken is found out on the device: flags of ids and gradients become one number, that
every update reads. The host counts the step, goes on, and looks at the flags when they have come; a
step that was not taken is then taken back from the counts. The next step waits for that, one step
behind, since its numbers depend on the count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import HotbedError, NotFiniteError, OptimizerError
from hotbed.ops.gpu.finite import check_finite
from hotbed.ops.gpu.recording import now_or_after, recording
from hotbed.ops.gpu.rows import KINDS
from hotbed.ops.gpu.table_kernels import Step, TableKernels
from hotbed.ops.gpu.terms import Terms
from hotbed.ops.gpu.update import Launched, RowsToUpdate, renumber, update
from hotbed.places.device.deferred_errors import DeferredError
from hotbed.places.device.gradients import (
    BatchGradient,
    DeviceGradientRows,
    GradientSource,
    gather,
    gradient_rows_of,
    sources_of,
)
from hotbed.places.device.planes import there
from hotbed.table.backward import FusedUpdates, Update
from hotbed.table.lookups import StoredTable

__all__ = ["DenseGradient", "DeviceStep", "Entry", "step_in_backward"]


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A table that takes a step."""

    live: StoredTable
    rule: _core.TableRule
    hyper: _core.Hyperparameters
    share: DeviceGradientRows | None = None
    """Its gradient, where that is not the handle's."""

    @property
    def step(self) -> Step:
        return Step(options=self.rule.options, hyper=self.hyper, step=self.rule.steps + 1)


@dataclasses.dataclass(frozen=True, eq=False)
class DenseGradient:
    """A dense parameter on the device that takes a step, and what to call it in an error."""

    parameter: Tensor
    grad: Tensor
    name: Callable[[], str]


@dataclasses.dataclass(eq=False)
class DeviceStep:
    """A step of some tables on one device, in parts: `decide`, then `apply` and `report`.

    Threading: for the training thread.
    """

    table: StoredTable
    """One on the device, whose next forward tells what was found out."""
    entries: Sequence[Entry]
    dense: Sequence[DenseGradient] = ()
    found_inf: Tensor | None = None
    """What a GradScaler has found: not 0: skip the step, and say nothing."""
    _parts: list[_Part] = dataclasses.field(default_factory=list)
    _sources: list[GradientSource] = dataclasses.field(default_factory=list)
    _slot_flags: list[Tensor] = dataclasses.field(default_factory=list)

    def decide(self) -> Tensor:
        """Checks everything; (1,) int32 on the device: whether the step is taken. Changes nothing."""
        device = there(self.table).device
        count = len(self.entries) + len(self.dense)
        flags = torch.ones(count, dtype=torch.int32, device=device)
        own = {id(entry): flags[k : k + 1] for k, entry in enumerate(self.entries)}
        together: dict[int, tuple[BatchGradient, list[tuple[int, Entry]]]] = {}
        apart: list[Entry] = []
        for entry in self.entries:
            share = entry.share or gradient_rows_of(entry.live)
            if share is None:
                apart.append(entry)
                self._sources += sources_of(entry.live)
            else:
                gradient = share.gradient
                together.setdefault(id(gradient), (gradient, []))[1].append((share.table, entry))
        for gradient, members in together.values():
            gradient.check_unchanged()
            self._sources.append(gradient.source)
            self._prepare(gradient.tables, gradient.terms, members, own)
            weighted = [
                (weights, own[id(entry)])
                for t, entry in members
                for table, weights in gradient.weights
                if table == t
            ]
            check_finite([w for w, _ in weighted], [flag for _, flag in weighted])
        if apart:
            terms, self._slot_flags = gather([entry.live for entry in apart])
            members = list(enumerate(apart))
            self._prepare([entry.live for entry in apart], terms, members, own)
        if self.found_inf is None:
            self._check_dense(flags[len(self.entries) :])
        goods = [source.good for source in self._sources if source.good is not None]
        if self.found_inf is not None:
            # The scaler has looked at all gradients, and a step that it skips is no error.
            flags.fill_(1)
            clear = (self.found_inf.reshape(1) == 0).to(torch.int32)
        else:
            clear = flags.new_ones(1)
        self._told = torch.cat([clear, flags, *self._slot_flags, *goods])
        self._take = self._told.amin(0, keepdim=True)
        return self._take

    def _prepare(
        self,
        tables: Sequence[StoredTable],
        terms: Terms,
        members: Sequence[tuple[int, Entry]],
        flags: dict[int, Tensor],
    ) -> None:
        steps: list[Step | None] = [None] * len(tables)
        own = [next(iter(flags.values()))] * len(tables)  # of tables without a step none is read
        for t, entry in members:
            steps[t], own[t] = entry.step, flags[id(entry)]
        kernels = TableKernels([there(table).planes() for table in tables])
        part = _Part(terms, kernels.shares(terms, steps, own), dict(members))
        self._parts.append(part)

    def _check_dense(self, flags: Tensor) -> None:
        arrays: list[tuple[Tensor, Tensor]] = []
        for k, one in enumerate(self.dense):
            flag = flags[k : k + 1]
            grad = one.grad._values() if one.grad.is_sparse else one.grad
            if grad.dtype in KINDS and grad.is_contiguous():
                arrays.append((grad.reshape(-1), flag))
            else:
                flag.copy_(torch.isfinite(grad).all().reshape(1))
        check_finite([grad for grad, _ in arrays], [flag for _, flag in arrays])

    def apply(self) -> None:
        """Launches the updates of tables; each reads whether it is to do anything."""
        now = recording()
        for part in self._parts:
            launched = update(part.shares, part.terms, self._take)
            if now is not None:
                now.before += [partial(_renumber, one, part.entries) for one in launched]
        now_or_after(self._count)
        for source in {id(source): source for source in self._sources}.values():
            source.mark_written()

    def _count(self) -> None:
        for entry in self.entries:
            _count(entry.rule, 1)

    def report(
        self, take_back: Callable[[], None] | None = None, *, counted: bool = True
    ) -> DeferredError:
        """Sends what was decided to the host, behind what is launched so far.

        Args:
            take_back: called where the step turns out not to have been taken.
            counted: whether `apply` was called.
        """
        names = [one.name for one in self.dense]
        slot_flags = len(self._slot_flags)
        deferred_errors = [source.notice for source in self._sources if source.good is not None]
        # Without gradients and claims, which would be kept for as long.
        rules = [entry.rule for entry in self.entries if counted]
        tables = [entry.live for entry in self.entries]

        def error_of(reported: list[int]) -> HotbedError | None:
            if all(reported):
                return None
            for rule in rules:
                _count(rule, -1)
            if take_back is not None:
                take_back()
            if not reported[0]:
                return None  # a GradScaler's skip
            flags = iter(reported[1:])
            bad_tables = [t for t in tables if not next(flags)]
            bad_dense = [name for name in names if not next(flags)]
            bad_slots = [1 for _ in range(slot_flags) if not next(flags)]
            for of_batch in deferred_errors:
                if not next(flags):
                    assert of_batch is not None, (
                        "whoever checks a batch on the device reports on it"
                    )
                    of_batch.pop()
                    return of_batch.error
            return _error(bad_tables, bad_dense, bool(bad_slots))

        return DeferredError(self._told, error_of, self.table)


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """Tables of one lookup that are updated."""

    terms: Terms
    shares: list[RowsToUpdate]
    entries: dict[int, Entry]
    """Of its tables."""


def _renumber(launched: Launched, entries: dict[int, Entry]) -> bool:
    """The numbers of the step to come; those of the optimizer's groups are up to date."""
    due = [entries[share.table].step for share in launched.shares]
    return renumber(launched, [(step.options, step.hyper, step.step) for step in due])


def _error(
    tables: Sequence[StoredTable], dense: Sequence[Callable[[], str]], slots: bool
) -> HotbedError:
    if slots:
        return OptimizerError(
            "A gradient names a slot that its table has not: a table was loaded or cleared between "
            "backward and step. Nothing was changed by that step. Call zero_grad() after loading."
        )
    what = f"Table {tables[0].name!r}: its gradient" if tables else f"{dense[0]()}: its gradient"
    return NotFiniteError(
        f"{what} had a NaN or an infinity in the step before; no row and no parameter was changed by "
        "that step. Skip such batches, or look for the division or logarithm behind."
    )


def _count(rule: _core.TableRule, steps: int) -> None:
    rule.restart(rule.steps + steps, rule.base, rule.last)


class Predicated:
    """Lets a torch optimizer step, and puts back what it did where `take` is 0 on the device.

    Threading: for the training thread.
    """

    def __init__(
        self, state: MutableMapping[Tensor, dict[str, object]], dense: Sequence[Tensor]
    ) -> None:
        """`state`: the optimizer's, of the parameters `dense`."""
        self._state = state
        self._dense = list(dense)
        self._born = [p for p in self._dense if not self._state.get(p)]
        self._before = [(t, t.detach().clone()) for p in self._dense for t in self._tensors(p)]

    def _tensors(self, parameter: Tensor) -> list[Tensor]:
        state = self._state.get(parameter, {}).values()
        return [parameter.detach()] + [
            t for t in state if isinstance(t, Tensor) and t.device == parameter.device and t.dim()
        ]

    def allocate(self, take: Tensor) -> None:
        """After the optimizer's step."""
        taken = take.reshape(()) != 0
        for tensor, before in self._before:
            torch.where(taken, tensor, before, out=tensor)
        self._before = []

    def take_back(self) -> None:
        """Take back what the host counted of a step that was not taken."""
        for parameter in self._born:
            self._state.pop(parameter, None)
        for parameter in self._dense:
            step = self._state.get(parameter, {}).get("step")
            if isinstance(step, Tensor):
                step -= 1
            elif isinstance(step, (int, float)):
                self._state[parameter]["step"] = step - 1


def _note(updates: FusedUpdates, step: DeviceStep) -> None:
    updates.notice = step.report()


def step_in_backward(gradient: BatchGradient, wanted: Sequence[Update]) -> None:
    """Steps tables at once (``fused=True``): (position, its update, rule, numbers) each."""
    steps: dict[int, tuple[FusedUpdates, list[Entry]]] = {}
    for t, of_table, rule, hyper in wanted:
        entry = Entry(gradient.tables[t], rule, hyper, DeviceGradientRows(gradient, t))
        updates = of_table.updates
        steps.setdefault(id(updates), (updates, []))[1].append(entry)
    for updates, entries in steps.values():
        step = DeviceStep(entries[0].live, entries)
        step.decide()
        step.apply()
        now_or_after(partial(_note, updates, step))
