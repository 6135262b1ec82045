"""`Storage(host=...)` without an SSD: what tables take stays within it."""

import copy
import functools
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed import _core
from hotbed.places.host.place import in_memory

STATES = {"SGD": 0, "Adagrad": 1, "Adam": 2}
"""Numbers a weight."""


def step(embeddings: hb.EmbeddingCollection, optimizer: Any, ids: dict[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    torch.cat([v.sum().view(1) for v in embeddings(ids).values()]).sum().backward()
    optimizer.step()


USES = 24_576  # counts of uses of a table, which lie beside the budget


def used(embeddings: hb.EmbeddingCollection) -> int:
    return sum(table["total"] for table in embeddings.memory().values())


def named_by(error: pytest.ExceptionInfo[hb.StorageError]) -> int:
    found = re.search(
        r"Storage\(host=[\d,]+\) to at least ([\d,]+) bytes, or give an ssd=", str(error.value)
    )
    assert found is not None, str(error.value)
    return int(found[1].replace(",", ""))


def pages(bytes: int) -> int:
    """What a plane of so many bytes takes."""
    return -(-bytes // 4096) * 4096


def everything(embeddings: hb.EmbeddingCollection) -> list[torch.Tensor]:
    return [part for name in embeddings.tables for part in embeddings.rows(name)]


def test_a_refused_batch_catches_no_row_up() -> None:
    """In two parts a row of untouched="exact" may end with other bits, so nothing is caught up before all
    tables have taken the batch."""
    tables = [hb.Table("item", 4, 50), hb.Table("user", 4)]
    ends = []
    for refused in (False, True):
        embeddings = hb.EmbeddingCollection(tables, seed=1, storage=hb.Storage(host="200KB"))
        optimizer = hb.optim.Adam(embeddings.parameters(), lr=0.1, untouched="exact")
        every, none = torch.arange(50), torch.zeros(0, dtype=torch.int64)
        step(
            embeddings, optimizer, {"item": every.view(-1, 1), "user": torch.arange(50).view(-1, 1)}
        )
        for at in range(40):
            if refused and at % 7 == 3:
                with pytest.raises(hb.StorageError, match="Table 'user' needs"):
                    embeddings({"item": every.repeat(200), "user": torch.arange(10_000)})
            step(embeddings, optimizer, {"item": torch.tensor([[at % 3]]), "user": none.view(1, 0)})
        ends.append(everything(embeddings))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", STATES)
def test_a_dynamic_table_grows_up_to_the_budget(rule: str) -> None:
    table = hb.Table("user", dim=8)
    embeddings = hb.EmbeddingCollection([table], seed=1, storage=hb.Storage(host="1MB"))
    optimizer = getattr(hb.optim, rule)(embeddings.parameters(), lr=0.1)
    with pytest.raises(hb.StorageError, match="Table 'user' needs") as refused:
        for first in range(0, 40_000, 100):
            before = everything(embeddings), used(embeddings)
            step(embeddings, optimizer, {"user": torch.arange(first, first + 100).view(-1, 1)})
    rows = embeddings.count()
    assert used(embeddings) - USES <= 1_000_000 < named_by(refused)
    assert named_by(refused) < 1_650_000  # of a hundred more, and an index that splits
    assert (
        all(map(torch.equal, everything(embeddings), before[0])) and used(embeddings) == before[1]
    )
    assert rows > 300_000 // (8 * 4 * (1 + STATES[rule]) + 8)
    # Rows that are there train on; the figure named is enough for the rows that were refused.
    step(embeddings, optimizer, {"user": torch.arange(rows).view(-1, 1)})
    larger = hb.EmbeddingCollection([table], storage=hb.Storage(host=named_by(refused)))
    getattr(hb.optim, rule)(larger.parameters(), lr=0.1)
    larger({"user": torch.arange(rows + 100).view(-1, 1)})
    assert larger.count() == rows + 100


def test_tables_of_a_collection_share_it() -> None:
    tables = [hb.Table("a", dim=16), hb.Table("b", dim=16, rows=5000), hb.Table("c", dim=16)]
    embeddings = hb.EmbeddingCollection(tables, storage=hb.Storage(host="1MB"))
    ids = torch.arange(4000)
    embeddings.assign("a", ids, torch.ones(4000, 16))
    with pytest.raises(hb.StorageError, match=r"Table 'c' needs .* with all tables"):
        embeddings.assign("c", ids + 10**12, torch.ones(4000, 16))
    assert embeddings.count("c") == 0 and embeddings.count("a") == 4000
    embeddings.assign("c", ids[:1000], torch.ones(1000, 16))
    # What one gives back another may have.
    embeddings.table("a").forget_rows()
    embeddings.assign("c", ids, torch.full((4000, 16), 2.0))
    assert embeddings.lookup("c", ids).mean() == 2


def test_a_batch_that_does_not_fit_leaves_every_table() -> None:
    tables = [hb.Table("a", dim=4), hb.Table("b", dim=400)]
    embeddings = hb.EmbeddingCollection(tables, seed=1, storage=hb.Storage(host="1MB"))
    embeddings({name: torch.tensor([[1], [2]]) for name in "ab"})
    before = everything(embeddings)
    with pytest.raises(hb.StorageError, match="Table 'b' needs .* for 5,000 rows"):
        embeddings({name: torch.arange(5000).view(-1, 1) for name in "ab"})
    assert all(map(torch.equal, everything(embeddings), before))
    assert used(embeddings) < 200_000  # an index keeps its memory for keys to come


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_states_count_when_the_optimizer_is_made(untouched: str) -> None:
    tables = [hb.Table("a", dim=10, rows=10_000), hb.Table("b", dim=10, rows=2_000)]
    embeddings = hb.EmbeddingCollection(tables, seed=1, storage=hb.Storage(host="1MB"))
    needed = sum(
        3 * pages(rows * 10 * 4) + (pages(rows * 8) if untouched == "exact" else 0)
        for rows in (10_000, 2_000)
    )
    for _ in range(2):
        with pytest.raises(hb.StorageError, match="Table 'a' needs .* for 10,000 rows") as refused:
            hb.optim.Adam(embeddings.parameters(), untouched=untouched)
        assert named_by(refused) == needed
        for name in "ab":
            live = embeddings.table(name)
            assert live.core.state_names == [] and live.rule is None and live.optimizer is None
    sgd = hb.optim.SGD(embeddings.parameters(), lr=0.1)
    step(embeddings, sgd, {name: torch.tensor([[1]]) for name in "ab"})
    enough = hb.EmbeddingCollection(tables, storage=hb.Storage(host=needed))
    hb.optim.Adam(enough.parameters(), untouched=untouched)
    less = hb.EmbeddingCollection(tables, storage=hb.Storage(host=needed - 1))
    with pytest.raises(hb.StorageError):
        hb.optim.Adam(less.parameters(), untouched=untouched)


def test_states_that_are_replaced_make_room_for_others() -> None:
    table = hb.Table("a", dim=10, rows=10_000)
    embeddings = hb.EmbeddingCollection([table], storage=hb.Storage(host=3 * pages(400_000)))
    adam = hb.optim.Adam(embeddings.parameters())
    step(embeddings, adam, {"a": torch.tensor([[1]])})
    with pytest.raises(hb.StorageError):
        hb.optim.Adam(embeddings.parameters(), amsgrad=True, replace_state=True)
    step(embeddings, adam, {"a": torch.tensor([[1]])})  # it still has the table
    hb.optim.Adagrad(embeddings.parameters(), replace_state=True)
    hb.optim.Adam(embeddings.parameters(), replace_state=True)


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    source = hb.EmbeddingCollection([hb.Table("a", dim=10)], seed=1)
    source.assign("a", torch.arange(30_000), torch.ones(30_000, 10))
    target = hb.EmbeddingCollection([hb.Table("a", dim=10)], seed=2, storage=hb.Storage(host="1MB"))
    target.assign("a", torch.tensor([5]), torch.zeros(1, 10))
    before = everything(target)
    with pytest.raises(RuntimeError, match=r"Table 'a' needs .* for 30,000 rows .*Storage\(host="):
        target.load_state_dict(source.state_dict())
    assert all(map(torch.equal, everything(target), before))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_has_a_budget_of_its_own(copied: Any) -> None:
    tables = [hb.Table("a", dim=10), hb.Table("b", dim=10)]
    embeddings = hb.EmbeddingCollection(tables, storage=hb.Storage(host="1MB"))
    embeddings.assign("a", torch.arange(9000), torch.ones(9000, 10))
    twin = copied(embeddings)
    for each in (embeddings, twin):
        assert each.count("a") == 9000
        with pytest.raises(hb.StorageError, match="Table 'b' needs .* with all tables"):
            each.assign("b", torch.arange(9000), torch.ones(9000, 10))
        each.assign("b", torch.arange(2000), torch.ones(2000, 10))


def test_tables_that_go_give_it_back() -> None:
    budget = _core.MemoryBudget(10**6)
    embeddings = hb.EmbeddingCollection([hb.Table("a", dim=10, rows=10)])
    live, home = type(embeddings.table("a")), functools.partial(in_memory, budget=budget)
    table = live(hb.Table("a", dim=100, rows=1000), 7, home)
    assert (budget.used, budget.limit) == (pages(400_000), 10**6)
    with pytest.raises(hb.StorageError):
        live(hb.Table("b", dim=100, rows=2000), 7, home)
    assert budget.used == pages(400_000)
    del table
    assert budget.used == 0


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 40_000), max_size=12), st.booleans(), st.integers(0, 2**32))
def test_an_index_takes_no_more_than_was_reckoned(
    sizes: list[int], rising: bool, seed: int
) -> None:
    """A table alone, of which the index is all but eight bytes a row of what is counted."""
    budget = _core.MemoryBudget(10**9)
    live = type(hb.EmbeddingCollection([hb.Table("a", dim=1)]).table("a"))
    home = functools.partial(in_memory, budget=budget)
    table = live(hb.Table("a", dim=1, dtype=torch.float16), 7, home)
    random = np.random.default_rng(seed)
    rows = 0
    for size in sizes:
        ids = random.integers(-(2**63), 2**63 - 1, size)
        if rising:
            ids = np.arange(rows, rows + size)
        table.assign(torch.from_numpy(ids), torch.zeros(size, 1))
        rows = len(table)
        assert table.memory()["total"] <= budget.used
        assert budget.used <= 10 * rows + max(64 * rows, 64 * 16 + 20, 24 * rows + 600_000)


def test_the_sum_that_is_named_holds_all_tables_of_the_batch() -> None:
    def step(host: int) -> None:
        tables = [hb.Table(f"t{n}", 8) for n in range(12)]
        model = hb.EmbeddingCollection(tables, storage=hb.Storage(host=host))
        optimizer = hb.optim.Adam(model.parameters())
        batch = {f"t{n}": torch.arange(200).reshape(100, 2) % (10 * n + 5) for n in range(12)}
        sum(vectors.sum() for vectors in model(batch).values()).backward()
        optimizer.step()

    with pytest.raises(hb.StorageError, match="with all tables") as raised:
        step(10_000)
    with pytest.raises(hb.StorageError):
        step(raised.value.needed - 1)
    step(raised.value.needed)
