"""The progress bar of a training with tiers."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from hotbed.train.loop import Step
from hotbed.train.progress import ProgressBar, short


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
