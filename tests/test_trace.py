"""What ran when."""

from __future__ import annotations

import threading

import pytest
import torch

import hotbed as hb
from hotbed import trace
from hotbed.trace import Trace


def test_totals_sum_the_spans_of_all_threads() -> None:
    with Trace() as taken:
        for start in (0, 10_000_000):
            taken.add("read", start, start + 2_500_000)
        thread = threading.Thread(target=taken.add, args=("read", 5, 1_000_005))
        thread.start()
        thread.join()
        with trace.span("step"):
            pass
        with pytest.raises(RuntimeError, match="Another trace"), Trace():
            pass
    with trace.span("after"):
        pass
    totals = taken.totals()
    assert totals["read"] == (3, 6.0)
    assert totals.keys() == {"read", "step"} and totals["step"][0] == 1


@pytest.mark.parametrize("storage", [None, hb.Storage(device="1MB", host="1MB")])
def test_a_lookup_says_when_it_resolves_and_pools(storage: hb.Storage | None) -> None:
    layer = hb.EmbeddingCollection([hb.Table("a", 4, 9)], storage=storage)
    with Trace() as taken:
        layer({"a": torch.tensor([1])})
    assert {name: count for name, (count, _) in taken.totals().items()} == {"resolve": 1, "pool": 1}
