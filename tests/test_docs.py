"""Every code block of the README and of docs/ runs as a reader pastes it, in an empty folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
import torch.distributed as torch_dist
from devices import DEVICE, interpret_kernels
from public_names import docstring, public
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import hotbed as hb

interpret_kernels()

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
API = ROOT / "docs" / "api" / "index.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, *kinds: str) -> list[str]:
    """The code blocks of these kinds; of examples with prompts, what is typed."""
    found = [m for m in BLOCK.finditer(page.read_text(encoding="utf-8")) if m[1] in kinds]
    typed = [re.sub(r"^(>>>|\.\.\.) ?", "", m[2], flags=re.MULTILINE) for m in found]
    return [text if m[1] == "pycon" else m[2] for m, text in zip(found, typed, strict=True)]


@contextlib.contextmanager
def device_for(code: str) -> Iterator[str]:
    """What runs for a block: where there is no GPU, the interpreter of kernels stands in for it."""
    with pytest.MonkeyPatch.context() as patch:
        if '"cuda"' in code and DEVICE.type == "cpu":
            pytest.importorskip("triton", reason="Triton interprets the kernels")
            patch.setattr("hotbed.devices.KINDS", ("cpu",))
            code = code.replace('"cuda"', '"cpu"')
        yield code


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """The environment that torchrun gives the only rank of a run."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "TORCHELASTIC_USE_AGENT_STORE": True}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}.items():
            patch.setenv(name, str(value))
        yield
        if torch_dist.is_initialized():
            torch_dist.destroy_process_group()


def run(code: str, source: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    names = {"__name__": "__main__"} if names is None else names
    with device_for(code) as code, one_rank():
        exec(compile(code, source, "exec"), names)
    return names


def other_libraries(patch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """Put stand-ins in place of libraries that the tests do without. Return what TensorBoard is given."""
    patch.setitem(sys.modules, "lightning", types.SimpleNamespace(Callback=object))
    scalars: list[tuple[str, float, int]] = []
    writer = types.SimpleNamespace(
        add_scalar=lambda name, value, step: scalars.append((name, float(value), step))
    )
    board = types.SimpleNamespace(SummaryWriter=lambda folder: writer)
    patch.setitem(sys.modules, "torch.utils.tensorboard", board)
    return scalars


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


TUTORIAL = ROOT / "docs" / "tutorial.md"
"""Its blocks follow each other."""
PASTED = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    if page != TUTORIAL
    for number, code in enumerate(blocks(page, "python", "pycon"))
]
RANKS = [pasted for pasted in PASTED if "init_process_group" in str(pasted.values[0])]
EXAMPLES = {
    name: "\n".join(re.sub(r"^(>>>|\.\.\.) ?", "", line) for line in typed)
    for name, thing in public()
    if (
        typed := [li for li in docstring(name, thing).splitlines() if li.startswith((">>>", "..."))]
    )
}


@pytest.mark.parametrize("code", [pasted for pasted in PASTED if pasted not in RANKS])
def test_a_pasted_block_runs(
    code: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_libraries(monkeypatch)
    run(code, request.node.callspec.id)


def test_the_tutorial_runs_from_its_first_block_to_its_last(empty_folder: Path) -> None:
    run("\n".join(blocks(TUTORIAL, "python")), "tutorial.md")
    lines = (empty_folder / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1001 and lines[0] == "line,probability"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_api_runs_after_its_first_lines(name: str) -> None:
    (begin,) = blocks(API, "python")
    run(EXAMPLES[name], name, run(begin, "api/index.md"))


@pytest.mark.process
@pytest.mark.parametrize("code", RANKS)
def test_what_is_distributed_runs_under_torchrun(code: str, empty_folder: Path) -> None:
    Path("train.py").write_text(code, encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    arguments = ["--standalone", "--nproc-per-node", "2", str(empty_folder / "train.py")]
    done = launching.run(launching.torchrun, arguments, empty_folder / "said", environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_for_torchrun_says_so_above_it(page: Path) -> None:
    before = 0
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        if block[1] == "python" and "init_process_group" in block[2]:
            assert "torchrun" in text[before : block.start()].rsplit("\n\n", 2)[-2]
        before = block.end()


def test_the_callback_for_tensorboard_writes_each_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = other_libraries(monkeypatch)
    (code,) = (b for b in blocks(ROOT / "docs/checkpoints.md", "python") if "tensorboard" in b)
    run(code, "tensorboard")
    assert [(name, step) for name, _, step in scalars] == [("loss", n) for n in range(1, 11)]
    assert all(0 < loss < 1 for _, loss, _ in scalars)


def test_the_callback_for_lightning_saves_and_goes_on(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_libraries(monkeypatch)
    (code,) = (b for b in blocks(ROOT / "docs/checkpoints.md", "python") if "lightning" in b)
    callback = run(code, "lightning")["Checkpoints"]()

    def made() -> tuple[hb.models.DLRM, hb.optim.Adagrad]:
        model = hb.models.DLRM(["user"])
        return model, hb.optim.Adagrad(model.parameters(), lr=0.02)

    model, optimizer = made()
    batch = {"dense": torch.rand(8, 13), "user": torch.randint(0, 2**40, (8, 2))}
    trainer = types.SimpleNamespace(global_step=0, optimizers=[optimizer])
    callback.on_fit_start(trainer, model)
    for step in range(1, 2001):
        trainer.global_step = step
        if step == 700:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        callback.on_train_batch_end(trainer, model, None, batch, step)
    saved = sorted(path.name for path in (empty_folder / "lightning").iterdir())
    assert saved == ["step-000000001000", "step-000000002000"]
    again, its_optimizer = made()
    callback.on_fit_start(types.SimpleNamespace(optimizers=[its_optimizer]), again)
    rows, expected = (m.embeddings.rows("user") for m in (again, model))
    assert torch.equal(rows.ids, expected.ids) and torch.equal(rows.values, expected.values)


def test_the_example_of_the_readme_trains() -> None:
    code = blocks(README, "python")[0]
    assert 10 < sum(1 for line in code.splitlines() if line.strip()) <= 20
    names = run(code, "README.md")
    model, loss = names["model"], names["loss"]
    assert 0 < loss.item() < 0.7
    assert model.embeddings.count() > 10_000
    assert len(model.embeddings.features) == 26


def test_a_model_that_is_larger_than_memory_trains() -> None:
    names = run(blocks(README, "python")[1], "README.md")
    stats = names["model"].embeddings.stats()
    assert stats["batches_unprepared"] == 0 and stats["rows_created"] > 10_000
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


def words(page: Path) -> int:
    """Words of a page beside its code, its tables and formulas."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return sum(
        len(line.split())
        for line in text.splitlines()
        if not line.startswith(("|", "    ", "<!--"))
    )


FOR_USERS = [README, *(p for p in (ROOT / "docs").glob("*.md") if p.name != "results.md")]


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda p: p.name)
def test_a_page_for_users_is_read_in_five_minutes(page: Path) -> None:
    assert words(page) <= 1000


def test_the_page_of_errors_has_each_of_them() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    errors = {
        thing: name.replace("hotbed", "hb", 1)
        for name, thing in public()
        if isinstance(thing, type) and issubclass(thing, Exception)
    }
    assert {getattr(hb.errors, name) for name in hb.errors.__all__} <= set(errors)
    for name in errors.values():
        assert f"| `{name}` |" in page or f"| `{name.replace('.dist.', '.')}` |" in page, name


PATH = re.compile(r"`((?:csrc|src|tests|benchmarks|tools|docs|examples)/[\w/.*-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_exist(page: Path) -> None:
    for path in PATH.findall(page.read_text(encoding="utf-8")):
        beside = [*ROOT.glob(path), *ROOT.glob(path + ".*")]
        assert beside or path == "benchmarks/results/gpu/", path
