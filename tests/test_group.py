"""`hotbed.Group`: modules that share a storage train as modules of their own do, bit for bit."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kept_in import PLACES, storage_of
from torch import Tensor, nn

import hotbed as hb
from hotbed.modules.owner import groups_of
from hotbed.table.lookups import lookups_of

STEPS = 8


class Model(nn.Module):
    """Three kinds of module over tables of one group; `group=None`: each has its own."""

    def __init__(self, group: hb.Group | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.user = hb.Embedding(None, 6, group=group)
        self.watched = hb.EmbeddingBag(900, 6, mode="mean", group=group)
        self.others = hb.EmbeddingCollection(
            [hb.Table("item", 4, 700), hb.Table("shop", 4, None)], seed=5, group=group
        )
        self.top = nn.Linear(20, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        given = {name: batch[name] for name in ("item", "shop")}
        vectors = [self.user(batch["user"]), self.watched(batch["watched"])]
        return self.top(torch.cat([*vectors, *self.others(given).values()], 1)).squeeze(1)


def batches(seed: int = 0) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (16,), generator=drawn)
        watched = torch.randint(0, 900, (int(lengths.sum()),), generator=drawn)
        made.append(
            {
                "user": torch.randint(0, 2**40, (16,), generator=drawn) % 977,
                "watched": hb.Jagged(watched, lengths=lengths),
                "item": torch.randint(0, 700, (16,), generator=drawn),
                "shop": torch.randint(0, 300, (16,), generator=drawn),
            }
        )
    return made


def trained(group: hb.Group | None, depth: int = 2) -> tuple[Model, list[float], dict[str, Any]]:
    model = Model(group)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for batch in hb.lookahead(batches(), model, depth=depth):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses, model.state_dict()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_it_trains_as_modules_of_their_own_do(place: str, depth: int, tmp_path: Path) -> None:
    group = hb.Group(storage_of(place, tmp_path))
    model, losses, rows = trained(group, depth)
    _, expected, expected_rows = trained(None)
    assert losses == expected
    assert rows.keys() == expected_rows.keys()
    for name, value in rows.items():
        assert torch.equal(value, expected_rows[name]), name
    assert groups_of(model) == [group]
    assert len(group.tables) == 4 and len({table.name for table in group.tables}) == 4
    if group.tiers is not None:
        counted = group.stats()
        assert counted == model.others.stats()
        assert counted["batches"] == 2 * 2 * STEPS  # of the two modules that share slots
        assert counted["batches_unprepared"] == (0 if depth else counted["batches"])
        assert not group.tiers.prepared or len(group.tiers.prepared) == 3


def test_a_checkpoint_of_tiers_loads_into_memory(tmp_path: Path) -> None:
    model, _, rows = trained(hb.Group(storage_of("ssd", tmp_path)))
    hb.save(tmp_path / "run", model, step=1)
    other = Model(None)
    hb.load(tmp_path / "run", other)
    for name, value in other.state_dict().items():
        assert torch.equal(value, rows[name]), name
    model.user.group.flush()
    assert sum(1 for _ in (tmp_path / "rows").glob("rows-*")) == 1


def test_a_budget_holds_for_all_modules_together() -> None:
    group = hb.Group(hb.Storage(host=3_000_000))
    first = hb.Embedding(30_000, 16, group=group)
    with pytest.raises(hb.StorageError, match="weights alone take 3,840,000 bytes"):
        hb.Embedding(30_000, 16, group=group)
    assert group.tables == [first._live]
    assert list(group.usage()) == ["embedding"]
    with group.snapshot():
        assert sum(len(rows.ids) for _, rows in group.records()) == 30_000


def test_names_are_distinct_where_a_storage_is_shared(tmp_path: Path) -> None:
    group = hb.Group(storage_of("ssd", tmp_path))
    layers = [hb.Embedding(9, 2, group=group), hb.EmbeddingBag(9, 2, group=group)]
    layers += [hb.Embedding(9, 2, group=group)]
    assert [table.name for table in group.tables] == ["embedding", "embeddingbag", "embedding_2"]
    with pytest.raises(hb.TableError, match="has a table 'embedding' already"):
        hb.EmbeddingCollection([hb.Table("embedding", 2, 9)], group=group)
    assert len(group.tables) == len(layers)


def test_a_group_goes_on_without_a_module_that_is_gone(tmp_path: Path) -> None:
    group = hb.Group(storage_of("ssd", tmp_path))
    kept, gone = hb.Embedding(None, 4, group=group), hb.Embedding(None, 4, group=group)
    optimizer = hb.optim.SGD([*kept.parameters(), *gone.parameters()], lr=0.5)
    ids = torch.arange(40)
    (kept(ids).sum() + gone(ids).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = kept.lookup(ids)
    del gone, optimizer
    gc.collect()
    assert group.tables == [kept._live]
    late = hb.EmbeddingBag(50, 4, group=group)
    assert torch.equal(kept.lookup(ids), before)
    assert late(ids.view(4, 10)).shape == (4, 4)
    assert set(group.usage()) == {"embedding", "embeddingbag"}
    assert len(group._tables) == 2


def test_records_have_states_and_are_up_to_date_unless_said_otherwise() -> None:
    layer = hb.Embedding(6, 2)
    optimizer = hb.optim.SGD(layer.parameters(), lr=0.5, momentum=0.5, untouched="exact")
    for ids in (torch.arange(6), torch.tensor([0])):
        optimizer.zero_grad()
        layer(ids).sum().backward()
        optimizer.step()
    ((_, behind),) = layer.group.records(current=False)
    ((table, rows),) = layer.group.records()
    assert table is layer._live
    assert rows.states is not None and rows.states[0][:, 0].tolist() == [1.5, *[0.5] * 5]
    assert not torch.equal(behind.weights[1:], rows.weights[1:])
    assert torch.equal(rows.weights, layer.weight.detach())


def test_figures_of_tables_in_several_places_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(used: float, missed: float) -> Any:
        counted = {"rows_used": used, "rows_missed": missed, "hit_rate": (used - missed) / used}
        return Mock(stats=lambda tables: counted)

    group = hb.Group()
    places = [place(80.0, 20.0), place(20.0, 10.0)]
    monkeypatch.setattr(group, "_by_lookups", lambda: dict(zip(places, ([], []), strict=True)))
    assert group.stats() == {"rows_used": 100, "rows_missed": 30, "hit_rate": 0.7}


def test_copies_and_pickles_share_a_group_of_their_own() -> None:
    model = nn.ModuleList([hb.Embedding(9, 2), hb.EmbeddingBag(None, 3)])
    group = hb.Group(hb.Storage(host="1MB"))
    shared = nn.ModuleList([hb.Embedding(9, 2, group=group), hb.Embedding(9, 2, group=group)])
    for given in (model, shared):
        for twin in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
            assert len(groups_of(twin)) == len(groups_of(given))
            assert not set(groups_of(twin)) & set(groups_of(given))
            assert [len(g.tables) for g in groups_of(twin)] == [
                len(g.tables) for g in groups_of(given)
            ]
            assert groups_of(twin)[0].storage == groups_of(given)[0].storage
            assert torch.equal(twin[0].weight, given[0].weight)
    twin = copy.deepcopy(shared)
    with pytest.raises(hb.StorageError):
        hb.Embedding(30_000, 16, group=groups_of(twin)[0])


def test_layers_without_a_storage_join_one_group(tmp_path: Path) -> None:
    layers: list[Any] = [hb.Embedding(9, 2), nn.Embedding(9, 2), hb.EmbeddingBag(9, 2)]
    collection = hb.EmbeddingCollection.from_layers(layers)
    assert len(collection.group.tables) == 3
    assert layers[0].group is layers[2].group is collection.group
    limited = [hb.Embedding(9, 2, group=hb.Group(hb.Storage(host="1MB"))), hb.Embedding(9, 2)]
    with pytest.raises(
        hb.TableError, match="has a Storage that others of these tables do not share"
    ):
        hb.EmbeddingCollection.from_layers(limited)
    tiered = [hb.Embedding(9, 2, group=hb.Group(storage_of("ssd", tmp_path))), hb.Embedding(9, 2)]
    with pytest.raises(hb.TableError, match="lie in different places"):
        hb.EmbeddingCollection.from_layers(tiered)


def test_one_call_over_two_storages_names_two_tables() -> None:
    parts = [
        hb.EmbeddingCollection([hb.Table(name, 2, 9)], storage=hb.Storage(device="1MB", host="1MB"))
        for name in ("first", "second")
    ]
    with pytest.raises(hb.TableError, match="'first' and 'second' have Storage of their own each"):
        lookups_of(
            [part.table(name) for part, name in zip(parts, ("first", "second"), strict=True)]
        )


def test_look_ahead_says_what_it_does_not_find(tmp_path: Path) -> None:
    layer = hb.Embedding(50, 4, group=hb.Group(storage_of("ssd", tmp_path)))
    model = nn.ModuleDict({"user": layer})
    hb.optim.SGD(model.parameters(), lr=0.1)
    given = [{"person": torch.arange(5)} for _ in range(3)]
    with pytest.warns(UserWarning, match="features of Embedding 'user' \\('user'\\)"):
        for batch in hb.lookahead(given, model):
            layer(batch["person"]).sum().backward()
            layer.weight.grad = None
    for batch in hb.lookahead(given, model, inputs=lambda batch: batch["person"]):
        layer(batch["person"]).sum().backward()
        layer.weight.grad = None
    assert layer.group.stats()["batches_ahead"] + layer.group.stats()["batches_unprepared"] >= 3


def test_wrong_arguments() -> None:
    with pytest.raises(hb.StorageError, match="storage must be a hotbed.Storage"):
        hb.Group("4GB")
    with pytest.raises(hb.TableError, match="group must be a hotbed.Group, got Storage"):
        hb.Embedding(9, 2, group=hb.Storage(host="1MB"))
    with pytest.raises(hb.TableError, match="not both"):
        hb.EmbeddingCollection(
            [hb.Table("item", 2, 9)], group=hb.Group(), storage=hb.Storage(host="1MB")
        )
