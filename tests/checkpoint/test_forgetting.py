"""A row that was erased is in no file any more, when docs/forgetting.md says so."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_in import ABOVE_SSD, AROUND, step

import hotbed as hb

PERSON = 0x1234567898765432
VALUE = 12345.678


def files_with(folder: Path, *needles: bytes) -> list[str]:
    """Those that have any of these bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [str(f.relative_to(folder)) for f in files if any(n in f.read_bytes() for n in needles)]


def made(folder: Path, **options: Any) -> tuple[Any, Any]:
    storage = hb.Storage(host=ABOVE_SSD + AROUND, ssd=folder / "rows", **options)
    tables = [hb.Table("user", 48), hb.Table("item", 48, 1000)]
    model = hb.EmbeddingCollection(tables, seed=0, storage=storage)
    return model, hb.optim.SGD(model.parameters(), lr=0.0)


def trained(model: Any, optimizer: Any, numbers: range) -> None:
    """So many other rows that those of the person go to the disk."""
    for number in numbers:
        ids = torch.arange(number * 90, number * 90 + 90)
        step(model, optimizer, {"user": ids, "item": ids % 999})


def test_no_file_has_the_row_any_more(tmp_path: Path) -> None:
    row = struct.pack("<4f", *[VALUE] * 4)
    person = struct.pack("<q", PERSON), str(PERSON).encode()
    model, optimizer = made(tmp_path)
    for name, one in (("user", PERSON), ("item", 999)):
        model.assign(name, [one], torch.full((1, 48), VALUE))
    for _ in range(3):
        step(model, optimizer, {"user": torch.tensor([PERSON]), "item": torch.tensor([999])})
    trained(model, optimizer, range(12))
    model.flush()
    hb.save(tmp_path / "run", model, optimizer, step=1)
    found = files_with(tmp_path, row)
    assert any(file.startswith("rows/rows-") for file in found)
    assert any(file.startswith("run/step-000000000001/") for file in found)
    assert "rows/hottest.json" in files_with(tmp_path, *person)
    assert hb.checkpoint.contains(tmp_path / "run", "user", [PERSON, 3, -3]).tolist() == [
        True,
        True,
        False,
    ]

    first = hb.EmbeddingCollection([*model.tables.values()], seed=0).lookup("item", [999])
    assert hb.erase(model, {"user": [PERSON], "item": [999]}) == {"user": 1, "item": 1}
    hb.save(tmp_path / "run", model, optimizer, step=2, keep=1)
    model.flush()
    assert not hb.checkpoint.contains(tmp_path / "run", "user", [PERSON]).any()
    assert torch.equal(model.lookup("item", [999]), first)
    assert all(file.startswith("rows/rows-") for file in files_with(tmp_path, row, *person))
    hb.save(tmp_path / "linked", model, optimizer, step=2, linked=True)
    assert files_with(tmp_path / "linked", row)
    hb.checkpoint.pack(tmp_path / "linked")
    assert files_with(tmp_path / "linked", row, *person) == []
    expected = {name: model.rows(name) for name in model.tables}

    del model, optimizer
    model, optimizer = made(tmp_path, reset=True)
    hb.load(tmp_path / "run", model, optimizer)
    assert files_with(tmp_path, row, *person) == []
    for name, rows in expected.items():
        assert all(map(torch.equal, model.rows(name), rows))
    trained(model, optimizer, range(12, 24))
    model.flush()
    assert files_with(tmp_path, row, *person) == []


def test_ids_that_are_looked_for_in_a_checkpoint(tmp_path: Path) -> None:
    hb.checkpoint.write(tmp_path / "c", {"a": [(torch.arange(5) * 2, torch.zeros(5, 3))]})
    assert hb.checkpoint.contains(tmp_path / "c", "a", [0, 1, 8, 10]).tolist() == [
        True,
        False,
        True,
        False,
    ]
    assert hb.checkpoint.contains(tmp_path / "c", "a", []).tolist() == []
    with pytest.raises(hb.InputError, match="ids must be"):
        hb.checkpoint.contains(tmp_path / "c", "a", [0.5])
    with pytest.raises(hb.checkpoint.CheckpointError, match="no table 'b'"):
        hb.checkpoint.contains(tmp_path / "c", "b", [1])
