"""`hotbed.convert`: a plain model trains as before, over tables."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.plain_models import (
    COLUMNS,
    DIM,
    batch_of,
    click_ids,
    made,
    storage,
    train,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hotbed as hb

WAYS: dict[str, dict[str, Any]] = {
    "layer by layer": {"inputs": lambda x: {}},
    "inputs": {"inputs": click_ids},
    "sample": {"sample": batch_of(0)[0]},
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_plain_model(way: str, tmp_path: Path) -> None:
    plain = made()
    expected = train(plain, torch.optim.Adam(plain.parameters(), lr=0.01), range(20))
    trained = []
    for where in (None, storage(tmp_path)):
        model = made()
        conversion = hb.convert(model, min_rows=100, storage=where, **WAYS[way])
        assert conversion.model is model and len(conversion.converted) == COLUMNS + 1
        optimizer = hb.optim.Adam(model.parameters(), lr=0.01, untouched="exact")
        got = train(model, optimizer, range(20))
        assert got == pytest.approx(expected, rel=1e-6)
        assert [*model.state_dict()] == [*plain.state_dict()]
        assert len([*model.parameters()]) == len([*plain.parameters()])
        trained.append((got, model.state_dict()))
    assert trained[0][0] == trained[1][0]
    for name, value in trained[0][1].items():
        other = trained[1][1][name]
        if "embs" in name or "bag" in name:  # of tables in tiers
            with torch.no_grad():
                other = model.get_submodule(name.removesuffix(".weight")).weight + 0
        assert torch.equal(value, other), name
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=2e-6)


def test_fused_lookups_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotbed.group import lookup

    counts = {}
    for way, given in WAYS.items():
        model = made()
        hb.convert(model, min_rows=100, **given)
        calls: list[int] = []
        real = lookup._resolved

        def counted(*arguments: Any, real: Any = real, calls: list[int] = calls) -> Any:
            calls.append(1)
            return real(*arguments)

        monkeypatch.setattr(lookup, "_resolved", counted)
        model(batch_of(1)[0])
        monkeypatch.undo()
        counts[way] = len(calls)
    assert counts == {"layer by layer": COLUMNS + 1, "inputs": 1, "sample": 1}


def test_without_inputs_it_says_that_it_is_slower() -> None:
    with pytest.warns(
        UserWarning, match="each of 5 layers is looked up by itself.*inputs= or sample="
    ):
        hb.convert(made(), min_rows=100)


def test_layers_stay_what_they_are() -> None:
    plain, model = made(), made()
    seen: list[tuple[int, ...]] = []
    hook = model.embs["C1"].register_forward_hook(
        lambda _, inputs, output: seen.append(tuple(output.shape))
    )
    conversion = hb.convert(model, min_rows=100, inputs=click_ids)
    for path, layer in conversion.converted.items():
        before = plain.get_submodule(path)
        assert isinstance(layer, type(before)) and model.get_submodule(path) is layer
        assert (layer.num_embeddings, layer.embedding_dim) == (before.num_embeddings, DIM)
        assert layer.padding_idx is None and torch.equal(layer.weight, before.weight)
    assert type(model.small) is nn.Embedding
    assert conversion.skipped == {"small": "fewer than 100 rows"}
    assert "embs.C0" in str(conversion) and "fewer than 100 rows" in str(conversion)
    model(batch_of(0)[0])
    assert seen == [(32, 1, DIM)]
    hook.remove()
    model.embs["C0"].reset_parameters()
    assert not torch.equal(model.embs["C0"].weight, plain.embs["C0"].weight)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.embs["C0"].weight, plain.embs["C0"].weight)
    x = batch_of(3)[0]
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), model(x))


class Other(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Named(nn.Embedding):
    """A subclass that adds a method, and no forward."""

    def doubled(self, ids: Tensor) -> Tensor:
        return 2 * self(ids)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Embedding(200, 4, max_norm=1.0)
        self.frequent = nn.Embedding(200, 4, scale_grad_by_freq=True)
        self.other = Other(200, 4)
        self.parametrized = parametrize.register_parametrization(
            nn.Embedding(200, 4), "weight", nn.Identity()
        )
        self.hooked = nn.Embedding(200, 4)
        self.hooked.weight.register_hook(lambda grad: grad)
        self.tied = nn.Embedding(200, 4)
        self.head = nn.Linear(4, 200, bias=False)
        self.head.weight = self.tied.weight
        self.padded = nn.Embedding(200, 4, padding_idx=0)
        self.unpadded = nn.Embedding(200, 4)
        self.unpadded.weight = self.padded.weight
        self.meta = nn.Embedding(200, 4, device="meta")
        self.one, self.two = nn.Embedding(200, 4), nn.Embedding(200, 4)
        self.two.weight = self.one.weight
        self.named = Named(200, 4)
        self.chosen = nn.Embedding(200, 4)


def test_what_is_left_alone_says_why() -> None:
    model = Odd()
    conversion = hb.convert(model, min_rows=100, inputs=dict, skip=["chosen"])
    assert [*conversion.converted] == ["one", "two", "named"]
    for path, reason in {
        "norm": "max_norm",
        "frequent": "scale_grad_by_freq",
        "other": "a forward of its own .Other",
        "parametrized": "parametrization",
        "hooked": "hooks",
        "tied": "shares its weight with 'head.weight' .Linear",
        "padded": "shares its weight with 'unpadded.weight', of another mode or padding_idx",
        "unpadded": "shares its weight with 'padded.weight'",
        "meta": "meta device",
        "chosen": "skip",
    }.items():
        assert re.search(reason, conversion.skipped[path])
    ids = torch.tensor([3, 7])
    assert isinstance(model.named, Named)
    assert torch.equal(model.named.doubled(ids), 2 * model.named(ids))
    assert model.one.live_tables()["weight"] is model.two.live_tables()["weight"]
    optimizer = hb.optim.SGD([model.one.weight], lr=1.0)
    before = model.one(ids).detach().clone()
    (model.one(ids).sum() + model.two(ids).sum()).backward()
    optimizer.step()
    assert torch.equal(model.two(ids), before - 2)


def test_nothing_to_convert() -> None:
    conversion = hb.convert(nn.Linear(2, 2))
    assert conversion.converted == {} and conversion.group is None


def test_a_layer_that_is_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(200, 4)
    expected = model.weight.detach().clone()
    hb.convert(model, min_rows=100)
    assert torch.equal(model(torch.arange(200)), expected)
    assert torch.equal(hb.unconvert(model).weight, expected) and type(model) is nn.Embedding


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skip": ["top"]}, "skip names 'top', which is no embedding layer"),
        ({"inputs": dict, "sample": 1}, "inputs= or sample=.*not both"),
        ({"sample": torch.zeros(2, 1)}, "cannot be called with sample="),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(hb.TableError, match=message):
        hb.convert(made(), min_rows=100, **arguments)
    with pytest.raises(hb.TableError, match="must be a torch.nn.Module, got int"):
        hb.convert(3)


def test_a_weight_with_a_gradient_is_refused() -> None:
    model = made()
    model(batch_of(0)[0]).sum().backward()
    with pytest.raises(hb.TableError, match="'embs.C0' has a gradient"):
        hb.convert(model, min_rows=100, inputs=dict)
    assert type(model.embs["C0"]) is nn.Embedding


def test_a_frozen_layer_stays_frozen() -> None:
    model = made()
    model.embs["C0"].weight.requires_grad_(False)
    before = model.embs["C0"].weight.detach().clone()
    hb.convert(model, min_rows=100, inputs=click_ids)
    assert not model.embs["C0"].weight.requires_grad and model.embs["C1"].weight.requires_grad
    train(model, hb.optim.SGD(model.parameters(), lr=1.0), range(2))
    assert torch.equal(model.embs["C0"].weight, before)


def test_layers_that_share_memory_stay() -> None:
    model = nn.ModuleDict({"item": nn.Embedding(200, 4), "out": nn.Linear(4, 200, bias=False)})
    model["out"].weight.data = model["item"].weight.data
    assert hb.convert(model, min_rows=100).skipped == {"item": "shares memory with 'out.weight'"}


class Scaled(nn.Embedding):
    """A layer with a parameter beside its weight."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows, dim)
        self.scale = nn.Parameter(torch.ones(1))


def test_parameters_keep_their_order() -> None:
    model = Scaled(200, 4)
    hb.convert(model, min_rows=100)
    assert [name for name, _ in model.named_parameters()] == ["weight", "scale"]
    assert [name for name, _ in hb.unconvert(model).named_parameters()] == ["weight", "scale"]
