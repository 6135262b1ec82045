"""What places have in common whose rows the core reads and writes by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed import _core
from hotbed.places.place import Place

__all__ = ["OfCore"]


class OfCore(Place):
    """Rows are the core's, wherever it keeps them."""

    def read(self, ids: Tensor) -> Tensor:
        return _core.lookup(self.core, ids.data_ptr(), len(ids))

    def write(self, ids: Tensor, values: Tensor) -> None:
        values = values.to(dtype=self.spec.dtype, device="cpu").contiguous()
        _core.assign(self.core, ids.data_ptr(), len(ids), values.data_ptr())

    def forget(self) -> None:
        if self.spec.rows is None:
            self.core.clear()
        else:
            self.core.write_first_values()

    def read_states(self, rule: Any, ids: Tensor) -> list[Tensor]:
        states = [
            torch.empty((len(ids), width), dtype=self.spec.compute_dtype, device="cpu")
            for width in self.core.state_widths()
        ]
        rule.read(ids.data_ptr(), len(ids), 0, [state.data_ptr() for state in states])
        return states

    def write_states(self, rule: Any, ids: Tensor, values: Sequence[Tensor]) -> None:
        rule.write_states(ids.data_ptr(), len(ids), [value.data_ptr() for value in values])
