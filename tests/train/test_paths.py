"""What a command must not write over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint.saved_models import saved, with_bias
from row_log_records import Log

from hotbed.train.paths import Folder, Named, refuse_clashes
from hotbed.train.report import OutputError


def owns(name: str) -> bool:
    return name in ("own.json", "inner/own.json")


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """log.tsv, a hard link and a link to it, m/own.json and m/other, a link to m, a pipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m" / "inner").mkdir(parents=True)
    for name in ("log.tsv", "m/own.json", "m/other"):
        (tmp_path / name).write_text(name)
    os.link("log.tsv", "hard.tsv")
    os.link("m/own.json", "hard.json")
    os.symlink("log.tsv", "soft.tsv")
    os.symlink("m", "soft")
    os.symlink("m/own.json", "soft.json")
    os.mkfifo("pipe")
    return tmp_path


def refuse(reads: str = "", writes: str = "", folder: str = "m") -> None:
    refuse_clashes(
        [Named("--in", path) for path in reads.split()],
        [Named("--out", path) for path in writes.split()],
        [Folder(Named("--save", folder), owns)],
    )


@pytest.mark.parametrize(
    "name", ["log.tsv", "./log.tsv", "m/../log.tsv", "{here}/log.tsv", "soft.tsv", "hard.tsv"]
)
def test_an_input_is_not_written(there: Path, name: str) -> None:
    name = name.format(here=there)
    with pytest.raises(OutputError, match=f"--in log.tsv and --out {name} are the same file"):
        refuse("other.tsv log.tsv", name)
    with pytest.raises(OutputError, match=f"--in {name} and --save log.tsv are the same"):
        refuse(name, "", "log.tsv")


@pytest.mark.parametrize("pair", ["x x", "x ./x", "x soft/../x", "hard.tsv soft.tsv"])
def test_one_file_is_not_written_twice(there: Path, pair: str) -> None:
    with pytest.raises(OutputError, match=r"--out \S+ and --out \S+ are the same file"):
        refuse("", pair)


@pytest.mark.parametrize(
    "name",
    ["m/own.json", "soft/own.json", "m/OWN.json", "hard.json", "soft.json", "m/inner/own.json"],
)
def test_a_folder_keeps_its_own_files(there: Path, name: str) -> None:
    for reads, writes in (("", name), (name, "")):
        with pytest.raises(OutputError, match=f"{name} is a file that --save m keeps for itself"):
            refuse(reads, writes)


def test_the_folder_itself_is_no_file_to_write(there: Path) -> None:
    with pytest.raises(OutputError, match="--out soft and --save m are the same file"):
        refuse("", "soft")


def test_all_else_is_written(there: Path) -> None:
    refuse("log.tsv", "m/other m/figures.json m/inner/other new/own.json own.json")
    refuse("log.tsv log.tsv", "pipe pipe /dev/null /dev/null", "new")
    assert (there / "log.tsv").read_text() == "log.tsv" and not (there / "new").exists()


def test_files_of_any_saved_model_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "model"
    folder = saved(path, with_bias(1))
    os.symlink(folder / "checkpoint.json", tmp_path / "soft")
    names = [*os.listdir(folder), "checkpoint.json.new", "rows-1-7.safetensors", "../../soft"]
    assert len(names) == 6
    for name in names:
        with pytest.raises(OutputError, match=f"--json .*{name} is a file of a checkpoint"):
            refuse_clashes([], [Named("--json", str(folder / name))])
    refuse_clashes([], [Named("--json", str(path / "figures.json"))])


def test_files_of_any_run_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rows-1").mkdir()
    names = ["rows-1/manifest", "rows-1/new", "hottest.json", "in-use", "hotbed-run.json"]
    refuse_clashes([], [Named("--json", str(tmp_path / name)) for name in names])
    (tmp_path / "rows-1").rmdir()
    Log.create(tmp_path / "rows-1", [(0, "item", None)])
    for name in names:
        with pytest.raises(OutputError, match=f"{name} is a file of the rows of a run"):
            refuse_clashes([], [Named("--json", str(tmp_path / name))])
    refuse_clashes([], [Named("--json", str(tmp_path / "figures.json"))])
