"""Models of other libraries, as they come from PyPI: converted they train as before.

`make foreign` installs the libraries; `make test` the first three of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.worlds import run

import hotbed as hb

# One of them asks the network for a newer version of itself, others use what NumPy and torch have renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:hotbed.convert. each of:UserWarning"),
]

STEPS = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    module: str
    name: str
    converted: int
    batch: str = "batch"
    traced: bool = True
    """Whether its forward takes the batch, from which inputs can be found."""
    double: bool = False
    """In float64, as batch norms over small values make much of a last bit."""
    in_tiers: bool = True
    takes_batch: bool = True
    library: str | None = None
    """To be imported, of those that only `make foreign` installs."""

    def part(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(f"foreign.{self.module}"), name)
        return found

    def made(self) -> Any:
        if self.library is not None and importlib.util.find_spec(self.library) is None:
            pytest.skip(f"make foreign installs {self.library}")
        torch.manual_seed(0)
        model = self.part(self.name)()
        return model.double() if self.double else model

    def batch_of(self, number: int, samples: slice = slice(0, 32)) -> Any:
        given = self.part(self.batch)(number, samples)
        return in_double(given) if self.double else given

    def train(self, model: Any, optimizer: Any, samples: slice = slice(0, 32)) -> list[float]:
        losses = []
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = self.part("loss")(model, self.batch_of(number, samples))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def in_double(given: Any) -> Any:
    inputs, labels = given
    return {
        k: v.double() if v.is_floating_point() else v for k, v in inputs.items()
    }, labels.double()


CASES = [
    Case("deepctr_models", "deepfm", 8),
    Case("deepctr_models", "dcn", 8),
    Case("deepctr_models", "autoint", 8),
    Case("deepctr_models", "xdeepfm", 8),
    Case("deepctr_models", "din", 2, "sequences"),
    Case("rechub_models", "deepfm", 4, double=True),
    Case("rechub_models", "mmoe", 4, double=True),
    Case("rechub_models", "din", 2, double=True),
    Case("rechub_models", "dssm", 4, double=True),
    Case("recbole_models", "bpr", 2, traced=False, takes_batch=False),
    Case("recbole_models", "neumf", 4, traced=False, takes_batch=False),
    Case("recbole_models", "sasrec", 1, traced=False, in_tiers=False),
    Case("fuxictr_models", "deepfm", 7, library="fuxictr"),
    Case("widedeep_models", "wide_deep", 5, library="pytorch_widedeep"),
    Case("torchrec_models", "clicks", 2, traced=False, library="torchrec"),
    Case("huggingface_models", "bert", 1, library="transformers"),
]
ON_RANKS = [*CASES[:3], CASES[9], CASES[10], *(case for case in CASES if case.library)]


def convert(case: Case, storage: hb.Storage | None = None, *, traced: bool) -> tuple[Any, Any]:
    """Return a model and its optimizer."""
    model = case.made()
    sample = {"sample": case.batch_of(0)[0]} if traced else {}
    conversion = hb.convert(model, min_rows=1000, storage=storage, **sample)
    assert len(conversion.converted) == case.converted
    if traced:
        assert conversion.inputs is not None
        assert set(conversion.inputs(case.batch_of(1)[0])) == set(conversion.converted)
    return model, hb.optim.Adam(model.parameters(), lr=1e-3, untouched="exact")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.module}.{case.name}")
def test_losses_are_equal(case: Case, tmp_path: Path) -> None:
    plain = case.made()
    expected = case.train(plain, torch.optim.Adam(plain.parameters(), lr=1e-3))
    for traced in (False, True)[: 1 + case.traced]:
        losses = case.train(*convert(case, traced=traced))
        assert losses == pytest.approx(expected, rel=1e-6)
        assert expected[0] != expected[-1]
    storage = hb.Storage(host="3MB", ssd=tmp_path / "rows")
    if case.in_tiers:
        assert case.train(*convert(case, storage, traced=case.traced)) == losses
    else:  # its loss multiplies with all rows
        with pytest.raises(
            hb.TableError, match="'item_embedding'.*no gradient can go through its whole"
        ):
            case.train(*convert(case, storage, traced=case.traced))


def by_name(x: torch.Tensor) -> dict[str, Any]:
    """Columns as that library's own loop takes them."""
    return {name: x[:, i].numpy() for i, name in enumerate(["C0", "C1", "C2", "C3", "I1"])}


def test_a_penalty_on_all_rows_is_refused_by_name() -> None:
    case = CASES[0]
    model = case.part("deepfm")(l2_reg_embedding=1e-5)
    conversion = hb.convert(model, min_rows=1000)
    assert "regularization_weight[0][0][0] (of 'embedding_dict.C0')" in conversion.stale
    model.compile(hb.optim.Adam(model.parameters()), "binary_crossentropy")
    x, y = case.batch_of(0)
    with pytest.raises(hb.TableError, match="weight of 'embedding_dict.C0' before hotbed.convert"):
        model.fit(by_name(x), y.numpy(), batch_size=16, epochs=1, verbose=0)


def test_their_own_loop_trains_it() -> None:
    case = CASES[0]
    plain, (model, optimizer) = case.made(), convert(case, traced=True)
    x, y = case.batch_of(0)
    scores = []
    for each, own in ((plain, torch.optim.Adam(plain.parameters(), lr=1e-3)), (model, optimizer)):
        each.compile(own, "binary_crossentropy")
        each.fit(by_name(x), y.numpy(), batch_size=16, epochs=2, verbose=0, shuffle=False)
        scores.append(torch.from_numpy(each.predict(by_name(x), batch_size=16)))
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-6, atol=1e-6)


def scores_of(case: Case, model: Any) -> torch.Tensor:
    """Of a batch that it was not trained with: scores, or a loss where its forward takes no batch."""
    model.eval()
    given = case.batch_of(99)
    with torch.no_grad():
        found: torch.Tensor = (
            model(given[0]) if case.takes_batch else case.part("loss")(model, given)
        )
    return found


def on_ranks(rank: int, world: int, case: Case, expected: bytes) -> None:
    model = case.made()
    torch.autograd.set_detect_anomaly(False)  # of RecBole; the process stays for other tests
    sample = {"sample": case.batch_of(0)[0]} if case.traced else {}
    hb.convert(model, min_rows=1000, **sample)
    hb.distribute(model)
    optimizer = hb.optim.Adam(model.parameters(), lr=1e-3, untouched="exact")
    size = 32 // world
    case.train(model, optimizer, slice(size * rank, size * (rank + 1)))
    torch.testing.assert_close(scores_of(case, model), pickle.loads(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.process
@pytest.mark.parametrize("case", ON_RANKS, ids=lambda case: f"{case.module}.{case.name}")
def test_on_two_ranks(case: Case) -> None:
    """What one process gets of whole batches is what DistributedDataParallel gets of their halves."""
    plain = case.made()
    case.train(plain, torch.optim.Adam(plain.parameters(), lr=1e-3))
    run(2, on_ranks, case, pickle.dumps(scores_of(case, plain)))
