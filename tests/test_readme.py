"""The example at the top of the README runs as it stands, and is as short as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


def example() -> str:
    found = re.search(r"## Twenty lines\n+```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    return found[1]


def test_the_example_has_at_most_twenty_lines() -> None:
    assert 10 < sum(1 for line in example().splitlines() if line.strip()) <= 20


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hotbed as hb

    monkeypatch.chdir(tmp_path)
    hb.data.write_criteo_tsv("clicks.tsv", rows=4 * 512, seed=0)
    names: dict[str, object] = {}
    exec(compile(example(), str(README), "exec"), names)
    model, loss = names["model"], names["loss"]
    assert 0 < loss.item() < 0.7
    assert model.embeddings.count() > 10_000
    assert len(model.embeddings.features) == 26
