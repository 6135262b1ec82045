"""The command as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from hotbed.cli.app import app


def run(*arguments: Any, columns: int = 100) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": str(columns)})


def train(log: Path, tmp_path: Path, *arguments: Any) -> tuple[Result, Any]:
    """(result, the figures) of a small training run."""
    figures = tmp_path / "figures.json"
    usual = ("--dim", 4, "--batch-size", 64, "--lr", 0.01, "--json", figures)
    result = run("train", "--data", log, *usual, *arguments)
    return result, json.loads(figures.read_text()) if figures.exists() else None
