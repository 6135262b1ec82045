"""Indices and measures of retrieval given what no model should return."""

import pytest
import torch

import hotbed as hb
from hotbed.models import ItemIndex, TwoTower
from hotbed.nn import FrequencyEstimate, in_batch_logits, in_batch_softmax
from hotbed.train import evaluate_retrieval

NAN = float("nan")


@pytest.fixture
def model():
    return TwoTower(["user", "item"], 4, hidden=[5], out=4, seed=0)


@pytest.fixture
def batch():
    return {
        "user": torch.tensor([1, 2]),
        "item": torch.tensor([10, 20]),
        "label": torch.ones(2),
    }


@pytest.fixture
def index(model):
    return ItemIndex.of(model, [{"item": torch.tensor([10, 20, 30])}])


@pytest.mark.parametrize("sampled", [None, 5])
def test_a_diverged_model_finds_nothing(sampled, model, batch, index):
    with torch.no_grad():
        model.user_tower.layers[0].weight.fill_(NAN)
    quality = evaluate_retrieval(model, [batch], index, k=[1], sampled=sampled)
    assert quality.recall == quality.ndcg == {1: 0.0} and quality.samples == 2


def test_no_positive_sample_is_no_number(model, batch, index):
    quality = evaluate_retrieval(model, [batch | {"label": torch.zeros(2)}], index, k=[1])
    assert quality.samples == 0 and quality.recall[1] != quality.recall[1]


def test_a_refused_batch_leaves_the_mode(model, batch, index):
    for change in ({"item": torch.tensor([10, 21])}, {"label": torch.ones(2, 1)}):
        try:
            evaluate_retrieval(model, [batch | change], index)
        except hb.InputError:
            assert model.training
        else:
            raise AssertionError("not refused")


def test_measures_refuse(model, batch, index):
    for k in (3, [], [0], [1.5], "1", torch.tensor([1])):
        with pytest.raises(hb.InputError, match="Pass positive numbers, k in a list"):
            evaluate_retrieval(model, [batch], index, k=k)
    for sampled in (0, 1.5, True):
        with pytest.raises(hb.InputError, match="Pass positive numbers, k in a list"):
            evaluate_retrieval(model, [batch], index, sampled=sampled)
    with pytest.raises(hb.InputError, match="in the index, which is empty"):
        evaluate_retrieval(model, [batch], ItemIndex(index.ids[:0], index.vectors[:0]))
    with pytest.raises(hb.InputError, match="Feature 'item'"):
        evaluate_retrieval(model, [{"user": torch.tensor([1])}], index)
    with pytest.raises(hb.InputError, match=r"Pass \(B, 3\) and \(B,\)"):
        evaluate_retrieval(model, [batch], ItemIndex(index.ids, torch.ones(3, 3)))
    half = ItemIndex(index.ids, index.vectors.half())
    assert evaluate_retrieval(model, [batch], half, k=[3]).recall == {3: 1.0}


def test_indices_refuse(model):
    ids = torch.tensor([5, 6])
    for vectors in ([[1.0, NAN], [0.0, 1.0]], [[float("inf"), 1.0], [0.0, 1.0]]):
        with pytest.raises(hb.InputError, match="the vector of item 5 has NaN or infinity"):
            ItemIndex(ids, torch.tensor(vectors))
    with pytest.raises(hb.InputError, match="vectors are torch.int64"):
        ItemIndex(ids, torch.ones(2, 2).long())
    with pytest.raises(hb.InputError, match="must be int64 or int32, got float32"):
        ItemIndex(ids.float(), torch.ones(2, 2))
    for feature in (torch.tensor([[1], [2]]), hb.Jagged.from_lists([[1], [2]])):
        with pytest.raises(hb.InputError, match="feature 'item' is .* It is the item's id"):
            ItemIndex.of(model, [{"item": feature}])
    index = ItemIndex(ids, torch.ones(2, 2))
    for name in ("k", "block"):
        for wrong in (0, -1, 2.0, True, "3"):
            with pytest.raises(hb.InputError, match=f"search: {name} is .* Pass a positive"):
                index.search(torch.ones(1, 2), **{name: wrong})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_are_float32(dtype, tmp_path):
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], requires_grad=True)
    index = ItemIndex(torch.tensor([5, 6, 7], dtype=torch.int32), vectors.to(dtype))
    path = str(tmp_path / "a b ü").encode()
    index.save(path)
    for one in (index, ItemIndex.load(path)):
        found = one.search(torch.tensor([[1.0, 0.5]]), 5, block=2)
        assert found.ids.tolist() == [[7, 5, 6, -1, -1]] and found.ids.dtype == torch.int64
        assert found.scores[0, :3].tolist() == [1.5, 1.0, 0.5]
        assert found.scores.dtype == torch.float32 and not found.scores.requires_grad


def test_an_empty_index_finds_nothing():
    index = ItemIndex(torch.empty(0, dtype=torch.int64), torch.empty(0, 2))
    assert index.search(torch.ones(1, 2), 2).ids.tolist() == [[-1, -1]]


def test_shapes_that_would_broadcast():
    logits = in_batch_logits(torch.randn(3, 3), torch.arange(3))
    for labels in (torch.ones(3, 1), torch.ones(1), torch.ones(3, 3)):
        with pytest.raises(hb.InputError, match="in_batch_softmax: logits have shape"):
            in_batch_softmax(logits, labels)
    for probability in (torch.ones(3, 1), torch.ones(1), torch.tensor(0.5)):
        with pytest.raises(hb.InputError, match=r"probability has shape .* Pass \(3,\)"):
            in_batch_logits(torch.randn(3, 3), torch.arange(3), probability)


def test_frequencies_of_any_id_and_dtype():
    ids = torch.tensor([-1, -(2**63), 2**63 - 1])
    plain = FrequencyEstimate(8)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        other = FrequencyEstimate(8).to(dtype)
        for _ in range(3):
            assert torch.equal(other(ids), FrequencyEstimate(8)(ids))
    assert plain(ids[:0]).shape == (0,) and plain(ids.int()).isfinite().all()
    with pytest.raises(hb.InputError, match="items are torch.float32. Convert them with .long"):
        plain(torch.ones(2))
    for wrong in ({"cells": 1.5}, {"cells": True}, {"cells": "x"}, {"rate": "x"}, {"rate": NAN}):
        with pytest.raises(hb.TableError, match="Pass a positive integer and a number in"):
            FrequencyEstimate(**wrong)
