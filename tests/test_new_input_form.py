"""A new form of input is one entry in a list."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import hotbed as hb
from hotbed.inputs.bags import FORMS, Bags, Form, Wanted


@dataclasses.dataclass
class Runs:
    """Ids that follow each other: each sample has `lengths` of them from `begins` on."""

    begins: list[int]
    lengths: list[int]


def read_runs(wanted: Wanted, runs: Runs) -> Bags:
    if len(runs.begins) != len(runs.lengths):
        raise hb.InputError(f"Feature {wanted.feature!r}: {len(runs.begins)} runs have no lengths.")
    pairs = list(zip(runs.begins, runs.lengths, strict=True))
    ids = torch.tensor([n for begin, length in pairs for n in range(begin, begin + length)])
    offsets = torch.tensor([0, *runs.lengths]).cumsum(0)
    return Bags(ids.long(), offsets, 0, len(pairs), None, len(pairs), None, True)


def test_runs_are_read_in_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs([3, 0, 7], [2, 0, 3])
    jagged = hb.Jagged.from_lists([[3, 4], [], [7, 8, 9]])
    tables = [hb.Table("a", dim=4, rows=10), hb.Table("b", dim=4, rows=10, combiner="none")]
    collection = hb.EmbeddingCollection(tables)
    bag = hb.EmbeddingBag(10, 4, mode="mean")
    with pytest.raises(hb.InputError, match="Runs"):
        bag(runs)
    monkeypatch.setattr(
        "hotbed.inputs.bags.FORMS", [Form(lambda v: isinstance(v, Runs), read_runs), *FORMS]
    )
    assert torch.equal(bag(runs), bag(jagged))
    found, expected = (collection({"a": given, "b": given}) for given in (runs, jagged))
    assert torch.equal(found["a"], expected["a"])
    assert torch.equal(found["b"].values, expected["b"].values)
    expected["a"].sum().backward()
    with pytest.raises(hb.InputError, match="'a': 2 runs have no lengths"):
        collection({"a": Runs([1, 2], [1]), "b": runs})
