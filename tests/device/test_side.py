"""Rows of a space on a device, as records: gathered, scattered, whatever their parts are made of."""

from __future__ import annotations

import ctypes

import pytest
import torch
from devices import DEVICE

from hotbed import _core
from hotbed.errors import StorageError
from hotbed.places.tiered_device import spaces
from hotbed.places.tiered_device.spaces import Side, SpaceOnDevice, SpacesOnDevice, host_memory


def address(tensor):
    return tensor.data_ptr()


def allocate():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    "dim, dtype, widths",
    [
        (8, torch.float32, [8, 8]),
        (5, torch.bfloat16, [5, 1]),
        (4, torch.float16, []),
        (3, torch.float32, [1]),
    ],
)
@pytest.mark.parametrize("rows_at_once", [3, 100])
def test_records_are_what_planes_hold(dim, dtype, widths, rows_at_once, monkeypatch):
    monkeypatch.setattr(spaces, "_ROWS_AT_ONCE", rows_at_once)
    space = SpaceOnDevice(Side(DEVICE), dim, dtype, widths, capacity=20)
    parts = [(dim * dtype.itemsize, dtype), *((4 * w, torch.float32) for w in widths)]
    record = sum(size for size, _ in parts)
    slots = torch.randperm(20)[:10]
    records = torch.randint(0, 256, (10, record), dtype=torch.uint8)
    space.scatter(address(records), address(slots), 10)
    allocate()
    begin = 0
    for (size, kind), plane in zip(parts, [space.weights, *space.states], strict=True):
        rows = records[:, begin : begin + size].contiguous().view(kind)
        found = plane[slots.to(DEVICE)].cpu()
        assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
        begin += size
    order = torch.randperm(10)
    back = torch.zeros_like(records)
    wanted = slots[order].contiguous()
    space.gather(address(wanted), 10, address(back))
    assert torch.equal(back, records[order])


def test_ids_are_kept_for_stochastic_rounding_only():
    side = Side(DEVICE)
    assert SpaceOnDevice(side, 4, torch.float32, [4], 3).ids is None
    assert SpaceOnDevice(side, 4, torch.bfloat16, [4], 3).ids.tolist() == [0, 0, 0]


def test_a_device_without_room_is_named(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("nothing is left\nat all")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(StorageError, match="no room for the 7 rows.*Lower it.*nothing is left"):
        SpacesOnDevice(DEVICE)(4, _core.DType.f32, [], 7)


def test_memory_of_others():
    block = (ctypes.c_uint8 * 3)(1, 2, 3)
    assert host_memory(ctypes.addressof(block), 3).tolist() == [1, 2, 3]
    assert host_memory(0, 0).tolist() == []
