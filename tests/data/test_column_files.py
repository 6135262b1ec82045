"""`hotbed.data.open`: order, ranges, shuffling, workers, and those who take its batches."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from dist.worlds import STARTS
from torch.utils.data import DataLoader

import hotbed as hb
from hotbed.data import ColumnFiles, CriteoLog, Id, Key, Label, Number, Schema
from hotbed.data.criteo_lines import CATEGORIES, DENSE

SCHEMA = Schema({"click": Label(), "n": Number(), "row": Id(values="int"), "name": Key()})


def table(begin: int, end: int) -> pa.Table:
    rows = np.arange(begin, end)
    return pa.table(
        {"click": rows % 2, "n": rows / 2, "row": rows, "name": [f"row {row}" for row in rows]}
    )


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Rows 0 to 99 in files of three kinds."""
    files = [tmp_path / name for name in ("a.parquet", "b.csv", "c.tsv.gz", "d.parquet")]
    pq.write_table(table(0, 30), files[0], row_group_size=8)
    pa.csv.write_csv(table(30, 45), files[1])
    with gzip.open(files[2], "wb") as file:
        pa.csv.write_csv(table(45, 70), file, pa.csv.WriteOptions(delimiter="\t"))
    pq.write_table(table(70, 100), files[3], row_group_size=100)
    return files


def rows_of(batches: Iterable[dict[str, Any]]) -> list[int]:
    """The rows of batches, whose other values fit them."""
    found = []
    for batch in batches:
        rows = batch["row"].tolist()
        assert batch["label"].tolist() == [row % 2 for row in rows]
        assert batch["dense"].tolist() == [[row / 2] for row in rows]
        assert batch["name"] == [f"row {row}" for row in rows]
        found += rows
    return found


def test_rows_come_in_their_order_again_and_again(paths: list[Path]) -> None:
    files = hb.data.open(paths, SCHEMA, 7)
    for _ in range(2):
        batches = list(files)
        assert [len(batch["label"]) for batch in batches] == [7] * 14 + [2]
        assert rows_of(batches) == list(range(100))
    assert len(files) == 15 and files.count_rows() == 100
    short = hb.data.open(paths, SCHEMA, 7, drop_last=True)
    assert rows_of(short) == list(range(98)) and len(short) == 14


@pytest.mark.parametrize("shuffle", [False, 20])
@pytest.mark.parametrize("batch_size", [1, 8, 200])
@pytest.mark.parametrize("part", [(0, 100), (5, None), (29, 46), (-10, -3), (40, 20), (90, 500)])
def test_ranges_of_rows(
    paths: list[Path], part: tuple[int, int | None], batch_size: int, shuffle: bool | int
) -> None:
    expected = list(range(100)[slice(*part)])
    files = hb.data.open(paths, SCHEMA, batch_size, rows=part, shuffle=shuffle, seed=1)
    assert sorted(rows_of(files)) == expected and files.count_rows() == len(expected)
    assert len(files) == -(-len(expected) // batch_size)


@pytest.mark.parametrize("shuffle", [False, 17])
def test_a_position_is_found_again(paths: list[Path], shuffle: bool | int) -> None:
    files = hb.data.open(paths, SCHEMA, 4, shuffle=shuffle, seed=9)
    epochs = [rows_of(files) for _ in range(3)]
    assert (epochs[0] == epochs[1]) is not bool(shuffle)
    for epoch in (1, 2, 3):
        for batches in (0, 1, 5, 6, 24, 25, 40):
            files.seek(epoch, batches)
            assert rows_of(files) == epochs[epoch - 1][4 * batches :]
    if shuffle:
        with pytest.raises(ValueError, match="no place to go on from; give seed="):
            hb.data.open(paths, SCHEMA, shuffle=True).seek(2)


def test_windows_are_shuffled_as_those_of_a_criteo_log(tmp_path: Path) -> None:
    hb.data.write_criteo_tsv(tmp_path / "log.tsv", 100)
    log = CriteoLog(tmp_path / "log.tsv", 8, shuffle=30, seed=5)
    columns: dict[str, Any] = {"label": Label()}
    columns |= {name: Number("log") for name in DENSE}
    columns |= {name: Id() for name in CATEGORIES}
    files = hb.data.open(
        tmp_path / "log.tsv", Schema(columns), 8, shuffle=30, seed=5, columns=list(columns)
    )
    for one, other in zip([*log, *log], [*files, *files], strict=True):
        assert torch.equal(one["label"], other["label"])
        torch.testing.assert_close(one["dense"], other["dense"])
        ids = [f"{value:08x}" if value >= 0 else "" for value in one["C3"].tolist()]
        hashed = [int(hb.data.hash_ids(text)) if text else -1 for text in ids]
        assert hashed == other["C3"].tolist()


def test_ids_of_a_batch_lie_in_one_block_of_memory(paths: list[Path]) -> None:
    schema = Schema({"row": Id(), "name": Id(), "n": Number()})
    for shuffle in (False, 16):
        for batch in hb.data.open(paths, schema, 8, shuffle=shuffle, seed=1):
            distance = batch["name"].data_ptr() - batch["row"].data_ptr()
            assert distance == 8 * len(batch["row"]) and batch["row"].is_contiguous()


def test_the_last_rows_are_for_testing(paths: list[Path]) -> None:
    files = hb.data.open(paths, SCHEMA, 8, shuffle=16, seed=1, drop_last=True, rows=(10, 90))
    train, test = files.split(0.25)
    assert train.count_rows() == 60 and test.count_rows() == 20
    assert set(rows_of(train)) <= set(range(10, 70)) and rows_of(test) == list(range(70, 90))
    assert len(train) == 7 and len(test) == 3


def test_folders_and_patterns_are_sorted(paths: list[Path], tmp_path: Path) -> None:
    for name in ("_SUCCESS", ".hidden", "_delta/e.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("nothing to read")
    (tmp_path / "day 1").mkdir()
    paths[3] = paths[3].rename(tmp_path / "day 1" / "d.parquet")
    assert rows_of(hb.data.open(tmp_path, SCHEMA)) == list(range(100))
    assert rows_of(hb.data.open(tmp_path / "[ab].*", SCHEMA)) == list(range(45))
    assert rows_of(hb.data.open([tmp_path / "day 1", paths[1]], SCHEMA)) == [
        *range(70, 100),
        *range(30, 45),
    ]


def test_labels_are_left_out_or_found(paths: list[Path], tmp_path: Path) -> None:
    without = tmp_path / "without.parquet"
    pq.write_table(table(0, 9).drop_columns(["click"]), without)
    assert "label" not in next(iter(hb.data.open(without, SCHEMA, labels="auto")))
    assert "label" not in next(iter(hb.data.open(paths, SCHEMA, labels=False)))
    assert "label" in next(iter(hb.data.open(paths, SCHEMA, labels="auto")))
    with pytest.raises(hb.data.SchemaError, match="Without 'click' the schema has no column"):
        list(hb.data.open(paths, Schema({"click": Label()}), labels=False))
    with pytest.raises(
        hb.data.DataError, match="without.parquet has no column of the name 'click'"
    ):
        list(hb.data.open([paths[0], without], SCHEMA, labels="auto"))


def test_changed_data_have_another_fingerprint(paths: list[Path], tmp_path: Path) -> None:
    files = hb.data.open(paths, SCHEMA, 4)
    print_of_45 = files.fingerprint(45)
    assert print_of_45.rows == 45
    assert hb.data.open(paths[:2], SCHEMA).fingerprint() == print_of_45
    pq.write_table(table(0, 45), tmp_path / "all.parquet", compression="zstd")
    assert hb.data.open(tmp_path / "all.parquet", SCHEMA).fingerprint() == print_of_45
    for column in ("click", "n", "row", "name"):
        changed = table(0, 45).to_pylist()
        changed[17][column] = "other" if column == "name" else 1 + changed[17][column]
        pq.write_table(pa.Table.from_pylist(changed), tmp_path / "changed.parquet")
        other = hb.data.open(tmp_path / "changed.parquet", SCHEMA).fingerprint()
        assert other.rows == 45 and other.crc32c != print_of_45.crc32c


def test_long_lists_are_read_in_small_pieces(tmp_path: Path) -> None:
    from hotbed.data.arrow_files import Parquet

    lists = pa.array([np.arange(200_000) + row for row in range(100)], pa.list_(pa.int64()))
    pq.write_table(pa.table({"a": lists}), tmp_path / "a.parquet", use_dictionary=False)
    pieces = [batch.num_rows for batch in Parquet(str(tmp_path / "a.parquet")).batches(["a"])]
    assert sum(pieces) == 100 and max(pieces) * 200_000 * 8 < 100e6
    schema = Schema({"a": hb.data.Sequence(length=2, values="int")})
    batch = next(iter(hb.data.open(tmp_path / "a.parquet", schema, 3)))
    assert batch["a"].tolist() == [[199_998 + row, 199_999 + row] for row in range(3)]


def fork_free(test: Any) -> Any:
    ignored = [
        "ignore:This DataLoader will create",
        "ignore:This process .* is multi-threaded:DeprecationWarning",
    ]
    return pytest.mark.process(pytest.mark.filterwarnings(*ignored)(test))


@fork_free
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("way", ["fork", "forkserver"])
def test_workers_give_the_same_batches_in_the_same_order(
    paths: list[Path], workers: int, way: str
) -> None:
    context = {"fork": "fork", "forkserver": STARTS}[way]
    files = hb.data.open(paths, SCHEMA, 4, rows=(3, 98))
    assert len(rows_of(files)) == 95  # Arrow's threads run before the fork
    loader = DataLoader(
        files, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    for _ in range(2):
        batches = list(loader)
        assert rows_of(batches) == list(range(3, 98)) and len(batches) == 24
    shuffled: ColumnFiles = hb.data.open(paths, SCHEMA, 4, shuffle=8, seed=1)
    loader = DataLoader(
        shuffled, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    assert sorted(rows_of(loader)) == list(range(100))


@fork_free
def test_a_worker_that_has_imported_nothing_gives_the_same_batches(paths: list[Path]) -> None:
    files = hb.data.open(paths, SCHEMA, 4, rows=(3, 98))
    loader = DataLoader(files, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    batches = list(loader)
    assert rows_of(batches) == list(range(3, 98)) and len(batches) == 24


class StopAfter(hb.train.Callback):
    """Stops a training after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, step: hb.train.Step) -> None:
        self.steps -= 1

    def should_stop(self) -> bool:
        return self.steps <= 0


def test_a_model_trains_on_them_and_goes_on(paths: list[Path]) -> None:
    """Look-ahead, sequences of steps that are interrupted, keys that are no feature."""
    columns = {**SCHEMA.columns, "row": Id(), "words": hb.data.Pair(of=("row", "row"))}
    schema, ends = Schema(columns), []
    for parts in ([7, 10**6], [10**6]):
        torch.manual_seed(0)
        model = hb.models.DLRM(
            schema.tables(4), 4, 1, top=(8,), seed=1, storage=hb.Storage(host="9MB")
        )
        optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
        position, steps = hb.train.Position(), 0
        for most in parts:
            files = hb.data.open(paths, schema, 8, shuffle=32, seed=2)
            loader = hb.lookahead(files, model)
            steps += hb.train.fit(
                model, loader, optimizer, epochs=2, position=position, callbacks=[StopAfter(most)]
            ).steps
        assert steps == 26
        ends.append(model.embeddings.rows("row").values)
    assert torch.equal(*ends) and ends[0].abs().sum() > 0


def test_ranks_get_slices(paths: list[Path]) -> None:
    files = hb.data.open(paths, SCHEMA, 8)
    assert rows_of(hb.dist.slices(files)) == list(range(100))


@pytest.mark.data
def test_real_rows_are_those_of_the_criteo_log(criteo_log: Path) -> None:
    columns: dict[str, Any] = {"label": Label()}
    columns |= {name: Number("log") for name in DENSE}
    columns |= {name: Id() for name in CATEGORIES}
    files = hb.data.open(criteo_log, Schema(columns), 4096, columns=list(columns), rows=(0, 20_000))
    for one, other in zip(CriteoLog(criteo_log, 4096, rows=(0, 20_000)), files, strict=True):
        assert torch.equal(one["label"], other["label"])
        torch.testing.assert_close(one["dense"], other["dense"])
        for name in ("C3", "C26"):
            ids = one[name].tolist()
            hashed = hb.data.hash_ids([f"{value:08x}" if value >= 0 else "" for value in ids])
            hashed[one[name] < 0] = -1
            assert torch.equal(hashed, other[name])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_wrong_value_far_behind_is_named_by_its_row(kind: str, tmp_path: Path) -> None:
    """Rows come in pieces, and several files; rows are counted in their file."""
    good = pa.table({"n": ["1"] * 50_000})
    bad = pa.table({"n": ["1"] * 45_000 + ["x"] + ["1"] * 9})
    write = pa.csv.write_csv if kind == "csv" else pa.parquet.write_table
    for name, table in (("a", good), ("b", bad)):
        write(table, tmp_path / f"{name}.{kind}")
    schema = hb.data.Schema({"n": hb.data.Number()})
    with pytest.raises(hb.data.DataError, match=rf"b\.{kind}, row 45001, column 'n'"):
        for _ in hb.data.open(tmp_path, schema, batch_size=1000):
            pass
