"""Paths as nobody would choose them, and folders in which somebody else has files."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.harness import attack, seeds
from attacks.history import TABLES, batches, collection, ids_of, step
from checkpoint.saved_models import bias_of, saved, with_bias

import hotbed as hb

NAMES = [
    "a b", " ", "a\nb", "ümlaut", "日本語", "🌱", "-rf", "--help", "'\"`$(x)", "%s%d{}", "a\\b", "*?[",
    "rows-1", "rows-x", "in-use", "checkpoint.json", "~", "x" * 255, "é" * 127, "a\tb", "#", ":", "...",
    "\x01\x7f", "nul\udc80", "e\u0301", "step-000000000000", "C:", "CON", "\u202egpj",
]  # fmt: skip

FOREIGN = [
    "notes.txt", "rows-mine/data.csv", "rows-1.bak/x", "rows-7/data.csv", "rows-", "in-use.txt",
    "hottest.json.mine", ".hidden", "rows-2x/rows-1/manifest", "deep/er/rows-1/x", "model.json.mine",
]  # fmt: skip


def odd_path(top: Path, chance: random.Random) -> Path:
    """A path below `top`, whose folders are there or not, by way of links or not."""
    path = top
    for _ in range(chance.randint(1, 4)):
        path = path / chance.choice(NAMES)
        how = chance.random()
        if len(os.fsencode(path)) > 3000:
            break
        if how < 0.3:
            path.mkdir(parents=True, exist_ok=True)
        elif how < 0.5 and not path.exists():
            real = top / f"real {chance.randrange(10**6)}"
            real.mkdir()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(
                chance.choice((str(real), os.path.relpath(real, path.parent.resolve())))
            )
        elif how < 0.6 and path.is_dir():
            path = path / ".." / path.name
    return path


def spelled(path: Path, chance: random.Random) -> Any:
    how = chance.randrange(4)
    if how == 0:
        return path
    if how == 1:
        return os.fsencode(path) if "\udc80" in str(path) else str(path)
    if how == 2:
        return os.path.relpath(path)
    return f"{path.parent}//./{path.name}/"


def put_files(folder: Path, chance: random.Random) -> dict[Path, bytes]:
    """Somebody's files there, which are to survive."""
    put = {}
    for name in chance.sample(FOREIGN, chance.randint(0, 4)):
        file = folder / name
        if file.parent.is_dir() or not file.parent.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            put[file] = chance.randbytes(20)
            file.write_bytes(put[file])
    return put


@pytest.mark.filterwarnings("ignore:.* stays, as it holds what is not Hotbed's")
@pytest.mark.filterwarnings("ignore:The budget holds .* look-ahead is shorter now")
def test_odd_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds(0.1, usual=2):
        with attack(seed) as chance:
            top, elsewhere = tmp_path / str(seed), tmp_path / f"{seed} elsewhere"
            top.mkdir()
            elsewhere.mkdir()
            monkeypatch.chdir(chance.choice((top, elsewhere, tmp_path)))
            path = odd_path(top, chance)
            given = spelled(path, chance)
            try:
                storage = hb.Storage(host="16MB", ssd=given)
            except hb.StorageError as error:
                assert "\udc80" in str(path) and "UTF-8" in str(error) or "is a file" in str(error)
                continue
            mine = put_files(path, chance)
            used, plain = collection(storage), collection()
            optimizers = [hb.optim.Adagrad(m.parameters(), lr=0.1) for m in (used, plain)]
            data = batches(seed, 4)
            for at, batch in enumerate(hb.lookahead(data, used)):
                if at == chance.randrange(4):
                    monkeypatch.chdir(chance.choice((elsewhere, tmp_path)))
                for model, optimizer in zip((used, plain), optimizers, strict=True):
                    step(model, optimizer, batch)
            used.flush()
            for name in TABLES:
                ids = ids_of(name, torch.arange(160))
                assert torch.equal(used.lookup(name, ids), plain.lookup(name, ids))
            assert not any(elsewhere.iterdir())
            with pytest.raises(hb.StorageError, match="in use by this process"):
                collection(hb.Storage(host="16MB", ssd=path))
            del used, model, optimizer, optimizers
            gc.collect()
            with pytest.raises(hb.StorageError, match="holds rows of an earlier run"):
                collection(hb.Storage(host="16MB", ssd=path))
            again = collection(hb.Storage(host="16MB", ssd=path, reset=True))
            assert again.count("dynamic") == 0
            del again
            gc.collect()
            assert {file: file.read_bytes() for file in mine} == mine
            # A model saved beside it.
            monkeypatch.chdir(top)
            folder = odd_path(top, chance)
            if "\udc80" in str(folder) or folder.exists() and any(folder.iterdir()):
                continue
            for number in (1, 2):
                saved(Path(os.path.relpath(folder)), with_bias(number))
                mine |= put_files(folder, chance)
            assert bias_of(folder) == 2
            assert {file: file.read_bytes() for file in mine} == mine
            monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "path",
    ["/proc/rows", "/dev/null", "/dev/null/x", "/sys/x", "/proc/self/fd/0/x", "/proc/1/root/\0"],
)
def test_places_where_nothing_can_be_written(path: str) -> None:
    with pytest.raises(hb.StorageError):
        collection(hb.Storage(host="16MB", ssd=path))
    with pytest.raises(OSError) if "\0" not in path else pytest.raises(ValueError):
        hb.save(path, with_bias(1), step=0)
