"""A slow, plain reader of Criteo lines that the tests compare against, and line makers."""

import math
import re

import numpy as np

INTEGERS, CATEGORIES = 13, 26
COLUMNS = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]


def naive_fault(line: str, labels: bool = True) -> str | None:
    """The name of the first wrong column, "columns", "long" or None for a good line."""
    fields = line.split("\t")
    if len(line.encode()) > 4096:
        return "long"
    if len(fields) != 39 + labels:
        return "columns"
    names = COLUMNS if labels else COLUMNS[1:]
    for name, field in zip(names, fields, strict=True):
        if name == "label":
            good = field in ("0", "1")
        elif name[0] == "I":
            good = re.fullmatch(r"(-?[0-9]{1,18})?", field, re.ASCII)
        else:
            good = re.fullmatch(r"([0-9a-fA-F]{8})?", field, re.ASCII)
        if not good:
            return name
    return None


def naive_row(line: str, labels: bool = True) -> tuple[float, list[np.float32], list[int]]:
    fields = line.split("\t")
    label = float(fields.pop(0)) if labels else math.nan
    dense = [np.float32(math.log1p(max(int(f or "0"), 0))) for f in fields[:INTEGERS]]
    return label, dense, [int(f, 16) if f else -1 for f in fields[INTEGERS:]]


def good_line(i: int, label: bool = True) -> str:
    """A line that differs from that of every other i < 2**32 in C26."""
    integers = [str((i * 7 + k) % 5000 - 3) if (i + k) % 5 else "" for k in range(INTEGERS)]
    ids = [f"{(i * 2654435761 + k) % 97:08x}" if (i + k) % 7 else "" for k in range(CATEGORIES - 1)]
    return "\t".join([str(i % 3 // 2)] * label + integers + ids + [f"{i:08x}"])
