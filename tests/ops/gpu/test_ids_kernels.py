"""Ids that are checked on the device."""

import pytest
import torch
from devices import DEVICE

from hotbed.errors import InputError
from hotbed.ops.gpu.ids import slots_of
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
        check(torch.zeros(6, dtype=torch.int64)[::2], 10)
