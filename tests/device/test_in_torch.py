"""Tables on a device and the rest of torch: AMP, GradScaler, compile, and waits for the device."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from device.placed import moved, tables_of, to_device
from device.test_whole_tables import OPTIMIZERS, ROWS, batch_of, collection, loss_of
from devices import DEVICE
from torch import Tensor, nn

import hotbed as hb


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_chooses_the_dtype_of_vectors(dtype):
    module = to_device(collection())
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    with torch.autocast(DEVICE.type, dtype=dtype):
        vectors = module(moved(batch_of(1)))
    assert {v.dtype for v in vectors.values()} == {dtype}
    sum(v.float().sum() for v in vectors.values()).backward()
    assert module.parameter("item").grad.dtype == torch.float32
    optimizer.step()
    assert {t.place.weights().dtype for t in tables_of(module)} == {torch.float32}
    with torch.autocast(DEVICE.type, dtype=dtype):
        layer = to_device(hb.Embedding(5, 4))
        assert layer(torch.tensor([1]).to(DEVICE)).dtype == torch.float32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = collection()
        torch.manual_seed(0)
        self.top = nn.Linear(25, 1).to(DEVICE)

    def forward(self, batch):
        vectors = torch.cat(list(self.embeddings(batch).values()), 1).float()
        return self.top(vectors.to(self.top.weight.device))


@pytest.mark.parametrize("explicitly", [False, True])
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_grad_scaler_skips_steps_and_counts_none(name, explicitly):
    """The same model with tables on the CPU, where the scaler asks and waits."""
    models = [Model(), Model()]
    to_device(models[1].embeddings)
    for model in models:
        device = next(model.top.parameters()).device
        optimizer = OPTIMIZERS[name](model.parameters())
        # In the first step the scaled gradient overflows.
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127, growth_interval=2)
        for seed in range(5):
            on_device = model is models[1]
            batch = moved(batch_of(seed)) if on_device else batch_of(seed)
            loss = (model(batch).to(device) * 3.0).sum()
            scaler.scale(loss).backward()
            if explicitly:
                scaler.unscale_(optimizer)
                hb.nn.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        steps = {s["step"] if not torch.is_tensor(s.get("step")) else int(s["step"])
                 for s in optimizer.state_dict()["state"].values() if "step" in s}  # fmt: skip
        model.steps = steps
    assert models[0].steps == models[1].steps
    for a, b in zip(tables_of(models[0]), tables_of(models[1]), strict=True):
        ids = torch.arange(ROWS)
        torch.testing.assert_close(a.lookup(ids), b.lookup(ids))
    torch.testing.assert_close(models[0].top.weight.cpu(), models[1].top.weight.cpu())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_one_break_in_a_compiled_model():
    module = to_device(collection())
    dense = nn.Linear(25, 1).to(DEVICE)

    def run(batch):
        vectors = module(batch)
        return dense(
            torch.cat([vectors[f] for f in ("watched", "browsed", "user", "tag")], 1)
        ).sum()

    batch = moved(batch_of(1))
    expected = run(batch)
    compiled = torch.compile(run, backend="eager")
    found = compiled(batch)
    assert torch.equal(found, expected)
    found.backward()
    assert module.parameter("item").grad is not None


WAITING = (
    "item",
    "tolist",
    "cpu",
    "nonzero",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "unique",
)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_a_step_asks_the_device_nothing(monkeypatch, dense, fused):
    """On the CPU, which stands in for a device: no value of a tensor becomes a number."""
    module = to_device(collection())
    weight = nn.Parameter(torch.ones((), device=DEVICE))
    parameters = [*module.parameters(), *([weight] if dense else [])]
    # Of torch's own rules for the dense half, SGD asks nothing of the host either.
    rule = hb.optim.SGD if dense else hb.optim.Adam
    optimizer = rule(parameters, lr=0.01, fused=fused)
    batches = [moved(batch_of(seed)) for seed in range(5)]

    def step(batch):
        vectors = [v.values if isinstance(v, hb.Jagged) else v for v in module(batch).values()]
        vectors = [v * weight for v in vectors] if dense else vectors
        torch.autograd.backward(vectors, [torch.ones_like(v) for v in vectors])
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches[:2]:  # fused tables keep the first gradient until the step
        step(batch)
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches[2:]:
                step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    from hotbed.places.device import deferred_errors as deferred_errors

    def refuse(name):
        original = getattr(Tensor, name)

        def asked(self, *args, **kwargs):
            if allowed:
                return original(self, *args, **kwargs)
            raise AssertionError(f"Tensor.{name} in a step")

        return asked

    allowed: list[bool] = []
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launched(self, *args, **kwargs):
        allowed.append(True)
        try:
            return launch(self, *args, **kwargs)
        finally:
            allowed.pop()

    pop = deferred_errors.DeferredError.pop

    def taken(self):  # what has arrived on the host
        allowed.append(True)
        try:
            return pop(self)
        finally:
            allowed.pop()

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    monkeypatch.setattr(deferred_errors.DeferredError, "pop", taken)
    for name in WAITING:
        monkeypatch.setattr(Tensor, name, refuse(name))
    for batch in batches[2:]:
        step(batch)
    monkeypatch.undo()


def test_a_model_that_goes_takes_its_tables_along():
    module = to_device(collection())
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    loss_of(module, moved(batch_of(1))).backward()
    optimizer.step()
    loss_of(module, moved(batch_of(2))).backward()
    gone = [weakref.ref(t.place) for t in tables_of(module)]
    gc.collect()
    gc.disable()
    try:
        del module, optimizer
        assert all(ref() is None for ref in gone)
    finally:
        gc.enable()


def test_a_table_without_an_optimizer_is_complained_about():
    module = to_device(collection())
    dense = nn.Linear(2, 1).to(DEVICE)
    loss_of(module, moved(batch_of(1))).backward()
    torch.optim.SGD(dense.parameters(), lr=0.1).step()
    with pytest.raises(hb.OptimizerError, match="no optimizer holds the table"):
        module(moved(batch_of(1)))


def test_no_gradient_is_summed_that_nobody_looks_at(monkeypatch):
    from hotbed.places.device import gradients

    module = to_device(collection())
    optimizer = OPTIMIZERS["SGD"](module.parameters())
    monkeypatch.setattr(gradients, "_rows_of_terms", None)
    for seed in range(2):
        loss_of(module, moved(batch_of(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not t.has_gradient for t in tables_of(module))
