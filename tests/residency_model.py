"""What csrc/tiers/residency.hpp decides, said with dicts and sets: slow, and plain enough to believe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hotbed import _core

Key = tuple[int, int]
"""(table, id)"""

SCORE_SLACK = 2.0
"""Octaves by which the core's rounded scores may put two rows in the wrong order."""
FORGOTTEN = 120.0
"""Rows that many half-lives old may count as never used."""


@dataclass
class Model:
    """The rules. Which slot a row gets, and who of several equals leaves, is the core's to choose."""

    capacity: int
    octave: float  # uses
    slot_of: dict[Key, int] = field(default_factory=dict)
    dirty: set[Key] = field(default_factory=set)
    new: set[Key] = field(default_factory=set)
    announced: dict[int, list[Key]] = field(default_factory=dict)
    admitted: dict[int, list[Key]] = field(default_factory=dict)
    consumed: set[int] = field(default_factory=set)
    uses: float = 0.0
    score: dict[Key, float] = field(default_factory=dict)

    def pinned(self) -> set[Key]:
        return {key for keys in self.admitted.values() for key in keys}

    def next_use(self, key: Key) -> float:
        """Batch number, or infinity."""
        return min((b for b, keys in self.announced.items() if key in keys), default=math.inf)

    def consume(self, batch: int) -> set[Key]:
        now = self.uses / self.octave
        for key in self.admitted[batch]:
            old = self.score.get(key, -math.inf)
            high, low = max(old, now), min(old, now)
            self.score[key] = high + math.log2(1 + 2.0 ** (low - high))
        self.uses += len(self.admitted[batch])
        self.consumed.add(batch)
        born = self.new & set(self.admitted[batch])
        self.new -= born
        self.dirty |= born
        return born

    def forget(self, key: Key) -> None:
        del self.slot_of[key]
        self.dirty.discard(key)
        self.new.discard(key)

    def check_order(self, gone: set[Key], kept: set[Key], eligible: int) -> None:
        """`gone` were evicted and `kept` could have been: no more than `eligible` rows before any."""
        for key in gone:
            mine = self.next_use(key)
            before = {k for k in gone | kept if self.next_use(k) > mine}
            assert len(before) < max(eligible, len(gone))
            if eligible > len(gone):
                continue
            assert before <= gone
            if mine == math.inf:
                floor = self.uses / self.octave - FORGOTTEN
                rivals = [
                    max(floor, self.score.get(k, floor))
                    for k in kept
                    if self.next_use(k) == math.inf
                ]
                assert (
                    max(floor, self.score.get(key, floor))
                    <= min(rivals, default=math.inf) + SCORE_SLACK
                )


class Checked:
    """The core's residency beside the model: every call is made on both and compared."""

    def __init__(
        self, table_rows: list[int], capacity: int, half_life: float, looks: tuple[int, int]
    ) -> None:
        self.core = _core.Residency(
            table_rows,
            capacity,
            half_life=half_life,
            ghosts=64.0,
            slots_a_victim=looks[0],
            slots_a_batch=looks[1],
        )
        self.table_rows = table_rows
        self.looks = looks
        self.model = Model(capacity, half_life * capacity)
        self.moves = _core.Moves()

    def _parts(self, keys: list[Key]) -> tuple[list[Key], list[tuple[int, int, int]]]:
        """The keys by table, and the same for the core."""
        order = [key for t in range(len(self.table_rows)) for key in keys if key[0] == t]
        self._alive = []
        parts = []
        for t in range(len(self.table_rows)):
            ids = np.array([key[1] for key in order if key[0] == t], np.int64)
            self._alive.append(ids)
            if len(ids):
                parts.append((t, ids.ctypes.data, len(ids)))
        return order, parts

    def announce(self, keys: list[Key]) -> None:
        order, parts = self._parts(keys)
        expected = self.core.next_batch
        assert self.core.announce(parts) == expected
        self.model.announced[expected] = order

    def retract(self) -> None:
        self.core.retract()
        self.model.announced.clear()

    def retract_first(self) -> None:
        self.core.retract_first()
        del self.model.announced[next(iter(self.model.announced))]

    def admit(self, new: bool) -> None:
        number = next(iter(self.model.announced))
        keys = self.model.announced[number]
        fits = self.core.admit(number, self.moves)
        if self._check_fit(keys, fits):
            del self.model.announced[number]
            self._check_moves(number, keys, new)

    def admit_now(self, keys: list[Key], new: bool) -> None:
        order, parts = self._parts(keys)
        number = self.core.admit_now(parts, self.moves)
        assert number <= 0
        if self._check_fit(order, number != 0):
            self._check_moves(number, order, new)

    def _check_fit(self, keys: list[Key], fits: bool) -> bool:
        needed = len(self.model.pinned() | set(keys))
        assert self.moves.slots_needed == needed
        assert fits == (needed <= self.model.capacity)
        return fits

    def _check_moves(self, number: int, keys: list[Key], new: bool) -> None:
        model = self.model
        present = set(model.slot_of)
        absent = [key for key in keys if key not in present]
        free = set(range(model.capacity)) - set(model.slot_of.values())

        tables, ids, slots, dirty = (a.tolist() for a in self.moves.evicted)
        gone = list(zip(tables, ids, strict=True))
        assert len(set(gone)) == len(gone) == max(0, len(present) + len(absent) - model.capacity)
        kept = present - model.pinned() - set(keys)
        assert set(gone) <= kept
        assert slots == [model.slot_of[key] for key in gone]
        assert [bool(d) for d in dirty] == [key in model.dirty for key in gone]
        each, batch = self.looks
        looks = max(batch, each * len(gone), 1)
        eligible = len(gone) if looks >= model.capacity else len(gone) * model.capacity // looks
        model.check_order(set(gone), kept - set(gone), eligible)
        for key in gone:
            model.forget(key)

        tables, ids, into = (a.tolist() for a in self.moves.loaded)
        assert list(zip(tables, ids, strict=True)) == absent
        assert len(set(into)) == len(into) and set(into) <= free | set(slots)
        model.slot_of.update(zip(absent, into, strict=True))
        if new and absent:
            marked = np.array(into[::2], np.int64)
            self.core.mark_new(marked.ctypes.data, len(marked))
            model.new |= set(absent[::2])
        model.admitted[number] = keys

    def consume(self, batch: int) -> None:
        tables, ids = (a.tolist() for a in self.core.consume(batch))
        assert set(zip(tables, ids, strict=True)) == self.model.consume(batch)

    def mark_dirty(self, batch: int) -> None:
        self.core.mark_dirty(batch)
        self.model.dirty |= set(self.model.admitted[batch])

    def release(self, batch: int) -> None:
        self.core.release(batch)
        del self.model.admitted[batch]
        self.model.consumed.discard(batch)

    def take_back(self, batch: int) -> None:
        mine = set(self.model.admitted.pop(batch))
        expected = (mine & self.model.new) - self.model.pinned()
        slots = self.core.take_back(batch).tolist()
        assert sorted(slots) == sorted(self.model.slot_of[key] for key in expected)
        for key in expected:
            self.model.forget(key)
            self.model.score.pop(key, None)

    def drop(self, keys: Iterable[Key]) -> None:
        keys = [k for k in keys if k in self.model.slot_of and k not in self.model.pinned()]
        slots = np.array([self.model.slot_of[key] for key in keys], np.int64)
        self.core.drop(slots.ctypes.data, len(slots))
        for key in keys:
            self.model.forget(key)
            self.model.score.pop(key, None)

    def mark(self, keys: Iterable[Key], dirty: bool) -> None:
        keys = [key for key in keys if key in self.model.slot_of]
        slots = np.array([self.model.slot_of[key] for key in keys], np.int64)
        if dirty:
            self.core.mark_dirty_slots(slots.ctypes.data, len(slots))
            self.model.dirty |= set(keys)
        else:
            self.core.mark_clean(slots.ctypes.data, len(slots))
            self.model.dirty -= set(keys)

    def clear(self) -> None:
        self.core.clear()
        self.model = Model(self.model.capacity, self.model.octave)

    def compare(self, universe: list[Key]) -> None:
        """Everything there is to see of both."""
        model = self.model
        slots, tables, ids, dirty = (a.tolist() for a in self.core.items())
        assert slots == sorted(slots)
        keys = list(zip(tables, ids, strict=True))
        assert dict(zip(keys, slots, strict=True)) == model.slot_of
        assert {key for key, d in zip(keys, dirty, strict=True) if d} == model.dirty
        assert self.core.resident == len(model.slot_of) <= model.capacity
        assert self.core.pinned == len(model.pinned())
        assert self.core.announced == len(model.announced)
        for batch, expected in model.admitted.items():
            assert self.core.slots(batch).tolist() == [model.slot_of[key] for key in expected]
        order, parts = self._parts(universe)
        found: list[int] = []
        for table, address, n in parts:
            out = np.full(n, -7)
            self.core.find(table, address, n, out.ctypes.data)
            found += out.tolist()
        assert found == [model.slot_of.get(key, -1) for key in order]
