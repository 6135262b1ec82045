"""A training that was stopped anywhere goes on from its latest checkpoint, and ends where it would have."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dist.pairwise import Case, covering
from kept_in import storage_of
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import hotbed as hb
from hotbed.data import CATEGORIES, CriteoLog, write_criteo_tsv
from hotbed.data.position import generators_of
from hotbed.train import Callback, Checkpoints, Position, Step, TrainingError, fit


class Killed(Exception):
    pass


class KilledAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: Step) -> None:
        if step.number == self.step:
            raise Killed


class Losses(Callback):
    def __init__(self) -> None:
        self.of: dict[int, float] = {}

    def on_step(self, step: Step) -> None:
        self.of[step.number] = float(step.loss)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "clicks.tsv"
    write_criteo_tsv(str(path), rows=330, seed=1)
    return path


def loader_of(kind: str, log: Path, model: Any) -> Any:
    data = CriteoLog(log, 32, shuffle=64, seed=5)
    match kind:
        case "log":
            return data
        case "look-ahead":
            return hb.lookahead(data, model)
        case "workers":
            return DataLoader(data, batch_size=None)
        case "look-ahead over workers":
            return hb.lookahead(DataLoader(data, batch_size=None), model)
        case "look-ahead over even":
            return hb.lookahead(hb.dist.even(data), model)
        case "slices over workers":
            return hb.dist.slices(DataLoader(data, batch_size=None))
    raise ValueError(kind)


def run(
    log: Path, folder: Path, place: str, kind: str, at: int | None, *, resume: bool
) -> tuple[dict[int, float], Any]:
    torch.manual_seed(0)
    torch.rand(7 if resume else 1)
    model = hb.models.DLRM(CATEGORIES, 4, 13, seed=1, storage=storage_of(place, folder))
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    position, losses = Position(), Losses()
    if resume:
        hb.load(folder / "run", model, optimizer, scheduler=scheduler, loader=position)
    saving = Checkpoints(folder / "run", optimizer, position, every=4, keep=2, scheduler=scheduler)
    callbacks = [losses, saving, *([KilledAt(at)] if at else [])]
    try:
        fit(
            model,
            loader_of(kind, log, model),
            optimizer,
            epochs=3,
            scheduler=scheduler,
            callbacks=callbacks,
            position=position,
        )
    except Killed:
        pass
    return losses.of, model


KINDS = [
    "log",
    "look-ahead",
    "workers",
    "look-ahead over workers",
    "look-ahead over even",
    "slices over workers",
]


CASES = covering({"kind": KINDS, "at": [5, 12, 30], "place": ["memory", "budget"]}, lambda *_: True)


@pytest.fixture(scope="module")
def whole(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """The losses and the model of a run that was never stopped, by where its rows lie and its loader."""

    @functools.cache
    def whole(place: str, kind: str) -> tuple[dict[int, float], Any]:
        return run(log, tmp_path_factory.mktemp("whole"), place, kind, None, resume=False)

    return whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_it_ends_as_one_that_was_never_stopped(
    tmp_path: Path, log: Path, whole: Callable[[str, str], Any], case: Case
) -> None:
    place, kind, at = case["place"], case["kind"], case["at"]
    expected, model = whole(place, kind)
    assert len(expected) == 33
    first, _ = run(log, tmp_path, place, kind, at, resume=False)
    assert max(first) == at
    second, other = run(log, tmp_path, place, kind, None, resume=True)
    assert min(second) == at // 4 * 4 + 1
    assert {**first, **second} == expected
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if not hasattr(mine, "hotbed_table"):
            assert torch.equal(mine, theirs)
    for name in model.embeddings.tables:
        mine, theirs = model.embeddings.rows(name), other.embeddings.rows(name)
        assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.values, theirs.values)
    assert len(list((tmp_path / "run").iterdir())) == 2


def test_any_other_loader_is_asked_for_what_was_done(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.append(int(batch["x"][0]))
            return self.layer(batch["x"]).squeeze(1)

    seen: list[int] = []
    batches = [{"x": torch.full((2, 1), float(n)), "label": torch.ones(2)} for n in range(5)]
    whole = Model()
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    position = Position(epoch=2, batch=3, steps=8, rows=16)
    result = fit(whole, batches, optimizer, epochs=3, position=position)
    assert seen == [3, 4, 0, 1, 2, 3, 4]
    assert (result.steps, position) == (7, Position(4, 0, 15, 30))


class Seeing(torch.nn.Linear):
    """A model that tells which batches it has seen."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__(1, 1)
        self.seen = seen

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(int(batch["x"][0]))
        return super().forward(batch["x"]).squeeze(1)


def test_fewer_batches_than_are_done_are_refused() -> None:
    model, position = Seeing([]), Position(epoch=1, batch=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [{"x": torch.full((2, 1), float(n)), "label": torch.ones(2)} for n in range(3)]
    with pytest.raises(
        TrainingError, match="Epoch 1: 3 of its batches are done, and the loader has 2"
    ):
        fit(model, batches[:2], optimizer, position=position)
    assert position == Position(epoch=1, batch=3) and not model.seen
    assert fit(model, batches, optimizer, position=position).steps == 0
    assert position == Position(epoch=2)


def test_checkpoints_stay_in_one_folder_wherever_the_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    model, position = Seeing([]), Position()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saving = Checkpoints("run", optimizer, position, every=1)
    monkeypatch.chdir(tmp_path / "there")
    batches = [{"x": torch.zeros(2, 1), "label": torch.ones(2)}] * 2
    fit(model, batches, optimizer, callbacks=[saving], position=position)
    assert [one.step for one in hb.checkpoint.list(tmp_path / "run")] == [1, 2]
    assert not any((tmp_path / "there").iterdir())


@pytest.mark.parametrize(
    "wrong",
    [{"every": 0}, {"every": 2.5}, {"every": True}, {"keep": 0}, {"keep": 1.5}, {"path": ""}],
)
def test_what_could_not_be_saved_is_told_before_the_first_step(wrong: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(ValueError, match="must be an integer|is empty"):
        Checkpoints(**{"path": "run", "optimizer": optimizer, "position": Position(), **wrong})


def test_batches_of_no_rows_have_their_place(tmp_path: Path) -> None:
    sizes = [2, 0, 2, 2, 0, 2]
    batches = [
        {"x": torch.full((n, 1), float(at)), "label": torch.ones(n)} for at, n in enumerate(sizes)
    ]

    def run(folder: Path, at: int | None) -> Position:
        model, position = Seeing(seen), Position()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if folder.exists():
            hb.load(folder, model, optimizer, loader=position)
        saving = Checkpoints(folder, optimizer, position, every=1)
        callbacks = [saving, *([KilledAt(at)] if at else [])]
        with contextlib.suppress(Killed):
            fit(model, batches, optimizer, epochs=2, callbacks=callbacks, position=position)
        return position

    for at in (2, 7):
        seen: list[int] = []
        assert run(tmp_path / str(at), at).steps == at
        assert run(tmp_path / str(at), None) == Position(3, 0, steps=8, rows=16)
        assert seen == 2 * [0, 2, 3, 5]


class Shuffled:
    """A loader that passes over batches itself, and draws its order when it is asked for the first."""

    passed = 0

    def seek(self, epoch: int, batches: int) -> None:
        self.passed = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order, passed, self.passed = torch.randperm(8).tolist(), self.passed, 0
        for number in order[passed:]:
            yield {"x": torch.full((2, 1), float(number)), "label": torch.ones(2)}


def test_a_loader_that_can_seek_goes_on_in_its_order(tmp_path: Path) -> None:
    def run(at: int | None) -> None:
        model, position = Seeing(seen), Position()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if (tmp_path / "run").exists():
            hb.load(tmp_path / "run", model, optimizer, loader=position)
        saving = Checkpoints(tmp_path / "run", optimizer, position, every=3)
        callbacks = [saving, *([KilledAt(at)] if at else [])]
        with contextlib.suppress(Killed):
            fit(model, Shuffled(), optimizer, epochs=2, callbacks=callbacks, position=position)

    torch.manual_seed(0)
    seen: list[int] = []
    for at in (3, 9, None):
        run(at)
    assert len(seen) == 16
    assert sorted(seen[:8]) == sorted(seen[8:]) == list(range(8))


def test_checkpoints_that_are_none(tmp_path: Path, log: Path) -> None:
    model = Seeing([])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saving = Checkpoints(tmp_path, optimizer, Position(), every=1)
    batches = [{"x": torch.ones(2, 1), "label": torch.ones(2)}]
    with pytest.raises(ValueError, match="Give fit the position that Checkpoints has"):
        fit(model, batches, optimizer, callbacks=[saving], position=Position())
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="shuffled by no seed has no place to go on from"):
        CriteoLog(log, 32, shuffle=64).seek(1, 2)


LASTING = {"num_workers": 1, "persistent_workers": True}


def test_all_generators_of_a_loader_are_found() -> None:
    data, one, other = [1, 2, 3, 4], torch.Generator(), torch.Generator()
    by_one = RandomSampler(data, generator=one)
    loaders = {
        DataLoader(data, shuffle=True, generator=one): [one],
        DataLoader(data, sampler=by_one, generator=other): [other, one],
        DataLoader(data, sampler=by_one, batch_size=None): [one],
        DataLoader(data, batch_sampler=BatchSampler(by_one, 2, False)): [one],
        DataLoader(data, shuffle=True): [],
    }
    for loader, generators in loaders.items():
        assert generators_of(loader) == generators
        assert generators_of(hb.dist.even(hb.dist.slices(loader))) == generators


@pytest.mark.parametrize(
    ("shuffle", "workers", "at"),
    [(False, {}, 7), (True, {}, 7), (True, LASTING, 12), (True, LASTING, 16)],
)
def test_a_plain_loader_goes_on_in_its_order(
    tmp_path: Path, shuffle: bool, workers: dict[str, Any], at: int
) -> None:
    """Whose order, and the seed of its workers, are drawn from torch's generator."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = torch.nn.Linear(2, 1), torch.nn.Dropout(0.5)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.layer(self.dropout(batch["x"])).squeeze(1)

    data = [{"x": torch.tensor([n, 1.0]), "label": torch.tensor(float(n % 2))} for n in range(16)]

    def run(folder: Path, at: int | None, *, resume: bool) -> list[torch.Tensor]:
        torch.manual_seed(0 if not resume else 9)
        model = Model()
        optimizer = torch.optim.Adam(model.parameters())
        position = Position()
        if resume:
            hb.load(folder, model, optimizer, loader=position)
        saving = Checkpoints(folder, optimizer, position, every=4)
        callbacks = [saving, *([KilledAt(at)] if at else [])]
        loader = DataLoader(data, batch_size=2, shuffle=shuffle, **workers)
        try:
            fit(model, loader, optimizer, epochs=3, callbacks=callbacks, position=position)
        except Killed:
            pass
        return [p.detach() for p in model.parameters()]

    expected = run(tmp_path / "whole", None, resume=False)
    run(tmp_path / "stopped", at, resume=False)
    for mine, theirs in zip(expected, run(tmp_path / "stopped", None, resume=True), strict=True):
        assert torch.equal(mine, theirs)


class Drawn(torch.utils.data.Dataset[Any]):
    """Samples with a part that is drawn anew each time, as negatives are."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        dense = torch.full((13,), number / 96) + torch.rand(13)
        ids = {name: torch.tensor(number % 7) for name in CATEGORIES}
        return {"dense": dense, "label": torch.tensor(float(np.random.rand() < 0.5)), **ids}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("at", [3, 7, 14])
def test_what_a_data_set_draws_is_drawn_again(tmp_path: Path, own: bool, at: int) -> None:
    """`own`: the order comes from a generator of the loader's own."""

    def run_to(folder: Path, at: int | None, resume: bool) -> dict[int, float]:
        torch.manual_seed(1)
        np.random.seed(1)
        model = hb.models.DLRM(CATEGORIES, 4, 13, seed=1)
        optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(5) if own else None
        loader = DataLoader(Drawn(), batch_size=16, shuffle=True, generator=generator)
        position, losses = Position(), Losses()
        if resume:
            hb.load(folder, model, optimizer, loader=position)
        saving = Checkpoints(folder, optimizer, position, every=1)
        callbacks = [losses, saving, *([KilledAt(at)] if at else [])]
        with contextlib.suppress(Killed):
            fit(model, loader, optimizer, epochs=3, callbacks=callbacks, position=position)
        return losses.of

    expected = run_to(tmp_path / "whole", None, False)
    first = run_to(tmp_path / "stopped", at, False)
    second = run_to(tmp_path / "stopped", None, True)
    assert min(second) == at + 1 and {**first, **second} == expected


class _AtEnd(Callback):
    def __init__(self, saving: Checkpoints) -> None:
        self.saving = saving

    def on_epoch(self, epoch: int) -> None:
        self.saving.save()


class _Seen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def forward(self, batch: Any) -> torch.Tensor:
        self.seen += batch["x"][:, 0].tolist()
        return self.layer(batch["x"]).squeeze(1)


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
def test_saved_at_the_end_of_an_epoch_the_next_order_is_another(own: bool, tmp_path: Path) -> None:
    data = [{"x": torch.tensor([float(n)]), "label": torch.tensor(float(n % 2))} for n in range(8)]

    def run(folder: Path, epochs: int, *, resume: bool = False) -> list[float]:
        torch.manual_seed(0)
        model, position = _Seen(), hb.train.Position()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(3) if own else None
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        if resume:
            hb.load(folder, model, optimizer, loader=position)
        saving = hb.train.Checkpoints(folder, optimizer, position)
        callbacks = [saving, _AtEnd(saving)]
        hb.train.fit(
            model, loader, optimizer, epochs=epochs, callbacks=callbacks, position=position
        )
        return model.seen

    whole = run(tmp_path / "whole", 3)
    assert run(tmp_path / "cut", 1) + run(tmp_path / "cut", 3, resume=True) == whole
