"""Rows of named values, written as files of many kinds, and what a slow, plain reader makes of them."""

from __future__ import annotations

import csv
import gzip
import io
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import hotbed as hb
from hotbed.data import Id, Ids, Key, Label, Number, Pair, Schema

Row = dict[str, Any]
"""Column → a string, a number, a list of them, or None where it is missing."""

SCHEMA = Schema(
    {
        "clicked": Label(),
        "price": Number("log"),
        "age": Number("standard", mean=30.0, std=2.0, missing=-1.0),
        "user": Id(),
        "shop": Id(values="int"),
        "city": Id(rows=100),
        "tags": Ids(),
        "seen": hb.data.Sequence(table="item", length=3),
        "item": Id(),
        "both": Pair(of=("user", "shop")),
        "key": Key(),
    }
)
LISTS = ("tags", "seen")


def written(value: Any) -> str:
    if isinstance(value, list):
        return "|".join(written(one) for one in value)
    return "" if value is None else str(value)


def write_csv(path: Path, rows: Sequence[Row], names: Sequence[str], delimiter: str = ",") -> Path:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writerows([names, *([written(row[name]) for name in names] for row in rows)])
    data = out.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_parquet(
    path: Path, rows: Sequence[Row], types: Mapping[str, pa.DataType], group: int = 7
) -> Path:
    columns = {}
    for name, kind in types.items():
        values = [row[name] for row in rows]
        if pa.types.is_boolean(kind):
            values = [None if value is None else bool(value) for value in values]
        columns[name] = pa.array(values, kind)
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def naive_hash(value: Any) -> int:
    return -1 if value in (None, "") else int(hb.data.hash_ids(str(value)))


def naive_pair(first: int, second: int) -> int:
    return int(hb.data.hash_ids(struct.pack("<qq", first, second)))


def naive(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The one batch of rows by `SCHEMA`, as lists; bags as lists of lists."""
    found: dict[str, list[Any]] = {
        name: []
        for name in (
            "label",
            "dense",
            "tags",
            "seen",
            "key",
            "user",
            "shop",
            "city",
            "item",
            "both",
        )
    }
    for row in rows:
        price, age, shop = row["price"], row["age"], row["shop"]
        found["label"].append(float(row["clicked"]))
        log = 0.0 if price is None else math.log1p(max(price, 0.0))
        standard = -1.0 if age is None else (age - 30.0) / 2.0
        found["dense"].append([float(np.float32(log)), float(np.float32(standard))])
        user, city = naive_hash(row["user"]), naive_hash(row["city"])
        found["user"].append(user)
        found["shop"].append(-1 if shop is None else shop)
        found["city"].append(100 if city == -1 else city % 100)
        found["item"].append(naive_hash(row["item"]))
        found["both"].append(naive_pair(user, found["shop"][-1]))
        bags = {
            name: [naive_hash(v) for v in row[name] or [] if naive_hash(v) != -1] for name in LISTS
        }
        found["tags"].append(bags["tags"])
        found["seen"].append((bags["seen"][-3:] + [-1] * 3)[:3])
        found["key"].append(row["key"] or "")
    return found


def as_lists(batches: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """All batches as one, as lists."""
    found: dict[str, list[Any]] = {}
    for batch in batches:
        for name, value in batch.items():
            if isinstance(value, hb.Jagged):
                value = value.to_lists()
            elif isinstance(value, torch.Tensor):
                value = value.tolist()
            found.setdefault(name, []).extend(value)
    return found
