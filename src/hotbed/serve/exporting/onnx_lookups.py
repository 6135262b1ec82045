"""Lookups as nodes of an ONNX graph: ids of a batch → rows → vectors of bags.

Shapes: B samples, N ids of all of them, D numbers of a row.
"""

from __future__ import annotations

import abc

import numpy as np

from hotbed.serve.bundles.bundle import LookupEntry
from hotbed.serve.bundles.reading import MappedRows
from hotbed.serve.exporting.onnx_nodes import Nodes

__all__ = ["Asked", "OneId", "Ragged", "Rectangular", "lookup_of"]


class Asked(abc.ABC):
    """Ids that the model is asked with.

    Args:
        ids: name of a value, int64.
    """

    def __init__(self, nodes: Nodes, ids: str) -> None:
        self.nodes = nodes
        self.ids = ids
        """Name of a value, (N,)."""

    @abc.abstractmethod
    def in_shape(self, rows: str, dim: int) -> str:
        """Return (N, D) rows, one for each id, in the shape of the ids."""

    @abc.abstractmethod
    def sums(self, rows: str, dim: int) -> str:
        """Return (B, D) sums of the (N, D) rows of each bag."""

    @abc.abstractmethod
    def largest(self, rows: str, dim: int) -> str:
        """Return (B, D) maxima of the (N, D) rows of each bag; -inf of bags without ids."""


class OneId(Asked):
    """(B,): an id for each sample."""

    def in_shape(self, rows: str, dim: int) -> str:
        return rows

    def sums(self, rows: str, dim: int) -> str:
        return rows

    def largest(self, rows: str, dim: int) -> str:
        return rows


class Rectangular(Asked):
    """(B, K): as many ids for each sample, of which some may be padding."""

    def __init__(self, nodes: Nodes, ids: str) -> None:
        super().__init__(nodes, nodes.add("Reshape", ids, nodes.numbers(-1)))
        self._shape = nodes.add("Shape", ids)

    def in_shape(self, rows: str, dim: int) -> str:
        shape = self.nodes.add("Concat", self._shape, self.nodes.numbers(dim), axis=0)
        return self.nodes.add("Reshape", rows, shape, allowzero=1)

    def sums(self, rows: str, dim: int) -> str:
        return self._reduced("ReduceSum", rows, dim)

    def largest(self, rows: str, dim: int) -> str:
        return self._reduced("ReduceMax", rows, dim)

    def _reduced(self, operation: str, rows: str, dim: int) -> str:
        bags = self.in_shape(rows, dim)
        return self.nodes.add(operation, bags, self.nodes.numbers(1), keepdims=0)


class Ragged(Asked):
    """(N,) ids of all samples, one sample's after the other's, and (B,) how many each has.

    Rows are added in the order of their bags. Lengths that do not add up to N make the model fail.
    """

    def __init__(self, nodes: Nodes, ids: str, lengths: str) -> None:
        super().__init__(nodes, ids)
        self._samples = nodes.add("Shape", lengths)
        # A mark where each bag begins: the bag of an id is the number of marks up to it, less one.
        begins = nodes.add("CumSum", lengths, nodes.number(0, np.int64), exclusive=1)
        count = nodes.add("Shape", ids)
        total = nodes.add("ReduceSum", lengths, nodes.numbers(0), keepdims=1)
        outside = nodes.numbers(np.iinfo(np.int64).max)
        begins = nodes.add("Where", nodes.add("Equal", total, count), begins, outside)
        some = nodes.add("Add", count, nodes.numbers(1))
        none = nodes.add("ConstantOfShape", some, value=np.zeros(1, np.int64))
        marks = nodes.add("Expand", nodes.numbers(1), self._samples)
        marks = nodes.add("ScatterElements", none, begins, marks, axis=0, reduction="add")
        bags = nodes.add("CumSum", marks, nodes.number(0, np.int64))
        bags = nodes.add("Slice", bags, nodes.numbers(0), count, nodes.numbers(0))
        bags = nodes.add("Sub", bags, nodes.numbers(1))
        self._bags = nodes.add("Unsqueeze", bags, nodes.numbers(1))
        """(N, 1): the bag of each id."""

    def in_shape(self, rows: str, dim: int) -> str:
        return rows

    def sums(self, rows: str, dim: int) -> str:
        return self._scattered("add", 0.0, rows, dim)

    def largest(self, rows: str, dim: int) -> str:
        return self._scattered("max", -np.inf, rows, dim)

    def _scattered(self, reduction: str, first: float, rows: str, dim: int) -> str:
        nodes = self.nodes
        shape = nodes.add("Concat", self._samples, nodes.numbers(dim), axis=0)
        out = nodes.add("ConstantOfShape", shape, value=np.full(1, first, np.float32))
        bags = nodes.add("Expand", self._bags, nodes.add("Shape", rows))
        return nodes.add("ScatterElements", out, bags, rows, axis=0, reduction=reduction)


def lookup_of(nodes: Nodes, lookup: LookupEntry, table: MappedRows, asked: Asked) -> str:
    """Add a lookup. Returns the name of its vectors, float32: (B, D), or without combiner (B, K, D) of (B, K)
    ids.

    Padding has no row: zeros without combiner, and nothing in a bag.
    """
    ids, dim, combiner = asked.ids, table.about["dim"], lookup["combiner"]
    padding = is_none = None
    if lookup["padding_idx"] is not None:
        padding = nodes.number(lookup["padding_idx"], np.int64)
        is_none = nodes.add("Equal", ids, padding)
        ids = nodes.add("Where", is_none, nodes.number(0, np.int64), ids)
        is_none = nodes.add("Unsqueeze", is_none, nodes.numbers(1))
    rows = _rows(nodes, table, ids)
    if combiner == "max" and not isinstance(asked, OneId):
        if is_none is not None:
            rows = nodes.add("Where", is_none, nodes.number(-np.inf), rows)
        found = asked.largest(rows, dim)
        return nodes.add("Where", nodes.add("IsInf", found), nodes.number(0.0), found)
    if is_none is not None:
        rows = nodes.add("Where", is_none, nodes.number(0.0), rows)
    if combiner == "none":
        return asked.in_shape(rows, dim)
    found = asked.sums(rows, dim)
    if combiner == "sum" or isinstance(asked, OneId):
        return found
    if is_none is None:
        ones = nodes.add("Shape", nodes.add("Unsqueeze", ids, nodes.numbers(1)))
        present = nodes.add("ConstantOfShape", ones, value=np.ones(1, np.float32))
    else:
        present = nodes.add("Cast", nodes.add("Not", is_none), to=nodes.float32)
    counts = nodes.add("Max", asked.sums(present, 1), nodes.number(1.0))
    return nodes.add("Div", found, counts if combiner == "mean" else nodes.add("Sqrt", counts))


def _rows(nodes: Nodes, table: MappedRows, ids: str) -> str:
    """Return (N, D) float32 rows of (N,) ids: of an id without row, the table's default."""
    about = table.about
    if about["static"]:
        # Gather takes negative numbers from the end on: one that lies outside becomes one beyond it.
        is_below = nodes.add("Less", ids, nodes.number(0, np.int64))
        return _decoded(
            nodes, table, nodes.add("Where", is_below, nodes.number(about["rows"], np.int64), ids)
        )
    default = nodes.stored(f"{about['files']}.default.npy", table.arrays()["default"])
    if not about["rows"]:
        size = nodes.numbers(about["dim"])
        shape = nodes.add("Concat", nodes.add("Shape", ids), size, axis=0)
        return nodes.add("Expand", default, shape)
    known = nodes.stored(f"{about['files']}.ids.npy", table.arrays()["ids"])
    at, remaining = nodes.add("Sub", ids, ids), about["rows"]
    while remaining > 1:  # the last of the ids that is not above lies in [at, at + remaining)
        half = remaining // 2
        ahead = nodes.add("Add", at, nodes.number(half, np.int64))
        is_there = nodes.add("LessOrEqual", nodes.add("Gather", known, ahead), ids)
        at = nodes.add("Where", is_there, ahead, at)
        remaining -= half
    is_found = nodes.add("Equal", nodes.add("Gather", known, at), ids)
    is_found = nodes.add("Unsqueeze", is_found, nodes.numbers(1))
    return nodes.add("Where", is_found, _decoded(nodes, table, at), default)


def _decoded(nodes: Nodes, table: MappedRows, at: str) -> str:
    """Return (N, D) float32 rows by their (N,) positions."""
    about = table.about
    rows = nodes.add("Gather", nodes.stored(f"{about['files']}.rows.npy", table.rows), at)
    if about["stored_as"] == "int4":
        low = nodes.add("BitwiseAnd", rows, nodes.number(15, np.uint8))
        high = nodes.add("BitShift", rows, nodes.number(4, np.uint8), direction="RIGHT")
        halves = [nodes.add("Unsqueeze", each, nodes.numbers(2)) for each in (low, high)]
        both = nodes.add("Concat", *halves, axis=2)
        size = nodes.numbers(2 * table.rows.shape[1])
        shape = nodes.add("Concat", nodes.add("Shape", at), size, axis=0)
        rows = nodes.add("Reshape", both, shape, allowzero=1)
        rows = nodes.add(
            "Slice", rows, nodes.numbers(0), nodes.numbers(about["dim"]), nodes.numbers(1)
        )
    if about["stored_as"] != "float32":
        rows = nodes.add("Cast", rows, to=nodes.float32)
    if table.scales is None:
        return rows
    scales = nodes.add("Gather", nodes.stored(f"{about['files']}.scales.npy", table.scales), at)
    scales = nodes.add("Cast", scales, to=nodes.float32)
    scale = nodes.add("Gather", scales, nodes.numbers(0), axis=1)
    offset = nodes.add("Gather", scales, nodes.numbers(1), axis=1)
    return nodes.add("Add", nodes.add("Mul", rows, scale), offset)
