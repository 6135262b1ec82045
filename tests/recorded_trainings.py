"""Short trainings of all rules, dtypes and inputs, and the bits that they end with.

Only Hotbed computes on rows; gradients are made by single multiplications and additions, so that the
bits are those of every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import hotbed as hb

STEPS, BATCH, ROWS = 8, 7, 60
FROZEN = "frozen"

RULES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "SGD": (hb.optim.SGD, {"lr": 0.1}),
    "SGD-momentum": (hb.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD-nesterov-decay": (
        hb.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "Adagrad": (hb.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "RowwiseAdagrad": (hb.optim.RowwiseAdagrad, {"lr": 0.1}),
    "Adam": (hb.optim.Adam, {"lr": 0.01}),
    "Adam-amsgrad-decay": (hb.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (hb.optim.AdamW, {"lr": 0.01}),
    "SparseAdam": (hb.optim.SparseAdam, {"lr": 0.01}),
    "RowwiseAdam": (hb.optim.RowwiseAdam, {"lr": 0.01}),
    "Adamax": (hb.optim.Adamax, {"lr": 0.01, "weight_decay": 0.01}),
    "Adamax-plain": (hb.optim.Adamax, {"lr": 0.01}),
    "Adadelta": (hb.optim.Adadelta, {"lr": 1.0}),
    "RMSprop": (hb.optim.RMSprop, {"lr": 0.01}),
    "RMSprop-centered": (hb.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "FTRL": (hb.optim.FTRL, {"lr": 0.1, "l1": 0.001, "l2": 0.001}),
}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Training(NamedTuple):
    """What gives the same bits wherever rows lie."""

    rule: str = "Adam"
    dtype: torch.dtype = torch.float32
    untouched: str = "lazy"
    fused: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.rule} {dtype} {self.untouched}{' fused' if self.fused else ''}"


def trainings() -> Iterator[Training]:
    for rule in RULES:
        yield Training(rule)
        yield Training(rule, fused=True)
    for rule in ("SGD", "Adagrad", "RowwiseAdagrad", "Adam"):
        for dtype in DTYPES[1:]:
            yield Training(rule, dtype)
    for rule in RULES:
        if rule not in ("SparseAdam", "SGD-nesterov-decay", "Adam-amsgrad-decay", "Adamax"):
            yield Training(rule, untouched="exact")
    yield Training("Adam", torch.bfloat16, "exact")
    yield Training("AdamW", torch.float64, "exact")


def tables(dtype: torch.dtype) -> list[hb.Table]:
    wide = hb.init.Normal(0.0, 0.5)
    return [
        hb.Table("item", 5, ROWS, "mean", dtype, wide, padding_idx=3),
        hb.Table("user", 16, None, "sum", dtype, wide, padding_idx=7),
        hb.Table("word", 16, None, "none", dtype, hb.init.TruncatedNormal(std=0.3)),
        hb.Table("tag", 1, ROWS, "max", dtype, hb.init.Uniform(-1.0, 1.0)),
        hb.Table("root", 33, ROWS, "sqrtn", dtype, hb.init.XavierUniform()),
        hb.Table(FROZEN, 4, ROWS, "sum", dtype, wide),
        hb.Table("plain", 8, None, "none", dtype, hb.init.Constant(0.25)),
    ]


FEATURES = {
    "watched": "item",
    "browsed": "item",
    "user": "user",
    "user, weighted": "user",
    "word": "word",
    "words": "word",
    "tag": "tag",
    "root": "root",
    "root, sparse": "root",
    "root, nested": "root",
    FROZEN: FROZEN,
    "plain": "plain",
}


def collection(
    dtype: torch.dtype, storage: hb.Storage | None, without: Collection[str]
) -> hb.EmbeddingCollection:
    """`without`: tables that are left out."""
    some = [table for table in tables(dtype) if table.name not in without]
    features = {f: name for f, name in FEATURES.items() if name not in without}
    made = hb.EmbeddingCollection(some, features, seed=5, storage=storage)
    made.parameter(FROZEN).requires_grad_(False)
    return made


def batch_of(step: int, compute: torch.dtype) -> dict[str, Any]:
    """Ids follow a steep law, so some come often and most rarely."""
    chance = np.random.RandomState(step)  # whose numbers are the same for ever

    def ids(*shape: int, rows: int = ROWS) -> Tensor:
        return torch.from_numpy((rows * chance.random_sample(shape) ** 3).astype(np.int64))

    def weights(count: int) -> Tensor:
        return torch.from_numpy(chance.randint(-3, 9, count) / 4).to(compute)

    lengths = torch.from_numpy(chance.randint(0, 5, BATCH))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(lengths.sum())
    return {
        "watched": hb.Jagged(ids(count), lengths=lengths),
        "browsed": ids(BATCH, 3),
        "user": ids(BATCH, 40, rows=5000) * 10**12,
        "user, weighted": hb.Jagged(
            ids(count, rows=5000) * 10**12, offsets, weights=weights(count).requires_grad_()
        ),
        "word": ids(BATCH, rows=900).int(),
        "words": hb.Jagged(ids(count, rows=900) - 450, offsets),
        "tag": ids(BATCH, 2, 3),
        "root": hb.Jagged(ids(count), offsets, weights=weights(count)),
        "root, sparse": torch.sparse_csr_tensor(
            offsets, ids(count), weights(count), (BATCH, ROWS), check_invariants=False
        ),
        "root, nested": torch.nested.nested_tensor_from_jagged(ids(count), offsets),
        FROZEN: ids(BATCH, 2),
        "plain": ids(BATCH, 2, rows=400) * 3 - 200,
    }


class Digest:
    """Of tensors in their order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, tensor: Tensor) -> None:
        bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._hash.update(bits.numpy().tobytes())

    def __str__(self) -> str:
        return self._hash.hexdigest()


def bits_of(
    training: Training,
    storage: hb.Storage | None = None,
    *,
    look_ahead: bool = False,
    without: Collection[str] = (),
    place: Callable[[hb.EmbeddingCollection], Any] = lambda model: None,
) -> str:
    """The bits of a training: of all vectors, of the weights' gradients, and of rows and states at its
    end."""
    model = collection(training.dtype, storage, without)
    place(model)
    kind, options = RULES[training.rule]
    if training.untouched == "exact":
        options = {**options, "untouched": "exact"}
    optimizer = kind(model.parameters(), fused=training.fused, **options)
    compute = torch.float64 if training.dtype == torch.float64 else torch.float32
    found = Digest()

    def drawn(step: int) -> dict[str, Any]:
        return {f: given for f, given in batch_of(step, compute).items() if f in model.features}

    batches = [drawn(step) for step in range(STEPS)]
    source: Any = batches[:]
    if look_ahead:
        source = hb.lookahead(source, model, depth=2, horizon=4)
    for step, batch in enumerate(source):
        if step == STEPS // 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        _step(model, batch, step, found)
        if step % 3 and not training.fused:  # a gradient of two batches
            batches.append(drawn(100 + step))
            _step(model, batches[-1], step, found)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for vectors in model(drawn(STEPS)).values():
            found.add(_flat(vectors))
    _add_rows(model, optimizer, batches, found)
    return str(found)


def _flat(vectors: Any) -> Tensor:
    values: Tensor = vectors.values if isinstance(vectors, hb.Jagged) else vectors
    return values


def _step(model: Any, batch: dict[str, Any], step: int, found: Digest) -> None:
    outputs = [_flat(v) for v in model(batch).values()]
    grads = []
    for k, vectors in enumerate(outputs):
        found.add(vectors)
        grads.append(vectors.detach() * 0.125 + (0.25 * ((step + k) % 5) - 0.5))
    wanted = [k for k, v in enumerate(outputs) if v.requires_grad]
    torch.autograd.backward([outputs[k] for k in wanted], [grads[k] for k in wanted])
    if "user, weighted" in batch:
        found.add(batch["user, weighted"].weights.grad)


def _add_rows(
    model: hb.EmbeddingCollection, optimizer: Any, used: list[dict[str, Any]], found: Digest
) -> None:
    for name in model.tables:
        rows = model.rows(name)
        found.add(rows.ids)
        found.add(rows.values)
    states = optimizer.state_dict()["state"]
    for name, state in zip(model.tables, states.values(), strict=True):
        if name == FROZEN:
            continue
        ids = state["ids"]
        kept = torch.isin(ids, _ids_of(name, used))  # tiers keep the states of no others
        order = ids[kept].sort().indices
        for part, values in state.items():
            if part not in ("ids", "step", "untouched"):
                found.add(values[kept][order])


def _ids_of(name: str, batches: list[dict[str, Any]]) -> Tensor:
    padding = {table.name: table.padding_idx for table in tables(torch.float32)}[name]
    inputs = [given for batch in batches for f, given in batch.items() if FEATURES[f] == name]
    ids = torch.cat([_ids_in(given).reshape(-1).long() for given in inputs]).unique()
    return ids if padding is None else ids[ids != padding]


def _ids_in(given: Any) -> Tensor:
    if isinstance(given, hb.Jagged):
        return given.values
    if given.layout is torch.sparse_csr:
        return given.col_indices()
    return given.values() if given.is_nested else given
