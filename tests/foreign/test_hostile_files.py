"""Files that were damaged, or made to do harm, are read or refused: in bounded memory, without a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from effort import examples
from foreign.hostile_files import FORMATS

PROGRAM = Path(__file__).with_name("hostile_files.py")


@pytest.mark.process
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    if "parquet" in name:
        pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    count = examples(150)
    arguments = [sys.executable, str(PROGRAM), name, str(tmp_path), str(count)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=100 + count)
    assert done.returncode == 0, done.stderr[-4000:]
    tally = json.loads(done.stdout)
    assert sum(tally.values()) == count
    assert tally["refused"] > count // 20
