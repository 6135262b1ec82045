"""Training runs drawn at random, and what is left of one: losses, rows and states."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from resolve.small_logs import in_memory
from torch import Tensor, nn

import hotbed as hb

Batch = dict[str, Any]

# name, options, whether untouched="exact" can be had
OPTIMIZERS: list[tuple[str, dict[str, Any], bool]] = [
    ("SGD", {"lr": 0.1}, True),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, True),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}, True),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}, True),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}, True),
    ("RowwiseAdagrad", {"lr": 0.1}, True),
    ("Adam", {"lr": 0.01}, True),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}, False),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, True),
    ("RowwiseAdam", {"lr": 0.01, "amsgrad": True}, True),
    ("Adamax", {"lr": 0.01}, True),
    ("Adadelta", {"lr": 1.0}, True),
    ("RMSprop", {"lr": 0.01, "momentum": 0.8, "centered": True}, True),
    ("RMSprop", {"lr": 0.01}, True),
    ("FTRL", {"lr": 0.1, "l1": 0.01, "l2": 0.1}, True),
]
ACTIONS = ("step", "skip", "accumulate", "forward", "nan", "evaluate", "tune", "copy")
# Which budgets are drawn, and what lies below them.
TIERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "device over host": (("device",), {"host": "64MB"}),
    "host over ssd": (("host",), {"space_ratio": 1.15}),
    "device over host over ssd": (("device", "host"), {"space_ratio": 1.15}),
}
FUSED_ACTIONS = ("step", "forward", "nan", "evaluate", "tune", "copy")


class Model(nn.Module):
    """A collection, and a dense parameter that what it yields is scaled by."""

    def __init__(self, tables: list[hb.Table], features: dict[str, str], storage: Any) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(tables, features, seed=5, storage=storage)
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for at, vectors in enumerate(self.embeddings(batch).values()):
            values = vectors.values if isinstance(vectors, hb.Jagged) else vectors
            total = total + (values.double() + 0.3 * at).sin().sum()
        return total * self.scale


@dataclass
class Run:
    """A training to be done: what is drawn."""

    tables: list[hb.Table]
    features: dict[str, str]
    batches: list[Batch]
    actions: list[str]
    optimizer: str
    options: dict[str, Any]
    depth: int
    horizon: int
    tiers: str  # one of TIERS
    spare: dict[str, int]  # by budget, bytes beyond the least that holds the batches

    def model(self, storage: hb.Storage | None) -> tuple[Model, Any]:
        model = Model(self.tables, self.features, storage)
        return model, getattr(hb.optim, self.optimizer)(model.parameters(), **self.options)


@st.composite
def tables(draw: Any, name: str) -> hb.Table:
    rows = draw(st.sampled_from((None, None, 3, 40, 400)))
    return hb.Table(
        name,
        dim=draw(st.sampled_from((1, 4, 4, 9))),
        rows=rows,
        combiner=draw(st.sampled_from(("sum", "mean", "sqrtn", "max", "none"))),
        dtype=draw(
            st.sampled_from(
                (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
            )
        ),
        init=hb.init.Normal(0.0, 1.0),
        padding_idx=draw(st.sampled_from((None, None, 2))),
    )


def ids_of(table: hb.Table, generator: torch.Generator, *shape: int) -> Tensor:
    """Popular ids and rare ones."""
    among = min(table.rows or 1000, 1000)
    ids = (among * torch.rand(*shape, generator=generator) ** 3).long()
    return ids if table.rows else ids * 10**12 + 2


def input_of(table: hb.Table, kind: int, size: int, generator: torch.Generator) -> Any:
    if kind == 0:
        return ids_of(table, generator, size)
    if kind == 1:
        return ids_of(table, generator, size, 3)
    lengths = torch.randint(0, 4, (size,), generator=generator)
    return hb.Jagged(ids_of(table, generator, int(lengths.sum())), lengths=lengths)


@st.composite
def runs(draw: Any, kinds: tuple[str, ...]) -> Run:
    some = [draw(tables(f"t{t}")) for t in range(draw(st.integers(1, 4)))]
    features = {table.name: table.name for table in some}
    if draw(st.booleans()):
        features["again"] = some[0].name
    by_name = {table.name: table for table in some}
    shapes = {feature: draw(st.integers(0, 2)) for feature in features}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    count, size = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    batches = [
        {f: input_of(by_name[t], shapes[f], size, generator) for f, t in features.items()}
        for _ in range(count)
    ]
    name, options, exact = draw(st.sampled_from(OPTIMIZERS))
    options = dict(options)
    if exact and draw(st.booleans()):
        options["untouched"] = "exact"
    fused = draw(st.integers(0, 3)) == 0
    if fused:
        options["fused"] = True
    # Mostly plain steps.
    actions = FUSED_ACTIONS if fused else ACTIONS
    wanted = st.sampled_from(("step", "step", "step", *actions))
    depth = draw(st.sampled_from((0, 1, 2, 2, 8)))
    tiers = draw(st.sampled_from(kinds))
    spare = st.sampled_from((0, 0, 20_000, 200_000))
    return Run(
        tables=some,
        features=features,
        batches=batches,
        actions=[draw(wanted) for _ in range(count)],
        optimizer=name,
        options=options,
        depth=depth,
        horizon=draw(st.sampled_from((depth, 3, 32))),
        tiers=tiers,
        spare={name: draw(spare) for name in TIERS[tiers][0]},
    )


@dataclass
class Left:
    """What a training leaves behind."""

    losses: list[float] = field(default_factory=list)
    rows: dict[str, hb.Rows] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def copied(batch: Batch) -> Batch:
    return {
        f: hb.Jagged(i.values.clone(), i.offsets.clone()) if isinstance(i, hb.Jagged) else i.clone()
        for f, i in batch.items()
    }


def train(run: Run, storage: hb.Storage | None) -> Left:
    model, optimizer = run.model(storage)
    left = Left()
    batches: Iterable[Batch] = run.batches
    if storage is not None:
        batches = hb.lookahead(run.batches, model, run.depth, run.horizon)
    for at, (batch, action) in enumerate(zip(batches, run.actions, strict=True)):
        assert batch is run.batches[at]
        left.losses.append(one(run, model, optimizer, batch, action, at))
    left.rows = {name: model.embeddings.rows(name) for name in model.embeddings.tables}
    left.state = optimizer.state_dict()
    return left


def one(run: Run, model: Model, optimizer: Any, batch: Batch, action: str, at: int) -> float:
    """One batch, dealt with as `action` says."""
    if action == "evaluate":
        with torch.no_grad():
            first = model(run.batches[-1])  # ids that training has met, and others
        model.eval()
        loss = model(batch)
        model.train()
        return float((first + loss).detach())
    if action == "tune":  # ids that have no row get none, and the others are trained
        model.eval()
    loss = model(copied(batch) if action == "copy" else batch)
    model.train()
    if action == "forward":
        return float(loss.detach())
    try:
        (loss * float("nan") if action == "nan" else loss).backward()
        if action == "accumulate":
            return float(loss.detach())
        if action != "skip":
            optimizer.step()
    except hb.NotFiniteError:
        assert action == "nan"
    optimizer.zero_grad()
    return float(loss.detach())


def train_in_tiers(run: Run) -> Left:
    """With the budgets that were drawn: the least ones are found by doing what errors say."""
    names, below = TIERS[run.tiers]
    budgets = dict.fromkeys(names, 1)
    with tempfile.TemporaryDirectory(dir=in_memory(), prefix="hotbed-test-") as folder:

        def attempt(number: int) -> Left:
            # A folder each: what an error's traceback holds keeps the one before locked.
            ssd = {"ssd": Path(folder, str(number))} if "ssd" in run.tiers else {}
            return train(run, hb.Storage(**budgets, **below, **ssd))

        attempts = 0
        while True:
            try:
                left = attempt(attempts)
                break
            except hb.StorageError as error:
                name, needed = budget_named_by(error)
                assert needed > budgets[name], str(error)
                budgets[name] = needed
            attempts += 1
        if any(run.spare.values()):
            budgets = {name: budgets[name] + run.spare[name] for name in names}
            left = attempt(attempts + 1)
    return left


def budget_named_by(error: hb.StorageError) -> tuple[str, int]:
    """The budget that an error asks for, and the least that it must be; what is advised may be more."""
    found = re.search(r"Storage\((\w+)=[\d,]+\) to at least ([\d,]+) bytes", str(error))
    assert found is not None, str(error)
    advised = int(found[2].replace(",", ""))
    assert error.needed <= advised
    return found[1], error.needed or advised


def assert_same(tiered: Left, plain: Left) -> None:
    assert tiered.losses == plain.losses
    for name, rows in plain.rows.items():
        assert torch.equal(tiered.rows[name].ids, rows.ids), name
        assert torch.equal(tiered.rows[name].values, rows.values), name
    assert tiered.state["param_groups"] == plain.state["param_groups"]
    for at, entry in plain.state["state"].items():
        assert_same_entry(tiered.state["state"][at], entry)


def assert_same_entry(tiered: dict[str, Any], plain: dict[str, Any]) -> None:
    assert list(tiered) == list(plain)
    if "ids" not in plain:
        for key, value in plain.items():
            assert torch.equal(torch.as_tensor(tiered[key]), torch.as_tensor(value)), key
        return
    assert tiered["step"] == plain["step"]
    assert tiered.get("untouched") == plain.get("untouched")
    at = torch.searchsorted(plain["ids"], tiered["ids"])
    assert torch.equal(plain["ids"][at], tiered["ids"])
    for key in plain.keys() - {"step", "untouched"}:
        assert torch.equal(tiered[key], plain[key][at]), key
