"""Tables of a checkpoint by themselves, and the commands that look at one."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved_models import ROWS, replace_file, rewrite
from checkpoint.small_models import made, train
from safetensors.torch import load_file, save
from typer.testing import CliRunner

import hotbed as hb
from hotbed.checkpoint import CheckpointError, rows, single, tensors
from hotbed.checkpoint.inspect import differences, verified
from hotbed.checkpoint.manifest import read_manifest
from hotbed.cli.app import app


def test_a_table_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.checkpoint.rows.FILE_BYTES", 1)
    model, optimizer = made("memory", tmp_path, "Adam", untouched="exact")
    train(model, optimizer, range(3))
    saved = hb.save(tmp_path / "run", model, optimizer, step=3)
    for name in ("item", "user"):
        chunks = list(hb.checkpoint.read(saved.path, f"embeddings.{name}"))
        ids = torch.cat([chunk.ids for chunk in chunks])
        assert ids.sort().values.tolist() == model.embeddings.rows(name).ids.tolist()
        for chunk in chunks:
            assert [*chunk.states] == ["exp_avg", "exp_avg_sq"]
            assert chunk.steps is not None and int(chunk.steps.max()) <= 3
    with pytest.raises(CheckpointError, match=r"no table 'x'. It has embeddings.item, emb"):
        next(hb.checkpoint.read(tmp_path / "run", "x"))


def test_tables_that_are_made_elsewhere_are_loaded(tmp_path: Path) -> None:
    ids, vectors = torch.arange(10), torch.randn(10, 3)
    chunks = [(ids[:6] - 5, vectors[:6]), (ids[6:] * 2**50, vectors[6:])]
    static = [(ids.flip(0), vectors.double())]
    folder = hb.checkpoint.write(
        tmp_path, {"user": iter(chunks), "item": static}, rows={"item": 12}
    )
    model = hb.EmbeddingCollection([hb.Table("user", 3), hb.Table("item", 3, rows=12)], seed=0)
    assert hb.load(folder, model).step == 0
    assert torch.equal(model.lookup("user", chunks[0][0]), vectors[:6])
    assert torch.equal(model.lookup("user", chunks[1][0]), vectors[6:])
    assert torch.equal(model.lookup("item", ids), vectors.flip(0))
    optimizer = hb.optim.Adagrad(model.parameters())
    assert "optimizers" in hb.load(folder, model, optimizer, strict=False).missing


@pytest.mark.parametrize(
    ("ids", "weights", "says"),
    [
        (torch.arange(3), torch.ones(4, 2), "a chunk must be ids"),
        (torch.arange(3).int(), torch.ones(3, 2), "a chunk must be ids"),
        (torch.arange(3), torch.ones(3), "a chunk must be ids"),
        (torch.arange(3), torch.ones(3, 2).to_sparse(), "a chunk must be ids"),
        (torch.arange(3), torch.ones(3, 2, device="meta"), "a chunk must be ids"),
        (torch.arange(3), torch.ones(3, 2).numpy(), "a chunk must be ids"),
        (torch.arange(3), torch.ones(3, 3), "differ in dim"),
        (torch.arange(3), torch.ones(3, 2).half(), "differ in dim or dtype"),
        (torch.arange(3) + 8, torch.ones(3, 2), r"outside \[0, 10\)"),
    ],
)
def test_chunks_that_are_none(
    tmp_path: Path, ids: torch.Tensor, weights: torch.Tensor, says: str
) -> None:
    good = torch.arange(2), torch.ones(2, 2)
    with pytest.raises(CheckpointError, match=says):
        hb.checkpoint.write(tmp_path, {"a": [good, (ids, weights)]}, rows={"a": 10})
    with pytest.raises(CheckpointError, match="has no chunk"):
        hb.checkpoint.write(tmp_path, {"a": []})
    assert not list(tmp_path.iterdir())


def test_what_is_no_dict_of_chunks(tmp_path: Path) -> None:
    good = torch.arange(2), torch.ones(2, 2)
    tables: Any
    for tables in ({1: [good]}, {None: [good]}, [("a", [good])]):
        with pytest.raises(CheckpointError, match="tables must be a dict of names to chunks"):
            hb.checkpoint.write(tmp_path, tables)
    for tables in ({"a": [(*good, 1)]}, {"a": [{"ids": 1}]}, {"a": [good[0]]}):
        with pytest.raises(CheckpointError, match="Table 'a': a chunk must be ids"):
            hb.checkpoint.write(tmp_path, tables)
    for chunks in (5, None, 1.5, True, object()):
        tables = {"a": chunks}
        with pytest.raises(CheckpointError, match="Table 'a': give its rows in chunks"):
            hb.checkpoint.write(tmp_path, tables)
    assert not list(tmp_path.iterdir())


def test_a_name_is_text(tmp_path: Path) -> None:
    hb.checkpoint.write(tmp_path, {"a": [(torch.arange(2), torch.ones(2, 2))]})
    name: Any
    for name in ({}, ["a"], {"a"}, 5, None):
        with pytest.raises(hb.InputError, match="table is .*; give its name"):
            next(hb.checkpoint.read(tmp_path, name))
        with pytest.raises(hb.InputError, match="table is .*; give its name"):
            hb.checkpoint.contains(tmp_path, name, [1])


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", 2**63])
def test_steps_that_are_none(tmp_path: Path, step: Any) -> None:
    told = "step must be (an integer from 0 on, got|less than)"
    with pytest.raises(CheckpointError, match=told):
        hb.checkpoint.write(tmp_path, {}, step=step)
    with pytest.raises(CheckpointError, match=told):
        hb.save(tmp_path, hb.models.DLRM(["a"]), step=step)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rows", [{"b": 3}, {"a": 0}, {"a": -4}, {"a": True}, {"a": 2.5}])
def test_numbers_of_rows_are_checked(rows: Any, tmp_path: Path) -> None:
    chunk = torch.arange(2), torch.zeros(2, 3)
    with pytest.raises(hb.checkpoint.CheckpointError, match="rows="):
        hb.checkpoint.write(tmp_path, {"a": [chunk]}, rows=rows)
    assert not list(tmp_path.iterdir())


def test_a_table_without_rows(tmp_path: Path) -> None:
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, 2)
    folder = hb.checkpoint.write(tmp_path, {"a": [nothing]}, rows={"a": 10})
    assert [fault for _, _, fault in verified(folder) if fault] == []
    model = hb.EmbeddingCollection([hb.Table("a", 2, rows=10, init=hb.init.Zeros())], seed=0)
    model.assign("a", [3], torch.ones(1, 2))
    hb.load(folder, model)
    assert not model.rows("a").values.any()


def test_rows_that_are_there_twice_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another program may write them."""
    ids, weights = torch.tensor([5, 7, 6]), torch.ones(3, 2)
    other = {"b": [(ids, weights)]}
    good = hb.checkpoint.write(
        tmp_path / "good", {"a": [(ids, weights), (ids + 3, weights)], **other}
    )
    assert [fault for _, _, fault in verified(good) if fault] == []
    with monkeypatch.context() as patch:
        patch.setattr(single, "repeated", lambda ids: None)
        twice = hb.checkpoint.write(
            tmp_path / "twice", {"a": [(ids, weights), (ids + 2, weights)], **other}
        )
    faults = [fault for _, _, fault in verified(twice) if fault]
    assert faults == [f"{twice} has the row 7 of 'a' twice"]


def test_ids_that_a_table_does_not_have_are_told(tmp_path: Path) -> None:
    for number, (first, count) in enumerate([(0, 4), (0, 3), (-1, 4)]):
        ids = torch.arange(first, first + 4)
        folder = hb.checkpoint.write(tmp_path, {"a": [(ids, torch.ones(4, 2))]}, step=number)
        rewrite(Path(folder), lambda manifest, n=count: manifest["tables"]["a"].update(rows=n))
        faults = [fault for _, _, fault in verified(folder) if fault]
        says = f"{folder}/{ROWS} has an id of 'a' outside [0, {count})"
        assert faults == ([says] if number else [])


def test_differences_are_counted(tmp_path: Path) -> None:
    ids, weights = torch.tensor([5, -7, 2**40]), torch.randn(3, 3)
    other = weights.clone()
    other[1, 2] += 1
    some, none = [(ids, weights)], [(ids[:0], weights[:0])]
    changed = [(ids.flip(0), other.flip(0))]
    one = hb.checkpoint.write(tmp_path / "1", {"left": some, "both": some, "new": none})
    two = hb.checkpoint.write(tmp_path / "2", {"right": some, "both": changed, "new": some})
    expected = [
        ("left", 3, 0, 0, 0),
        ("both", 0, 0, 1, 2),
        ("new", 0, 3, 0, 0),
        ("right", 0, 3, 0, 0),
    ]
    assert [*differences(one, two)] == expected


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_commands(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam")
    train(model, optimizer, range(2))
    first = hb.save(tmp_path / "run", model, optimizer, step=2).path
    model.embeddings.assign("user", [2**60, 2**61], torch.ones(2, 3))
    model.embeddings.assign("item", [7], torch.ones(1, 4))
    hb.save(tmp_path / "run", model, optimizer, step=3)

    code, said = run("verify", tmp_path / "run")
    assert code == 0 and "is whole: step 3" in said
    code, said = run("show", first, "--json", tmp_path / "shown.json")
    assert code == 0 and "embeddings.item" in said and "adam" in said
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown["step"] == 2 and shown["tables"][0]["saved_rows"] == 60
    code, said = run("diff", first, tmp_path / "run")
    counts = [line.strip("│ ").split("│") for line in said.splitlines() if "embeddings." in line]
    numbers = {line[0].strip(): [int(part) for part in line[1:]] for line in counts}
    users = model.embeddings.count("user") - 2
    assert numbers == {"embeddings.item": [0, 0, 1, 59], "embeddings.user": [0, 2, 0, users]}

    rows = Path(first) / "rows-0-0.safetensors"
    for path, file in (
        (first, "checkpoint.json"),
        (first, rows.name),
        (tmp_path / "run", rows.name),
    ):
        before = (Path(first) / file).read_bytes()
        code, said = run("show", path, "--json", Path(first) / file)
        assert code == 2 and "Name another." in said
        assert (Path(first) / file).read_bytes() == before
    contents = bytearray(rows.read_bytes())
    contents[-1] ^= 1
    rows.write_bytes(contents)
    code, said = run("verify", first)
    assert code == 1 and "is damaged, see above" in said and "rows-0-0.safetensors" in said
    code, said = run("verify", tmp_path)
    assert code == 2 and "no checkpoint" in said


@pytest.mark.parametrize("part", ["states/exp_avg", "states/exp_avg_sq", "steps", "weights"])
def test_rows_that_lack_a_part_are_told(tmp_path: Path, part: str) -> None:
    model, optimizer = made("memory", tmp_path, "Adam", untouched="exact")
    train(model, optimizer, range(3))
    folder = Path(hb.save(tmp_path / "run", model, optimizer, step=3).path)
    held = load_file(folder / ROWS)
    name = f"embeddings.item/{part}"
    if part == "weights":
        held[name] = held[name].half()
    elif part == "states/exp_avg_sq":
        held[name] = held[name][:, :1].contiguous()
    else:
        del held[name]
    replace_file(folder, ROWS, save(held))
    says = f"{ROWS} has no {part}" if part != "weights" else f"{ROWS} has weights of .*float16"
    with pytest.raises(CheckpointError, match=says):
        list(hb.checkpoint.read(folder, "embeddings.item"))
    faults = [fault for _, _, fault in verified(str(folder)) if fault]
    assert len(faults) == 1 and re.search(says, faults[0])


def test_chunks_are_packed_split_and_may_be_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single, "FILE_BYTES", 2400)
    monkeypatch.setattr(rows, "FILE_BYTES", 2400)
    ids, weights = torch.empty(10, dtype=torch.int64), torch.empty(10, 4)

    def again() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(50):
            torch.arange(10 * number, 10 * number + 10, out=ids)
            yield ids, weights.copy_(ids[:, None].expand(10, 4))

    large = torch.arange(1000)
    tables = {"small": again(), "large": [(large, large[:, None].expand(1000, 4).float())]}
    folder = hb.checkpoint.write(tmp_path, tables, rows={"large": 1000})
    sizes = [path.stat().st_size for path in Path(folder).glob("rows-*")]
    assert len(sizes) == 15 and max(sizes) < 6000
    for name, count in (("small", 500), ("large", 1000)):
        found = [*hb.checkpoint.read(folder, name)]
        own = torch.cat([chunk.ids for chunk in found])
        assert torch.equal(own.sort().values, torch.arange(count))
        assert torch.equal(
            torch.cat([c.weights for c in found]), own[:, None].expand(count, 4).float()
        )


def test_rows_stay_while_the_next_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into memory that is used again."""
    monkeypatch.setattr(rows, "FILE_BYTES", 200)
    count = 3 * rows._READERS
    chunks = [(torch.arange(9) + 9 * n, torch.full((9, 4), float(n))) for n in range(count)]
    folder = hb.checkpoint.write(tmp_path, {"t": chunks})
    been_read = threading.Semaphore(0)

    def read_views(*given: Any) -> Any:
        found = tensors.read_views(*given)
        been_read.release()
        return found

    monkeypatch.setattr(rows, "read_views", read_views)
    waited = 0
    found = rows.read_rows(folder, read_manifest(folder), ["t"], again=True)
    for number, (_, some) in enumerate(found):
        while waited < min(count, number + 1 + rows._READERS):
            assert been_read.acquire(timeout=60)
            waited += 1
        assert torch.equal(some.tensors["ids"], chunks[number][0])
        assert torch.equal(some.tensors["weights"], chunks[number][1])
    assert number == count - 1
