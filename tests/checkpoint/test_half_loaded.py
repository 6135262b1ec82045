"""A load that fails after it has changed something: the model refuses to go on until a load succeeds."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.small_models import Model, batch_of, everything, made, optimizer_of, same, train
from checkpoint.whole_checkpoints import names_in
from kept_in import PLACES

import hotbed as hb
from hotbed.checkpoint import CheckpointError, DamagedError, restoring
from hotbed.errors import TableError
from hotbed.table.live import LiveTable
from hotbed.table.sparse_gradient import plain_access

ROWS = "rows-0-0.safetensors"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a trained model, one bit of whose last file of rows is flipped."""
    monkeypatch.setattr("hotbed.checkpoint.rows.FILE_BYTES", 1)
    model, optimizer = made("memory", tmp_path, "Adam", untouched="exact")
    train(model, optimizer, range(3))
    saved = Path(hb.save(tmp_path / "run", model, optimizer, step=3).path)
    flip(last_file(saved))
    return tmp_path / "run"


def last_file(saved: Path) -> Path:
    return saved / "rows-0-1.safetensors"


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)


def half_loaded(run: Path, model: Any, optimizer: Any = None) -> None:
    with pytest.raises(CheckpointError, match="is damaged.* The model is half loaded: it refuses"):
        hb.load(run, model, optimizer)


USES: dict[str, Callable[[Model, Any, Path], Any]] = {
    "forward": lambda model, optimizer, run: model(batch_of(3)),
    "evaluation": lambda model, optimizer, run: model.eval()(batch_of(3)),
    "without gradients": lambda model, optimizer, run: torch.no_grad()(model)(batch_of(3)),
    "step": lambda model, optimizer, run: optimizer.step(),
    "save": lambda model, optimizer, run: hb.save(run, model, optimizer, step=4, keep=1),
    "save of weights": lambda model, optimizer, run: hb.save(run, model, step=4, states=False),
    "state_dict": lambda model, optimizer, run: model.state_dict(),
    "states": lambda model, optimizer, run: optimizer.state_dict(),
    "rows": lambda model, optimizer, run: model.embeddings.rows("user"),
    "lookup": lambda model, optimizer, run: model.embeddings.lookup("item", [1]),
    "assign": lambda model, optimizer, run: model.embeddings.assign("user", [1], torch.ones(1, 3)),
    "erase": lambda model, optimizer, run: model.embeddings.erase("user", [1]),
}
COPIES: dict[str, Callable[[Model, Any, Path], Any]] = {
    "copy": lambda model, optimizer, run: copy.deepcopy(model),
    "pickle": lambda model, optimizer, run: pickle.dumps(model),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_model_that_is_half_loaded_is_neither_used_nor_saved(run: Path, place: str) -> None:
    """And training goes on with the same bits when the file was repaired."""
    saved = Path(hb.checkpoint.latest(run) or "")
    other, its_optimizer = made("memory", run.parent, "Adam", untouched="exact")
    losses = train(other, its_optimizer, range(5))
    model, optimizer = made(place, run.parent, "Adam", untouched="exact")
    half_loaded(run, model, optimizer)
    for use in (USES | COPIES if place == "memory" else USES).values():
        with pytest.raises(TableError, match=r"half loaded: hotbed.load of .*is damaged: bytes"):
            use(model, optimizer, run)
    assert names_in(run) == [saved.name]
    half_loaded(run, model.train(), optimizer)
    with pytest.raises(TableError, match="half loaded"):
        model(batch_of(3))
    flip(last_file(saved))
    hb.load(run, model, optimizer)
    assert train(model, optimizer, range(3, 5)) == losses[3:]
    assert same(everything(model, optimizer), everything(other, its_optimizer))


def test_an_optimizer_that_is_made_afterwards_does_not_step_it(run: Path) -> None:
    model = Model("memory", run.parent)
    half_loaded(run, model)
    optimizer = optimizer_of(model, "Adam")
    with pytest.raises(TableError, match="half loaded"):
        optimizer.step()
    with pytest.raises(TableError, match="half loaded"):
        model(batch_of(3))


@pytest.mark.parametrize("fused", [False, True])
def test_a_forward_before_it_changes_no_row_after_it(tmp_path: Path, fused: bool) -> None:
    model = hb.Embedding(20, 3)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1, fused=fused)
    ids = torch.arange(5)
    for _ in range(2):  # the first of a fused one waits for the step
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = Path(hb.save(tmp_path, model, optimizer, step=2).path)
    flip(saved / ROWS)
    vectors = model(ids)
    half_loaded(tmp_path, model, optimizer)
    with plain_access():
        before = model.weight.detach().clone()
    with pytest.raises(TableError, match="half loaded"):
        vectors.sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    with plain_access():
        assert torch.equal(model.weight, before)
    flip(saved / ROWS)
    hb.load(tmp_path, model, optimizer)
    model(ids).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_the_parameter_of_a_static_table_hands_out_no_rows(tmp_path: Path, untouched: str) -> None:
    """And takes none, from anybody who has it already."""
    model = hb.Embedding(20, 3)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1, untouched=untouched)
    saved = Path(hb.save(tmp_path, model, optimizer, step=2).path)
    weight = model.weight
    before = weight.detach().clone()
    flip(saved / ROWS)
    half_loaded(tmp_path, model, optimizer)
    uses: list[Callable[[], Any]] = [
        lambda: weight.data,
        lambda: weight.detach(),
        lambda: weight[0],
        lambda: weight + 1,
        lambda: weight.tolist(),
        lambda: weight.untyped_storage(),
        lambda: torch.equal(weight, before),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), weight),
        lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
        lambda: torch.nn.Embedding.from_pretrained(weight),
        lambda: torch.nn.init.zeros_(weight),
        lambda: setattr(weight, "data", before),
        lambda: copy.deepcopy(weight),
        lambda: pickle.dumps(weight),
        lambda: hb.EmbeddingCollection.from_layers([model]).rows("0"),
        lambda: model.reset_parameters(),
    ]
    for use in uses:
        with pytest.raises(TableError, match=r"half loaded: hotbed.load of .*is damaged: bytes"):
            use()
    assert "half loaded" in repr(weight) and "half loaded" in f"{weight}"
    model.cpu()
    optimizer.zero_grad()
    assert weight.grad is None and weight.shape == (20, 3)
    flip(saved / ROWS)
    hb.load(tmp_path, model, optimizer)
    assert model.weight is weight and torch.equal(weight, before)
    assert "Parameter" in repr(weight)


@pytest.mark.parametrize("rows", [None, 20])
@pytest.mark.parametrize("kind", [hb.Embedding, hb.EmbeddingBag])
def test_modules_of_one_table(tmp_path: Path, kind: Any, rows: int | None) -> None:
    model = kind(rows, 3) if rows else kind(None, 3)
    ids = torch.tensor([[1, 2], [3, 4]])
    before = model(ids)
    saved = Path(hb.save(tmp_path / "run", model, step=3).path)
    flip(saved / ROWS)
    half_loaded(tmp_path / "run", model)
    with pytest.raises(TableError, match="half loaded"):
        model(ids)
    with pytest.raises(TableError, match="half loaded"):
        hb.save(tmp_path / "run", model, step=4, keep=1)
    flip(saved / ROWS)
    hb.load(tmp_path / "run", model)
    assert torch.equal(model(ids), before)


def no_room(*given: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*given: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("fail", "says"), [(no_room, "No space"), (interrupted, "KeyboardInt")])
def test_whatever_ends_the_load(
    run: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[..., None], says: str
) -> None:
    flip(last_file(Path(hb.checkpoint.latest(run) or "")))
    model, optimizer = made("memory", run.parent, "Adam", untouched="exact")
    with monkeypatch.context() as patch, pytest.raises((CheckpointError, KeyboardInterrupt)):
        patch.setattr(LiveTable, "write", fail)
        hb.load(run, model, optimizer)
    with pytest.raises(TableError, match=f"half loaded: hotbed.load of .*{says}"):
        model(batch_of(3))
    hb.load(run, model, optimizer)
    train(model, optimizer, range(3, 4))


def test_dense_layers_of_another_shape(tmp_path: Path) -> None:
    """Torch copies those that fit."""
    model, optimizer = made("memory", tmp_path)
    hb.save(tmp_path / "run", model, optimizer, step=0)
    model.top = torch.nn.Linear(7, 2)
    with pytest.raises(CheckpointError, match="size mismatch.* is half loaded"):
        hb.load(tmp_path / "run", model)
    with pytest.raises(TableError, match="half loaded"):
        model(batch_of(3))


@pytest.mark.parametrize(
    "options",
    [{"loader": [hb.train.Position()] * 2}, {"scheduler": hb.train.Position()}],
    ids=["loaders", "schedulers"],
)
def test_what_is_refused_before_anything_has_changed_changes_nothing(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model, optimizer = made("memory", tmp_path)
    hb.save(tmp_path / "run", model, optimizer, step=7, loader=hb.train.Position())
    other, its_optimizer = made("memory", tmp_path)
    train(other, its_optimizer, range(2))
    before = everything(other, its_optimizer)
    with pytest.raises(CheckpointError, match="were given") as error:
        hb.load(tmp_path / "run", other, its_optimizer, **options)
    assert "half loaded" not in str(error.value)
    assert same(everything(other, its_optimizer), before)
    other.extra = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match="has other tensors than"):
        hb.load(tmp_path / "run", other, its_optimizer)
    assert its_optimizer.param_groups[0]["lr"] == 0.05
    train(other, its_optimizer, range(2, 3))


@pytest.mark.parametrize("fault", ["missing", "shorter", "longer", "a folder"])
def test_files_that_cannot_be_whole_change_nothing(tmp_path: Path, fault: str) -> None:
    model, optimizer = made("memory", tmp_path)
    saved = hb.save(tmp_path / "run", model, optimizer, step=0)
    train(model, optimizer, range(2))
    before = everything(model, optimizer)
    rows = Path(saved.path) / ROWS
    contents = rows.read_bytes()
    rows.unlink()
    if fault == "a folder":
        rows.mkdir()
    elif fault != "missing":
        rows.write_bytes(contents[:-1] if fault == "shorter" else contents + b"0")
    with pytest.raises(DamagedError) as error:
        hb.load(tmp_path / "run", model, optimizer)
    assert str(rows) in str(error.value) and "half loaded" not in str(error.value)
    assert same(everything(model, optimizer), before)
    train(model, optimizer, range(2, 3))


def test_rows_that_are_behind_an_optimizer_that_is_not_given_change_nothing(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam", untouched="exact")
    train(model, optimizer, range(3))
    hb.save(tmp_path / "run", model, optimizer, step=3)
    train(model, optimizer, range(3, 5))
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError, match="Give load its optimizer") as error:
        hb.load(tmp_path / "run", model)
    assert "half loaded" not in str(error.value)
    assert same(everything(model, optimizer), before)
    train(model, optimizer, range(5, 6))


def test_a_forward_that_waits_for_the_load_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made("memory", run.parent, "Adam", untouched="exact")
    told: list[str] = []
    begun = threading.Event()

    def look_up() -> None:
        begun.set()
        try:
            model(batch_of(3))
        except TableError as error:
            told.append(str(error))

    other = threading.Thread(target=look_up)
    take = restoring.Loading._take

    def take_beside(*given: Any) -> None:
        if not begun.is_set():
            other.start()
            assert begun.wait(60)
        take(*given)

    monkeypatch.setattr(restoring.Loading, "_take", take_beside)
    half_loaded(run, model, optimizer)
    other.join(60)
    assert len(told) == 1 and "half loaded" in told[0]


def test_tables_that_the_load_leaves_alone_keep_their_rows(tmp_path: Path) -> None:
    model = hb.EmbeddingCollection([hb.Table("a", 2), hb.Table("b", 2)], seed=0)
    model.assign("b", [1], torch.ones(1, 2))
    folder = Path(hb.checkpoint.write(tmp_path, {"a": [(torch.arange(3), torch.ones(3, 2))]}))
    flip(folder / ROWS)
    with pytest.raises(CheckpointError, match="half loaded"):
        hb.load(tmp_path, model, strict=False)
    with pytest.raises(TableError, match="'a' is half loaded"):
        model.rows("a")
    assert bool((model.rows("b").values == 1).all())
