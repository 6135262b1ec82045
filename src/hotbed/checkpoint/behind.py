"""Rows as they are after all steps, of those that were saved behind an optimizer which is not loaded, and of
those that were not saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hotbed import _core
from hotbed.checkpoint.entries import TableEntry
from hotbed.checkpoint.rules import rule_again
from hotbed.table.live import LiveTable
from hotbed.table.records import Records, rows_at_once
from hotbed.tables import CORE_DTYPES

__all__ = ["FirstRows", "RowsBehind"]


class FirstRows:
    """First values of the rows of one table.

    Args:
        table: whose initializer and key count.
        dtype: of the rows.
    """

    def __init__(self, table: LiveTable, dtype: torch.dtype) -> None:
        spec = table.spec
        self._core = _core.Table.make(
            spec.name,
            -1,
            spec.dim,
            CORE_DTYPES[dtype],
            spec.bands(),
            table.key,
            spec.padding_idx,
            origin=(spec.origin.first, spec.origin.stride, spec.origin.column),
        )

    def read(self, ids: Tensor) -> Records:
        """Return the rows of (n,) int64 ids."""
        return Records(ids, _core.read_rows(self._core, ids.data_ptr(), len(ids)))


class RowsBehind(FirstRows):
    """Rows of one table on their way, as they were saved, with the rule that they are behind.

    Attributes:
        rule: the rule, with all steps taken.
        dtype: of the saved weights.
        compute_dtype: of the saved states.
    """

    def __init__(self, table: LiveTable, entry: TableEntry) -> None:
        """
        Args:
            table: the table that the rows are for, which has its key already.

        Raises:
            ValueError: the saved rule, or its history, is none.
        """
        spec, saved = table.spec, entry["rule"]
        assert saved is not None
        self.dtype: torch.dtype = getattr(torch, entry["dtype"])
        wide = self.dtype == torch.float64
        self.compute_dtype = torch.float64 if wide else torch.float32
        super().__init__(table, self.dtype)
        self.rule = rule_again(self._core, saved)
        # Tiers save no rows that no batch has touched, which steps may have moved.
        absent = spec.rows if spec.rows and self.rule.has_moved_untouched else 0
        self._is_absent = torch.ones(absent, dtype=torch.bool, device="cpu")

    def current(self, records: Records) -> Records:
        """Return the weights of whole records as the last step would have left them."""
        ids, weights, states, steps = records
        assert weights is not None and states is not None and steps is not None
        at = [state.data_ptr() for state in states]
        _core.write(self._core, ids.data_ptr(), len(ids), weights.data_ptr(), at, steps.data_ptr())
        if len(self._is_absent):
            self._is_absent[ids] = False
        found = self.read(ids)
        self._core.clear()
        return found

    def weights(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return (n, dim) weights of rows of a file, by their parts, as the last step would have left them.

        Raises:
            KeyError, ValueError: a part is missing, or is none of this rule.
        """
        planes = _core.state_planes(self.rule.options)
        states = [
            tensors[f"states/{name}"].to(self.compute_dtype).contiguous() for name, _, _ in planes
        ]
        steps = tensors["steps"].contiguous()
        first = self.rule.history()[0]
        if not bool(((steps == 0) | ((steps >= first) & (steps <= self.rule.steps))).all()):
            raise ValueError("its steps are none that the table has taken")
        weights = tensors["weights"].to(self.dtype).contiguous()
        found = self.current(Records(tensors["ids"].contiguous(), weights, states, steps)).weights
        assert found is not None
        return found

    def others(self) -> Iterator[Records]:
        """Yield the rows that were never given to `current` but have moved all the same."""
        absent = self._is_absent.nonzero().flatten()
        for ids in absent.split(rows_at_once(self._core)):  # type: ignore[no-untyped-call]
            yield self.read(ids)
