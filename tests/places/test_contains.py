"""Which ids have a row, in every place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kept_in import PLACES, collection, step

import hotbed as hb

pytestmark = pytest.mark.filterwarnings("default:The budget holds:UserWarning")

ABSENT = 10**15


@pytest.mark.parametrize("place", PLACES)
def test_a_row_is_there_from_the_forward_of_its_first_batch_on(tmp_path: Path, place: str) -> None:
    """And not while look-ahead keeps a slot for it, or evaluation reads its first value."""
    model = collection(place, tmp_path, hb.Table("user", 48, padding_idx=0))
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    data = [{"user": torch.arange(n * 40, n * 40 + 60)} for n in range(20)]
    for number, batch in enumerate(hb.lookahead(data, model)):
        ids = torch.arange(20 * 40 + 60)
        seen = (ids < number * 40 + 20) & (ids != 0) if number else torch.zeros_like(ids).bool()
        assert torch.equal(model.contains("user", ids), seen)
        with torch.no_grad():
            model({"user": torch.tensor([ABSENT])})
        step(model, optimizer, batch)
        assert bool(model.contains("user", batch["user"][1:]).all())
    model({"user": torch.tensor([ABSENT + 1])})
    assert model.contains("user", [ABSENT, ABSENT + 1, 0]).tolist() == [False, True, False]
    model.assign("user", [0], torch.ones(1, 48))
    assert model.contains("user", [0]).tolist() == [True]
    assert model.contains("user", []).tolist() == []


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_must_be_there(tmp_path: Path, place: str) -> None:
    model = collection(place, tmp_path, hb.Table("user", 48), hb.Table("item", 48, 100))
    hb.optim.Adagrad(model.parameters(), lr=0.1)
    model({"user": torch.tensor([5, 6]), "item": torch.tensor([1, 2])})
    rows = model.lookup("user", [6, 5, 6], missing="error")
    assert torch.equal(rows, model.lookup("user", [6, 5, 6]))
    with pytest.raises(hb.IdError, match=r"'user': 2 of 3 ids have no row, such as 7\."):
        model.lookup("user", torch.tensor([7, 5, -7]), missing="error")
    assert model.lookup("user", [7]).shape == (1, 48) and model.count("user") == 2
    assert model.lookup("item", [0, 99], missing="error").shape == (2, 48)
    assert model.contains("item", [-1, 0, 99, 100]).tolist() == [False, True, True, False]
    with pytest.raises(hb.InputError, match="missing must be 'initial' or 'error', got True"):
        model.lookup("user", [5], missing=True)
    with pytest.raises(hb.TableError, match="no table 'nobody'"):
        model.contains("nobody", [1])
