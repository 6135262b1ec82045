"""What other systems test, once more: ranks against one process.

From NVIDIA's distributed-embeddings, whose harness is that of `parity`: random tables or those given,
concatenated vectors, a dense layer of 5, the running sum of its outputs as the loss, SGD with a rate of 1.5.
From OneFlow's OneEmbedding: its layer's tests (C1 to C3 below), and what its exchange must do (B1 to B3, B5).

Left out of distributed-embeddings:

- dp_input=False (test_shared_basic_mp, test_shared_mb_mp, test_indivisible_batch, the mp half of the
  multi-hot tests): a rank gives its own samples and never the global batch of a feature. Where shared inputs
  or strategies were tested so, they are here with a rank's own samples, and a batch that does not divide
  is no error.
- "exactly 1 local weight" of test_8table_width2_auto_concat: tables are not fused into one tensor.
- test_set_weight_uninitialized: tables have rows from the start.
- test_custom_embedding_layer: tables are described, there is no layer of one's own to cut.
- gpu_embedding_size of the offload tests: they are here with Storage.
- ModelFit.test_broadcast_callback: `distribute` hands rank 0's values out, as test_broadcast has it.
- DpToMpInputTest looks at ids under way; here what they must lead to: vectors.
- embedding_test, embedding_lookup_ops_test, integer_lookup_test: of one process; tests/ has such tests.

Left out of OneEmbedding: int8 on the way (B4 and a part of B2 and B3: numbers travel as they are stored);
A, D, F: caches, rules and dense layers, which tests/ has of one process; E: servers, versions and
checkpoints, see test_saving_together.py and tests/checkpoint; G: quality.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.pairwise import Case, covering
from dist.test_strategies import LARGE
from dist.worlds import run
from effort import SOAK
from torch import nn
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import ColumnWise, Plan, Replicated, RowWise, TableWise

pytestmark = pytest.mark.process

WORLD = 4
BATCH = 24
Shapes = list[tuple[int, int]]


class Network(nn.Module):
    """Features over tables, then a dense layer."""

    def __init__(
        self,
        shapes: Shapes,
        table_of: list[int],
        combiner: str = "sum",
        storage: hb.Storage | None = None,
        **of_tables: Any,
    ) -> None:
        super().__init__()
        init = hb.init.Uniform(-0.05, 0.05)
        tables = [
            hb.Table(f"T{at}", dim, rows, combiner, init=init, **of_tables)
            for at, (rows, dim) in enumerate(shapes)
        ]
        features = {f"F{n}": f"T{at}" for n, at in enumerate(table_of)}
        self.tables = hb.EmbeddingCollection(tables, features, seed=3, storage=storage)
        self.dense = nn.Linear(sum(shapes[at][1] for at in table_of), 5)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        self.vectors = torch.cat([*self.tables(batch).values()], 1)
        return self.dense(self.vectors).cumsum(1)


def sizes(world: int, seed: int, count: int | None = None) -> Shapes:
    chance = random.Random(seed)
    count = count or chance.randint(1, 2 * world)
    return [(chance.randint(4, 20), chance.randint(4, 15)) for _ in range(count)]


def inputs(shapes: Shapes, table_of: list[int], kind: str, samples: slice) -> dict[str, Any]:
    """Of `BATCH` samples those of a rank. "ragged": bags of 0 to 5."""
    chance = torch.Generator().manual_seed(11)
    batch: dict[str, Any] = {}
    for n, at in enumerate(table_of):
        shape = (BATCH,) if kind == "one" else (BATCH, 5)
        ids = torch.randint(0, shapes[at][0], shape, generator=chance)
        lengths = torch.randint(0, 6, (BATCH,), generator=chance)
        if kind == "ragged" or (kind == "mixed" and n % 2):
            bags = [
                row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)
            ]
            batch[f"F{n}"] = hb.Jagged.from_lists(bags[samples])
        else:
            batch[f"F{n}"] = ids[samples]
    return batch


def parity(
    rank: int,
    world: int,
    shapes: Shapes,
    table_of: list[int] | None,
    kind: str,
    options: dict[str, Any],
    storage: dict[str, Any],
) -> None:
    """Vectors bit for bit; after a step tables and dense weights within 1e-5. `options`: of the plan."""
    torch.manual_seed(0)
    table_of = table_of or list(range(len(shapes)))
    whole, own = Network(shapes, table_of), Network(shapes, table_of)
    if storage:
        own = Network(shapes, table_of, storage=hb.Storage(**storage))
    own.dense.load_state_dict(whole.dense.state_dict())
    hb.distribute(own, hb.plan(own, world, **options))
    optimizers = [hb.optim.SGD(model.parameters(), lr=1.5) for model in (whole, own)]
    samples = slice(BATCH * rank // world, BATCH * (rank + 1) // world)
    for number in range(2):
        scores = [
            model(inputs(shapes, table_of, kind, of))
            for model, of in ((whole, slice(0, BATCH)), (own, samples))
        ]
        close = 0 if number == 0 else 1e-5
        expected = whole.vectors[samples]
        torch.testing.assert_close(own.vectors, expected, rtol=close, atol=close)
        for score, scale in zip(scores, (1, world), strict=True):
            (score.sum() * scale / BATCH).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name in own.tables.tables:
        found, rows = (model.tables.rows(name).values for model in (own, whole))
        torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.dense.weight, whole.dense.weight, rtol=1e-5, atol=1e-5)


BROADCAST = [(11, 7), (5, 8), (3, 8), (5, 8), (12, 25), (3, 12), (7, 13)]
MERGE = [(100, 8), (5, 8), (10, 8), (25, 4)]
DUP_WORKER = [(10, 4), (11, 2), (4, 2), (4, 2)]
OFFLOAD = [(100, 32)] * 4 + [(1000, 64)] * 4
RANDOM = sizes(WORLD, 42)
SHARED = [*range(len(RANDOM)), 0, len(RANDOM) // 2, len(RANDOM) - 1]
random.Random(7).shuffle(SHARED)
SMALLER = [(rows if rows <= 1000 else rows // 1000 + 900, dim) for rows, dim in LARGE]
"""The 41 tables, the large ones with about a thousandth of their rows."""
MODES = {"data_parallel_threshold": 10_000, "column_slice_threshold": 50_000}
ALL_MODES = {**MODES, "row_slice_threshold": 85_000, "strategy": "memory_balanced"}
FULL = {**ALL_MODES, "column_slice_threshold": 1_000_000, "row_slice_threshold": 10_000_000}

CASES: dict[str, tuple[Shapes, list[int] | None, str, dict[str, Any]]] = {
    "basic": (RANDOM, None, "one", {"strategy": "basic"}),
    "row_slice": (RANDOM, None, "one", {"strategy": "basic", "row_slice_threshold": 1}),
    "data_parallel": (RANDOM, None, "one", {"strategy": "basic", "data_parallel_threshold": 10**5}),
    "memory_optimized": (RANDOM, None, "one", {"strategy": "memory_optimized"}),
    "column_slice_merge": (MERGE, None, "one",
                           {"strategy": "memory_balanced", "column_slice_threshold": 45}),
    "column_slice_threshold": (sizes(WORLD, 1, WORLD + 1), None, "one",
                               {"strategy": "basic", "column_slice_threshold": 30}),
    "column_slice_dup_worker": (DUP_WORKER, None, "one",
                                {"strategy": "memory_balanced", "column_slice_threshold": 10}),
    "8table_width2": (DUP_WORKER[:1] + [(11, 2), (4, 2), (4, 2)] + [(10, 2), *DUP_WORKER[1:]],
                      None, "one", {"strategy": "memory_balanced"}),
    "fewer_tables_than_workers": ([(15, 9)], None, "one", {"strategy": "memory_balanced"}),
    "fewer_tables_multihot": (sizes(WORLD, 2, WORLD // 2), None, "ragged", {"strategy": "basic"}),
    "all_parallelism_modes": (SMALLER, None, "one", ALL_MODES),
    "multihot": (RANDOM, None, "ragged", {"strategy": "basic"}),
    # test_shared_* with every strategy, and with merged slices of columns, which no peer tests
    **{f"shared {strategy}": (RANDOM, SHARED, "mixed", {"strategy": strategy})
       for strategy in ("auto", "basic", "memory_balanced", "memory_optimized")},
    "shared merged": (MERGE, [3, 0, 1, 0, 2, 3], "mixed",
                      {"strategy": "memory_balanced", "column_slice_threshold": 45}),
    # DpToMpInputTest: 41 features, one-hot, of 5 ids, ragged, and all of them on rank 0
    "41 dense onehot": ([(50, 4)] * 41, None, "one", {"strategy": "basic"}),
    "41 dense multihot": ([(50, 4)] * 41, None, "fixed", {"strategy": "basic"}),
    "ragged and dense": (RANDOM, None, "mixed", {"strategy": "basic"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_distributed_embeddings(name: str) -> None:
    run(WORLD, parity, *CASES[name], {})


OFFLOADED: dict[str, tuple[Shapes, list[int] | None, str, dict[str, Any]]] = {
    "cpu_offload": (OFFLOAD, None, "one", {"strategy": "basic"}),
    "column_slicing_offload": (OFFLOAD, None, "one", ALL_MODES),
    "multihot_offloaded": (RANDOM, None, "ragged", {"strategy": "basic"}),
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_distributed_embeddings_with_little_memory(name: str) -> None:
    """On a device that has room for a part of the rows."""
    run(WORLD, parity, *OFFLOADED[name], {"device": "400KB", "host": "16MB"})


@pytest.mark.skipif(not SOAK, reason="takes 7 GB for each of two ranks: HOTBED_SOAK=1")
def test_all_parallelism_modes_at_full_size() -> None:
    run(2, parity, LARGE, None, "one", FULL, {}, seconds=1200)


def test_the_smaller_list_has_all_modes() -> None:
    tables = [hb.Table(f"T{at}", dim, rows) for at, (rows, dim) in enumerate(SMALLER)]
    plan = hb.plan(tables, WORLD, **ALL_MODES)
    kinds = {type(kind) for kind in plan.shardings.values()}
    assert len(SMALLER) == 41 and kinds == {Replicated, TableWise, ColumnWise, RowWise}


def all_on_rank_0(rank: int, world: int) -> None:
    """The three ragged features of DpToMpInputTest, 8 samples on each rank; other ranks keep nothing."""
    lengths = [(2, 3, 1, 1, 1, 9, 1, 1), (3, 1, 1, 1, 8, 1, 1, 1), (1, 9, 1, 1, 7, 1, 1, 1)]
    tables = [hb.Table(f"T{n}", 8, 100, "none") for n in range(3)]
    whole, own = (hb.EmbeddingCollection(tables, seed=1) for _ in range(2))
    hb.distribute(own, Plan(tables, world, {table.name: TableWise(0) for table in tables}))
    batch = {}
    for n, of_bags in enumerate(lengths):
        ids = (torch.arange(sum(of_bags)) * 7 + n + 31 * rank) % 100
        batch[f"T{n}"] = hb.Jagged(ids, lengths=of_bags)
    expected, found = whole(batch), own(batch)
    for name, vectors in found.items():
        assert torch.equal(vectors.values, expected[name].values)
        assert torch.equal(vectors.offsets, batch[name].offsets)
    assert own.memory()["T0"]["rows"] == (100 if rank == 0 else 0)


def test_all_features_on_rank_0() -> None:
    run(WORLD, all_on_rank_0)


def broadcast(rank: int, world: int) -> None:
    """test_broadcast: without a seed ranks begin with different rows, then all have those of rank 0."""
    torch.manual_seed(100 + rank)
    tables = [hb.Table(f"T{n}", dim, rows) for n, (rows, dim) in enumerate(BROADCAST)]
    model = hb.EmbeddingCollection(tables)
    batch = {table.name: torch.tensor([0, 1, 2]) for table in tables}
    for moment in ("before", "after"):
        own = torch.cat([*model.eval()(batch).values()], 1).detach()
        told = [torch.empty_like(own) for _ in range(world)]
        torch.distributed.all_gather(told, own)
        assert all(torch.equal(told[0], one) == (moment == "after") for one in told[1:])
        if moment == "before":
            first = told[0]
            hb.distribute(model, "basic")
    assert torch.equal(own, first)


def test_broadcast() -> None:
    run(WORLD, broadcast)


def model_fit(rank: int, world: int) -> None:
    """test_model_fit_bce: a batch of 12, labels 0.5, one step."""
    torch.manual_seed(0)
    shapes = sizes(world, 5)
    table_of = list(range(len(shapes)))
    models = [Network(shapes, table_of) for _ in range(2)]
    models[1].dense.load_state_dict(models[0].dense.state_dict())
    hb.distribute(models[1], "basic")
    losses = []
    for model, of in zip(models, (slice(0, 12), slice(12 * rank // world, 12 * (rank + 1) // world)),
                         strict=True):  # fmt: skip
        optimizer = hb.optim.SGD(model.parameters(), lr=1.5)
        scores = model(inputs(shapes, table_of, "one", of))
        loss = nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, 0.5))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.distributed.all_reduce(losses[1])
    torch.testing.assert_close(losses[1] / world, losses[0])
    for name in models[0].tables.tables:
        one, other = (model.tables.rows(name).values for model in models)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_model_fit_bce() -> None:
    run(WORLD, model_fit)


# -- OneEmbedding ----------------------------------------------------------------------------------

ONE_TABLES = {"4 tables": [32, 65536, 100, 7], "5 tables": [32768, 10000, 17, 3, 686]}
ONE_CASES = covering(
    {"tables": [*ONE_TABLES], "dim": [17, 128], "batch": [32, 4096]}, lambda *_: True
)


def one_embedding(rank: int, world: int, rows: list[int], dim: int, batch: int, steps: int) -> None:
    """C1, against torch's own embeddings instead of "no NaN"; by hash, as all of its tables are."""
    for rule in ("SGD", "Adam"):
        torch.manual_seed(0)
        own = hb.EmbeddingCollection([hb.Table(f"T{n}", dim) for n in range(len(rows))], seed=1)
        plain = nn.ModuleList(nn.Embedding(count, dim, sparse=True) for count in rows)
        for n, layer in enumerate(plain):
            own.assign(f"T{n}", torch.arange(rows[n]), layer.weight.detach())
        hb.distribute(own, Plan(own.tables.values(), world, {name: "row" for name in own.tables}))
        kind = torch.optim.SGD if rule == "SGD" else torch.optim.SparseAdam
        optimizers = (
            kind(plain.parameters(), lr=0.1),
            getattr(hb.optim, rule)(own.parameters(), lr=0.1),
        )
        samples = slice(batch * rank // world, batch * (rank + 1) // world)
        for number in range(steps):
            chance = torch.Generator().manual_seed(number)
            ids = [torch.randint(0, count, (batch,), generator=chance) for count in rows]
            label = torch.randint(0, 2, (batch,), generator=chance).float()
            told = own({f"T{n}": some[samples] for n, some in enumerate(ids)})
            scores = (
                sum(layer(some).sum(1) for layer, some in zip(plain, ids, strict=True)),
                sum(vectors.sum(1) for vectors in told.values()),
            )
            for score, of in zip(scores, (slice(None), samples), strict=True):
                nn.functional.binary_cross_entropy_with_logits(score, label[of]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for n, layer in enumerate(plain):
            found = own.rows(f"T{n}").values
            torch.testing.assert_close(found, layer.weight.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", ONE_CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_one_embedding(case: Case) -> None:
    rows, steps = ONE_TABLES[case["tables"]], 100 if SOAK else 3
    run(2, one_embedding, rows, case["dim"], case["batch"], steps, seconds=600)


def padding(rank: int, world: int, folder: str) -> None:
    """C2: zeros before and after an update, in every tier. C3: the same rows in every tier."""
    tables = [hb.Table(f"T{n}", 12, None, "none", padding_idx=2) for n in range(4)]
    whole = hb.EmbeddingCollection(tables, seed=1)
    ids = {f"T{n}": torch.arange(count) for n, count in enumerate((32, 64, 32, 32))}
    storages = [{}, {"host": "8MB", "ssd": folder}, {"device": "400KB", "host": "16MB"}]
    for budgets in storages:
        own = hb.EmbeddingCollection(tables, seed=1, storage=hb.Storage(**budgets))
        hb.distribute(own, "basic")
        optimizer = hb.optim.SGD(own.parameters(), lr=1.0)
        for name, some in ids.items():
            assert torch.equal(own.lookup(name, some), whole.lookup(name, some))
        for _ in range(2):
            own({name: [1, 2, 2, 3] for name in ids})  # left alone: a batch without a step
            vectors = own({name: some[:8].view(2, 4) for name, some in ids.items()})
            assert all(not bool(v[0, 2].any()) and bool(v[0, 1].all()) for v in vectors.values())
            sum(v.sum() for v in vectors.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(own.lookup("T0", [1]), whole.lookup("T0", [1]))


@pytest.mark.parametrize("world", [1, 2])
def test_one_embedding_padding_idx(world: int, tmp_path: Path) -> None:
    run(world, padding, str(tmp_path))


def exchange(rank: int, world: int) -> None:
    """B1, B2, B3, B5: batches of 512, ids below 1000: rows, and sums of gradients."""
    for tables, dim, dtype in ((1, 17, "float32"), (26, 17, "float32"), (1, 128, "float16"),
                               (13, 128, "float32")):  # fmt: skip
        specs = [hb.Table(f"T{n}", dim, None, "none", getattr(torch, dtype)) for n in range(tables)]
        own, whole = (hb.EmbeddingCollection(specs, seed=1) for _ in range(2))
        hb.distribute(own, "basic")
        chance = torch.Generator().manual_seed(tables)
        ids = torch.randint(0, 1000, (512 * world,), generator=chance)
        mine = ids[512 * rank : 512 * (rank + 1)]
        optimizer = hb.optim.SGD(own.parameters(), lr=1.0)
        before = {spec.name: whole.lookup(spec.name, torch.arange(1000)).float() for spec in specs}
        vectors = own({spec.name: mine for spec in specs})
        for name, found in vectors.items():
            assert torch.equal(found.float(), before[name][mine])
        (sum(v.float().sum() for v in vectors.values()) / 4).backward()
        optimizer.step()
        counts = torch.bincount(ids, minlength=1000)[:, None] / 4 / world  # means over ranks
        for name, rows in before.items():
            ids_met, found = own.rows(name)
            assert ids_met.tolist() == ids.unique().tolist()
            close = 1e-2 if dtype == "float16" else 1e-6
            expected = (rows - counts)[ids_met]
            torch.testing.assert_close(found.float(), expected, rtol=0, atol=close)


@pytest.mark.parametrize("world", [1, 2])
def test_one_embedding_exchange(world: int) -> None:
    run(world, exchange)


def seventy_tables(rank: int, world: int) -> None:
    """A number has bits for fewer. New ids of frozen tables are given no rows by any owner."""
    tables = [hb.Table(f"T{n}", 2) for n in range(70)]
    own = hb.distribute(hb.EmbeddingCollection(tables, seed=1), "basic")
    frozen = {"T3", "T62", "T69"}
    for name in frozen:
        own.get_parameter(name).requires_grad_(False)
    with Join(hb.dist.joinables(own)):
        if rank == 0:  # the other answers with no batch
            own({table.name: [rank, 2 + rank] for table in tables})
    for table in tables:
        assert own.count(table.name) == (0 if table.name in frozen else 2)


def test_tables_that_are_frozen_among_many() -> None:
    run(2, seventy_tables)


def cut_by_columns(rank: int, world: int, folder: str) -> None:
    storage = hb.Storage(host="4MB", ssd=folder)
    tables = [
        hb.Table("T0", 4, sharding=ColumnWise((0, 1))),
        hb.Table("T1", 4, 100, sharding="row"),
    ]
    own = hb.EmbeddingCollection(tables, seed=1, storage=storage)
    hb.distribute(own)
    for _ in range(3):
        own({"T0": [7, 9, 9, 2**40], "T1": [1, 4, 4, 4]})
    used = [tuple(one) for name in own.tables for one in own.hottest(name)]
    uses = 3 * world, 0  # one a rank and batch
    assert used == [
        (7, *uses),
        (9, *uses),
        (2**40, *uses),
        *[(one, *uses) for one in ([4], [1])[rank]],
    ]
    assert own.erase("T0", [9, 11]) == 1
    assert own.count("T0") == 2


def test_rows_cut_by_columns_are_counted_and_erased_once(tmp_path: Path) -> None:
    run(2, cut_by_columns, str(tmp_path))
