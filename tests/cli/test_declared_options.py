"""Options of commands, declared once as fields of a dataclass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from cli.command_line import run
from typer.testing import CliRunner

from hotbed.cli.config import ConfigError, read_config
from hotbed.cli.options import command
from hotbed.cli.plan import PlanSettings
from hotbed.train.options import FILE, Kind, OneOf, options_of
from hotbed.train.settings import OPTIMIZERS, SettingsError, TrainSettings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """A new command's settings: its only declaration."""

    names: Annotated[tuple[str, ...], Kind("NAME...")]
    """Whom to greet."""
    how_often: int = 2
    """Repeats the greeting."""
    tone: Annotated[str, OneOf(("loud", "low", "kind"))] = "low"
    """{choices}; how
    it sounds."""
    from_: Annotated[str | None, FILE] = None
    """Where it is read."""
    wave: bool = False
    """Also wave."""


def greet(*arguments: str) -> tuple[Any, list[Any]]:
    app, got = typer.Typer(), []

    @app.command()
    @command(Toy, config=True)
    def say(given: dict[str, Any], config: str | None) -> None:
        """Greet."""
        got.extend([Toy(**given), config])

    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"}), got


def test_a_declared_setting_is_an_option_a_key_and_a_line_of_help(tmp_path: Path) -> None:
    text = " ".join(greet("--help")[0].output.split())
    for shown in (
        "--names NAME... Whom to greet.",
        "Repeats the greeting. [default: 2]",
        "loud, low or kind; how it sounds. [default: low]",
        "--from FILE Where it is read.",
        "--wave",
    ):
        assert shown in text
    file = tmp_path / "toy.toml"
    file.write_text('how-often = 5\nnames = ["a", "b"]\nwave = true\nfrom = "here"\n')
    typed = greet("--config", str(file), "--how-often", "7")[1]
    assert typed == [
        Toy(names=("a", "b"), how_often=7, wave=True, from_="here"),
        str(file),
    ]
    assert greet("--names", "a", "--names", "b", "--tone", "loud")[1] == [
        Toy(names=("a", "b"), tone="loud"),
        None,
    ]
    assert greet()[1] == [Toy(names=()), None]
    file.write_text("how-often = true")
    with pytest.raises(ConfigError, match="key 'how-often' is True; it must be an integer"):
        read_config(str(file), Toy)


@pytest.mark.parametrize("settings", [TrainSettings, PlanSettings, Toy])
def test_every_setting_says_what_it_does(settings: type[Any]) -> None:
    assert all(option.help for option in options_of(settings).values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": ()}, "Name at least one file of samples: --data PATH."),
        ({"dim": 0}, "--dim is 0; it must be positive."),
        ({"optimizer": "lion"}, f"--optimizer is lion; it must be one of {', '.join(OPTIMIZERS)}."),
        ({"host": "8 apples"}, "--host is 8 apples; it must be a size such as 8GB or 512MiB"),
        (
            {"resume_from": "a\0"},
            "--resume-from is 'a\\x00'; it must be a path, without a zero byte.",
        ),
        (
            {"resume": True},
            "--resume goes on from a checkpoint: name their folder, --checkpoint DIR.",
        ),
    ],
)
def test_a_wrong_setting_is_refused_where_it_is_made(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        TrainSettings(**{"data": ("log.tsv",), **settings})
    assert str(refused.value).startswith(message)


def test_the_help_of_train_names_every_rule() -> None:
    text = " ".join(run("train", "--help").stdout.replace("│", " ").split())
    *most, last = OPTIMIZERS
    assert f"{', '.join(most)} or {last}; for tables and dense layers alike." in text
