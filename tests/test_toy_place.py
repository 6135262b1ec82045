"""A place of rows that nobody knows of: one file adds it, and everything works as in memory, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import NotFiniteError, TableError
from hotbed.places.host.batch import check, core_batch
from hotbed.table.gradients import GradientRows
from hotbed.table.lookups import Call, Lookups
from hotbed.table.place import Place
from hotbed.table.place_factory import PlaceFactory
from hotbed.table.records import Records
from hotbed.table.resolved import Columns

Gradients = Sequence[Tensor | None]


class DictLookups(Lookups):
    def resolve(self, call: Call) -> DictBatch:
        check(core_batch(call.live, call.table_of, call.bags), call)
        return DictBatch(call)


IN_DICTS = DictLookups()


class DictPlace(Place):
    """Static tables of float32 whose bags are summed; rows are tensors in a dict, by id."""

    stepped_with = "dicts"

    def __init__(self, core: Any, spec: hb.Table, rows: Tensor) -> None:
        super().__init__(core, spec, IN_DICTS)
        self.rows = dict(enumerate(rows.clone().unbind()))

    def read(self, ids: Tensor) -> Tensor:
        rows = [self.rows[id] for id in ids.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, self.spec.dim)

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        yield Records(torch.tensor(list(self.rows)), torch.stack(list(self.rows.values())), [])

    def write(self, records: Records) -> None:
        if records.weights is not None:
            for id, row in zip(records.ids.tolist(), records.weights.float(), strict=True):
                self.rows[id] = row.clone()

    def forget(self) -> None:
        raise NotImplementedError

    def memory(self) -> dict[str, int]:
        return {"rows": len(self.rows), "total": 4 * self.spec.dim * len(self.rows)}

    def reset_states(self, rule: Any, firsts: Sequence[float]) -> None:
        pass

    def make_participant(self, optimizer: Any, tables: Sequence[Any]) -> DictPart:
        return DictPart()

    def for_copy(self, memo: Any) -> tuple[PlaceFactory, Any]:
        raise TableError("no copies")

    def refuse_device(self, device: torch.device, by_kernels: Any) -> None:
        raise TableError("a dict lies in memory")

    def move_to_device(self, live: Any, device: torch.device, by_kernels: Any) -> None:
        raise NotImplementedError


class DictBatch:
    """What `hotbed.group.pool` works on."""

    wants_gradient = True

    def __init__(self, call: Call) -> None:
        self.live: Sequence[Any] = call.live
        self.table_of, self.bags = call.table_of, call.bags
        self.weights = [bag.weights for bag in call.bags]

    def dtype_of(self, table: Any) -> torch.dtype:
        return torch.float32

    def empty(self, vectors: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(vectors, dim, dtype=dtype)

    def bags_of(self, feature: int) -> list[list[int]]:
        bag = self.bags[feature]
        edges = (
            range(0, len(bag.ids) + 1, bag.fixed) if bag.offsets is None else bag.offsets.tolist()
        )
        ids = bag.ids.tolist()
        return [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]

    def pool(self, columns: Sequence[Columns]) -> None:
        for _, features, parts in columns:
            for f, part in zip(features, parts, strict=True):
                rows = self.live[self.table_of[f]].place.rows
                part.zero_()
                for vector, ids in zip(part, self.bags_of(f), strict=True):
                    for id in ids:
                        vector += rows[id]

    def keep_inputs(self) -> None:
        raise NotImplementedError

    def weight_gradients(self, left: Any, outputs: Any, wanted: Any) -> list[Tensor]:
        raise NotImplementedError

    def backward(self, grads: Gradients) -> DictPendingGradient:
        return DictPendingGradient(self, grads)


class DictPendingGradient(NamedTuple):
    batch: DictBatch
    grads: Gradients

    def shares(self, tables: Sequence[int]) -> list[GradientRows]:
        sums: dict[int, dict[int, Tensor]] = {t: {} for t in tables}
        for f, (t, grad) in enumerate(zip(self.batch.table_of, self.grads, strict=True)):
            if grad is None or t not in sums:
                continue
            for vector, ids in zip(grad, self.batch.bags_of(f), strict=True):
                for id in ids:
                    found = sums[t].get(id)
                    sums[t][id] = vector.clone() if found is None else found + vector
        return [
            GradientRows(
                torch.tensor(list(rows), dtype=torch.int64), torch.stack(list(rows.values()))
            )
            for rows in sums.values()
        ]

    def step(self, updates: Any) -> None:
        raise NotImplementedError


class DictPart:
    """What tables in dicts do in a step of SGD."""

    includes_host = False

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, float, Tensor]] = []

    def add_table(self, live: Any, rule: Any, hyper: Any, share: Any = None) -> None:
        grad = live.parameter.grad
        if grad is not None:
            self.steps.append((live.place.rows, rule, hyper.lr, grad))

    def add_dense(self, parameter: Tensor, grad: Tensor, index: int, position: int) -> None:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        return not self.steps

    def decide(self, *, beside: bool) -> bool:
        if not all(bool(grad._values().isfinite().all()) for *_, grad in self.steps):
            raise NotFiniteError("a gradient in a dict")
        return True

    def apply(self) -> None:
        for rows, rule, lr, grad in self.steps:
            for id, g in zip(grad._indices()[0].tolist(), grad._values(), strict=True):
                rows[id] = rows[id] - torch.tensor(lr, dtype=torch.float32) * g
            rule.restart(rule.steps + 1, rule.base, rule.last)

    def finishing(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


class Model(nn.Module):
    def __init__(self, in_dicts: bool) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(
            [hb.Table("item", 5, 20), hb.Table("user", 3, 9)],
            {"watched": "item", "browsed": "item", "user": "user"},
            seed=1,
        )
        torch.manual_seed(0)
        self.top = nn.Linear(13, 1)
        for name in self.embeddings.tables if in_dicts else ():
            live = self.embeddings.table(name)
            live.adopt(DictPlace(live.core, live.spec, live.weights()))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.top(torch.cat(list(self.embeddings(batch).values()), 1)).sum()


def batch_of(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (6,), generator=g)
    return {
        "watched": hb.Jagged(
            torch.randint(0, 20, (int(lengths.sum()),), generator=g), lengths=lengths
        ),
        "browsed": torch.randint(0, 20, (6, 3), generator=g),
        "user": torch.randint(0, 9, (6,), generator=g),
    }


def trained(in_dicts: bool, accumulate: bool) -> tuple[list[float], dict[str, Any]]:
    model = Model(in_dicts)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        for part in range(2 if accumulate else 1):
            loss = model(batch_of(10 * step + part)).square()
            loss.backward()
            losses.append(loss.item())
        if step % 2:
            hb.nn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("accumulate", [False, True])
def test_it_trains_as_memory_does(accumulate: bool) -> None:
    losses, rows = trained(True, accumulate)
    expected_losses, expected = trained(False, accumulate)
    assert losses == expected_losses
    assert rows.keys() == expected.keys()
    for name, value in rows.items():
        assert torch.equal(value, expected[name]), name


def test_it_is_read_written_and_refused_as_any_other() -> None:
    model = Model(True)
    embeddings = model.embeddings
    ids = torch.tensor([3, 7])
    embeddings.assign("item", ids, torch.ones(2, 5))
    assert torch.equal(embeddings.lookup("item", ids), torch.ones(2, 5))
    assert len(embeddings.rows("item").ids) == 20
    with pytest.raises(hb.IdError, match="id 20 is outside"):
        embeddings({**batch_of(0), "browsed": torch.full((6, 1), 20)})
    beside = Model(False).embeddings
    with pytest.raises(TableError, match="lie in different places"):
        hb.EmbeddingCollection.from_layers([_layer(beside), _layer(embeddings)])
    user = embeddings.table("user")
    place = user.place
    user.adopt(beside.table("user").place)
    with pytest.raises(TableError, match="'item' and 'user' of one module lie in different places"):
        embeddings(batch_of(0))
    user.adopt(place)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    before = embeddings.rows("item").values
    (model(batch_of(0)) * float("nan")).backward()
    with pytest.raises(NotFiniteError):
        optimizer.step()
    assert torch.equal(embeddings.rows("item").values, before)


def _layer(embeddings: hb.EmbeddingCollection) -> hb.EmbeddingBag:
    layer = hb.EmbeddingBag(20, 5, mode="sum")
    layer._live.adopt(embeddings.table("item").place)
    return layer
