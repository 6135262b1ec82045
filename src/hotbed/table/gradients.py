"""The gradient of a table: what each backward left, as one tensor once somebody looks at it.

Backward hands its rows to the table's `WaitingGradient` itself: several backwards at once lose none, an
optimizer takes the rows as they are, and slots keep their rows just as long as the gradient is there.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hotbed.ops.duplicates import sum_duplicates
from hotbed.table.described import SteppedTable
from hotbed.table.sparse_gradient import (
    TableGradient,
    by_rows,
    plain_access,
    set_gradient,
    stored_gradient,
    zero_rows,
)

__all__ = ["GradientRows", "GradientShare", "WaitingGradient"]


class GradientRows:
    """Gradient rows of one backward for a table in the core's memory.

    Attributes:
        in_core: addresses of the slots and rows, and how many they are.
        distinct: whether each slot is known to come once.
        finite: whether all rows are known to be.
        claim: keeps the rows of the slots where they are; None where they never leave.
    """

    __slots__ = ("_tensors", "claim", "distinct", "finite", "in_core")

    def __init__(
        self,
        slots: Tensor,
        rows: Tensor,
        distinct: bool = False,
        finite: bool = False,
        claim: object = None,
    ) -> None:
        """`slots`: (n,) int64; `rows`: (n, dim) of the compute dtype."""
        self._tensors: tuple[Tensor, Tensor] | None = (slots, rows)
        self.in_core = slots.data_ptr(), rows.data_ptr(), slots.shape[0]
        self.distinct, self.finite, self.claim = distinct, finite, claim

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return `slots` and `rows`."""
        assert self._tensors is not None
        return self._tensors

    @property
    def slots(self) -> Tensor:
        """(n,) int64."""
        return self.tensors[0]

    @property
    def rows(self) -> Tensor:
        """(n, dim) of the compute dtype."""
        return self.tensors[1]

    @property
    def source(self) -> object:
        return self.claim

    def coo(self, handle: Tensor) -> TableGradient:
        """The same as the gradient of the handle."""
        return TableGradient.over(*self.tensors, handle.shape, [self.claim])


class GradientShare(Protocol):
    """Gradient rows of one backward for one table."""

    @property
    def source(self) -> object: ...

    def coo(self, handle: Tensor) -> TableGradient:
        """The same as the gradient of the handle."""


def _table_of(handle: Tensor) -> SteppedTable:
    table: SteppedTable = vars(handle)["hotbed_table"]
    return table


def _steps_of(handle: Tensor) -> int:
    rule = _table_of(handle).rule
    return 0 if rule is None else int(rule.steps)


class WaitingGradient:
    """Gradients that wait for the step of one table. Its handle keeps them.

    Threading: `add` and `look` from any thread; the rest where no backward is under way.
    """

    def __init__(self) -> None:
        self.shares: list[GradientShare] = []
        """What backwards left since somebody looked, in their order."""
        self.sources: list[object] = []
        """Of what was looked at: where it comes from, which keeps its rows in their slots."""
        self._summed: tuple[Tensor, int] | None = None
        """What was made of shares, as long as it is the handle's, and how many rows it had."""
        self._arrived = -1
        """How many steps the table had taken when the last one came."""
        # A handler of a signal may look in the middle of it.
        self._lock = threading.RLock()

    def add(self, handle: Tensor, share: GradientShare, accumulate: Node) -> TableGradient | None:
        """Keeps what a backward left; or gives what backward is to return, where torch has use for it.

        Args:
            accumulate: the node by which torch would add it to the handle's ``grad``.
        """
        try:
            executed = bool(torch._C._will_engine_execute_node(accumulate))
        except RuntimeError:  # torch.autograd.grad
            executed = False
        if not executed:
            return share.coo(handle)
        if not handle.requires_grad:
            return None  # any more: torch would not keep it either
        if handle._backward_hooks or handle._post_accumulate_grad_hooks:
            self.look(handle)  # torch adds behind all that was there before
            with self._lock:
                self._arrived = _steps_of(handle)
                self._forget_spent_sources(handle)
                self.sources.append(share.source)
            return share.coo(handle)
        with self._lock:
            self._arrived = _steps_of(handle)
            self.shares.append(share)
            self._forget_spent_sources(handle)
        return None

    def _forget_spent_sources(self, handle: Tensor) -> None:
        stored = stored_gradient(handle)
        if stored is None or (stored.is_sparse and not stored._nnz()):
            self.sources = []  # zero_grad(set_to_none=False), or torch's None

    def sources_of(self, handle: Tensor) -> list[object]:
        """All that the gradient comes from, as far as that is known."""
        of_stored = getattr(stored_gradient(handle), "sources", [])
        return [*self.sources, *of_stored, *(share.source for share in self.shares)]

    def replace(self, handle: Tensor, grad: Tensor | None) -> None:
        """The handle's gradient is this one from now on. (Its rows may be those of before.)"""
        if grad is None:
            return self.drop(handle)
        with self._lock:
            set_gradient(handle, grad)  # which may refuse it
            self._arrived = _steps_of(handle)
            self.shares, self._summed = [], None

    def drop(self, handle: Tensor) -> None:
        """There is none any more; nothing is summed."""
        with self._lock:
            self.shares, self.sources, self._summed = [], [], None
            set_gradient(handle, None)

    def zero(self, handle: Tensor) -> None:
        """No row has one any more, as ``zero_grad(set_to_none=False)`` leaves it."""
        stored = self.look(handle)
        if stored is not None:
            (zero_rows if stored.is_sparse else Tensor.zero_)(stored)
        self.sources = []

    def waits(self, handle: Tensor) -> bool:
        return bool(self.shares) or stored_gradient(handle) is not None

    def is_stepped(self, handle: Tensor) -> bool:
        """Whether a step was taken since the last one came. It waits on until zero_grad(), as in torch."""
        return self._arrived < _steps_of(handle)

    def look(self, handle: Tensor, *, each_once: bool = False) -> Tensor | None:
        """The gradient as one tensor; None where there is none. It takes the place of what it was made
        from, so that changes to it count. Every slot comes once in it, also in what torch or the
        user has put there if `each_once`."""
        with self._lock:
            stored = stored_gradient(handle)
            if stored is not None and stored.is_sparse and type(stored) is Tensor:
                if stored.sparse_dim() == 2:
                    stored = by_rows(stored)
                    set_gradient(handle, stored)
                TableGradient.adopt(stored, self.sources)  # of torch, or of the user
            if not self.shares and not (each_once and self._may_repeat(stored)):
                return stored
            shares = self.shares
            total = self._total(handle, stored, shares)
            if self.shares is shares:  # no handler of a signal has looked meanwhile
                self.shares = []
            self.sources += [share.source for share in shares]
            set_gradient(handle, total)
            self._summed = total, total._nnz() if total.is_sparse else 0
            return total

    def _may_repeat(self, stored: Tensor | None) -> bool:
        """Whether a slot may come twice in what torch holds; it adds to what was summed in place."""
        if stored is None or not stored.is_sparse:
            return False
        summed = self._summed
        return summed is None or stored is not summed[0] or stored._nnz() != summed[1]

    def _total(self, handle: Tensor, stored: Tensor | None, shares: list[GradientShare]) -> Tensor:
        parts = []
        for share in shares:
            assert isinstance(share, GradientRows)
            parts.append(share.tensors)
        sources = [share.source for share in shares]
        if stored is not None and stored.is_sparse:
            own = _table_of(handle).compute_dtype
            parts.insert(0, (stored._indices()[0], stored._values().to(own)))
            sources += getattr(stored, "sources", ())
        if len(parts) > 1 or not shares:
            parts = [sum_duplicates(*(torch.cat(part) for part in zip(*parts, strict=True)))]
        total: Tensor = TableGradient.over(*parts[0], handle.shape, sources)
        if stored is None or stored.is_sparse:
            return total
        with plain_access():
            return stored + total  # the loss has used the parameter itself, too
