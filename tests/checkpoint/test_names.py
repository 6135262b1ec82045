"""Names that differ between a model and a checkpoint: prefixes, and what has nothing in common."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved_models import with_bias
from checkpoint.small_models import batch_of, everything, made, same, train
from torch import nn

import hotbed as hb
from hotbed.checkpoint import CheckpointError


class Wrapped(nn.Module):
    """As torch.compile wraps a module."""

    def __init__(self, module: nn.Module, name: str = "_orig_mod") -> None:
        super().__init__()
        self.add_module(name, module)


def trained(folder: Path, steps: int) -> tuple[Any, Any]:
    model, optimizer = made("memory", folder, "Adam")
    train(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize("name", ["_orig_mod", "module"])
def test_prefixes_are_taken_away_and_put_before(tmp_path: Path, name: str) -> None:
    model, optimizer = trained(tmp_path, 3)
    expected = everything(model, optimizer)
    hb.save(tmp_path / "wrapped", Wrapped(model, name), optimizer, step=3)
    hb.save(tmp_path / "plain", model, optimizer, step=3)

    other, its_optimizer = trained(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"Did you mean rename={{'{name}.': ''}}"):
        hb.load(tmp_path / "wrapped", other, its_optimizer)
    hb.load(tmp_path / "wrapped", other, its_optimizer, rename={f"{name}.": ""})
    assert same(everything(other, its_optimizer), expected)

    other, its_optimizer = trained(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"Did you mean rename={{'': '{name}.'}}"):
        hb.load(tmp_path / "plain", Wrapped(other, name), its_optimizer)
    restored = hb.load(
        tmp_path / "plain", Wrapped(other, name), its_optimizer, rename={"": f"{name}."}
    )
    assert not restored.missing and not restored.unexpected
    assert same(everything(other, its_optimizer), expected)
    assert torch.equal(other.eval()(batch_of(9)), model.eval()(batch_of(9)))


def test_a_part_of_a_model_that_is_wrapped(tmp_path: Path) -> None:
    model, _ = trained(tmp_path, 2)
    hb.save(tmp_path / "run", model, step=2)
    other, _ = trained(tmp_path, 0)
    top, other.top = other.top, Wrapped(other.top)
    with pytest.raises(CheckpointError, match="rename={'top.': 'top._orig_mod.'}"):
        hb.load(tmp_path / "run", other)
    hb.load(tmp_path / "run", other, rename={"top.": "top._orig_mod."})
    assert torch.equal(top.weight, model.top.weight)
    hb.save(tmp_path / "other", other, step=2)
    model, _ = trained(tmp_path, 0)
    with pytest.raises(CheckpointError, match="rename={'top._orig_mod.': 'top.'}"):
        hb.load(tmp_path / "other", model)
    hb.load(tmp_path / "other", model, rename={"top._orig_mod.": "top."})
    assert torch.equal(top.weight, model.top.weight)


def test_modules_of_a_renamed_prefix_are_told_the_version_that_was_saved(tmp_path: Path) -> None:
    told = []

    class Old(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: Any, prefix: Any, metadata: Any, *more: Any) -> None:
            told.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *more)

    hb.save(tmp_path / "1", Wrapped(Old(1, 1)), step=0)
    hb.load(tmp_path / "1", Old(1, 1), rename={"_orig_mod.": ""})
    hb.save(tmp_path / "2", Old(1, 1), step=0)
    hb.load(tmp_path / "2", Wrapped(Old(1, 1)), rename={"": "_orig_mod."})
    assert told == [7, 7]


def test_prefixes_that_are_wrong(tmp_path: Path) -> None:
    model, _ = trained(tmp_path, 1)
    hb.save(tmp_path / "run", model, step=1)
    before = everything(model)
    for rename, says in (
        ({"module.": ""}, "has the prefix 'module.', with which no name .* begins"),
        ({"embeddings.item": "x", "embeddings.user": "x"}, "the same name, 'x'"),
        (["_orig_mod."], "must be a dict of prefixes"),
        ({"top": 1}, "must be a dict of prefixes"),
    ):
        with pytest.raises(CheckpointError, match=says):
            hb.load(tmp_path / "run", model, rename=rename)
    assert same(everything(model), before)


def test_nothing_in_common_is_an_error_also_where_it_is_not_strict(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path, 3)
    hb.save(tmp_path / "run", Wrapped(model), optimizer, step=3)
    other, its_optimizer = trained(tmp_path, 1)
    before = everything(other, its_optimizer)
    with pytest.raises(CheckpointError, match="nothing in common.*rename={'_orig_mod.': ''}"):
        hb.load(tmp_path / "run", other, its_optimizer, strict=False)
    with pytest.raises(CheckpointError, match="nothing in common"):
        hb.load(tmp_path / "run", nn.Linear(1, 1), strict=False)
    assert same(everything(other, its_optimizer), before)
    train(other, its_optimizer, range(1, 2))


def test_no_table_or_no_tensor_in_common_is_warned_of(tmp_path: Path) -> None:
    model, _ = trained(tmp_path, 2)
    hb.save(tmp_path / "run", model, step=2)
    other, _ = trained(tmp_path, 0)
    other.top, other.seen = Wrapped(other.top), None
    with pytest.warns(UserWarning, match="no tensors in common.*rename={'top.': 'top._orig_mod.'}"):
        hb.load(tmp_path / "run", other, strict=False)
    assert torch.equal(other.embeddings.rows("user").values, model.embeddings.rows("user").values)
    other, _ = trained(tmp_path, 0)
    other.other = other.embeddings
    del other.embeddings
    with pytest.warns(UserWarning, match="no tables in common") as told:
        hb.load(tmp_path / "run", other, strict=False)
    assert told[0].filename == __file__
    assert torch.equal(other.top.weight, model.top.weight)
    made_elsewhere = hb.checkpoint.write(
        tmp_path / "written", {"embeddings.user": [(torch.arange(3), torch.ones(3, 3))]}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = hb.load(made_elsewhere, model, strict=False)
    assert "embeddings.item" in restored.missing


def test_a_table_that_was_not_saved_reads_as_before(tmp_path: Path) -> None:
    """Also its rows that are behind."""

    def stepped(*names: str) -> tuple[hb.EmbeddingCollection, Any]:
        model = hb.EmbeddingCollection([hb.Table(name, 2, 9) for name in names], seed=0)
        optimizer = hb.optim.Adam(model.parameters(), lr=0.1, untouched="exact")
        for ids in ([1, 2], [7], [7]):
            vectors = model({name: torch.tensor(ids) for name in names})
            torch.cat([*vectors.values()]).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    hb.save(tmp_path, *stepped("both", "saved"), step=3)
    model, optimizer = stepped("own", "both")
    before = model.lookup("own", torch.arange(9))
    assert hb.load(tmp_path, model, optimizer, strict=False).missing == ["own"]
    assert torch.equal(model.lookup("own", torch.arange(9)), before)


# -- ids that come twice, and paths that are none ----------------------------------------------------


@pytest.mark.parametrize("rows", [{}, {"a": 10}])
@pytest.mark.parametrize(("other", "twice"), [([7, 5, 7], 7), ([5, 6], 6), ([9, 3], 3)])
def test_ids_that_come_twice_are_refused(
    tmp_path: Path, other: list[int], twice: int, rows: dict[str, int]
) -> None:
    first = torch.tensor([3, 8, 6]), torch.zeros(3, 2)
    second = torch.tensor(other), torch.ones(len(other), 2)
    with pytest.raises(CheckpointError, match=f"Table 'a' has the id {twice} twice"):
        hb.checkpoint.write(tmp_path, {"b": [first], "a": [first, second]}, rows=rows)
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (
        lambda: hb.save("", with_bias(1), step=1),
        lambda: hb.save(b"", with_bias(1), step=1),
        lambda: hb.load("", with_bias(1)),
        lambda: hb.checkpoint.write("", {}),
        lambda: hb.checkpoint.latest(""),
        lambda: hb.checkpoint.list(""),
        lambda: hb.checkpoint.load_model(""),
        lambda: next(hb.checkpoint.read("", "x")),
    ):
        with pytest.raises(CheckpointError, match="The path of a checkpoint is empty"):
            use()
    assert not list(tmp_path.iterdir())
