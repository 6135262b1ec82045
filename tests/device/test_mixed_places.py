"""Tables of one module that lie in different places are refused, when it is put together and in a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device.placed import tables_of, to_device, to_host
from devices import DEVICE
from torch import nn

import hotbed as hb
from hotbed import _core
from hotbed.errors import TableError
from hotbed.table.locks import alone


def _layers() -> list[nn.Module]:
    return [hb.Embedding(10, 4), hb.EmbeddingBag(10, 4, mode="sum")]


INPUTS = [torch.arange(3), torch.arange(6).view(3, 2)]


@pytest.mark.parametrize("moved", [0, 1])
def test_layers_in_different_places_make_no_collection(moved: int) -> None:
    layers = _layers()
    to_device(layers[moved])
    with pytest.raises(TableError, match="'[01]' and '[01]'.*different places: .* and "):
        hb.EmbeddingCollection.from_layers(layers)


@pytest.mark.parametrize("moved", [0, 1])
@pytest.mark.parametrize("train", [True, False])
def test_a_layer_that_is_moved_alone_is_refused_in_the_next_call(moved: int, train: bool) -> None:
    layers = _layers()
    collection = hb.EmbeddingCollection.from_layers(layers)
    expected = [v.detach().clone() for v in collection(INPUTS)]
    to_device(layers[moved])
    collection.train(train)
    there = [ids.to(DEVICE) for ids in INPUTS]
    for inputs in (INPUTS, there, [INPUTS[0], there[1]], [there[0], INPUTS[1]]):
        with pytest.raises((TableError, hb.InputError), match="different places|lie"):
            collection(inputs)
    to_device(layers[1 - moved])
    found = collection(there)
    assert all(torch.allclose(a.cpu(), b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("move", [to_device, lambda layer: layer])
def test_layers_in_one_place_serve(move: Callable[[nn.Module], nn.Module]) -> None:
    layers = [move(layer) for layer in _layers()]
    collection = hb.EmbeddingCollection.from_layers(layers)
    ids = [x.to(collection.table("0").device) for x in INPUTS]
    assert [tuple(v.shape) for v in collection(ids)] == [(3, 4), (3, 4)]


@pytest.mark.parametrize("there_first", [False, True])
def test_a_lookup_that_waits_for_a_move_finds_the_rows_where_they_are_then(
    there_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = hb.EmbeddingCollection([hb.Table("a", 4, 9), hb.Table("b", 4, 9)], seed=1)
    batch = {"a": torch.arange(9), "b": torch.arange(9)}
    expected = {name: module.rows(name).values.cpu() for name in batch}
    if there_first:
        to_device(module)
    found: list[dict[str, torch.Tensor]] = []
    asks = threading.Event()

    def of_forward(*arguments: Any) -> Any:
        asks.set()
        return _core.Hold.of_forward(*arguments)

    announced = SimpleNamespace(Hold=SimpleNamespace(of_forward=of_forward))
    monkeypatch.setattr("hotbed.group.lookup._core", announced)

    def look_up() -> None:
        with torch.no_grad():
            found.append({name: v.cpu() for name, v in module(batch).items()})

    reader = threading.Thread(target=look_up)
    with alone(tables_of(module)):
        reader.start()
        assert asks.wait(60)
        (to_host if there_first else to_device)(module)
        for name in batch:
            module.assign(name, torch.tensor([3]), torch.full((1, 4), 7.0))
            expected[name][3] = 7.0
    reader.join(60)
    assert not reader.is_alive() and len(found) == 1
    for name, vectors in found[0].items():
        assert torch.equal(vectors, expected[name])
