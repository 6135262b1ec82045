"""`lookahead`: batches of every kind, and batches that are not as they should be."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from resolve.tiered_models import (
    Model,
    Once,
    adagrad,
    assert_same_rows,
    batches,
    expected,
    lookahead_threads,
    pinned,
    prepared,
    step,
    storage,
    train,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import hotbed as hb

# -- what a batch is ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    label: torch.Tensor
    features: dict[str, torch.Tensor]


def dressed(kind: str, batch: dict[str, torch.Tensor]) -> Any:
    features = {name: batch[name] for name in ("user", "item")}
    return {
        "dict": batch,
        "nested": {"label": batch["label"], "inputs": {"sparse": features}},
        "tuple": (batch["label"], [features]),
        "dataclass": Sample(batch["label"], features),
        "inputs": [features["user"], features["item"]],
    }[kind]


def undressed(kind: str, batch: Any) -> Any:
    if kind == "inputs":
        return {"item": batch[1], "user": batch[0]}
    return {
        "dict": lambda: batch,
        "nested": lambda: batch["inputs"]["sparse"],
        "tuple": lambda: batch[1][0],
        "dataclass": lambda: batch.features,
    }[kind]()


@pytest.mark.parametrize("kind", ["dict", "nested", "tuple", "dataclass", "inputs"])
def test_batches_of_any_kind(kind: str) -> None:
    data = batches(6)
    model = Model(storage())
    optimizer = adagrad(model)
    inputs = (lambda batch: undressed(kind, batch)) if kind == "inputs" else None
    ahead = hb.lookahead([dressed(kind, batch) for batch in data], model, inputs=inputs)
    losses = [step(model, optimizer, undressed(kind, batch)) for batch in ahead]
    assert losses == expected(data)
    assert prepared(model.embeddings.stats()) == 6


def test_features_that_are_not_found_are_said_once() -> None:
    data = batches(5)
    model = Model(storage())
    optimizer = adagrad(model)
    with pytest.warns(UserWarning, match="'embeddings'.*inputs=") as caught:
        losses = [
            step(model, optimizer, {"item": item, "user": user})
            for item, user in hb.lookahead([(b["item"], b["user"]) for b in data], model)
        ]
    assert len(caught) == 1 and caught[0].filename == __file__
    assert losses == expected(data)


def test_an_error_of_inputs_comes_at_its_turn() -> None:
    data = batches(6)
    model = Model(storage())

    def inputs(batch: Any) -> Any:
        if batch is data[3]:
            raise KeyError("no such thing")
        return {name: batch[name] for name in ("item", "user")}

    seen = []
    with pytest.raises(KeyError, match="no such thing"):
        for batch in hb.lookahead(data, model, inputs=inputs):
            seen.append(batch)
    assert len(seen) == 3


class Rows(Dataset[Any]):
    def __init__(self, data: list[dict[str, torch.Tensor]]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return self.data[at]


@pytest.mark.process
def test_a_data_loader_with_workers() -> None:
    data = batches(8)
    model = Model(storage())
    optimizer = adagrad(model)
    loader = DataLoader(Rows(data), batch_size=None, num_workers=2)
    ahead = hb.lookahead(loader, model)
    losses = train(model, optimizer, ahead) + train(model, optimizer, ahead)
    assert losses == expected(data + data)
    assert prepared(model.embeddings.stats()) == 16
    for _ in ahead:
        break


class Several(torch.nn.Module):
    """Two tiered collections and a plain one; the second is looked up last."""

    def __init__(self, tiered: bool) -> None:
        super().__init__()
        kinds = {"a": storage() if tiered else None, "b": storage() if tiered else None, "c": None}
        for name, tiers in kinds.items():
            table = hb.Table(f"{name}_id", 3, None if name == "b" else 300)
            self.add_module(name, hb.EmbeddingCollection([table], seed=1, storage=tiers))

    def forward(self, batch: Any) -> torch.Tensor:
        features = {name: {f"{name}_id": batch[name]} for name in "abc"}
        return sum(getattr(self, n)(f)[f"{n}_id"].cos().sum() for n, f in features.items())


def test_several_collections() -> None:
    data = [{"a": b["item"], "b": b["user"], "c": b["item"]} for b in batches(10)]
    plain = Several(False)
    losses = train(plain, adagrad(plain), data)
    model = Several(True)

    def inputs(batch: Any) -> Any:
        return {name: {f"{name}_id": batch[name]} for name in "ab"}

    assert train(model, adagrad(model), hb.lookahead(data, model, inputs=inputs)) == losses
    assert [prepared(model.get_submodule(n).stats()) for n in "ab"] == [10, 10]


# -- batches that are not as they should be ----------------------------------------------------------


def test_a_bad_id_is_an_error_of_its_forward() -> None:
    data = batches(8)
    data[3]["item"][5] = 300
    plain, model = Model(), Model(storage())
    optimizers = adagrad(plain), adagrad(model)
    for at, batch in enumerate(hb.lookahead(data, model, depth=2)):
        if at == 3:
            with pytest.raises(hb.IdError) as wanted:
                plain(batch)
            with pytest.raises(hb.IdError) as found:
                model(batch)
            assert str(found.value) == str(wanted.value)
        else:
            assert step(plain, optimizers[0], batch) == step(model, optimizers[1], batch)
    assert_same_rows(model, plain)


@pytest.mark.filterwarnings("ignore:The budget holds")
def test_a_batch_too_large_for_the_budget_says_what_suffices() -> None:
    data = [*batches(4), *batches(2, size=900), *batches(4)]
    device = 30_000
    messages = []
    while True:
        model = Model(storage(device))
        try:
            losses = train(model, adagrad(model), hb.lookahead(data, model))
            break
        except hb.StorageError as error:
            messages.append(str(error))
            assert pinned(model) == 0 and lookahead_threads() == []
            assert f"Raise Storage(device={device:,}) to at least " in str(error)
            device = int(str(error).split("at least ")[-1].split()[0].replace(",", ""))
    assert len(messages) == 1 and device < 400_000
    assert losses == expected(data)


def test_a_budget_below_one_row_says_what_suffices() -> None:
    for sizes, name in (((1, 10**7), "device"), ((10**6, 1), "host")):
        budget = dict(zip(("device", "host"), sizes, strict=True))
        with pytest.raises(
            hb.StorageError, match=rf"Raise Storage\({name}=1\) to at least"
        ) as said:
            Model(hb.Storage(**budget)).embeddings({"item": [0], "user": [0]})
        budget[name] = int(str(said.value).split("at least ")[-1].split()[0].replace(",", ""))
        one = {"item": hb.Jagged(torch.tensor([7]), lengths=torch.tensor([1]))}
        one["user"] = hb.Jagged(one["item"].values[:0], lengths=torch.tensor([0]))
        model = Model(hb.Storage(**budget))
        assert model.embeddings(one)["item"].shape == (1, 4)
        budget[name] -= 1
        with pytest.raises(hb.StorageError, match="to at least"):
            Model(hb.Storage(**budget)).embeddings(one)


def test_a_full_host_says_so_and_loses_no_row() -> None:
    model = Model(hb.Storage(device=40_000, host=24_000))
    optimizer = adagrad(model)
    trained = []
    with pytest.raises(hb.StorageError, match=r"host tier is full.*Raise Storage\(host=") as full:
        for batch in hb.lookahead(batches(200), model, depth=1):
            step(model, optimizer, batch)
            trained.append(batch)
    assert len(trained) > 3 and pinned(model) == 0 and "ssd" in str(full.value)
    plain = Model()
    train(plain, adagrad(plain), trained)
    assert_same_rows(model, plain)


def test_look_ahead_that_does_not_fit_shortens_itself_and_says_so_once() -> None:
    data = batches(20, size=100)
    model = Model(storage(45_000))
    optimizer = adagrad(model)
    with pytest.warns(UserWarning, match=r"holds [0-3] batches.*depth=8") as caught:
        losses = train(model, optimizer, hb.lookahead(data, model, depth=8))
    assert len(caught) == 1 and caught[0].filename.endswith("tiered_models.py")
    assert losses == expected(data)
    assert model.embeddings.stats()["rows_evicted"] > 0


def test_slices_are_resolved_on_the_spot() -> None:
    data = batches(6)
    model = Model(storage())
    halves = [slice(0, 10), slice(10, 20)]
    optimizer = adagrad(model)
    losses = [
        step(model, optimizer, {name: ids[half] for name, ids in batch.items()})
        for batch in hb.lookahead(data, model)
        for half in halves
    ]
    assert losses == expected([{n: i[half] for n, i in b.items()} for b in data for half in halves])
    stats = model.embeddings.stats()
    assert (stats["batches"], stats["batches_unprepared"]) == (12, 12)


def _by_numpy(ids: Tensor) -> None:
    array = ids.numpy()
    array[:] = (array + 1) % 300


def _by_data(ids: Tensor) -> None:
    ids.data.add_(1).remainder_(300)


@pytest.mark.parametrize("change", [lambda ids: ids.add_(1).remainder_(300), _by_numpy, _by_data])
def test_a_batch_that_was_changed_in_place_is_another(change: Callable[[Tensor], object]) -> None:
    data = batches(6)
    copies = [{n: i.clone() for n, i in b.items()} for b in data]
    model = Model(storage())
    optimizer = adagrad(model)
    losses = []
    with pytest.warns(UserWarning, match=r"changed after .* \(feature 'item'\).*uses what") as said:
        for at, batch in enumerate(hb.lookahead(data, model)):
            if at % 2:
                change(batch["item"])
                change(copies[at]["item"])
            losses.append(step(model, optimizer, batch))
    assert len(said) == 1
    assert losses == expected(copies)
    assert model.embeddings.stats()["batches_unprepared"] == 3


def test_skipped_batches_leave_no_rows() -> None:
    data = batches(12)
    plain, model = Model(), Model(storage())
    optimizers = adagrad(plain), adagrad(model)
    for at, batch in enumerate(hb.lookahead(data, model, depth=3)):
        if at % 3:
            continue
        assert step(plain, optimizers[0], batch) == step(model, optimizers[1], batch)
        assert model.embeddings.count("user") == plain.embeddings.count("user")
    assert_same_rows(model, plain)
    assert pinned(model) == 0


def test_seek_passes_over_batches_of_the_next_iteration_alone() -> None:
    model, data = Model(storage()), batches(5)
    ahead = hb.lookahead(data, model)
    ahead.seek(1, 3)
    assert [id(batch) for batch in ahead] == [id(batch) for batch in data[3:]]
    assert len(list(ahead)) == 5


def test_a_loader_that_can_seek_is_asked_to() -> None:
    class Seeking(list[Any]):
        def seek(self, epoch: int, batches: int) -> None:
            self.asked = epoch, batches

    loader = Seeking(batches(3))
    ahead = hb.lookahead(loader, Model(storage()))
    ahead.seek(2, 1)
    assert loader.asked == (2, 1)
    assert len(list(ahead)) == 3  # it passes over batches itself, or not


def test_without_a_horizon_128_small_batches_are_known_and_no_more() -> None:
    model = Model(storage())
    adagrad(model)
    small = {name: values[:1] for name, values in batches(1)[0].items()}
    loader = Once(dict(small) for _ in range(400))
    ahead = iter(hb.lookahead(loader, model))
    next(ahead)
    deadline = time.monotonic() + 60
    while loader.read < 129:
        assert time.monotonic() < deadline, loader.read
        time.sleep(0.001)
    time.sleep(0.1)
    assert loader.read == 129
    assert len(list(ahead)) == 399
