"""`EmbeddingCollection`: descriptions, lookups, first values, and looking in from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixed_tables import batch, mixed
from torch import nn
from torch_twins import dense_grad

import hotbed as hb

ids = torch.tensor


def of_weight(weight: list[list[float]], combiner: str) -> hb.EmbeddingCollection:
    collection = hb.EmbeddingCollection(
        [hb.Table("t", len(weight[0]), len(weight), combiner)], seed=0
    )
    collection.assign("t", torch.arange(len(weight)), torch.tensor(weight))
    return collection


TABLE = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
RAGGED = [[0.0, 3.0], [1.0, 5.0], [7.0, 2.0]]
BAGS = hb.Jagged.from_lists([[1, 2, 2], [0], [1, 2]])
SPARSE = torch.sparse_coo_tensor(
    ids([[0, 0, 0, 1, 2, 2], [1, 2, 2, 0, 1, 2]]), torch.ones(6), (3, 4), check_invariants=True
)


# distributed-embeddings, embedding_test.py: the same inputs, exactly the same answers.
@pytest.mark.parametrize(
    ("weight", "combiner", "input", "want"),
    [
        (TABLE, "none", ids([0, 1, 0]), [[1, 2], [3, 4], [1, 2]]),
        (TABLE, "none", ids([[0, 1], [2, 0]]), [[[1, 2], [3, 4]], [[5, 6], [1, 2]]]),
        (TABLE, "sum", ids([[0, 1], [2, 0]]), [[4, 6], [6, 8]]),
        (
            TABLE,
            "none",
            ids([[[0, 1], [2, 0], [1, 2]]]),
            [[[[1, 2], [3, 4]], [[5, 6], [1, 2]], [[3, 4], [5, 6]]]],
        ),
        (TABLE, "mean", ids([[[0, 1], [2, 0], [1, 2]]]), [[[2, 3], [3, 4], [4, 5]]]),
        (RAGGED, "mean", BAGS, [[5, 3], [0, 3], [4, 3.5]]),
        (RAGGED, "mean", SPARSE, [[5, 3], [0, 3], [4, 3.5]]),
    ],
)
def test_known_answers(weight: Any, combiner: str, input: Any, want: Any) -> None:
    out = of_weight(weight, combiner)({"t": input})["t"]
    assert torch.equal(out, torch.tensor(want, dtype=torch.float32))


def test_known_answer_of_ragged_rows() -> None:
    out = of_weight(RAGGED, "none")({"t": BAGS})["t"]
    assert torch.equal(out.values, nn.Embedding(3, 2, _weight=torch.tensor(RAGGED))(BAGS.values))
    assert torch.equal(out.offsets, BAGS.offsets)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pooled_and_unpooled_gradients_are_the_same(dtype: torch.dtype) -> None:
    pooled, single = of_weight(TABLE, "sum"), of_weight(TABLE, "none")
    pooled({"t": ids([[0, 1, 0]], dtype=dtype)})["t"].sum().backward()
    single({"t": ids([0, 1, 0], dtype=dtype)})["t"].sum().backward()
    assert torch.equal(dense_grad(pooled.parameter("t")), dense_grad(single.parameter("t")))
    assert dense_grad(pooled.parameter("t")).tolist() == [[2, 2], [1, 1], [0, 0]]


def test_first_values_depend_on_seed_and_name_only() -> None:
    tables = [hb.Table("item", 7, 50), hb.Table("other", 7, 50)]
    static = hb.EmbeddingCollection(tables, seed=4)
    dynamic = hb.EmbeddingCollection([hb.Table("item", 7)], seed=4)
    for part in torch.randperm(50).split(7):
        assert torch.equal(dynamic({"item": part})["item"], static.lookup("item", part))
    assert torch.equal(dynamic.rows("item").ids, torch.arange(50))
    assert torch.equal(dynamic.rows("item").values, static.rows("item").values)
    assert not torch.equal(static.rows("item").values, static.rows("other").values)
    other = hb.EmbeddingCollection([hb.Table("item", 7, 50)], seed=5)
    assert not torch.equal(static.rows("item").values, other.rows("item").values)


def test_without_a_seed_torch_governs() -> None:
    rows = []
    for _ in range(2):
        torch.manual_seed(9)
        rows.append([mixed(None).rows("item").values for _ in range(2)])
    assert torch.equal(rows[0][0], rows[1][0]) and torch.equal(rows[0][1], rows[1][1])
    assert not torch.equal(rows[0][0], rows[0][1])


def test_evaluation_inserts_nothing() -> None:
    collection = mixed()
    want = {k: v.detach().clone() for k, v in mixed()(batch()).items()}
    collection.eval()
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            outputs = collection(batch())
        assert all(torch.equal(outputs[k], v) for k, v in want.items())
    collection.train()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            collection(batch())
    assert collection.count("user") == collection.count("word") == 0
    collection(batch())
    assert collection.count("user") == len(batch()["user"].unique())
    assert collection.count() == 29 + collection.count("user") + collection.count("word")


def test_descriptions_are_checked() -> None:
    item = hb.Table("item", 4)
    for tables, features, says in (
        ([], None, "at least one table"),
        ([item, hb.Table("item", 8)], None, "Two tables are named 'item'"),
        ([item, hb.Table("item.ids", 8)], None, "part of table 'item'"),
        ([item, "user"], None, "must be hotbed.Table, got str"),
        ([item], {"x": "user"}, "Feature 'x' names table 'user', .* there are 'item'"),
        ([item], {}, "at least one feature"),
        ([item], ["item"], "features must be a dict .*'item'.*got list"),
        (item, None, "must be a list of hotbed.Table, got Table"),
        ({"item": item}, None, "must be a list of hotbed.Table, got dict"),
        ([hb.Table("training", 2)], None, "cannot be called 'training'"),
        ([hb.Table("_parameters", 2)], None, "cannot be called '_parameters'"),
        ([hb.Table("_live", 2)], None, "cannot be called '_live'"),
    ):
        with pytest.raises(hb.TableError, match=says):
            hb.EmbeddingCollection(tables, features)
    collection = hb.EmbeddingCollection([item, hb.Table("unused", 2)], {"x": "item"})
    assert collection({"x": ids([1])})["x"].shape == (1, 4)
    for seed in ("0", 1.0, True):
        with pytest.raises(hb.TableError, match="seed must be an integer"):
            hb.EmbeddingCollection([item], seed=seed)


@pytest.mark.parametrize("name", ["features", "forward", "rows", "a.b", "_c0", "weight", "é"])
def test_odd_names_are_names(name: str) -> None:
    collection = hb.EmbeddingCollection([hb.Table(name, 4), hb.Table("other", 2)], seed=0)
    collection.eval().train().zero_grad()
    out = collection({name: ids([1]), "other": ids([2])})[name]
    out.sum().backward()
    assert collection.features == {name: name, "other": "other"}
    assert [n for n, _ in collection.named_parameters()] == [name, "other"]
    again = hb.EmbeddingCollection([hb.Table(name, 4), hb.Table("other", 2)], seed=1)
    again.load_state_dict(collection.state_dict())
    assert torch.equal(again.lookup(name, ids([1])), out)


def test_looking_in_from_outside() -> None:
    collection = mixed()
    collection(batch())
    rows = collection.rows("user")
    assert torch.equal(rows.ids, batch()["user"].unique())
    assert torch.equal(collection.lookup("user", rows.ids), rows.values)
    collection.assign("user", ids([7, 7, -1]), torch.arange(9.0).view(3, 3))
    assert collection.lookup("user", ids([7, -1])).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert collection.lookup("user", [7]).tolist() == [[3, 4, 5]]
    assert collection.lookup("user", []).shape == (0, 3)
    collection.assign("user", [], [])
    assert collection.count("user") == len(rows.ids) + 2
    memory = collection.memory()
    assert memory["item"]["rows"] == 20 and memory["item"]["weights"] == 20 * 5 * 4
    assert memory["user"]["index"] > 0 and memory["tag"]["total"] == 4096
    text = repr(collection)
    assert "(item): 20 rows × 5 float32, mean ← watched, browsed" in text
    assert "(user): dynamic × 3 float32, sum" in text
    assert collection.tables["word"].dtype == torch.bfloat16
    for call, says in (
        (lambda: collection.rows("what"), "no table 'what'; there are 'item'"),
        (lambda: collection.parameter("what"), "no table 'what'"),
        (lambda: collection.lookup(["item"], ids([1])), r"no table \['item'\]"),
        (lambda: collection.lookup("user", ids([1.5])), "must be int64 or int32, got float32"),
        (lambda: collection.lookup("user", ids([[1]])), r"must be 1-D, got shape \(1, 1\)"),
        (lambda: collection.lookup("item", ids([20])), r"id 20 is outside \[0, 20\)"),
        (lambda: collection.assign("item", ids([-1]), torch.zeros(1, 5)), "id -1 is outside"),
        (lambda: collection.assign("user", ids([1]), torch.zeros(1, 5)), r"shape \(1, 3\)"),
    ):
        with pytest.raises(hb.HotbedError, match=says):
            call()
    assert collection.count("user") == len(rows.ids) + 2


def test_too_many_features_of_a_table_are_counted_in_the_error() -> None:
    features = {str(f): "t" for f in range(65_536)}
    embeddings = hb.EmbeddingCollection([hb.Table("t", 1, 3)], features)
    ids = torch.tensor([0])
    with pytest.raises(ValueError, match="'t': 65536 features; at most 65535 can share a table"):
        embeddings(dict.fromkeys(features, ids))


@pytest.mark.parametrize(
    ("module", "batch"),
    [
        (hb.EmbeddingCollection([hb.Table("item", 4)]), {"item": ids([1])}),
        (hb.EmbeddingCollection([hb.Table("item", 4)], storage=hb.Storage(host="1MB")), None),
        (hb.Embedding(None, 4), ids([1])),
    ],
)
def test_without_tiers_no_batch_is_prepared(module: Any, batch: Any) -> None:
    with pytest.raises(hb.TableError, match=r"prepare\(\).* has no tiers.*storage="):
        module.prepare(batch)
