"""Steps that are recorded once and replayed: the same training, bit for bit, and the same errors."""

from __future__ import annotations

import warnings

import pytest
import torch
from device.placed import moved, tables_of, to_device, to_host
from device.recorded_graph import RecordedGraph
from device.test_whole_tables import (
    OPTIMIZERS,
    ROWS,
    assert_equal_states,
    assert_equal_tables,
    collection,
)
from devices import DEVICE
from torch import nn

import hotbed as hb
from hotbed import graphs
from hotbed.graphs import REHEARSALS


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setitem(graphs.GRAPHS, "cpu", RecordedGraph)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = to_device(collection())
        torch.manual_seed(0)
        self.top = nn.Linear(25, 1).to(DEVICE)

    def forward(self, batch):
        vectors = [
            v.values if isinstance(v, hb.Jagged) else v for v in self.embeddings(batch).values()
        ]
        return self.top(torch.cat(vectors, 1).float())


def batch_of(seed, size=4):
    """As many ids in every batch, in bags of other lengths."""
    g = torch.Generator().manual_seed(seed)

    def ids(*shape):
        return (ROWS * torch.rand(*shape, generator=g) ** 2).long()

    lengths = (torch.arange(size) % 3)[torch.randperm(size, generator=g)]
    n = int(lengths.sum())
    return {
        "watched": ids(size, 3),
        "browsed": hb.Jagged(ids(n), lengths=lengths),
        "user": ids(size),
        "tag": hb.Jagged(ids(n).int(), lengths=lengths, weights=torch.rand(n, generator=g) + 0.1),
    }


def label_of(seed, size=4):
    return torch.rand(size, 1, generator=torch.Generator().manual_seed(1000 + seed))


class Training:
    """A model, its optimizer and its step, recorded or not."""

    def __init__(self, make_optimizer, recorded):
        self.model = Model()
        self.optimizer = make_optimizer(self.model.parameters())
        self.calls = 0
        self.step = hb.graphed(self.plain, self.optimizer) if recorded else self.plain

    def plain(self, batch, label):
        self.calls += 1
        loss = torch.nn.functional.mse_loss(self.model(batch), label)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}

    def __call__(self, seed, batch=None, label=None, size=4):
        batch = batch_of(seed, size) if batch is None else batch
        label = label_of(seed, size) if label is None else label
        return float(self.step(moved(batch), label.to(DEVICE))["loss"])


def both(make_optimizer):
    return Training(make_optimizer, False), Training(make_optimizer, True)


def assert_equal(plain, recorded):
    assert_equal_tables(plain.model, recorded.model)
    assert_equal_states(plain.optimizer, recorded.optimizer)
    assert torch.equal(plain.model.top.weight, recorded.model.top.weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_have_the_bits_of_steps(name):
    plain, recorded = both(OPTIMIZERS[name])
    for seed in range(REHEARSALS + 4):
        for training in (plain, recorded):
            for group in training.optimizer.param_groups:
                group["lr"] *= 0.9
        assert plain(seed) == recorded(seed)
    assert recorded.step.recorded == 1 and not recorded.step.refused
    assert recorded.calls == REHEARSALS + 1  # once more to be recorded, and no more
    assert_equal(plain, recorded)


def test_tables_that_are_updated_in_backward():
    plain, recorded = both(lambda p: hb.optim.Adam(p, lr=0.01, fused=True))
    for seed in range(REHEARSALS + 3):
        assert plain(seed) == recorded(seed)
    assert recorded.step.recorded == 1
    assert_equal(plain, recorded)


def test_other_layouts_get_their_own_graph_or_none():
    plain, recorded = both(OPTIMIZERS["Adam"])
    for seed in range(2 * REHEARSALS + 6):
        size = (4, 7)[seed % 2]
        assert plain(seed, size=size) == recorded(seed, size=size)
    assert recorded.step.recorded == 2
    assert plain(99, size=9) == recorded(99, size=9)
    assert recorded.step.recorded == 2
    assert_equal(plain, recorded)


def with_a_bad_id(seed):
    batch = batch_of(seed)
    batch["watched"][2, 1] = ROWS + 5
    return batch, label_of(seed)


def with_an_infinite_gradient(seed):
    return batch_of(seed), label_of(seed) * torch.inf


@pytest.mark.parametrize(
    ("spoiled", "error", "message"),
    [
        (with_a_bad_id, hb.IdError, rf"sample 2: id {ROWS + 5} is outside \[0, {ROWS}\)"),
        (with_an_infinite_gradient, hb.NotFiniteError, "no row and no parameter was changed"),
    ],
)
def test_a_replay_that_is_refused_is_told_by_the_next_and_counts_for_nothing(
    spoiled, error, message
):
    plain, recorded = both(OPTIMIZERS["Adam"])
    for seed in range(REHEARSALS + 2):
        plain(seed), recorded(seed)
    recorded(50, *spoiled(50))
    with pytest.raises(error, match=message):
        recorded(51)
    for seed in (60, 61):
        assert plain(seed) == recorded(seed)
    assert_equal(plain, recorded)


def test_tables_that_were_loaded_or_moved():
    """Loading writes into the planes that a graph knows; what was moved lies elsewhere."""
    plain, recorded = both(OPTIMIZERS["Adagrad"])
    for seed in range(REHEARSALS + 2):
        plain(seed), recorded(seed)
    for training in (plain, recorded):
        states = training.optimizer.state_dict()
        training.model.load_state_dict(Model().state_dict())
        training.optimizer.load_state_dict(states)
    calls = recorded.calls
    for seed in range(20, 23):
        assert plain(seed) == recorded(seed)
    assert recorded.calls == calls
    # Not to be used again.
    old = [table.place.plane for table in tables_of(recorded.model)]  # type: ignore[attr-defined]
    before = [weights.clone() for weights in old]
    for training in (plain, recorded):
        to_device(to_host(training.model.embeddings))
    for seed in range(30, 30 + REHEARSALS + 2):
        assert plain(seed) == recorded(seed)
    assert recorded.calls == calls + REHEARSALS + 1
    assert all(map(torch.equal, old, before))
    assert_equal(plain, recorded)


def test_tables_that_are_half_loaded():
    _, recorded = both(OPTIMIZERS["Adagrad"])
    for seed in range(REHEARSALS + 2):
        recorded(seed)
    before = recorded.model.top.weight.clone()
    for table in tables_of(recorded.model):
        table.failed_load = "hotbed.load has failed."
    with pytest.raises(hb.TableError, match="is half loaded: hotbed.load has failed"):
        recorded(9)
    assert torch.equal(recorded.model.top.weight, before)


def test_tables_that_another_optimizer_took_over():
    _, recorded = both(OPTIMIZERS["Adagrad"])
    for seed in range(REHEARSALS + 2):
        recorded(seed)
    hb.optim.Adam(recorded.model.parameters(), replace_state=True)
    with pytest.raises(hb.OptimizerError, match="was taken over by another optimizer"):
        recorded(9)


def test_dense_parameters_that_were_replaced_are_recorded_anew():
    plain, recorded = both(OPTIMIZERS["Adagrad"])
    for seed in range(REHEARSALS + 2):
        plain(seed), recorded(seed)
    calls = recorded.calls
    for training in (plain, recorded):
        weight = training.model.top.weight
        weight.data = weight.data.clone() * 0.5
    for seed in range(20, 20 + REHEARSALS + 2):
        assert plain(seed) == recorded(seed)
    assert recorded.calls == calls + REHEARSALS + 1
    assert_equal(plain, recorded)


def test_numbers_that_take_another_kernel_are_recorded_anew():
    plain, recorded = both(OPTIMIZERS["FTRL"])
    for seed in range(REHEARSALS + 2):
        plain(seed), recorded(seed)
    calls = recorded.calls
    for training in (plain, recorded):
        training.optimizer.param_groups[0]["lr_power"] = -0.4
    for seed in range(20, 20 + REHEARSALS + 2):
        assert plain(seed) == recorded(seed)
    assert recorded.calls == calls + REHEARSALS + 1 and recorded.step.recorded == 1
    assert_equal(plain, recorded)


def test_plain_steps_between_replays():
    plain, recorded = both(OPTIMIZERS["Adam"])
    for seed in range(REHEARSALS + 2):
        plain(seed), recorded(seed)
    plain(30)
    recorded.plain(moved(batch_of(30)), label_of(30).to(DEVICE))
    for seed in range(31, 34):
        assert plain(seed) == recorded(seed)
    assert_equal(plain, recorded)


def test_a_step_that_asks_the_device_runs_as_ever(monkeypatch):
    plain, recorded = both(OPTIMIZERS["Adam"])

    def refuse(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.GRAPHS[DEVICE.type], "record", refuse)
    for seed in range(REHEARSALS):
        plain(seed), recorded(seed)
    with pytest.warns(UserWarning, match="runs as ever. RuntimeError: operation not permitted"):
        assert plain(7) == recorded(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain(8) == recorded(8)
    assert "not permitted" in recorded.step.refused
    assert_equal(plain, recorded)


def test_a_loss_with_its_history_is_returned_without():
    plain, recorded = both(OPTIMIZERS["SGD"])
    kept = []

    def step(batch, label):
        loss = torch.nn.functional.mse_loss(recorded.model(batch), label)
        recorded.optimizer.zero_grad()
        loss.backward()
        recorded.optimizer.step()
        return loss, [loss]

    recorded.step = hb.graphed(step, recorded.optimizer)
    for seed in range(REHEARSALS + 3):
        loss, (again,) = recorded.step(moved(batch_of(seed)), label_of(seed).to(DEVICE))
        assert not loss.requires_grad and torch.equal(loss, again)
        kept.append((plain(seed), loss))
    assert recorded.step.recorded == 1
    assert all(expected == float(loss) for expected, loss in kept)


def test_what_replays_have_told_is_not_kept():
    _, recorded = both(OPTIMIZERS["Adam"])
    for seed in range(REHEARSALS + 10):
        recorded(seed)
    assert recorded.step.recorded == 1
    tables = recorded.optimizer._live.values()
    assert sum(len(table.waiting.deferred_errors) for table in tables) <= 4


def test_weights_that_autocast_has_cast_before_are_cast_in_each_replay():
    plain, recorded = both(OPTIMIZERS["SGD"])
    for seed in range(REHEARSALS + 4):
        found = []
        for training in (plain, recorded):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                training.model.top(torch.zeros(1, 25, device=DEVICE))
                found.append(training(seed))
        assert found[0] == found[1]
    assert recorded.step.recorded == 1
    assert_equal(plain, recorded)


def test_a_step_without_gradients_of_dense_parameters():
    """Of an optimizer that updates its tables in backward, nothing is left for step()."""
    plain, recorded = both(lambda p: hb.optim.Adam(p, lr=0.01, fused=True))
    for training in (plain, recorded):
        training.model.top.requires_grad_(False)
    for seed in range(REHEARSALS + 3):
        assert plain(seed) == recorded(seed)
    assert recorded.step.recorded == 1 and not recorded.step.refused
    assert_equal(plain, recorded)


def test_lines_are_made_on_the_host_whatever_the_default_device():
    module, other = to_device(collection()), to_device(collection())
    optimizers = [OPTIMIZERS["Adam"](m.parameters()) for m in (module, other)]

    def step(batch, module=module, optimizer=optimizers[0]):
        vectors = [v.values if isinstance(v, hb.Jagged) else v for v in module(batch).values()]
        torch.autograd.backward(vectors, [torch.ones_like(v) for v in vectors])
        optimizer.step()
        optimizer.zero_grad()

    recorded = hb.graphed(step, optimizers[0])
    for seed in range(REHEARSALS + 3):
        batch = moved(batch_of(seed))
        with torch.device("meta"):  # what is made there for lack of a device is of no use
            recorded(batch)
        step(batch, other, optimizers[1])
    assert recorded.recorded == 1
    assert_equal_tables(module, other)


def test_tables_on_the_host_and_foreign_optimizers():
    module = collection()
    optimizer = hb.optim.SGD(module.parameters(), lr=0.1)
    calls = []
    step = hb.graphed(lambda batch: calls.append(batch), optimizer)
    for _ in range(2 * REHEARSALS):
        step("any")
    assert calls == ["any"] * (2 * REHEARSALS) and step.recorded == 0
    with pytest.raises(TypeError, match=r"SGD is no optimizer of tables\. Pass the one of"):
        hb.graphed(print, torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
