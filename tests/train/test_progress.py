"""The progress bar of a training with tiers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset
from train.clicks_and_buys import BCE, Towers, optimizer_of
from train.clicks_and_buys import batches as several_labels

import hotbed as hb
from hotbed.data import CriteoLog, write_criteo_tsv
from hotbed.train import Callback, Step, Task, fit
from hotbed.train.progress import ProgressBar, _samples_in, short


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.00k"),
        (1234, "1.23k"),
        (9996, "10.0k"),
        (45_678, "45.7k"),
        (789_012, "789k"),
        (999_700, "1.00M"),
        (12_345_678, "12.3M"),
        (3.2e12, "3200G"),
    ],
)
def test_counts_have_three_digits(count: float, shown: str) -> None:
    assert short(count) == shown


@pytest.mark.parametrize(
    ("ssd", "shown"), [(True, "12 rows read, 34 written"), (False, "56 rows read, 78 written")]
)
def test_what_tiers_did_is_in_the_bar(ssd: bool, shown: str) -> None:
    counted = {"hit_rate": 0.75, "queue_depth": 2.0, "rows_from_host": 56.0, "rows_to_host": 78.0}
    counted |= {"rows_from_ssd": 12.0 * ssd, "rows_to_ssd": 34.0 * ssd}
    counted |= {"wait_ms": 1500.0}
    written = io.StringIO()
    console = Console(file=written, width=200, force_terminal=True)
    bar = ProgressBar(100, 1, console, None, lambda: counted)
    bar.on_start(torch.nn.Identity())
    bar.on_step(Step(1, 1, 50, torch.tensor(0.5), torch.zeros(2), torch.tensor([0.0, 1.0])))
    bar.on_end()
    assert f"75% hits, 1.5 s waited, {shown}, 2 batches ahead\n" in written.getvalue()


def model_and_batches() -> tuple[Any, Any, list[dict[str, Any]]]:
    model = hb.models.DLRM([hb.Table("item", dim=4)], dim=4, top=(4,))
    batch = {
        "dense": torch.rand(8, 13),
        "item": torch.arange(8),
        "label": torch.tensor([0.0, 1.0] * 4),
    }
    return model, hb.optim.Adagrad(model.parameters(), lr=0.01), [batch] * 5


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("progress", [True, False])
def test_fit_draws_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    progress: bool,
    terminal: bool,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    monkeypatch.setenv("COLUMNS", "120")
    model, optimizer, batches = model_and_batches()
    seen: list[int] = []

    class Seen(Callback):
        def on_step(self, step: Step) -> None:
            seen.append(step.number)

    result = fit(model, batches, optimizer, epochs=2, callbacks=[Seen()], progress=progress)
    assert result.steps == 10 and seen == [*range(1, 11)]
    shown = capsys.readouterr()
    assert not shown.out
    if not (progress and terminal):
        assert not shown.err
        return
    for part in ("2/2", "100%", "loss 0.", "AUC ", "samples/s", "8.00 rows"):
        assert part.replace("8.00", "8") in shown.err


@pytest.mark.parametrize(
    ("first", "missing", "has_auc"),
    [("click", 0.3, True), ("click", 1.0, False), ("price", 0.3, False)],
)
def test_the_auc_of_several_tasks_is_that_of_the_first_with_its_labels(
    first: str, missing: float, has_auc: bool
) -> None:
    loss = torch.nn.functional.mse_loss if first == "price" else BCE
    tasks = [Task(first, loss=loss), Task("buy")]
    written, model = io.StringIO(), Towers(2)
    bar = ProgressBar(96, 1, Console(file=written, width=200, force_terminal=True))
    data = several_labels(missing=missing)
    fit(model, data, optimizer_of(model), tasks=tasks, callbacks=[bar])
    assert "samples/s" in written.getvalue() and ("AUC 0." in written.getvalue()) == has_auc


def test_how_many_samples_there_are_is_known_without_reading(tmp_path: Path) -> None:
    write_criteo_tsv(tmp_path / "log.tsv", 100, seed=1)
    log = CriteoLog(tmp_path / "log.tsv", 32)
    model, _, batches = model_and_batches()
    assert _samples_in(log) is None
    assert _samples_in(log.split(0.25)[0]) == 75
    assert _samples_in(hb.lookahead(DataLoader(log.split(0.25)[0], batch_size=None), model)) is None
    assert _samples_in(hb.lookahead(log.split(0.25)[1], model)) == 25
    assert _samples_in(DataLoader(TensorDataset(torch.ones(9)), batch_size=2)) == 9
    assert _samples_in(batches) == 40
    assert _samples_in(iter(batches)) is None


def test_logits_of_a_batch_against_itself_have_no_auc() -> None:
    """Two towers give (B, B) logits while they train, of which labels (B,) are no labels."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    model = hb.models.TwoTower(["user", "item"], dim=4, out=4, seed=0)
    draw = torch.Generator().manual_seed(0)
    batches: list[dict[str, torch.Tensor]] = [
        {
            "user": torch.randint(0, 9, (16,), generator=draw),
            "item": torch.randint(0, 9, (16,), generator=draw),
            "label": (torch.rand(16, generator=draw) > 0.3).float(),
        }
        for _ in range(4)
    ]
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    fit(model, batches, optimizer, callbacks=[ProgressBar(64, 1, console)])
    assert "loss" in text.getvalue() and "AUC" not in text.getvalue()
