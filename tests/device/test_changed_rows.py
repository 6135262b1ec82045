"""Tables on a device name the rows that steps change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device.placed import moved, to_device
from torch import Tensor

import hotbed as hb
from hotbed.places.device.place import WholeOnDevice
from hotbed.places.tiered_device.place import TieredOnDevice


def model_in(place: str) -> hb.EmbeddingCollection:
    tables = [hb.Table("item", 4, rows=20), hb.Table("user", 4, rows=20)]
    if place == "whole":
        return to_device(hb.EmbeddingCollection(tables, seed=1))
    storage = hb.Storage(device=100_000, host="4MB")
    return to_device(hb.EmbeddingCollection(tables, seed=1, storage=storage))


@pytest.mark.parametrize("gradient", ["fused", "of one backward", "of two", "given by the user"])
@pytest.mark.parametrize("place", ["whole", "tiers"])
def test_a_step_names_the_rows_that_it_changes(
    monkeypatch: pytest.MonkeyPatch, place: str, gradient: str
) -> None:
    model = model_in(place)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1, fused=gradient == "fused")
    named: dict[str, list[int]] = {}

    def changing(
        self: Any,
        kind: str,
        *,
        ids: Callable[[], Tensor] | None = None,
        slots: Callable[[], Tensor] | None = None,
    ) -> None:
        if kind in ("step", "fused"):
            assert slots is not None and ids is None
            ids_of = [self.core.id_of(slot) if place == "tiers" else slot for slot in slots()]
            named.setdefault(self.core.name, []).extend(map(int, ids_of))

    for kind in (WholeOnDevice, TieredOnDevice):
        monkeypatch.setattr(kind, "changing", changing)
    batches = [{"item": [3, 7, 3], "user": [0, 19, 5]}, {"item": [1, 7, 2], "user": [4, 4, 4]}]
    if gradient == "fused":  # the first gradients wait for the step
        batches.insert(0, {"item": [9, 9, 9], "user": [9, 9, 9]})
    used = batches if gradient in ("of two", "fused") else batches[:1]
    before = {name: model.rows(name).values for name in model.tables}
    for batch in used:
        ids = moved({name: torch.tensor(given) for name, given in batch.items()})
        sum(v.sum() for v in model(ids).values()).backward()
        if gradient == "given by the user":
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 2
        if gradient == "fused":
            optimizer.step()
            optimizer.zero_grad()
    if gradient != "fused":
        optimizer.step()
    for name in model.tables:
        expected = sorted({i for batch in used for i in batch[name]})
        assert sorted({*named[name]}) == expected
        changed = (model.rows(name).values != before[name]).any(1).nonzero().flatten().tolist()
        assert changed == expected
