"""Ids that are checked on the device."""

import pytest
import torch
from devices import DEVICE

from hotbed.errors import InputError
from hotbed.ops.gpu.ids import GOOD, Array, check_arrays, slots_of
from hotbed.ops.gpu.rows import NO_SLOT

NEVER = 2**62


def check(ids, rows):
    apply = torch.ones(1, dtype=torch.int32, device=DEVICE)
    first_bad = torch.full((1,), NEVER, device=DEVICE)
    slots = slots_of(ids.to(DEVICE), rows, apply, first_bad)
    return slots.tolist(), apply.item(), first_bad.item()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", [0, 1, 511, 1500])
def test_good_ids_are_their_slots(dtype, n):
    ids = torch.randint(0, 1000, (n,), dtype=dtype)
    assert check(ids, 1000) == (ids.tolist(), 1, NEVER)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 1000, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("at", [0, 700, 1499])
def test_the_first_bad_id_is_told(dtype, bad, at):
    ids = torch.randint(0, 1000, (1500,), dtype=dtype)
    ids[[at, 1499]] = bad
    slots, apply, first_bad = check(ids, 1000)
    assert (apply, first_bad) == (0, at)
    expected = [NO_SLOT if i in (at, 1499) else slot for i, slot in enumerate(ids.tolist())]
    assert slots == expected


def test_ids_of_64_bits():
    ids = torch.tensor([2**40, 2**40 - 1, 2**63 - 1])
    assert check(ids, 2**40) == ([NO_SLOT, 2**40 - 1, NO_SLOT], 0, 0)


def test_refuses():
    with pytest.raises(InputError, match="ids is torch.int16"):
        check(torch.zeros(3, dtype=torch.int16), 10)
    with pytest.raises(InputError, match="ids is torch.int64.*stride"):
        check(torch.zeros(6, dtype=torch.int64, device=DEVICE)[::2], 10)


def checked(*arrays):
    given = [(kind, torch.tensor(array, dtype=dtype).to(DEVICE), limit)
             for kind, array, dtype, limit in arrays]  # fmt: skip
    results, told, good = check_arrays(given)
    assert good.item() == told[0].item()
    return [result.tolist() for result in results], told.tolist()


IDS, OFFSETS, SLOTS = Array.IDS, Array.OFFSETS, Array.SLOTS
WIDE, NARROW = torch.int64, torch.int32


def test_all_inputs_of_a_batch_at_once():
    arrays = [
        (IDS, [5, 0, 9], WIDE, 10),
        (IDS, [1] * 600, NARROW, 2),
        (OFFSETS, [0, 0, 3], WIDE, 3),
        (SLOTS, [-1, 7], WIDE, 8),
        (IDS, [], WIDE, 10),
        (OFFSETS, [0], WIDE, 0),
    ]
    results, told = checked(*arrays)
    assert told == [1] + [GOOD] * 6
    assert results == [[5, 0, 9], [1] * 600, [0, 0, 3], [NO_SLOT, 7], [], [0]]


def test_each_array_tells_of_its_first_fault():
    long = [0] * 700
    long[650] = 3
    arrays = [
        (IDS, [5, 10, -1], WIDE, 10),
        (IDS, long, NARROW, 3),
        (IDS, [0], WIDE, 1),
        (OFFSETS, [1, 2, 3], WIDE, 3),
        (OFFSETS, [0, 9, 3], WIDE, 3),
        (OFFSETS, [0, 2], WIDE, 3),
        (OFFSETS, [0, -4, 3], WIDE, 3),
        (SLOTS, [8, -2, -1], WIDE, 8),
    ]
    results, told = checked(*arrays)
    assert told == [0, 1, 650, GOOD, 0, 2, 1, 1, 0]
    assert results[0] == [5, NO_SLOT, NO_SLOT] and results[1][650] == NO_SLOT
    # Whatever reads by them stays within the positions.
    assert results[3:7] == [[1, 2, 3], [0, 3, 3], [0, 2], [0, 0, 3]]
    assert results[7] == [NO_SLOT] * 3


def test_arrays_of_other_kinds_are_refused():
    with pytest.raises(InputError, match="offsets are torch.int32"):
        check_arrays([(OFFSETS, torch.zeros(3, dtype=NARROW, device=DEVICE), 3)])
