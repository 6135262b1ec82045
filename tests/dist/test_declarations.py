"""Ranks whose models or optimizers are made with other arguments find out before anything has changed."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import pytest
import torch
from dist.worlds import run
from torch import nn
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import PeerError, Plan, Replicated, declarations
from hotbed.optim import RULES
from hotbed.optim.options import Number

ITEM = hb.Table("item", 4, 61, "sum", padding_idx=60)
USER = hb.Table("user", 4)

OTHER_TABLES: list[tuple[str, list[hb.Table], dict[str, str] | None]] = [
    ("init of table 'item' is", [dataclasses.replace(ITEM, init=hb.init.Ones()), USER], None),
    ("combiner of table 'item' is 'sum' on rank 0 and 'mean' on rank 1",
     [dataclasses.replace(ITEM, combiner="mean"), USER], None),
    ("padding_idx of table 'user' is None on rank 0 and 7 on rank 1",
     [ITEM, dataclasses.replace(USER, padding_idx=7)], None),
    ("rows of table 'item' is 61 on rank 0 and 62", [dataclasses.replace(ITEM, rows=62), USER], None),
    ("dtype of table 'user' is float32 on rank 0 and float16",
     [ITEM, dataclasses.replace(USER, dtype=torch.float16)], None),
    ("the order of tables is", [USER, ITEM], None),
    ("the order of tables is", [ITEM], {"item": "item", "user": "item"}),
    ("features is", [ITEM, USER], {"item": "user", "user": "item"}),
]  # fmt: skip


def other_tables(rank: int, world: int) -> None:
    for text, tables, features in OTHER_TABLES:
        mine = (
            hb.EmbeddingCollection(tables, features)
            if rank
            else hb.EmbeddingCollection([ITEM, USER])
        )
        with pytest.raises(PeerError, match=text):
            hb.distribute(mine)
    with pytest.raises(
        PeerError, match=r"parameter '1.weight' is float32 \(2, 4\) on rank 0 and .*\(3, 4\)"
    ):
        hb.distribute(nn.Sequential(hb.Embedding(9, 4), nn.Linear(4, 2 + rank)))
    # Keys are those of rank 0, whatever the seeds were, and so are the wire and first values.
    own = hb.EmbeddingCollection([ITEM, USER], seed=rank)
    plan = Plan([ITEM, USER], world, {"item": Replicated(), "user": Replicated()})
    hb.distribute(own, plan, shared_memory=rank == 0)
    own({"item": [[1]], "user": [[5 + rank]]})
    expected = hb.EmbeddingCollection([ITEM, USER], seed=0)
    for name in ("item", "user"):
        ids = torch.arange(5, 20)
        assert torch.equal(own.lookup(name, ids), expected.lookup(name, ids))
        assert torch.equal(
            own.lookup(name, [5 + rank], local=True), expected.lookup(name, [5 + rank])
        )


def reset(rank: int, world: int) -> None:
    for kind in ("replicated", "row"):
        layer = hb.Embedding(9, 4)
        hb.distribute(layer, Plan([layer._live.spec], world, {"embedding": kind}))
        before = layer._live.lookup(torch.arange(9))
        torch.manual_seed(rank)
        layer.reset_parameters()
        rows = layer._live.lookup(torch.arange(9))
        told = [torch.empty(9, 4) for _ in range(world)]
        torch.distributed.all_gather(told, rows)
        assert torch.equal(told[0], told[1])
        assert not torch.equal(rows, before)


@pytest.mark.process
def test_first_values_drawn_again() -> None:
    run(2, reset)


@pytest.mark.process
def test_other_tables() -> None:
    run(2, other_tables)


OTHER_OPTIONS: list[tuple[str, str, dict[str, Any], str, dict[str, Any]]] = [
    ("nesterov of group 0 is False on rank 0 and True on rank 1",
     "SGD", {"momentum": 0.5}, "SGD", {"momentum": 0.5, "nesterov": True}),
    ("maximize of group 0", "Adagrad", {}, "Adagrad", {"maximize": True}),
    ("untouched of Adam is 'lazy' on rank 0 and 'exact' on rank 1",
     "Adam", {}, "Adam", {"untouched": "exact"}),
    ("the optimizer is hotbed.optim.moments.Adam on", "Adam", {}, "AdamW", {"weight_decay": 0.0}),
    ("amsgrad of group 0", "Adam", {}, "Adam", {"amsgrad": True}),
    ("initial_accumulator_value of group 0 is 0 on rank 0 and 0.5 on rank 1",
     "Adagrad", {}, "Adagrad", {"initial_accumulator_value": 0.5}),
    ("decoupled_weight_decay", "Adam", {}, "Adam", {"decoupled_weight_decay": True}),
    ("the dense optimizer of group 0", "SGD", {}, "SGD", {"dense": torch.optim.Adagrad}),
    ("momentum of group 0.0 is 0.25 on rank 0 and 0.5 on rank 1",
     "SGD", {"dense": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.25)},
     "SGD", {"dense": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5)}),
    ("dense_lr_ratio of group 0 is",
     "SGD", {"dense": lambda groups: torch.optim.SGD(groups, lr=0.1)},
     "SGD", {"dense": lambda groups: torch.optim.SGD(groups, lr=0.2)}),
    ("replace_state", "SGD", {}, "SGD", {"replace_state": True}),
]  # fmt: skip


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = hb.EmbeddingCollection([ITEM, USER], seed=3)
        self.dense = nn.Linear(4, 1)

    def forward(self, ids: Any) -> torch.Tensor:
        vectors = self.tables({"item": ids, "user": ids})
        return self.dense(vectors["item"] + vectors["user"])


def other_options(rank: int, world: int, numbers: list[int]) -> None:
    for number in numbers:
        text, *both = OTHER_OPTIONS[number]
        kind, options = both[2 * rank], both[2 * rank + 1]
        model = hb.distribute(Model(), "basic")
        optimizer = getattr(hb.optim, kind)(model.parameters(), lr=0.1, **options)
        model(torch.tensor([[1], [2 + rank]])).sum().backward()
        before = [model.tables.rows(name).values for name in ("item", "user")]
        weight = model.dense.weight.clone()
        with pytest.raises(PeerError, match=text):
            optimizer.step()
        assert all(
            map(torch.equal, before, [model.tables.rows(n).values for n in ("item", "user")])
        )
        assert torch.equal(model.dense.weight, weight)


@pytest.mark.process
def test_other_options() -> None:
    run(2, other_options, list(range(len(OTHER_OPTIONS))))


def changed_later(rank: int, world: int) -> None:
    model = hb.distribute(Model(), "basic")
    tables, dense = [*model.tables.parameters()], [*model.dense.parameters()]
    groups = [{"params": tables}, {"params": dense}]
    optimizer = hb.optim.SGD(groups, lr=0.1, momentum=0.5)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.tensor([[1], [2 + rank]])).sum().backward()
        optimizer.step()

    step()
    first, second = optimizer.param_groups
    kept = declarations.of_optimizer(optimizer)
    assert declarations.of_optimizer(optimizer) is kept
    first["lr"] = second["lr"] = 0.05  # a schedule
    step()
    assert declarations.of_optimizer(optimizer) is kept
    # Of a group without tables, too.
    second["lr"] = 0.25 if rank else 0.05
    with pytest.raises(
        PeerError, match="steps dense parameters with lr=0.(05|25), .* with 0.(25|05)"
    ):
        step()
    second["lr"] = 0.05
    step()
    if rank:
        second["foreach"] = False
    with pytest.raises(PeerError, match="foreach of group 1 is None on rank 0 and False on rank 1"):
        step()
    second["foreach"] = None
    step()
    if rank:
        first["nesterov"] = True
    with pytest.raises((PeerError, hb.errors.OptimizerError), match="nesterov of group 0 changed"):
        step()
    first["nesterov"] = False
    step()
    # A state that one rank alone has loaded.
    state = optimizer.state_dict()
    if rank == 0:
        for entry in state["state"].values():
            if "step" in entry:
                entry["step"] += 100
        optimizer.load_state_dict(state)
    with pytest.raises(
        PeerError, match="the state that was loaded last is .* and load the same state into it, or"
    ):
        step()


@pytest.mark.process
def test_what_is_changed_between_steps() -> None:
    run(2, changed_later)


def beside_one_that_has_ended(rank: int, world: int) -> None:
    own = hb.EmbeddingCollection([ITEM, USER], seed=3)
    hb.distribute(own, "basic")
    optimizer = hb.optim.SGD(own.parameters(), lr=0.1, momentum=0.5, nesterov=rank == 2)
    with Join(hb.dist.joinables(own)):
        if rank:
            own({"item": [[1]], "user": [[rank]]})["item"].sum().backward()
            with pytest.raises(
                PeerError, match="nesterov of group 0 is False on rank 1 and True on rank 2"
            ):
                optimizer.step()


@pytest.mark.process
def test_beside_a_rank_that_has_ended() -> None:
    run(3, beside_one_that_has_ended)


@pytest.mark.parametrize("kind", RULES)
def test_every_option_is_declared_or_travels(kind: Any) -> None:
    model = Model()
    optimizer = kind(model.parameters(), lr=0.1)
    travel = {o.name for o in kind._rule.options if isinstance(o, Number) and o.core}
    declared = json.loads(declarations.of_optimizer(optimizer).text)
    for name in inspect.signature(kind.__init__).parameters:
        if name not in ("self", "params", "options", *travel):
            assert {f"{name} of group 0", f"{name} of {kind.__name__}"} & declared.keys(), name


def test_every_field_of_a_table_is_declared() -> None:
    model = Model()
    declared = json.loads(declarations.of_model(model, [ITEM, USER]).text)
    for field in dataclasses.fields(hb.Table):
        if field.name not in ("name", "sharding"):
            assert f"{field.name} of table 'user'" in declared


def test_values_in_words() -> None:
    class Odd:
        pass

    values = [
        1.0,
        0.1 + 0.2,
        True,
        None,
        (1, [torch.float16]),
        torch.tensor(0.5),
        Odd,
        Replicated(),
    ]
    assert [declarations.in_words(value) for value in values] == [
        *("1", "0.30000000000000004", "True", "None", "(1, (float16))", "0.5"),
        f"{__name__}.test_values_in_words.<locals>.Odd",
        "Replicated()",
    ]
    assert declarations.in_words(Odd()) == "object of test_values_in_words.<locals>.Odd"
