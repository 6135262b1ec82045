"""What was made before `hotbed.convert`, and `hotbed.unconvert`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.plain_models import (
    DIM,
    Click,
    batch_of,
    click_ids,
    made,
    storage,
    train,
)
from torch import nn

import hotbed as hb

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
}


class Holding(Click):
    """With a list of parameters for a penalty, as some libraries keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.penalized = [("embs", [self.embs["C0"].weight]), {"bag": self.bag.weight}]


def test_lists_of_parameters_are_named_and_refuse_use() -> None:
    model = made(Holding)
    optimizer = torch.optim.Adam(model.parameters())
    conversion = hb.convert(model, min_rows=100, inputs=click_ids)
    assert conversion.stale == [
        "penalized[0][1][0] (of 'embs.C0')",
        "penalized[1]['bag'] (of 'bag')",
        "an optimizer, which hotbed.optim.convert(optimizer) takes over",
    ]
    assert "Still holds a weight of before: penalized[0][1][0]" in str(conversion)
    for use in (
        lambda: model.penalized[0][1][0].square(),
        lambda: torch.sum(model.penalized[1]["bag"]),
        lambda: optimizer.zero_grad(),
        lambda: optimizer.step(),
    ):
        with pytest.raises(hb.TableError, match=r"before hotbed.convert.*hotbed.optim.convert"):
            use()
    assert "weight of 'bag' before hotbed.convert" in repr(model.penalized[1]["bag"])
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model.penalized))


def in_groups(model: Any) -> list[dict[str, Any]]:
    rest = [*model.bag.parameters(), *model.small.parameters(), *model.top.parameters()]
    return [{"params": model.embs.parameters()}, {"params": rest, "lr": 0.02}]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_goes_on(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    plain, model = made(), made()
    first, second = (kind(in_groups(m), **options) for m in (plain, model))
    assert train(plain, first, range(3)) == train(model, second, range(3))
    for optimizer in (first, second):
        optimizer.zero_grad()
    hb.convert(model, min_rows=100, inputs=click_ids)
    with pytest.raises(hb.OptimizerError, match=f"torch.optim.{name}, which cannot update"):
        kind(model.parameters(), **options).step()
    converted = hb.optim.convert(second)
    assert type(converted) is getattr(hb.optim, name) and hb.optim.convert(converted) is converted
    assert [g["lr"] for g in converted.param_groups] == [options["lr"], 0.02]
    expected = train(plain, first, range(3, 12))
    assert train(model, converted, range(3, 12)) == pytest.approx(expected, rel=2e-6)


def test_other_optimizers_are_named() -> None:
    with pytest.raises(
        hb.OptimizerError, match="takes torch.optim's Adadelta, Adagrad, .*got ASGD"
    ):
        hb.optim.convert(torch.optim.ASGD(made().parameters()))


# -- and back --------------------------------------------------------------------------------------


def test_unconverted_it_is_plain_again(tmp_path: Path) -> None:
    for where in (None, storage(tmp_path)):
        model = made()
        hb.convert(model, min_rows=100, storage=where, inputs=click_ids)
        optimizer = hb.optim.Adam(model.parameters(), lr=0.01, untouched="exact")
        train(model, optimizer, range(4))
        optimizer.zero_grad()
        expected = model(batch_of(9)[0])
        assert hb.unconvert(model) is model
        assert type(model.embs["C0"]) is nn.Embedding and type(model.bag) is nn.EmbeddingBag
        assert torch.equal(model(batch_of(9)[0]), expected)
        assert repr(model) == repr(made()) and [*model.state_dict()] == [*made().state_dict()]
        train(model, torch.optim.Adam(model.parameters()), range(2))
        copy.deepcopy(model)


def test_layers_over_dynamic_tables_get_chosen_rows() -> None:
    model = nn.ModuleDict({"user": hb.Embedding(None, DIM), "bag": hb.EmbeddingBag(50, DIM)})
    ids = torch.tensor([7, -3, 10**12])
    expected = model["user"](ids).detach()
    with pytest.raises(hb.TableError, match="'user' is dynamic: say by ids="):
        hb.unconvert(model)
    with pytest.raises(hb.TableError, match="ids= names 'bags'"):
        hb.unconvert(model, {"bags": ids})
    hb.unconvert(model, {"user": ids})
    assert torch.equal(model["user"](torch.arange(3)), expected)
    assert type(model["bag"]) is nn.EmbeddingBag and model["bag"].mode == "mean"


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, other = made(), made()
    for each in (model, other):
        hb.convert(each, min_rows=100, inputs=click_ids)
    optimizer, second = (hb.optim.Adam(m.parameters(), lr=0.01) for m in (model, other))
    train(model, optimizer, range(3))
    hb.save(tmp_path, model, optimizer, step=3)
    hb.load(tmp_path, other, second)
    assert train(other, second, range(3, 6)) == train(model, optimizer, range(3, 6))
