"""Models whose inputs are in other places than those of the checkpoint, which no name or shape tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.data import Id, Label, Number, Pair, Schema
from hotbed.data.columns import Column
from hotbed.models import MMoE

COLUMNS: dict[str, Column] = {
    "clicked": Label(),
    "bought": Label(),
    "price": Number(),
    "age": Number(),
    "user": Id(),
    "item": Id(),
    "both": Pair(of=("user", "item")),
}


def model(*first: str, **changed: Column) -> MMoE:
    """A model of these columns, some of them `first`."""
    order = [*first, *(name for name in COLUMNS if name not in first)]
    schema = Schema({name: changed.get(name, COLUMNS[name]) for name in order})
    return MMoE.from_schema(schema, dim=4, expert=[3], tower=[2], tasks=2, seed=1)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            model("item"),
            r"features user \(table user\), item .*, and the model has item \(table item",
        ),
        (model("age"), "numbers price, age, and the model has age, price"),
        (model("bought"), "labels clicked, bought, and the model has bought, clicked"),
        (model(user=Id(values="int")), r"ids of .*user \(hash\), and the model has .*user \(int\)"),
        (
            model(both=Pair(of=("item", "user"))),
            r"ids of both \(\['user', 'item'\]\), .*'item', 'user'",
        ),
    ],
)
def test_another_order_is_refused(tmp_path: Path, other: MMoE, told: str) -> None:
    hb.save(tmp_path, model(), step=0)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"saved with the {told}"):
        hb.load(tmp_path, other)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    hb.load(tmp_path, other, strict=False)


def test_what_decides_no_place_may_change(tmp_path: Path) -> None:
    hb.save(tmp_path, model(), step=0)
    hb.load(tmp_path, model("user", price=Number("log", missing=1.0)))


def test_tables_in_another_order_are_refused(tmp_path: Path) -> None:
    hb.save(tmp_path, hb.models.DLRM(["user", "item"], dim=4, bottom=[4], top=[4]), step=0)
    with pytest.raises(CheckpointError, match="features user .*, and the model has item"):
        hb.load(tmp_path, hb.models.DLRM(["item", "user"], dim=4, bottom=[4], top=[4]))
