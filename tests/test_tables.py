"""Descriptions of tables, and what is said of those that cannot be."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import hotbed as hb
from hotbed.places.host.place import in_memory
from hotbed.table.live import LiveTable


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dim": 0}, "'item': dim must be an integer from 1 to 4194304, got 0"),
        ({"dim": -3}, "got -3"),
        ({"dim": 2.0}, "got 2.0"),
        ({"dim": True}, "got True"),
        ({"dim": 2**40}, "got 1099511627776"),
        ({"dim": None}, "got None"),
        ({"rows": 0}, "'item': rows must be a positive integer .* rows|None .*got 0"),
        ({"rows": -1}, "got -1"),
        ({"rows": 1.5}, "got 1.5"),
        ({"rows": 2**63}, "below"),
        ({"combiner": "avg"}, "combiner must be one of none, sum, mean, sqrtn, max, got 'avg'"),
        ({"combiner": 3}, "combiner must be one of"),
        ({"dtype": torch.int64}, "dtype must be one of float32, float64, float16, bfloat16"),
        ({"dtype": "float32"}, "dtype must be one of"),
        ({"padding_idx": 10}, r"padding_idx 10 is outside \[-10, 10\)"),
        ({"padding_idx": -11}, "outside"),
        ({"padding_idx": 1.0}, "64-bit integer"),
        ({"rows": None, "padding_idx": 2**63}, "64-bit integer"),
        ({"init": 0.01}, "init must be one of hotbed.init"),
        ({"init": torch.nn.init.normal_}, "init must be one of hotbed.init"),
        ({"rows": None, "init": hb.init.XavierUniform()}, "'item': XavierUniform scales"),
        ({"name": ""}, "non-empty string"),
        ({"name": 3}, "non-empty string"),
        ({"name": "s\udcff"}, r"without lone surrogates, not 's\\udcff'"),
    ],
)
def test_what_cannot_be_a_table(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(hb.TableError, match=says):
        hb.Table(**({"name": "item", "dim": 4, "rows": 10} | arguments))


def test_integers_of_other_kinds_are_taken() -> None:
    table = hb.Table("item", dim=np.int32(4), rows=torch.tensor(10), padding_idx=np.int64(2))
    assert (table.dim, table.rows, table.padding_idx) == (4, 10, 2)
    assert all(type(v) is int for v in (table.dim, table.rows, table.padding_idx))


def test_negative_padding_counts_from_the_end_of_a_static_table() -> None:
    assert hb.Table("item", 4, 10, padding_idx=-1) == hb.Table("item", 4, 10, padding_idx=9)
    assert hb.Table("item", 4, 10, padding_idx=-10).padding_idx == 0
    assert hb.Table("item", 4, padding_idx=-1).padding_idx == -1  # an id as any other


def test_a_table_is_a_value() -> None:
    table = hb.Table("item", 4, combiner=None)
    assert table.combiner == "none" and table == hb.Table("item", 4, combiner="none")
    assert pickle.loads(pickle.dumps(table)) == table and hash(table) == hash(table)
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.dim = 3


@pytest.mark.parametrize("rows", [10**12, 2**50, 2**62])
def test_planes_beyond_memory_are_refused_with_bytes(rows: int) -> None:
    with pytest.raises(
        hb.OutOfMemory, match=r"Table 'item'.* needs \d+ bytes .* \d+ bytes .*free"
    ) as e:
        LiveTable(hb.Table("item", dim=64, rows=rows), 1, in_memory)
    assert e.value.asked_bytes >= 10**12 and e.value.free_bytes > 0
    assert isinstance(e.value, hb.HotbedError) and isinstance(e.value, MemoryError)
