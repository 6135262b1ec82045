"""Models given wrong settings, names and batches: clear errors, and right logits of the smallest batches."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import hotbed as hb
from hotbed.models import DCN, DIN, MODELS, AutoInt, DeepFM, FinalMLP, MMoE, TwoTower

HISTORIES = {"item": "item", "history": "item", "user": "user"}


def made(name, **options):
    if name == "din":
        tables = [hb.Table("item", 4, combiner=None, padding_idx=-1), "user"]
        return DIN(tables, 4, 1, hidden=[5], features=HISTORIES, seed=0, **options)
    return MODELS[name](["user", "item"], dim=4, num_dense=1, seed=0, **options)


def batch_of(samples):
    return {
        "user": torch.arange(samples),
        "item": torch.arange(samples) + 7,
        "history": torch.arange(2 * samples).reshape(samples, 2),
        "dense": torch.ones(samples, 1),
    }


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_batches_of_no_and_one_sample(name, samples, training):
    model = made(name).train(training)
    logits = model(batch_of(samples))
    assert len(logits) == samples and logits.isfinite().all()
    logits.sum().backward()
    assert all(b.isfinite().all() for b in model.buffers())


def test_one_sample_alone_is_standardised_as_in_evaluation():
    dice = hb.nn.Dice(3)
    dice(torch.randn(8, 3))
    before = [b.clone() for b in dice.buffers()]
    one = torch.randn(1, 3)
    assert torch.equal(dice(one), dice.eval()(one))
    assert all(torch.equal(a, b) for a, b in zip(before, dice.buffers(), strict=True))


@pytest.mark.parametrize(
    ("kind", "setting", "value", "expected"),
    [
        (DCN, "hidden", 32, "a list of integers"),
        (DCN, "hidden", "ab", "a list of integers"),
        (DCN, "hidden", [3.5], "a list of integers"),
        (DCN, "hidden", None, "a list of integers"),
        (DCN, "dropout", "x", "a finite number"),
        (DCN, "dropout", True, "a finite number"),
        (DCN, "layers", 2.5, "an integer"),
        (DCN, "layers", 2**31, "an integer below 2"),
        (DCN, "hidden", [8, 10**30], "a list of integers below 2"),
        (DCN, "dropout", 10**400, "a finite number"),
        (AutoInt, "layers", -1, "0 or more"),
        (FinalMLP, "heads", 2.0, "an integer"),
        (FinalMLP, "first_context", "user", "a list of names"),
        (MMoE, "tower", None, "a list of integers"),
        (DIN, "history", "history", "a list of names"),
        (DIN, "hidden", [0], "positive integers"),
        (TwoTower, "user", "user", "a list of names"),
        (TwoTower, "temperature", float("inf"), "a finite number"),
        (TwoTower, "is_corrected", "no", "True or False"),
        (DeepFM, "one_row", "no", "True or False"),
    ],
)
def test_settings_of_wrong_types(kind, setting, value, expected):
    with pytest.raises(hb.TableError, match=rf"{setting} is .*\. Pass {expected}"):
        kind(["user", "item"], dim=4, **{setting: value})


def test_settings_take_what_is_alike():
    @dataclasses.dataclass(frozen=True)
    class Settings(hb.models.ModelSettings):
        widths: tuple[int, ...] | None = None
        rate: float = 0.0
        other: object = None

    settings = Settings(widths=(np.int64(n) for n in (3, 4)), rate=np.float32(0.5), other=[1])
    assert settings == Settings(4 * 4, 13, (3, 4), 0.5, (1,)) and Settings().widths is None
    assert [type(n) for n in (*settings.widths, settings.rate)] == [int, int, float]


def test_names_that_clash():
    tables = ["a", "b"]
    with pytest.raises(hb.TableError, match="a feature is named 'dense'"):
        DCN(tables, 4, features={"dense": "a"})
    clash = {"a": "a", "a.wide": "b"}
    with pytest.raises(hb.TableError, match="'a.wide' has the name of 'a' in the linear part"):
        DeepFM(tables, 4, 1, features=clash)
    batch = {"a": torch.tensor([1]), "a.wide": torch.tensor([2]), "dense": torch.ones(1, 1)}
    assert DeepFM(tables, 4, 1, features=clash, one_row=True)(batch).shape == (1,)
    for wrong in ({}, ["a"]):
        with pytest.raises(hb.TableError, match="Pass a dict feature"):
            DCN(tables, 4, features=wrong)
    for wrong in ("user", None, hb.Table("a", 4)):
        with pytest.raises(hb.TableError, match="Pass a list of names or hotbed.Table objects"):
            DCN(wrong, 4)


@pytest.mark.parametrize("name", MODELS)
def test_batches_that_do_not_fit(name):
    model, batch = made(name), batch_of(3)
    wrong = [
        ({"dense": torch.ones(3, 1).long()}, r"batch\['dense'\] is torch.int64"),
        ({"dense": torch.ones(3, 1).double()}, r"float64"),
        ({"dense": torch.ones(2, 1)}, "2 samples"),
    ]
    for change, message in wrong:
        with pytest.raises(hb.InputError, match=message):
            model(batch | change)
    for feature in ("user", "item"):
        with pytest.raises(hb.InputError, match=f"Feature '{feature}' is missing"):
            model({key: value for key, value in batch.items() if key != feature})
    with pytest.raises(hb.InputError, match="the batch is int. Pass a dict"):
        model(3)


def test_histories_and_items_that_are_jagged():
    bags = hb.Jagged.from_lists([[1, 2], [3], []])
    din, towers = made("din"), made("two-tower")
    with pytest.raises(hb.InputError, match=r"history 'history' is Jagged. Pass \(B, L\)"):
        din(batch_of(3) | {"history": bags})
    with pytest.raises(hb.InputError, match="'item' has more than a vector a sample. Pass one id"):
        din(batch_of(3) | {"item": bags})
    with pytest.raises(hb.InputError, match="feature 'item' is Jagged. It is the item's id"):
        towers(batch_of(3) | {"item": bags})
    plain = batch_of(3)
    listed = plain | {"history": plain["history"].numpy(), "item": plain["item"].tolist()}
    assert torch.equal(din.eval()(listed), din(plain))


def test_double_tables_and_layers(tmp_path):
    tables = [hb.Table(name, 4, dtype=torch.float64) for name in ("user", "item")]
    model = TwoTower(tables, 4, seed=0).double()
    assert model({"user": torch.arange(3), "item": torch.arange(3)}).dtype == torch.float64


def test_registering_what_is_no_model(tmp_path):
    for name in (3, "", type("Mine", (DCN,), {})):
        with pytest.raises(hb.TableError, match="register: the name is"):
            hb.models.register(name)
    kinds: list[Any] = [int, len]
    for kind in kinds:
        with pytest.raises(hb.TableError, match="is no class of modules"):
            hb.models.register("hostile")(kind)
    assert "hostile" not in MODELS


def test_settings_that_no_checkpoint_can_keep(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Settings(hb.models.ModelSettings):
        precision: object = None

    class Mine(hb.models.ClickModel):
        pass

    Mine.Settings = Settings
    monkeypatch.setitem(MODELS, "mine", Mine)
    with pytest.raises(
        hb.checkpoint.CheckpointError, match="'mine': no checkpoint can keep its setting precision"
    ):
        hb.save(tmp_path, Mine(["a"], 4, precision=torch.float16), step=0)
    monkeypatch.setitem(MODELS, "linear", torch.nn.Linear)
    with pytest.raises(hb.checkpoint.CheckpointError, match="Linear has no config"):
        hb.save(tmp_path, torch.nn.Linear(1, 1), step=0)
    assert not [*tmp_path.rglob("checkpoint.json")]
