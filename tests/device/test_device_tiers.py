"""Tables in tiers of which the uppermost is a device: the bits of the core's tiers, and of whole tables."""

from __future__ import annotations

import functools

import pytest
import torch
from device.placed import drawn, to_device, to_host
from device.test_whole_tables import loss_of
from devices import DEVICE

import hotbed as hb
from hotbed.errors import IdError, NotFiniteError, StorageError, TableError

ROWS = 300
BUDGETS = {"SGD": 43_000, "RowwiseAdagrad": 44_000, "Adam": 54_000}
"""Of the device: what holds two batches, with states, and little more."""
BUDGET = BUDGETS["Adam"]


def tables(dtype=torch.float32):
    return [
        hb.Table("item", dim=6, rows=ROWS, combiner="mean", dtype=dtype, padding_idx=3),
        hb.Table("user", dim=6, rows=None, combiner=None, dtype=dtype, padding_idx=7),
        hb.Table("tag", dim=4, rows=ROWS, combiner="sqrtn"),
        hb.Table("word", dim=6, rows=None, dtype=dtype),
    ]


FEATURES = {"watched": "item", "browsed": "item", "user": "user", "tag": "tag", "word": "word"}


def collection(budget=BUDGET, dtype=torch.float32):
    kept = hb.Storage(device=budget, host="4MB")
    return hb.EmbeddingCollection(tables(dtype), FEATURES, seed=3, storage=kept)


def batch_of(seed, size=6):
    ids, lengths, weights = drawn(seed, size, ROWS)
    n = len(weights)
    # Far more positions of one id than make a chunk.
    hot = torch.cat([ids(size, 2), torch.full((size, 60), 5)], 1)
    return {
        "watched": hot,
        "browsed": hb.Jagged(ids(n), lengths=lengths),
        "user": ids(size, 2),
        "tag": hb.Jagged(ids(n).int(), lengths=lengths, weights=weights),
        "word": ids(size) * 10**12,
    }


def batches(count, first=0):
    return [batch_of(seed) for seed in range(first, first + count)]


def train(module, optimizer, data, look_ahead=False):
    losses = []
    loop = hb.lookahead(data, module, depth=1, horizon=4) if look_ahead else data
    for batch in loop:
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def rows_of(module):
    return {name: module.rows(name) for name in module.tables}


def assert_equal_rows(one, other, exact=True):
    for (name, a), b in zip(rows_of(one).items(), rows_of(other).values(), strict=True):
        assert torch.equal(a.ids, b.ids), name
        if exact:
            assert torch.equal(a.values.cpu(), b.values.cpu()), name
        else:
            torch.testing.assert_close(a.values.cpu(), b.values.cpu(), rtol=1e-5, atol=1e-6)


OPTIMIZERS = {
    "SGD": lambda p: hb.optim.SGD(p, lr=0.1),
    "Adam": lambda p: hb.optim.Adam(p, lr=0.01),
    "RowwiseAdagrad": lambda p: hb.optim.RowwiseAdagrad(p, lr=0.1),
}


@pytest.fixture(scope="module")
def in_large_tiers():
    """The losses, tables and optimizer of a training whose rows all fit, by the rule's name."""

    @functools.cache
    def trained(name):
        large = to_device(collection("4MB"))
        optimizer = OPTIMIZERS[name](large.parameters())
        return train(large, optimizer, batches(8)), large, optimizer

    return trained


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_rows_lie_changes_nothing(in_large_tiers, name, look_ahead):
    expected, large, its_optimizer = in_large_tiers(name)
    small = to_device(collection(BUDGETS[name]))
    optimizer = OPTIMIZERS[name](small.parameters())
    assert train(small, optimizer, batches(8), look_ahead) == expected
    stats = small.stats()
    assert stats["rows_evicted"] > 0 and stats["rows_written_back"] > 0
    assert (stats["batches_unprepared"] < stats["batches"]) == look_ahead
    assert large.stats()["rows_evicted"] == 0
    assert_equal_rows(small, large)
    one, other = (o.state_dict()["state"] for o in (optimizer, its_optimizer))
    for key, state in one.items():
        for part, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key][part])), part


@pytest.mark.parametrize("look_ahead", [False, True])
def test_tiers_on_the_device_follow_those_of_the_core(look_ahead):
    """Of hot rows the sums differ in their last bits, which SGD makes no larger."""
    budget = BUDGETS["SGD"]
    host, device = collection(budget), to_device(collection(budget))
    optimizers = [OPTIMIZERS["SGD"](m.parameters()) for m in (host, device)]
    found = train(device, optimizers[1], batches(8), look_ahead)
    expected = train(host, optimizers[0], batches(8), look_ahead)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert_equal_rows(host, device, exact=False)
    evicted = [m.stats()["rows_evicted"] for m in (host, device)]
    # With look-ahead the clock decides how many batches are known when a row is evicted.
    assert min(evicted) > 0 and (look_ahead or evicted[0] == evicted[1])


def without_hot_rows(batch):
    return {**batch, "watched": batch["watched"][:, :2]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_the_core_where_no_row_is_hot(dtype):
    data = [without_hot_rows(batch) for batch in batches(8)]
    host, device = collection(50_000, dtype), to_device(collection(50_000, dtype))
    for module, look_ahead in ((host, False), (device, True)):
        train(module, OPTIMIZERS["Adam"](module.parameters()), data, look_ahead)
    assert device.stats()["rows_evicted"] > 0
    assert_equal_rows(host, device)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_static_tables_have_the_bits_of_whole_ones(look_ahead):
    """Of hot rows too, whatever positions of other tables lie before theirs in the index."""
    static = [t for t in tables() if t.rows is not None]
    features = {f: t for f, t in FEATURES.items() if t in ("item", "tag")}
    data = [{f: batch[f] for f in features} for batch in batches(6)]
    whole = to_device(hb.EmbeddingCollection(static, features, seed=3))
    train(whole, OPTIMIZERS["Adam"](whole.parameters()), data)
    kept = hb.Storage(device=43_000, host="4MB")
    tiers = to_device(hb.EmbeddingCollection(static[::-1], features, seed=3, storage=kept))
    train(tiers, OPTIMIZERS["Adam"](tiers.parameters()), data, look_ahead)
    assert tiers.stats()["rows_evicted"] > 0
    rows = rows_of(tiers)
    for name, expected in rows_of(whole).items():
        assert torch.equal(rows[name].ids, expected.ids), name
        assert torch.equal(rows[name].values.cpu(), expected.values.cpu()), name


def test_with_an_ssd_below(tmp_path):
    kept = hb.Storage(device=BUDGET, host="8MB", ssd=tmp_path / "rows")
    small = to_device(hb.EmbeddingCollection(tables(), FEATURES, seed=3, storage=kept))
    large = to_device(collection("4MB"))
    for module, look_ahead in ((small, True), (large, False)):
        train(module, OPTIMIZERS["SGD"](module.parameters()), batches(6), look_ahead)
    small.flush()
    assert_equal_rows(small, large)


def test_evaluation_reads_and_stores_nothing():
    module = to_device(collection())
    train(module, OPTIMIZERS["Adam"](module.parameters()), batches(4))
    before = module.count(), module.stats()["rows_used"]
    rows = {name: dict(zip(r.ids.tolist(), r.values.cpu(), strict=True))
            for name, r in rows_of(module).items()}  # fmt: skip
    batch = batch_of(50)
    module.eval()
    with torch.no_grad():
        vectors = module(batch)
    assert (module.count(), module.stats()["rows_used"]) == before
    assert {v.device for v in vectors.values()} == {DEVICE}
    first = module.lookup("word", batch["word"])
    assert torch.equal(vectors["word"].cpu(), first)
    for sample, ids in enumerate(batch["user"].tolist()):
        for k, user in enumerate(ids):
            found = vectors["user"][sample, k].cpu()
            expected = torch.zeros(6) if user == 7 else rows["user"].get(user)
            if expected is not None:
                assert torch.equal(found, expected)


def test_a_gradient_of_evaluation():
    host, device = collection(), to_device(collection())
    for module in (host, device):
        optimizer = OPTIMIZERS["SGD"](module.parameters())
        train(module, optimizer, batches(2))
        module.eval()
        train(module, optimizer, [without_hot_rows(b) for b in batches(2, first=20)])
    assert_equal_rows(host, device, exact=False)


def test_accumulation_and_a_look_at_the_gradient():
    host, device = collection(80_000), to_device(collection(80_000))
    for module in (host, device):
        optimizer = OPTIMIZERS["Adam"](module.parameters())
        train(module, optimizer, batches(2))
        for batch in batches(2, first=5):
            loss_of(module, batch).backward()
        for handle in module.parameters():
            handle.grad._values().mul_(0.5)
        loss_of(module, batch_of(9)).backward()
        hb.nn.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        train(module, optimizer, batches(2, first=10))
    assert_equal_rows(host, device, exact=False)


def test_fused_steps():
    one, other = to_device(collection()), to_device(collection())
    for module, fused in ((one, False), (other, True)):
        optimizer = hb.optim.SGD(module.parameters(), lr=0.1, fused=fused)
        train(module, optimizer, batches(5), look_ahead=fused)
    assert_equal_rows(one, other)


def test_rows_come_along_when_a_module_moves():
    moving, staying = collection(), collection()
    optimizers = [OPTIMIZERS["Adam"](m.parameters()) for m in (moving, staying)]
    for first, move in ((0, None), (2, to_device), (4, to_host), (6, to_device)):
        if move is not None:
            move(moving)
        for module, optimizer in zip((moving, staying), optimizers, strict=True):
            data = [without_hot_rows(b) for b in batches(2, first)]
            train(module, optimizer, data, look_ahead=True)
    assert_equal_rows(moving, staying)


def test_state_dicts():
    module = to_device(collection())
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    train(module, optimizer, batches(3))
    other = to_device(collection("4MB"))
    fresh = OPTIMIZERS["Adam"](other.parameters())
    train(other, fresh, batches(1, first=30))
    other.load_state_dict(module.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    for m, o in ((module, optimizer), (other, fresh)):
        train(m, o, batches(2, first=3))
    assert_equal_rows(module, other)


def test_assigned_rows_are_seen_by_a_batch_that_is_ahead():
    module = to_device(collection("4MB"))
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    train(module, optimizer, batches(1))
    for k, batch in enumerate(hb.lookahead(batches(3), module)):
        ids = batch["tag"].values.long()
        if k == 1 and len(ids):
            module.assign("tag", ids, torch.full((len(ids), 4), 2.0))
            out = module(batch)["tag"]
            bag = int(batch["tag"].lengths.argmax())
            weights = batch["tag"].weights[
                batch["tag"].offsets[bag] : batch["tag"].offsets[bag + 1]
            ]
            expected = 2 * weights.sum() / weights.square().sum().sqrt()
            torch.testing.assert_close(out[bag].cpu(), expected.expand(4))
        else:
            module(batch)


def test_errors(tmp_path):
    module = collection()
    with pytest.raises(TableError, match="Storage has no device="):
        storage = hb.Storage(host="4MB", ssd=tmp_path / "rows")
        to_device(hb.EmbeddingCollection(tables(), FEATURES, storage=storage))
    to_device(module)
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    bad = batch_of(1)
    bad["watched"][2, 1] = ROWS
    with pytest.raises(IdError, match=r"feature 'watched', sample 2: id 300"):
        module(bad)
    train(module, optimizer, batches(1))
    before = rows_of(module)
    (loss_of(module, batch_of(1)) * float("nan")).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(NotFiniteError, match="its gradient had"):
        rows_of(module)
    after = {name: module.lookup(name, rows.ids) for name, rows in before.items()}
    assert all(torch.equal(before[name].values.cpu(), after[name].cpu()) for name in before)
    with pytest.raises(StorageError, match=r"Raise Storage\(device=54,000\)"):
        module({**batch_of(1, size=400)})
    loss_of(module, batch_of(2)).backward()
    with pytest.raises(TableError, match="a module was moved while a gradient was waiting"):
        to_host(module)


def test_a_frozen_table_beside_others_under_look_ahead():
    modules = collection(), to_device(collection())
    for module in modules:
        module.parameter("tag").requires_grad_(False)
        train(module, OPTIMIZERS["SGD"](module.parameters()), batches(5), look_ahead=True)
    assert_equal_rows(*modules, exact=False)
    assert len(modules[1].table("tag").stored_ids()) == 0


def test_rows_are_read_where_they_lie(monkeypatch):
    """Not by way of the device, which has no room for all."""
    module = to_device(collection())
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    train(module, optimizer, batches(3))
    expected = {name: value.cpu() for name, value in module.state_dict().items()}
    for name in module.tables:  # of which nothing can be read
        monkeypatch.setattr(module.table(name).place, "device", torch.device("meta"))
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert module.lookup("user", torch.arange(5)).device.type == "cpu"


def test_a_table_forgets_nothing_before_a_refused_step_is_told_of():
    kept = hb.Storage(device=BUDGET, host="4MB")
    module = to_device(hb.EmbeddingCollection([hb.Table("user", dim=6)], storage=kept))
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    (module({"user": torch.arange(5)})["user"].sum() * float("nan")).backward()
    optimizer.step()
    live = module.table("user")
    before = live.generation, len(live), live.has_gradient
    with pytest.raises(NotFiniteError):
        live.forget_rows()
    assert (live.generation, len(live), live.has_gradient) == before
