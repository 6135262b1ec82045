"""A full disk under a training: an error that says where and how much, and nothing lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resolve.small_logs import SEGMENT_BYTES, small_logs
from torch import Tensor

import hotbed as hb
from hotbed import _core

TIERS = {
    "host over ssd": {"host": 5_400_000},
    "device over host over ssd": {"device": 900_000, "host": 4_800_000},
}
Batch = dict[str, Tensor]


@pytest.fixture
def faults() -> Iterator[_core.IoFaults]:
    faults = _core.IoFaults()
    with small_logs(faults):
        yield faults


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "user": torch.randint(0, 10**9, (400,), generator=generator),
            "item": torch.randint(0, 8000, (400,), generator=generator),
        }
        for _ in range(count)
    ]


class Trained:
    """A collection and its optimizer, trained batch by batch."""

    def __init__(self, storage: hb.Storage | None) -> None:
        self.embeddings = hb.EmbeddingCollection(
            [hb.Table("user", 32), hb.Table("item", 32, rows=8000)], seed=0, storage=storage
        )
        self.optimizer = hb.optim.Adagrad(self.embeddings.parameters(), lr=0.1)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        vectors = self.embeddings(batch)
        sum(v.square().sum() for v in vectors.values()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {name: v.detach() for name, v in vectors.items()}


def assert_same(tiered: Trained, plain: Trained) -> None:
    for name in ("user", "item"):
        rows, expected = tiered.embeddings.rows(name), plain.embeddings.rows(name)
        assert torch.equal(rows.ids, expected.ids)
        assert torch.equal(rows.values, expected.values)


def check_error(error: hb.StorageError, folder: Path) -> None:
    assert isinstance(error, OSError)
    assert error.path.startswith(f"{folder}/rows-") and error.path in str(error)
    assert error.needed > 0 and str(error.needed) in str(error).replace(",", "")
    assert "No space left" in str(error) and re.search("[mM]ake space", str(error))


def fill_by_files(faults: _core.IoFaults) -> None:
    faults.full_after_preallocating(2 * SEGMENT_BYTES)


def fill_by_writes(faults: _core.IoFaults) -> None:
    faults.full_after_writing(SEGMENT_BYTES + SEGMENT_BYTES // 3)


def ahead(data: list[Batch], trained: Trained) -> Iterable[Batch]:
    return hb.lookahead(data, trained.embeddings, horizon=8)


def plainly(data: list[Batch], trained: Trained) -> Iterable[Batch]:
    return data


# How many batches a window brings up before the disk is full, and when that is, is up to the clock.
@pytest.mark.filterwarnings("ignore:The budget holds")
@pytest.mark.parametrize("loop", [plainly, ahead])
@pytest.mark.parametrize("fill", [fill_by_files, fill_by_writes])
@pytest.mark.parametrize("tiers", sorted(TIERS))
def test_training_goes_on_once_there_is_space(
    tmp_path: Path,
    faults: _core.IoFaults,
    tiers: str,
    fill: Callable[[_core.IoFaults], None],
    loop: Callable[[list[Batch], Trained], Iterable[Batch]],
) -> None:
    storage: Any = TIERS[tiers]
    tiered, plain = Trained(hb.Storage(**storage, ssd=tmp_path)), Trained(None)
    failures, again = 0, False
    fill(faults)
    for count, batch in enumerate(loop(batches(96), tiered)):
        if count >= 24 and failures == 6:
            break
        while True:
            try:
                vectors = tiered.step(batch)
                break
            except hb.StorageError as error:
                failures += 1
                check_error(error, tmp_path)
                assert_same(tiered, plain)  # of the batch nothing has happened yet
                if failures % 3 == 0:
                    faults.make_room()
        expected = plain.step(batch)
        assert all(torch.equal(vectors[name], v) for name, v in expected.items())
        if failures == 3 and not again:
            again = True
            fill(faults)  # the space that was made is used up, too
    assert failures == 6
    assert_same(tiered, plain)
    tiered.embeddings.group.tiers.release_spent()
    assert sum(tiered.embeddings.group.tiers.core.pinned()) == 0


def test_what_is_assigned_or_flushed_meets_a_full_disk(
    tmp_path: Path, faults: _core.IoFaults
) -> None:
    tiered, plain = Trained(hb.Storage(host=5_400_000, ssd=tmp_path)), Trained(None)
    ids, values = torch.arange(6000), torch.randn(6000, 32)
    for trained in (tiered, plain):
        trained.embeddings.assign("item", ids[:500], values[:500])
    fill_by_files(faults)
    with pytest.raises(hb.StorageError) as raised:
        tiered.embeddings.assign("item", ids, values)
    check_error(raised.value, tmp_path)
    # Some rows were written, each of them whole.
    now, first = (t.embeddings.lookup("item", ids) for t in (tiered, plain))
    assert bool(((now == values).all(1) | (now == first).all(1)).all())
    faults.make_room()
    for trained in (tiered, plain):
        trained.embeddings.assign("item", ids, values)
        trained.step(batches(1)[0])
    assert_same(tiered, plain)
    faults.full_after_preallocating(0)
    with pytest.raises(hb.StorageError) as raised:
        for _ in range(100):  # what is there has room for some
            tiered.step(batches(1)[0])
            plain.step(batches(1)[0])
            tiered.embeddings.flush()
    check_error(raised.value, tmp_path)
    assert_same(tiered, plain)
    faults.make_room()
    tiered.embeddings.flush()
    assert_same(tiered, plain)
