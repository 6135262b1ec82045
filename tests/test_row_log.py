"""The row log against a dict, and against a process that is killed. Crashes of the machine, faults of
the disk and threads are the business of csrc/tests/row_log*_test.cpp."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from effort import SOAK, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_log_records import SEGMENT_BYTES, Log

from hotbed import StorageError, _core

BACKENDS = ["threads"] + (["ring"] if _core.io_uring_works() else [])
TABLES = [(0, "item", 300), (7, "user", None)]
INT64 = np.iinfo(np.int64)

keys = st.one_of(
    st.tuples(st.just(0), st.integers(0, 299)),
    st.tuples(st.just(7), st.integers(-20, 20)),
    st.tuples(st.just(7), st.sampled_from([INT64.min, INT64.max, 1 << 40])),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sets(keys, max_size=150)),
        st.tuples(st.just("write range"), st.tuples(st.integers(0, 299), st.integers(1, 300))),
        st.tuples(st.just("read"), st.lists(keys, max_size=150)),
        st.tuples(st.just("erase"), st.sets(keys, max_size=80)),
        st.tuples(st.sampled_from(["flush", "sync", "compact"]), st.none()),
    ),
    max_size=40,
)


def arrays(pairs: object) -> tuple[np.ndarray, np.ndarray]:
    listed = list(pairs)
    tables = np.array([table for table, _ in listed], np.int32)
    return tables, np.array([i for _, i in listed], np.int64)


@pytest.fixture
def faults() -> _core.IoFaults:
    return _core.IoFaults()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("background", [False, True])
@settings(
    deadline=None,
    max_examples=examples(15),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=operations)
def test_agrees_with_a_dict(
    tmp_path: Path, backend: str, background: bool, steps: list[tuple[str, object]]
) -> None:
    log = Log.create(
        tmp_path / "log",
        TABLES,
        backend=backend,
        background=background,
        space_ratio=1.15,
        reset=True,
    )
    oracle: dict[tuple[int, int], int] = {}
    for version, (operation, argument) in enumerate(steps, 1):
        if operation == "write range":
            begin, count = argument
            argument = {(0, (begin + i) % 300) for i in range(count)}  # type: ignore[has-type]
        if operation.startswith("write"):
            log.write(*arrays(argument), version)
            oracle |= dict.fromkeys(argument, version)
        elif operation == "read":
            expected = [oracle.get(key, 0) for key in argument]  # type: ignore[attr-defined]
            assert log.versions(*arrays(argument)).tolist() == expected
        elif operation == "erase":
            log.erase(*arrays(argument))
            for key in argument:  # type: ignore[attr-defined]
                oracle.pop(key, None)
        elif operation == "compact":
            log.core.compact_step(0)
        else:
            getattr(log.core, operation)()
    check_same(log, oracle)
    log.core.close()
    kept = Log(_core.RowLog.open_to_read(str(tmp_path / "log"), backend))
    check_same(kept, oracle)
    assert [store["dropped"] for store in kept.core.recovery()] == [0]
    kept.core.close()


def check_same(log: Log, oracle: dict[tuple[int, int], int]) -> None:
    for table, _, _ in TABLES:
        assert log.ids(table) == sorted(i for t, i in oracle if t == table)
    assert log.versions(*arrays(oracle)).tolist() == list(oracle.values())
    assert log.statistics()["live_records"] == len(oracle)


def test_space_is_given_back_over_a_long_life(tmp_path: Path) -> None:
    ratio = 1.3
    log = Log.create(tmp_path / "log", [(0, "item", 20_000)], space_ratio=ratio)
    random = np.random.default_rng(0)
    versions = np.zeros(20_000, np.int64)
    tables = np.zeros(20_000, np.int32)
    log.write(tables, np.arange(20_000), 1)
    versions[:] = 1
    for version in range(2, 300 if SOAK else 60):
        # Skewed, as real ids are: the first hundredth gets half of the writes.
        ids = np.where(
            random.random(1500) < 0.5,
            random.integers(0, 200, 1500),
            random.integers(0, 20_000, 1500),
        )
        ids = random.permutation(np.unique(ids))
        log.write(tables[: len(ids)], ids, version)
        versions[ids] = version
        now = log.statistics()
        assert now["bytes"] <= ratio * now["live_bytes"] + 5 * SEGMENT_BYTES
    assert log.statistics()["compactions"] > 0
    np.testing.assert_array_equal(log.versions(tables, np.arange(20_000)), versions)


def test_options_are_seen(tmp_path: Path, backend: str) -> None:
    log = Log.create(tmp_path / "log", TABLES, backend=backend, threads=3)
    tables, ids = arrays([(0, i) for i in range(300)])
    log.write(tables, ids, 1)
    log.core.flush()
    log.versions(tables, ids)
    now = log.core.statistics()
    assert now["backend"] == backend and now["threads"] == (3 if backend == "threads" else 0)
    assert now["direct"] in (True, False) and now["reads"] > 0 and now["bytes_read"] >= 4096
    assert log.core.stores == [(72, TABLES)] and log.core.path == str(tmp_path / "log")
    assert log.statistics()["rows_read"] == 300 and now["memory_bytes"] > 0


def test_buffered_files_do_too(tmp_path: Path, backend: str) -> None:
    log = Log.create(tmp_path / "log", TABLES, backend=backend, direct=False)
    tables, ids = arrays([(0, i) for i in range(300)])
    log.write(tables, ids, 1)
    log.core.sync()
    assert log.versions(tables, ids).tolist() == [1] * 300
    assert log.core.statistics()["direct"] is False


def test_a_full_disk_is_a_storage_error(tmp_path: Path, faults: _core.IoFaults) -> None:
    faults.full_after_preallocating(2 * SEGMENT_BYTES)
    log = Log.create(tmp_path / "log", [(0, "item", 50_000)], observer=faults, background=False)
    tables, ids = np.zeros(1000, np.int32), np.arange(1000)
    with pytest.raises(StorageError, match="No space left.*make space") as raised:
        for begin in range(0, 50_000, 1000):
            log.write(tables, ids + begin, 1)
    assert isinstance(raised.value, OSError)
    assert raised.value.path.startswith(str(tmp_path)) and raised.value.needed == SEGMENT_BYTES
    assert log.ids(0) == list(range(begin))
    assert (log.versions(np.zeros(begin, np.int32), np.arange(begin)) == 1).all()
    faults.make_room()
    log.write(tables, ids + begin, 1)
    assert log.core.rows(0, 0) == begin + 1000


def test_a_bad_disk_is_a_storage_error(tmp_path: Path, faults: _core.IoFaults) -> None:
    log = Log.create(tmp_path / "log", TABLES, observer=faults)
    tables, ids = arrays([(0, i) for i in range(300)])
    log.write(tables, ids, 1)
    log.core.flush()
    faults.fail_read(1, errno.EIO).flip_bit(2, 8 * 100).flip_bit(3, 8 * 100).shorten_read(4, 512)
    with pytest.raises(StorageError, match="reading .* bytes at offset 0 failed: Input/output"):
        log.versions(tables[:5], ids[:5])
    with pytest.raises(
        StorageError, match="offset 0 does not hold what was written.*table number 0"
    ):
        log.versions(tables[:5], ids[:5])
    assert log.versions(tables[:5], ids[:5]).tolist() == [1] * 5


def test_misuse_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    log = Log.create(path, TABLES)
    with pytest.raises(StorageError, match="in use by this process"):
        Log.create(path, TABLES)
    tables, ids = arrays([(0, 300)])
    with pytest.raises(ValueError, match=r"Table 'item': id 300 is outside \[0, 300\)"):
        log.write(tables, ids, 1)
    with pytest.raises(ValueError, match="Table number 1 is not"):
        log.erase(tables + 1, ids)
    with pytest.raises(ValueError, match="records must be"):
        log.core.write(0, tables, ids, np.zeros((1, 5), np.uint8))
    log.core.close()
    log.core.close()
    with pytest.raises(StorageError, match="closed"):
        log.erase(tables, ids)
    with pytest.raises(StorageError, match="holds a row log already.*reset=True"):
        Log.create(path, TABLES)
    with pytest.raises(StorageError, match="opened to read"):
        Log(_core.RowLog.open_to_read(path)).erase(*arrays([(0, 1)]))
    with pytest.raises(ValueError, match="HOTBED_IO is 'aio'"):
        Log.create(path, TABLES, reset=True, backend="aio")


# --- A process that is killed. ---

CHILD = """
import sys
import numpy as np
from row_log_records import Log
from test_row_log import batch
path, seed, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
log = Log.create(path, [(0, "item", 3000), (1, "user", None)], backend=backend, space_ratio=1.2)
for version in range(1, 100_000):
    tables, ids, erases, confirms = batch(seed, version)
    if erases:
        log.erase(tables, ids)
    else:
        log.write(tables, ids, version)
    if confirms:
        log.core.sync()
        print(version, flush=True)
"""


def batch(seed: int, version: int) -> tuple[np.ndarray, np.ndarray, bool, bool]:
    """What the child does in one step: tables, ids, whether it erases, whether it syncs."""
    random = np.random.default_rng((seed, version))
    ids = random.permutation(3000)[: random.integers(1, 800)]
    return (ids % 2).astype(np.int32), ids, random.random() < 0.15, random.random() < 0.3


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: a kill is no power failure, and syncs take long."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hotbed-test-") as path:
        yield Path(path)


@pytest.mark.process
@pytest.mark.parametrize("seed", range(50 if SOAK else 3))
def test_what_was_confirmed_survives_a_kill(folder: Path, seed: int) -> None:
    backend = BACKENDS[seed % len(BACKENDS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder / "log"), str(seed), backend],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    confirmed = 0
    # Killed somewhere in the steps that follow some confirmation.
    for _ in range(5 + 7 * seed % 60):
        confirmed = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    confirmed = max([confirmed, *map(int, child.stdout.read().split("\n")[:-1])])
    child.wait()
    child.stdout.close()

    tables = np.repeat(np.arange(2, dtype=np.int32), 3000)
    ids = np.tile(np.arange(3000), 2)
    log = Log(_core.RowLog.open_to_read(str(folder / "log"), backend))
    versions = log.versions(tables, ids)
    # By row: the version that was confirmed, and those that may have come after it.
    allowed = np.zeros((2, 3000), np.int64)
    right = np.zeros((2, 3000), bool)
    seen = versions.reshape(2, 3000)
    for version in range(1, confirmed + 1):
        t, i, erases, _ = batch(seed, version)
        allowed[t, i] = 0 if erases else version
    right |= seen == allowed
    for version in range(confirmed + 1, max(confirmed, versions.max()) + 200):
        t, i, erases, _ = batch(seed, version)
        right[t, i] |= seen[t, i] == (0 if erases else version)
    assert right.all()
    assert log.core.rows(0, 0) + log.core.rows(0, 1) == np.count_nonzero(versions)
