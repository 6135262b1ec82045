"""Residency against a model of dicts, and what it says when it is used wrongly."""

from __future__ import annotations

import numpy as np
import pytest
import torch  # noqa: F401  (its libgomp must be loaded before the core's)
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from residency_model import Checked, Key

from hotbed import _core

INT64 = np.iinfo(np.int64)

# A table with an array, one too large for that, and a dynamic one.
TABLE_ROWS = [12, 100_000, -1]
UNIVERSE: list[Key] = [
    *((0, i) for i in range(12)),
    *((1, i * 9_999) for i in range(8)),
    *((2, i) for i in (0, -1, 5, 1 << 40, INT64.min, INT64.max)),
]

some_keys = st.lists(st.sampled_from(UNIVERSE), max_size=7, unique=True)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("announce"), some_keys),
        st.tuples(st.just("announce"), some_keys),
        st.tuples(st.just("admit"), st.booleans()),
        st.tuples(st.just("admit"), st.booleans()),
        st.tuples(st.just("admit_now"), st.tuples(some_keys, st.booleans())),
        st.tuples(st.sampled_from(["finish", "finish", "take_back"]), st.integers(0, 3)),
        st.tuples(st.sampled_from(["consume", "mark_dirty", "release"]), st.integers(0, 3)),
        st.tuples(st.sampled_from(["drop", "dirty", "clean"]), some_keys),
        st.tuples(st.sampled_from(["retract", "retract_first"]), st.none()),
        st.tuples(st.just("clear"), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=examples(300))
@given(
    operations,
    st.integers(1, 14),
    st.sampled_from([1 / 64, 0.5, 16.0]),
    st.sampled_from([(32, 32768), (32, 0), (2, 0), (1, 3)]),
)
def test_agrees_with_a_model(
    steps: list[tuple[str, object]], capacity: int, half_life: float, looks: tuple[int, int]
) -> None:
    both = Checked(TABLE_ROWS, capacity, half_life, looks)
    for operation, argument in steps:
        perform(both, operation, argument)
        both.compare(UNIVERSE)


@settings(max_examples=examples(300))
@given(
    st.lists(st.lists(st.sampled_from(UNIVERSE), max_size=5, unique=True), max_size=30),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(3, 16),
    st.sampled_from([(32, 32768), (2, 0)]),
    st.lists(st.integers(0, 29), max_size=3),
)
def test_looks_ahead_as_a_model(
    batches: list[list[Key]],
    horizon: int,
    depth: int,
    capacity: int,
    looks: tuple[int, int],
    passed_over: list[int],
) -> None:
    both = Checked(TABLE_ROWS, capacity, 16.0, looks)
    model = both.model
    announced = 0
    for step in range(len(batches)):
        while announced < min(step + horizon, len(batches)):
            both.announce(batches[announced])
            announced += 1
        if step in passed_over and model.announced:
            both.retract_first()
        while model.announced and len(model.admitted) < depth:
            before = len(model.admitted)
            both.admit(new=False)
            if len(model.admitted) == before and not before:
                both.retract_first()  # too large for the pool
            elif len(model.admitted) == before:
                break
        if model.admitted:
            batch = next(iter(model.admitted))
            both.consume(batch)
            both.mark_dirty(batch)
            both.release(batch)
        both.compare(UNIVERSE)


def perform(both: Checked, operation: str, argument: object) -> None:
    model = both.model
    waiting = [batch for batch in model.admitted if batch not in model.consumed]
    if operation == "announce":
        both.announce(argument)
    elif operation == "admit" and model.announced:
        both.admit(argument)
    elif operation == "admit_now":
        both.admit_now(*argument)
    elif operation in ("finish", "take_back", "consume") and waiting:
        batch = waiting[argument % len(waiting)]
        if operation == "finish":
            both.consume(batch)
            both.release(batch)
        else:
            getattr(both, operation)(batch)
    elif operation == "mark_dirty" and model.admitted:
        both.mark_dirty(list(model.admitted)[argument % len(model.admitted)])
    elif operation == "release" and model.consumed:
        both.release(sorted(model.consumed)[argument % len(model.consumed)])
    elif operation == "drop":
        both.drop(argument)
    elif operation in ("dirty", "clean"):
        both.mark(argument, operation == "dirty")
    elif operation in ("retract", "clear") or (operation == "retract_first" and model.announced):
        getattr(both, operation)()


class Pool:
    """One dynamic table: batches are lists of ids."""

    def __init__(self, capacity: int, **policy: float) -> None:
        self.core = _core.Residency([-1], capacity, **policy)
        self.moves = _core.Moves()

    def announce(self, ids: list[int]) -> int:
        array = np.array(ids, np.int64)
        return self.core.announce([(0, array.ctypes.data, len(array))])

    def admit_now(self, ids: list[int]) -> int:
        array = np.array(ids, np.int64)
        return self.core.admit_now([(0, array.ctypes.data, len(array))], self.moves)

    def use(self, ids: list[int]) -> set[int]:
        """A batch from start to end; which ids it evicted."""
        batch = self.admit_now(ids)
        assert batch
        gone = self.evicted()
        self.core.consume(batch)
        self.core.release(batch)
        return gone

    def evicted(self) -> set[int]:
        return set(self.moves.evicted[1].tolist())


@settings(max_examples=examples(100))
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, unique=True), min_size=1, max_size=20),
    st.data(),
)
def test_statistics_change_only_when_a_batch_is_consumed(
    batches: list[list[int]], data: st.DataObject
) -> None:
    quiet, busy = Pool(10), Pool(10)
    for pool in (quiet, busy):
        pool.use(list(range(10)))
    for ids in batches:
        others = data.draw(st.lists(st.integers(0, 9), unique=True))
        wanted = np.array(others, np.int64)
        found = np.empty_like(wanted)
        busy.core.find(0, wanted.ctypes.data, len(wanted), found.ctypes.data)
        looked_ahead = busy.announce(others)
        assert busy.core.admit(looked_ahead, busy.moves)
        if data.draw(st.booleans()):
            busy.core.take_back(busy.admit_now(others))
        busy.announce(others)
        for pool in (quiet, busy):
            pool.use(ids)
        busy.core.take_back(looked_ahead)
        busy.core.retract()
    for fresh in range(100, 110):
        assert quiet.use([fresh]) == busy.use([fresh])


def test_a_frequent_row_stays_and_is_known_when_it_returns() -> None:
    pool = Pool(4)
    for _ in range(8):
        pool.use([1])
    for other in range(100, 120):
        assert 1 not in pool.use([other])
    # Without room for it, it leaves; back again, it outlives rows that are used more recently.
    pool.use([200, 201, 202, 203])
    pool.use([1])
    for other in range(300, 320):
        assert 1 not in pool.use([other])


def test_an_old_row_gives_way_in_the_end() -> None:
    pool = Pool(4, half_life=2.0)
    for _ in range(8):
        pool.use([1])
    gone = [other for other in range(2, 60) if 1 in pool.use([other % 3 + 10 * (other % 7)])]
    assert gone


def test_rows_with_the_farthest_use_leave_first() -> None:
    pool = Pool(6)
    pool.use([1, 2, 3, 4, 5, 6])
    for ids in ([1, 7], [2], [3, 1], [4]):
        pool.announce(ids)
    assert pool.core.admit(1, pool.moves)
    assert pool.evicted() in ({5}, {6})
    first = pool.evicted()
    pool.use([8])
    assert pool.evicted() == {5, 6} - first
    pool.use([9])
    assert pool.evicted() == {8}
    pool.core.admit_now([(0, np.array([10, 11, 12]).ctypes.data, 3)], pool.moves)
    assert pool.evicted() == {9, 4, 3}  # 3 comes in batch 3, 4 in batch 4, 2 in batch 2


def test_a_batch_that_does_not_fit_says_what_would() -> None:
    pool = Pool(5)
    held = pool.admit_now([1, 2, 3])
    pool.announce([3, 4, 5, 6])
    before = [a.tolist() for a in pool.core.items()]
    memory = pool.core.memory_bytes()
    assert not pool.core.admit(1, pool.moves)
    assert pool.moves.slots_needed == 6
    assert pool.admit_now([4, 5, 6]) == 0
    assert pool.moves.slots_needed == 6
    assert [a.tolist() for a in pool.core.items()] == before
    assert pool.core.memory_bytes() == memory
    pool.core.take_back(held)
    assert pool.core.admit(1, pool.moves)


def test_memory_is_counted() -> None:
    fixed = _core.Residency.fixed_bytes([1000, -1], 10_000)
    core = _core.Residency([1000, -1], 10_000)
    assert fixed <= core.memory_bytes() < fixed + 5000
    ids = np.arange(50_000)
    core.announce([(1, ids.ctypes.data, len(ids))])
    # Ids, chains, places of awaited rows, and the index.
    assert core.memory_bytes() > fixed + 50_000 * (8 + 4 + 8 + 20)
    core.clear()
    assert core.resident == core.announced == 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda p: p.core.admit(3, p.moves), "Batch 3 cannot be admitted: batch 1 is next"),
        (lambda p: p.core.consume(1), "Batch 1 cannot be consumed: it is not admitted"),
        (lambda p: p.core.release(-1), "not consumed. Take it back"),
        (lambda p: (p.core.consume(-1), p.core.take_back(-1)), "was consumed. Release it"),
        (lambda p: (p.core.consume(-1), p.core.consume(-1)), "consumed already"),
        (lambda p: p.core.drop(np.array([0]).ctypes.data, 1), "Slot 0 .*a batch has pinned it"),
        (lambda p: p.core.drop(np.array([5]).ctypes.data, 1), "Slot 5 .*no row is there"),
        (lambda p: p.core.mark_clean(np.array([-1]).ctypes.data, 1), "Slot -1 .*no row is there"),
        (lambda p: p.announce([4, 5, 4]), "Batch 2 names an id twice"),
        (lambda p: p.admit_now([4, 5, 4]), "names an id twice"),
        (lambda p: p.core.announce([(7, 0, 0)]), r"Table 7 is outside \[0, 1\)"),
    ],
)
def test_wrong_use_is_told(act: object, message: str) -> None:
    pool = Pool(8)
    pool.admit_now([1, 2])
    pool.announce([3])
    before = [a.tolist() for a in pool.core.items()]
    with pytest.raises(ValueError, match=message):
        act(pool)
    assert [a.tolist() for a in pool.core.items()] == before
    assert pool.core.pinned == 2
    assert pool.use([4, 5]) == set()


def test_ids_of_static_tables_are_checked() -> None:
    core = _core.Residency([10], 4)
    for bad in (10, -1):
        ids = np.array([3, bad])
        with pytest.raises(ValueError, match=rf"Table 0: id {bad} is outside \[0, 10\)"):
            core.announce([(0, ids.ctypes.data, 2)])
    assert core.announced == 0


@pytest.mark.parametrize("capacity", [0, -1, 1 << 31])
def test_impossible_capacities(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"pool of {capacity} slots"):
        _core.Residency([10], capacity)
