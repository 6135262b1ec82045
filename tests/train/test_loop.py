import math
import os
import signal
import threading

import pytest
import torch
from torch import nn

import hotbed as hb
from hotbed.train import (
    Callback,
    TrainingError,
    auc,
    evaluate,
    fit,
    logloss,
    scored,
    stop_on_interrupt,
)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.modes = []

    def forward(self, batch):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.layer(batch["dense"])[:, 0]


def batches(count=6, rows=8):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "dense": torch.randn(rows, 3, generator=generator),
            "label": torch.randint(0, 2, (rows,), generator=generator).float(),
        }
        for _ in range(count)
    ]


class Recorder(Callback):
    def __init__(self):
        self.events = []
        self.steps = []

    def on_start(self, model):
        self.events.append("start")

    def on_step(self, step):
        self.events.append(step.number)
        self.steps.append(step)

    def on_epoch(self, epoch):
        self.events.append(f"epoch {epoch}")

    def on_end(self):
        self.events.append("end")


def test_fit_does_what_a_plain_loop_does():
    data = [*batches(), {"dense": torch.empty(0, 3), "label": torch.empty(0)}]
    model, twin = Linear(), Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    recorder = Recorder()
    result = fit(model, data, optimizer, epochs=2, scheduler=scheduler, callbacks=[recorder])

    losses = []
    for number in range(12):
        batch = data[number % 6]
        loss = nn.functional.binary_cross_entropy_with_logits(twin(batch), batch["label"])
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(twin.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(twin.parameters(), grads, strict=True):
                parameter -= 0.5 * 0.5 ** (number // 4) * grad
    assert [float(step.loss) for step in recorder.steps] == pytest.approx(losses, rel=1e-6)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert (result.rows, result.steps, result.epochs, result.interrupted) == (96, 12, 2, False)
    assert result.seconds > 0 and result.samples_per_second == 96 / result.seconds
    assert recorder.events == ["start", *range(1, 7), "epoch 1", *range(7, 13), "epoch 2", "end"]
    assert [step.rows for step in recorder.steps] == [8 * k for k in range(1, 13)]
    assert recorder.steps[7].epoch == 2 and not recorder.steps[7].logits.requires_grad


class Until(Callback):
    """Stops a run after some steps."""

    def __init__(self, recorder, steps):
        self.recorder, self.steps = recorder, steps

    def should_stop(self):
        return len(self.recorder.steps) == self.steps


def stopped(recorder, **options):
    model = Linear()
    return fit(model, batches(), torch.optim.SGD(model.parameters(), 0.1), epochs=3, **options)


def test_a_callback_ends_a_run_after_a_step():
    recorder = Recorder()
    result = stopped(recorder, callbacks=[Until(recorder, 8), recorder])
    assert result.interrupted and (result.steps, result.epochs, result.rows) == (8, 1, 64)
    assert recorder.events[-1] == "end" and recorder.events[-2] == 8


def test_should_stop_is_taken_for_one_more_version():
    recorder = Recorder()
    with pytest.warns(DeprecationWarning, match="becomes a callback"):
        result = stopped(
            recorder, callbacks=[recorder], should_stop=lambda: len(recorder.steps) == 8
        )
    assert result.interrupted and result.steps == 8
    with pytest.raises(TypeError, match="unexpected keyword argument 'stop'"):
        stopped(recorder, stop=lambda: True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_not_stepped_on(value):
    data = batches()
    data[2]["dense"][3, 1] = value
    model = Linear()
    recorder = Recorder()
    with pytest.raises(TrainingError, match=r"Step 3, epoch 1: the loss is (nan|inf)"):
        fit(model, data, torch.optim.SGD(model.parameters(), 0.1), callbacks=[recorder])
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert recorder.events == ["start", 1, 2, "end"]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_generator_is_no_loader_of_two_epochs(ahead):
    model, recorder = Linear(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    once = (batch for batch in batches())
    loader = hb.lookahead(once, model) if ahead else once
    with pytest.raises(TrainingError, match="Epoch 2: there are no batches, as a generator"):
        fit(model, loader, optimizer, epochs=2, callbacks=[recorder])
    assert recorder.events == ["start", *range(1, 7), "epoch 1", "end"]
    assert fit(model, iter(batches()), optimizer).steps == 6
    assert fit(model, [], optimizer, epochs=2).epochs == 2


def test_evaluate_tells_scores_of_float64_apart():
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    scores = 1 + torch.arange(4, dtype=torch.float64) * 1e-9

    class Scores(nn.Module):
        def forward(self, batch):
            return scores

    found = evaluate(Scores(), [{"label": labels}])
    assert found.auc == 1 and found.logloss == logloss(scores, labels)
    scores = scores[:, None]
    assert evaluate(Scores(), [{"label": labels}])[:2] == found[:2]


def test_a_default_device_is_not_that_of_figures():
    model, data = Linear(), batches()
    found = evaluate(model, data)
    with torch.device("meta"):
        assert evaluate(model, data)[:3] == found[:3]


def test_evaluate_is_exact_and_leaves_no_trace():
    model, data = Linear(), batches()
    before = [p.clone() for p in model.parameters()]
    evaluation = evaluate(model, data)
    z = torch.cat([model(b).detach() for b in data])
    y = torch.cat([b["label"] for b in data])
    assert (evaluation.auc, evaluation.logloss) == (auc(z, y), logloss(z, y))
    assert evaluation.rows == 48 and not evaluation.interrupted
    assert set(model.modes[:6]) == {(False, False)} and model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert evaluate(model, data, should_stop=lambda: True).rows == 8
    empty = evaluate(model, [])
    assert math.isnan(empty.auc) and empty.rows == 0
    model.eval()
    assert len(list(scored(model, data, "cpu"))) == 6 and not model.training


def test_the_first_interrupt_is_asked_for_and_the_second_raised():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as interrupts:
        assert not interrupts()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_get_no_handler():
    seen = []

    def run():
        with stop_on_interrupt() as interrupts:
            seen.append(interrupts())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]


class Tables(nn.Module):
    """Vectors of one feature, beside a dense layer."""

    def __init__(self, storage=None):
        super().__init__()
        self.embeddings = hb.EmbeddingCollection([hb.Table("user", dim=2)], storage=storage)
        self.seen = []

    def forward(self, batch):
        self.seen.append(batch)
        return self.embeddings({"user": batch["user"]})["user"].sum(1)


@pytest.mark.parametrize("tiered", [False, True])
def test_batches_move_but_for_ids_of_tiers(tiered, monkeypatch):
    """Look-ahead knows these by where they lie, and the host reads them."""
    moved = []
    to = torch.Tensor.to

    def moving(self, *args, **options):
        moved.append(self)
        return to(self, *args, **options)

    model = Tables(hb.Storage(device="300KB", host="2MB") if tiered else None)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    batch = {"user": torch.tensor([1, 2, 1]), "label": torch.tensor([0.0, 1.0, 1.0])}
    monkeypatch.setattr(torch.Tensor, "to", moving)
    fit(model, [batch], optimizer, device="cpu")
    evaluate(model, [batch], device="cpu")
    assert sum(tensor is batch["label"] for tensor in moved) == 2
    assert sum(tensor is batch["user"] for tensor in moved) == (0 if tiered else 2)
    assert len(model.seen) == 2
