"""Every code block of the README and of docs/ runs as it stands, smaller and elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from devices import DEVICE

import hotbed as hb

ONLY = {"rank": 0, "world_size": 1}
"""Process of a group."""

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, *kinds: str) -> list[str]:
    """The code blocks of these kinds; of examples with prompts, what is typed."""
    found = [m for m in BLOCK.finditer(page.read_text(encoding="utf-8")) if m[1] in kinds]
    typed = [re.sub(r"^(>>>|\.\.\.) ?", "", m[2], flags=re.MULTILINE) for m in found]
    return [text if m[1] == "pycon" else m[2] for m, text in zip(found, typed, strict=True)]


def smaller(code: str, folder: Path) -> str:
    """Tables and budgets that any machine has, on the device under test."""
    code = code.replace("50_000_000", "50_000").replace('GB"', '0MB"')
    code = code.replace("/nvme/hotbed", str(folder / "nvme"))
    return code.replace('"cuda"', repr(DEVICE.type))


def supposed(code: str) -> dict[str, Any]:
    """What pages leave to the reader: a loader, a loss, a model and its optimizer."""
    torch.manual_seed(0)
    model = hb.models.DLRM([hb.Table("user", dim=16), hb.Table("item", dim=16, rows=50_000)])
    batch = {
        "dense": torch.rand(8, 13),
        "user": torch.randint(0, 2**40, (8, 2)),
        "item": torch.randint(0, 50_000, (8,)),
        "label": torch.ones(8),
    }
    names = {
        "os": os,
        "alone": {"store": torch_dist.HashStore(), **ONLY},
        "torch": torch,
        "hb": hb,
        "lightning": types.SimpleNamespace(Callback=object),
        "hotbed": hb,
        **{name: getattr(hb, name) for name in hb.__all__},
        "loader": [batch] * 3,
        "batch": dict(batch),
        "label": batch["label"],
        "columns": {"agent": ["a", "b"]},
        "loss_fn": torch.nn.functional.binary_cross_entropy_with_logits,
        "model": model,
        "embeddings": model.embeddings,
        "rest": list(model.top.parameters()),
        "step": lambda *given: None,
    }
    if not re.search(r"^optimizers? =", code, re.MULTILINE):
        names["optimizer"] = hb.optim.Adagrad(model.parameters(), lr=0.02)
    return names


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a click log, where code runs."""
    monkeypatch.chdir(tmp_path)
    hb.data.write_criteo_tsv("clicks.tsv", rows=4 * 512, seed=0)
    return tmp_path


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python", "pycon")], ids=lambda p: p.name
)
def test_code_runs(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at, block in enumerate(blocks(page, "python", "pycon")):
        with monkeypatch.context() as patch:
            if '"cuda"' in block and DEVICE.type == "cpu":  # which then stands in for a GPU
                if not importlib.util.find_spec("triton"):
                    continue
                patch.setattr("hotbed.devices.KINDS", ("cpu",))
            code = smaller(block, place / str(at))
            for name in ("RANK", "LOCAL_RANK"):
                patch.setenv(name, "0")
            if "distribute(" in code and "init_process_group" not in code:
                torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), **ONLY)
            code = code.replace('init_process_group("gloo")', 'init_process_group("gloo", **alone)')
            exec(compile(code, f"{page.name}, block {at}", "exec"), supposed(code))
            if torch_dist.is_initialized():
                torch_dist.destroy_process_group()


def test_the_callback_for_lightning_saves_and_goes_on(place: Path) -> None:
    (code,) = (b for b in blocks(ROOT / "docs/checkpoints.md", "python") if "lightning" in b)
    names = supposed(code)
    exec(smaller(code, place), names)
    model, optimizer = names["model"], names["optimizer"]
    callback, trainer = (
        names["Checkpoints"](),
        types.SimpleNamespace(global_step=0, optimizers=[optimizer]),
    )
    callback.on_fit_start(trainer, model)
    for step in range(1, 2001):
        trainer.global_step = step
        if step == 700:
            model(names["batch"]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        callback.on_train_batch_end(trainer, model, None, names["batch"], step)
    made = sorted(path.name for path in (place / "nvme" / "lightning").iterdir())
    assert made == ["step-000000001000", "step-000000002000"]
    again = supposed(code)
    callback.on_fit_start(types.SimpleNamespace(optimizers=[again["optimizer"]]), again["model"])
    rows, expected = (m.embeddings.rows("user") for m in (again["model"], model))
    assert torch.equal(rows.ids, expected.ids) and torch.equal(rows.values, expected.values)


def test_the_example_of_the_readme_trains(place: Path) -> None:
    code = blocks(README, "python")[0]
    assert 10 < sum(1 for line in code.splitlines() if line.strip()) <= 20
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    model, loss = names["model"], names["loss"]
    assert 0 < loss.item() < 0.7
    assert model.embeddings.count() > 10_000
    assert len(model.embeddings.features) == 26


def test_a_model_that_is_larger_than_memory_trains(place: Path) -> None:
    code = smaller(blocks(README, "python")[1], place)
    names = supposed(code)
    exec(code, names)
    assert names["model"].embeddings.stats()["batches_unprepared"] == 0
    assert torch.isfinite(names["loss"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    typed = "\n".join(["", *blocks(page, ""), *re.findall(r"`[^`\n]+`", text)])
    for target in re.findall(r"[\n`]make ([\w-]+)", typed):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"python -m ((?:benchmarks|tools)[\w.]*)", text):
        assert importlib.util.find_spec(module), module
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), target
