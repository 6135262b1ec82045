"""Saved models that were damaged, mixed up or written by an enemy: an error of Hotbed's, or the model."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import torch
from attacks.damage import CHECKED, UNTOLD, contents_of
from attacks.harness import attack, seeds
from checkpoint.saved_models import DENSE, saved, with_bias

from hotbed.checkpoint import load_model
from hotbed.errors import HotbedError

MOST_MEMORY = 64 << 20
"""Bytes that the attacks may add to this process: some hundred times what the models have."""


def rows_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_hostile_saved_models(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folders = [saved(models / f"m{number}", with_bias(number)) for number in (1, 2)]
    known = [rows_of(load_model(folder)) for folder in folders]
    (models / "outside.safetensors").write_bytes((folders[1] / DENSE).read_bytes())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds(0.12, usual=20):
        with attack(seed) as chance:
            there = tmp_path / "there"
            shutil.copytree(models, there)
            first, second = (there / folder.relative_to(models) for folder in folders)
            change = chance.choice((*CHECKED, *UNTOLD))
            change(first, second, chance)
            before = contents_of(there)
            try:
                loaded = rows_of(load_model(there / "m1"))
            except HotbedError as error:
                assert len(str(error)) < 20_000
            else:
                assert change in UNTOLD or same(loaded, known[0]) or same(loaded, known[1]), change
            assert contents_of(there) == before
            # Saving beside it: of what is there nothing changes; of others nothing ever.
            saved(there / "m1", with_bias(3), step=1)
            assert load_model(there / "m1").top.layers[0].bias[0] == 3
            others = {n: data for n, data in before.items() if not n.startswith("m1/")}
            after = contents_of(there)
            assert {n: data for n, data in after.items() if not n.startswith("m1/")} == others
            shutil.rmtree(there)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) < MOST_MEMORY
