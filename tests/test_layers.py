"""`EmbeddingCollection.from_layers`: stock layers served by one lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_twins import dense_grad

import hotbed as hb

ids = torch.tensor


def stock() -> list[nn.Module]:
    return [
        nn.Embedding(10, 4, padding_idx=3),
        nn.EmbeddingBag(8, 3, mode="sum"),
        nn.EmbeddingBag(8, 5, mode="mean", padding_idx=-1, dtype=torch.float64),
        nn.EmbeddingBag(6, 2, mode="max"),
    ]


def inputs() -> list[torch.Tensor]:
    return [torch.randint(0, n, (5, 2)) for n in (10, 8, 8, 6)]


def test_a_list_in_a_list_out() -> None:
    layers = stock()
    collection = hb.EmbeddingCollection.from_layers(layers)
    given = inputs()
    outputs = collection(given)
    assert isinstance(outputs, list)
    gradients = []
    for layer, input, out in zip(layers, given, outputs, strict=True):
        want = layer(input)
        torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-7)
        gradients.append(torch.randn_like(want))
        want.backward(gradients[-1])
    torch.autograd.backward(outputs, gradients)
    for layer, parameter in zip(layers, collection.parameters(), strict=True):
        torch.testing.assert_close(dense_grad(parameter), layer.weight.grad)
        assert torch.equal(parameter, layer.weight)
        assert parameter.data_ptr() != layer.weight.data_ptr()


def test_names_make_it_a_dict() -> None:
    names = ["a", "b", "c", "d"]
    collection = hb.EmbeddingCollection.from_layers(stock(), names)
    outputs = collection(dict(zip(names, inputs(), strict=True)))
    assert list(outputs) == names and list(collection.tables) == names
    assert [n for n, _ in collection.named_parameters()] == names


def test_hotbed_layers_are_shared() -> None:
    single, bag = hb.Embedding(None, 4), hb.EmbeddingBag(9, 3, mode="mean")
    collection = hb.EmbeddingCollection.from_layers([single, bag, nn.Embedding(5, 2)])
    assert collection.parameter("0") is single.weight and collection.parameter("1") is bag.weight
    x = ids([5, 6])
    out = collection([x, x[:, None], ids([0, 1])])
    assert torch.equal(out[0], single(x)) and torch.equal(out[1], bag(x[:, None]))
    assert collection.count("0") == 2
    with pytest.raises(hb.IdError, match="Table '1', feature '1', sample 0: id 9"):
        collection([x, ids([[9], [1]]), ids([0, 1])])


def test_a_shared_table_goes_by_its_new_name_everywhere(
    pretend_memory: Callable[[int], None],
) -> None:
    layer = hb.Embedding(None, 1024)
    with pytest.raises(hb.TableError, match="not Linear"):
        hb.EmbeddingCollection.from_layers([layer, nn.Linear(2, 2)], ["user", "item"])
    assert layer._live.name == "embedding"  # what was refused renames nothing
    collection = hb.EmbeddingCollection.from_layers([layer], ["user"])
    assert list(collection.tables) == ["user"] and collection.tables["user"].name == "user"
    optimizer = hb.optim.Adam(collection.parameters())
    pretend_memory(1 << 20)
    for call in (
        lambda: collection({"user": torch.arange(20_000)}),
        lambda: layer(torch.arange(20_000)),
    ):
        with pytest.raises(hb.OutOfMemory, match="Table 'user', weights needs"):
            call()
    pretend_memory(0)
    layer(ids([7])).sum().backward()
    layer.weight.grad._values()[0, 3] = torch.nan
    with pytest.raises(hb.NotFiniteError, match="Table 'user', id 7, column 3"):
        optimizer.step()
    # Two features on one table: the table is called as the first of them.
    static = hb.Embedding(9, 2)
    collection = hb.EmbeddingCollection.from_layers([static, static], ["a", "b"])
    with pytest.raises(hb.IdError, match="Table 'a', feature 'b', sample 1: id 9"):
        collection({"a": ids([0, 1]), "b": ids([1, 9])})
    with pytest.raises(hb.IdError, match="Table 'a': id 11"):
        collection.lookup("a", ids([11]))


def test_a_layer_twice_is_one_table() -> None:
    layer = nn.EmbeddingBag(6, 3, mode="sum")
    tied = nn.EmbeddingBag(6, 3, mode="sum")
    tied.weight = layer.weight
    collection = hb.EmbeddingCollection.from_layers([layer, tied, layer])
    assert len(list(collection.parameters())) == 1 and collection.features["2"] == "0"
    given = [torch.randint(0, 6, (4, 2)) for _ in range(3)]
    torch.cat(collection(given)).sum().backward()
    sum(layer(x).sum() for x in given).backward()
    torch.testing.assert_close(dense_grad(collection.parameter("0")), layer.weight.grad)
    other = nn.EmbeddingBag(6, 3, mode="max")
    other.weight = layer.weight
    with pytest.raises(hb.TableError, match="'0' shares its weight with a layer of another mode"):
        hb.EmbeddingCollection.from_layers([layer, other])


def test_frozen_layers_stay_frozen() -> None:
    layer = nn.Embedding.from_pretrained(torch.randn(4, 3))
    collection = hb.EmbeddingCollection.from_layers([layer])
    assert not collection.parameter("0").requires_grad


def hooked() -> nn.Module:
    layer = nn.Embedding(2, 2)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("layers", "names", "says"),
    [
        ([], None, "at least one layer"),
        ([nn.Linear(2, 2)], None, "not Linear"),
        ({"a": nn.Embedding(2, 2)}, None, "takes a list of layers; pass their names as names="),
        (nn.ModuleDict({"a": nn.Embedding(2, 2)}), None, "takes a list of layers"),
        ([nn.Embedding(2, 2, device="meta")], ["a"], "layer 'a' is on the meta device"),
        ([Scaled(2, 2)], None, "Scaled: it has a forward of its own"),
        ([nn.Embedding(2, 2, max_norm=1.0)], None, "max_norm=1.0 cannot"),
        ([nn.EmbeddingBag(2, 2, scale_grad_by_freq=True)], None, "scale_grad_by_freq"),
        ([nn.Embedding(2, 2)], ["a", "b"], "one distinct name a layer"),
        ([nn.Embedding(2, 2), nn.Embedding(2, 2)], ["a", "a"], "one distinct name a layer"),
        ([nn.Embedding(2, 2), nn.Embedding(2, 2)], ["a", "a.ids"], "part of table 'a'"),
        ([nn.Embedding(2, 2)], [7], "must be a non-empty string, not 7"),
        ([hooked()], None, "has hooks or a parametrization"),
        ([nn.utils.parametrizations.orthogonal(nn.Embedding(2, 2))], None, "or a parametrization"),
    ],
)
def test_what_cannot_be_served_is_refused(layers: Any, names: Any, says: str) -> None:
    with pytest.raises(hb.TableError, match=says):
        hb.EmbeddingCollection.from_layers(layers, names)


def test_wrong_calls_are_refused() -> None:
    collection = hb.EmbeddingCollection.from_layers(stock())
    with pytest.raises(hb.InputError, match="3 inputs for 4 layers"):
        collection(inputs()[:3])
    with pytest.raises(hb.InputError, match="Give a list of inputs"):
        collection(dict(enumerate(inputs())))
    named = hb.EmbeddingCollection.from_layers(stock()[:1], ["a"])
    with pytest.raises(hb.InputError, match="Give a dict"):
        named([ids([1])])
