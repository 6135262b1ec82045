"""The key index against a dict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed import _core

INT64 = np.iinfo(np.int64)

# Few distinct keys, so that operations meet; the extremes; and any key at all.
keys_strategy = st.lists(
    st.one_of(
        st.integers(-40, 40),
        st.sampled_from([INT64.min, INT64.max, INT64.min + 1, INT64.max - 1, 1 << 32]),
        st.integers(INT64.min, INT64.max),
        st.integers(-60, 60).map(lambda k: k << 56),
    ),
    max_size=120,
)
operations = st.lists(
    st.tuples(
        st.sampled_from(["find", "find_or_insert", "update", "erase", "insert", "clear"]),
        keys_strategy,
    ),
    max_size=30,
)


class Index:
    """The core's index, with arrays in place of addresses."""

    def __init__(self) -> None:
        self.core = _core.KeyIndex("the index of table 'item'")

    def find(self, keys: np.ndarray) -> list[int]:
        slots = np.full(len(keys), -7)
        self.core.find(keys.ctypes.data, len(keys), slots.ctypes.data)
        return slots.tolist()

    def find_or_insert(self, keys: np.ndarray, first_free: int) -> tuple[list[int], list[int]]:
        slots, new = np.full(len(keys), -7), np.full(len(keys), -7)
        count = self.core.find_or_insert(
            keys.ctypes.data, len(keys), slots.ctypes.data, first_free, new.ctypes.data
        )
        return slots.tolist(), new[:count].tolist()

    def insert(self, keys: np.ndarray, slots: np.ndarray) -> None:
        self.core.insert(keys.ctypes.data, len(keys), slots.ctypes.data)

    def update(self, keys: np.ndarray, slots: np.ndarray) -> int:
        return self.core.update(keys.ctypes.data, len(keys), slots.ctypes.data)

    def erase(self, keys: np.ndarray) -> list[int]:
        slots = np.full(len(keys), -7)
        count = self.core.erase(keys.ctypes.data, len(keys), slots.ctypes.data)
        assert count == np.count_nonzero(slots >= 0)
        return slots.tolist()

    def items(self) -> list[tuple[int, int]]:
        keys, slots = np.full(len(self.core), -7), np.full(len(self.core), -7)
        self.core.items(keys.ctypes.data, slots.ctypes.data)
        return list(zip(keys.tolist(), slots.tolist(), strict=True))


@settings(deadline=None)
@given(operations)
def test_agrees_with_a_dict(steps: list[tuple[str, list[int]]]) -> None:
    index, oracle, free = Index(), {}, 0
    for operation, ids in steps:
        keys = np.array(ids, dtype=np.int64)
        if operation == "find":
            assert index.find(keys) == [oracle.get(key, -1) for key in ids]
        elif operation == "find_or_insert":
            slots, new = index.find_or_insert(keys, free)
            expected_new = []
            for position, key in enumerate(ids):
                if key not in oracle:
                    oracle[key] = free
                    free += 1
                    expected_new.append(position)
            assert (slots, new) == ([oracle[key] for key in ids], expected_new)
        elif operation == "update":
            slots = np.arange(free, free + len(ids))
            free += len(ids)
            present = [(key, slot) for key, slot in zip(ids, slots.tolist(), strict=True)]  # type: ignore[attr-defined]
            present = [(key, slot) for key, slot in present if key in oracle]
            assert index.update(keys, slots) == len(present)
            oracle.update(present)
        elif operation == "erase":
            assert index.erase(keys) == [oracle.pop(key, -1) for key in ids]
        elif operation == "insert":
            slots = np.arange(free, free + len(ids))
            if len(set(ids)) == len(ids) and not oracle.keys() & set(ids):
                index.insert(keys, slots)
                oracle.update(zip(ids, slots.tolist(), strict=True))  # type: ignore[attr-defined]
                free += len(ids)
            else:
                with pytest.raises(ValueError, match="table 'item': key -?[0-9]+ has slot"):
                    index.insert(keys, slots)
        else:
            index.core.clear()
            oracle.clear()
        assert len(index.core) == len(oracle)
        assert index.items() == sorted(oracle.items())


@pytest.mark.parametrize("seed", range(3))
def test_grows_through_many_splits(seed: int) -> None:
    random = np.random.default_rng(seed)
    index = Index()
    keys = random.permutation(np.unique(random.integers(INT64.min, INT64.max, 400_000)))
    for begin in range(0, len(keys), 8192):
        batch = keys[begin : begin + 8192]
        slots, new = index.find_or_insert(batch, begin)
        assert slots == list(range(begin, begin + len(batch)))
        assert new == list(range(len(batch)))
    assert index.find(keys) == list(range(len(keys)))
    assert set(index.find(keys ^ 1)) - set(range(len(keys))) == {-1}
    gone = keys[::3].copy()
    assert index.erase(gone) == list(range(0, len(keys), 3))
    assert index.find(gone) == [-1] * len(gone)
    slots, _ = index.find_or_insert(keys, len(keys))
    assert slots[1::3] == list(range(1, len(keys), 3))
    assert slots[::3] == list(range(len(keys), len(keys) + len(gone)))


def test_slots_end_where_32_bits_do() -> None:
    index = Index()
    limit = _core.KeyIndex.SLOT_LIMIT
    with pytest.raises(ValueError, match=f"table 'item': slot {limit} for key 3"):
        index.find_or_insert(np.array([1, 2, 3]), limit - 2)
    assert index.find(np.array([1, 2, 3])) == [-1, -1, -1]
    assert index.find_or_insert(np.array([1, 2]), limit - 2) == ([limit - 2, limit - 1], [0, 1])


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), max_size=300))
def test_ids_are_grouped_as_they_first_appear(ids: list[int]) -> None:
    given_ids = torch.tensor(ids, dtype=torch.int64)
    distinct, inverse = torch.empty_like(given_ids), torch.empty_like(given_ids)
    addresses = distinct.data_ptr(), inverse.data_ptr()
    count = _core.group_ids(given_ids.data_ptr(), len(ids), *addresses)
    assert distinct[:count].tolist() == list(dict.fromkeys(ids))
    assert torch.equal(distinct[inverse], given_ids)


@pytest.mark.parametrize("step", [1, 4096, 2**32, 2**40])
def test_ids_in_even_steps_are_grouped_quickly(step: int) -> None:
    ids = torch.arange(100_000) * step  # which take an hour where they meet in one place
    distinct, inverse = torch.empty_like(ids), torch.empty_like(ids)
    count = _core.group_ids(ids.data_ptr(), len(ids), distinct.data_ptr(), inverse.data_ptr())
    assert count == len(ids) and torch.equal(distinct, ids)
