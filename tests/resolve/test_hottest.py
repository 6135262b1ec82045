"""Which ids are used most: bounds that hold for any stream, and exact counts for short ones."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed as hb

COUNTED = 256


def collection(**features: str) -> hb.EmbeddingCollection:
    """Tables of which hardly any row fits where it computes."""
    storage = hb.Storage(device="200KB", host="40MB")
    return hb.EmbeddingCollection(
        [hb.Table("a", 4, padding_idx=-1), hb.Table("b", 4, rows=10_000)],
        features=features or {"a": "a"},
        storage=storage,
        seed=1,
    )


def train(embeddings: hb.EmbeddingCollection, optimizer: Any, batch: dict[str, Any]) -> None:
    vectors = torch.cat(list(embeddings(batch).values()), dim=1)
    vectors.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def check(embeddings: hb.EmbeddingCollection, name: str, true: Counter[int], stream: int) -> None:
    shown = embeddings.hottest(name, 2 * COUNTED)
    assert len(shown) == min(COUNTED, len(true)) == len({row for row, _, _ in shown})
    assert shown == sorted(shown, key=lambda used: (-used.uses, used.id))
    for row, uses, excess in shown:
        assert uses - excess <= true[row] <= uses
        assert excess <= stream / COUNTED
    missing = max((n for row, n in true.items() if row not in {s.id for s in shown}), default=0)
    assert missing <= shown[-1].uses <= max(stream / COUNTED, max(true.values()))
    assert embeddings.hottest(name, 3) == shown[:3]
    if len(true) <= COUNTED:
        assert all(excess == 0 for _, _, excess in shown)


@settings(max_examples=examples(25))
@given(
    st.integers(1, 12),
    st.sampled_from([200, 256, 257, 300, 3000, 10**9]),
    st.sampled_from([0.0, 1.05, 2.0]),
    st.integers(0, 2**32),
)
def test_bounds_hold_for_any_stream(batches: int, ids: int, skew: float, seed: int) -> None:
    embeddings = collection()
    optimizer = hb.optim.SGD(embeddings.parameters(), lr=0.1)
    random = np.random.default_rng(seed)
    true: Counter[int] = Counter()
    for _ in range(batches):
        draws = random.zipf(skew, (500, 3)) if skew else random.integers(0, ids, (500, 3))
        batch = torch.from_numpy(draws % ids)
        true.update(batch.flatten().tolist())
        train(embeddings, optimizer, {"a": batch})
    check(embeddings, "a", true, 1500 * batches)


def test_an_id_that_comes_late_and_often_is_found() -> None:
    embeddings = collection()
    optimizer = hb.optim.SGD(embeddings.parameters(), lr=0.1)
    for first in range(0, 20_000, 1000):
        train(embeddings, optimizer, {"a": torch.arange(first, first + 1000).view(-1, 1)})
    for first in range(0, 2000, 100):
        some = torch.cat([torch.full((400,), -7), torch.arange(first, first + 100)])
        train(embeddings, optimizer, {"a": some.view(-1, 1)})
    [(row, uses, excess)] = embeddings.hottest("a", 1)
    assert row == -7 and uses - excess <= 8000 <= uses and excess <= 20_000 / 500


def test_what_counts_as_a_use() -> None:
    embeddings = collection(x="a", y="a", z="b")
    optimizer = hb.optim.SGD(embeddings.parameters(), lr=0.1)
    batch = {
        "x": torch.tensor([[5, 5, -1], [6, -1, -1]]),  # -1 is padding
        "y": torch.tensor([[5], [7]]),
        "z": torch.tensor([[9], [9]]),
    }
    for _ in range(3):
        train(embeddings, optimizer, batch)
    embeddings.eval()
    embeddings(batch)
    embeddings.lookup("a", torch.tensor([6]))
    assert embeddings.hottest("a") == [(5, 9, 0), (6, 3, 0), (7, 3, 0)]
    assert embeddings.hottest("b") == [(9, 6, 0)]
    assert embeddings.hottest("b")[0].uses == 6
    # Rows that move do not change it; forgotten ones count no more.
    hb.optim.Adam(embeddings.parameters(), replace_state=True)
    embeddings.lookup("a", torch.tensor([6]))
    assert embeddings.hottest("b") == [(9, 6, 0)]
    embeddings.table("a").forget_rows()
    assert embeddings.hottest("a") == [] and embeddings.hottest("b") == [(9, 6, 0)]


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_that_look_ahead_brought_up_count_once(depth: int) -> None:
    embeddings = collection()
    optimizer = hb.optim.SGD(embeddings.parameters(), lr=0.1)
    loader = [{"a": torch.full((4, 1), at % 3)} for at in range(9)]
    for at, batch in enumerate(hb.lookahead(loader, embeddings, depth=depth)):
        if at == 4:
            continue  # no forward uses it
        train(embeddings, optimizer, batch)
    assert embeddings.hottest("a") == [(0, 12, 0), (2, 12, 0), (1, 8, 0)]


def test_how_many_are_wanted_is_a_count() -> None:
    embeddings = collection()
    optimizer = hb.optim.SGD(embeddings.parameters(), lr=0.1)
    train(embeddings, optimizer, {"a": torch.tensor([[3], [4], [3]])})
    assert embeddings.hottest("a", 0) == [] and embeddings.hottest("a", np.int64(1)) == [(3, 2, 0)]
    assert embeddings.hottest("a", 2**70) == [(3, 2, 0), (4, 1, 0)]
    for bad in (-1, True, 1.5, None, "2"):
        with pytest.raises(hb.TableError, match="count must be a count of ids, 0 or more, got"):
            embeddings.hottest("a", bad)
