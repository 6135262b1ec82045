"""Tables of one module that lie in different places are refused, when it is put together and in a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from devices import DEVICE
from placed import to_device
from torch import nn

import hotbed as hb
from hotbed.errors import TableError


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
