"""Names in files of others are printed as they are: no markup, nothing that steers a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.command_line import run
from rich.console import Console

import hotbed as hb
from hotbed.dist.plan_table import RankLine, TableLine, printed
from hotbed.text import printable
from hotbed.train.progress import closing_table, notice

NAMES = {
    "[red]item": "[red]item",
    "[/]": "[/]",
    "back\\[slash\\": "back\\[slash\\",
    "wipe\x1b[2J": "wipe\\x1b[2J",
    "bell\a\rline\n": "bell\\x07\\rline\\n",
    "lone\ud800": "lone\\ud800",
    "turned\u202etxt": "turned\\u202etxt",
    "Zürich 東京": "Zürich 東京",
}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed(name: str) -> None:
    assert printable(name) == NAMES[name]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_are_shown(tmp_path: Path, name: str) -> None:
    rows = torch.arange(2), torch.ones(2, 2)
    hb.checkpoint.write(tmp_path / "a", {name: [rows]})
    hb.checkpoint.write(tmp_path / "b", {name: [rows]})
    for command in (("show", tmp_path / "a"), ("diff", tmp_path / "a", tmp_path / "b")):
        result = run("checkpoint", *command, columns=200)
        assert result.exit_code == 0, result.exception
        assert NAMES[name] in result.output
    verified = run("checkpoint", "verify", tmp_path / "a", columns=200)
    assert verified.exit_code == 0 and "is whole" in verified.output
    refused = run("dump", tmp_path / "a", "--to", tmp_path / "x.pt", "--table", "other")
    assert refused.exit_code == 2 and f"It has {NAMES[name]}." in refused.output


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "command"), [("Zürich", ["show", "a"]), ("東京\ud800", ["diff", "a", "a"])]
)
def test_a_terminal_that_has_only_ascii(tmp_path: Path, name: str, command: list[str]) -> None:
    hb.checkpoint.write(tmp_path / "a", {name: [(torch.arange(2), torch.ones(2, 2))]})
    program = [sys.executable, "-c", "from hotbed_command import main; main()", "checkpoint"]
    environment = {"PATH": "", "PYTHONIOENCODING": "ascii", "COLUMNS": "200", "PYTHONUTF8": "0"}
    environment["PYTHONPATH"] = ":".join(sys.path)
    done = subprocess.run([*program, *command], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert name.encode("ascii", "backslashreplace") in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_plans_notices_and_figures_are_shown(name: str) -> None:
    lines = [TableLine(name, None, None, 4, "float32", "row", "0", 16)]
    shown = printed("A plan", lines, [RankLine(0, 1, {"memory": 16}, 16)], 200)
    assert NAMES[name] in shown
    for show in (
        lambda console: notice(console, name),
        lambda console: console.print(closing_table("Done", {"saved to": name})),
    ):
        out = io.StringIO()
        show(Console(file=out, width=200))
        assert NAMES[name] in out.getvalue()
        assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpoint", "show", "a\0b"),
        ("checkpoint", "verify", "a\0b"),
        ("checkpoint", "diff", "a\0b", "c"),
        ("inspect", "a\0b"),
        ("import", "a\0b.pt", "--to", "c"),
        ("import", "here.pt", "--to", "c\0d"),
        ("dump", "a\0b", "--to", "c.pt"),
        ("dump", "a", "--to", "c\0d.pt"),
        ("predict", "a\0b", "--data", "x", "--out", "y"),
        ("predict", "a", "--data", "x\0", "--out", "y"),
        ("predict", "a", "--data", "x", "--out", "y\0"),
        ("predict", "a", "--data", "x", "--out", "y", "--ssd", "z\0", "--host", "1GB"),
        ("plan", "a\0b"),
        ("plan", "--tables", "a\0b"),
        ("plan", "--model", "dlrm", "--write", "a\0b"),
        ("train", "--config", "a\0b"),
        ("train", "--data", "a\0b"),
        ("train", "--data", "a", "--json", "a\0b"),
    ],
)
def test_a_path_with_a_zero_byte(arguments: tuple[str, ...], tmp_path: Path) -> None:
    torch.save({"e.weight": torch.ones(2, 2)}, tmp_path / "here.pt")
    given = [str(tmp_path / "here.pt") if a == "here.pt" else a for a in arguments]
    result = run(*given)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert "\0" not in result.output


def test_a_checkpoint_at_a_path_with_a_zero_byte(tmp_path: Path) -> None:
    model = hb.EmbeddingBag(3, 2, mode="sum")
    for call in (
        lambda: hb.load("a\0b", model),
        lambda: hb.save("a\0b", model, step=1),
        lambda: list(hb.checkpoint.read("a\0b", "weight")),
        lambda: hb.checkpoint.write("a\0b", {}),
        lambda: hb.checkpoint.latest("a\0b"),
    ):
        with pytest.raises(hb.checkpoint.CheckpointError, match=r"a\\x00b' has a zero byte"):
            call()
