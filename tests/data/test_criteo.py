import gzip
import logging
import pickle

import numpy as np
import pytest
import torch
from data.click_logs import CATEGORIES, good_line, naive_fault, naive_row
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed.data
from hotbed.data import CriteoLog, DataError
from hotbed.errors import InputError

NAMES = [f"C{i}" for i in range(1, 27)]


def write(path, lines, end="\n", last_end=True, compress=False):
    data = end.join(lines).encode() + (end.encode() if last_end and lines else b"")
    path.write_bytes(gzip.compress(data, 1) if compress else data)
    return path


def rows_of(batches):
    """The C26 values, which number the rows that good_line makes."""
    return [int(i) for batch in batches for i in batch["C26"]]


def assert_rows(batches, lines, labels=True):
    batches = list(batches)
    rows = [naive_row(line, labels) for line in lines]
    if not rows:
        assert batches == []
        return
    dense = np.array([row[1] for row in rows], np.float32)
    ids = np.array([row[2] for row in rows], np.int64)
    np.testing.assert_array_equal(torch.cat([b["dense"] for b in batches]).numpy(), dense)
    for k, name in enumerate(NAMES):
        np.testing.assert_array_equal(torch.cat([b[name] for b in batches]).numpy(), ids[:, k])
    if labels:
        label = np.array([row[0] for row in rows], np.float32)
        np.testing.assert_array_equal(torch.cat([b["label"] for b in batches]).numpy(), label)
    else:
        assert all("label" not in b for b in batches)


def test_shapes_and_types(tmp_path):
    path = write(tmp_path / "a.tsv", [good_line(i) for i in range(10)])
    batches = list(CriteoLog(path, 4))
    assert [len(b["label"]) for b in batches] == [4, 4, 2]
    for batch in batches:
        rows = len(batch["label"])
        assert list(batch) == ["label", "dense", *NAMES]
        assert batch["label"].dtype == torch.float32
        assert batch["dense"].shape == (rows, 13) and batch["dense"].dtype == torch.float32
        assert all(batch[n].shape == (rows,) and batch[n].dtype == torch.int64 for n in NAMES)
        assert all(batch[n].is_contiguous() for n in NAMES)
        first, last = batch["C1"], batch["C26"]
        assert last.data_ptr() - first.data_ptr() == 25 * rows * 8  # one (26, B) block


integer_text = st.one_of(
    st.just(""),
    st.integers(-3, 3000).map(str),
    st.integers(-(10**18) + 1, 10**18 - 1).map(str),
    st.sampled_from(["0", "-0", "007", "2047", "2048", "999999999999999999"]),
)
id_text = st.one_of(
    st.just(""),
    st.integers(0, 2**32 - 1).map("{:08x}".format),
    st.sampled_from(["00000000", "ffffffff", "FFFFFFFF", "DeadBeef"]),
)
line_text = st.tuples(
    st.sampled_from("01"),
    st.lists(integer_text, min_size=13, max_size=13),
    st.lists(id_text, min_size=26, max_size=26),
).map(lambda row: "\t".join([row[0], *row[1], *row[2]]))


@st.composite
def broken_line(draw):
    """A good line with one field changed, lost or added; now and then still a good one."""
    fields = draw(line_text).split("\t")
    at = draw(st.integers(0, 39))
    kind = draw(st.sampled_from(["replace", "append", "delete", "insert", "cut", "garbage"]))
    text = st.text(
        st.sampled_from('0123456789abcdefgABCDEFG+-. x\r\0é"/:@`'), min_size=1, max_size=20
    )
    if kind == "replace":
        fields[at] = draw(text)
    elif kind == "append":
        fields[at] += draw(text)
    elif kind == "delete":
        del fields[at]
    elif kind == "insert":
        fields.insert(at, draw(text))
    elif kind == "cut":
        line = "\t".join(fields)
        return line[: draw(st.integers(1, len(line)))].rstrip("\r") or "x"
    else:
        return draw(text).rstrip("\r") or "\t"
    return "\t".join(fields).rstrip("\r") or "x"


@settings(max_examples=examples(100))
@given(
    lines=st.lists(line_text, max_size=12),
    batch_size=st.integers(1, 14),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\r\n\n"]),
    last_end=st.booleans(),
    compress=st.booleans(),
)
def test_good_lines_match_the_naive_reader(
    tmp_path_factory, lines, batch_size, end, last_end, compress
):
    path = tmp_path_factory.mktemp("log") / "a"
    write(path, lines, end, last_end, compress)
    log = CriteoLog(path, batch_size)
    assert_rows(log, lines)
    assert log.count_rows() == len(lines)
    assert len(log) == len(list(log))


@settings(max_examples=examples(150))
@given(lines=st.lists(st.one_of(line_text, broken_line()), min_size=1, max_size=8))
def test_broken_lines_are_named_or_skipped(tmp_path_factory, lines):
    path = write(tmp_path_factory.mktemp("log") / "a.tsv", lines)
    faults = [naive_fault(line) for line in lines]
    good = [line for line, fault in zip(lines, faults, strict=True) if fault is None]
    log = CriteoLog(path, 3, on_error="skip")
    assert_rows(log, good)
    assert log.skipped.lines == len(lines) - len(good)
    assert log.count_rows() == len(lines)
    first = next((i for i, fault in enumerate(faults) if fault), None)
    if first is None:
        return
    with pytest.raises(DataError) as caught:
        list(CriteoLog(path))
    message = str(caught.value)
    assert message.startswith(f"{path}, line {first + 1}: ")
    expected = {"columns": "columns, expected 40", "long": "longer than"}
    assert expected.get(faults[first], f"column {faults[first]} holds") in message
    assert log.skipped.examples[0] == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, "2"), "column label holds '2', not 0 or 1."),
        ((0, ""), "column label holds '', not 0 or 1."),
        ((0, "\ufeff0"), r"column label holds '\ufeff0', not 0 or 1."),
        ((3, "1.5"), "column I3 holds '1.5', not an integer of at most 18 digits."),
        ((13, "-"), "column I13 holds '-', not an integer of at most 18 digits."),
        ((2, "1" * 19), f"column I2 holds '{'1' * 19}', not an integer of at most 18 digits."),
        ((14, "abc"), "column C1 holds 'abc', not 8 hexadecimal digits."),
        ((39, "0123456789"), "column C26 holds '0123456789', not 8 hexadecimal digits."),
        ((20, "x" * 99), f"column C7 holds '{'x' * 40}'..., not 8 hexadecimal digits."),
        ((20, "x" * 5000), "longer than 4096 bytes; not a click log?"),
    ],
)
def test_messages(tmp_path, change, message):
    lines = [good_line(i) for i in range(7)]
    fields = lines[4].split("\t")
    fields[change[0]] = change[1]
    lines[4] = "\t".join(fields)
    path = write(tmp_path / "a.tsv", lines)
    with pytest.raises(DataError) as caught:
        list(CriteoLog(path, 2))
    assert str(caught.value) == f"{path}, line 5: {message}"


def test_a_missing_or_an_unexpected_label_is_explained(tmp_path):
    bare = write(tmp_path / "bare.tsv", [good_line(1, label=False)])
    with pytest.raises(DataError, match="39 columns, expected 40.*Pass labels=False .*without a"):
        list(CriteoLog(bare))
    full = write(tmp_path / "full.tsv", [good_line(1)])
    with pytest.raises(DataError, match="40 columns, expected 39.*Pass labels=True .*with a"):
        list(CriteoLog(full, labels=False))


def test_lines_without_labels(tmp_path):
    lines = [good_line(i, label=False) for i in range(5)]
    path = write(tmp_path / "a.tsv", lines)
    assert_rows(CriteoLog(path, 2, labels=False), lines, labels=False)
    assert_rows(CriteoLog(path, 2, labels="auto"), lines, labels=False)
    labelled = write(tmp_path / "b.tsv", ["", "\r", *(good_line(i) for i in range(5))])
    assert_rows(CriteoLog(labelled, 2, labels="auto"), [good_line(i) for i in range(5)])
    with pytest.raises(DataError, match=r"b.tsv, line 3: 40 columns, expected 39"):
        list(CriteoLog([path, labelled], 2, labels="auto"))


def test_rows_and_line_numbers_survive_block_borders(tmp_path, monkeypatch):
    monkeypatch.setattr(hotbed.data.lines, "BLOCK_BYTES", 512)
    lines = [good_line(i) for i in range(60)]
    for compress in (False, True):
        path = write(tmp_path / f"a{compress}", lines, compress=compress)
        assert_rows(CriteoLog(path, 7), lines)
        assert CriteoLog(path).count_rows() == 60
    broken = [*lines[:40], "x" * 20_000, *lines[40:], "y\t" * 3_000]
    path = write(tmp_path / "b.tsv", broken, last_end=False)
    log = CriteoLog(path, 7, on_error="skip")
    assert_rows(log, lines)
    assert log.count_rows() == 62
    assert [e.partition(" bytes")[0] for e in log.skipped.examples] == [
        f"{path}, line 41: longer than 4096",
        f"{path}, line 62: longer than 4096",
    ]


def test_several_files_are_one_log(tmp_path):
    lines = [good_line(i) for i in range(30)]
    paths = [
        write(tmp_path / "a.tsv", lines[:11], last_end=False),
        write(tmp_path / "empty.tsv", []),
        write(tmp_path / "b.tsv.gz", lines[11:20], compress=True),
        write(tmp_path / "empty.tsv.gz", [], compress=True),
        write(tmp_path / "c.tsv", lines[20:]),
    ]
    log = CriteoLog(paths, 8)
    assert [len(b["label"]) for b in log] == [8, 8, 8, 6]
    assert rows_of(log) == list(range(30))
    assert len(log) == 4 and len(CriteoLog(paths, 8, drop_last=True)) == 3
    assert rows_of(CriteoLog(paths, 8, drop_last=True)) == list(range(24))


def test_an_empty_log_has_no_batches(tmp_path):
    for name, data in [("a", b""), ("b", b"\n\r\n\n"), ("c", gzip.compress(b""))]:
        (tmp_path / name).write_bytes(data)
        log = CriteoLog(tmp_path / name, labels="auto")
        assert list(log) == [] and log.count_rows() == 0 and len(log) == 0


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(5, 12), range(5, 12)),
        ((5, None), range(5, 30)),
        ((None, 3), range(3)),
        ((-4, None), range(26, 30)),
        (slice(2, -20), range(2, 10)),
        ((12, 12), range(0)),
        ((12, 5), range(0)),
        ((28, 99), range(28, 30)),
        ((99, 120), range(0)),
    ],
)
def test_row_ranges(tmp_path, rows, expected):
    lines = [good_line(i) for i in range(30)]
    paths = [write(tmp_path / "a", lines[:17]), write(tmp_path / "b", lines[17:], compress=True)]
    log = CriteoLog(paths, 4, rows=rows)
    assert rows_of(log) == list(expected)
    assert log.count_rows() == len(expected)


def test_split_keeps_the_last_rows_for_testing(tmp_path):
    path = write(tmp_path / "a", [good_line(i) for i in range(25)])
    train, test = CriteoLog(path, 4, drop_last=True, shuffle=8).split(0.2)
    assert sorted(rows_of(train)) == list(range(20))
    assert rows_of(test) == list(range(20, 25))
    inner, rest = train.split(0.5)
    assert sorted(rows_of(inner)) != [] and set(rows_of(inner)) <= set(range(10))
    assert rows_of(rest) == list(range(10, 20))
    everything, nothing = CriteoLog(path).split(0)
    assert len(rows_of(everything)) == 25 and rows_of(nothing) == []


def test_a_split_counts_malformed_lines_whatever_is_done_with_them(tmp_path):
    lines = [good_line(i) for i in range(20)]
    lines[3] = "broken"
    path = write(tmp_path / "a", lines)
    train, test = CriteoLog(path, 4, on_error="skip").split(0.5)
    assert rows_of(train) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert rows_of(test) == list(range(10, 20))


@pytest.mark.parametrize("damage", ["short", "no end", "flipped", "checksum"])
def test_a_damaged_gzip_file_is_an_error(tmp_path, damage, monkeypatch):
    monkeypatch.setattr(hotbed.data.lines, "BLOCK_BYTES", 4096)
    data = bytearray(gzip.compress("\n".join(good_line(i) for i in range(2000)).encode()))
    if damage == "short":
        del data[len(data) // 2 :]
    elif damage == "no end":
        del data[-4:]
    elif damage == "flipped":
        data[12:60] = bytes(48)
    else:
        data[-7] ^= 1
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(data)
    for on_error in ("raise", "skip"):
        with pytest.raises(DataError, match="a.tsv.gz: the gzip stream"):
            list(CriteoLog(path, on_error=on_error))
        with pytest.raises(DataError, match="a.tsv.gz: the gzip stream"):
            CriteoLog(path, on_error=on_error).count_rows()


def test_gzip_members_and_padding(tmp_path):
    lines = [good_line(i) for i in range(9)]
    parts = [gzip.compress(("\n".join(lines[a : a + 3]) + "\n").encode()) for a in (0, 3, 6)]
    path = tmp_path / "a.gz"
    path.write_bytes(b"".join(parts) + bytes(700))
    assert_rows(CriteoLog(path, 2), lines)
    path.write_bytes(parts[0] + b"trailing")
    with pytest.raises(DataError, match="damaged"):
        list(CriteoLog(path))


def test_wrong_arguments(tmp_path):
    path = write(tmp_path / "a", [good_line(0)])
    with pytest.raises(FileNotFoundError, match="'nowhere.tsv' does not exist"):
        CriteoLog([path, "nowhere.tsv"])
    with pytest.raises(IsADirectoryError, match="pass the files in it"):
        CriteoLog(tmp_path)
    with pytest.raises(ValueError, match="paths is empty"):
        CriteoLog([])
    with pytest.raises(ValueError, match="batch_size is 0"):
        CriteoLog(path, 0)
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        CriteoLog(path, on_error="ignore")
    with pytest.raises(ValueError, match="labels is 'some'"):
        CriteoLog(path, labels="some")
    with pytest.raises(ValueError, match="step 2"):
        CriteoLog(path, rows=slice(0, 4, 2))
    with pytest.raises(ValueError, match="shuffle is -1"):
        CriteoLog(path, shuffle=-1)
    with pytest.raises(ValueError, match="test_fraction is 1"):
        CriteoLog(path).split(1)


WRONG_LATER = [
    ("batch_size", 0),
    ("batch_size", 2.5),
    ("shuffle", -1),
    ("seed", 2**64),
    ("labels", 1),
    ("drop_last", "yes"),
    ("start", -1),
    ("stop", 2.5),
]


OF_LOGS = [("on_error", "ignore"), ("line_numbers", 2)]


@pytest.mark.parametrize(("option", "value"), [*WRONG_LATER, *OF_LOGS])
def test_options_are_checked_when_they_are_set_later(tmp_path, option, value):
    lines = [good_line(i) for i in range(10)]
    log = CriteoLog(write(tmp_path / "a", lines), 4)
    was = getattr(log, option)
    with pytest.raises(InputError, match=option):
        setattr(log, option, value)
    assert getattr(log, option) == was
    assert_rows(log, lines)


def test_options_that_are_set_later_count(tmp_path):
    lines = [good_line(0), "broken", good_line(1), good_line(2)]
    log = CriteoLog(write(tmp_path / "a", lines), 4)
    log.on_error, log.batch_size, log.seed = "skip", 2, None
    log = pickle.loads(pickle.dumps(log))
    assert [len(batch["label"]) for batch in log] == [1, 2] and log.skipped.lines == 1
    log.on_error = "raise"
    with pytest.raises(DataError, match="line 2"):
        list(log)


def test_the_report_at_the_end(tmp_path, caplog):
    lines = [good_line(i) for i in range(20)]
    lines[2] = lines[7] = "broken"
    path = write(tmp_path / "a", lines)
    log = CriteoLog(path, 4, on_error="skip")
    assert log.skipped == (0, ())
    for _ in range(2):  # counted anew in each iteration
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hotbed.data"):
            assert [len(b["label"]) for b in log] == [3, 3, 4, 4, 4]
        assert log.skipped.lines == 2 and len(log.skipped.examples) == 2  # type: ignore[attr-defined]
        assert "2 malformed lines skipped" in caplog.text and f"{path}, line 3:" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hotbed.data"):
        next(iterator := iter(log))
        iterator.close()  # type: ignore[attr-defined]
    assert "1 malformed line skipped" in caplog.text


def test_shuffling(tmp_path):
    path = write(tmp_path / "a", [good_line(i) for i in range(50)])
    log = CriteoLog(path, 4, shuffle=17)  # windows of 20 rows
    torch.manual_seed(3)
    first, second = rows_of(log), rows_of(log)
    assert first != second
    torch.manual_seed(3)
    again = CriteoLog(path, 4, shuffle=17)
    assert rows_of(again) == first
    assert rows_of(CriteoLog(path, 4, shuffle=17, seed=again.seed)) == first
    log.seek(2, 3)
    assert rows_of(log) == second[12:]
    log.seek(1)
    assert [rows_of(log), rows_of(log)] == [first, second]
    for window in (range(20), range(20, 40), range(40, 50)):
        assert sorted(first[window.start : window.stop]) == list(window)
        assert first[window.start : window.stop] != list(window)
    assert len(rows_of(CriteoLog(path, 4, shuffle=17, drop_last=True))) == 48
    assert sorted(rows_of(CriteoLog(path, 4, shuffle=True))) == list(range(50))
    batch = next(iter(log))
    row = naive_row(good_line(int(batch["C26"][0])))
    assert [int(batch[n][0]) for n in NAMES] == row[2]
    assert batch["dense"][0].tolist() == row[1] and float(batch["label"][0]) == row[0]


def test_category_count_is_that_of_the_log():
    assert len(hotbed.data.CATEGORIES) == CATEGORIES
