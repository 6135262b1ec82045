"""Random batches of every input kind, as the bags they mean and as the input that says it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import hotbed as hb

DIMS = (1, 3, 10, 64, 1025)
COMBINERS = ("none", "sum", "mean", "sqrtn", "max")
WEIGHED = ("sum", "mean", "sqrtn")
# Sums of these are exact, so a sum of weights is zero in the twin where it is zero in the core.
WEIGHTS = (0.5, 1.0, 2.0, -1.0, 0.0, 1.5)
EXTREMES = (0, -1, 2**63 - 1, -(2**63), 1, 2, 3, 12345678901, -77, 2**32, 2**31 - 1)


@dataclass
class Feature:
    """One feature of a batch: bags of ids, and the input that stands for them."""

    name: str
    table: hb.Table
    kind: str
    bags: list[list[int]]
    weights: list[list[float]] | None
    lead: tuple[int, ...]  # leading shape of the pooled output
    input: Any
    weight_tensor: Tensor | None = None  # the leaf whose gradient is compared, if any
    weight_order: list[tuple[int, int]] = field(default_factory=list)  # its entries' (bag, place)


class KeyedInput:
    """What a KeyedJaggedTensor offers: features one after the other, by keys."""

    def __init__(
        self, keys: list[str], values: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> None:
        self._parts = keys, values, offsets, weights

    def keys(self) -> list[str]:
        return self._parts[0]

    def values(self) -> Tensor:
        return self._parts[1]

    def offsets(self) -> Tensor:
        return self._parts[2]

    def weights_or_none(self) -> Tensor | None:
        return self._parts[3]


@st.composite
def tables(draw: Any, name: str) -> hb.Table:
    combiner = draw(st.sampled_from(COMBINERS))
    rows = draw(st.sampled_from((None, 1, 7, 20)))
    dtype = draw(
        st.sampled_from(
            (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float32)
        )
    )
    padding = draw(st.sampled_from((None, None, 0, 3)))
    if rows is not None and padding is not None:
        padding %= rows
    return hb.Table(
        name,
        dim=draw(st.sampled_from(DIMS)),
        rows=rows,
        combiner=combiner,
        dtype=dtype,
        init=hb.init.Normal(0.0, 1.0),
        padding_idx=padding,
    )


def kinds_for(table: hb.Table) -> list[str]:
    kinds = ["single", "fixed", "deep", "offsets", "lengths", "nested", "keyed"]
    if table.combiner in WEIGHED:
        kinds += ["weighted", "weighted-gradient", "csr", "coo", "coo-unsorted"]
    return kinds


@st.composite
def features(draw: Any, name: str, table: hb.Table, batch: int) -> Feature:
    kind = draw(st.sampled_from(kinds_for(table)))
    longest = draw(st.integers(0, 4))
    middle = draw(st.integers(0, 2)) if kind == "deep" else 1
    narrow = draw(st.booleans())
    strided = draw(st.booleans())
    rng = random.Random(draw(st.integers(0, 2**20)))
    count = batch * middle
    if kind == "single":
        lengths = [1] * count
    elif kind in ("fixed", "deep"):
        lengths = [longest] * count
    else:
        lengths = [rng.randint(0, longest) for _ in range(count)]
    bags = [[_id(rng, table, kind, narrow) for _ in range(n)] for n in lengths]
    lead: tuple[int, ...] = (batch, middle) if kind == "deep" else (batch,)
    weights = None
    if kind.startswith(("weighted", "csr", "coo")):
        weights = [[rng.choice(WEIGHTS) for _ in bag] for bag in bags]
    feature = Feature(name, table, kind, bags, weights, lead, None)
    feature.input = _build(feature, longest, narrow, strided, rng)
    return feature


def _id(rng: random.Random, table: hb.Table, kind: str, narrow: bool) -> int:
    if table.rows is not None:
        return rng.randrange(table.rows)
    id = rng.choice(EXTREMES)
    if kind.startswith(("csr", "coo")):
        return abs(id) % 2**40
    return (id + 2**31) % 2**32 - 2**31 if narrow else id


def _ids(flat: list[int], narrow: bool, strided: bool) -> Tensor:
    dtype = torch.int32 if narrow else torch.int64
    ids = torch.tensor(flat, dtype=dtype)
    if strided:
        ids = torch.stack([ids, torch.full_like(ids, 10**6)], 1)[:, 0]
    return ids


def _build(feature: Feature, longest: int, narrow: bool, strided: bool, rng: random.Random) -> Any:
    flat = [id for bag in feature.bags for id in bag]
    lengths = torch.tensor([len(bag) for bag in feature.bags], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    kind = feature.kind
    if kind == "single":
        return _ids(flat, narrow, strided)
    if kind in ("fixed", "deep"):
        shape = (*feature.lead, longest)
        ids = _ids(flat, narrow, strided).view(shape)
        return ids.mT.contiguous().mT if strided else ids
    if kind.startswith("csr") or kind.startswith("coo"):
        return _sparse(feature, flat, offsets, rng)
    values = _ids(flat, narrow, strided)
    if kind == "nested":
        return torch.nested.nested_tensor_from_jagged(values.contiguous(), offsets)
    if kind == "keyed":
        return KeyedInput([feature.name], values, offsets.to(values.dtype), None)
    if kind == "lengths":
        return hb.Jagged(values, lengths=lengths)
    if feature.weights is None:
        return hb.Jagged(values, offsets.to(values.dtype))
    compute = feature.table.compute_dtype
    weights = torch.tensor([w for bag in feature.weights for w in bag], dtype=compute)
    feature.weight_order = _places(feature.bags)
    if kind == "weighted-gradient":
        feature.weight_tensor = weights.requires_grad_()
    return hb.Jagged(values, offsets, weights=weights)


def _places(bags: list[list[int]]) -> list[tuple[int, int]]:
    return [(b, k) for b, bag in enumerate(bags) for k in range(len(bag))]


def _sparse(feature: Feature, flat: list[int], offsets: Tensor, rng: random.Random) -> Tensor:
    width = feature.table.rows or 2**40
    batch = len(feature.bags)
    assert feature.weights is not None
    weights = torch.tensor([w for bag in feature.weights for w in bag], dtype=torch.float64)
    ids = torch.tensor(flat, dtype=torch.int64)
    if feature.kind == "csr":
        return torch.sparse_csr_tensor(
            offsets, ids, weights, (batch, width), check_invariants=False
        )
    samples = torch.tensor([b for b, _ in _places(feature.bags)], dtype=torch.int64)
    if feature.kind == "coo-unsorted":
        # Samples come mixed; within one they keep their order.
        order = sorted(range(len(flat)), key=lambda _: rng.random())
        places = [samples[i].item() for i in order]
        queues = {b: [i for i in range(len(flat)) if samples[i] == b] for b in set(places)}
        order = [queues[b].pop(0) for b in places]
        samples, ids, weights = samples[order], ids[order], weights[order]
    indices = torch.stack([samples, ids])
    return torch.sparse_coo_tensor(indices, weights, (batch, width), check_invariants=False)


@st.composite
def collections(
    draw: Any, batch: int | None = None
) -> tuple[hb.EmbeddingCollection, list[Feature]]:
    """A collection of up to three tables and four features, and a right batch for it."""
    some = [draw(tables(f"table{t}")) for t in range(draw(st.integers(1, 3)))]
    of = [draw(st.integers(0, len(some) - 1)) for _ in range(draw(st.integers(0, 1)))]
    of = list(range(len(some))) + of
    size = draw(st.integers(0, 5)) if batch is None else batch
    made = [draw(features(f"feature{f}", some[t], size)) for f, t in enumerate(of)]
    collection = hb.EmbeddingCollection(
        some, {f.name: f.table.name for f in made}, seed=draw(st.integers(0, 3))
    )
    return collection, made
