"""Whatever changes rows tells their place before: of the rows that it changes, or that it may be any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_in import PLACES, collection, step
from torch import Tensor

import hotbed as hb
from hotbed.places.host.place import Memory
from hotbed.places.tiered.place import Tiered

Rows = dict[int, tuple[float, ...]]


def rows_now(place: Any) -> Rows:
    """Weights and states as they are stored, without a look through the table."""
    found: Rows = {}
    for ids, weights, states, steps in place.records(current=False):
        parts = [weights, *(states or ()), *(() if steps is None else (steps[:, None],))]
        rows = torch.cat([part.double() for part in parts], 1).tolist()
        found |= dict(zip(ids.tolist(), map(tuple, rows), strict=True))
    return found


class Listener:
    """Looks at all rows whenever it is told, and compares with when it was told last."""

    def __init__(self, place: Any) -> None:
        self.kinds: list[str] = []
        self._place = place
        self._before, self._named = rows_now(place), set[int]()
        self._any = True  # before the first time

    def told(
        self, kind: str, ids: Callable[[], Tensor] | None, slots: Callable[[], Tensor] | None
    ) -> None:
        self.look()
        self.kinds.append(kind)
        self._any = ids is None and slots is None
        self._named = set() if ids is None else {*ids().tolist()}
        if slots is not None:
            self._named = {self._place.core.id_of(slot) for slot in slots().tolist()}
        if kind in ("step", "fused", "erase"):
            assert not self._any

    def look(self) -> None:
        now = rows_now(self._place)
        came = now.keys() - self._before.keys()  # a new row is none that changes
        changed = {
            row for row in now.keys() | self._before if now.get(row) != self._before.get(row)
        }
        if not self._any:
            assert changed - came <= self._named, self.kinds
        self._before = now


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Listener]:
    """By place; those that a test puts in are told."""
    listeners: dict[Any, Listener] = {}

    def changing(
        self: Any,
        kind: str,
        *,
        ids: Callable[[], Tensor] | None = None,
        slots: Callable[[], Tensor] | None = None,
    ) -> None:
        if self in listeners:
            listeners[self].told(kind, ids, slots)

    for kind in (Memory, Tiered):
        monkeypatch.setattr(kind, "changing", changing)
    return listeners


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_changes_without_a_word(
    tmp_path: Path, heard: dict[Any, Listener], place: str, fused: bool, untouched: str
) -> None:
    tables = hb.Table("item", 3, 50), hb.Table("user", 3)
    model = collection(place, tmp_path, *tables)
    options: Any = {"fused": fused, "untouched": untouched, "lr": 0.1}
    optimizer = hb.optim.AdamW(model.parameters(), **options)
    live = {name: model.table(name) for name in model.tables}
    for table in live.values():
        table.allocate()
        heard[table.place] = Listener(table.place)
    chance = torch.Generator().manual_seed(0)
    for number in range(12):
        ids = torch.randint(0, 50, (9,), generator=chance)
        step(model, optimizer, {"item": ids, "user": ids * 5})
        match number:
            case 3:
                model.assign("item", ids, torch.ones(9, 3))
                model.assign("user", ids * 7, torch.ones(9, 3))
            case 5:
                assert model.erase("user", ids * 5)
            case 6:
                optimizer.load_state_dict(optimizer.state_dict())
            case 7:
                model.load_state_dict(model.state_dict())
            case 8 if place in ("memory", "budget"):
                model.parameter("item").sum()  # reading it brings rows up to date
            case 9:
                live["user"].forget_rows()
            case 10:
                live["item"].draw_again(7)
    for listener in heard.values():
        listener.look()
    kinds = heard[live["user"].place].kinds
    stepped = "fused" if fused else "step"
    assert kinds.count(stepped) == 12 or (fused and kinds.count("fused") == 11)
    assert {"write", "erase", "forget"} <= {*kinds}
    assert ("catch up" in kinds) == (untouched == "exact")


def test_what_goes_through_the_parameter_is_told_when_it_shows(
    heard: dict[Any, Listener], tmp_path: Path
) -> None:
    model = collection("memory", tmp_path, hb.Table("item", 3, 50))
    table = model.table("item")
    heard[table.place] = Listener(table.place)
    with torch.no_grad():
        model.parameter("item")[4] = 1.0
    assert float(model.lookup("item", [4])[0, 0]) == 1.0
    assert heard[table.place].kinds == ["handle"]
    model.lookup("item", [4])
    assert heard[table.place].kinds == ["handle"]
    model.parameter("item").data = torch.zeros(50, 3)
    assert not model.rows("item").values.any()
    assert heard[table.place].kinds == ["handle", "write"]
    hb.optim.SGD(model.parameters(), lr=0.1)
    assert heard[table.place].kinds == ["handle", "write", "states"]
    model.parameter("item").data.add_(1.0)  # which torch does not count
    assert heard[table.place].kinds == ["handle", "write", "states"]
