"""A table in parts that nobody knows of: one file adds it, and it trains as the whole does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed import _core
from hotbed.errors import NotFiniteError, TableError
from hotbed.init import bands_of
from hotbed.places.host.batch import HostBatch, HostPendingGradient, check, core_batch
from hotbed.places.host.step import HostParticipant, rows_of
from hotbed.places.moves import factory_for
from hotbed.table.gradients import GradientRows
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call, Lookups
from hotbed.table.place import Place
from hotbed.table.place_factory import PlaceFactory
from hotbed.table.records import Records
from hotbed.tables import CORE_DTYPES, Table, TablePart, columns_of, ids_of
from hotbed.tables import rows_of as every

DEALS: dict[str, Callable[[Table], list[TablePart]]] = {
    "two by id": lambda table: by_id(table, 2),
    "three by id": lambda table: by_id(table, 3),
    "more than rows": lambda table: by_id(table, 70),
    "by column": lambda table: [columns_of(table, 0, 2), columns_of(table, 2, table.dim)],
    "halves again": lambda table: [
        columns_of(part, *columns)
        for part in by_id(table, 2)
        for columns in ((0, 3), (3, table.dim))
    ],
}

BY_COLUMN = "by column", "halves again"
TRAININGS = [
    (deal, rule)
    for deal in DEALS
    for rule in ("SGD", "Adagrad", "AdamW", "FTRL", "RowwiseAdagrad")
    # Such a rule needs the sum over a whole row.
    if not (rule.startswith("Rowwise") and deal in BY_COLUMN)
]


def by_id(table: Table, count: int) -> list[TablePart]:
    if table.rows is None:
        return [ids_of(table, lambda ids, n=n: ids % count == n) for n in range(count)]
    return [every(table, n, count) for n in range(count)]


class Share:
    """A part with its place, and how it stands to the whole."""

    def __init__(self, part: TablePart, key: int) -> None:
        self.live = LiveTable(part, key, factory_for(part))
        self.origin = part.origin
        self.columns = slice(part.origin.column, part.origin.column + part.dim)

    def mine(self, ids: Tensor) -> Tensor:
        if self.origin.owns is not None:
            return self.origin.owns(ids)
        if self.origin.rows is None:
            return torch.ones_like(ids, dtype=torch.bool)
        return (ids >= self.origin.first) & ((ids - self.origin.first) % self.origin.stride == 0)

    def own(self, ids: Tensor) -> Tensor:
        return (ids - self.origin.first) // self.origin.stride


class PartsLookups(Lookups):
    def resolve(self, call: Call) -> PartsBatch:
        check(core_batch(call.live, call.table_of, call.bags), call)
        return PartsBatch.of(call)


IN_PARTS = PartsLookups()


class InParts(Place):
    """Asks the parts for rows, pools them itself, and gives gradients back by row."""

    stepped_with = "parts"

    def __init__(self, core: Any, spec: Table, deal: str) -> None:
        super().__init__(core, spec, IN_PARTS)
        self.shares = [Share(part, core.key) for part in DEALS[deal](spec)]
        self.numbers: dict[int, int] = {}  # of a dynamic table, which stand for slots
        self.by_number: list[int] = []

    def slots(self, ids: Tensor) -> Tensor:
        if self.spec.rows is not None:
            return ids
        for row in ids.tolist():
            if row not in self.numbers:
                self.numbers[row] = len(self.by_number)
                self.by_number.append(row)
        return torch.tensor([self.numbers[row] for row in ids.tolist()], dtype=torch.int64)

    def ids_of_slots(self, slots: Tensor) -> Tensor:
        if self.spec.rows is not None:
            return slots
        return torch.tensor([self.by_number[s] for s in slots.tolist()], dtype=torch.int64)

    def read(self, ids: Tensor) -> Tensor:
        rows = torch.empty(len(ids), self.spec.dim, dtype=self.spec.dtype)
        for share in self.shares:
            at = torch.nonzero(share.mine(ids)).flatten()
            if len(at):
                rows[at, share.columns] = share.live.lookup(share.own(ids[at]))
        return rows

    def meet(self, ids: Tensor) -> None:
        """New ones get rows."""
        for share in self.shares:
            own = share.own(ids[share.mine(ids)])
            if len(own) and self.spec.rows is None:
                share.live.assign(own, share.live.lookup(own))

    def ids(self) -> Tensor:
        if self.spec.rows is not None:
            return super().ids()
        return torch.cat([share.live.ids() for share in self.shares]).unique()

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        ids = self.ids()
        yield Records(ids, self.read(ids), [])

    def write(self, records: Records) -> None:
        for share in self.shares:
            at = torch.nonzero(share.mine(records.ids)).flatten()
            weights = records.weights
            assert weights is not None
            share.live.write(Records(share.own(records.ids[at]), weights[at, share.columns]))

    def forget(self) -> None:
        raise NotImplementedError

    def memory(self) -> dict[str, int]:
        return {}

    def make_states(self, rule: Any) -> None:
        for share in self.shares if rule is not None else ():
            initial = rule.initial_accumulator_value
            made = _core.TableRule.make(share.live.core, rule.options, initial, rule.exact)
            share.live.rule = made
            share.live.allocate()

    def reset_states(self, rule: Any, firsts: Sequence[float]) -> None:
        raise NotImplementedError

    def make_participant(self, optimizer: Any, tables: Sequence[Any]) -> PartsPart:
        return PartsPart(optimizer)

    def for_copy(self, memo: Any) -> tuple[PlaceFactory, Any]:
        raise TableError("no copies")

    def refuse_device(self, device: torch.device, by_kernels: Any) -> None:
        raise TableError("parts lie on the host")

    def move_to_device(self, live: Any, device: torch.device, by_kernels: Any) -> None:
        raise NotImplementedError


class PartsBatch(HostBatch):
    """The rows that a batch asks for lie in tables of their own, as long as it does."""

    distinct: list[Tensor]

    @classmethod
    def of(cls, call: Call) -> PartsBatch:
        distinct, cores, bags = [], [], list(call.bags)
        tables: Sequence[Any] = call.live
        for t, live in enumerate(tables):
            features = [f for f, of in enumerate(call.table_of) if of == t]
            ids = torch.cat([call.bags[f].ids.long().flatten() for f in features]).unique()
            spec = live.spec
            nothing = -(2**63) if spec.padding_idx is None else spec.padding_idx
            padding = torch.nonzero(ids == nothing).flatten()
            if call.training and t not in call.frozen:
                live.place.meet(ids[ids != nothing])
            scratch = _core.Table.make(
                spec.name, max(1, len(ids)), spec.dim, CORE_DTYPES[spec.dtype],
                bands_of(hb.init.Zeros(), None, spec.dim), 0, int(padding[0]) if len(padding) else None,
            )  # fmt: skip
            rows, at = live.place.read(ids), torch.arange(len(ids))
            _core.write(scratch, at.data_ptr(), len(ids), rows.data_ptr())
            for f in features:
                at = torch.searchsorted(ids, call.bags[f].ids.long())
                bags[f] = call.bags[f]._replace(ids=at)
            distinct.append(ids)
            cores.append(scratch)
        call = call._replace(bags=bags)
        inputs = [Scratch(core, live) for core, live in zip(cores, call.live, strict=True)]
        core = core_batch(inputs, call.table_of, bags)
        core.resolve(False, torch.is_grad_enabled(), call.frozen)
        made = cls(core, call, torch.is_grad_enabled(), kept=(cores, bags))
        made.distinct = distinct
        return made

    def backward(self, grads: Sequence[Tensor | None]) -> Any:
        return PartsPendingGradient(super().backward(grads), self)


class Scratch:
    def __init__(self, core: Any, live: Any) -> None:
        self.core, self.combiner = core, live.combiner


class PartsPendingGradient:
    def __init__(self, left: HostPendingGradient, batch: PartsBatch) -> None:
        self._left, self._batch = left, batch

    def shares(self, tables: Sequence[int]) -> list[GradientRows]:
        found = []
        for t, share in zip(tables, self._left.shares(tables), strict=True):
            ids = self._batch.distinct[t][share.slots]
            place: Any = self._batch.live[t].place
            slots = place.slots(ids)
            found.append(GradientRows(slots, share.rows, share.distinct, share.finite))
        return found

    def step(self, updates: Any) -> None:
        raise NotImplementedError


class PartsPart:
    """Each part takes the step of its rows, also where there are none."""

    includes_host = False

    def __init__(self, optimizer: Any) -> None:
        self._host = HostParticipant(optimizer)
        self._rules: list[Any] = []

    def add_table(self, live: Any, rule: Any, hyper: Any, share: Any = None) -> None:
        rows = rows_of(live) if share is None else share
        if rows is None:
            return
        place = live.place
        ids = place.ids_of_slots(rows.slots)
        for part in place.shares:
            at = torch.nonzero(part.mine(ids)).flatten()
            own = part.own(ids[at])
            slots = torch.empty_like(own)
            part.live.core.find(own.data_ptr(), len(own), slots.data_ptr())
            grads = rows.rows[at, part.columns].contiguous()
            self._host.add_table(part.live, part.live.rule, hyper, GradientRows(slots, grads))
        self._rules.append(rule)

    def add_dense(self, parameter: Tensor, grad: Tensor, index: int, position: int) -> None:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        return self._host.idle

    def decide(self, *, beside: bool) -> bool:
        return self._host.decide(beside=beside)

    def apply(self) -> None:
        self._host.apply()
        for rule in self._rules:
            rule.restart(rule.steps + 1, rule.base, rule.last)

    def finishing(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


def tables(dtype: torch.dtype) -> list[Table]:
    return [
        Table("item", 5, 61, "mean", dtype, hb.init.XavierUniform(), padding_idx=4),
        Table("user", 7, None, "sum", dtype, hb.init.TruncatedNormal(std=0.2), padding_idx=-3),
        Table("word", 4, 61, "none", dtype, hb.init.Normal(0.0, 1.0)),
    ]


class Model(nn.Module):
    def __init__(self, deal: str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(
            tables(dtype),
            {"item": "item", "more": "item", "user": "user", "word": "word"},
            seed=3,
        )
        if deal is not None:
            for name in self.embeddings.tables:
                live = self.embeddings.table(name)
                live.adopt(InParts(live.core, live.spec, deal))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        # Of exact products and sums only, so that the gradients' bits are those of every order.
        return sum(
            (v * w).sum()
            for v, w in zip(self.embeddings(batch).values(), (1, 2, 0.5, 4), strict=True)
        )


def batch_of(number: int) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (9,), generator=chance)
    return {
        "item": hb.Jagged(
            torch.randint(0, 61, (int(lengths.sum()),), generator=chance), lengths=lengths
        ),
        "more": torch.randint(0, 9, (9, 3), generator=chance),
        "user": torch.randint(-20, 90, (9, 2), generator=chance),
        "word": torch.randint(0, 61, (9,), generator=chance),
    }


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("deal", "rule"), TRAININGS)
def test_a_table_in_parts_trains_as_the_whole(
    deal: str, rule: str, dtype: torch.dtype, untouched: str
) -> None:
    whole, parts = Model(None, dtype), Model(deal, dtype)
    options: dict[str, Any] = {"lr": 0.1, "untouched": untouched}
    rules = [getattr(hb.optim, rule)(m.parameters(), **options) for m in (whole, parts)]
    for number in range(8):
        losses = []
        for model, optimizer in zip((whole, parts), rules, strict=True):
            loss = model(batch_of(number))
            loss.backward()
            if number % 3:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    for name in whole.embeddings.tables:
        one, other = (model.embeddings.rows(name) for model in (whole, parts))
        assert torch.equal(one.ids, other.ids) and torch.equal(one.values, other.values)


@pytest.mark.parametrize("deal", DEALS)
def test_first_values_are_those_of_the_whole(deal: str) -> None:
    ids = {"item": torch.arange(61), "word": torch.arange(61), "user": torch.arange(-30, 40)}
    whole, parts = Model(None, torch.float32), Model(deal, torch.float32)
    for name, some in ids.items():
        assert torch.equal(whole.embeddings.lookup(name, some), parts.embeddings.lookup(name, some))


def test_what_is_wrong_is_told_as_of_the_whole() -> None:
    item, user, word = tables(torch.float32)
    third = Share(every(item, 2, 20), 1).live
    assert len(third) == 3 and third.spec.padding_idx is None
    with pytest.raises(hb.IdError, match=r"id 62 is outside \[0, 61\)"):
        third.lookup(torch.tensor([3]))
    own = Share(ids_of(user, lambda ids: ids % 2 == 1), 1).live
    with pytest.raises(hb.IdError, match="id 8 belongs to another part"):
        own.assign(torch.tensor([5, 8]), torch.zeros(2, 7))
    cut = Share(columns_of(every(word, 1, 3), 2, 4), 1)
    optimizer = hb.optim.SGD(hb.Embedding(3, 2).parameters(), lr=0.1)
    (known,) = optimizer._rules.values()
    rule = _core.TableRule.make(cut.live.core, known.options, 0.0, False)
    part = HostParticipant(Held())
    grads = torch.tensor([[0.0, float("nan")]])
    part.add_table(cut.live, rule, _core.Hyperparameters(), GradientRows(torch.tensor([5]), grads))
    with pytest.raises(NotFiniteError, match="Table 'word', id 16, column 3"):
        part.decide(beside=False)


class Held:
    def check_hold(self, live: Any, rule: Any) -> None:
        pass


@pytest.mark.parametrize("storage", [None, hb.Storage(device="100KB", host="16MB")])
def test_a_part_may_have_no_rows(storage: hb.Storage | None) -> None:
    item, *_ = tables(torch.float32)
    none = every(item, 61, 100)
    assert none.rows == 0
    model = hb.EmbeddingCollection([none, Table("user", 5)], storage=storage)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1)
    empty = hb.Jagged(torch.empty(0, dtype=torch.int64), lengths=torch.tensor([0, 0]))
    for _ in range(2):
        vectors = model({"item": empty, "user": torch.tensor([1, 2])})
        assert not vectors["item"].any()
        sum(v.sum() for v in vectors.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.count("item") == 0 and model.rows("item").values.shape == (0, 5)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(hb.IdError):
        model.lookup("item", [0])
    with pytest.raises(TableError, match="positive integer"):
        Table("item", 5, 0)
