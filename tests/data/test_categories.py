"""`criteo_ids` beside the reader of the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.click_logs import good_line
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb

criteo_ids = hb.data.criteo_ids

Digits = st.text("0123456789abcdefABCDEF", min_size=8, max_size=8)


def test_text_has_the_ids_that_the_log_gives_it(tmp_path: Path) -> None:
    lines = [good_line(i * 77_777) for i in range(50)]
    (tmp_path / "log.tsv").write_text("\n".join(lines))
    (batch,) = hb.data.CriteoLog(tmp_path / "log.tsv", batch_size=100)
    columns = np.array([line.split("\t")[14:] for line in lines])
    assert "" in columns
    for number, name in enumerate(hb.data.CATEGORIES):
        assert torch.equal(criteo_ids(columns[:, number]), batch[name])
    assert torch.equal(
        criteo_ids(columns.tolist()), torch.stack([batch[n] for n in hb.data.CATEGORIES], 1)
    )
    assert not torch.equal(hb.data.hash_ids(columns[:, 25]), batch["C26"])


@given(st.lists(Digits | st.just("")))
def test_text_in_any_form(values: list[str]) -> None:
    wanted = [int(value, 16) if value else hb.data.MISSING_ID for value in values]
    forms: list[Any] = [values, tuple(values), [value.encode() for value in values]]
    forms += [np.array(values, object), np.array(values, "U8"), np.array(values, "S8")]
    for form in forms:
        found = criteo_ids(form)
        assert found.dtype == torch.int64 and found.tolist() == wanted
    assert criteo_ids([values, values]).tolist() == [wanted, wanted]
    for value, one in zip(values, wanted, strict=True):
        assert criteo_ids(value).shape == () and int(criteo_ids(value)) == one


def test_what_is_missing() -> None:
    values = np.array([None, float("nan"), "", b"", "68fd1e64"], object)
    assert criteo_ids(values).tolist() == [-1, -1, -1, -1, 0x68FD1E64]


@pytest.mark.parametrize(
    "value",
    ["68fd1e6", "68fd1e644", "0x68fd1e", "68fd1e6g", " 8fd1e64", "68fd1e6\n", "６８fd1e64", 0x68FD1E64, 1.5],
)  # fmt: skip
def test_what_is_no_category(value: Any) -> None:
    with pytest.raises(hb.InputError, match="criteo_ids"):
        criteo_ids([value])


def test_arrays_that_are_none() -> None:
    with pytest.raises(hb.InputError, match="filled"):
        criteo_ids(np.ma.array(["68fd1e64"], mask=[True]))
    with pytest.raises(hb.InputError, match="criteo_ids"):
        criteo_ids([["68fd1e64"], ["68fd1e64", ""]])
    with pytest.raises(hb.InputError, match="got int"):
        criteo_ids(torch.tensor([1]))


def test_ids_of_another_kind_are_found_out() -> None:
    embeddings = hb.EmbeddingCollection([hb.Table("C1", 4)])
    embeddings({"C1": criteo_ids(["68fd1e64", ""])})
    assert embeddings.contains("C1", criteo_ids(["68fd1e64", "00000000"])).tolist() == [True, False]
    with pytest.raises(hb.IdError, match=r"'C1': 1 of 1 ids have no row.*criteo_ids"):
        embeddings.lookup("C1", hb.data.hash_ids(["68fd1e64"]), missing="error")
    with pytest.raises(hb.InputError, match="string '68fd1e64'.*criteo_ids"):
        embeddings.lookup("C1", ["68fd1e64"])
