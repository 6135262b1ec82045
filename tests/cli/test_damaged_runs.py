"""Commands whose latest checkpoint is damaged: they name the whole ones and how each is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.command_line import run

from hotbed.checkpoint.folder import complete_in
from hotbed.data import write_criteo_tsv

SIZE = ("--dim", 4, "--batch-size", 32, "--every", 4, "--test-fraction", 0)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "clicks.tsv"
    write_criteo_tsv(str(path), rows=320, seed=2)
    return path


def told(result: object) -> str:
    return " ".join(result.stderr.split())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["rows-0-0.safetensors", "checkpoint.json"])
def test_whole_ones_are_named_with_the_option_that_reads_them(
    tmp_path: Path, log: Path, name: str
) -> None:
    folder = tmp_path / "run"
    train = ("train", "--data", log, *SIZE)
    assert run(*train, "--checkpoint", folder).exit_code == 0
    *_, before, last = map(Path, complete_in(str(folder)))
    contents = bytearray((last / name).read_bytes())
    contents[len(contents) // 2] ^= 1
    (last / name).write_bytes(contents)

    resumed = run(*train, "--checkpoint", folder, "--resume")
    assert resumed.exit_code == 2
    assert f"{last}/{name} is" in told(resumed)
    assert f"Load one by --resume-from {before.name}. " in told(resumed)
    scored = run("predict", folder, "--data", log, "--out", tmp_path / "scores.csv")
    assert scored.exit_code == 2 and f"Load one by hotbed predict {before}. " in told(scored)
    begun = run(*train, "--from", folder)
    assert begun.exit_code == 2 and f"Load one by --from {before}. " in told(begun)

    scored = run("predict", before, "--data", log, "--out", tmp_path / "scores.csv")
    assert scored.exit_code == 0, scored.output
    figures = tmp_path / "figures.json"
    whole, whole_figures = tmp_path / "whole", tmp_path / "whole.json"
    again = run(*train, "--checkpoint", folder, "--resume-from", before.name, "--json", figures)
    assert again.exit_code == 0, again.output
    assert '"resumed_at": 8' in figures.read_text()
    assert run(*train, "--checkpoint", whole, "--json", whole_figures).exit_code == 0
    assert run("checkpoint", "diff", folder, whole).exit_code == 0
    from hotbed.checkpoint.inspect import differences

    for table in differences(str(folder), str(whole)):
        assert (table.only_first, table.only_second, table.changed) == (0, 0, 0)
    assert Path(complete_in(str(folder))[-1]) != last


def test_resume_from_another_folder_saves_into_its_own(tmp_path: Path, log: Path) -> None:
    train = ("train", "--data", log, *SIZE, "--checkpoint")
    assert run(*train, tmp_path / "run").exit_code == 0
    *_, before, last = map(Path, complete_in(str(tmp_path / "run")))
    done = run(*train, tmp_path / "other", "--resume-from", last)
    assert done.exit_code == 0, done.output
    assert [Path(path).name for path in complete_in(str(tmp_path / "other"))] == [last.name]
    (last / "dense.safetensors").unlink()
    refused = run(*train, tmp_path / "other", "--resume-from", tmp_path / "run")
    assert refused.exit_code == 2 and f"Load one by --resume-from {before}. " in told(refused)


def test_resume_from_takes_a_path_too_and_needs_a_folder(tmp_path: Path, log: Path) -> None:
    folder = tmp_path / "run"
    train = ("train", "--data", log, *SIZE)
    assert run(*train, "--checkpoint", folder).exit_code == 0
    first = complete_in(str(folder))[0]
    done = run(*train, "--checkpoint", folder, "--resume-from", first)
    assert done.exit_code == 0, done.output
    alone = run(*train, "--resume-from", first)
    assert alone.exit_code == 2 and "--resume-from goes on from a checkpoint" in told(alone)
    none = run(*train, "--checkpoint", folder, "--resume-from", "step-7")
    assert none.exit_code == 2 and "There is no folder" in told(none)
