"""Base of places whose rows the core reads and writes by id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from hotbed import _core
from hotbed.table.lookups import Lookups, StoredTable
from hotbed.table.place import Place
from hotbed.table.records import Records, rows_at_once

__all__ = ["CoreBacked", "CoreLookups", "CoreSnapshot"]


class CoreLookups(Lookups):
    """Tables whose rows the core reads in one pass."""

    def records(
        self, live: Sequence[StoredTable], *, states: bool, current: bool
    ) -> Iterator[tuple[int, Records]]:
        return _stream([table.core for table in live], states, current)

    def changed_records(
        self, live: Sequence[StoredTable], since: Sequence[int], *, states: bool
    ) -> Iterator[tuple[int, Records]]:
        return _stream([table.core for table in live], states, False, since)

    def snapshot(
        self, live: Sequence[StoredTable], since: Sequence[int], *, memory: int
    ) -> CoreSnapshot | None:
        cores = [table.core for table in live]
        are_core_backed = all(isinstance(table.place.lookups, CoreLookups) for table in live)
        if not are_core_backed or not _core.Snapshot.can_read(cores):
            return None
        return CoreSnapshot(cores, since, memory)


class CoreSnapshot:
    """`hotbed.table.records.RowsOfMoment` of rows that the core keeps."""

    def __init__(self, cores: Sequence[_core.Table], since: Sequence[int], memory: int) -> None:
        # Who changes rows waits while some are copied.
        at_once = max(1, min(map(rows_at_once, cores)) // _PARTS)
        self._core = _core.Snapshot(cores, at_once, memory, since)

    @property
    def waited(self) -> float:
        return self._core.waited

    def records(self, *, states: bool) -> Iterator[tuple[int, Records]]:
        while (rows := self._core.next(states)) is not None:
            at, ids, weights, of_states, steps = rows
            yield at, Records(ids, weights, of_states if states else None, steps)

    def stop(self) -> None:
        self._core.stop()

    def end(self) -> None:
        self._core.end()


_PARTS = 4
"""Into which rows that are read at once are cut where somebody may wait."""


def _at_once(cores: Sequence[_core.Table]) -> int:
    # Of many tables more in all, as small chunks take longer.
    return max(1, min(map(rows_at_once, cores)) * min(4, len(cores)) // len(cores))


def _stream(
    cores: Sequence[_core.Table], states: bool, current: bool, since: Sequence[int] = ()
) -> Iterator[tuple[int, Records]]:
    stream = _core.RecordStream.make(cores, _at_once(cores), current, since)
    try:
        while (rows := stream.next(states)) is not None:
            at, ids, weights, of_states, steps = rows
            yield at, Records(ids, weights, of_states if states else None, steps)
    finally:
        stream.close()


class CoreBacked(Place):
    """Rows are the core's, wherever it keeps them."""

    def read(self, ids: Tensor) -> Tensor:
        return _core.read_rows(self.core, ids.data_ptr(), len(ids))

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        return (rows for _, rows in _stream([self.core], states, current))

    def write(self, records: Records) -> None:
        ids, weights, states, steps = records
        spec = self.spec
        ids = ids.contiguous()
        if weights is not None:
            weights = weights.to(dtype=spec.dtype, device="cpu").contiguous()
        if states is not None:
            states = [s.to(dtype=spec.compute_dtype, device="cpu").contiguous() for s in states]
        _core.write(
            self.core,
            ids.data_ptr(),
            len(ids),
            0 if weights is None else weights.data_ptr(),
            None if states is None else [state.data_ptr() for state in states],
            0 if steps is None else steps.data_ptr(),
        )

    def forget(self) -> None:
        if self.spec.rows is None:
            self.core.clear()
        else:
            self.core.write_first_values()
