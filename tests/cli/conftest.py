from __future__ import annotations

from pathlib import Path

import pytest

from hotbed.data import write_criteo_tsv


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 samples that a model can learn something from."""
    path = tmp_path_factory.mktemp("log") / "clicks.tsv"
    write_criteo_tsv(path, 4_000, seed=1, table_rows=[3 + i % 5 for i in range(26)])
    return path


@pytest.fixture(scope="session")
def wide_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 samples with more ids than a small budget holds."""
    path = tmp_path_factory.mktemp("wide") / "clicks.tsv"
    write_criteo_tsv(path, 1_000, seed=1)
    return path
