"""A device's part of a step: nothing in it waits for the device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotbed import _core
from hotbed.ops.gpu.recording import now_or_after
from hotbed.places.device.gradients import DeviceGradientRows, changed_slots
from hotbed.places.device.step import DenseGradient, DeviceStep, Entry, Predicated
from hotbed.table.gradients import GradientShare
from hotbed.table.lookups import StoredTable
from hotbed.table.participant import DEFERRED, SteppingOptimizer, raise_of_last_step

__all__ = ["DeviceParticipant"]


class DeviceParticipant:
    """`hotbed.table.participant.StepParticipant`: its decision is a number on the device that updates read.

    Threading: for the training thread.
    """

    includes_host = False

    def __init__(self, optimizer: SteppingOptimizer, tables: Sequence[StoredTable]) -> None:
        """`tables`: those that lie there.

        Raises:
            NotFiniteError, IdError: the step before was not taken.
        """
        raise_of_last_step(optimizer)
        self._table = tables[0]
        """Its next forward tells what was found out."""
        self._table.place.lookups.raise_deferred(tables)
        self._optimizer = optimizer
        self._found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            _unscale(optimizer, scale)
        self._entries: list[Entry] = []
        self._dense: list[DenseGradient] = []
        self._step: DeviceStep | None = None
        self._take: Tensor | None = None

    def add_table(
        self,
        live: StoredTable,
        rule: _core.TableRule,
        hyper: _core.Hyperparameters,
        share: GradientShare | None = None,
    ) -> None:
        if share is not None or live.has_gradient:
            self._optimizer.check_hold(live, rule)
            assert share is None or isinstance(share, DeviceGradientRows)
            self._entries.append(Entry(live, rule, hyper, share))

    def add_dense(self, parameter: Tensor, grad: Tensor, index: int, position: int) -> None:
        name = _namer(self._optimizer, parameter, index, position)
        self._dense.append(DenseGradient(parameter, grad, name))

    @property
    def idle(self) -> bool:
        return not self._entries and not self._dense

    def decide(self, *, beside: bool) -> bool:
        if self.idle:
            return self._found_inf is None or not bool(self._found_inf)
        self._step = DeviceStep(self._table, self._entries, self._dense, self._found_inf)
        self._take = self._step.decide()
        if beside and not bool(self._take):
            error = self._step.report(counted=False).pop()
            if error is not None:
                raise error
            return False
        return True

    def apply(self) -> None:
        if self._step is not None:
            for entry in self._entries:
                slots = functools.partial(changed_slots, entry.live, entry.share)
                entry.live.place.changing("step", slots=slots)
            self._step.apply()

    def finishing(self, step: Callable[[], None]) -> Callable[[], None]:
        return lambda: now_or_after(lambda: self._finish(step))

    def _finish(self, step: Callable[[], None]) -> None:
        """Steps the dense parameters, whose gradients may be out of their owners' hands by now, and
        sends what was decided to the host."""
        if self._step is None:
            step()
            return
        assert self._take is not None
        given = [one.parameter.grad for one in self._dense]
        for one in self._dense:
            one.parameter.grad = one.grad
        asking = [inner for inner in self._optimizer.dense_optimizers if _asks_found_inf(inner)]
        asked = {p for inner in asking for group in inner.param_groups for p in group["params"]}
        others = [one.parameter for one in self._dense if one.parameter not in asked]
        predicated = Predicated(self._optimizer.state, others)
        not_taken = (self._take.reshape(()) == 0).float()
        for inner in asking:
            vars(inner)["found_inf"] = not_taken
        try:
            step()
        finally:
            for inner in asking:
                del vars(inner)["found_inf"]
        predicated.allocate(self._take)
        for one, grad in zip(self._dense, given, strict=True):
            one.parameter.grad = grad
        self._optimizer.__dict__[DEFERRED] = self._step.report(predicated.take_back)


def _asks_found_inf(inner: Optimizer) -> bool:
    """Whether a torch optimizer leaves out, on the device, a step of which ``found_inf`` says so, its
    counts included: Adam and AdamW with ``fused=True``. (torch's fused SGD leaves a first momentum
    behind that nobody has written.) Others have what they step copied, and put back."""
    kinds = torch.optim.Adam, torch.optim.AdamW
    return type(inner) in kinds and all(group.get("fused") for group in inner.param_groups)


def _namer(
    optimizer: SteppingOptimizer, parameter: Tensor, index: int, position: int
) -> Callable[[], str]:
    """Return a function that names a dense parameter for errors, even when that is gone."""
    owner, known = weakref.ref(optimizer), weakref.ref(parameter)

    def name() -> str:
        stepped, found = owner(), known()
        if stepped is None or found is None:
            return "A dense parameter"
        return stepped.name_of(found, index, position)

    return name


def _unscale(optimizer: SteppingOptimizer, scale: Tensor) -> None:
    grads: dict[torch.device, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None:
                grad = grad._values() if grad.is_sparse else grad
                grads.setdefault(grad.device, []).append(grad)
    for device, found in grads.items():
        inverse = scale.double().reciprocal().float().to(device, non_blocking=True)
        torch._foreach_mul_(found, inverse.reshape(()))
