"""What modules with tables do when copied, pickled, saved, loaded, cast, moved and wrapped."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_tables import assert_equal_grads, batch, grads_of, loss_of, mixed
from torch import nn
from torch.utils.data import DataLoader

import hotbed as hb

ids = torch.tensor


class Model(nn.Module):
    """Tables, a dense part, and two modules over the same tables."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = mixed()
        self.single = hb.Embedding(None, 4)
        self.again = hb.EmbeddingCollection.from_layers([self.single], names=["single"])
        self.dense = nn.Linear(3, 1)

    def forward(self, x: dict[str, Any]) -> torch.Tensor:
        out = self.embeddings(x)
        return loss_of(out) + self.dense(out["user"]).sum() + self.single(x["user"]).sum()


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, by_pickle, by_torch_save])
def test_a_copy_is_equal_and_apart(way: Callable[[nn.Module], nn.Module]) -> None:
    model = Model()
    model(batch()).backward()
    model.zero_grad()
    model.embeddings.parameter("tag").requires_grad_(False)
    copied: Any = way(model)
    assert copied.embeddings.tables == model.embeddings.tables
    assert [p.requires_grad for p in copied.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    # Tables that modules share stay shared, and parameters stay the tables' own.
    assert copied.single.weight is copied.again.parameter("single")
    assert copied.single.weight is not model.single.weight
    other = batch(seed=5)
    for m in (model, copied):
        m(other).backward()
    assert_equal_grads(grads_of(copied.embeddings), grads_of(model.embeddings))
    before = model.embeddings.rows("item").values
    copied.embeddings.assign("item", ids([0]), torch.zeros(1, 5))
    assert torch.equal(model.embeddings.rows("item").values, before)
    # The copy draws the same first values for ids that are still to come.
    new = ids([987654321])
    assert torch.equal(copied.single(new), model.single(new))
    copied.eval()
    assert not copied.single.training and model.single.training


def test_deepcopy_keeps_a_shared_parameter_list() -> None:
    model = Model()
    copied, parameters = copy.deepcopy((model, list(model.parameters())))
    assert all(a is b for a, b in zip(copied.parameters(), parameters, strict=True))


def test_subclasses_keep_what_is_theirs() -> None:
    class Scaled(hb.EmbeddingCollection):
        def __init__(self) -> None:
            super().__init__([hb.Table("user", 3)], seed=0)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("steps", torch.zeros(()))

    model = Scaled()
    model({"user": ids([1, 2])})
    copied = copy.deepcopy(model)
    assert copied.scale is not model.scale and copied.scale.item() == 2
    model.scale.data.fill_(5)
    copied.load_state_dict(model.state_dict())
    assert copied.scale.item() == 5
    assert set(model.state_dict()) == {"scale", "steps", "user", "user.ids", "user.key"}
    with pytest.raises(RuntimeError, match='Unexpected key.*"other"'):
        copied.load_state_dict({**model.state_dict(), "other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match='Missing key.*"scale"'):
        copied.load_state_dict({k: v for k, v in model.state_dict().items() if k != "scale"})


def test_memory_goes_with_the_module() -> None:
    gc.collect()
    gc.disable()
    try:
        model = Model()
        model(batch()).backward()
        tables = [weakref.ref(t) for t in model.embeddings._live]
        del model
        assert all(t() is None for t in tables)
    finally:
        gc.enable()
    parameter = hb.Embedding(3, 4).weight
    assert torch.equal(copy.deepcopy(parameter), parameter), "a handle keeps its table"


class Vectors(torch.utils.data.Dataset[torch.Tensor]):
    """Looks its module up, wherever it is."""

    def __init__(self, collection: hb.EmbeddingCollection) -> None:
        self.collection = collection.eval()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, seed: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            out = self.collection(batch(2, seed))
        return {name: vectors.clone() for name, vectors in out.items()}


@pytest.mark.process
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_worker_has_a_copy(way: str) -> None:
    collection = mixed()
    collection(batch(50))
    loader = DataLoader(Vectors(collection), None, num_workers=1, multiprocessing_context=way)
    for seed, found in enumerate(loader):
        want = collection(batch(2, seed))
        assert all(torch.equal(found[name], vectors) for name, vectors in want.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.half(), "'item' keeps its rows as float32.*float16.*dtype="),
        (lambda m: m.double(), "cannot be cast to float64"),
        (lambda m: m.to(torch.bfloat16), "cannot be cast to bfloat16"),
        (lambda m: m.to("meta"), "cannot be moved to meta"),
        (lambda m: m.share_memory(), "belongs to one process"),
    ],
)
def test_casts_and_moves_are_refused(change: Callable[[nn.Module], None], says: str) -> None:
    model = nn.ModuleList([mixed()])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(hb.TableError, match=says):
        change(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_moves_to_where_it_is_are_no_moves() -> None:
    model = nn.ModuleList([hb.EmbeddingCollection([hb.Table("user", 3)])])
    handle = next(model.parameters())
    assert next(model.cpu().float().to("cpu").parameters()) is handle


def test_a_replaced_parameter_is_refused() -> None:
    layer = hb.Embedding(4, 2)
    with pytest.raises(hb.TableError, match="'weight' was replaced"):
        torch.func.functional_call(layer, {"weight": torch.zeros(4, 2)}, (ids([1]),))
    layer(ids([1]))
    collection = hb.EmbeddingCollection([hb.Table("user", 3)])
    collection.user = nn.Parameter(torch.zeros(3))
    with pytest.raises(hb.TableError, match="'user' was replaced"):
        collection({"user": ids([1])})


@pytest.mark.parametrize(
    ("rows_from", "rows_to"), [(20, 20), (None, None), (20, None), (None, 20)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_dict_round_trips(
    rows_from: int | None, rows_to: int | None, dtype: torch.dtype
) -> None:
    def make(rows: int | None, seed: int) -> nn.Module:
        tables = [hb.Table("item", 3, rows, dtype=dtype, padding_idx=2)]
        return nn.ModuleDict({"tables": hb.EmbeddingCollection(tables, seed=seed)})

    old, new = make(rows_from, 0), make(rows_to, 1)
    for seed, module in enumerate((old, new)):
        module.tables({"item": torch.randperm(20)[: 7 + seed]})
        module.tables.assign("item", ids([11, 2, 5]), torch.rand(3, 3) + seed)
    state = old.state_dict()
    assert set(state) == {"tables.item", "tables.item.key"} | (
        {"tables.item.ids"} if rows_from is None else set()
    )
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    new.load_state_dict(torch.load(buffer, weights_only=True))
    if rows_from is None:
        assert torch.equal(state["tables.item.ids"], state["tables.item.ids"].sort().values)
        if rows_to is None:
            assert new.tables.count("item") == old.tables.count("item")
    # Every id, met or not, reads the same, and so does padding.
    everything = torch.arange(20)
    old.eval(), new.eval()
    assert torch.equal(new.tables.lookup("item", everything), old.tables.lookup("item", everything))
    inputs = {"item": torch.randint(0, 20, (5, 4))}
    assert torch.equal(new.tables(inputs)["item"], old.tables(inputs)["item"])
    again = new.state_dict()
    if rows_from == rows_to:
        assert all(torch.equal(again[k], v) for k, v in state.items())


def test_loading_between_forward_and_backward() -> None:
    collection = mixed()
    state = collection.state_dict()
    loss_of(collection(batch())).backward()
    loss = loss_of(collection(batch()))
    collection.load_state_dict(state)
    assert collection.parameter("user").grad is None, "its slots are gone"
    assert collection.parameter("item").grad is not None
    with pytest.raises(hb.TableError, match="'user' was loaded, reset or erased from between"):
        loss.backward()
    layer = hb.Embedding(None, 3)
    out = layer(ids([1])).sum()
    layer.reset_parameters()
    with pytest.raises(hb.TableError, match="Look the batch up again"):
        out.backward()


def test_row_dtypes_convert_on_loading() -> None:
    wide = hb.EmbeddingCollection([hb.Table("item", 3, 9, dtype=torch.float64)], seed=0)
    slim = hb.EmbeddingCollection([hb.Table("item", 3, 9, dtype=torch.float16)], seed=1)
    slim.load_state_dict(wide.state_dict())
    assert torch.equal(slim.rows("item").values, wide.rows("item").values.half())


def test_what_does_not_fit_is_not_loaded() -> None:
    collection = mixed()
    collection(batch())
    good = {k: v.clone() for k, v in collection.state_dict().items()}
    for change, says in (
        ({"item": good["item"][:, :4]}, "'item'.*shape \\(20, 4\\); the table's dim is 5"),
        ({"item": good["item"][:7]}, "has 7 rows, the table 20"),
        ({"item": good["item"].long()}, "must be floating point, got int64"),
        ({"item": [1.0]}, "must be a tensor, got list"),
        ({"item.ids": torch.arange(1, 21)}, r"id 20 is outside \[0, 20\)"),
        ({"user.ids": good["user.ids"][1:]}, "has 5 rows and 4 ids"),
        ({"user.ids": good["user.ids"].double()}, "ids must be int64 or int32, got float64"),
        ({"other": torch.zeros(1)}, 'Unexpected key.*"other"'),
    ):
        with pytest.raises(RuntimeError, match=says):
            collection.load_state_dict({**good, **change})
        assert all(torch.equal(v, good[k]) for k, v in collection.state_dict().items())
    with pytest.raises(RuntimeError, match='Missing key.*"user"'):
        collection.load_state_dict({k: v for k, v in good.items() if "user" not in k})
    part = {k: v for k, v in good.items() if "user" not in k}
    assert collection.load_state_dict(part, strict=False).missing_keys == ["user"]


def test_copies_beyond_memory_are_refused(
    pretend_memory: Callable[[int], None], tmp_path: Path
) -> None:
    collection = mixed()
    collection(batch())
    pretend_memory(10)
    for call in (
        collection.state_dict,
        lambda: collection.rows("user"),
        lambda: copy.deepcopy(collection),
        lambda: pickle.dumps(collection),
    ):
        with pytest.raises(hb.TableError, match=r"would copy \d+ bytes, and 10 are free"):
            call()
    static = hb.EmbeddingCollection([hb.Table("item", 5, 20)])
    assert static.state_dict()["item"].data_ptr() == static.parameter("item").data_ptr()
    pretend_memory(0)
    storage = hb.Storage(host="20MB", ssd=tmp_path)
    tiered = hb.EmbeddingCollection([hb.Table("item", 1024, 10**6)], storage=storage)
    wanted = torch.zeros(20_000, dtype=torch.int64)
    assert tiered.lookup("item", wanted[:10]).shape == (10, 1024)
    pretend_memory(10**7)
    for call in (tiered.state_dict, lambda: tiered.rows("item")):
        with pytest.raises(
            hb.TableError, match=r"'item': .* would copy 4112000000 .* lookup\(ids\)"
        ):
            call()
    with pytest.raises(hb.OutOfMemory, match="needs 81920000 bytes .* 10000000 bytes"):
        tiered.lookup("item", wanted)


def test_a_module_that_is_saved_loaded_or_moved_can_be_used_meanwhile() -> None:
    """By other threads; here by what torch calls in the middle."""

    class Extra(hb.EmbeddingCollection):
        loaded: Any = None

        def get_extra_state(self) -> Any:
            use()
            return {"kept": 7}

        def set_extra_state(self, state: Any) -> None:
            use()
            self.loaded = state

    def use() -> None:
        assert len(list(model.parameters())) == 2
        model({"item": ids([1])})

    model = Extra([hb.Table("item", 4, 10)], seed=0)
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    state = model.state_dict()
    assert set(state) == {"item", "item.key", "scale", "_extra_state"}
    state["scale"] = torch.zeros(2)
    model.load_state_dict(state)
    assert model.loaded == {"kept": 7} and not model.scale.any()
    replaced = nn.Parameter(torch.full((2,), 3.0))
    model.load_state_dict({**state, "scale": replaced}, assign=True)
    assert model.scale is replaced

    def move(tensor: torch.Tensor) -> torch.Tensor:
        use()
        return tensor.clone()

    model._apply(move)
    assert model.scale.tolist() == [3, 3]


@pytest.fixture
def process_group() -> Iterator[None]:
    """A world of one process, in memory."""
    os.environ.pop("MASTER_ADDR", None)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dynamic", [False, True])
def test_plain_ddp_is_refused_when_it_is_made(process_group: None, dynamic: bool) -> None:
    tables = hb.EmbeddingCollection([hb.Table("item", 4, None if dynamic else 10)])
    model = nn.ModuleDict({"tables": tables, "dense": nn.Linear(4, 1)})
    with pytest.raises(hb.OptimizerError, match="'item' is inside Distri.*hotbed.distribute"):
        nn.parallel.DistributedDataParallel(model)
    # Tables that DDP is told to leave alone are no trouble.
    ignored = [name for name, _ in model.named_parameters() if name.startswith("tables")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    nn.parallel.DistributedDataParallel(model)
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "share", [lambda w: w.share_memory_(), lambda w: w.detach().share_memory_()]
)
def test_weights_that_were_moved_to_shared_memory(share: Callable[[Any], object]) -> None:
    """What was written there until the next call is taken over; the table keeps its own memory."""
    layer = hb.Embedding(20, 4)
    share(layer.weight)
    with torch.no_grad():
        layer.weight[3] = 7.0
    assert (layer(torch.tensor([3])) == 7).all() and (layer.lookup([3]) == 7).all()
    optimizer = hb.optim.SGD(layer.parameters(), lr=1.0)
    layer(torch.tensor([3])).sum().backward()
    optimizer.step()
    assert (layer.weight[3] == 6).all() and (layer.lookup([3]) == 6).all()
