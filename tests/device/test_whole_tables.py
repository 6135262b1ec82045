"""Whole static tables on a device: the bits of the core, forward, backward and step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from device.placed import drawn, moved, tables_of, to_device, to_host
from devices import DEVICE
from torch import nn

import hotbed as hb
from hotbed.errors import IdError, TableError

ROWS = 40
OPTIMIZERS = {
    "SGD": lambda p: hb.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: hb.optim.Adagrad(p, lr=0.1),
    "RowwiseAdagrad": lambda p: hb.optim.RowwiseAdagrad(p, lr=0.1),
    "Adam": lambda p: hb.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: hb.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "RowwiseAdam": lambda p: hb.optim.RowwiseAdam(p, lr=0.01),
    "Adamax": lambda p: hb.optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: hb.optim.Adadelta(p, lr=1.0),
    "RMSprop": lambda p: hb.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "FTRL": lambda p: hb.optim.FTRL(p, lr=0.1, l1=0.001),
}


def collection(dtype=torch.float32, **options):
    tables = [
        hb.Table("item", dim=8, rows=ROWS, combiner="mean", dtype=dtype, padding_idx=3),
        hb.Table("user", dim=4, rows=ROWS, combiner=None, dtype=dtype),
        hb.Table("tag", dim=5, rows=ROWS, combiner="sqrtn"),
    ]
    features = {"watched": "item", "browsed": "item", "user": "user", "tag": "tag"}
    return hb.EmbeddingCollection(tables, features, seed=3, **options)


def batch_of(seed, size=6):
    ids, lengths, weights = drawn(seed, size, ROWS)
    n = len(weights)
    return {
        "watched": ids(size, 3),
        "browsed": hb.Jagged(ids(n), lengths=lengths),
        "user": ids(size),
        "tag": hb.Jagged(ids(n).int(), lengths=lengths, weights=weights),
    }


def loss_of(module, batch):
    vectors = module(batch)
    total = 0.0
    for k, name in enumerate(module.features):
        v = vectors[name]
        v = v.values if isinstance(v, hb.Jagged) else v
        # The same sum on every device: exact in float64.
        factor = torch.arange(1, v.numel() + 1, dtype=torch.float64).reshape(v.shape) % 7 - 3
        total = total + (v.double().cpu() * factor * (k + 1) / 8).sum()
    return total


def train(module, optimizer, steps=3, backwards=1, on_device=False, first=0):
    for step in range(first, first + steps):
        for k in range(backwards):
            batch = batch_of(10 * step + k)
            loss_of(module, moved(batch) if on_device else batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal_tables(one, other):
    for a, b in zip(tables_of(one), tables_of(other), strict=True):
        ids = torch.arange(ROWS)
        assert torch.equal(a.lookup(ids), b.lookup(ids)), a.name


def assert_equal_states(one, other):
    one, other = one.state_dict()["state"], other.state_dict()["state"]
    assert one.keys() == other.keys()
    for key, state in one.items():
        for name, value in state.items():
            same = torch.equal if torch.is_tensor(value) else lambda a, b: a == b
            assert same(value, other[key][name]), name


INITS = [hb.init.Normal(0.0, 0.1), hb.init.Constant(0.3), hb.init.Zeros()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("init", INITS, ids=lambda one: type(one).__name__)
def test_tables_are_made_where_they_are_to_lie(init, dtype):
    tables = [
        hb.Table("a", dim=4, rows=9, init=init, dtype=dtype, padding_idx=2),
        hb.Table("b", dim=3, rows=5, init=init, dtype=dtype),
    ]
    host = hb.EmbeddingCollection(tables, seed=1)
    made = hb.EmbeddingCollection(tables, seed=1, device=DEVICE)
    for a, b in zip(tables_of(host), tables_of(made), strict=True):
        assert b.device == DEVICE and b.core.plane_bytes == 0
        assert torch.equal(a.lookup(a.ids()), b.lookup(b.ids()).cpu())
    optimizers = [hb.optim.Adagrad(m.parameters(), lr=0.1) for m in (host, made)]
    for module, optimizer in zip((host, made), optimizers, strict=True):
        ids = torch.tensor([0, 4, 4])
        vectors = module({"a": ids, "b": ids})
        sum((v.double() * torch.arange(1, v.shape[1] + 1, device=v.device)).sum()
            for v in vectors.values()).backward()  # fmt: skip
        optimizer.step()
    assert_equal_rows(host, made)
    back = to_host(made)
    assert not any(t.place.stepped_with != "host" for t in tables_of(back))
    assert_equal_rows(host, back)


def assert_equal_rows(one, other):
    for a, b in zip(tables_of(one), tables_of(other), strict=True):
        assert torch.equal(a.lookup(a.ids()), b.lookup(b.ids()).cpu()), a.name


def test_layers_and_models_are_made_where_they_are_to_lie():
    torch.manual_seed(0)
    layer = hb.EmbeddingBag(7, 4, device=DEVICE, _weight=torch.arange(28.0).reshape(7, 4))
    assert tables_of(layer)[0].device == DEVICE
    assert layer(torch.tensor([[1, 2]])).tolist() == [[6, 7, 8, 9]]
    tables = [hb.Table("a", dim=4, rows=9, combiner="sum")]
    for make in (
        lambda **o: hb.models.DLRM(tables, 4, 2, [4], [8], seed=0, **o),
        lambda **o: hb.models.WideDeep(tables, 4, 2, [8], seed=0, **o),
    ):
        batch = {"dense": torch.rand(3, 2), "a": torch.tensor([1, 8, 1])}
        torch.manual_seed(5)
        expected = make()(batch)
        torch.manual_seed(5)
        model = make(device=DEVICE)
        assert {t.device for t in tables_of(model)} == {DEVICE}
        found = model({"dense": batch["dense"].to(DEVICE), "a": batch["a"]})
        torch.testing.assert_close(found.cpu(), expected)


def test_tables_in_tiers_are_made_for_a_device():
    storage = hb.Storage(device="200KB", host="1MB")
    dynamic = [hb.Table("a", dim=4, combiner="sum")]
    module = hb.EmbeddingCollection(dynamic, seed=1, storage=storage, device=DEVICE)
    assert tables_of(module)[0].device == DEVICE
    assert module({"a": torch.tensor([[1, 2**60]])})["a"].device == DEVICE
    with pytest.raises(TableError, match="it is dynamic, and grows. Give its collection storage="):
        hb.EmbeddingCollection(dynamic, device=DEVICE)
    with pytest.raises(TableError, match="device='mps' cannot be honoured"):
        hb.EmbeddingCollection(dynamic, device="mps")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_bits_of_the_core(name):
    host, device = collection(), to_device(collection())
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (host, device)]
    train(host, optimizers[0])
    train(device, optimizers[1], on_device=True)
    assert_equal_tables(host, device)
    assert_equal_states(*optimizers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits(dtype):
    host, device = collection(dtype), to_device(collection(dtype))
    for module, there in ((host, False), (device, True)):
        train(module, hb.optim.Adam(module.parameters(), lr=0.01), on_device=there)
    assert_equal_tables(host, device)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RowwiseAdagrad"])
def test_accumulation_over_three_backwards(name):
    host, device = collection(), to_device(collection())
    for module, there in ((host, False), (device, True)):
        train(module, OPTIMIZERS[name](module.parameters()), 2, 3, on_device=there)
    assert_equal_tables(host, device)


@pytest.mark.parametrize("name", ["SGD", "RowwiseAdam"])
def test_fused_steps_in_backward(name):
    host, device = collection(), to_device(collection())
    for module, there in ((host, False), (device, True)):
        optimizer = type(OPTIMIZERS[name](module.parameters()))(  # type: ignore[call-arg]
            module.parameters(), lr=0.05, fused=True, replace_state=True
        )
        train(module, optimizer, on_device=there)
    assert_equal_tables(host, device)


def test_outputs_have_the_bits_and_shapes_of_the_core():
    host, device = collection(), to_device(collection())
    batch = batch_of(1)
    batch["user"] = batch["user"].reshape(3, 2)[:, None].expand(3, 2, 2)
    batch = {
        **batch,
        "watched": torch.randint(0, ROWS, (3, 2, 4)),
        "browsed": torch.randint(0, ROWS, (3,)),
        "tag": torch.zeros(3, 0, dtype=torch.long),
    }
    for training in (True, False):
        host.train(training), device.train(training)
        for name, out in host(batch).items():
            found = device(moved(batch))[name]
            assert found.device == DEVICE and found.shape == out.shape
            assert torch.equal(found.cpu(), out), name


def test_the_gradient_can_be_looked_at_and_changed():
    host, device = collection(), to_device(collection())
    optimizers = [OPTIMIZERS["Adam"](m.parameters()) for m in (host, device)]
    for module, optimizer in zip((host, device), optimizers, strict=True):
        for seed in (1, 2):
            loss_of(module, batch_of(seed)).backward()
            for handle in module.parameters():
                handle.grad._values().mul_(0.5)
        assert hb.nn.clip_grad_norm_(module.parameters(), 0.5) > 0.5
        optimizer.step()
    for a, b in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense().cpu())
    for a, b in zip(tables_of(host), tables_of(device), strict=True):
        ids = torch.arange(ROWS)
        torch.testing.assert_close(a.lookup(ids), b.lookup(ids))


def test_gradients_by_other_ways():
    host, device = collection(), to_device(collection())
    found = []
    for module in (host, device):
        handles = list(module.parameters())
        grads = torch.autograd.grad(loss_of(module, batch_of(1)), handles)
        assert all(handle.grad is None for handle in handles)
        seen = []
        hook = handles[0].register_hook(lambda g, seen=seen: seen.append(g.to_dense().cpu()))
        loss_of(module, batch_of(2)).backward()
        loss_of(module, batch_of(3)).backward()
        hook.remove()
        loss_of(module, batch_of(4)).backward()
        found.append(
            [*(g.to_dense().cpu() for g in grads), *seen, handles[0].grad.to_dense().cpu()]
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradient_of_weights():
    grads = []
    for module in (collection(), to_device(collection())):
        batch = batch_of(1)
        batch["tag"].weights.requires_grad_()
        loss_of(module, batch).backward()
        grads.append(batch["tag"].weights.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


def test_a_frozen_table_stays():
    device = to_device(collection())
    device.parameter("item").requires_grad_(False)
    before = device.lookup("item", torch.arange(ROWS)).clone()
    train(device, hb.optim.SGD(device.parameters(), lr=0.1))
    assert torch.equal(before, device.lookup("item", torch.arange(ROWS)))
    assert device.parameter("item").grad is None


def test_tables_move_with_rows_and_states():
    host, device = collection(), to_device(collection())
    optimizers = [OPTIMIZERS["Adam"](m.parameters()) for m in (host, device)]
    train(host, optimizers[0], 6)
    train(device, optimizers[1], 2)
    to_host(device)
    assert tables_of(device)[0].place.stepped_with == "host"
    assert device.parameter("item").device.type == "cpu"
    train(device, optimizers[1], 2, first=2)
    to_device(device)
    train(device, optimizers[1], 2, first=4)
    assert_equal_tables(host, device)
    assert_equal_states(*optimizers)


def test_state_dicts_go_both_ways():
    host, device = collection(), to_device(collection())
    optimizers = [OPTIMIZERS["Adam"](m.parameters()) for m in (host, device)]
    train(device, optimizers[1])
    host.load_state_dict(device.state_dict())
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    assert_equal_tables(host, device)
    train(host, optimizers[0], first=3)
    other = to_device(collection())
    other.load_state_dict(host.state_dict())
    fresh = OPTIMIZERS["Adam"](other.parameters())
    fresh.load_state_dict(optimizers[0].state_dict())
    for module, optimizer in ((host, optimizers[0]), (other, fresh)):
        train(module, optimizer, first=6)
    assert_equal_tables(host, other)
    assert_equal_states(optimizers[0], fresh)


def test_copies_and_pickles_lie_on_the_device_too():
    device = to_device(collection())
    train(device, hb.optim.SGD(device.parameters(), lr=0.1))
    for other in (copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert all(table.place.stepped_with != "host" for table in tables_of(other))
        assert_equal_tables(device, other)
        train(other, hb.optim.SGD(other.parameters(), lr=0.1))
        assert not torch.equal(
            device.lookup("tag", torch.arange(ROWS)), other.lookup("tag", torch.arange(ROWS))
        )


def test_rows_can_be_assigned_and_drawn_again():
    device = to_device(collection())
    device.assign("tag", torch.tensor([3, 5, 3]), torch.arange(15.0).reshape(3, 5))
    found = device.lookup("tag", torch.tensor([3, 5]))
    assert found.tolist() == [[10.0, 11, 12, 13, 14], [5.0, 6, 7, 8, 9]]
    assert device.rows("tag").values.shape == (ROWS, 5)
    memory = device.memory()["tag"]
    assert memory["weights"] == ROWS * 5 * 4 and memory["states"] == 0
    hb.optim.Adam(device.parameters())
    assert device.memory()["tag"]["states"] == 2 * ROWS * 5 * 4
    with pytest.raises(IdError, match=r"id 40 is outside \[0, 40\)"):
        device.assign("tag", torch.tensor([40]), torch.zeros(1, 5))
    layer = to_device(hb.Embedding(ROWS, 4))
    before = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.weight)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    assert layer(torch.tensor([1])).tolist() == [[2.0] * 4]
    layer.weight = nn.Parameter(torch.ones(ROWS, 4))
    assert layer(torch.tensor([1])).tolist() == [[1.0] * 4]


def test_layers_follow_torch():
    torch.manual_seed(1)
    weight = torch.randn(ROWS, 4)
    twin = nn.EmbeddingBag(ROWS, 4, mode="mean", sparse=True, _weight=weight.clone())
    layer = to_device(hb.EmbeddingBag(ROWS, 4, mode="mean", _weight=weight))
    optimizers = (
        torch.optim.SparseAdam(twin.parameters(), lr=0.1),
        hb.optim.Adam(layer.parameters(), 0.1),
    )
    for _ in range(3):
        ids, offsets = torch.randint(0, ROWS, (9,)), torch.tensor([0, 2, 2, 5])
        twin(ids, offsets).square().sum().backward()
        layer(ids, offsets).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(layer.weight.detach().cpu(), twin.weight.detach())


def test_what_cannot_lie_on_a_device_is_refused():
    def refused(match, **options):
        module = hb.EmbeddingCollection([hb.Table("t", **{"dim": 4, "rows": 5, **options})])
        with pytest.raises(TableError, match=match):
            to_device(module)
        assert tables_of(module)[0].place.stepped_with == "host"
        module({"t": torch.tensor([1])})

    refused("it is dynamic.*Storage", rows=None)
    refused("float64.*float32", dtype=torch.float64)
    refused("combiner is max", combiner="max")
    refused("dim is above 32768", dim=40000)
    module = collection()
    hb.optim.Adagrad(module.parameters(), weight_decay=0.0)
    hb.optim.Adam(module.parameters(), untouched="exact", replace_state=True)
    with pytest.raises(TableError, match='untouched="lazy"'):
        to_device(module)
    device = to_device(collection())
    with pytest.raises(hb.OptimizerError, match='untouched="lazy"'):
        hb.optim.Adam(device.parameters(), untouched="exact")
