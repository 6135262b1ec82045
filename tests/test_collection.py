"""`EmbeddingCollection`: lookups, gradients, and what careless use meets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_twins import dense_grad

import hotbed as hb
from hotbed import _core

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


def mixed(seed: int | None = 0) -> hb.EmbeddingCollection:
    return hb.EmbeddingCollection(
        [
            hb.Table("item", 5, 20, "mean"),
            hb.Table("user", 3),
            hb.Table("word", 16, None, "none", torch.bfloat16),
            hb.Table("tag", 4, 9, "max", torch.float64),
        ],
        {"watched": "item", "browsed": "item", "user": "user", "word": "word", "tag": "tag"},
        seed=seed,
    )


def batch(size: int = 6, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (size,), generator=g)
    weights = torch.rand(int(lengths.sum()), generator=g)
    watched = torch.randint(0, 20, weights.shape, generator=g)
    return {
        "watched": hb.Jagged(watched, lengths=lengths, weights=weights),
        "browsed": torch.randint(0, 20, (size, 3), generator=g),
        "user": torch.randint(-5, 5, (size,), generator=g) * 10**15,
        "word": torch.randint(0, 50, (size, 2), generator=g, dtype=torch.int32),
        "tag": torch.randint(0, 9, (size, 4), generator=g),
    }


def loss_of(outputs: dict[str, Any]) -> Tensor:
    return sum(((k + 1) * v).pow(2).sum() for k, v in enumerate(outputs.values()))  # type: ignore[return-value]


def grads_of(collection: hb.EmbeddingCollection) -> dict[str, Tensor]:
    return {
        name: p.grad.coalesce()._values().clone()
        for name, p in collection.named_parameters()
        if p.grad is not None
    }


def assert_equal_grads(a: dict[str, Tensor], b: dict[str, Tensor], exact: bool = True) -> None:
    assert a.keys() == b.keys()
    for name, grad in a.items():
        if exact:
            assert torch.equal(grad, b[name]), name
        else:
            torch.testing.assert_close(grad, b[name])


def test_bits_do_not_depend_on_threads_or_instruction_set(
    set_threads: Callable[[int], None],
) -> None:
    size = 5000  # enough that work is split
    found = []
    best = _core.isa()
    try:
        for isa in ("base", "avx2", "avx512"):
            if not _core.use_isa(isa):
                continue
            for threads in (1, 2, 3):
                set_threads(threads)
                collection = mixed()
                outputs = collection(batch(size))
                loss_of(outputs).backward()
                found.append((outputs, grads_of(collection)))
    finally:
        _core.use_isa(best)
    assert len(found) >= 3
    for outputs, grads in found[1:]:
        for name, out in outputs.items():
            assert torch.equal(out, found[0][0][name]), name
        assert_equal_grads(grads, found[0][1])


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


def test_gradients_flow_in_evaluation_too() -> None:
    collection = mixed()
    collection(batch())
    loss_of(collection.eval()(batch())).backward()
    assert grads_of(collection).keys() == {"item", "user", "word", "tag"}


def test_a_frozen_table_takes_no_gradient_and_no_rows() -> None:
    collection = mixed()
    collection.parameter("user").requires_grad_(False)
    out = collection(batch())
    loss_of(out).backward()
    assert collection.parameter("user").grad is None and collection.count("user") == 0
    assert not out["user"].requires_grad or collection.parameter("item").grad is not None
    assert torch.equal(out["user"], collection.lookup("user", batch()["user"]))
    assert collection.count("word") > 0
    collection.requires_grad_(False)
    assert not any(v.requires_grad for v in collection(batch()).values())


def test_unused_features_get_no_gradient() -> None:
    collection = mixed()
    out = collection(batch())
    out["browsed"].sum().backward()
    assert grads_of(collection).keys() == {"item"}
    want = torch.zeros(20)
    for id in batch()["browsed"].flatten():
        want[id] += 1 / 3
    torch.testing.assert_close(dense_grad(collection.parameter("item"))[:, 0], want)


def test_backward_twice_and_accumulation() -> None:
    once, twice, split = mixed(), mixed(), mixed()
    loss_of(once(batch())).backward()
    loss = loss_of(twice(batch()))
    loss.backward(retain_graph=True)
    first = grads_of(twice)
    assert_equal_grads(first, grads_of(once))
    loss.backward()
    assert_equal_grads(grads_of(twice), {k: 2 * g for k, g in first.items()})
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    for seed in (1, 2):
        loss_of(split(batch(seed=seed))).backward()
    together = mixed()
    (loss_of(together(batch(seed=1))) + loss_of(together(batch(seed=2)))).backward()
    assert_equal_grads(grads_of(split), grads_of(together), exact=False)


def test_no_second_derivative() -> None:
    collection = mixed()
    loss = loss_of(collection(batch()))
    (grad,) = torch.autograd.grad(loss, [collection.parameter("item")], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        grad._values().pow(2).sum().backward()


def test_inputs_may_be_changed_after_the_forward() -> None:
    collection, inputs = mixed(), batch()
    want = mixed()
    loss_of(want(batch())).backward()
    loss = loss_of(collection(inputs))
    for value in inputs.values():
        (value.values if isinstance(value, hb.Jagged) else value).fill_(7)
    inputs["watched"].offsets.fill_(10**9)
    loss.backward()
    assert_equal_grads(grads_of(collection), grads_of(want))


def test_a_weight_gradient_reads_nothing_that_may_have_changed() -> None:
    layer = hb.EmbeddingBag(10, 4, mode="sum", include_last_offset=True)
    w = torch.ones(3, requires_grad=True)
    input, offsets = ids([1, 2, 3]), ids([0, 2, 3])
    out = layer(input, offsets, w)
    input.fill_(10**12)
    offsets.fill_(10**12)
    out.sum().backward()
    torch.testing.assert_close(w.grad, layer.weight.detach()[1:4].sum(1))
    weights = torch.ones(3)
    out = layer(ids([1, 2, 3]), ids([0, 2, 3]), weights)
    weights.fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_outputs_may_be_changed_in_place() -> None:
    collection, plain = mixed(), mixed()
    a, b = collection(batch()), plain(batch())
    a["user"].mul_(2).add_(1)
    a["browsed"][0] = 0
    nn.functional.relu_(a["tag"])
    want = {**b, "user": b["user"] * 2 + 1, "tag": b["tag"].relu()}
    want["browsed"] = torch.cat([torch.zeros(1, 5), b["browsed"][1:]])
    assert all(torch.equal(a[k], want[k]) for k in a)
    loss_of(a).backward()
    loss_of(want).backward()
    assert_equal_grads(grads_of(collection), grads_of(plain), exact=False)


def test_gradients_of_any_layout() -> None:
    for change in (
        lambda g: g.expand(6, 3),
        lambda g: torch.randn(3, 6).T,
        lambda g: torch.randn(6, 6)[:, ::2],
        lambda g: torch.randn(1, 3).expand(6, 3),
        lambda g: torch.randn(7, 3)[1:],
    ):
        collection = hb.EmbeddingCollection([hb.Table("user", 3, 10)], seed=0)
        gradient = change(torch.randn(6, 1))
        index = ids([1, 2, 2, 3, 9, 1])
        collection({"user": index})["user"].backward(gradient)
        want = torch.zeros(10, 3).index_add_(0, index, gradient)
        torch.testing.assert_close(dense_grad(collection.parameter("user")), want)


def test_an_empty_batch_has_an_empty_gradient() -> None:
    collection = mixed()
    out = collection(batch(0))
    assert [tuple(v.shape) for v in out.values()] == [(0, 5), (0, 5), (0, 3), (0, 2, 16), (0, 4)]
    loss_of(out).backward()
    assert all(g.shape[0] == 0 for g in grads_of(collection).values())
    assert grads_of(collection).keys() == {"item", "user", "word", "tag"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    collection, plain = mixed(), mixed()
    start = torch.zeros((), requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return loss_of(collection(batch())) + x

    loss = checkpoint(run, start, use_reentrant=reentrant)
    assert isinstance(loss, Tensor)
    want = loss_of(plain(batch()))
    assert loss.item() == want.item()
    loss.backward()
    want.backward()
    assert_equal_grads(grads_of(collection), grads_of(plain))
    assert torch.equal(collection.rows("user").values, plain.rows("user").values)


def test_rows_that_move_between_forward_and_backward() -> None:
    layer = hb.EmbeddingBag(None, 8, mode="sum")
    w = torch.rand(2, 3, requires_grad=True)
    index = torch.arange(6).view(2, 3)
    out = layer(index, per_sample_weights=w)
    layer(torch.arange(10, 400_010).view(1, -1))  # the planes grow, and so move
    out.sum().backward()
    torch.testing.assert_close(w.grad, layer._live.lookup(index.flatten()).sum(1).view(2, 3))


def test_evaluation_on_several_threads() -> None:
    collection = mixed()
    collection(batch(50))
    collection.eval()
    want = {seed: collection(batch(50, seed)) for seed in range(8)}

    def evaluate(seed: int) -> bool:
        with torch.no_grad():
            found = [collection(batch(50, seed)) for _ in range(20)]
        return all(torch.equal(f[k], v) for f in found for k, v in want[seed].items())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(evaluate, want))


def test_autocast_leaves_rows_their_type() -> None:
    collection = mixed()
    dense = nn.Linear(5, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = collection(batch())
        assert out["browsed"].dtype == torch.float32 and out["tag"].dtype == torch.float64
        hidden = dense(out["browsed"])
        assert hidden.dtype == torch.bfloat16
    hidden.float().sum().backward()
    assert dense_grad(collection.parameter("item")).dtype == torch.float32


def test_two_collections_in_one_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = mixed(0), mixed(1)

        def forward(self, x: dict[str, Any]) -> Tensor:
            return loss_of(self.one(x)) * loss_of(self.two(x))

    model = Model()
    model(batch()).backward()
    assert len(list(model.parameters())) == 8
    assert all(p.grad is not None for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) > 2**40


def test_elements_beyond_63_bits_are_counted() -> None:
    tables = [hb.Table(f"t{t}", 2**22) for t in range(36)]
    collection = hb.EmbeddingCollection(tables)
    total = sum(p.numel() for p in collection.parameters())
    assert total == 36 * 2**59 > 2**63 and collection.parameter("t0").nbytes == 2**61
    collection = hb.EmbeddingCollection([hb.Table("wide", 2**22), hb.Table("slim", 1)], seed=0)
    out = collection({"wide": ids([-(2**63)]), "slim": ids([2**63 - 1])})
    (out["wide"].sum() + out["slim"].sum()).backward()
    assert collection.parameter("wide").grad.shape == collection.parameter("wide").shape  # type: ignore[union-attr]


def test_descriptions_are_checked() -> None:
    item = hb.Table("item", 4)
    for tables, features, says in (
        ([], None, "at least one table"),
        ([item, hb.Table("item", 8)], None, "Two tables are named 'item'"),
        ([item, hb.Table("item.ids", 8)], None, "part of table 'item'"),
        ([item, "user"], None, "must be hotbed.Table, got str"),
        ([item], {"x": "user"}, "Feature 'x' names table 'user', .* there are 'item'"),
        ([item], {}, "at least one feature"),
    ):
        with pytest.raises(hb.TableError, match=says):
            hb.EmbeddingCollection(tables, features)  # type: ignore[arg-type]
    collection = hb.EmbeddingCollection([item, hb.Table("unused", 2)], {"x": "item"})
    assert collection({"x": ids([1])})["x"].shape == (1, 4)


def test_looking_in_from_outside() -> None:
    collection = mixed()
    collection(batch())
    rows = collection.rows("user")
    assert torch.equal(rows.ids, batch()["user"].unique())
    assert torch.equal(collection.lookup("user", rows.ids), rows.values)
    collection.assign("user", ids([7, 7, -1]), torch.arange(9.0).view(3, 3))
    assert collection.lookup("user", ids([7, -1])).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert collection.count("user") == len(rows.ids) + 2
    memory = collection.memory()
    assert memory["item"]["rows"] == 20 and memory["item"]["weights"] == 20 * 5 * 4
    assert memory["user"]["index"] > 0 and memory["tag"]["total"] == 9 * 4 * 8
    text = repr(collection)
    assert "(item): 20 rows × 5 float32, mean ← watched, browsed" in text
    assert "(user): dynamic × 3 float32, sum" in text
    assert collection.tables["word"].dtype == torch.bfloat16
    for call, says in (
        (lambda: collection.rows("what"), "no table 'what'; there are 'item'"),
        (lambda: collection.parameter("what"), "no table 'what'"),
        (lambda: collection.lookup("user", ids([1.5])), "must be a 1-D int64 tensor"),
        (lambda: collection.lookup("item", ids([20])), r"id 20 is outside \[0, 20\)"),
        (lambda: collection.assign("item", ids([-1]), torch.zeros(1, 5)), "id -1 is outside"),
        (lambda: collection.assign("user", ids([1]), torch.zeros(1, 5)), r"shape \(1, 3\)"),
    ):
        with pytest.raises(hb.HotbedError, match=says):
            call()
    assert collection.count("user") == len(rows.ids) + 2


def test_a_default_device_or_dtype_changes_nothing() -> None:
    want = mixed()
    loss_of(want(batch())).backward()
    with torch.device("meta"):
        collection = mixed()
    inputs = batch()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            outputs = collection(inputs)
            loss = loss_of(outputs)
            loss.backward()
            grads = grads_of(collection)
            collection.load_state_dict(collection.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(v.device.type == "cpu" for v in outputs.values())
    assert_equal_grads(grads, grads_of(want))
