"""The part of an optimizer's step that is taken on a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotbed.errors import OptimizerError
from hotbed.handles import LiveTable
from hotbed.optim.dense import name_of

if TYPE_CHECKING:
    from hotbed.device.step import DeviceStep
    from hotbed.optim.base import TableOptimizer

__all__ = ["DevicePart", "device_part", "raise_of_last_step"]

_NOTICE = "_hotbed_notice"
"""Where an optimizer has what the device will tell of its last step."""


def device_part(optimizer: TableOptimizer) -> DevicePart | None:
    """What a step of this optimizer does on a device; None where no table of it lies on one.

    Raises:
        NotFiniteError, IdError: the step before was not taken.
    """
    devices = {t.device for t in optimizer._live.values() if t.place.by_kernels}
    if not devices:
        return None
    if len(devices) > 1:
        names = ", ".join(map(str, devices))
        raise OptimizerError(
            f"{type(optimizer).__name__}: its tables lie on {names}. Make an optimizer a device."
        )
    raise_of_last_step(optimizer)
    from hotbed.device.notices import raise_what_is_known

    raise_what_is_known([t for t in optimizer._live.values() if t.place.by_kernels])
    return DevicePart(optimizer, devices.pop())


def raise_of_last_step(optimizer: TableOptimizer) -> None:
    """Waits for what the device has found out about the step before.

    Raises:
        NotFiniteError, IdError: it was not taken.
    """
    notice = optimizer.__dict__.pop(_NOTICE, None)
    if notice is not None and (error := notice.take()) is not None:
        raise error


class DevicePart:
    """Tables on a device, and dense parameters beside them, in one step: all of them or none.

    Threading: for the training thread.
    """

    def __init__(self, optimizer: TableOptimizer, device: torch.device) -> None:
        from hotbed.device.step import DenseGradient, Entry

        self._entry, self._dense_gradient = Entry, DenseGradient
        self._optimizer, self._device = optimizer, device
        self._found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            self._unscale(scale)
        self._entries: list[Any] = []
        self._dense: list[Any] = []
        self._step: DeviceStep | None = None
        self._take: Tensor | None = None

    def _unscale(self, scale: Tensor) -> None:
        grads: dict[torch.device, list[Tensor]] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None:
                    grad = grad._values() if grad.is_sparse else grad
                    grads.setdefault(grad.device, []).append(grad)
        for device, found in grads.items():
            inverse = scale.double().reciprocal().float().to(device, non_blocking=True)
            torch._foreach_mul_(found, inverse.reshape(()))

    def takes(self, parameter: Tensor, index: int, position: int, hyper: Any) -> bool:
        """Takes a parameter in, if it is one for here; `hyper`: the numbers of its group."""
        live = self._optimizer._live.get(parameter)
        if live is not None:
            if not live.place.by_kernels:
                return False
            if live.has_gradient:
                self._entries.append(self._entry(live, self._rule_of(live), hyper))
            return True
        grad = parameter.grad
        if grad is None or grad.device != self._device:
            return grad is None
        name = _namer(self._optimizer, parameter, index, position)
        self._dense.append(self._dense_gradient(parameter, grad, name))
        return True

    def _rule_of(self, live: LiveTable) -> Any:
        rule = self._optimizer._rules[live.parameter]
        self._optimizer.check_hold(live, rule)
        return rule

    def take_share(self, live: LiveTable, hyper: Any, share: Any) -> None:
        """Takes the first gradient of a table in that is updated in backward."""
        self._entries.append(self._entry(live, self._rule_of(live), hyper, share))

    def decide(self, *, beside: bool) -> bool:
        """Checks everything. False: the step is known not to be taken, and that is no error.

        Args:
            beside: whether the host has a part in the step; then it waits for what was found.

        Raises:
            NotFiniteError, IdError: as far as that is known.
        """
        from hotbed.device.step import DeviceStep

        if not self._entries and not self._dense:
            return self._found_inf is None or not bool(self._found_inf)
        table = next(t for t in self._optimizer._live.values() if t.place.by_kernels)
        self._step = DeviceStep(table, self._entries, self._dense, self._found_inf)
        self._take = self._step.decide()
        if beside and not bool(self._take):
            error = self._step.tell(counted=False).take()
            if error is not None:
                raise error
            return False
        return True

    def step(self) -> None:
        """Launches what was decided, and steps the dense parameters."""
        from hotbed.ops.gpu.recording import now_or_after

        if self._step is None:
            now_or_after(self._optimizer._half.step)
            return
        self._step.apply()
        now_or_after(self._finish)

    def _finish(self) -> None:
        """Steps the dense parameters, whose gradients may be out of their owners' hands by now, and
        sends what was decided to the host."""
        from hotbed.device.step import Predicated

        assert self._step is not None and self._take is not None
        given = [one.parameter.grad for one in self._dense]
        for one in self._dense:
            one.parameter.grad = one.grad
        predicated = Predicated(self._optimizer.state, [one.parameter for one in self._dense])
        self._optimizer._half.step()
        predicated.settle(self._take)
        for one, grad in zip(self._dense, given, strict=True):
            one.parameter.grad = grad
        self._optimizer.__dict__[_NOTICE] = self._step.tell(predicated.take_back)


def _namer(
    optimizer: TableOptimizer, parameter: Tensor, index: int, position: int
) -> Callable[[], str]:
    known, group = weakref.ref(parameter), optimizer.param_groups[index]

    def name() -> str:
        found = known()
        return "A dense parameter" if found is None else name_of(found, group, position)

    return name
