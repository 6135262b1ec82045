"""What is noted beside the rows of a run, and when it counts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from kept_in import ABOVE_SSD, AROUND
from row_log_records import Log

import hotbed as hb
from hotbed.train.run_note import forget_note, ids_are_hexadecimal, rows_may_go, write_note


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log_with_a_row(tmp_path / "rows-1")
    return tmp_path


def log_with_a_row(path: Path) -> None:
    log = Log.create(path, [(0, "item", None)])
    log.write(np.zeros(1, np.int32), np.zeros(1, np.int64), 1)
    log.core.close()


def test_a_log_without_rows_may_go(folder: Path) -> None:
    shutil.rmtree(folder / "rows-1")
    assert not rows_may_go(str(folder))
    Log.create(folder / "rows-2", [(0, "item", None)]).core.close()
    assert rows_may_go(str(folder)) and not ids_are_hexadecimal(str(folder))
    log_with_a_row(folder / "rows-3")
    assert not rows_may_go(str(folder))


def test_rows_that_a_checkpoint_has_too_may_go(tmp_path: Path) -> None:
    def made(name: str) -> hb.EmbeddingCollection:
        storage = hb.Storage(host=ABOVE_SSD + AROUND, ssd=tmp_path / name)
        return hb.EmbeddingCollection([hb.Table("a", 4, 9)], seed=0, storage=storage)

    rows, run = str(tmp_path / "rows"), str(tmp_path / "run")
    model = made("rows")
    model.assign("a", range(9), torch.ones(9, 4))
    model.flush()
    saved = hb.save(run, model, step=0, linked=True).path
    assert rows_may_go(rows, [run]) and rows_may_go(rows, [str(tmp_path / "no"), saved])
    assert not rows_may_go(rows) and not rows_may_go(rows, [str(tmp_path / "no")])
    os.rename(os.path.join(saved, "checkpoint.json"), tmp_path / "manifest")
    assert not rows_may_go(rows, [run])  # it is incomplete, and will be removed
    os.rename(tmp_path / "manifest", os.path.join(saved, "checkpoint.json"))
    model.assign("a", range(9), torch.zeros(9, 4))
    model.flush()
    assert not rows_may_go(rows, [run])  # some are newer
    other = made("other")
    hb.load(run, other)
    assert rows_may_go(str(tmp_path / "other"), [run])


@pytest.mark.parametrize("may_go", [False, True])
def test_what_is_noted_is_known_until_it_is_forgotten(folder: Path, may_go: bool) -> None:
    assert not rows_may_go(str(folder)) and not ids_are_hexadecimal(str(folder))
    for earlier in (False, True):
        write_note(str(folder), may_go=earlier)
    write_note(str(folder), may_go=may_go)
    assert rows_may_go(str(folder)) == may_go and ids_are_hexadecimal(str(folder))
    forget_note(str(folder))
    assert not rows_may_go(str(folder)) and not ids_are_hexadecimal(str(folder))
    forget_note(str(folder))


def other_manifest(folder: Path) -> None:
    shutil.rmtree(folder / "rows-1")
    log_with_a_row(folder / "rows-1")  # which differs in its number


def no_manifest(folder: Path) -> None:
    (folder / "rows-1" / "manifest").unlink()


def one_more(folder: Path) -> None:
    log_with_a_row(folder / "rows-2")


def no_log(folder: Path) -> None:
    shutil.rmtree(folder / "rows-1")


def edited(folder: Path) -> None:
    note = folder / "hotbed-run.json"
    note.write_text(note.read_text().replace("a", "b", 1))


@pytest.mark.parametrize("change", [other_manifest, no_manifest, one_more, no_log, edited])
def test_a_note_is_of_the_logs_that_it_names(folder: Path, change: object) -> None:
    write_note(str(folder), may_go=True)
    assert callable(change)
    change(folder)
    assert not rows_may_go(str(folder)) and not ids_are_hexadecimal(str(folder))


def test_a_file_of_the_user_is_no_note_and_stays(folder: Path) -> None:
    (folder / "hotbed-run.json").write_text("mine")
    assert not rows_may_go(str(folder))
    forget_note(str(folder))
    with pytest.raises(FileExistsError):
        write_note(str(folder), may_go=True)
    assert (folder / "hotbed-run.json").read_text() == "mine"
