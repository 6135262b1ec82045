"""Rows that were saved behind an optimizer which is not loaded: brought up to date on their way."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hotbed import _core
from hotbed.checkpoint.entries import TableEntry
from hotbed.checkpoint.rules import rule_again
from hotbed.table.live import LiveTable
from hotbed.table.records import Records, rows_at_once
from hotbed.tables import CORE_DTYPES

__all__ = ["RowsBehind"]


class RowsBehind:
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
        self._core = _core.Table.make(
            spec.name,
            -1,
            spec.dim,
            CORE_DTYPES[self.dtype],
            spec.bands(),
            table.key,
            spec.padding_idx,
            origin=(spec.origin.first, spec.origin.stride, spec.origin.column),
        )
        self.rule = rule_again(self._core, saved)
        # Tiers save no rows that no batch has touched, which steps may have moved.
        absent = spec.rows if spec.rows and self.rule.base[0] != 1 else 0
        self._is_absent = torch.ones(absent, dtype=torch.bool, device="cpu")

    def current(self, records: Records) -> Records:
        """Return the weights of whole records as the last step would have left them."""
        ids, weights, states, steps = records
        assert weights is not None and states is not None and steps is not None
        at = [state.data_ptr() for state in states]
        _core.write(self._core, ids.data_ptr(), len(ids), weights.data_ptr(), at, steps.data_ptr())
        if len(self._is_absent):
            self._is_absent[ids] = False
        found = self._read(ids)
        self._core.clear()
        return found

    def others(self) -> Iterator[Records]:
        """Yield the rows that were never given to `current` but have moved all the same."""
        absent = self._is_absent.nonzero().flatten()
        for ids in absent.split(rows_at_once(self._core)):  # type: ignore[no-untyped-call]
            yield self._read(ids)

    def _read(self, ids: torch.Tensor) -> Records:
        return Records(ids, _core.read_rows(self._core, ids.data_ptr(), len(ids)))
