"""What ranks give is compared before anything changes: arguments, parameters, codecs, kinds of sharding."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from dist.worlds import run
from torch import Tensor, nn

import hotbed as hb
from hotbed import _core
from hotbed.dist import Plan, Sharding
from hotbed.dist.row_codecs import CODECS, ByRow
from hotbed.sharding import Extent, Kept, Shape


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = hb.EmbeddingCollection([hb.Table("a", 4, 21)], seed=1)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.two(self.one(self.tables({"a": ids})["a"]))
        return found


def refused(kind: type[Exception], words: str, call: Any) -> None:
    with pytest.raises(Exception) as caught:
        call()
    assert isinstance(caught.value, kind) and words in str(caught.value), repr(caught.value)


def other_groups(rank: int, world: int) -> None:
    model = hb.distribute(Model())
    order = (model.one, model.two) if rank == 0 else (model.two, model.one)
    groups = [
        {"params": [*one.parameters()], "lr": lr} for one, lr in zip(order, (0.1, 1), strict=True)
    ]
    groups[0]["params"] += [*model.tables.parameters()]
    optimizer = hb.optim.SGD(groups, lr=0.1)
    model(torch.tensor([1, 2])).sum().backward()
    refused(hb.dist.PeerError, "dense parameters of group 0", optimizer.step)


def other_options_of_ddp(rank: int, world: int) -> None:
    ddp = {"find_unused_parameters": True} if rank else {}
    refused(hb.dist.PeerError, "find_unused_parameters", lambda: hb.distribute(Model(), ddp=ddp))


def other_timeout(rank: int, world: int) -> None:
    kind = hb.TableError if rank else hb.dist.PeerError
    wanted = -1 if rank else 20.0
    refused(kind, "timeout must be seconds", lambda: hb.distribute(Model(), timeout=wanted))


class Half(ByRow):
    size: Any = None

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return 2 * width if self.size is None else self.size

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        out.view(torch.float16).copy_(rows)

    def decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(encoded.view(torch.float16))


class Other(Half):
    pass


def other_codecs(rank: int, world: int) -> None:
    CODECS["half"] = Other() if rank else Half()
    refused(hb.dist.PeerError, "codec of rows", lambda: hb.distribute(Model(), rows="half"))
    CODECS["half"] = Half()
    CODECS["half"].size = 32 if rank else None  # type: ignore[attr-defined]
    refused(
        hb.dist.PeerError,
        "bytes of rows of 4 torch.float32",
        lambda: hb.distribute(Model(), rows="half"),
    )


def wrong_sizes(rank: int, world: int, size: Any) -> None:
    CODECS["half"] = Half()
    CODECS["half"].size = size  # type: ignore[attr-defined]
    for way in ("rows", "gradients"):
        wire: dict[str, Any] = {way: "half"}
        model = hb.distribute(Model(), **wire)
        optimizer = hb.optim.SGD(model.parameters(), lr=0.1)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()

        for _ in range(2):  # the group lives on
            refused(hb.TableError, "row_bytes(4, torch.float32) of the codec Half", step)


def other_arguments_of_save(rank: int, world: int, folder: str) -> None:
    model = hb.distribute(Model())
    optimizer = hb.optim.Adam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for words, given, more in [
        ("states=True on rank 0 and False on rank 1", optimizer, {"states": rank == 0}),
        ("step=3 on rank 0 and 4 on rank 1", optimizer, {"step": 3 + rank}),
        ("keep=None on rank 0 and 1 on rank 1", optimizer, {"keep": 1 if rank else None}),
        ("optimizer=[] on rank 0 and ['Adam'] on rank 1", optimizer if rank else None, {}),
    ]:
        options: dict[str, Any] = {"step": 1, **more}
        refused(
            hb.checkpoint.CheckpointError,
            words,
            lambda given=given, options=options: hb.save(folder, model, given, **options),
        )
    assert not Path(folder).exists()
    hb.save(folder, model, optimizer, step=1)
    words = "optimizer=['Adam'] on rank 0 and [] on rank 1"
    given = None if rank else optimizer
    refused(hb.checkpoint.CheckpointError, words, lambda: hb.load(folder, model, given))
    hb.load(folder, model, optimizer)  # nothing is half loaded


@pytest.mark.process
@pytest.mark.parametrize("of", [other_groups, other_options_of_ddp, other_timeout, other_codecs])
def test_arguments_differ(of: Any) -> None:
    run(2, of)


@pytest.mark.process
@pytest.mark.parametrize("size", [8.0, -1, 1 << 60])
def test_bytes_of_a_row_that_are_none(size: Any) -> None:
    run(2, wrong_sizes, size)


@pytest.mark.process
def test_arguments_of_save_and_load_differ(tmp_path: Path) -> None:
    run(2, other_arguments_of_save, str(tmp_path / "run"))


@dataclasses.dataclass(frozen=True)
class Kind(Sharding):
    """Rows by ``id % n``, but for what `fault_in` says."""

    fault_in: str = ""
    name: ClassVar[str] = "kind"

    def fault(self, table: Shape, world_size: int) -> str:
        return ""

    def extents(self, table: Shape, rows: int, world_size: int) -> list[Extent]:
        return [Extent(range(world_size), rows, table.dim)]

    def kept(self, table: Shape, rank: int, world_size: int) -> Kept | None:
        owns = None if table.rows is not None else (lambda ids: ids % world_size == rank)
        cut = (rank, world_size) if table.rows is not None else (0, 1)
        columns = {"half": (0, 2), "wide": (0, 7), "negative": (-2, 4), "empty": (2, 2)}
        return {
            "nobody": None,
            "text": "x",
            "huge": Kept(0, table.dim, 10**20 + rank, world_size),
            "everybody": Kept(0, table.dim),
        }.get(self.fault_in, Kept(*columns.get(self.fault_in, (0, table.dim)), *cut, owns))  # type: ignore[return-value]

    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        right = ids % world_size
        found: Any = {
            "swapped": (right + 1) % world_size,
            "rarely": torch.where((ids > 3000) & (ids < 3010), (right + 1) % world_size, right),
            "outside": right + 1,
            "list": right.tolist(),
            "short": right[1:],
        }.get(self.fault_in, right)
        return found

    def owner_rule(self, table: Shape) -> _core.OwnerRule | None:
        rules = {"undealt": None, "hashed": _core.OwnerRule.hash}
        return rules.get(self.fault_in, _core.OwnerRule.given)

    def described(self, table: Shape) -> tuple[str, str]:
        return "kind", "all"


CUTS = {
    "nobody": "to 0 ranks",
    "half": "cuts columns, too",
    "wide": "no part of 4 columns",
    "negative": "no part of 4 columns",
    "empty": "no part of 4 columns",
    "text": "must return a Kept",
    "huge": "first must be in [0, 2**63)",
    "hashed": "owner_rule() = OwnerRule.hash",
    "everybody": "to 2 ranks",
    "swapped": "and kept() does not",
    "outside": "outside [0, 2)",
    "list": "an int64 tensor",
    "short": "an int64 tensor",
    "undealt": "has no owner_rule()",
}


@dataclasses.dataclass(frozen=True)
class Copies(Kind):
    """Every rank keeps all rows."""

    name: ClassVar[str] = "copies"
    replicated: ClassVar[bool] = True
    fault_in: str = "everybody"

    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        return torch.full_like(ids, requester)

    def owner_rule(self, table: Shape) -> _core.OwnerRule | None:
        return None


def contradictions(rank: int, world: int, rows: int | None) -> None:
    tables = [hb.Table("a", 4, rows)]
    for fault, words in CUTS.items():
        model = hb.EmbeddingCollection(tables, seed=1)
        plan = Plan(tables, world, {"a": Kind(fault)})
        refused(hb.PlanError, words, lambda model=model, plan=plan: hb.distribute(model, plan))
    for kind in (Kind(), Copies()):
        model = hb.EmbeddingCollection(tables, seed=1)
        hb.distribute(model, Plan(tables, world, {"a": kind}))
        ids = torch.arange(9)
        whole = hb.EmbeddingCollection(tables, seed=1)
        assert torch.equal(model({"a": ids})["a"], whole({"a": ids})["a"])


def rarely_wrong(rank: int, world: int, rows: int | None) -> None:
    """An owner that is wrong for ids that no check has tried is refused where it is asked."""
    tables = [hb.Table("a", 4, rows)]
    model = hb.EmbeddingCollection(tables, seed=1)
    hb.distribute(model, Plan(tables, world, {"a": Kind("rarely")}))
    before = model.lookup("a", torch.arange(10))
    words = "says that rank 1 has id 3002, and kept() does not"
    for call in (
        lambda: model({"a": torch.arange(3002, 3009)}),
        lambda: model.assign("a", torch.arange(3002, 3009), torch.ones(7, 4)),
        lambda: model.lookup("a", torch.arange(3002, 3009)),
    ):
        refused(hb.PlanError, words, call)
    assert torch.equal(model.lookup("a", torch.arange(10)), before)


@pytest.mark.process
@pytest.mark.parametrize("rows", [None, 10**7])
def test_an_owner_that_is_wrong_for_few_ids(rows: int | None) -> None:
    run(2, rarely_wrong, rows)


@pytest.mark.process
@pytest.mark.parametrize("rows", [None, 10, 5000])
def test_kinds_of_sharding_that_contradict_themselves(rows: int | None) -> None:
    run(2, contradictions, rows)


def test_expected_rows_that_are_none() -> None:
    with pytest.raises(hb.PlanError, match="must be a dict of rows by table, not 3"):
        hb.plan([hb.Table("a", 4)], 2, expected_rows=3)


def two_models(rank: int, world: int) -> None:
    one, two = hb.distribute(Model()), hb.distribute(Model())
    optimizer = hb.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    (one(torch.tensor([1])) + two(torch.tensor([1]))).sum().backward()
    refused(hb.OptimizerError, "for each model that was distributed", optimizer.step)


@pytest.mark.process
def test_one_optimizer_over_two_models() -> None:
    run(2, two_models)
