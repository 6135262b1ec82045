"""`lookahead` over loaders that fill tensors or containers again: refused, told, or trained as given."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from refills import FILLS, by_numpy, by_torch
from resolve.tiered_models import (
    Model,
    Once,
    adagrad,
    batches,
    expected,
    pinned,
    step,
    storage,
)
from torch import Tensor

import hotbed as hb
from hotbed.errors import InputError

COUNT = 6  # batches of a loader that fills its tensors again

# A batch that is filled while the loop has it is told of by its forward, before the next is refused.
pytestmark = pytest.mark.filterwarnings("ignore:A batch was changed after look-ahead:UserWarning")


def _refilling(count: int, fill: Callable[[Tensor, Tensor], None], shared: bool) -> Iterator[Any]:
    buffer = {name: values.clone() for name, values in batches(1)[0].items()}
    if shared:
        for values in buffer.values():
            values.share_memory_()
    for batch in batches(count):
        for name, values in batch.items():
            fill(buffer[name], values)
        yield buffer


def _use_behind(
    data: Iterator[Any], model: Model, use: Callable[[Any], Any], **options: Any
) -> None:
    """Uses each batch, and asks for the next when look-ahead has read two beyond it."""
    loader = Once(data)
    for at, batch in enumerate(hb.lookahead(loader, model, depth=2, **options)):
        use(batch)
        deadline = time.monotonic() + 60
        while loader.read < min(at + 3, COUNT):
            assert time.monotonic() < deadline, f"{loader.read} batches were read"
            time.sleep(0.001)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fill", FILLS)
def test_a_loader_that_fills_its_tensors_again_is_refused(
    fill: Callable[[Tensor, Tensor], None], shared: bool
) -> None:
    model = Model(storage())
    optimizer = adagrad(model)
    with pytest.raises(
        InputError, match=r"feature '(item|user)'.*new ones for each batch"
    ) as raised:
        _use_behind(
            _refilling(COUNT, fill, shared), model, lambda batch: step(model, optimizer, batch)
        )
    assert pinned(model) == 0, raised  # whoever keeps the error keeps no rows
    model = Model(storage())
    optimizer = adagrad(model)
    ahead = hb.lookahead(_refilling(COUNT, fill, shared), model, depth=0)
    assert [step(model, optimizer, batch) for batch in ahead] == expected(batches(COUNT))


def test_a_batch_that_is_filled_while_the_loop_has_it_is_told_of() -> None:
    """With a horizon of one nothing is read too early, but what the loop has changes in its hands."""
    model = Model(storage())
    optimizer = adagrad(model)
    data = batches(3)
    copies = [{name: values.clone() for name, values in batch.items()} for batch in data]
    with pytest.warns(UserWarning, match=r"feature 'item'.*uses what it was given"):
        losses = []
        for at, batch in enumerate(hb.lookahead(data, model, depth=1, horizon=1)):
            by_numpy(batch["item"], copies[(at + 1) % 3]["item"])
            losses.append(step(model, optimizer, batch))
    changed = [dict(batch) for batch in batches(3)]
    for at, batch in enumerate(changed):
        batch["item"] = batches(3)[(at + 1) % 3]["item"]
    assert losses == expected(changed)


class Renewing:
    """Gives the same container again and again, with other tensors in it."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count

    def __iter__(self) -> Iterator[Any]:
        whole: Any = {} if self.kind == "dict" else [None]
        for batch in batches(self.count):
            if self.kind == "dict":
                whole.clear()
                whole.update(batch)
            else:
                whole[0] = batch
            yield whole


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_a_loader_that_fills_its_containers_again_is_refused(kind: str) -> None:
    model = Model(storage())
    optimizer = adagrad(model)
    with pytest.raises(InputError, match="changed after look-ahead had read it"):
        _use_behind(
            iter(Renewing(kind, COUNT)),
            model,
            lambda batch: step(model, optimizer, batch if kind == "dict" else batch[0]),
        )


def test_what_a_function_makes_of_tensors_that_are_filled_again_is_refused() -> None:
    model = Model(storage())

    def inputs(batch: Any) -> Any:
        return {name: batch[name] % 100 for name in ("item", "user")}

    with pytest.raises(InputError, match="changed after look-ahead had read it"):
        _use_behind(
            _refilling(COUNT, by_torch, False),
            model,
            lambda batch: model.embeddings(inputs(batch)),
            inputs=inputs,
        )


def test_ids_of_a_frozen_table_that_are_filled_again_are_refused() -> None:
    model = Model(storage())
    for name in ("item", "user"):
        model.embeddings.parameter(name).requires_grad_(False)
    with pytest.raises(InputError, match="changed after look-ahead had read it"):
        _use_behind(_refilling(COUNT, by_torch, False), model, model)


@pytest.mark.parametrize("why", ["evaluation", "unknown inputs"])
def test_where_nothing_can_be_announced_nothing_is_read_ahead(why: str) -> None:
    """And so a loader may fill its tensors again."""
    model = Model(storage())
    names = {"item": "item", "user": "user"} if why == "evaluation" else {"item": "i", "user": "u"}
    if why == "evaluation":
        model.eval()

    def loader() -> Iterator[Any]:
        for batch in _refilling(9, by_torch, False):
            yield {new: batch[name] for name, new in names.items()}

    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in hb.lookahead(loader(), model):
            seen.append([batch[new].clone() for new in names.values()])
    expected_ids = [[batch["item"], batch["user"]] for batch in batches(9)]
    assert all(
        torch.equal(a, b)
        for x, y in zip(seen, expected_ids, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_what_became_of_a_feature_that_is_none_any_more_is_told() -> None:
    model = Model(storage())
    optimizer = adagrad(model)
    data = [dict(batch) for batch in batches(6)]
    loader = Once(iter(data))
    with pytest.raises(InputError, match=r"had read it \(Feature 'item'.*[^.]\)\. A loader"):
        for at, batch in enumerate(hb.lookahead(loader, model, depth=2)):
            step(model, optimizer, batch)
            deadline = time.monotonic() + 60
            while loader.read < 3:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            data[at + 1]["item"] = torch.tensor([0.5])  # announced before the third was read
