"""Steps of a DeepFM of deepctr-torch, as it is and converted: each in turn, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

import hotbed as hb
from benchmarks.measure import contest
from benchmarks.report import Report

FEATURES, DIM, BATCH = 26, 16, 4096
SMALLEST, LARGEST = 100, 200_000
SKEW = 4.0
"""Ids are rows * u ** SKEW of u uniform in [0, 1)."""
STEPS = 40


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    sizes = torch.logspace(*torch.tensor([SMALLEST, LARGEST]).log10().tolist(), FEATURES)
    rows = [int(size) for size in sizes]
    batches = [_batch(rows, number, 256 if quick else BATCH) for number in range(8)]
    sample = batches[0][0]
    contenders = [
        _Steps("torch Adam", rows, batches, torch.optim.Adam, None),
        _Steps("torch Adam, fused", rows, batches, _fused_adam, None),
    ]
    for untouched in ("exact", "lazy"):

        def adam(parameters: Any, lr: float, untouched: str = untouched) -> hb.optim.Adam:
            return hb.optim.Adam(parameters, lr=lr, untouched=untouched)

        contenders += [
            _Steps(f"converted, {untouched}", rows, batches, adam, {}),
            _Steps(f"converted with sample=, {untouched}", rows, batches, adam, {"sample": sample}),
        ]
    report = Report("converted", quick)
    timings = contest(contenders, 8 << 30, iterations=3 if quick else STEPS, progress=progress)
    plain = timings["torch Adam", "step"].median
    for (name, _), timing in timings.items():
        report.add(
            name, f"DeepFM, {FEATURES} tables of {sum(rows):,} rows x {DIM}, batch {BATCH}", timing
        )
        if name.startswith("converted"):
            report.ratios[f"torch Adam/{name}"] = plain / timing.median
    return report


def _fused_adam(parameters: Any, lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=lr, fused=True)


def _batch(rows: list[int], number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    at = torch.rand(size, FEATURES, generator=draw) ** SKEW
    ids = (at * torch.tensor(rows)).long()
    dense = torch.rand(size, 13, generator=draw)
    return torch.cat([ids.float(), dense], 1), torch.randint(
        0, 2, (size, 1), generator=draw
    ).float()


class _Steps:
    """Training steps of one model. `conversion`: arguments of `hotbed.convert`; None: it is not converted."""

    def __init__(
        self,
        name: str,
        rows: list[int],
        batches: list[tuple[torch.Tensor, torch.Tensor]],
        optimizer: Callable[..., Any],
        conversion: dict[str, Any] | None,
    ) -> None:
        self.name, self._rows, self._batches = name, rows, batches
        self._optimizer_of, self._conversion = optimizer, conversion

    def nbytes(self) -> int:
        return 12 * (DIM + 1) * sum(self._rows)

    def build(self) -> None:
        from deepctr_torch.inputs import DenseFeat, SparseFeat
        from deepctr_torch.models import DeepFM

        ids = [SparseFeat(f"C{i}", n, embedding_dim=DIM) for i, n in enumerate(self._rows)]
        columns = [*ids, *(DenseFeat(f"I{i}", 1) for i in range(13))]
        torch.manual_seed(0)
        self._model = DeepFM(columns, columns, (256, 128), l2_reg_linear=0, l2_reg_embedding=0)
        if self._conversion is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # without inputs it says that it is slower
                hb.convert(self._model, min_rows=1000, **self._conversion)
        self._optimizer = self._optimizer_of(self._model.parameters(), lr=1e-3)

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"step": self._step}

    def _step(self, number: int) -> None:
        x, y = self._batches[number % len(self._batches)]
        self._optimizer.zero_grad()
        F.binary_cross_entropy(self._model(x), y).backward()
        self._optimizer.step()

    def drop(self) -> None:
        del self._model, self._optimizer
