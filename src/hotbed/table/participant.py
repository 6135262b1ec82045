"""Participants of a step: the memory of the host, or of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from hotbed import _core
from hotbed.table.backward import Deferred
from hotbed.table.gradients import GradientShare
from hotbed.table.lookups import StoredTable

__all__ = ["DEFERRED", "StepParticipant", "SteppingOptimizer", "raise_of_last_step"]

DEFERRED = "_hotbed_notice"
"""Where an optimizer has what a device will tell of its last step."""


class SteppingOptimizer(Protocol):
    """A `hotbed.optim.TableOptimizer`, as its participants see it."""

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, object]]: ...
    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def dense_optimizers(self) -> Sequence[Optimizer]:
        """Torch's, which step the dense parameters."""

    def check_hold(self, live: StoredTable, rule: _core.TableRule) -> None:
        """Raise OptimizerError where another optimizer has taken a table over."""

    def name_of(self, parameter: Tensor, index: int, position: int) -> str:
        """Return the name of a dense parameter for errors."""


class StepParticipant(Protocol):
    """The tables of an optimizer whose rows lie in one memory, and dense parameters there. First it takes
    them in, then it decides, applies and lets the dense parameters step; all parts do, or none."""

    includes_host: bool
    """Whether it takes in what the host steps, too."""

    def add_table(
        self,
        live: StoredTable,
        rule: _core.TableRule,
        hyper: _core.Hyperparameters,
        share: GradientShare | None = None,
    ) -> None:
        """A table, if it has a gradient, with the numbers of its group. `share`: its gradient, where that
        is not the handle's."""

    def add_dense(self, parameter: Tensor, grad: Tensor, index: int, position: int) -> None:
        """A parameter, by its group and its place there."""

    @property
    def idle(self) -> bool:
        """Whether it took nothing in."""

    def decide(self, *, beside: bool) -> bool:
        """Checks everything, and changes nothing. False: the step is known not to be taken, and that is
        no error.

        Args:
            beside: whether another part has something to do; then whoever can only guess waits.

        Raises:
            NotFiniteError, IdError, OptimizerError: as far as that is known.
        """

    def apply(self) -> None:
        """Updates tables."""

    def finishing(self, step: Callable[[], None]) -> Callable[[], None]:
        """`step`, of the dense parameters, and what must be done around it; telling, too."""


def raise_of_last_step(optimizer: SteppingOptimizer) -> None:
    """Waits for what a device has found out about the step before.

    Raises:
        NotFiniteError, IdError: it was not taken.
    """
    notice: Deferred | None = optimizer.__dict__.pop(DEFERRED, None)
    if notice is not None and (error := notice.pop()) is not None:
        raise error
