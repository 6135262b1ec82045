"""`inputs=` and `sample=` of `hotbed.convert`: one lookup for all layers."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conversion.plain_models import (
    DIM,
    ROWS,
    batch_of,
    click_ids,
    made,
    storage,
)
from torch import Tensor, nn

import hotbed as hb


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda x: {"embs.C0": x[:, 1:2].long()}, "'embs.C0' was called with other ids"),
        (lambda x: 1 / 0, "inputs= raised ZeroDivisionError"),
        (
            lambda x: {"embs.C0": [[1, 2]]},
            "cannot be looked up.*a tensor of ids for an nn.Embedding",
        ),
        (lambda x: {"embs.C0": x[:, :1].long() + ROWS}, "cannot be looked up.*is outside"),
    ],
)
def test_inputs_that_are_wrong_are_right_and_slower(inputs: Any, message: str) -> None:
    plain, model = made(), made()
    hb.convert(model, min_rows=100, inputs=inputs)
    with pytest.warns(UserWarning, match=message):
        got = model(batch_of(0)[0])
    assert torch.equal(got, plain(batch_of(0)[0]))
    model(batch_of(0)[0])  # says it once


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (lambda x: {"embs.C9": x}, hb.TableError, "names 'embs.C9', which is no converted layer"),
        (lambda x: [x], hb.TableError, "must return a dict of layers' paths, got list"),
    ],
)
def test_inputs_that_cannot_be(inputs: Any, error: type[Exception], message: str) -> None:
    model = made()
    hb.convert(model, min_rows=100, inputs=inputs)
    with pytest.raises(error, match=message):
        model(batch_of(0)[0])


class Sequences(nn.Module):
    """One layer called twice, with ids of two shapes; arguments by name; a bag with offsets and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0) -> Tensor:
        target = self.item(batch["target"])
        history = self.item(batch["history"].clamp(min=0))
        tags = self.bag(batch["tags"], batch["offsets"], batch["weights"])
        return scale * ((history * target[:, None]).sum((1, 2)) + tags.sum(1))


def sequences(number: int, size: int = 6) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return {
        "target": torch.randint(0, ROWS, (size,), generator=draw),
        "history": torch.randint(-3, ROWS, (size, 5), generator=draw),
        "tags": torch.randint(0, ROWS, (2 * size,), generator=draw),
        "offsets": torch.arange(0, 2 * size, 2),
        "weights": torch.rand(2 * size, generator=draw),
    }


def test_a_layer_that_is_called_several_times() -> None:
    plain, model = made(Sequences), made(Sequences)
    conversion = hb.convert(model, min_rows=100, sample=sequences(0))
    assert conversion.inputs is not None
    found = conversion.inputs(sequences(1), scale=2.0)
    assert {path: len(calls) for path, calls in found.items()} == {"item": 2, "bag": 1}
    own, other = (
        hb.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    for number in range(5):
        for each, optimizer in ((model, own), (plain, other)):
            optimizer.zero_grad()
            each(sequences(number, 3 + number), scale=2.0).sum().backward()
            optimizer.step()
    torch.testing.assert_close(model(sequences(9)), plain(sequences(9)), rtol=1e-6, atol=1e-6)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.changed, self.constant, self.fine, self.reshaped = (
            nn.Embedding(ROWS, DIM) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        changed = x + 1
        changed.clamp_(max=5)
        vectors = [
            self.drawn(torch.randint_like(x, ROWS)) * 0,
            self.changed(changed),
            self.constant(torch.arange(len(x))),
            self.fine(x % 7),
            self.reshaped(x.view(len(x), 1)).squeeze(1),
        ]
        return torch.stack(vectors).sum((0, 2))


def test_what_cannot_be_traced_is_left_to_the_layer() -> None:
    plain, model = made(Untraceable), made(Untraceable)
    conversion = hb.convert(model, min_rows=100, sample=torch.arange(4))
    assert conversion.inputs is not None
    assert set(conversion.inputs(torch.arange(4))) == {"fine", "reshaped"}
    assert torch.equal(model(torch.arange(4)), plain(torch.arange(4)))
    with pytest.warns(UserWarning, match="inputs= raised RuntimeError"):  # of another batch size
        got = model(torch.arange(6))
    assert torch.equal(got, plain(torch.arange(6)))


def test_tracing_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.BatchNorm1d(DIM), nn.Dropout(0.5))
    model[2].eval()
    state = torch.get_rng_state()
    hb.convert(model, min_rows=100, sample=torch.arange(8))
    assert model[0].training and model[1].training and not model[2].training
    assert int(model[1].num_batches_tracked) == 0 and torch.equal(torch.get_rng_state(), state)


def test_look_ahead_sees_all_ids(tmp_path: Path) -> None:
    model = made()
    conversion = hb.convert(model, min_rows=100, storage=storage(tmp_path), sample=batch_of(0)[0])
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    for x, y in hb.lookahead([batch_of(number) for number in range(12)], model):
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
    assert conversion.group is not None
    stats = conversion.group.stats()
    assert stats["batches"] == 12 and stats["batches_unprepared"] == 0
    for _ in hb.lookahead([{"x": batch_of(0)[0]}], model, inputs=lambda b: click_ids(b["x"])):
        pass


class TwoLayers(nn.Module):
    """Two layers, and something that happens between them."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.between != "no gradients" and torch.is_grad_enabled()):
            first = self.a(x + 0)
        if self.between == "ids":
            x.add_(1)
        elif self.between == "weights":
            with torch.no_grad():
                self.b.weight.mul_(2)
        return (first + self.b(x)).sum()


@pytest.mark.filterwarnings("ignore:hotbed.convert. layer 'b' was called:UserWarning")
@pytest.mark.parametrize("between", ["no gradients", "ids", "weights"])
def test_what_happens_between_two_layers_counts(between: str) -> None:
    torch.manual_seed(0)
    plain = TwoLayers(between)
    model = copy.deepcopy(plain)
    hb.convert(model, min_rows=100, inputs=lambda x: {"a": x, "b": x})
    results = []
    for each, kind in ((plain, torch.optim.SGD), (model, hb.optim.SGD)):
        optimizer = kind(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = each(torch.arange(4))
            loss.backward()
            optimizer.step()
        results.append((loss.detach(), each.a.weight.detach()[:9], each.b.weight.detach()[:9]))
    for own, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(own, expected)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM)

    def forward(self, ids: Tensor, begins: Tensor) -> Tensor:
        vectors: Tensor = self.bag(ids, offsets=begins)
        return vectors


def test_arguments_of_a_layer_by_name() -> None:
    plain, model = made(ByName), made(ByName)
    ids, begins = torch.arange(6), torch.tensor([0, 2])
    conversion = hb.convert(model, min_rows=100, sample=(ids, begins))
    assert conversion.inputs is not None and set(conversion.inputs(ids, begins)) == {"bag"}
    torch.testing.assert_close(model(ids, begins), plain(ids, begins))


def test_a_sample_that_cannot_be_changes_nothing() -> None:
    model = made()
    with pytest.raises(hb.TableError, match="cannot be called with sample="):
        hb.convert(model, min_rows=100, sample=torch.zeros(2, 1))
    assert type(model.embs["C0"]) is nn.Embedding
    assert hb.convert(model, min_rows=100, sample=batch_of(0)[0]).inputs is not None
    pickle.loads(pickle.dumps(model))


def test_threads_have_forwards_of_their_own() -> None:
    plain, model = made(), made()
    hb.convert(model, min_rows=100, sample=batch_of(0)[0])
    x = batch_of(1)[0]
    expected, wrong = plain(x), []

    def look() -> None:
        wrong.extend(1 for _ in range(30) if not torch.equal(model(x), expected))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_it_looks_up_between_graphs() -> None:
    plain, model = made(), made()
    hb.convert(model, min_rows=100, sample=batch_of(0)[0])
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(batch_of(1)[0]), plain(batch_of(1)[0]))


@pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3)])
@pytest.mark.parametrize("fused", [False, True])
def test_vectors_may_be_changed_in_place(shape: tuple[int, ...], fused: bool) -> None:
    plain = nn.Sequential(nn.Embedding(ROWS, DIM), nn.ReLU(inplace=True))
    model, ids = copy.deepcopy(plain), torch.arange(6).view(shape)
    hb.convert(model, min_rows=100, sample=ids if fused else None)
    for each in (plain, model):
        each(ids).square().sum().backward()
    grad = model[0].weight.grad
    assert grad is not None
    assert torch.equal(grad.to_dense(), plain[0].weight.grad)


class Twice(nn.Module):
    """One layer, called twice with the same ids, whose first vectors are changed."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.item(ids).mul_(2)
        return first + self.item(ids)


def test_vectors_are_given_once() -> None:
    plain, model = made(Twice), made(Twice)
    ids = torch.arange(5)
    hb.convert(model, min_rows=100, inputs=lambda ids: {"item": [ids, ids]})
    assert torch.equal(model(ids), plain(ids))
    hb.unconvert(model)
    hb.convert(model, min_rows=100, inputs=lambda ids: {"item": ids})
    assert torch.equal(model(ids), plain(ids))
