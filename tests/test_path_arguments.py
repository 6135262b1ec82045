"""Paths that are none are refused, whatever takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hotbed as hb
from hotbed.paths import path_text
from hotbed.trace import Trace

TABLE = hb.Table("item", 2, 10)
RATES = hb.dist.Rates.of(np.ones(len(hb.dist.Rates().seconds)))
INDEX = hb.models.ItemIndex(torch.arange(2), torch.ones(2, 2))


class Odd:
    """Gives a path that is none."""

    def __fspath__(self) -> Any:
        return 3


def saved(path: Any, **options: Any) -> object:
    return hb.save(path, hb.EmbeddingCollection([TABLE]), step=0, **options)


CALLS: dict[str, Callable[[Any], object]] = {
    "save": saved,
    "save into": lambda path: saved("run", base=path),
    "load": lambda path: hb.load(path, hb.EmbeddingCollection([TABLE])),
    "load_model": hb.checkpoint.load_model,
    "list": hb.checkpoint.list,
    "latest": hb.checkpoint.latest,
    "read": lambda path: next(hb.checkpoint.read(path, "item")),
    "contains": lambda path: hb.checkpoint.contains(path, "item", [1]),
    "changes": lambda path: hb.checkpoint.changes(path, "item", 1),
    "merge": lambda path: hb.checkpoint.merge(path, "out"),
    "pack": hb.checkpoint.pack,
    "write": lambda path: hb.checkpoint.write(path, {}),
    "export": lambda path: hb.export(hb.EmbeddingCollection([TABLE]), path, sample={}),
    "versions_of": hb.serve.versions_of,
    "pin": lambda path: hb.serve.pin(path, "1"),
    "unpin": hb.serve.unpin,
    "Follower": lambda path: hb.serve.Follower(path, "run"),
    "Schema.read": hb.data.Schema.read,
    "Schema.write": hb.data.Schema({"label": hb.data.Label()}).write,
    "write_criteo_tsv": lambda path: hb.data.write_criteo_tsv(path, 1),
    "Plan.read": lambda path: hb.dist.Plan.read(path, [TABLE]),
    "Plan.write": hb.plan([TABLE], 1).write,
    "Rates.read": hb.dist.Rates.read,
    "Rates.write": RATES.write,
    "ItemIndex.load": hb.models.ItemIndex.load,
    "ItemIndex.save": INDEX.save,
    "Trace.write": Trace().write,
    "CsvLog": hb.train.CsvLog,
    "CsvLog of validations": lambda path: hb.train.CsvLog("log.csv", validation=path),
    "TensorBoardLog": hb.train.TensorBoardLog,
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_path(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given: Any
    for given in ({}, {1}, (1, 2), range(3), 5, 1.5, True, ["a"], torch.ones(2), Odd()):
        with pytest.raises(
            hb.InputError, match="(path|folder|root|base|bundle|validation) is .*; give"
        ):
            CALLS[call](given)
    assert not list(tmp_path.iterdir())


def test_what_is_a_path() -> None:
    assert [path_text(one) for one in ("a", b"a", Path("a"))] == ["a"] * 3
