"""The transposed index against its definition."""

import device_batches as batches
import pytest
import torch
from devices import DEVICE
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import InputError
from hotbed.ops.gpu import transpose as gpu
from hotbed.ops.gpu.chunks import CHUNK
from hotbed.ops.gpu.count_sort import count_sort
from hotbed.ops.gpu.pool import FeatureSlots


def naive(features, tables):
    """For each table: its slots, rising, each with the positions that use it."""
    groups = [{} for _ in range(tables)]
    position = 0
    for feature in features:
        for slot in feature.slots.tolist():
            if slot >= 0 and slot != feature.padding_slot:
                groups[feature.table].setdefault(slot, []).append(position)
            position += 1
    return [dict(sorted(group.items())) for group in groups]


def assert_is(index, expected):
    starts = index.table_starts.tolist()
    assert starts[0] == 0 and len(starts) == len(expected) + 1
    used = starts[-1]
    begins = index.starts.tolist()
    assert begins[0] == 0
    for t, group in enumerate(expected):
        mine = range(starts[t], starts[t + 1])
        assert index.slots[mine.start : mine.stop].tolist() == list(group)
        for u, positions in zip(mine, group.values(), strict=True):
            assert index.order[begins[u] : begins[u + 1]].tolist() == positions
    chunk_slots = [-1] * -(-index.positions // CHUNK)
    for u in range(used):
        for begin in range(begins[u], begins[u + 1] - CHUNK + 1, CHUNK):
            (number,) = [p // CHUNK for p in range(begin, begin + CHUNK) if not p % CHUNK]
            assert chunk_slots[number] == -1
            chunk_slots[number] = u
    assert index.chunk_slots.tolist() == chunk_slots


@settings(max_examples=examples(40))
@given(
    rows=st.lists(st.sampled_from([1, 2, 30, 300, 5000, 2**33]), min_size=1, max_size=4),
    features=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 150), st.floats(0, 1)), min_size=1, max_size=5
    ),
    padding=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_is_what_it_is_defined_to_be(rows, features, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for table, count, hot in features:
        table %= len(rows)
        slots = torch.randint(0, rows[table], (count,), generator=generator)
        slots[torch.rand(count, generator=generator) < hot] = rows[table] // 2
        if padding:
            slots[torch.rand(count, generator=generator) < 0.3] = -1
        extra = {"padding_slot": rows[table] // 2} if padding and seed % 2 else {}
        made.append(FeatureSlots(table=table, slots=slots.to(DEVICE), **extra))
    index = gpu.transpose(made, rows)
    assert_is(index, naive(made, len(rows)))
    assert index.table_positions == tuple(
        sum(f.positions for f in made if f.table == t) for t in range(len(rows))
    )


@pytest.mark.parametrize("total", [1, 3, 100, 511])
@pytest.mark.parametrize("n", [1, 63, 512, 1500])
def test_counting_is_a_stable_sort(total, n):
    keys = torch.randint(0, total + 1, (n,), dtype=torch.int32, device=DEVICE)
    ordered, order = count_sort(keys)
    expected, expected_order = torch.sort(keys, stable=True)
    assert torch.equal(ordered, expected)
    assert torch.equal(order, expected_order)


@pytest.mark.parametrize("before", [0, 1, 31, 32, 33])
@pytest.mark.parametrize(("uses", "behind"), [(31, 1), (32, 0), (32, 31), (33, 0), (64, 0)])
def test_chunks_at_either_end_of_the_order(before, uses, behind):
    """The last chunk may have the number n // CHUNK."""
    slots = torch.arange(3).repeat_interleave(torch.tensor([before, uses, behind]))
    feature = FeatureSlots(table=0, slots=slots.to(DEVICE))
    assert_is(gpu.transpose([feature], [3]), naive([feature], 1))


@pytest.mark.parametrize("rows", [[100, 7], [600, 700]])
def test_all_padding(rows):
    slots = torch.full((70,), -1, device=DEVICE)
    slots[::2] = batches.NO_SLOT
    feature = FeatureSlots(table=1, slots=slots)
    index = gpu.transpose([feature], rows)
    assert index.table_starts.tolist() == [0, 0, 0]
    assert index.starts[0].item() == 0
    assert index.chunk_slots.tolist() == [-1, -1, -1]


def test_no_positions():
    feature = FeatureSlots(table=0, slots=torch.zeros(0, dtype=torch.int64, device=DEVICE))
    index = gpu.transpose([feature], [10, 20])
    assert index.positions == 0 and index.table_starts.tolist() == [0, 0, 0]
    assert index.starts.tolist() == [0]


def test_an_index_of_the_host_is_taken_as_it_is():
    """Slots in order of first appearance, as the core has them."""
    features = [
        FeatureSlots(table=0, slots=torch.randint(0, 40, (90,)).to(DEVICE)),
        FeatureSlots(table=1, slots=torch.full((80,), 3, device=DEVICE)),
    ]
    groups = naive(features, 2)
    groups[0] = dict(sorted(groups[0].items(), key=lambda item: item[1][0]))
    slots = [torch.tensor(list(group)) for group in groups]
    starts = [
        torch.tensor([0, *map(len, group.values())]).cumsum(0).to(torch.int32) for group in groups
    ]
    order = [torch.tensor(sum(group.values(), []), dtype=torch.int32) for group in groups]
    index = gpu.on_device(slots, starts, order, DEVICE)
    assert_is(index, groups)
    assert index.table_positions == (90, 80)
    assert (index.chunk_slots >= 0).sum() >= 1


def test_refuses_too_many_slots():
    feature = FeatureSlots(table=0, slots=torch.zeros(1, dtype=torch.int64, device=DEVICE))
    with pytest.raises(InputError, match="Split the batch"):
        gpu.transpose([feature], [2**62])
