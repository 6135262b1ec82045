"""`hotbed.erase`: ids that go from all tables of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_in import PLACES, storage_of
from torch import Tensor, nn

import hotbed as hb

pytestmark = pytest.mark.filterwarnings("default:The budget holds:UserWarning")


def train(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> None:
    model(batch).sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("ssd", "three")])
def test_a_person_goes_from_both_parts_of_wide_and_deep(tmp_path: Path, place: str) -> None:
    tables = ["user", hb.Table("item", 16, 50)]
    model = hb.models.WideDeep(tables, num_dense=2, storage=storage_of(place, tmp_path), seed=1)
    embeddings = model.embeddings
    first = {name: embeddings.lookup(name, [7, 8]) for name in embeddings.tables}
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.5)
    batch = {
        "dense": torch.ones(3, 2),
        "user": torch.tensor([7, 8, -9]),
        "item": torch.tensor([7, 8, 9]),
    }
    for _ in range(2):
        train(model, optimizer, batch)
    after = {name: embeddings.lookup(name, [7, 8]) for name in embeddings.tables}
    assert hb.erase(model, {"user": [7, 7], "item": torch.tensor([7])}) == {
        "embeddings.user": 1,
        "embeddings.item": 1,
        "embeddings.user.wide": 1,
        "embeddings.item.wide": 1,
    }
    for name in embeddings.tables:
        assert embeddings.contains(name, [7, 8]).tolist() == ["item" in name, True]
        assert not torch.equal(after[name][0], first[name][0])
        assert torch.equal(
            embeddings.lookup(name, [7, 8]), torch.stack([first[name][0], after[name][1]])
        )
    train(model, optimizer, batch)
    assert hb.erase(model, {"user": []}) == {}
    assert hb.erase(model, {"user": [10**12]}) == {"embeddings.user": 0, "embeddings.user.wide": 0}


class Shop(nn.Module):
    """Two collections, one of which says what goes into it, and single layers."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.embeddings = hb.EmbeddingCollection(
            [hb.Table("user", 2), hb.Table("item", 2, 9)],
            {"user": "user", "friends": "user", "item": "item"},
        )
        self.query = hb.Embedding(None, 2)
        self.same = self.query
        self.title = hb.EmbeddingBag(5, 2)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = hb.EmbeddingCollection([hb.Table("user low", 2, 10), hb.Table("word", 2)])

    def embedding_inputs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"user low": batch["user"] % 10, "word": batch["word"]}


def test_every_table_that_a_feature_goes_to() -> None:
    model = Shop()
    model.embeddings.assign("user", [13, 14, 15], torch.ones(3, 2))
    model.part.own.assign("word", [13], torch.ones(1, 2))
    model.part.own.assign("user low", [3, 4], torch.ones(2, 2))
    model.query(torch.tensor([13, 14]))
    user = torch.tensor([13])
    gone = hb.erase(model, {"user": user, "friends": hb.Jagged.from_lists([[14, 13], []])})
    assert gone == {"embeddings.user": 2, "part.own.user low": 1}
    assert model.embeddings.rows("user").ids.tolist() == [15]
    assert model.part.own.lookup("user low", [3, 4])[:, 0].ne(1).tolist() == [True, False]
    assert hb.erase(model, {"word": user, "query": user, "title": [[1, 2]]}) == {
        "part.own.word": 1,
        "query.weight": 1,
        "title.weight": 2,
    }
    assert model.query.contains([13, 14]).tolist() == [False, True]
    assert model.part.own.count("word") == 0


def test_what_is_refused_has_erased_nothing() -> None:
    model = Shop()
    ids = torch.tensor([1, 2])
    model.embeddings.assign("user", ids, torch.ones(2, 2))
    known = "'friends', 'item', 'query', 'title', 'user', 'word'"
    for given, error, says in (
        ({"user": ids, "usre": ids}, hb.InputError, f"no feature 'usre'; it has {known}"),
        ({"user": ids, "user low": ids}, hb.InputError, "no feature 'user low'"),
        ({"user": ids, "item": [9]}, hb.IdError, r"'item': id 9 is outside \[0, 9\)"),
        ({"user": ids, "item": [0.5]}, hb.InputError, "Feature 'item'"),
        (["user"], hb.InputError, "dict feature → ids, got list"),
        (ids, hb.InputError, "dict feature → ids, got Tensor"),
    ):
        with pytest.raises(error, match=says):
            hb.erase(model, given)
    model.title(torch.tensor([[1]])).sum().backward()
    with pytest.raises(hb.TableError, match="cannot be erased while a gradient waits"):
        hb.erase(model, {"user": ids, "title": [1]})
    assert model.embeddings.count("user") == 2
    assert hb.erase(model, {"item": [8]}) == {"embeddings.item": 1}
    with pytest.raises(hb.TableError, match="no tables"):
        hb.erase(nn.Linear(2, 2), {"user": ids})


def test_single_layers_have_the_same() -> None:
    layer = hb.Embedding(None, 2)
    vectors = layer([5, 6, 5])
    assert layer.count() == 2 and layer.contains([6, 7]).tolist() == [True, False]
    assert torch.equal(layer.lookup([5, 6], missing="error"), vectors[:2])
    with pytest.raises(hb.IdError, match="1 of 1 ids have no row, such as 7"):
        layer.lookup([7], missing="error")
    with pytest.raises(hb.InputError, match="missing must be 'initial' or 'error', got 'fail'"):
        layer.lookup([7], missing="fail")
    assert layer.lookup([7]).shape == (1, 2) and layer.count() == 2
    assert layer.erase([5, 7]) == 1 and layer.count() == 1
    bag = hb.EmbeddingBag(4, 2)
    before = bag.weight.detach().clone()
    optimizer = hb.optim.SGD(bag.parameters(), lr=0.5)
    bag([[0, 1]]).sum().backward()
    optimizer.step()
    with pytest.raises(hb.TableError, match="a gradient waits"):
        bag.erase([0])
    optimizer.zero_grad()
    assert bag.contains([-1, 0, 3, 4]).tolist() == [False, True, True, False]
    assert bag.erase([0]) == 1
    changed = (bag.weight.detach() != before).any(1).tolist()
    assert changed == [False, True, False, False]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(hb.TableError, match="model must be a torch.nn.Module, got NoneType"):
        hb.erase(None, {"user": [1]})
