"""What a step on a device finds wrong: nothing is changed, and the host hears of it a step later."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from device.placed import tables_of, to_device
from devices import DEVICE
from torch import nn

import hotbed as hb
from hotbed.errors import IdError, InputError, NotFiniteError, OptimizerError
from hotbed.places.device.step import Predicated

ROWS = 20


class Model(nn.Module):
    def __init__(self, kind="SGD", **options):
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(
            [hb.Table("item", dim=4, rows=ROWS), hb.Table("user", dim=4, rows=ROWS)], seed=1
        )
        to_device(self.embeddings)
        torch.manual_seed(0)
        self.top = nn.Linear(8, 1).to(DEVICE)
        self.optimizer = getattr(hb.optim, kind)(self.parameters(), lr=0.1, **options)

    def forward(self, item, user, scale=1.0):
        batch = {"item": torch.tensor(item), "user": torch.tensor(user)}
        batch = {name: ids.to(DEVICE) for name, ids in batch.items()}
        return (self.top(hb.nn.concat(self.embeddings(batch))) * scale).sum()

    def all(self):
        rows = [t.lookup(torch.arange(ROWS)).clone() for t in tables_of(self)]
        return [*rows, *(p.detach().clone() for p in self.top.parameters())]


def unchanged(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def allocate():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def late(monkeypatch):
    """Nothing has come from the device until somebody waits for it."""
    from hotbed.places.device.deferred_errors import DeferredError

    monkeypatch.setattr(DeferredError, "ready", property(lambda self: False))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RowwiseAdagrad"])
def test_a_bad_id_is_told_a_step_later(kind, monkeypatch):
    late(monkeypatch)
    model = Model(kind)
    before = model.all()
    model([1, 2], [3, ROWS]).backward()
    model.optimizer.step()
    with pytest.raises(IdError, match=r"Table 'user', feature 'user', sample 1: id 20 is outside"):
        model.optimizer.step()
    model.optimizer.zero_grad()
    assert unchanged(before, model.all())
    assert model.optimizer.state_dict()["state"][0]["step"] == 0
    twin = Model(kind)
    for one in (model, twin):
        one([1, 2], [3, 4]).backward()
        one.optimizer.step()
    assert unchanged(twin.all(), model.all()) and not unchanged(before, model.all())


def test_a_bad_id_that_is_known_by_then_stops_the_step_or_the_next_forward():
    model = Model()
    before = model.all()
    model([1, -1], [3, 4]).backward()
    allocate()
    with pytest.raises(IdError, match="id -1"):
        model.optimizer.step()
    model.optimizer.zero_grad()
    with torch.no_grad():
        model([1, 2], [3, 99])
    allocate()
    with pytest.raises(IdError, match="id 99"):
        model([1, 2], [3, 4])
    model([1, 2], [3, 4])
    assert unchanged(before, model.all())


@pytest.mark.parametrize(
    "offsets, match",
    [
        ([1, 2, 3], "offsets must start at 0, they start at 1"),
        ([0, 3, 2], "sample 1: offsets must rise, but 2 follows 3"),
        ([0, 1, 2], "offsets end at 2 .* there are 3 values"),
        ([0, 9, 3], "sample 1: offsets must rise"),
    ],
)
def test_bad_offsets(offsets, match):
    module = to_device(hb.EmbeddingCollection([hb.Table("t", dim=4, rows=ROWS)], seed=1))
    bags = hb.Jagged(torch.tensor([1, 2, 3]), torch.tensor(offsets)).to(DEVICE)
    module({"t": bags})["t"].sum().backward()
    allocate()
    with pytest.raises(InputError, match=match):
        module({"t": torch.tensor([1]).to(DEVICE)})


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RowwiseAdam", "Adagrad"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, bad, monkeypatch):
    late(monkeypatch)
    model, twin = Model(kind), Model(kind)
    for one in (model, twin):
        one([1, 2], [3, 4]).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
    before = model.all()
    model([1, 2], [3, 4], scale=bad).backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
    with pytest.raises(NotFiniteError, match="Table 'item': its gradient had a NaN"):
        model.all()
    assert unchanged(before, model.all())
    for one in (model, twin):
        one([1, 5], [3, 4]).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
    assert unchanged(twin.all(), model.all()) and not unchanged(before, model.all())


def test_the_first_step_of_all_is_not_finite():
    model, twin = (
        Model("SGD", momentum=0.9, dampening=0.5),
        Model("SGD", momentum=0.9, dampening=0.5),
    )
    model([1, 2], [3, 4], scale=float("nan")).backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
    allocate()
    with pytest.raises(NotFiniteError):
        model([1, 2], [3, 4])
    for one in (model, twin):
        for _ in range(2):
            one([1, 2], [3, 4]).backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
    assert unchanged(twin.all(), model.all())


def test_a_dense_gradient_that_is_not_finite():
    model = Model()
    before = model.all()
    model([1, 2], [3, 4]).backward()
    model.top.bias.grad.fill_(float("inf"))
    model.optimizer.step()
    model.optimizer.zero_grad()
    allocate()
    with pytest.raises(NotFiniteError, match="'top.bias'.*its gradient had"):
        model([1, 2], [3, 4])
    assert unchanged(before, model.all())


def test_a_fused_step_is_refused_in_the_next_backward(monkeypatch):
    late(monkeypatch)
    model = Model("SGD", fused=True)
    for _ in range(2):
        model([1, 2], [3, 4]).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    before = model.all()[:2]
    model([1, 2], [3, 4], scale=float("nan")).backward()
    model.top.zero_grad()
    model.optimizer.step()
    loss = model([1, 2], [3, 4])
    with pytest.raises(NotFiniteError, match="Table 'item'"):
        loss.backward()
    assert unchanged(before, model.all()[:2])


def test_ids_on_the_host_are_checked_at_once(monkeypatch):
    from hotbed.places.device.place import WholeLookups

    monkeypatch.setattr(WholeLookups, "is_here", lambda self, ids: False)
    module = to_device(hb.EmbeddingCollection([hb.Table("t", dim=4, rows=ROWS)], seed=1))
    with pytest.raises(IdError, match=r"Table 't', feature 't', sample 1: id 20"):
        module({"t": hb.Jagged.from_lists([[1], [2, 20]])})
    out = module({"t": hb.Jagged.from_lists([[1], [2, 19], []])})["t"]
    rows = module.lookup("t", torch.arange(ROWS))
    torch.testing.assert_close(out.cpu(), torch.stack([rows[1], rows[2] + rows[19], rows[0] * 0]))
    out.sum().backward()
    dense = module.parameter("t").grad.to_dense().cpu()
    assert dense.sum(1).nonzero()[:, 0].tolist() == [1, 2, 19]


def test_a_gradient_that_others_have_put_there():
    model = Model()
    handle = model.embeddings.parameter("item")

    def sparse(slots):
        values = torch.ones(len(slots), 4, device=DEVICE)
        at = torch.tensor([slots], device=DEVICE)
        return torch.sparse_coo_tensor(at, values, handle.shape, check_invariants=False)

    handle.grad = sparse([1, 5, 1])
    before = model.all()
    model.optimizer.step()
    change = (before[0] - model.all()[0])[:, 0]
    assert change[1] == pytest.approx(0.2) and change[5] == pytest.approx(0.1)
    assert change.count_nonzero() == 2
    handle.grad = sparse([1, ROWS])
    before = model.all()
    model.optimizer.step()
    with pytest.raises(OptimizerError, match="names a slot that its table has not"):
        model.all()
    handle.grad = torch.ones(ROWS, 4, device=DEVICE)
    model.optimizer.step()
    assert unchanged([before[0] - 0.1], model.all()[:1])


def test_vectors_whose_gradient_is_overwritten():
    model = Model()
    batch = {name: torch.tensor([1, 2]).to(DEVICE) for name in ("item", "user")}
    grad = torch.ones(2, 4, device=DEVICE)
    model.embeddings(batch)["item"].backward(grad)
    grad.zero_()
    with pytest.raises(OptimizerError, match="changed in place between backward and step"):
        model.optimizer.step()


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_torchs_fused_adam_is_told_and_nothing_is_copied(kind, monkeypatch):
    copied = []
    plain = Predicated.__init__

    def counted(self, state, dense):
        copied.extend(dense)
        plain(self, state, dense)

    monkeypatch.setattr(Predicated, "__init__", counted)
    late(monkeypatch)
    fused = partial(getattr(torch.optim, kind), lr=0.1, fused=True)
    model, twin = (Model("Adagrad", dense=fused) for _ in range(2))
    for number in range(6):
        if number in (0, 3):  # before there are states, and after
            before = model.all()
            (model([1, 2], [3, 4]) * float("nan")).backward()
            model.optimizer.step()
            with pytest.raises(NotFiniteError):
                model.optimizer.step()
            model.optimizer.zero_grad()
            assert unchanged(before, model.all())
        for one in (model, twin):
            one([1, number], [3, 4]).backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
        assert unchanged(twin.all(), model.all())
    states = [one.optimizer.state_dict()["state"] for one in (model, twin)]
    assert all(
        float(a["step"]) == float(b["step"]) for a, b in zip(*map(dict.values, states), strict=True)
    )
    assert not copied
