"""What an error says that a budget must be: whoever follows it trains, after two rounds at most."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from resolve.small_logs import in_memory, small_logs
from resolve.tiered_training import budget_named_by
from torch import Tensor

import hotbed as hb

IDS = 2000
STEPS = 40


@dataclasses.dataclass(frozen=True)
class Stream:
    dims: tuple[int, ...]
    static: bool
    zipf: bool
    size: int
    depth: int
    accumulate: int
    ssd: bool
    seed: int

    def batches(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(STEPS):
            drawn = torch.rand((len(self.dims), self.size), generator=generator).double()
            ids = (IDS**drawn if self.zipf else IDS * drawn).long()
            yield {f"t{k}": ids[k] for k in range(len(self.dims))}

    def train(self, storage: hb.Storage) -> None:
        rows = IDS + 1 if self.static else None
        tables = [hb.Table(f"t{k}", dim, rows=rows) for k, dim in enumerate(self.dims)]
        model = hb.EmbeddingCollection(tables, seed=0, storage=storage)
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
        loader = hb.lookahead(self.batches(), model, depth=self.depth)
        for at, batch in enumerate(loader, 1):
            sum(vectors.sum() for vectors in model(batch).values()).backward()
            if at % self.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


streams = st.builds(
    Stream,
    dims=st.lists(st.sampled_from([1, 4, 16, 33]), min_size=1, max_size=4).map(tuple),
    static=st.booleans(),
    zipf=st.booleans(),
    size=st.sampled_from([50, 200, 400]),
    depth=st.sampled_from([0, 2]),
    accumulate=st.sampled_from([1, 4]),
    ssd=st.booleans(),
    seed=st.integers(0, 1000),
)


@pytest.mark.filterwarnings("ignore:The budget holds")
@settings(max_examples=examples(12, 600))
@given(stream=streams)
def test_two_rounds_suffice(stream: Stream) -> None:
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder, small_logs():
        budget, errors, rounds = 1, 0, 0
        while True:
            ssd = Path(folder, str(errors))
            storage = hb.Storage(host=budget, ssd=ssd) if stream.ssd else None
            try:
                stream.train(storage or hb.Storage(device=budget, host="64MB"))
                break
            except hb.StorageError as error:
                advised = int(str(error).split("at least ")[1].split()[0].replace(",", ""))
                assert advised > budget
                # Before any batch is there, room for a row of each table is asked for.
                if "a batch needs room" in str(error):
                    assert advised >= budget_named_by(error)[1] > budget
                    rounds += 1
                budget, errors = advised, errors + 1
    assert rounds <= 2 and errors - rounds <= 2


def test_who_does_not_look_ahead_is_advised_room_for_two_batches() -> None:
    model = hb.EmbeddingCollection(
        [hb.Table("a", 16)], storage=hb.Storage(device="200KB", host="64MB")
    )
    with pytest.raises(hb.StorageError, match="a batch needs room") as raised:
        model({"a": torch.arange(IDS * 4)})
    advised = int(str(raised.value).split("at least ")[1].split()[0].replace(",", ""))
    assert advised // raised.value.needed == 2  # for a gradient that waits for its step, too


@pytest.mark.parametrize("rows", [None, IDS * 20])
@pytest.mark.parametrize("ssd", [False, True])
def test_the_least_budget_that_an_error_names_holds_that_batch(
    tmp_path: Path, ssd: bool, rows: int | None
) -> None:
    ids = torch.arange(IDS * 4)

    def step(budget: int | str, at: str) -> None:
        storage = (
            hb.Storage(host=budget, ssd=tmp_path / at)
            if ssd
            else hb.Storage(device=budget, host="64MB")
        )
        model = hb.EmbeddingCollection([hb.Table("a", 16, rows=rows)], storage=storage)
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
        model({"a": ids})["a"].sum().backward()
        optimizer.step()

    with small_logs(), pytest.raises(hb.StorageError, match="a batch needs room") as raised:
        step("600KB", "small")
    needed = raised.value.needed
    assert f"; {needed:,} would hold this batch alone, " in str(raised.value)
    with small_logs():
        step(needed, "enough")


def test_what_holds_no_row_says_that_a_batch_needs_more(tmp_path: Path) -> None:
    with pytest.raises(hb.StorageError, match=r"a batch needs more, as required\(batch\)"):
        storage = hb.Storage(host=10_000, ssd=tmp_path / "rows")
        model = hb.EmbeddingCollection([hb.Table("a", 16)], storage=storage)
        hb.optim.Adagrad(model.parameters(), lr=0.1)
        model({"a": torch.arange(2)})
