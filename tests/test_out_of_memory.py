"""What does not fit in memory: bytes asked, bytes free, a remedy, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixed_tables import assert_equal_grads, grads_of

import hotbed as hb

ids = torch.tensor
MB = 1 << 20


def test_construction_beyond_memory(pretend_memory: Callable[[int], None]) -> None:
    pretend_memory(50 * MB)
    with pytest.raises(hb.OutOfMemory, match="Table 'big'.* needs 104857600 bytes") as caught:
        hb.EmbeddingCollection([hb.Table("small", 4, 10), hb.Table("big", 256, 100 * 1024)])
    assert caught.value.asked_bytes == 100 * MB and caught.value.free_bytes == 50 * MB
    assert "52428800 bytes" in str(caught.value)
    assert str(caught.value).endswith("with Storage(ssd=...) they need not all be in memory.")


def test_growth_beyond_memory_changes_nothing(pretend_memory: Callable[[int], None]) -> None:
    tables = [hb.Table("before", 4), hb.Table("user", 1024), hb.Table("after", 4)]
    collection = hb.EmbeddingCollection(tables, seed=0)

    def inputs(first: int, count: int) -> dict[str, Any]:
        values = hb.Jagged(torch.arange(first, first + count), lengths=ids([count]))
        return dict.fromkeys(collection.features, values)

    collection(inputs(0, 10))["user"].sum().backward()
    before = {name: collection.rows(name) for name in collection.tables}
    gradient = grads_of(collection)
    pretend_memory(20 * MB)
    for call in (
        lambda: collection(inputs(5, 20_000)),
        lambda: collection.assign("user", torch.arange(20_000), torch.zeros(20_000, 1024)),
    ):
        with pytest.raises(hb.OutOfMemory, match="Table 'user'") as caught:
            call()
        assert caught.value.asked_bytes > 20 * MB and caught.value.free_bytes == 20 * MB
        for name, rows in before.items():
            now = collection.rows(name)
            assert torch.equal(now.ids, rows.ids) and torch.equal(now.values, rows.values)
        assert_equal_grads(grads_of(collection), gradient)
    state = collection.state_dict()
    larger = {"user": torch.zeros(20_000, 1024), "user.ids": torch.arange(20_000)}
    with pytest.raises(RuntimeError, match="Table 'user'.* needs"):
        collection.load_state_dict({**state, **larger})
    assert collection.count("user") == 10
    # Smaller batches still go, and new ids get the slots they would have got.
    collection(inputs(5, 10))["user"].sum().backward()
    assert collection.rows("user").ids.tolist() == list(range(15))
    assert collection.table("before").ids().tolist() == list(range(15))
    pretend_memory(0)
    collection(inputs(5, 20_000))
    fresh = hb.EmbeddingCollection(tables, seed=0)
    fresh(inputs(0, 20_005))
    for name in collection.tables:
        assert torch.equal(fresh.rows(name).values, collection.rows(name).values)


@pytest.mark.parametrize(
    ("grow", "says"),
    [
        (
            lambda c: c.assign("user", torch.arange(20_000), torch.zeros(20_000, 512)),
            "weights needs",
        ),
        (lambda c: hb.optim.Adam(c.parameters()), "exp_avg needs .* such as RowwiseAdagrad"),
        (lambda c: c.lookup("user", torch.zeros(40_000).long()), "A buffer .* smaller batch"),
    ],
)
def test_every_shortage_names_a_remedy(
    pretend_memory: Callable[[int], None], grow: Callable[[Any], Any], says: str
) -> None:
    collection = hb.EmbeddingCollection([hb.Table("user", 512), hb.Table("item", 512, 5000)])
    collection.assign("user", torch.arange(8000), torch.zeros(8000, 512))
    pretend_memory(2 * MB)
    with pytest.raises(hb.OutOfMemory, match=rf"{says}") as caught:
        grow(collection)
    assert caught.value.asked_bytes > 2 * MB and caught.value.free_bytes == 2 * MB
    assert f"{caught.value.asked_bytes} bytes" in str(caught.value)
    assert "2097152 bytes (0.00 GB) are free. Use a " in str(caught.value)
    collection.eval()({"user": ids([1]), "item": ids([2])})


def test_a_buffer_makes_room_of_idle_ones(pretend_memory: Callable[[int], None]) -> None:
    layer = hb.Embedding(4, 1024)
    big = torch.zeros(40_000, dtype=torch.int64)  # 160 MB of vectors
    with torch.no_grad():
        assert layer(big).shape == (40_000, 1024)  # its block is idle now, and used again
        pretend_memory(MB)
        layer(big)
        with pytest.raises(hb.OutOfMemory, match="A buffer of this batch needs"):
            layer(torch.zeros(90_000, dtype=torch.int64))
        with pytest.raises(hb.OutOfMemory):
            layer(big)  # idle blocks were given back before giving up
