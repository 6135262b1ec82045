"""A form of rows in messages that nobody knows of: one class and one entry add it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist.worlds import run
from torch import Tensor

import hotbed as hb
from hotbed.dist import CODECS, ByRow, Plan, Replicated, RowWise, TableWise

IDS = {"a": [[1, 2], [3, 3]], "b": [[7, 1], [0, 19]], "c": [[2, 5], [4, 5]]}


class Flipped(ByRow):
    """All bits the other way round, and one byte more a row."""

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return width * dtype.itemsize + 1

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        assert rows.data_ptr() % 8 == out.data_ptr() % 8 == 0
        out[:, 1:] = ~rows.view(torch.uint8)
        out[:, 0] = 7

    def decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        assert encoded.data_ptr() % 8 == out.data_ptr() % 8 == 0
        assert bool((encoded[:, 0] == 7).all())
        out.view(torch.uint8).copy_(~encoded[:, 1:])


class Halved(ByRow):
    """In float16. It cannot be hashed, as it can be compared."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return 2 * width

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        out.view(torch.float16).copy_(rows)

    def decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(encoded.view(torch.float16))


def made() -> hb.EmbeddingCollection:
    dtypes = {"a": torch.float32, "b": torch.float32, "c": torch.bfloat16}
    tables = [hb.Table(name, 4, 20, dtype=dtype) for name, dtype in dtypes.items()]
    return hb.EmbeddingCollection([*tables, hb.Table("d", 4)], seed=1)


def distributed(world: int, **wire: Any) -> hb.EmbeddingCollection:
    model = made()
    kinds = {"a": RowWise(), "b": TableWise(1), "c": RowWise(), "d": Replicated()}
    hb.distribute(model, Plan(model.tables.values(), world, kinds), **wire)
    return model


def batch_of(rank: int) -> dict[str, Tensor]:
    own = {name: torch.tensor(ids)[:, rank : rank + 1] for name, ids in IDS.items()}
    return {**own, "d": torch.tensor([[rank], [100]])}


def trained(rank: int, world: int, **wire: str) -> list[Tensor]:
    model = distributed(world, **wire)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(3):
        vectors = torch.cat([*model(batch_of(rank)).values()], 1)
        (vectors**2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [vectors.detach(), *(model.rows(name).values for name in model.tables)]


def same_bits(rank: int, world: int) -> None:
    CODECS["flipped"] = Flipped()
    one, other = (
        trained(rank, world, **wire) for wire in ({"rows": "flipped", "gradients": "flipped"}, {})
    )
    assert all(map(torch.equal, one, other))


def in_half(rank: int, world: int) -> None:
    CODECS["halved"] = Halved()
    model, whole = distributed(world, rows="halved"), made()
    for name, vectors in model(batch_of(rank)).items():
        rows = whole.lookup(name, batch_of(rank)[name].flatten())
        assert torch.equal(vectors, rows.half().to(vectors.dtype)), name
        assert torch.equal(model.lookup(name, [3]), whole.lookup(name, [3])), name  # as stored


def others(rank: int, world: int) -> None:
    for wrong in ("float3", None, ("stored", "stored"), 8):
        for way in ("rows", "gradients"):
            with pytest.raises(hb.TableError, match=f"{way}: expected one of stored.*, got "):
                distributed(world, **{way: wrong})
    CODECS["halved"] = Halved()
    with pytest.raises(hb.dist.PeerError, match="codec of gradients is .*halved"):
        distributed(world, gradients="halved" if rank else "stored")


@pytest.mark.process
@pytest.mark.parametrize("what", [same_bits, in_half, others])
def test_rows_travel_in_a_form_of_a_test(what: Callable[[int, int], None]) -> None:
    run(2, what)
