"""Under `torch.compile` a lookup is one graph break, and the numbers are the same."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

# Inductor would only add a C++ compiler's time; tracing and graph breaks are what is asked here.
BACKEND = "eager"


class Model(nn.Module):
    def __init__(self, storage: hb.Storage | None = None) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(
            [hb.Table("item", 4, 20, "mean"), hb.Table("user", 4)], seed=0, storage=storage
        )
        self.dense = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x: dict[str, Any], scale: Tensor) -> Tensor:
        x = {k: v + 0 for k, v in x.items()}
        out = self.embeddings(x)
        return self.dense(torch.cat([out["item"], out["user"]], 1) * scale).sum()


def test_one_graph_break_and_the_same_numbers() -> None:
    torch.manual_seed(1)
    eager = Model()
    torch.manual_seed(1)
    graphs: list[Any] = []

    def counting(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Model()
    compiled = torch.compile(model, backend=counting)
    for seed in range(3):
        torch.manual_seed(seed)
        x = {"item": torch.randint(0, 20, (6, 3)), "user": torch.randint(-9, 9, (6,))}
        scale = torch.rand(())
        got, want = compiled(x, scale), eager(x, scale)
        assert torch.equal(got, want)
        got.backward()
        want.backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert a.grad.layout == b.grad.layout
        pair = [g.coalesce()._values() if g.is_sparse else g for g in (a.grad, b.grad)]
        torch.testing.assert_close(*pair)
    assert len(graphs) == 2, "one break: what comes before the lookup, and what comes after"
    torch._dynamo.reset()


def test_a_full_graph_is_refused() -> None:
    model = torch.compile(Model(), backend=BACKEND, fullgraph=True)
    x = {"item": torch.zeros(2, 3).long(), "user": torch.zeros(2).long()}
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(x, torch.ones(()))
    torch._dynamo.reset()


def test_an_optimizer_steps_outside_the_graph() -> None:
    unheld = hb.Embedding(
        None, 4
    )  # a table that no optimizer holds does not trouble a compiled step
    numbers = []
    for compile in (False, True):
        torch.manual_seed(1)
        model = Model()
        optimizer = hb.optim.Adam(model.parameters(), lr=0.1)

        def step(model: Model = model, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(step, backend=BACKEND) if compile else step
        losses = []
        for _ in range(3):
            x = {"item": torch.tensor([[0, 3, 3]]), "user": torch.tensor([7])}
            loss = model(x, torch.ones(()))
            loss.backward()
            run()
            losses.append(loss.item())
        numbers.append(losses)
    assert numbers[0] == numbers[1] and numbers[0][0] != numbers[0][2]
    assert len(unheld._live) == 0
    torch._dynamo.reset()


@pytest.mark.process
def test_the_compiler_is_not_imported_for_nothing() -> None:
    code = (
        "import torch, sys, hotbed as hb\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "hb.Embedding(3, 4)(torch.tensor([1])).sum().backward()\n"
        "sys.exit(0 if before or 'torch._dynamo' not in sys.modules else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("kind", ["plain", "fused", "tiers", "exact"])
def test_a_whole_step_with_its_backward(kind: str) -> None:
    """Dynamo looks into Python that the autograd engine calls; ours is not for it."""
    models, losses = [], []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = Model(hb.Storage(device="1MB", host="4MB") if kind == "tiers" else None)
        optimizer = hb.optim.Adam(
            model.parameters(),
            lr=0.1,
            fused=kind == "fused",
            untouched="exact" if kind == "exact" else "lazy",
        )

        def step(
            x: dict[str, Any], scale: Tensor, model: Any = model, of: Any = optimizer
        ) -> Tensor:
            of.zero_grad()
            loss: Tensor = model(x, scale).pow(2)
            loss.backward()
            hb.nn.clip_grad_norm_(model.parameters(), 1e6) if kind == "plain" else None
            of.step()
            return loss

        run: Any = torch.compile(step, backend=BACKEND) if compiled else step
        found = []
        for seed in range(4):
            torch.manual_seed(seed)
            x = {"item": torch.randint(0, 20, (6, 3)), "user": torch.randint(-9, 9, (6,))}
            found.append(run(x, torch.rand(())).item())
        losses.append(found)
        models.append(model)
    assert losses[0] == losses[1]
    for name in ("item", "user"):
        rows = [model.embeddings.rows(name).values for model in models]
        assert torch.equal(*rows)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["collection", "layer", "bag", "lookup"])
def test_a_trace_is_refused_as_it_would_keep_the_first_rows(kind: str, training: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = hb.EmbeddingCollection([hb.Table("item", 4, 20)])
            self.layer, self.bag = hb.Embedding(20, 4), hb.EmbeddingBag(20, 4)

        def forward(self, ids: Tensor) -> Tensor:
            if kind == "collection":
                return self.embeddings({"item": ids})["item"] + 0
            if kind == "lookup":
                return self.embeddings.lookup("item", ids) + 0
            return self.layer(ids) if kind == "layer" else self.bag(ids[:, None])

    model, ids = Traced().train(training), torch.tensor([3, 4])
    for check in (True, False):
        with pytest.raises(hb.TableError, match=r"torch.jit.trace cannot go through tables"):
            torch.jit.trace(model, (ids,), check_trace=check)
    with pytest.raises(hb.TableError, match=r"torch.jit.script cannot go through tables"):
        torch.jit.script(model)
    for mode in ("real", "fake"):
        with pytest.raises(hb.TableError, match="make_fx"):
            make_fx(model, tracing_mode=mode)(ids)
    with FakeTensorMode(), pytest.raises(hb.TableError, match="FakeTensorMode"):
        model(torch.tensor([3, 4]))
    with pytest.raises(hb.TableError):
        torch.export.export(model, (ids,), strict=False)
    assert model(ids).shape == (2, 4)
    dense: Any = torch.jit.trace(nn.Linear(4, 1), (model(ids).detach(),))
    assert dense(model(ids)).shape == (2, 1)
