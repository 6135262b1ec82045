"""Files that were damaged, or made to do harm, are read or refused: in bounded memory, without a crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from copies import in_a_copy
from effort import examples
from formats.hostile_files import FORMATS, tally_of


@pytest.mark.process
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    if "parquet" in name:
        pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    count = examples(150)
    tally = in_a_copy(tally_of, name, tmp_path, count, seconds=100 + count)
    assert sum(tally.values()) == count
    assert tally["refused"] > count // 20
