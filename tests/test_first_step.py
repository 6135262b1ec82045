"""A first step does what a later one does, and little beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEP = """
import sys, torch, hotbed as hb
embeddings = hb.EmbeddingCollection([hb.Table("a", 4, {rows})])
optimizer = hb.optim.Adam(embeddings.parameters())
before = set(sys.modules)
embeddings({{"a": torch.arange(8)}})["a"].sum().backward()
optimizer.step()
optimizer.zero_grad()
print(sorted(set(sys.modules) - before))
"""


@pytest.mark.process
@pytest.mark.parametrize("rows", [100, None])
def test_modules_are_imported_before_it(rows: int | None) -> None:
    """A fifth of a first step of 26 tables was an import of torch's profiler."""
    done = subprocess.run(
        [sys.executable, "-c", STEP.format(rows=rows)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
