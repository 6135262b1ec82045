"""Files that were damaged, or made to do harm, are read or refused: in bounded memory, without a crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from dist.worlds import STARTS
from effort import examples
from foreign.hostile_files import FORMATS, tell_tally


@pytest.mark.process
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    if "parquet" in name:
        pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    count = examples(150)
    own, other = STARTS.Pipe()
    process = STARTS.Process(target=tell_tally, args=(other, name, tmp_path, count), daemon=True)
    process.start()
    other.close()
    try:
        assert own.poll(100 + count), "it does not end"
        tally = own.recv()
    except EOFError:
        process.join()
        pytest.fail(f"it has crashed: {process.exitcode}")
    finally:
        process.kill()
        process.join()
    assert isinstance(tally, dict), tally
    assert sum(tally.values()) == count
    assert tally["refused"] > count // 20
