"""Trainings that were recorded give the same bits for ever, wherever their rows lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from effort import SOAK
from recorded_trainings import Training, bits_of, trainings

import hotbed as hb
from hotbed.errors import StorageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.*look-ahead is shorter now"),
]

RECORD = Path(__file__).with_name("recorded_bits.json")
BUDGETS = ("160KB", "250KB", "330KB", "400KB", "500KB")
"""Of which the first that holds the batches of a training is taken."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    found: dict[str, str] = json.loads(RECORD.read_text())
    return found


@pytest.mark.parametrize("training", list(trainings()), ids=str)
def test_the_bits_are_those_that_were_recorded(
    training: Training, recorded: dict[str, str], tmp_path: Path
) -> None:
    expected = recorded[str(training)]
    assert bits_of(training) == expected
    assert bits_in_tiers(training, look_ahead=True) == expected
    if SOAK:
        assert bits_in_tiers(training, look_ahead=False) == expected
        assert bits_in_tiers(training, look_ahead=True, ssd=tmp_path) == expected


def bits_in_tiers(training: Training, *, look_ahead: bool, ssd: Path | None = None) -> str:
    for budget in BUDGETS:
        folder = None if ssd is None else ssd / budget
        try:
            storage = hb.Storage(device=budget, host="16MB", ssd=folder)
            return bits_of(training, storage, look_ahead=look_ahead)
        except StorageError as error:
            if error.needed is None or budget == BUDGETS[-1]:
                raise
    raise AssertionError


if __name__ == "__main__":  # where new trainings have joined the others
    RECORD.write_text(json.dumps({str(t): bits_of(t) for t in trainings()}, indent=1) + "\n")
