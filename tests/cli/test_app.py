"""How options are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.command_line import run, train


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "--dimm", 4), "There is no option --dimm. Did you mean --dim?"),
        (("train", "--batchsize=4"), "There is no option --batchsize. Did you mean --batch-size?"),
        (
            ("predict", "m", "--batchsize", "1"),
            "There is no option --batchsize. Did you mean --batch-size?",
        ),
        (("inspect", "r", "--jsn", "x"), "There is no option --jsn. Did you mean --json?"),
        (("trian",), "No such command 'trian'. Did you mean 'train'?"),
    ],
)
def test_a_mistyped_name_has_a_suggestion(arguments: tuple[object, ...], told: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.replace("│", " ").split())


def test_an_option_like_no_other_is_told_too() -> None:
    result = run("train", "--zzzzzz")
    assert result.exit_code == 2 and "--zzzzzz" in result.stderr and "mean" not in result.stderr


def test_several_logs_are_scored_in_order(log: Path, tmp_path: Path) -> None:
    train(log, tmp_path, "--save", tmp_path / "m")
    lines = log.read_text().splitlines(True)
    parts = [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    for part, lines_of_it in zip(parts, (lines[:10], lines[10:25]), strict=True):
        part.write_text("".join(lines_of_it))
    texts = []
    whole = tmp_path / "c.tsv"
    whole.write_text("".join(lines[:25]))
    for data in (
        ("--data", *parts),
        ("--data", parts[0], "--data", parts[1]),
        (f"--data={parts[0]}", parts[1]),
        ("--data", whole),
    ):
        out = tmp_path / "scores.csv"
        result = run("predict", tmp_path / "m", *data, "--out", out)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("25 samples scored in ")
        texts.append(out.read_text())
    assert len(set(texts)) == 1 and texts[0].count("\n") == 26
