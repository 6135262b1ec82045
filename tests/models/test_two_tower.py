"""Two towers: scores, the softmax over a batch, search, and how well items are found."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.models import ItemIndex, TwoTower
from hotbed.train.retrieval import evaluate_retrieval, ranks_of_items

FEATURES = {"user": "user", "seen": "item", "item": "item", "kind": "kind"}
SIDES = {"user": ["user", "seen"], "item": ["item", "kind"]}


def made(**options):
    tables = [hb.Table(name, 4, init=hb.init.Normal(std=1.0)) for name in ("user", "item", "kind")]
    return TwoTower(tables, 4, 1, **SIDES, features=FEATURES, seed=1, hidden=[6], out=3, **options)


def batch_of(samples, draw):
    return {
        "user": torch.randint(0, 9, (samples,), generator=draw),
        "seen": hb.Jagged(
            torch.randint(0, 9, (2 * samples,), generator=draw), lengths=torch.full((samples,), 2)
        ),
        "item": torch.randint(0, 9, (samples,), generator=draw),
        "kind": torch.randint(0, 3, (samples,), generator=draw),
        "dense": torch.randn(samples, 1, generator=draw),
    }


def tower(mlp, x):
    for position, layer in enumerate(mlp.layers):
        x = layer.weight @ x + layer.bias
        x = x.clamp(min=0) if position + 1 < len(mlp.layers) else x
    return x / x.norm()


def plain_vectors(model, batch):
    rows = model.embeddings.lookup
    users, items = [], []
    for b, seen in enumerate(batch["seen"].to_lists()):
        one = slice(b, b + 1)
        bag = rows("item", torch.tensor(seen)).sum(0)
        user = torch.cat([batch["dense"][b], rows("user", batch["user"][one])[0], bag])
        item = torch.cat([rows("item", batch["item"][one])[0], rows("kind", batch["kind"][one])[0]])
        users.append(tower(model.user_tower, user))
        items.append(tower(model.item_tower, item))
    return torch.stack(users), torch.stack(items)


@given(samples=st.integers(1, 6), corrected=st.booleans(), seed=st.integers(0, 2**31))
def test_it_is_its_formula(samples, corrected, seed):
    torch.manual_seed(seed)
    model = made(temperature=0.3, is_corrected=corrected)
    batch = batch_of(samples, torch.Generator().manual_seed(seed))
    logits = model(batch)
    users, items = plain_vectors(model, batch)
    wanted = users @ items.T / 0.3
    for i, mine in enumerate(batch["item"].tolist()):
        for j, other in enumerate(batch["item"].tolist()):
            if i != j and mine == other:
                wanted[i, j] = -math.inf  # in the first batch the probability of each item is 1
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    model.eval()
    torch.testing.assert_close(model(batch), (users * items).sum(1) / 0.3, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.user_vectors(batch), users, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.item_vectors(batch), items, rtol=1e-4, atol=1e-5)


def test_the_softmax_counts_positive_samples():
    logits = torch.tensor([[1.0, 2.0, -math.inf], [0.0, 1.0, 3.0], [2.0, 1.0, 0.0]])
    labels = torch.tensor([1.0, 0.0, 2.0])
    first = math.log(math.exp(1) + math.exp(2)) - 1
    third = math.log(math.exp(2) + math.exp(1) + 1)
    loss = hb.nn.in_batch_softmax(logits, labels)
    assert float(loss) == pytest.approx((first + 2 * third) / 3, rel=1e-6)
    assert float(hb.nn.in_batch_softmax(logits, torch.zeros(3))) == 0
    assert float(hb.nn.in_batch_softmax(logits, torch.full((3,), math.nan))) == 0
    assert TwoTower.loss is hb.nn.in_batch_softmax


def test_logits_are_corrected_by_the_probability():
    scores, items = torch.zeros(2, 2), torch.tensor([1, 2])
    logits = hb.nn.in_batch_logits(scores, items, torch.tensor([0.5, 0.25]))
    torch.testing.assert_close(logits, torch.tensor([[math.log(2), math.log(4)]] * 2))
    with pytest.raises(hb.InputError, match=r"shape \(2, 2\), and items \(3,\)"):
        hb.nn.in_batch_logits(scores, torch.tensor([1, 2, 3]))


def test_frequencies_come_close_to_the_shares():
    torch.manual_seed(0)
    estimate = hb.nn.FrequencyEstimate(cells=1000, rate=0.02)
    shares = torch.tensor([0.9, 0.5, 0.1, 0.02])
    for _ in range(6000):
        there = torch.nonzero(torch.rand(4) < shares).flatten()
        estimate(there)
    estimate.eval()
    before = estimate.gap.clone()
    found = estimate(torch.arange(4))
    assert (found / shares).log().abs().max() < 0.5
    assert torch.equal(estimate.gap, before), "evaluation counts nothing"
    assert float(estimate(torch.tensor([77]))) == pytest.approx(1 / 6000)
    with pytest.raises(
        hb.TableError, match=r"rate 0. Pass a positive integer and a number in \(0, 1\]"
    ):
        hb.nn.FrequencyEstimate(rate=0)


@given(
    items=st.integers(1, 40),
    queries=st.integers(0, 5),
    k=st.integers(1, 50),
    block=st.integers(1, 17),
    seed=st.integers(0, 2**31),
)
def test_search_finds_what_sorting_finds(items, queries, k, block, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randperm(1000, generator=draw)[:items]
    index = ItemIndex(ids, torch.randn(items, 4, generator=draw))
    asked = torch.randn(queries, 4, generator=draw)
    found = index.search(asked, k, block=block)
    assert found.ids.shape == found.scores.shape == (queries, k)
    for q in range(queries):
        ranked = sorted(zip((index.vectors @ asked[q]).tolist(), ids.tolist(), strict=True))[::-1]
        wanted = [id_ for _, id_ in ranked[:k]] + [-1] * (k - items)
        assert found.ids[q].tolist() == wanted
        torch.testing.assert_close(
            found.scores[q, :items], torch.tensor([score for score, _ in ranked[:k]])
        )


def test_an_index_is_saved_and_made_of_a_model(tmp_path):
    model = made()
    draw = torch.Generator().manual_seed(3)
    batches = [batch_of(5, draw) for _ in range(4)]
    index = ItemIndex.of(model, batches)
    assert model.training
    assert sorted(index.ids.tolist()) == sorted({int(i) for b in batches for i in b["item"]})
    first = {}
    for batch in batches:
        for id_, vector in zip(batch["item"].tolist(), model.item_vectors(batch), strict=True):
            first.setdefault(id_, vector)
    for id_, vector in zip(index.ids.tolist(), index.vectors, strict=True):
        torch.testing.assert_close(vector, first[id_].detach())
    index.save(tmp_path / "items.safetensors")
    again = ItemIndex.load(tmp_path / "items.safetensors")
    assert torch.equal(again.ids, index.ids) and torch.equal(again.vectors, index.vectors)
    (tmp_path / "other").write_bytes(b"none")
    with pytest.raises(hb.InputError, match="is no index of items"):
        ItemIndex.load(tmp_path / "other")
    with pytest.raises(hb.InputError, match="there are no batches"):
        ItemIndex.of(model, [])
    with pytest.raises(hb.InputError, match="an id is there twice"):
        ItemIndex(torch.tensor([1, 1]), torch.ones(2, 3))
    with pytest.raises(hb.InputError, match=r"queries have shape \(2, 4\)"):
        index.search(torch.ones(2, 4), 1)


def test_recall_and_ndcg_are_those_of_ranks_counted_by_hand():
    model = made().eval()
    draw = torch.Generator().manual_seed(5)
    batches = [batch_of(6, draw) | {"label": torch.tensor([1.0, 0, 1, 1, 0, 1])} for _ in range(3)]
    index = ItemIndex.of(model, batches)
    ranks = []
    for batch in batches:
        users = model.user_vectors(batch).detach()
        for b in range(6):
            if batch["label"][b]:
                scores = dict(
                    zip(index.ids.tolist(), (index.vectors @ users[b]).tolist(), strict=True)
                )
                own = scores.pop(int(batch["item"][b]))
                ranks.append(sum(score >= own for score in scores.values()))
    quality = evaluate_retrieval(model, batches, index, k=(1, 3))
    assert quality.samples == len(ranks) == 12
    for k in (1, 3):
        assert quality.recall[k] == pytest.approx(sum(rank < k for rank in ranks) / 12)
        gains = [1 / math.log2(rank + 2) for rank in ranks if rank < k]
        assert quality.ndcg[k] == pytest.approx(sum(gains) / 12)
    sampled = evaluate_retrieval(model, batches, index, k=(1,), sampled=2, seed=1)
    assert sampled.samples == 12 and sampled.recall[1] >= quality.recall[1]
    assert sampled == evaluate_retrieval(model, batches, index, k=(1,), sampled=2, seed=1)
    with pytest.raises(hb.InputError, match="Item 77 is not in the index"):
        ranks_of_items(index, users[:1], torch.tensor([77]))
    with pytest.raises(hb.InputError, match="Pass positive numbers"):
        evaluate_retrieval(model, batches, index, k=(0,))


def test_vectors_that_are_all_alike_find_nothing():
    index = ItemIndex(torch.arange(10), torch.ones(10, 2))
    ranks = ranks_of_items(index, torch.ones(3, 2), torch.tensor([0, 4, 9]))
    assert ranks.tolist() == [9, 9, 9]


def test_what_it_refuses():
    with pytest.raises(
        hb.TableError, match="each feature must be of one, and there are user, other"
    ):
        TwoTower(["user", "other"])
    with pytest.raises(hb.TableError, match="temperature is 0"):
        TwoTower(["user", "item"], temperature=0)
    model = TwoTower(["user", "item"])
    with pytest.raises(hb.InputError, match="It is the item's id: pass"):
        model({"user": torch.tensor([1, 2]), "item": torch.tensor([[1, 2], [3, 4]])})


def test_it_learns_who_likes_what(tmp_path):
    torch.manual_seed(0)
    tables = [hb.Table(name, 8, init=hb.init.Normal(std=0.1)) for name in ("user", "item")]
    model = TwoTower(tables, 8, hidden=[16], out=8, seed=0)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(150):
        user = torch.randint(0, 200, (64,), generator=draw)
        item = user % 5 + 5 * torch.randint(0, 20, (64,), generator=draw)
        batches.append({"user": user, "item": item, "label": torch.ones(64)})
    for batch in batches:
        model.loss(model(batch), batch["label"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    index = ItemIndex.of(model, [{"user": torch.arange(100), "item": torch.arange(100)}])
    found = index.search(model.eval().user_vectors({"user": torch.arange(200)}), 10)
    share = (found.ids % 5 == torch.arange(200).unsqueeze(1) % 5).float().mean()
    assert share > 0.9
    hb.save(tmp_path, model, step=1)
    again = hb.checkpoint.load_model(tmp_path)
    assert torch.equal(again(batches[0]), model(batches[0]))
